"""Which unit and ranks differ where a device has stopped at its own check that replicas
did the same, from what their hosts issued in the last windows. The device itself
answers nothing any more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from smp_core.watch.signs import Board, attempt

# Intervals that a rank waits for what others tell of windows.
_TELLING = 8


class Compared(Protocol):
    """A window whose comparison only the device knows."""

    def told(self) -> Sequence[Any]:
        """Return this rank's record of it, as JSON."""

    def summary(self) -> Sequence[int]:
        """Return the same in a few numbers."""

    def sides(
        self, summaries: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Sequence[int]]:
        """Return the ranks with equal records, by the first of them, from the summaries
        of some."""

    def ranks(self) -> Iterable[int]:
        """Return those to compare with."""

    def difference(self, by_rank: Mapping[int, Sequence[Any]]) -> str:
        """Return in words where the records of ranks differ; "" where nowhere."""


class ComparedWindows:
    """Comparison of the ranks' records of the windows that their devices compared last.

    Args:
        rank: this one.
        interval: seconds between its signs of life.
        windows: its last ones, by their number, which is the same on all ranks.
    """

    def __init__(
        self, rank: int, interval: float, windows: Mapping[int, Compared]
    ) -> None:
        self.rank = rank
        self.interval = interval
        self.windows = windows
        self._shown_in: int | None = None  # the run

    def show(self, boards: Sequence[Board], run: int) -> None:
        """Put this rank's records on the boards, once in a run: all windows in short
        under one key, each whole under its own."""
        if self._shown_in == run:
            return
        self._shown_in = run
        key, windows = f"windows/{run}/{self.rank}", self.windows.items()
        # The whole windows first: a rank that reads the summary may ask for one at
        # once.
        for board in boards:
            for number, window in windows:
                attempt(board.ask, "set", f"{key}/{number}", window.told())
            attempt(
                board.ask,
                "set",
                key,
                {str(number): window.summary() for number, window in windows},
            )

    def difference(self, boards: Sequence[Board], run: int) -> str:
        """Return where ranks differ, in words, and cannot say more; "" if those who say
        something within some intervals say the same, or nothing was compared.

        Two that differ are enough: torch's watchdog over NCCL ends processes whose
        device has stopped, this one too.
        """
        self.show(boards, run)
        # Ranks of other stages or layers compare with others.
        ranks = sorted(
            {rank for window in self.windows.values() for rank in window.ranks()}
        )
        found = ""
        deadline = time.monotonic() + _TELLING * self.interval
        pause = self.interval / 50
        while ranks:
            summaries = _values_of(boards, [f"windows/{run}/{rank}" for rank in ranks])
            known = {
                rank: each
                for rank, each in zip(ranks, summaries, strict=False)
                if each is not None
            }
            # Lazily, so that one difference ends the search.
            differs = (
                _difference(boards, run, number, window, known)
                for number, window in self.windows.items()
            )
            if first := next(filter(None, differs), ""):
                # Others, if they live, are heard soon, and say which side is the larger
                # one.
                deadline = (
                    deadline
                    if found
                    else min(deadline, time.monotonic() + self.interval / 10)
                )
                found = first
            # All ranks were heard, or the time is over.
            if len(known) == len(ranks) or time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, self.interval)
        return found


def _difference(
    boards: Sequence[Board],
    run: int,
    number: int,
    window: Compared,
    summaries: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return where ranks differ in a window, in words; "" where nowhere. One rank is
    asked for those like it."""
    of_window = {
        rank: each[str(number)]
        for rank, each in summaries.items()
        if str(number) in each
    }
    sides = window.sides(of_window)
    # Ranks with equal summaries say the same, so one of each side is read whole.
    whole = _values_of(boards, [f"windows/{run}/{asked}/{number}" for asked in sides])
    told = dict(zip(sides, whole, strict=False))
    by_rank = {
        rank: told[asked]
        for asked, alike in sides.items()
        if told.get(asked)
        for rank in alike
    }
    return window.difference(by_rank) if len(sides) > 1 else ""


def _values_of(boards: Sequence[Board], keys: list[str]) -> list[Any]:
    # The first board that answers; the other one has the same.
    return next(
        (found for board in boards if (found := attempt(board.ask, "values", keys))), []
    )
