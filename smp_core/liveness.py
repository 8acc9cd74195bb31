"""Which rank was lost: signs of life beside the collectives.

A collective that fails says that a connection closed, not whose. So every rank sets a counter in a small store of its
own (kept by rank 0, apart from the process groups' store) every ``interval`` seconds from a daemon thread. When a rank
meets an exception it looks who stopped counting, who reported an error of its own, and who is behind, and one of the
survivors says so on stderr.

NCCL raises nothing where a peer is gone: the host waits for a device that waits for the peer. There rank 0 looks by
itself, and the survivors end when the time is over that collectives have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp_core.meeting import Meetings

logger = logging.getLogger("smp")

# Intervals that rank 0 keeps the store for ranks that do not notice that it ends.
_GOODBYES = 20
_UNEVEN = (
    "a rank that runs out of batches goes on to something else, and the others wait for it. Give every rank the same "
    "number of batches (DistributedSampler, drop_last=True, limit_train_batches), and let all ranks make the same calls"
)
# Intervals between two looks that rank 0 takes by itself: a rank that gives no sign in between is lost.
_LOOK_EVERY = 40
# What the store raises when it is out of reach.
_GONE = (dist.DistError, RuntimeError, ConnectionError)
_last_store: dist.Store | None = None
"""The store of the last watch that ended, so that rank 0's is there while others look why that rank has ended."""


class RankWatch:
    """Signs of life of all ranks. :meth:`start` is collective over the world; everything else is local.

    Attributes:
        step: set by the trainer to the optimizer step it is in; travels with the signs of life.
        meetings: where all ranks have to be before a collective that scripts make on one rank by mistake. Its ``limit``
            is also how long a rank goes on once another is known to be lost, where it looks by itself.
        looks: whether ranks look for lost ones by themselves, and not only when they meet an exception.
        between_runs: whether a Trainer's run has ended here and no other has begun; travels too.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, interval: float) -> None:
        self.rank, self.world_size, self.interval = rank, world_size, interval
        self.step = 0
        self.between_runs = False
        self.looks = "nccl" in str(dist.get_backend())
        self.meetings = Meetings(rank, world_size, store, interval)
        self._store = store
        self._beats = 0
        self._runs = 0
        self._reported = False
        self._left = False
        self._seen: dict[int, dict[str, Any]] | None = None  # at rank 0's last look by itself
        self._ends_at: float | None = None
        self._stopped = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="smp-rank-watch", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, interval: float | None = None) -> RankWatch | None:
        """Begin to watch. None for a single process.

        Args:
            interval: seconds between signs of life; default 0.5, longer for more than 250 ranks so that rank 0 serves
                at most 500 of them per second.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        limit = timedelta(seconds=60)
        store = dist.TCPStore(host, 0, world, True, timeout=limit, wait_for_workers=False) if rank == 0 else None
        where: list[Any] = [store.port if store is not None else None]
        dist.broadcast_object_list(where, src=0)
        if store is None:
            with contextlib.suppress(*_GONE):
                store = dist.TCPStore(host, where[0], world, False, timeout=limit, wait_for_workers=False)
        reached: list[Any] = [None] * world
        dist.all_gather_object(reached, store is not None)
        if store is None or not all(reached):
            if rank == 0:
                logger.warning(
                    "no watch over the ranks: port %s of %s cannot be reached from all of them", where[0], host
                )
            return None
        watch = cls(rank, world, store, interval or max(0.5, world / 500))
        dist.barrier()
        return watch

    def begin_run(self, call: str) -> None:
        """A Trainer begins a run with ``call``, where all ranks meet unless this is the first run. Collective.

        Raises:
            RuntimeError: a rank is elsewhere.
        """
        if self.between_runs:
            self.meetings.meet_in_all_groups(call)
        self._try(lambda: self._store.delete_key(f"failed/{self.rank}"))
        self._runs += 1
        self.step, self.between_runs, self._reported = 0, False, False

    def end_run(self) -> None:
        """The run has ended on this rank, well or not."""
        self.between_runs = True

    def stop(self) -> None:
        """No more signs of life: this rank ends in good order."""
        if not self._stopped.is_set():
            self.meetings.leave()
            self._stopped.set()
            self._thread.join(timeout=2 * self.interval)
            self._beat()
            self._try(lambda: self._store.set(f"bye/{self.rank}", "1"))
            if self.rank == 0 and not self._reported:
                self._try(self._await_goodbyes)
            global _last_store
            _last_store = self._store

    def _await_goodbyes(self) -> None:
        """Keep the store, which is in this process, until the others are done with it: torch writes a page to stderr
        when it goes away under them. They have ended too, or have noticed that this rank has. One that says nothing is
        not waited for long."""
        others = set(range(1, self.world_size))
        deadline = time.monotonic() + _GOODBYES * self.interval
        while others and time.monotonic() < deadline:
            signs = ("bye", "failed", "left")
            others -= {n for n in others if any(self._store.check([f"{sign}/{n}"]) for sign in signs)}
            time.sleep(0.01 if others else 0.0)

    def report(self, error: BaseException) -> str | None:
        """Find out what happened to the other ranks and write it to stderr (one of the ranks does).

        Takes about four intervals, or eight when nobody seems to be lost; longer on a machine too busy for signs of
        life. A rank whose ``error`` did not come from losing others reports itself, so that the others can name it.

        Returns:
            what was found; None if this rank is the first to fail or nothing is wrong elsewhere.
        """
        self._reported = True
        if not _looks_like_a_lost_peer(error):
            self._try(lambda: self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}"))
            return None
        with _without_sigterm():
            return self._find_out()

    def _find_out(self) -> str | None:
        found = self._compare()
        if found is None and self.meetings.rank_0_ended:
            found, first = (
                f"rank 0 ended the run, and rank {self.rank} is in optimizer step {self.step}: {_UNEVEN}",
                True,
            )
        elif found is None:
            found = (
                "rank 0 was lost, or ended before this rank looked (it kept the signs of life of the others; if "
                "another rank wrote such a line before, that one has the cause)"
            )
            first = True
        else:
            # Only a rank that found something may speak for all.
            first = bool(found) and bool(self._try(lambda: self._store.add(f"claimed/{self._runs}", 1) == 1))
        if first:
            self._say(found)
        return found or None

    def _say(self, what: str) -> None:
        sys.stderr.write(f"torch-smp, rank {self.rank}: {what}\n")
        sys.stderr.flush()

    def _compare(self) -> str | None:
        """Return what two looks, some signs apart, say about the others; None when the store is gone.

        When nobody seems to be lost there is a third: the last sign of life of a lost rank may come in after the first
        look.
        """
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
        steps = {rank: state.get("step", 0) for rank, state in before.items()}
        last = max(steps.values())
        elsewhere = [rank for rank, state in before.items() if "bye" in state or state["between"] > self.between_runs]
        ended = [f"rank {rank} (after optimizer step {steps[rank]})" for rank in elsewhere]
        if ended:
            return f"the run ended on {', '.join(ended)}, and goes on elsewhere (step {last}): {_UNEVEN}"
        behind = [f"rank {rank} (in optimizer step {step} of {last})" for rank, step in steps.items() if step < last]
        return f"all ranks are alive, but behind are: {', '.join(behind)}: {_UNEVEN}" if behind else ""

    def _await_signs(self) -> None:
        """Give every rank that lives the time for a sign: four intervals, and three signs of this rank's own, which has
        no other way to know that the machine is busy, or stood still, for all of them."""
        end, enough = time.monotonic() + 4 * self.interval, self._beats + 3
        while time.monotonic() < end or (self._beats < enough and self._thread.is_alive()):
            time.sleep(self.interval / 4)

    def _describe(self, before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
        failed = {r: state["failed"] for r, state in after.items() if "failed" in state}
        ended = {r for r, state in after.items() if "bye" in state}
        silent = [
            r
            for r in range(self.world_size)
            if r not in failed and r not in ended and after.get(r, {}).get("beats") == before.get(r, {}).get("beats")
        ]
        parts = [f"rank {r} failed: {text}" for r, text in failed.items()]
        for r in silent:
            step = after.get(r, {}).get("step", 0)
            parts.append(f"rank {r} was lost: no sign of life any more; it was in optimizer step {step}")
        return "; ".join(parts)

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            self._beats += 1
            if not self._beat():
                if self.looks and not (self._reported or self.between_runs):
                    self._say("rank 0 was lost, or ended: the store with the signs of life is gone")
                    self._rank_is_lost()
                    if not self._stopped.wait(self.meetings.limit):
                        self._end_in_time()
                return
            if self.looks:
                if self._beats % _LOOK_EVERY == 0:
                    self._try(self._look_by_itself)
                self._end_in_time()
            if self._try(lambda: self._store.check(["bye/0"])):
                self.meetings.rank_0_ended = True
                if not self._reported:  # else this rank still looks what the store has
                    self._leave_store()
                    return

    def _look_by_itself(self) -> None:
        """Rank 0 compares what all say with what they said the last time, and writes down who is lost; the others read
        that, and not everybody's signs: there may be many ranks."""
        if self.rank == 0:
            before, self._seen = self._seen, self._look()
            found = self._describe(before, self._seen) if before is not None and self._seen is not None else ""
            if found and self._ends_at is None and not self._store.check(["lost"]):
                self._say(found)
                self._store.set("lost", found)
            elif not found:
                self._store.delete_key("lost")
        if not self._store.check(["lost"]):
            self._ends_at = None  # whoever was silent is back
        else:
            self._rank_is_lost()

    def _rank_is_lost(self) -> None:
        if self._ends_at is None and self.meetings.limit is not None:
            self._ends_at = time.monotonic() + self.meetings.limit

    def _end_in_time(self) -> None:
        """End the process when a run has waited for a lost rank for long enough: what it waits for cannot be called
        off. (One that has come out of its run waits for nobody.)"""
        over = self._ends_at is not None and time.monotonic() >= self._ends_at
        if over and not (self.between_runs or self._stopped.is_set()):
            self._say(f"ends: another rank was lost, and timeout={self.meetings.limit:g} seconds are over")
            os._exit(1)  # os._exit: the main thread waits for a device, where no exception reaches it

    def _leave_store(self) -> None:
        """Rank 0, which ends, need not wait for this rank."""
        self._try(lambda: self._store.set(f"left/{self.rank}", "1"))
        self._left = True

    def _beat(self) -> bool:
        state = json.dumps(
            {
                "beats": self._beats,
                "step": self.step,
                "forwards": self.meetings.forwards,
                "between": self.between_runs,
            }
        )

        def tell() -> bool:
            self._store.set(f"beat/{self.rank}", state)
            return True

        return self._try(tell) is True

    def _look(self) -> dict[int, dict[str, Any]] | None:
        """State of every rank; None when the store is gone."""

        def read() -> dict[int, dict[str, Any]]:
            seen = {}
            for rank in range(self.world_size):
                state = json.loads(self._store.get(f"beat/{rank}"))
                if self._store.check([f"failed/{rank}"]):
                    state["failed"] = self._store.get(f"failed/{rank}").decode()
                if self._store.check([f"bye/{rank}"]):
                    state["bye"] = True
                seen[rank] = state
            return seen

        return self._try(read)

    def _try(self, action: Any) -> Any:
        """Ask the store, which goes away with rank 0; that is an answer, not an error."""
        if self._left:
            return None
        try:
            return action()
        except _GONE:
            return None


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """A launcher that notices the loss (torchrun within 0.1 s) tells the survivors to end, with SIGTERM and later
    SIGKILL. This one is ending; a handler such as Lightning's, which starts a collective, must not cut it short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _looks_like_a_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    signs = ("connection", "timed out", "timeout", "broken pipe", "remote", "nccl", "gloo", "peer")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
