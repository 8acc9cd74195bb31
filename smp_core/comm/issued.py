"""IssuedCollectives: what this rank issued on its partition group since all ranks last compared, in order.

Collectives are matched by order alone. Where ranks of a partition group take different branches through units of one
shape, each takes the other's values for its own: no error, wrong numbers. So every gather and reduction of a unit is
noted by a number (unit, kind, direction), and a checksum of the numbers is compared when the accumulation window
closes. Noting one takes about a microsecond and asks nothing of a device.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from smp_core.comm.deferred import Deferred
from smp_core.comm.flat import CommObject
from smp_core.whereabouts import here, ranks_in_words, went_apart

_MICRO_BATCH_ENDED = 0
# Numbers that are kept to name the first difference; an evaluation may issue millions between two comparisons.
_KEPT = 1 << 16
_DIRECTIONS = ("forward", "backward")


class IssuedCollectives:
    """The collectives of one model on one rank.

    Args:
        peers: the ranks that issue the same.

    Attributes:
        backward_pass: returns the number of the backward pass that runs, -1 outside.
        windows: how often all ranks began anew: the number of the window that runs.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.backward_pass: Callable[[], int] = lambda: -1
        self.windows = 0
        self._names: list[tuple[str, str]] = []  # kind, unit
        self._recent = array("i")
        self._older = 0  # checksum of what is not kept any more

    def noting(self, made: CommObject, kind: str, unit: str) -> NotedCollective:
        """Return ``made``, a unit's communication object, such that its calls are noted. Every rank has to ask for the
        same units in the same order."""
        self._names.append((kind, unit))
        in_backward = 2 * len(self._names)
        # A window may reduce what it holds behind its last pass; that belongs to backward all the same.
        in_forward = in_backward - 1 if kind == "all_gather" else in_backward
        return NotedCollective(self, made, in_forward, in_backward)

    def show(self) -> None:
        """Show these collectives, from here on, to ranks that wait for this one."""
        here.recent, here.describe, here.peers = self._recent.tolist, self.describe, self.peers
        here.end_window(measured=False)

    def note(self, number: int) -> None:
        """Note one collective: the odd number of its unit and kind, or the next one in a backward pass."""
        if len(self._recent) >= _KEPT:
            self._older = zlib.crc32(self._recent, self._older)
            del self._recent[:]
        self._recent.append(number)

    def end_micro_batch(self) -> None:
        """Note that a backward pass is over."""
        self._recent.append(_MICRO_BATCH_ENDED)
        here.end_micro_batch()

    def checksum(self) -> int:
        """Return the checksum of all since the last comparison: 31 bits."""
        return zlib.crc32(self._recent, self._older) >> 1

    def forget(self) -> None:
        """Begin anew, on all ranks alike: they have compared, or what they did is dropped."""
        self._older = 0
        del self._recent[:]
        self.windows += 1

    def recent(self) -> tuple[int, list[int]]:
        """Return the checksum of what is not kept, and the numbers of what is."""
        return self._older, self._recent.tolist()

    def describe(self, number: int | None) -> str:
        """Return a noted number in words."""
        if number is None:
            return "nothing more"
        if number == _MICRO_BATCH_ENDED:
            return "the end of a micro-batch"
        kind, unit = self._names[(number - 1) // 2]
        return f"{kind} of {repr(unit) if unit else 'the root'} in {_DIRECTIONS[(number - 1) % 2]}"


class NotedCollective:
    """A communication object of FSDP2 whose calls are noted before they are made, and that tells where this rank waits.

    Args:
        in_forward, in_backward: numbers that its calls are noted by.
    """

    def __init__(self, issued: IssuedCollectives, made: CommObject, in_forward: int, in_backward: int) -> None:
        self._issued, self.made = issued, made
        self._in_forward = in_forward, functools.partial(issued.describe, in_forward)
        self._in_backward = in_backward, functools.partial(issued.describe, in_backward)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.made.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **of_reduction: Any,
    ) -> Deferred | None:
        # A step comes here a hundred times. What `here.waiting` does is written out: its calls take longer than that.
        issued = self._issued
        number, place = self._in_forward if issued.backward_pass() == -1 else self._in_backward
        issued.note(number)
        outer, here.doing = here.doing, place
        here.events += 1
        began = perf_counter()
        try:
            work: Deferred | None = self.made(output_tensor, input_tensor, group, async_op=async_op, **of_reduction)  # type: ignore[operator]
        finally:
            here.doing = outer
            if outer is None:
                here.waited += perf_counter() - began
        if work is not None:
            work.place = place  # for whoever waits for it
        return work


def first_to_differ(issued: IssuedCollectives, by_rank: dict[int, tuple[int, list[int]]]) -> str:
    """Say where the ranks of one partition group first issued something else, and which; "" if nowhere.

    Args:
        issued: of any rank, for the names of units.
        by_rank: what :meth:`IssuedCollectives.recent` returned on each.
    """
    if len({older for older, _ in by_rank.values()}) > 1:
        return f"{ranks_in_words(by_rank)}, more than {_KEPT} collectives ago"
    return went_apart({rank: numbers for rank, (_, numbers) in by_rank.items()}, issued.describe)
