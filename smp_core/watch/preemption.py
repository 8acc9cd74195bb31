"""Notices that a job is about to be ended, agreed over all ranks, and the exit that
makes its launcher start it anew.

A launcher, a scheduler or a cloud sends SIGTERM or SIGUSR1 some time before it kills:
to all ranks or to one of them, at any instant. The handler sets a flag and does nothing
else, because ranks are at different places, and a save is a collective of all. Where
training can stop, after each step, every rank asks :meth:`Preemption.agreed`; at most
every so often that is an all-reduce of three numbers over a gloo group of its own,
after which all ranks know who was told, and stop at the same place. How often is agreed
in the same all-reduce: at each step that takes 0.25 s or longer, at each eighth step at
least.

What else is done with SIGTERM stands here too (:func:`ignoring_sigterm`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from smp_core.cluster import host_group
from smp_core.torch_facts import is_rank_0
from smp_core.watch.whereabouts import here

logger = logging.getLogger("smp")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds between two all-reduces, and the most calls between them: steps may become
# slower all of a sudden.
_EVERY_SECONDS = 0.25
_EVERY_CALLS = 8
# The part of the grace for which an accumulation window may go on; the rest is for the
# save.
_TO_FINISH = 0.25


class Preempted(SystemExit):
    """The end of a process that was told to end and has saved; its code is 128 plus the
    signal's number, 143 for SIGTERM, which launchers and schedulers take for "ended by
    a signal, may be started anew"."""


class Preemption:
    """Notices to this process and to the other ranks. Its construction is collective
    over the world.

    Args:
        grace: seconds between a notice and the end, ``checkpoint.preemption_grace_s``;
            0: signals are left alone, and no rank is ever told.

    Attributes:
        signal: the number of the signal that was sent to any rank, once ranks have
            agreed; 0 before.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.signal = 0
        self._told = 0
        self._told_at = 0.0
        self._handlers: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = host_group("preemption")
        self.begin_phase()

    def begin_phase(self) -> None:
        """Note that something else begins, whose steps take another time: training, a
        validation. On all ranks."""
        self._calls = self._last = 0
        self._next = 1
        # Paces are measured from here: a validation's steps say nothing about
        # training's.
        self._checked_at = time.monotonic()

    def install(
        self, signals: Sequence[int] = SIGNALS, before: dict[int, Any] | None = None
    ) -> None:
        """Take notices by signals from here on, until :meth:`restore`. In the main
        thread; elsewhere nothing is done.

        A SIGTERM handler of the user's own is called too; where SIGUSR1 has one, it
        stays the user's.

        Args:
            before: handlers that count as the user's; by default those that are
                installed.
        """
        if (
            not self.grace
            or self._handlers
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        # A handler of the user's for SIGUSR1 has a meaning of its own, so it stays.
        for number in signals:
            installed = signal.getsignal(number)
            users = installed if before is None else before.get(number)
            if callable(users) and number != signal.SIGTERM:
                continue
            self._handlers[number] = installed
            signal.signal(number, functools.partial(self._take, users, os.getpid()))

    def _take(
        self, users: Any, owner: int, number: int, frame: FrameType | None
    ) -> None:
        # A forked child (a worker, a background process) has inherited the handler
        # and no run to save: its parent's `terminate()` has to end it. A notice to the
        # whole process group must not, since the parent goes on to its next step.
        if os.getpid() != owner:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL if users is None else users)
                signal.raise_signal(number)
            return
        # Nothing else: a handler may run at any instruction, and a save needs all
        # ranks.
        self.notify(number)
        if callable(users) and users is not signal.default_int_handler:
            users(number, frame)

    def restore(self) -> None:
        """Put the handlers back that :meth:`install` has replaced."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def notify(self, number: int = signal.SIGTERM) -> None:
        """Tell this process that its end is near, as a signal would; from any thread,
        e.g. one that asks a cloud for spot notices."""
        # The first notice counts: the grace runs from it.
        if not self._told:
            self._told, self._told_at = int(number), time.monotonic()

    def agreed(self, whole_step: bool = True) -> bool:
        """Return whether all ranks stop here. Collective over the world: every rank
        calls it at the same places.

        Args:
            whole_step: whether nothing is open here that would be lost (an accumulation
                window, an evaluation). What is open is waited for as long as a quarter
                of the grace is not over.
        """
        self._calls += 1
        # All ranks skip the same calls: the next one was agreed upon.
        if not self.grace or self._calls < self._next:
            return False
        now = time.monotonic()
        waited = now - self._told_at if self._told else 0.0
        pace = (now - self._checked_at) / (self._calls - self._last)
        # Maxima over all ranks: the signal, how long ago it came, and how slow a step
        # is.
        if self._group is not None:
            numbers = torch.tensor(
                [float(self._told), waited, pace], dtype=torch.float64
            )
            with here.waiting("the agreement whether to end"):
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
            told, waited, pace = numbers.tolist()
            self.signal = int(told)
        else:
            self.signal = self._told
        # As many steps as fit into the time between two questions, with a bound on
        # their number.
        every = min(_EVERY_CALLS, max(1, int(_EVERY_SECONDS / max(pace, 1e-9))))
        self._next = self._calls + (1 if self.signal else every)
        self._last, self._checked_at = self._calls, time.monotonic()
        return bool(self.signal) and (whole_step or waited > _TO_FINISH * self.grace)

    def leave(
        self, saved: str, status: int | None = None, requeue: bool = True
    ) -> NoReturn:
        """End this process, with all others; the last thing of a run that has agreed
        and saved. Collective.

        Args:
            saved: what was saved where, for the log.
            status: the exit status, where the launcher wants another one than 128 + the
                signal.
            requeue: whether a SLURM job is requeued where the signal was SIGUSR1 (or
                another one than SIGTERM), which ``sbatch --signal`` sends before the
                time limit; at a preemption SLURM does it by itself.

        Raises:
            Preempted: always.
        """
        if self._group is not None:
            # A launcher kills the others when the first has ended.
            dist.barrier(group=self._group)
        if is_rank_0():
            name = signal.Signals(self.signal or signal.SIGTERM).name
            logger.warning("%s: the run ends before its end; %s", name, saved)
            if requeue and self.signal not in (0, signal.SIGTERM):
                _requeue()
        raise Preempted(
            128 + (self.signal or signal.SIGTERM) if status is None else status
        )


@contextlib.contextmanager
def ignoring_sigterm() -> Iterator[None]:
    """Ignore SIGTERM while this process looks which rank was lost: a launcher that
    notices the loss (torchrun within 0.1 s) tells the survivors to end, with SIGTERM
    and later SIGKILL. This process is ending; a handler such as Lightning's, which
    starts a collective, must not cut it short. In the main thread; elsewhere nothing is
    done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Restored afterwards, in case that the process does not end after all.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _requeue() -> None:
    """Requeue this SLURM job, if it is one."""
    job = os.environ.get("SLURM_JOB_ID")
    # A task of an array has a name of its own.
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = shutil.which("scontrol")
    if job is None or command is None:
        return
    done = subprocess.run(
        [command, "requeue", job], capture_output=True, text=True, check=False
    )
    if done.returncode:
        logger.error("scontrol requeue %s failed: %s", job, done.stderr.strip())
