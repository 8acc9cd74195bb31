"""The hop across replicas: sums over a replication group, once per unit and optimizer
step (MiCS, 2205.00119, 3.4).

A group with one rank per node and nothing to compress is one all-reduce of the library.
Otherwise the hop has stages:

    1. where the group has K > 1 ranks on a node: reduce-scatter inside the node, exact;
    2. between nodes: every rank owns one of M parts of what it holds; the others' parts
       go to their owners, the owner adds up in float32 (float64 for float64) in node
       order, and sends the sum to all;
    3. all-gather inside the node.

With a codec (bfloat16, int8, int4) what travels in stage 2 is encoded, and every rank,
the owner included, goes on with the decoded sum, so that replicas stay bit-equal. A
part that holds inf or nan cannot be encoded blockwise; sender and receiver both see
that from the payload's scales, and on CPU the part follows exactly. On accelerators its
blocks that are not finite become nan (:mod:`smp_core.comm.encoded_sum` says why).

Bytes that leave a node for n elements of e bytes that each rank of the group holds: 2
(M-1)/M x n e, and one stage sends the same for K = 1, 2 (g-1)/g x n e with g = K M
ranks otherwise. With a codec e is the codec's.

Shape letters: K ranks of the group on this node, M nodes of the group, S elements of
one owner's part.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smp_core.codecs import Codec
from smp_core.comm.background import Background, Pending
from smp_core.comm.encoded_sum import sum_at_owners, wide_copy
from smp_core.comm.exchange import HOP, all_to_all, exchange, gather_rows, sum_rows
from smp_core.comm.flat import CommObject, FlatAllReduce
from smp_core.comm.meter import CommMeter, LinkClass
from smp_core.torch_facts import streams


class ReplicaHop(CommObject):
    """Sums flat tensors over one group, in place and behind the caller.

    Args:
        group: the ranks whose tensors are added up.
        stages: (its ranks on this node, its ranks with this place on their nodes);
            None: one stage.
        codec: payload between nodes; None: as it is.
        error_feedback: whether what a codec rounded off is added to the next sum sent
            under the same key.
    """

    def __init__(
        self,
        meter: CommMeter,
        group: dist.ProcessGroup,
        stages: tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
        background: Background,
        codec: Codec | None = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(meter)
        self.group = group
        self.stages = stages
        self.codec = codec
        self.between = group if stages is None else stages[1]
        self._inside = None if stages is None else stages[0]
        self._background = background
        self._error_feedback = error_feedback and codec is not None
        self.residuals: dict[str, tuple[Tensor, Tensor]] = {}
        """Per key: what was rounded off on the way to owners [M, S], and by the owner
        [S]."""
        self.fallbacks: Tensor | int = 0
        """Parts that held inf or nan; on CPU they were sent exactly. On an accelerator
        a 0-d tensor."""
        self._all_reduce = FlatAllReduce(meter)

    def __call__(self, flat: Tensor, key: str | None = None) -> Pending | None:
        """Start summing ``flat`` in place; it is complete after ``wait``. None: there
        are no other ranks to add up with.

        Args:
            key: names the tensor among those of one step, for error feedback; None:
                none.
        """
        if dist.get_world_size(self.group) == 1 or not flat.numel():
            return None
        # One all-reduce does it; on CPU the library has a thread of its own for it.
        if self.codec is None and self.stages is None:
            if not streams.run_behind(flat.device):
                return self._all_reduce(flat, self.group, async_op=True)

            def all_reduce() -> None:
                self._all_reduce(flat, self.group)

            # On a stream of its own, where events see how long it takes.
            return self._background.submit(all_reduce)
        return self._background.submit(lambda: self._in_stages(flat, key))

    def connect(self, dtype: torch.dtype) -> None:
        """Send once, small and large, what sums of ``dtype`` will send, while all ranks
        are here (:mod:`smp_core.cluster.mesh` says why). Collective.

        Nothing else: on eight H100 NCCL took 3.3 GB a rank for its first all-to-all
        (NVIDIA/nccl#1685), which sums in float32 do not need.
        """
        device = self._background.device
        # Both stages, with the collectives that each of them will use.
        for group in (
            [self.between] if self._inside is None else [self._inside, self.between]
        ):
            ranks = dist.get_world_size(group)
            # Small and large messages take different ways through NCCL.
            for size in (
                (1, 2**22 // ranks)
                if ranks > 1 and streams.run_behind(device)
                else (1,)
            ):
                rows_PN = torch.zeros(ranks, size, dtype=dtype, device=device)
                if self.codec is not None and group is self.between:
                    all_to_all(torch.empty_like(rows_PN), rows_PN, group, HOP)
                else:
                    sum_rows(rows_PN[dist.get_rank(group)], rows_PN, group, HOP)
                gather_rows(rows_PN, group, HOP)

    # The same sum in three steps, for callers that update only their own part in
    # between (optimizer_shard="world").

    def own_part(self, n: int) -> tuple[int, int]:
        """Return where this rank's part of ``n`` elements starts, and how long a part
        is: one for each rank of the group. The last parts may reach beyond ``n``."""
        k, m = self._counts()
        # Ranks of a node hold neighbouring stretches, as stage 1 leaves them.
        inside = 0 if self._inside is None else dist.get_rank(self._inside)
        size = -(-n // (k * m))
        return (inside * m + dist.get_rank(self.between)) * size, size

    def scatter(self, flat: Tensor, part: Tensor, key: str | None = None) -> Pending:
        """Start summing ``flat`` [n] into ``part``, this rank's own; ``flat`` is used
        up."""

        # The same two stages as a sum, without the way back.
        def run() -> None:
            _, mine_MS = self._sum_to_columns(flat)
            self._sum_to_owners(mine_MS, key)
            part.copy_(mine_MS[dist.get_rank(self.between)])

        return self._background.submit(run)

    def gather(self, part: Tensor, n: int) -> Tensor:
        """Return every rank's part, put together: [n]."""
        k, m = self._counts()
        # The part in its place among all, then gathered between nodes and inside.
        rows_KMS = part.new_empty(k, m, part.numel())
        mine_MS = rows_KMS[0 if self._inside is None else dist.get_rank(self._inside)]
        mine_MS[dist.get_rank(self.between)] = part
        with self._counted(
            self.between, part, "inter", new_call=True, kind="all_gather"
        ):
            gather_rows(mine_MS, self.between, HOP)
        if self._inside is not None:
            with self._counted(self._inside, mine_MS, "intra", kind="all_gather"):
                gather_rows(rows_KMS.view(k, -1), self._inside, HOP)
        return rows_KMS.view(-1)[:n]

    def _counts(self) -> tuple[int, int]:
        return 1 if self._inside is None else dist.get_world_size(
            self._inside
        ), dist.get_world_size(self.between)

    def _in_stages(self, flat: Tensor, key: str | None) -> None:
        # Stages 1 and 2: sums inside the node, and at owners between nodes.
        work, mine_MS = self._sum_to_columns(flat)
        sums_MS, residual = self._sum_to_owners(mine_MS, key)
        # Back from owners: as numbers, or encoded once more.
        if self.codec is None:
            with self._counted(self.between, mine_MS[0], "inter"):
                gather_rows(mine_MS, self.between, HOP)
        else:
            self._from_owners(sums_MS, residual)
            mine_MS.copy_(sums_MS)
        # Stage 3: inside the node every rank gets all columns.
        if self._inside is not None:
            rows_KN = work.view(dist.get_world_size(self._inside), -1)
            with self._counted(self._inside, rows_KN[0], "intra"):
                gather_rows(rows_KN, self._inside, HOP)
        if work is not flat:
            flat.copy_(work[: flat.numel()])

    def _sum_to_columns(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``flat`` padded to equal parts, and the view of it that is this rank's
        column [M, S], summed over the node."""
        # Padded to one equal part for every rank of the group.
        k, m = self._counts()
        short = -flat.numel() % (k * m)
        work = F.pad(flat, (0, short)) if short else flat
        rows_KN = work.view(k, -1)
        mine = (
            rows_KN[0]
            if self._inside is None
            else self._sum_inside(rows_KN, self._inside)
        )
        return work, mine.view(m, -1)

    def _sum_inside(self, rows_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
        mine = rows_KN[dist.get_rank(group)]
        with self._counted(group, rows_KN[0], "intra", new_call=True):
            sum_rows(mine, rows_KN, group, HOP)
        return mine

    def _sum_to_owners(
        self, mine_MS: Tensor, key: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum over nodes into ``mine_MS[me]``. Returns the sums in the dtype they were
        taken in, and what the owner rounded off the last time it sent one."""
        me = dist.get_rank(self.between)
        new_call = self._inside is None
        if self.codec is None:
            with self._counted(self.between, mine_MS[0], "inter", new_call=new_call):
                sum_rows(mine_MS[me], mine_MS, self.between, HOP)
            return mine_MS, None
        # With a codec sums are taken in float32 or float64, and encoded only to be
        # sent.
        sums_MS = wide_copy(mine_MS)
        to_owners, from_owner = self._residuals_of(key, sums_MS)
        self.fallbacks = self.fallbacks + sum_at_owners(
            sums_MS,
            self.codec,
            self.between,
            self.meter,
            kind="all_reduce",
            tag=HOP,
            residual_MS=to_owners,
            new_call=new_call,
        )
        mine_MS[me] = sums_MS[me]
        return sums_MS, from_owner

    def _residuals_of(
        self, key: str | None, sums_MS: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self._error_feedback or key is None:
            return None, None
        kept = self.residuals.get(key)
        # Remainders of another layout of the sum are no remainders of this one.
        if kept is None or kept[0].shape != sums_MS.shape:
            kept = self.residuals[key] = (
                torch.zeros_like(sums_MS),
                torch.zeros_like(sums_MS[0]),
            )
        return kept

    def _from_owners(self, sums_MS: Tensor, residual: Tensor | None) -> None:
        codec, me, (m, s) = self.codec, dist.get_rank(self.between), sums_MS.shape
        assert codec is not None
        # The owner encodes the sum; itself it goes on with the decoded one, as all do.
        payloads = sums_MS.new_empty((m, codec.size(s)), dtype=torch.uint8)
        codec.encode(sums_MS[me], payloads[me], residual)
        with self._counted(self.between, payloads[0], "inter"):
            gather_rows(payloads, self.between, HOP)
        # The host does not wait: what is not finite arrives as nan.
        if streams.run_behind(payloads.device):
            self.fallbacks = self.fallbacks + (~codec.finite_in(payloads[me], s)).sum()
            codec.decode(payloads, sums_MS)
            return
        # Every rank holds all payloads, so all agree about which owners send again.
        refused = [
            i
            for i, finite in enumerate(codec.finite_in(payloads, s).tolist())
            if not finite
        ]
        if refused:
            # What an owner cannot encode it sends as it is.
            others = [i for i in range(m) if i != me]
            sends = dict.fromkeys(others, sums_MS[me]) if me in refused else {}
            self._send_exactly(sends, {i: sums_MS[i] for i in refused if i != me})
            for i in range(m):
                if i not in refused:
                    codec.decode(payloads[i], sums_MS[i])
        else:
            codec.decode(payloads, sums_MS)

    def _send_exactly(
        self, sends: dict[int, Tensor], receives: dict[int, Tensor]
    ) -> None:
        """Exchange uncompressed parts between nodes, by place in the group between
        nodes, and count them as fallbacks."""
        self.fallbacks += len(sends)
        ranks = self.ranks_of(self.between)
        n_bytes = [(ranks[i], part.nbytes) for i, part in sends.items()]
        sent = [(part, ranks[i]) for i, part in sends.items()]
        received = [(part, ranks[i]) for i, part in receives.items()]
        with self.meter.point_to_point("all_reduce", n_bytes, "inter", new_call=False):
            exchange(sent, received, self.between, HOP)

    def _counted(
        self,
        group: dist.ProcessGroup,
        row: Tensor,
        link: LinkClass,
        *,
        new_call: bool = False,
        kind: str = "all_reduce",
    ) -> AbstractContextManager[None]:
        """Count one row to each other rank of ``group``."""
        row_bytes = row.nbytes
        sends = [
            (rank, row_bytes)
            for rank in self.ranks_of(group)
            if rank != self.meter.rank
        ]
        return self.meter.point_to_point(kind, sends, link, new_call=new_call)
