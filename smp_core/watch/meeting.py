"""Whether all ranks came to the same call, before a collective that scripts make on one
rank by mistake.

`if rank == 0: model.save_pretrained(...)` is right with whole models and a hang with
sharded ones. So calls like this one meet first, on the board that has the signs of life
(smp_core/watch/signs.py): the first rank writes where it is, the last one says that all
are there, and one that is somewhere else (at another such call, at the end of its
process) says so to all. A rank that waits also looks at the next one: whether that one
lives, and whether it has begun a forward pass, the sums behind a backward pass, or
another batch of a Trainer, that it cannot end alone; after a minute also whether all
others wait in something else. Calls that only a partition group
makes together meet among its ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from smp_core.watch.signs import Board
from smp_core.watch.whereabouts import here

_END = "the end of its process"
# Signs of life of a rank's own without one of the next rank's: far more than a busy
# machine makes of it.
_SILENCE = 40
# Seconds that all others stand in other waits, after which these are for this rank.
_STANDSTILL = 60.0


class Meetings:
    """The meetings of one rank with others.

    Attributes:
        forwards: calls into models begun that need all of ``peers``
            (:func:`smp_core.watch.rank_watch.count_call`).
        batches: of a Trainer that this rank has begun, which ranks begin together.
        peers: the ranks that make forward passes together with this one.
        limit: seconds that a rank waits for others that live and do not come; None:
            forever.
        rank_0_ended: whether the process that keeps the board has ended, or is about
            to.
        rank_0_failure: the error that it had met by then; "" if there was none.
    """

    def __init__(
        self, rank: int, world_size: int, board: Board, interval: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.interval = interval
        self.forwards = 0
        self.batches = 0
        self.peers: Sequence[int] = ()
        self.limit: float | None = None
        self.rank_0_ended = False
        self.rank_0_failure = ""
        self._board = board
        self._held: dict[tuple[int, ...], int] = {}
        self._over = False
        self.add_group(range(world_size))

    def add_group(self, ranks: Sequence[int]) -> None:
        """Add a group of ranks, this one among them, that will make calls together: the
        others learn where this one is."""
        if len(ranks) > 1:
            self._held.setdefault(tuple(ranks), 0)

    def meet(
        self, place: str, ranks: Sequence[int] | None = None, limit: float | None = None
    ) -> None:
        """Wait until every rank is at ``place``. Collective over ``ranks``.

        Args:
            place: the call as a user types it, ``"model.save_pretrained(...)"``; the
                same on all ranks.
            ranks: those that make the call together, this one among them; by default
                all.
            limit: seconds to wait for the others; by default :attr:`limit`.

        Raises:
            RuntimeError: a rank is at another place, has ended, was lost or goes on
                with the training; on all ranks that wait.
        """
        group = tuple(range(self.world_size) if ranks is None else ranks)
        if self._over or len(group) == 1:
            # After `leave` this rank meets no other; in a group of one there is none to
            # meet.
            return
        self.add_group(group)
        # Meetings of a group are numbered, so that every rank means the same one.
        self._held[group] += 1
        try:
            # By the stack it would be elsewhere whenever it asks the board.
            with here.waiting(place):
                said = "" if self.rank_0_ended else self._arrive(group, place)
                said = said or self._wait(
                    group, place, self.limit if limit is None else limit
                )
        except ConnectionError:
            # The board went away with rank 0; the collective that comes next says so.
            return
        if said != "all":
            # Scripts save in `except:` what one rank alone has met.
            met = sys.exc_info()[1]
            if met is not None:
                said += (
                    f"; rank {self.rank} came there after {type(met).__name__}: {met}"
                )
            raise RuntimeError(said)

    def meet_in_all_groups(self, place: str) -> None:
        """Meet at ``place`` in every group of this rank, the smallest first: ranks of a
        group that wait for this one elsewhere learn where it is."""
        for group in sorted(self._held, key=len):
            self.meet(place, group)

    def leave(self, failure: str = "") -> None:
        """Say to those that wait, now or later, that this rank comes to no further
        meeting. Does not wait.

        Args:
            failure: the error that it has met; "" if there was none.
        """
        if self._over:
            # A second call has nothing more to say.
            return
        self._over = True
        try:
            for group in self._held if not self.rank_0_ended else ():
                self._held[group] += 1
                self._arrive(group, _end_after(failure))
        except ConnectionError:
            return  # the board is gone, and with it those that it would reach

    def _key(self, group: tuple[int, ...], number: int) -> str:
        # Mesh axes: such ranks are evenly spaced.
        return f"meeting/{group[0]}-{group[-1]}-{len(group)}/{number}"

    def _arrive(self, group: tuple[int, ...], place: str) -> str:
        """Write where this rank is. Returns the verdict, if that decides the
        meeting."""
        key = self._key(group, self._held[group])
        # The first rank's place is the one that all others are compared with.
        first, rank = self._board.ask("claim", f"{key}/first", [place, self.rank])
        # A rank at its end is named second: the remedy is about the call that waits.
        both_end = first.startswith(_END) and place.startswith(_END)
        if first != place and not both_end:
            ours, theirs = (self.rank, place), (rank, first)
            return self._settle(
                key,
                _apart(*ours, *theirs)
                if first.startswith(_END)
                else _apart(*theirs, *ours),
            )
        if self._board.ask("add", f"{key}/arrived", 1) < len(group):
            return ""
        # What is left of the meeting before is removed by the last rank of this one.
        before = self._key(group, self._held[group] - 1)  # which all ranks have left
        left = [f"{before}/{what}" for what in ("first", "arrived", "verdict")]
        self._board.ask("delete", left)
        return self._settle(key, "all")

    def _settle(self, key: str, verdict: str) -> str:
        """Note the verdict: the first one holds, for everybody."""
        return str(self._board.ask("claim", f"{key}/verdict", verdict))

    def _wait(self, group: tuple[int, ...], place: str, limit: float | None) -> str:
        key = self._key(group, self._held[group])
        # Each rank watches its neighbour only; together they watch all.
        neighbour = group[(group.index(self.rank) + 1) % len(group)]
        pause = 0.001
        before = -1
        since = 0
        begun = time.monotonic()
        while not self.rank_0_ended:
            if verdict := self._board.ask("get", f"{key}/verdict"):
                return str(verdict)
            time.sleep(pause)
            # Short pauses first: usually the others are a moment away.
            pause = min(2 * pause, self.interval / 4)
            ours, theirs = self._board.signs_of([self.rank, neighbour])
            # The neighbour makes calls that need this rank, so it will not come.
            if neighbour in self.peers and theirs["forwards"] > self.forwards:
                self._settle(
                    key,
                    _apart(
                        self.rank, place, neighbour, "the model's next forward pass"
                    ),
                )
            elif theirs["windows"] > here.windows:
                self._settle(
                    key,
                    _apart(self.rank, place, neighbour, "the end of a backward pass"),
                )
            elif theirs["batches"] > self.batches:
                self._settle(key, _apart(self.rank, place, neighbour, "the next batch"))
            # A sign of life: the neighbour goes on, and the silence begins anew.
            elif theirs["beats"] != before:
                before, since = theirs["beats"], ours["beats"]
            elif ours["beats"] - since > _SILENCE:
                lost = f"rank {neighbour} was lost: it gives no sign of life, and rank {self.rank} waits for it at "
                self._settle(key, lost + place)
            # All signs are asked for only where the neighbour stands still elsewhere.
            elif (
                time.monotonic() - begun > _STANDSTILL
                and len(group) == self.world_size
                and _stands_elsewhere(theirs, place)
            ):
                self._settle_if_all_wait(key, group, place)
            # The others live and do not come: that is an error as well.
            if limit is not None and time.monotonic() - begun > limit:
                others = ", ".join(str(rank) for rank in group if rank != self.rank)
                missing = f"not all others ({others}) have come there in {limit:g} s"
                self._settle(
                    key, f"rank {self.rank} is at {place} and {missing}: {_ALL_OF_THEM}"
                )
        # Rank 0 alone has the board; where it is one of the group, its end is the
        # verdict, which those that wait have just received.
        end = _end_after(self.rank_0_failure)
        return _apart(self.rank, place, 0, end) if 0 in group else "all"

    def _settle_if_all_wait(self, key: str, group: tuple[int, ...], place: str) -> None:
        """Note a verdict where every other rank has waited elsewhere for so long that
        only this one can be what they wait for."""
        others = [rank for rank in group if rank != self.rank]
        signs = self._board.signs_of(others)
        if all(_stands_elsewhere(sign, place) for sign in signs):
            there = signs[0]["at"]["place"]
            self._settle(key, _apart(self.rank, place, others[0], there))


_ALL_OF_THEM = (
    "every rank has to make this call, because each holds a part of the model; take it out of `if rank == 0:` and its "
    "like (is_main_process, is_global_zero; files are written by rank 0 alone)"
)


def _stands_elsewhere(sign: dict[str, Any], place: str) -> bool:
    """Return whether the rank of a sign has long waited in something else."""
    at = sign.get("at")
    if not at:
        return False
    return bool(at["waits"] and at["for"] > _STANDSTILL and at["place"] != place)


def _end_after(failure: str) -> str:
    return f"{_END}, after it failed with {failure}" if failure else _END


def _apart(rank: int, call: str, other: int, place: str) -> str:
    return f"rank {rank} is at {call} and rank {other} at {place}: {_ALL_OF_THEM}"
