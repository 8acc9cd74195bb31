"""All-gathers with 8-bit payloads (ZeRO++, arXiv 2306.10209, 3.1: qwZ).

Every rank encodes its shard once. All ranks, the owner included, compute with the
decoded values, so that all of them hold the same weights. Master weights are not
touched. With ``everywhere=False`` only the stage between nodes is encoded; inside a
node decoded values travel.

Whether a unit is gathered encoded at all is decided by :class:`GatherPolicy`, once per
optimizer step and together by all ranks of the partition group: nothing is asked of the
device in between.

Shape letters: P ranks of the group, M nodes, K ranks per node, N elements of one shard,
B bytes of its payload, R some of the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import prefers_messages
from smp_core.codecs import ALIGN, Codec
from smp_core.comm.deferred import finish_later
from smp_core.comm.exchange import GATHER, start_exchange
from smp_core.comm.flat import CommObject
from smp_core.comm.meter import CommMeter, LinkClass
from smp_core.torch_facts import all_gather_single

logger = logging.getLogger("smp")

Stages = tuple[dist.ProcessGroup, dist.ProcessGroup]
Layout = Sequence[tuple[str, int]]


class GatherPolicy:
    """The choice of units that are gathered compressed: none in the first steps, none
    whose weights are not finite.

    Args:
        after_steps: optimizer steps that gather exactly.
        exclude: globs over parameter names that travel exactly.
        group: the partition group; all its ranks decide together.
        steps: how many optimizer steps there have been.
    """

    def __init__(
        self,
        payload: Codec,
        *,
        after_steps: int,
        exclude: Sequence[str],
        group: dist.ProcessGroup,
        device: torch.device,
        steps: Callable[[], int],
    ) -> None:
        self.codec, self.exclude = payload, tuple(exclude)
        self._after_steps = after_steps
        self._group = group
        self._device = device
        self._steps = steps
        # Units in the order in which they were made, which numbers them alike on all
        # ranks.
        self._shards: list[tuple[str, Callable[[], Iterable[Tensor]]]] = []
        # Whether each unit's weights are finite; None: not looked at since they
        # changed.
        self._finite: list[bool] | None = None
        self.fallbacks: dict[str, int] = {}
        """Unit -> how many of its gathers were uncompressed because a weight was inf or
        nan."""

    def add_unit(self, name: str, shards: Callable[[], Iterable[Tensor]]) -> int:
        """Take part in the decision; ``shards`` gives this rank's weights. Returns the
        unit's number."""
        self._shards.append((name, shards))
        return len(self._shards) - 1

    def weights_changed(self) -> None:
        """Look at the weights again before the next gather. To be called on all
        ranks."""
        self._finite = None

    def is_encoded(self, number: int) -> bool:
        """Return whether this unit's next gather is compressed. Collective over the
        group when weights have changed."""
        # Early steps change weights by much, so their gathers stay exact.
        if self._steps() < self._after_steps:
            return False
        if self._finite is None:
            self._finite = self._look()
        if self._finite[number]:
            return True
        name = self._shards[number][0]
        # Said once for a unit, by the group's first rank.
        if name not in self.fallbacks and dist.get_rank(self._group) == 0:
            unit = f"unit {name!r}" if name else "the root unit"
            logger.warning(
                "inf or nan in weights of %s: it is gathered uncompressed", unit
            )
        self.fallbacks[name] = self.fallbacks.get(name, 0) + 1
        return False

    @torch.no_grad()
    def _look(self) -> list[bool]:
        # Phase 1: the largest magnitude of every shard. torch._foreach_norm is one
        # kernel for all of them and has no public name.
        held = []
        for _, shards in self._shards:
            held.append(
                [each for each in shards() if each.numel() and each.is_floating_point()]
            )
        every_shard = [shard for of_unit in held for shard in of_unit]
        norms = iter(torch._foreach_norm(every_shard, torch.inf) if every_shard else ())
        # Phase 2: whether all of a unit's are finite, here and on the other ranks.
        finite = []
        for of_unit in held:
            fine = torch.ones((), dtype=torch.bool, device=self._device)
            if of_unit:
                fine = (
                    torch.stack([next(norms).float() for _ in of_unit])
                    .isfinite()
                    .all()
                    .to(self._device)
                )
            finite.append(fine)
        flags = (~torch.stack(finite)).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [flag == 0 for flag in flags.tolist()]


class QuantizedAllGather(CommObject):
    """One unit's all-gather, encoded when the policy says so and exact otherwise.

    Args:
        exact: carries exact gathers, and those over another group (a secondary shard's,
            inside the node).
        group: the partition group.
        stages: (its ranks on this node, its ranks with this local rank); None: one
            stage.
        layout: names and elements of the parameters in a shard, in order.
        everywhere: whether the stage inside the node is encoded too.
        deferred: whether stages may run when the caller waits (on gloo).
    """

    def __init__(
        self,
        meter: CommMeter,
        exact: CommObject,
        policy: GatherPolicy,
        number: int,
        group: dist.ProcessGroup,
        stages: Stages | None,
        layout: Callable[[], Layout],
        *,
        everywhere: bool,
        deferred: bool = False,
    ) -> None:
        super().__init__(meter, deferred=deferred)
        self._exact = exact
        self._policy = policy
        self._number = number
        self._group = group
        self._stages = stages
        self._layout = layout
        self._everywhere = everywhere
        self._parts: tuple[list[slice], list[slice]] | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        plain: Any = self._exact
        # Secondary shards go over a smaller group, and integers have no codec.
        if (
            self.ranks_of(group) != self.ranks_of(self._group)
            or not input_tensor.is_floating_point()
        ):
            return plain(output_tensor, input_tensor, group, async_op)
        # A unit all of whose parameters are excluded has nothing to encode.
        encoded, exact = self._split(input_tensor.numel())
        if not encoded or not self._policy.is_encoded(self._number):
            return plain(output_tensor, input_tensor, group, async_op)
        own = self._encode(input_tensor, encoded, exact)
        if self._stages is None:
            finish = self._in_one_stage(output_tensor, own, encoded, exact)
        else:
            finish = self._in_two_stages(
                output_tensor, own, encoded, exact, self._stages
            )
        return finish_later(finish, self._deferred)

    def _split(self, n: int) -> tuple[list[slice], list[slice]]:
        """Return which elements of a shard are compressed and which are sent
        exactly."""
        if self._parts is None:
            found: tuple[list[slice], list[slice]] = ([], [])
            start, last = 0, -1
            # Neighbours in the shard that are sent in the same way become one slice.
            for name, size in self._layout():
                side = int(
                    any(fnmatchcase(name, pattern) for pattern in self._policy.exclude)
                )
                if side == last:
                    found[side][-1] = slice(found[side][-1].start, start + size)
                elif size:
                    found[side].append(slice(start, start + size))
                    last = side
                start += size
            if start != n:
                raise AssertionError(
                    f"a shard of {n} elements fits no layout of {start}"
                )
            self._parts = found
        return self._parts

    def _encode(
        self, shard_N: Tensor, encoded: list[slice], exact: list[slice]
    ) -> Tensor:
        """Return the codec's payload, then the bytes of what is sent exactly, padded:
        in a row of payloads each starts where scales may be read."""
        values = _join(shard_N, encoded)
        kept = _join(shard_N, exact).contiguous().view(torch.uint8)
        n_codes = self._policy.codec.size(values.numel())
        payload_B = shard_N.new_empty(
            n_codes + -(-kept.numel() // ALIGN) * ALIGN, dtype=torch.uint8
        )
        self._policy.codec.encode(values, payload_B[:n_codes])
        payload_B[n_codes : n_codes + kept.numel()] = kept
        return payload_B

    def _decode(
        self,
        payloads_RB: Tensor,
        shards_RN: Tensor,
        encoded: list[slice],
        exact: list[slice],
    ) -> None:
        """Decompress R payloads [R, B] into R shards [R, N]."""
        n = sum(part.stop - part.start for part in encoded)
        n_codes = self._policy.codec.size(n)
        # Values in one piece are decoded into place, others on the way.
        if len(encoded) == 1:
            self._policy.codec.decode(
                payloads_RB[:, :n_codes], shards_RN[:, encoded[0]]
            )
        else:
            values = shards_RN.new_empty(len(shards_RN), n)
            self._policy.codec.decode(payloads_RB[:, :n_codes], values)
            _spread(values, shards_RN, encoded)
        if exact:
            n_bytes = (
                sum(part.stop - part.start for part in exact) * shards_RN.element_size()
            )
            # A copy, because the dtype is read from rows without gaps.
            _spread(
                payloads_RB[:, n_codes : n_codes + n_bytes]
                .clone()
                .view(shards_RN.dtype),
                shards_RN,
                exact,
            )

    def _in_one_stage(
        self, output: Tensor, own_B: Tensor, encoded: list[slice], exact: list[slice]
    ) -> Callable[[], None]:
        ranks, me = self.ranks_of(self._group), dist.get_rank(self._group)
        payloads_PB = own_B.new_empty(len(ranks), own_B.numel())
        # This rank's payload lies in its own place, from where the gather sends it.
        payloads_PB[me] = own_B
        with self.meter.ring("all_gather", ranks, payloads_PB.numel()):
            work = all_gather_single(
                payloads_PB.view(-1), payloads_PB[me], group=self._group, async_op=True
            )

        def finish() -> None:
            with self.meter.ring("all_gather", ranks, 0, new_call=False):
                work.wait()
            self._decode(payloads_PB, output.view(len(ranks), -1), encoded, exact)

        return finish

    def _in_two_stages(
        self,
        output: Tensor,
        own_B: Tensor,
        encoded: list[slice],
        exact: list[slice],
        stages: Stages,
    ) -> Callable[[], None]:
        intra, inter = stages
        m, k, here, me = (
            dist.get_world_size(inter),
            dist.get_world_size(intra),
            dist.get_rank(inter),
            dist.get_rank(intra),
        )
        # The output as nodes, ranks of a node, and elements of a shard.
        output_MKN = output.view(m, k, -1)
        # Stage 1, between nodes: payloads.
        payloads_MB = own_B.new_empty(m, own_B.numel())
        payloads_MB[here] = own_B
        works = self._start(payloads_MB, inter, "inter", new_call=True)

        def finish() -> None:
            self._wait(works, "inter")
            # Stage 2, inside the node: values, or payloads here as well.
            if not self._everywhere:
                self._decode(payloads_MB, output_MKN[:, me], encoded, exact)
                self._wait(self._start(output_MKN, intra, "intra", dim=1), "intra")
                return
            payloads_KMB = payloads_MB.new_empty(k, m, payloads_MB.shape[1])
            payloads_KMB[me] = payloads_MB
            self._wait(self._start(payloads_KMB, intra, "intra"), "intra")
            # Payloads arrived by local rank; the output has one node behind another.
            for rank in range(k):
                self._decode(payloads_KMB[rank], output_MKN[:, rank], encoded, exact)

        return finish

    def _start(
        self,
        rows: Tensor,
        group: dist.ProcessGroup,
        link: Any,
        *,
        dim: int = 0,
        new_call: bool = False,
    ) -> list[dist.Work]:
        """All-gather in place: along ``dim`` of ``rows`` every rank of the group has
        filled its own place."""
        ranks, me = self.ranks_of(group), dist.get_rank(group)
        # Along dim 1 each node's piece is a gather of its own.
        pieces = [rows] if dim == 0 else list(rows)
        row_bytes = sum(piece[me].numel() * piece.element_size() for piece in pieces)
        others = [i for i in range(len(ranks)) if i != me]
        sent = [(ranks[i], row_bytes) for i in others]
        with self.meter.point_to_point("all_gather", sent, link, new_call=new_call):
            if not prefers_messages(group, rows.device):
                return [
                    all_gather_single(
                        piece.view(-1),
                        piece[me].reshape(-1),
                        group=group,
                        async_op=True,
                    )
                    for piece in pieces
                ]
            # On gloo messages go straight to their places, all receives before all
            # sends.
            sends = [(piece[me], ranks[i]) for i in others for piece in pieces]
            receives = [(piece[i], ranks[i]) for i in others for piece in pieces]
            return start_exchange(sends, receives, group, GATHER)

    def _wait(self, works: Sequence[dist.Work], link: LinkClass) -> None:
        with self.meter.point_to_point("all_gather", [], link, new_call=False):
            for work in works:
                work.wait()


def _join(shard_N: Tensor, parts: list[slice]) -> Tensor:
    if not parts:
        return shard_N[:0]
    if len(parts) == 1:
        return shard_N[parts[0]]
    return torch.cat([shard_N[part] for part in parts])


def _spread(values_RN: Tensor, shards_RN: Tensor, parts: list[slice]) -> None:
    start = 0
    for part in parts:
        size = part.stop - part.start
        shards_RN[:, part] = values_RN[:, start : start + size]
        start += size
