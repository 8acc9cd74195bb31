"""The line that says who waits, in what, for how long, and where the others are.

A rank that stands still shows where (:mod:`smp_core.whereabouts`) with its signs of life, and adds to a count on the
boards as long as it has waited half as long as it would before it complains. Only while the count grows do keepers of
boards read everybody's signs.
Rank 0 writes the line, or the other keeper where rank 0 itself gives no sign; again when the wait is twice as long, and
so on. Nobody is ended: that is what the timeout of collectives is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from smp_core.signs import Board
from smp_core.whereabouts import Whereabouts, ranks_in_words, went_apart

_MARK = "waiting"
# Looks, one in each interval, without a new sign of life after which a rank is said to give none, and after which
# nobody waits any more if the count has not grown.
_SILENCE = 8
# Groups of ranks that are named one by one.
_NAMED = 8

ALONE = (
    "ranks that wait in different calls wait for each other: what one rank calls alone (under `if is_main_process:`, "
    "in a callback, a logger or a save that runs the model) has to be called on all"
)
HINT = "all of them have to call the same units; what some leave out belongs into units={'optional': [...]}"

Signs = dict[int, dict[str, Any]]


class StallWatch:
    """Looks for ranks that wait, in the thread of a :class:`smp_core.liveness.RankWatch`.

    Args:
        whereabouts: of this rank.
        say: writes a line to stderr.
    """

    def __init__(
        self, rank: int, world_size: int, interval: float, whereabouts: Whereabouts, say: Callable[[str], None]
    ) -> None:
        self.rank, self.world_size, self.interval = rank, world_size, interval
        self._whereabouts, self._say = whereabouts, say
        self._marks, self._still = 0, _SILENCE  # what the count was at the last look, and for how many looks
        self._said_at = 0.0  # seconds that the longest wait had when the last line was written
        self._looks = 0  # since somebody waits
        self._beats: dict[int, tuple[int, int]] = {}  # the last sign of each rank, and the look that found it

    def shown(self, boards: Sequence[Board]) -> dict[str, Any] | None:
        """Return what goes with this rank's signs of life; mark the boards if it waits for long."""
        at = self._whereabouts.look()
        waits = at is not None and at["waits"] and at["for"] >= at["after"] / 2
        if waits:  # again each time: one that is lost is made up for by the next
            for board in boards:
                board.post("add", _MARK, 1)
        return at

    def look(self, board: Board, read: Callable[[Board], Signs]) -> None:
        """Write the line if it is time. Call it on the keeper of ``board``."""
        marks = board.add(_MARK, 0)
        self._still = 0 if marks != self._marks else self._still + 1
        self._marks = marks
        if self._still >= _SILENCE:
            self._said_at, self._looks = 0.0, 0
            self._beats.clear()
            return
        signs = read(board)
        self._looks += 1
        for rank, state in signs.items():
            if self._beats.get(rank, (-1, 0))[0] != state["beats"]:
                self._beats[rank] = state["beats"], self._looks
        silent = {rank for rank, (_, since) in self._beats.items() if self._looks - since >= _SILENCE}
        unknown = {rank for rank, (_, since) in self._beats.items() if since == 1} - silent
        waiting = {rank: at for rank, state in signs.items() if (at := state.get("at")) and at["waits"]}
        late = [at["for"] for rank, at in waiting.items() if at["for"] >= at["after"] and rank not in silent]
        if not late or unknown or max(late) < 2 * self._said_at or not (self.rank == 0 or 0 in silent):
            return
        self._said_at = max(late)
        self._say(line_about(signs, silent, self._whereabouts.describe))


def line_about(signs: Signs, silent: set[int], describe: Callable[[int | None], str]) -> str:
    """Return the line: those that wait, those that are elsewhere, and where ranks that share parameters went apart.

    Args:
        signs: of all ranks; "at" is what :meth:`Whereabouts.look` returned, where a rank stands still.
        silent: ranks that give no sign of life.
    """
    waiting: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for rank, state in signs.items():
        at, step = state.get("at"), f"step {state['step'] + 1}"
        if rank in silent:
            elsewhere.setdefault("no sign of life: stopped, swapped out or lost", []).append(rank)
        elif "left" in state:
            elsewhere.setdefault("ended in good order", []).append(rank)
        elif at is None:
            elsewhere.setdefault(f"goes on, {step}", []).append(rank)
        else:
            where = f"{at['place']}, {step}, micro-batch {at['micro_batch']}"
            (waiting if at["waits"] else elsewhere).setdefault(where, []).append(rank)
            seconds[where] = max(seconds.get(where, 0.0), at["for"])
    parts = [
        f"{ranks_in_words(found)} {seconds[where]:.0f} s in {where}" for where, found in list(waiting.items())[:_NAMED]
    ]
    line = f"waiting: {'; '.join(parts)}"
    if elsewhere:
        others = [f"{ranks_in_words(found)}: {where}" for where, found in list(elsewhere.items())[:_NAMED]]
        line += f" | elsewhere: {'; '.join(others)}"
    apart = _apart({rank: state["at"] for rank, state in signs.items() if state.get("at")}, describe)
    if apart:
        return f"{line} | went apart: {apart} ({HINT})"
    return f"{line} | {ALONE}" if len(waiting) > 1 else line


def _apart(at: dict[int, dict[str, Any]], describe: Callable[[int | None], str]) -> str:
    """Say where ranks with the same peers first issued different collectives; "" if none did. One that is only behind
    has not gone apart."""
    by_peers: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, shown in at.items():
        if "recent" in shown:
            by_peers.setdefault(tuple(shown["peers"]), {})[rank] = shown["recent"]
    for sequences in by_peers.values():
        shortest = min(map(len, sequences.values()))
        if found := went_apart({rank: numbers[:shortest] for rank, numbers in sequences.items()}, describe):
            return found
    return ""
