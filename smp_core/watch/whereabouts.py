"""Where this rank is, and the line about ranks that wait: in what, for how long, and
where the others are.

Code that communicates notes it in :data:`here`; the thread that gives signs of life
(:mod:`smp_core.watch.rank_watch`) looks whether anything has happened since it last
looked, and reads the main thread's stack (``sys._current_frames``, the only way to that
of another thread) only where nothing has.

A rank that stands still shows where with its signs of life, and adds to a count on the
boards as long as it has waited half as long as it would before it complains. Only while
the count grows do keepers of boards read the signs of all. Rank 0 writes the line, or
the other keeper where rank 0 itself gives no sign; again when the wait is twice as
long, and so on. No rank is ended: that is what the timeout of collectives is for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch comes with it, and `smp report` does without
    from smp_core.watch.compared_windows import Compared
    from smp_core.watch.signs import Board, Sign

# Parts of file names of code that is not the user's.
_LIBRARIES = (
    *("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen"),
    *(
        os.path.join(os.sep, name, "")
        for name in ("smp_core", "lightning_smp", "accelerate_smp")
    ),
)
# Parts of file names, and what a rank does there that is not in user code. The
# innermost frame decides first.
_ACTIVITIES = {
    os.path.join("torch", "utils", "data", ""): "data loading",
    os.path.join("smp_core", "checkpoint", ""): "a checkpoint",
}
_COMMUNICATION = (
    os.path.join("torch", "distributed", "distributed_c10d"),
    os.path.join("torch", "distributed", "_functional_collectives"),
    os.path.join("smp_core", "comm", ""),
    os.path.join("smp_core", "codecs", ""),
)
_MARK = "waiting"
# Looks, one in each interval, without a new sign of life after which a rank is said to
# give none, and after which no rank waits any more if the count has not grown.
_SILENCE = 8
# Groups of ranks that are named one by one.
# More lines would not be read; the counts still tell how many there are.
_NAMED = 8

ALONE = (
    "ranks that wait in different calls wait for each other: what one rank calls alone (under `if is_main_process:`, "
    "in a callback, a logger or a save that runs the model) has to be called on all"
)
HINT = "all of them have to call the same units; what some leave out belongs into units={'optional': [...]}"

Signs = dict[int, "Sign"]
# Numbers of collectives that a rank which waits shows to the others, to find where they
# went apart.
_SHOWN = 2048
# Windows that are kept: a device stops in one while its host is in the next.
_KEPT_WINDOWS = 8


class Whereabouts:
    """The place of this process: what it does, and since when.

    Attributes:
        least: seconds of waiting below which no line is written.
        recent: returns what was issued since all ranks last compared, as
            :mod:`smp_core.comm.traffic` keeps it.
        describe: says in words what one of those numbers means.
        peers: the ranks that issue the same.
        micro_batch: of the present window, from 1.
        events: how often something was begun or ended that is noted.
        waited: seconds in all that the host waited.
        doing: says what this rank waits for; None: for nothing.
        windows: of gradients, begun to be closed while this rank is watched; it cannot
            end one without the others.
        window_began: when the first pass of the present window did; None: it has not.
        compared: the last windows that devices compared, by their number, which is the
            same on all ranks.
    """

    def __init__(self) -> None:
        self.least = 5.0
        self.recent: Callable[[], list[int]] = list
        self.describe: Callable[[int | None], str] = str
        self.peers: tuple[int, ...] = ()
        self.micro_batch = 1
        self.events = 0
        self.windows = 0
        self.waited = 0.0
        # Of the last windows, for :meth:`patience`.
        self.doing: Callable[[], str] | None = None
        self._windows: deque[float] = deque(maxlen=50)
        self.window_began: float | None = None
        self.compared: dict[int, Compared] = {}
        # What the last look found, since when, and in which place.
        self._seen: tuple[int, Callable[[], str] | None] = (-1, None)
        self._place = ""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that this rank waits for others in the lines inside, in ``what``."""
        # Waits may be nested: the outer one is restored, and only it is added up.
        outer, self.doing = self.doing, lambda: what
        self.events += 1
        began = perf_counter()
        try:
            yield
        finally:
            self.doing = outer
            if outer is None:
                self.waited += perf_counter() - began

    def in_window(self) -> None:
        """Note a forward or backward pass of a window."""
        if self.window_began is None:
            self.window_began = time.monotonic()

    def end_micro_batch(self) -> None:
        self.events += 1
        self.micro_batch += 1

    def end_window(self, measured: bool) -> None:
        """Note the end of a window, whose time counts for :meth:`patience` if it came
        to its end."""
        if measured and self.window_began is not None:
            self._windows.append(time.monotonic() - self.window_began)
        self.window_began, self.micro_batch = None, 1

    def keep_window(self, window: Compared) -> None:
        """Keep a window. All ranks keep the same ones."""
        number = max(self.compared, default=0) + 1
        self.compared[number] = window
        self.compared.pop(number - _KEPT_WINDOWS, None)

    def patience(self) -> float:
        """Return the seconds of waiting after which something is said: ten times the
        slowest of the last windows."""
        return max(self.least, 10 * max(self._windows, default=0.0))

    def look(self) -> dict[str, Any] | None:
        """Return where this rank stands still, as JSON; None if anything has happened
        since the last look. Called by one thread."""
        now = time.monotonic()
        seen = self.events, self.doing
        # Something has begun or ended since the last look, so this rank does not stand
        # still.
        if seen != self._seen:
            self._seen = seen
            self._place = ""
            self._since = now
            return None
        # Reading a stack costs time, so it is done only for a rank that stands still.
        doing, frames = seen[1], _main_stack()
        waits = doing is not None or _communicates(frames)
        place = f"{doing()}" if doing is not None else place_of(frames, waits)
        # Came here without an event, from work of its own: it waits from now on.
        if place != self._place:
            self._place, self._since = place, now
        found = {
            "for": now - self._since,
            "after": self.patience(),
            "waits": waits,
            "place": place,
        }
        found["micro_batch"] = self.micro_batch
        # A longer list means that ranks have not compared for long; it would crowd the
        # board.
        recent = self.recent()
        if len(recent) <= _SHOWN:
            found["recent"], found["peers"] = recent, self.peers
        return found


here = Whereabouts()
"""Of this process."""


def innermost_user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of user code of a stack, outermost frame first, as
    ``train.py:12 in training_step``; "" if there is none."""
    for frame in reversed(list(frames)):
        if not any(part in frame.filename for part in _LIBRARIES):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def place_of(frames: list[traceback.FrameSummary], waits: bool) -> str:
    """Say what a thread with this stack does, and from which line of user code."""
    line = innermost_user_line(frames)
    kind = next(
        (
            what
            for f in reversed(frames)
            for part, what in _ACTIVITIES.items()
            if part in f.filename
        ),
        "",
    )
    if waits:
        # A rank that waits is in a collective, whose name says more than the kind of
        # work.
        kind = _innermost(frames).name
    if kind and line:
        return f"{kind} ({line})"
    if kind or line:
        return kind or line
    return (
        f"{frames[-1].name} of {os.path.basename(frames[-1].filename)}"
        if frames
        else "no Python code"
    )


def _communicates(frames: list[traceback.FrameSummary]) -> bool:
    return bool(frames) and any(
        part in _innermost(frames).filename for part in _COMMUNICATION
    )


def _innermost(frames: list[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost frame; of one that waits for a thread, who waits."""
    return next(
        (frame for frame in reversed(frames) if frame.filename != threading.__file__),
        frames[-1],
    )


def _main_stack() -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else traceback.extract_stack(frame)


def went_apart(
    sequences: Mapping[int, Sequence[int]], describe: Callable[[int | None], str]
) -> str:
    """Say where ranks first issued different collectives; "" if nowhere.

    Args:
        sequences: the numbers that each rank issued, 0 at the end of a micro-batch.
        describe: says in words what a number means; None: that a rank issued nothing
            more.
    """
    # Position by position: what each rank issued there, and which ranks issued the
    # same.
    for position in range(max(map(len, sequences.values()), default=0)):
        sides: dict[int | None, list[int]] = {}
        for rank, numbers in sequences.items():
            sides.setdefault(
                numbers[position] if position < len(numbers) else None, []
            ).append(rank)
        if len(sides) > 1:
            micro_batch = list(next(iter(sequences.values()))[:position]).count(0) + 1
            said = "; ".join(
                f"{ranks_in_words(ranks)}: {describe(number)}"
                for number, ranks in sides.items()
            )
            return f"in micro-batch {micro_batch}, {said}"
    return ""


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 7`` or ``ranks 0-6, 9``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    # Neighbouring numbers become a range.
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][-1:] = [runs[-1][-1], rank] if len(runs[-1]) == 1 else [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' * (len(ordered) > 1)} {text}"


class WaitWatch:
    """Looks for ranks that wait, in the thread of a
    :class:`smp_core.watch.rank_watch.RankWatch`.

    Args:
        whereabouts: of this rank.
        say: writes a line to stderr.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        interval: float,
        whereabouts: Whereabouts,
        say: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.interval = interval
        self._whereabouts, self._say = whereabouts, say
        # What this rank did before is no waiting, and is not compared.
        whereabouts.events += 1
        whereabouts.windows = 0
        whereabouts.compared.clear()
        # What the count was at the last look, and for how many looks.
        self._marks, self._still = 0, _SILENCE
        # Seconds that the longest wait had when the last line was written.
        self._said_at = 0.0
        self._looks = 0  # since a rank waits
        # The last sign of each rank, and the look that found it.
        self._beats: dict[int, tuple[int, int]] = {}

    def shown(self, boards: Sequence[Board]) -> dict[str, Any] | None:
        """Return what goes with this rank's signs of life; mark the boards if it waits
        for long."""
        at = self._whereabouts.look()
        # From half of its patience on, so that keepers begin to look in time.
        waits = at is not None and at["waits"] and at["for"] >= at["after"] / 2
        if waits:  # again each time: one that is lost is made up for by the next
            for board in boards:
                # Met again, and handled, by the next sign of life.
                with contextlib.suppress(ConnectionError):
                    board.post("add", _MARK, 1)
        return at

    def look(self, board: Board, read: Callable[[Board], Signs]) -> None:
        """Write the line if it is time. Call it on the keeper of ``board``."""
        # No new mark for a while: no rank waits.
        # Adding 0 reads the count.
        marks = board.ask("add", _MARK, 0)
        self._still = 0 if marks != self._marks else self._still + 1
        self._marks = marks
        if self._still >= _SILENCE:
            self._said_at, self._looks = 0.0, 0
            self._beats.clear()
            return
        # The signs of all ranks are read only while one waits: there may be many.
        # Ranks whose beats have stopped, and those that were heard once only.
        signs = read(board)
        self._looks += 1
        for rank, state in signs.items():
            if self._beats.get(rank, (-1, 0))[0] != state["beats"]:
                self._beats[rank] = state["beats"], self._looks
        silent = {
            rank
            for rank, (_, since) in self._beats.items()
            if self._looks - since >= _SILENCE
        }
        # One that was heard once may have been heard for the last time: wait for a
        # second sign.
        unknown = {
            rank for rank, (_, since) in self._beats.items() if since == 1
        } - silent
        waiting = {
            rank: at
            for rank, state in signs.items()
            if (at := state.get("at")) and at["waits"]
        }
        # A line once a rank has waited for long, and again at twice the time.
        late = [
            at["for"]
            for rank, at in waiting.items()
            if at["for"] >= at["after"] and rank not in silent
        ]
        # One rank speaks: rank 0, or the other keeper where rank 0 is silent.
        if (
            not late
            or unknown
            or max(late) < 2 * self._said_at
            or not (self.rank == 0 or 0 in silent)
        ):
            return
        self._said_at = max(late)
        self._say(line_about(signs, silent, self._whereabouts.describe))


def line_about(
    signs: Signs, silent: set[int], describe: Callable[[int | None], str]
) -> str:
    """Return the line: those that wait, those that are elsewhere, and where ranks that
    share parameters went apart.

    Args:
        signs: of all ranks; "at" is what :meth:`Whereabouts.look` returned, where a
            rank stands still.
        silent: ranks that give no sign of life.
    """
    waiting: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    # Ranks by what they do.
    # A rank's place and step are its group: ranks that do the same stand in one part.
    for rank, state in signs.items():
        at, step = state.get("at"), f"step {state['step'] + 1}"
        # One that has ended gives no further sign, and is not lost.
        if "failed" in state:
            elsewhere.setdefault(f"failed: {state['failed']}", []).append(rank)
        elif "left" in state:
            elsewhere.setdefault("ended in good order", []).append(rank)
        elif rank in silent:
            elsewhere.setdefault(
                "no sign of life: stopped, swapped out or lost", []
            ).append(rank)
        elif at is None:
            elsewhere.setdefault(f"goes on, {step}", []).append(rank)
        else:
            where = f"{at['place']}, {step}, micro-batch {at['micro_batch']}"
            (waiting if at["waits"] else elsewhere).setdefault(where, []).append(rank)
            seconds[where] = max(seconds.get(where, 0.0), at["for"])
    # In words.
    parts = [
        f"{ranks_in_words(found)} {seconds[where]:.0f} s in {where}"
        for where, found in list(waiting.items())[:_NAMED]
    ]
    line = f"waiting: {'; '.join(parts)}"
    if elsewhere:
        others = [
            f"{ranks_in_words(found)}: {where}"
            for where, found in list(elsewhere.items())[:_NAMED]
        ]
        line += f" | elsewhere: {'; '.join(others)}"
    # Only ranks that stand still show what they issued.
    apart = _apart(
        {rank: state["at"] for rank, state in signs.items() if state.get("at")},
        describe,
    )
    if apart:
        return f"{line} | went apart: {apart} ({HINT})"
    return f"{line} | {ALONE}" if len(waiting) > 1 else line


def _apart(at: dict[int, dict[str, Any]], describe: Callable[[int | None], str]) -> str:
    """Say where ranks with the same peers first issued different collectives; "" if
    none did. One that is only behind has not gone apart."""
    # Only ranks of the same peers have to issue the same.
    by_peers: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, shown in at.items():
        if "recent" in shown:
            by_peers.setdefault(tuple(shown["peers"]), {})[rank] = shown["recent"]
    for sequences in by_peers.values():
        # Compared as far as all have come.
        shortest = min(map(len, sequences.values()))
        if found := went_apart(
            {rank: numbers[:shortest] for rank, numbers in sequences.items()}, describe
        ):
            return found
    return ""
