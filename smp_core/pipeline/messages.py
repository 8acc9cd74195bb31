"""Activations to the next stage and their gradients back, between neighbours.

What arrives is told beforehand only once: with the first micro-batch of shapes that are new (and of training, or not),
each stage sends the next one shape and dtype of its activation ahead. So nothing of the user's code runs an extra time
to find them out, and batches of another shape need no preparation. Messages between two ranks have one order, on both;
where a stage sends and receives at one time it does so in one batch, because NCCL would wait for one before the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smp_core.comm.meter import CommMeter
from smp_core.mesh import SmpMesh

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_MOST_DIMS = 8


@dataclass(frozen=True)
class Format:
    """What an activation is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Format:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def encoded(self, device: torch.device) -> torch.Tensor:
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_DIMS:
            raise ValueError(
                f"pipeline stages cannot send activations {list(self.shape)} of {self.dtype}; allowed: at most "
                f"{_MOST_DIMS} dims of {', '.join(map(str, _DTYPES))}"
            )
        dims = [*self.shape, *[0] * (_MOST_DIMS - len(self.shape))]
        numbers = [len(self.shape), _DTYPES.index(self.dtype), int(self.requires_grad), *dims]
        return torch.tensor(numbers, device=device)

    @classmethod
    def decoded(cls, tensor: torch.Tensor) -> Format:
        dims, dtype, requires_grad, *shape = tensor.tolist()
        return cls(tuple(shape[:dims]), _DTYPES[dtype], bool(requires_grad))


class Messages:
    """This rank's messages to and from the stages before and behind its own."""

    def __init__(self, mesh: SmpMesh, meter: CommMeter) -> None:
        self._group, self._device, self._meter = mesh.group("pipeline"), mesh.device, meter
        column = mesh.layout.ranks(mesh.rank, "pipeline")
        self._before = column[mesh.stage - 1] if mesh.stage > 0 else None
        self._behind = column[mesh.stage + 1] if mesh.stage + 1 < len(column) else None
        self._link: Any = "inter" if mesh.topology.spans_nodes(column) else "intra"
        self._incoming: dict[Hashable, Format] = {}
        self._outgoing: dict[Hashable, Format] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._key: Hashable = None

    def begin(self, key: Hashable) -> None:
        """Begin a step whose micro-batches are all of one kind: equal keys mean equal activations."""
        self._key = key

    def exchange(
        self,
        *,
        activation: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
        next_activation: bool = False,
        gradient_of: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send and receive at one time.

        Args:
            activation: for the stage behind.
            gradient: of an activation, for the stage before.
            next_activation: whether one is awaited from the stage before.
            gradient_of: the activation whose gradient is awaited from the stage behind.

        Returns:
            (activation, gradient): what was awaited; None where there is no stage, or no gradient is wanted.
        """
        sends: list[tuple[torch.Tensor, int]] = []
        receives: list[tuple[torch.Tensor, int]] = []
        arriving = returning = None
        if activation is not None and self._behind is not None:
            self._tell(activation)
            sends.append((activation.detach().contiguous(), self._behind))
        if gradient is not None and self._before is not None:
            sends.append((gradient.contiguous(), self._before))
        if next_activation and self._before is not None:
            expected = self._ask()
            arriving = torch.empty(expected.shape, dtype=expected.dtype, device=self._device)
            receives.append((arriving, self._before))
        if gradient_of is not None and self._behind is not None and gradient_of.requires_grad:
            returning = torch.empty_like(gradient_of, memory_format=torch.contiguous_format)
            receives.append((returning, self._behind))
        self._run(sends, receives)
        if arriving is not None and self._incoming[self._key].requires_grad:
            arriving.requires_grad_()
        return arriving, returning

    def finish(self) -> None:
        """Wait until what was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tell(self, activation: torch.Tensor) -> None:
        format_, known = Format.of(activation), self._outgoing.get(self._key)
        if known is None:
            self._outgoing[self._key] = format_
            assert self._behind is not None
            self._run([(format_.encoded(self._device), self._behind)], [])
        elif known != format_:
            raise ValueError(
                f"micro-batches of equal shapes gave activations of different ones between pipeline stages: {known}, "
                f"then {format_}; a training_step that cuts its batch by what is in it is not built yet"
            )

    def _ask(self) -> Format:
        if self._key not in self._incoming:
            header = torch.zeros(3 + _MOST_DIMS, dtype=torch.int64, device=self._device)
            assert self._before is not None
            self._run([], [(header, self._before)])
            self._incoming[self._key] = Format.decoded(header)
        return self._incoming[self._key]

    def _run(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        to_send: Callable[..., Any] = dist.isend
        ops = [dist.P2POp(to_send, tensor, peer, self._group) for tensor, peer in sends]
        ops += [dist.P2POp(dist.irecv, tensor, peer, self._group) for tensor, peer in receives]
        if not ops:
            return
        told = [(peer, tensor.numel() * tensor.element_size()) for tensor, peer in sends]
        with self._meter.point_to_point("pipeline", told, self._link):
            works = dist.batch_isend_irecv(ops)
            if len(works) == len(ops):
                self._sent += [(work, tensor) for work, (tensor, _) in zip(works, sends, strict=False)]
                works = works[len(sends) :]
            for work in works:  # NCCL's is one for all, which only its stream waits for
                work.wait()
