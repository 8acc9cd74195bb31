"""The watch over the ranks of a process group: which rank was lost, failed, or went
elsewhere.

A collective that fails says that a connection closed, not whose. So every rank writes a
counter on two boards (:mod:`smp_core.watch.signs`: rank 0's and the last rank's) every
``interval`` seconds from a daemon thread. When a rank meets an exception it looks who
stopped counting, who reported an error of its own, and who is behind, and one of the
survivors says so on stderr. No look waits for a rank that is stopped or cut off.

Collectives with a lost rank may take their whole timeout, and NCCL's raise nothing: the
host waits for a device that waits for the peer. So the keepers of the boards look by
themselves too, and the survivors end when the time that collectives have is over; so
does a rank that has met the loss and does not come out of what it is in.

There is one :class:`RankWatch` for each process group, however many accelerators and
Trainers stand on it. It outlives a run, because what scripts do after one (a prediction
on rank 0 alone, another run) needs all ranks as much. An uncaught error is printed as
ever, and then the watch finds out which rank was lost or failed: a bare loop has no
hook for exceptions but the interpreter's own.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist

from smp_core.cluster import collective_timeout
from smp_core.run_log import write as run_log
from smp_core.watch.compared_windows import ComparedWindows
from smp_core.watch.lost_peer import DEVICE_STOPPED, looks_like_a_lost_peer
from smp_core.watch.meeting import Meetings
from smp_core.watch.preemption import Preempted, ignoring_sigterm
from smp_core.watch.signs import NO_SIGN, Board, BoardSilent, Sign, attempt, open_boards
from smp_core.watch.whereabouts import WaitWatch, here, innermost_user_line

logger = logging.getLogger("smp")

# Intervals that a keeper's board stays for ranks that do not notice that the keeper
# ends.
_GOODBYES = 20
_UNEVEN = (
    "a rank that runs out of batches goes on to something else, and the others wait for it. Give every rank the same "
    "number of batches (DistributedSampler, drop_last=True, limit_train_batches), or join them (JoinedLoader under "
    "Lightning, join_uneven_inputs under Accelerate), and let all ranks make the same calls"
)
# Intervals between two looks that keepers take by themselves: a rank that gives no sign
# in between is lost.
_LOOK_EVERY = 40
# Seconds that a rank has to end, handlers and a save in flight included, once it has
# met the loss of another.
ENDING = 30.0


class RankWatch:
    """Signs of life of all ranks. :meth:`start` is collective over the world;
    everything else is local.

    Attributes:
        step: set by the trainer to the optimizer step it is in; travels with the signs
            of life.
        meetings: where all ranks have to be before a collective that scripts make on
            one rank by mistake. Its ``limit`` is also how long a rank goes on once
            another is known to be lost.
        between_runs: whether a Trainer's run has ended here and no other has begun;
            travels too.
        boards: those that this rank still reaches, rank 0's first.
    """

    def __init__(
        self, rank: int, world_size: int, boards: list[Board], interval: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.interval = interval
        self.step = 0
        self.between_runs = False
        self.meetings = Meetings(rank, world_size, boards[0], interval)
        self.boards = boards
        self._waits = WaitWatch(rank, world_size, interval, here, self._say)
        self._beats = 0
        self._runs = 0
        self._failure: str | None = None
        self._left = False  # in good order
        self._reported = False
        self._stumbled = False
        self._heard: dict[int, str] = {}  # by run: what another rank has found out
        self._seen: _Signs | None = None  # at the last look by itself
        self._ends_at: float | None = None
        self._stopped = threading.Event()
        # The first sign is on the boards before the thread starts: no rank is taken for
        # lost while it begins.
        self._beat()
        self._thread = threading.Thread(
            target=self._run, name="smp-rank-watch", daemon=True
        )
        self._thread.start()

    @classmethod
    def start(cls, interval: float | None = None) -> RankWatch | None:
        """Begin to watch. None for a single process.

        Args:
            interval: seconds between signs of life; default 0.5, longer for more than
                250 ranks so that a board serves at most 500 of them per second.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        boards = open_boards(host)
        # Rank 0's board is the one that meetings and the watch rely on.
        if not boards or boards[0].keeper != 0:
            if rank == 0:
                logger.warning(
                    "no watch over the ranks: ports of %s cannot be reached from all of them",
                    host,
                )
            return None
        watch = cls(rank, world, boards, interval or max(0.5, world / 500))
        dist.barrier()
        return watch

    def begin_run(self, call: str) -> None:
        """Begin a Trainer's run with ``call``, where all ranks meet unless this is the
        first run. Collective.

        Raises:
            RuntimeError: a rank is elsewhere.
        """
        if self.between_runs:
            self.meetings.meet_in_all_groups(call)
        self._runs += 1
        self._failure = None
        self._reported = False
        self._ends_at = None
        self.step, self.between_runs = 0, False
        self._beat()

    def end_run(self) -> None:
        """Note that the run has ended on this rank, well or not."""
        self.between_runs = True

    def stop(self) -> None:
        """Give no more signs of life: this rank ends in good order."""
        if self._stopped.is_set():
            return
        # Ranks that wait at a meeting learn that this one does not come.
        self.meetings.leave(self._failure or "")
        self._stopped.set()
        self._thread.join(timeout=2 * self.interval)
        self._left = True
        self._beat()
        kept = [board for board in self.boards if board.keeper == self.rank]
        for board in kept if not self._reported else ():
            attempt(self._await_goodbyes, board)
        # A keeper's board is closed one watch later, so that others can still read why
        # this rank ended.
        global _last_boards
        for board in _last_boards + [
            board for board in self.boards if board not in kept
        ]:
            board.close()
        _last_boards = kept

    def _await_goodbyes(self, board: Board) -> None:
        """Keep the board, which is in this process, until the others are done with it:
        they have ended too, or have noticed that this rank has. One that says nothing
        is not waited for long."""
        others = set(range(self.world_size)) - {self.rank}
        deadline = time.monotonic() + _GOODBYES * self.interval
        while others and time.monotonic() < deadline:
            signs = self._read(board)
            others -= {
                n
                for n in others
                if "left" in signs[n]
                or "failed" in signs[n]
                or board.ask("get", f"done/{n}")
            }
            time.sleep(0.01 if others else 0.0)

    def report(self, error: BaseException) -> str | None:
        """Find out what happened to the other ranks and write it to stderr (one of the
        ranks does).

        Takes about four intervals, or eight when no rank seems to be lost; longer on a
        machine too busy for signs of life, and where the keeper of a board does not
        answer. A rank whose ``error`` did not come from losing others reports itself,
        so that the others can name it. One that has lost others has half a minute to
        end.

        Returns:
            what was found; None if this rank is the first to fail or nothing is wrong
            elsewhere.
        """
        self._reported = True
        # An error of this rank's own is what the others should name.
        if not looks_like_a_lost_peer(error):
            self._failure = f"{type(error).__name__}: {error}{_place(error)}"
            self._beat()
            if DEVICE_STOPPED not in str(error).lower():
                return None
            with ignoring_sigterm():  # torchrun sends it once another rank has ended
                found = self._windows.difference(self.boards, self._runs)
                return self._tell(found) if found else None
        self._ends_at = time.monotonic() + ENDING + 8 * self.interval
        with ignoring_sigterm():
            return self._find_out()

    @functools.cached_property
    def _windows(self) -> ComparedWindows:
        return ComparedWindows(self.rank, self.interval, here.compared)

    def show_windows(self) -> None:
        """Put this rank's record of its last windows on the boards, once in a run."""
        self._windows.show(self.boards, self._runs)

    def _find_out(self) -> str | None:
        # Another rank has looked already; its finding holds.
        if told := self._told():
            return told
        found = self._compare()
        if found is not None:
            return self._tell(found) if found else None
        # No board answers any more.
        if told := self._heard.get(self._runs):
            return told
        found = self._without_boards()
        self._say(found)
        return found

    def _without_boards(self) -> str:
        if self.meetings.rank_0_ended:
            return f"rank 0 ended the run, and rank {self.rank} is in optimizer step {self.step}: {_UNEVEN}"
        return (
            f"rank 0 and rank {self.world_size - 1}, which keep the signs of life, were lost, or this rank is cut "
            "off from them (if another rank wrote such a line before, that one has the cause)"
        )

    def _told(self) -> str | None:
        """Return what another rank has found out in this run: ranks that meet the loss
        because that one has ended need not look again."""
        for board in self.boards:
            if told := attempt(board.ask, "get", f"told/{self._runs}"):
                return str(told["text"])
        return self._heard.get(self._runs)

    def _tell(self, found: str) -> str:
        """Write what was found to stderr and on the boards, unless another rank has.
        Returns what holds."""
        own = {"run": self._runs, "rank": self.rank, "text": found}
        claims = [
            attempt(board.ask, "claim", f"told/{self._runs}", own)
            for board in self.boards
        ]
        told = next((claim for claim in claims if claim is not None), own)
        if told["rank"] == self.rank:
            self._say(found)
        return str(told["text"])

    def _say(self, what: str) -> None:
        sys.stderr.write(f"torch-smp, rank {self.rank}: {what}\n")
        sys.stderr.flush()
        # Not in this thread: a file system that hangs must not keep this rank from
        # signs of life, or from ending.
        threading.Thread(
            target=run_log.note, args=("waiting",), kwargs={"text": what}, daemon=True
        ).start()

    def _compare(self) -> str | None:
        """Return what two looks, some signs apart, show of the other ranks; None when no
        board answers.

        When no rank seems to be lost there is a third: the last sign of life of a lost
        rank may come in after the first look.
        """
        # A rank whose count stands still between two looks is lost.
        before = self._look()
        for _ in range(2):
            self._await_signs()
            after = self._look()
            if before is None or after is None:
                return None
            if found := self._describe(before, after):
                return found
            before = after
        assert before is not None
        # No rank is lost or has failed: some have gone elsewhere, or are slower.
        steps = {rank: state["step"] for rank, state in before.items()}
        last = max(steps.values())
        elsewhere = [
            rank
            for rank, state in before.items()
            if "left" in state or state["between"] > self.between_runs
        ]
        ended = [
            f"rank {rank} (after optimizer step {steps[rank]})" for rank in elsewhere
        ]
        if ended:
            return f"the run ended on {', '.join(ended)}, and goes on elsewhere (step {last}): {_UNEVEN}"
        behind = [
            f"rank {rank} (in optimizer step {step} of {last})"
            for rank, step in steps.items()
            if step < last
        ]
        return (
            f"all ranks are alive, but behind are: {', '.join(behind)}: {_UNEVEN}"
            if behind
            else ""
        )

    def _await_signs(self) -> None:
        """Give every rank that lives the time for a sign: four intervals, and three
        signs of this rank's own, which has no other way to know that the machine is
        busy, or stood still, for all of them."""
        end, enough = time.monotonic() + 4 * self.interval, self._beats + 3
        while time.monotonic() < end or (
            self._beats < enough and self._thread.is_alive()
        ):
            time.sleep(self.interval / 4)

    def _describe(self, before: _Signs, after: _Signs) -> str:
        # First what failed, which is usually the cause of a silence.
        parts = [
            f"rank {r} failed: {state['failed']}"
            for r, state in after.items()
            if "failed" in state
        ]
        silent = _silent(before, after)
        for r in silent[:_NAMED]:
            parts.append(
                f"rank {r} was lost: no sign of life any more; it was in optimizer step {after[r]['step']}"
            )
        if len(silent) > _NAMED:
            parts.append(f"and {len(silent) - _NAMED} more ranks")
        if len(silent) == self.world_size - 1 > 1:
            parts.append("or this rank is cut off from all others")
        return "; ".join(parts)

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            try:
                self._watch_once()
            except Exception:
                if not self._stumbled:
                    logger.exception("the watch over the ranks stumbles, and goes on")
                self._stumbled = True

    def _watch_once(self) -> None:
        # The first duty is the sign of life; everything else can wait an interval.
        self._beats += 1
        if self.boards:
            self._beat(waits=False)
            for board in self.boards:
                if board.keeper == self.rank:
                    attempt(self._waits.look, board, self._read)
            if self._beats % _LOOK_EVERY == 0:
                self._look_by_itself()
        elif not self.meetings.rank_0_ended:
            # All keepers have ended, or are out of reach.
            self._rank_is_lost()
        self._end_in_time()

    def _hear(
        self, board: Board, sign: Sign | None, told: dict[str, Any] | None
    ) -> None:
        """Note what was found out about this run, while there is a board, and let a
        keeper that ends go without waiting for this rank.

        Args:
            sign: the keeper's last.
        """
        if told:
            self._heard[told["run"]] = told["text"]
        if board.keeper == self.rank or "left" not in (sign or NO_SIGN):
            return
        if board.keeper == 0:
            self.meetings.rank_0_failure = (sign or NO_SIGN).get("failed", "")
            self.meetings.rank_0_ended = True
        if not self._reported:  # otherwise this rank still looks what the board has
            attempt(board.ask, "set", f"done/{self.rank}", True)
            self._give_up(board)

    def _look_by_itself(self) -> None:
        """Compare, on a keeper, the signs of all ranks with the last ones, and note lost
        ranks on the board; elsewhere read that note, and not all signs: there may be
        many ranks. Rank 0 writes the line, or the other keeper for it."""
        for board in self.boards:
            if board.keeper == self.rank:
                attempt(self._look_for_all, board)
        if not any(attempt(board.ask, "get", "lost") for board in self.boards):
            if not self._reported:
                self._ends_at = None  # the rank that was silent is back
        else:
            self._rank_is_lost()

    def _look_for_all(self, board: Board) -> None:
        before, self._seen = self._seen, self._read(board)
        if before is None:
            return
        found = self._describe(before, self._seen)
        speaks = (
            self.rank == 0
            or 0 in _silent(before, self._seen)
            or "left" in self._seen[0]
        )
        if not found:
            board.ask("delete", ["lost"])
        elif self._ends_at is None and not board.ask("get", "lost"):
            board.ask("set", "lost", found)
            if speaks:
                self._say(found)

    def _rank_is_lost(self) -> None:
        if self._ends_at is None and self.meetings.limit is not None:
            self._ends_at = time.monotonic() + self.meetings.limit

    def _end_in_time(self) -> None:
        """End the process when a run has waited for a lost rank for long enough: what
        it waits for cannot be called off. (One that has come out of its run waits for
        nobody.)"""
        # A rank between runs, or at its end, is in no collective.
        over = self._ends_at is not None and time.monotonic() >= self._ends_at
        if over and not (self.between_runs or self._stopped.is_set()):
            waited = (
                f"{ENDING:g} s to end"
                if self._reported
                else f"timeout={self.meetings.limit:g} seconds"
            )
            self._say(f"ends: another rank was lost, and {waited} are over")
            # os._exit: the main thread waits for a device or a peer, where no exception
            # reaches it.
            os._exit(1)

    def _beat(self, *, waits: bool = True) -> None:
        """Give a sign of life. The thread does not wait until it is on the boards:
        beside a keeper that gets a turn now and then, this rank would look at those
        moments only."""
        state: dict[str, Any] = {
            "beats": self._beats,
            "step": self.step,
            "between": self.between_runs,
        }
        state |= {"forwards": self.meetings.forwards, "windows": here.windows}
        state["batches"] = self.meetings.batches
        if self._failure is not None:
            state["failed"] = self._failure
        if self._left:
            state["left"] = True
        # A main thread that gives a sign by itself stands still nowhere.
        elif not waits and (at := self._waits.shown(self.boards)) is not None:
            state["at"] = at
        for board in list(self.boards):
            key = f"beat/{self.rank}"
            wanted = [f"beat/{board.keeper}", f"told/{self._runs}"]
            try:
                if waits:
                    board.ask("set", key, state)
                elif (answer := board.post("set", key, state, wanted)) is not None:
                    self._hear(board, *answer)
            except BoardSilent:
                pass  # its keeper may answer later
            except ConnectionError:
                self._give_up(board)

    def _give_up(self, board: Board) -> None:
        board.close()
        self.boards = [other for other in self.boards if other is not board]

    def _look(self) -> _Signs | None:
        """Return the state of every rank; None when no board answers."""
        return next(
            (
                signs
                for board in self.boards
                if (signs := attempt(self._read, board)) is not None
            ),
            None,
        )

    def _read(self, board: Board) -> _Signs:
        return dict(enumerate(board.signs_of(range(self.world_size))))


_Signs = dict[int, Sign]
# Lost ranks that are named one by one.
_NAMED = 8


def _silent(before: _Signs, after: _Signs) -> list[int]:
    """List the ranks that have given no sign of life between two looks, and have
    neither failed nor ended."""
    going_on = [
        rank
        for rank, state in after.items()
        if "failed" not in state and "left" not in state
    ]
    return [rank for rank in going_on if after[rank]["beats"] == before[rank]["beats"]]


def _place(error: BaseException) -> str:
    """Return the innermost line of user code that an error came through, as ``
    (train.py:12 in training_step)``."""
    line = innermost_user_line(traceback.extract_tb(error.__traceback__))
    return f" ({line})" if line else ""


def end_within(seconds: float) -> None:
    """End this process, which nobody can call off any more, if it is still there after
    so many seconds."""

    def end() -> None:
        time.sleep(seconds)
        sys.stderr.write(
            f"torch-smp: this process has not ended within {seconds:g} s of its error, and is ended\n"
        )
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=end, name="smp-end", daemon=True).start()


_last_boards: list[Board] = []
"""Those of the last watch that ended, so that a keeper's is there while others look why
that rank has ended."""
_watch: RankWatch | None = None
_watched: weakref.ref[dist.ProcessGroup] | None = None
_met_behind: tuple[int, int] | None = None  # a watch, and a number of calls into models
_REPORTED = "_smp_reported"
# Seconds in which all ranks have to come that went on from an error of their own.
_SOON = 60.0


def watch_ranks(limit: timedelta | None = None) -> RankWatch | None:
    """Return the watch over the ranks of the default process group, started if there is
    none yet. Collective then.

    Args:
        limit: how long a rank waits for others that live and do not come to a call; by
            default as long as collectives.
    """
    global _watch, _watched
    if not _is_current():
        if _watched is None:
            sys.excepthook = functools.partial(_reporting, sys.excepthook)
            atexit.register(stop_watching)
        if _watch is not None:
            stop_watching()
        _warn_of_shared_store()
        limit = limit or collective_timeout()
        _watch = RankWatch.start()
        _watched = weakref.ref(cast(dist.ProcessGroup, dist.group.WORLD))
    if _watch is not None and limit is not None:
        _watch.meetings.limit = limit.total_seconds()
    return _watch


def stop_watching() -> None:
    """Stop the watch in good order: the other ranks do not take the end of this one for
    a loss."""
    global _watch, _met_behind
    if _watch is not None:
        _watch.stop()
        _watch = None
        # The next watch may get this one's address, on some ranks.
        _met_behind = None


def report(error: BaseException) -> None:
    """Find out, once for an error, what happened to the other ranks, and write it to
    stderr.

    A rank that leaves by ``SystemExit`` or Ctrl-C says so to the others, which wait for
    it.
    """
    if (
        _watch is not None
        and not isinstance(error, Preempted)
        and not hasattr(error, _REPORTED)
    ):
        setattr(error, _REPORTED, True)
        _watch.report(error)


def meet(place: str, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank has come to ``place``, a call as a user types it.
    Collective.

    Args:
        ranks: those who make the call together; by default all.

    Raises:
        RuntimeError: one is elsewhere, e.g. because only the main process makes the
            call.
    """
    if _watch is not None and _is_current():
        _watch.meetings.meet(place, ranks)


def meet_between_calls(place: str, ranks: Sequence[int]) -> None:
    """Meet at ``place``, as :func:`meet` does, if it is the first such place since the
    last call into a model (:func:`count_call`)."""
    global _met_behind
    if _watch is not None and _met_behind != (
        behind := (id(_watch), _watch.meetings.forwards)
    ):
        meet(place, ranks)
        _met_behind = behind


def meet_between_runs(place: str, ranks: Sequence[int] | None = None) -> None:
    """Meet in a script that lets a Trainer run, outside of its runs; inside them
    nothing waits.

    Args:
        ranks: those who make the call together; by default all, who then are in no call
            of a part of them either.
    """
    if _watch is None or not _watch.between_runs or not _is_current():
        return
    if ranks is None:
        _watch.meetings.meet_in_all_groups(place)
    else:
        _watch.meetings.meet(place, ranks)


def meet_after_failure(place: str, ranks: Sequence[int]) -> None:
    """Meet at ``place``, as :func:`meet` does, where the other ranks may be in a
    collective that waits for this one, which they cannot tell it: they have to come
    within a minute."""
    if _watch is not None and _is_current():
        _watch.meetings.meet(place, ranks, _SOON)


def expect_calls(peers: Sequence[int]) -> None:
    """Take note of the ranks that make calls into a model together with this one."""
    if _watch is not None:
        _watch.meetings.peers = peers


def count_call() -> None:
    """Count a call into a model: a rank that waits for its peers elsewhere sees by one
    of them that they stay away."""
    if _watch is not None:
        _watch.meetings.forwards += 1


def _is_current() -> bool:
    return (
        _watched is not None
        and _watched() is not None
        and _watched() is dist.group.WORLD
    )


def _warn_of_shared_store() -> None:
    """Warn, on rank 0, where torchrun will start processes anew that meet in the store
    of the processes before them.

    torch (pytorch/pytorch#135712) gives all attempts one store and one set of keys: a
    rank may read the address that another one had before, and the attempt fails while
    connecting.
    """
    # torchrun's own variables: restarts allowed, and one store for all attempts.
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if restarts != "0" and shared == "True" and os.environ.get("RANK") == "0":
        logger.warning(
            "torchrun --max-restarts=%s: a process that is started anew may read where another one listened before, "
            "and fail while connecting; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun",
            restarts,
        )


def _reporting(
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show an uncaught error as it was shown before, and then report it."""
    if _watch is not None and DEVICE_STOPPED in str(error).lower():
        # First of all: torch's watchdog over NCCL may end this process any moment.
        _watch.show_windows()
    before(kind, error, trace)
    if _watch is not None and looks_like_a_lost_peer(error):
        # What runs at the end of a process may wait for the lost rank too.
        end_within(2 * ENDING)
    report(error)
