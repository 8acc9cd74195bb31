"""IssuedCollectives: what this rank issued on its partition group since all ranks last
compared, in order.

Collectives are matched by order alone. Where ranks of a partition group take different
branches through units of one shape, each takes the other's values for its own: no
error, wrong numbers. So every gather and reduction of a unit is noted by a number
(unit, kind, direction), and a checksum of the numbers is compared when the accumulation
window closes. Noting one takes about a microsecond and asks nothing of a device.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_core.comm.deferred import Deferred
from smp_core.comm.flat import CommObject
from smp_core.comm.secondary import SecondaryGather
from smp_core.watch import here, ranks_in_words, went_apart

_MICRO_BATCH_ENDED = 0
# Numbers that are kept to name the first difference; an evaluation may issue millions
# between two comparisons.
_KEPT = 1 << 16
_DIRECTIONS = ("forward", "backward")


class IssuedCollectives:
    """The collectives of one model on one rank.

    Args:
        peers: the ranks that issue the same.

    Attributes:
        backward_pass: returns the number of the backward pass that runs, -1 outside.
        windows: how often all ranks began anew: the number of the window that runs.
        numbers: of the collectives issued, in order: the odd number of a unit and kind,
            the next one in a backward pass, and 0 at the end of a micro-batch. The same
            array at all times.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.backward_pass: Callable[[], int] = lambda: -1
        self.windows = 0
        self._names: list[tuple[str, str]] = []  # kind, unit
        self.numbers = array("i")
        self._older = 0  # checksum of what is not kept any more

    def noting(
        self, made: CommObject | SecondaryGather, kind: str, unit: str
    ) -> NotedCollective:
        """Return ``made``, a unit's communication object, such that its calls are
        noted. Every rank has to ask for the same units in the same order."""
        # Positions in this list number kinds and units alike on all ranks.
        self._names.append((kind, unit))
        # A window may reduce what it holds behind its last pass; that belongs to
        # backward all the same.
        return NotedCollective(
            self, made, 2 * len(self._names) - 1, only_backward=kind != "all_gather"
        )

    def show(self) -> None:
        """Show these collectives, from here on, to ranks that wait for this one."""
        here.recent, here.describe, here.peers = (
            self.numbers.tolist,
            self.describe,
            self.peers,
        )
        here.end_window(measured=False)

    def drop_details(self) -> None:
        """Keep nothing but the checksum of what was issued so far."""
        self._older = zlib.crc32(self.numbers, self._older)
        del self.numbers[:]

    def end_micro_batch(self) -> None:
        """Note that a backward pass is over."""
        self.numbers.append(_MICRO_BATCH_ENDED)
        here.end_micro_batch()

    def checksum(self) -> int:
        """Return the checksum of all since the last comparison: 31 bits."""
        return zlib.crc32(self.numbers, self._older) >> 1

    def forget(self) -> None:
        """Begin anew, on all ranks alike: they have compared, or what they did is
        dropped."""
        self._older = 0
        del self.numbers[:]
        self.windows += 1

    def recent(self) -> tuple[int, array[int]]:
        """Return the checksum of what is not kept, and the numbers of what is: a
        copy."""
        return self._older, self.numbers[:]

    def describe(self, number: int | None) -> str:
        """Return a noted number in words."""
        if number is None:
            return "nothing more"
        if number == _MICRO_BATCH_ENDED:
            return "the end of a micro-batch"
        kind, unit = self._names[(number - 1) // 2]
        return f"{kind} of {repr(unit) if unit else 'the root'} in {_DIRECTIONS[(number - 1) % 2]}"


class NotedCollective:
    """A unit's collective of one kind, noted before it is made. Called, it says in
    words what this rank waits for.

    Args:
        number: that its calls in a forward pass are noted by; those in a backward pass
            by the next one.
        only_backward: note calls that come behind the last pass as part of it.
    """

    __slots__ = (
        "_call",
        "_issued",
        "_number",
        "_only_backward",
        "_recent",
        "_under_way",
        "made",
    )

    def __init__(
        self,
        issued: IssuedCollectives,
        made: CommObject | SecondaryGather,
        number: int,
        only_backward: bool,
    ) -> None:
        self.made = made
        self._call: Callable[..., Any] = made.__call__  # type: ignore[operator,union-attr]
        self._issued, self._recent = issued, issued.numbers
        self._number = number
        self._only_backward = only_backward
        self._under_way = number

    def for_fsdp2(self) -> Any:
        """Return what FSDP2 takes for a communication object. It is a function, as is
        what that calls: a call of an object with a ``__call__`` takes Python longer
        than all notes do."""
        issue = functools.partial(NotedCollective.issue, self)
        issue.allocate = self.made.allocate  # type: ignore[attr-defined]
        return issue

    def __call__(self) -> str:
        """Return the collective that was issued last, in words."""
        return self._issued.describe(self._under_way)

    def issue(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> Deferred | None:
        """Note and make the collective; a gather has no ``op``."""
        # A step comes here a hundred times. What `here.waiting` does is written out:
        # its calls take longer than that.
        in_backward = self._only_backward or self._issued.backward_pass() != -1
        self._under_way = number = self._number + in_backward
        recent = self._recent
        # Beyond so many only their checksum is kept.
        if len(recent) >= _KEPT:
            self._issued.drop_details()
        recent.append(number)
        # Ranks that wait for this one are told what it is doing.
        outer, here.doing = here.doing, self
        here.events += 1
        began = perf_counter()
        try:
            if op is None:
                work = self._call(output_tensor, input_tensor, group, async_op)
            else:
                work = self._call(output_tensor, input_tensor, group, op, async_op)
        finally:
            here.doing = outer
            if outer is None:
                here.waited += perf_counter() - began
        if work is not None:
            work.place = self  # for whoever waits for it
        return work


def first_to_differ(
    issued: IssuedCollectives, by_rank: Mapping[int, tuple[int, Sequence[int]]]
) -> str:
    """Say where the ranks of one partition group first issued something else, and
    which; "" if nowhere.

    Args:
        issued: of any rank, for the names of units.
        by_rank: what :meth:`IssuedCollectives.recent` returned on each.
    """
    # What is not kept any more differs already: there is no first one to name.
    if len({older for older, _ in by_rank.values()}) > 1:
        return f"{ranks_in_words(by_rank)}, more than {_KEPT} collectives ago"
    return went_apart(
        {rank: numbers for rank, (_, numbers) in by_rank.items()}, issued.describe
    )
