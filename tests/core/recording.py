"""An independent count of what ranks send: every call of a process group, with its
arguments.

Nothing of `smp_core` takes part. The methods of `torch.distributed.ProcessGroup` are
replaced for the time of a `with` block, below torch.distributed's functions and whoever
calls them, and bytes are worked out from the tensors alone. A collective of the library
counts as the ring that gloo and NCCL run for large messages: every rank sends to its
right neighbour (g - 1) / g of the full tensor, twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

UNCOUNTED = ("gather", "scatter", "reduce", "monitored_barrier", "recv_anysource")


@dataclass(frozen=True)
class Call:
    """One call on one rank: ``kind`` of call, global ``ranks`` of the group,
    ``n_bytes`` of the full tensor (of the message for a send), ``to`` the global rank a
    message goes to and ``tag`` its tag."""

    kind: str
    ranks: tuple[int, ...]
    n_bytes: int
    dtype: str
    to: int | None = None
    tag: int | None = None

    def sent(self, me: int) -> list[tuple[int, float]]:
        """(destination, bytes) of what rank ``me`` sends."""
        g = len(self.ranks)
        if self.kind == "send":
            assert self.to is not None
            return [(self.to, self.n_bytes)]
        if self.kind == "all_to_all":
            return [(rank, self.n_bytes / g) for rank in self.ranks if rank != me]
        if self.kind == "barrier" or g == 1:
            return []
        factor = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[self.kind]
        return [
            (
                self.ranks[(self.ranks.index(me) + 1) % g],
                factor * self.n_bytes * (g - 1) / g,
            )
        ]


def bytes_of(tensors: torch.Tensor | Iterable[Any]) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(bytes_of(each) for each in tensors)


def first_dtype(tensors: Any) -> str:
    while not isinstance(tensors, torch.Tensor):
        tensors = tensors[0]
    return str(tensors.dtype).removeprefix("torch.")


# method: (kind, which argument is the full tensor)
METHODS = {
    "send": ("send", 0),
    "allreduce": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
}


class CallRecorder:
    """``with CallRecorder() as recorder: ...`` fills ``recorder.calls`` with what this
    rank asked of any group."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> CallRecorder:
        for method, (kind, argument) in METHODS.items():
            if method in vars(dist.ProcessGroup):
                self._replace(method, self._counting(method, kind, argument))
        for method in list(vars(dist.ProcessGroup)):
            if (
                method.endswith("_coalesced") and method not in METHODS
            ) or method in UNCOUNTED:
                self._replace(method, self._refusing(method))
        return self

    def __exit__(self, *_: object) -> None:
        for method, original in self._originals.items():
            setattr(dist.ProcessGroup, method, original)

    def _replace(self, method: str, replacement: Callable[..., Any]) -> None:
        # From the class's own dictionary: what getattr gives would lose its binding to
        # instances when set again.
        self._originals[method] = vars(dist.ProcessGroup)[method]
        setattr(dist.ProcessGroup, method, replacement)

    def _counting(self, method: str, kind: str, argument: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            to, tag = (ranks[args[1]], args[2]) if kind == "send" else (None, None)
            self.calls.append(
                Call(
                    kind,
                    ranks,
                    bytes_of(args[argument]),
                    first_dtype(args[argument]),
                    to,
                    tag,
                )
            )
            return original(group, *args, **kwargs)

        return call

    def _refusing(self, method: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise AssertionError(
                f"ProcessGroup.{method} is not counted by this recorder"
            )

        return call


def bytes_by_link(
    calls_of_ranks: Sequence[Sequence[Call]], ranks_per_node: int
) -> list[dict[str, float]]:
    """Per node: bytes its ranks send to ranks of other nodes ("inter") and of their own
    ("intra")."""
    nodes = [
        {"inter": 0.0, "intra": 0.0}
        for _ in range(len(calls_of_ranks) // ranks_per_node)
    ]
    for me, calls in enumerate(calls_of_ranks):
        for call in calls:
            for destination, n_bytes in call.sent(me):
                link = (
                    "intra"
                    if destination // ranks_per_node == me // ranks_per_node
                    else "inter"
                )
                nodes[me // ranks_per_node][link] += n_bytes
    return nodes
