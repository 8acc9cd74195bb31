"""The asynchronous saves: staged to host memory, then written by a thread over a
process group of its own.

Training waits for the copy to host memory, for the end of the save before where that is
still being written, and once a step for the ranks to agree whether it has ended. At
most one save is in flight; its error is raised at the next call, on every rank, because
the writing agrees on errors. Actions on older checkpoints that fall due while a save is
in flight (removal, LATEST) run after that save has committed, and not at all if it
failed: the last good checkpoint is never removed for one that does not exist.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from smp_core.checkpoint.folders.addresses import lasting, remove_checkpoint
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.staging import HostBuffers, Staged, stage
from smp_core.checkpoint.writer import SaveOptions, write_staged
from smp_core.cluster import collective_timeout
from smp_core.outside import StrPath
from smp_core.run_log import note

logger = logging.getLogger("smp")


class AsyncCheckpointer:
    """A writer of checkpoints in the background of training. Its construction is
    collective.

    The thread has a gloo group of its own, with the limit of the default group's
    collectives, so that a lost rank is noticed as soon as anywhere.

    Attributes:
        stalls: what the last save has kept training waiting for, in seconds:
            ``seconds_save_before``, the end of the save before it; ``seconds_copying``
            the state; ``seconds_agreeing`` in :meth:`settle`, since the call of the
            save before, whether that one had ended on all ranks.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._status_group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            timeout = collective_timeout()
            self._group = dist.new_group(
                timeout=timeout, backend="gloo", group_desc="smp checkpoints"
            )
            # The calling threads' own: collectives of two threads must not mix in one
            # group.
            self._status_group = dist.new_group(
                timeout=timeout, backend="gloo", group_desc="smp save status"
            )
        self._ranks = Ranks(self._group)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._deferred: list[tuple[str, Callable[[], object]]] = []
        # From the start of a save until it has committed, or its error was raised.
        self._pending = False
        self._lock = threading.Lock()
        self.stalls = {
            "seconds_save_before": 0.0,
            "seconds_copying": 0.0,
            "seconds_agreeing": 0.0,
        }
        self._agreeing = 0.0
        # A weak reference: the list of exit functions must not keep the buffers alive.
        atexit.register(_finish_at_exit, weakref.ref(self))

    @property
    def stall_seconds(self) -> float:
        """The time for which the last save kept training waiting, in all."""
        return sum(self.stalls.values())

    def save(
        self,
        path: StrPath,
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes | str] | None = None,
        per_rank: Any = None,
        overwrite: bool = True,
        digest: str = "xxh3",
        allow_pickle: bool = False,
    ) -> None:
        """Stage a checkpoint and return, with the arguments of
        :func:`smp_core.checkpoint.save_checkpoint`.

        Collective, but without communication on the calling thread. After it returns,
        ``state`` may change.

        Raises:
            CheckpointError: the save before this one failed.
        """
        begin = time.perf_counter()
        # One save at a time: the buffers are about to be written again.
        self.wait()
        before_is_over = time.perf_counter()
        # A copy in depth: the manifest is written when training has gone on.
        options = SaveOptions(
            copy.deepcopy(dict(metadata or {})),
            dict(extra_files or {}),
            overwrite,
            digest,
        )
        staged: Staged | None = None
        problem: Exception | None = None
        # Training waits for this copy and for nothing that is behind it.
        try:
            staged = stage(
                state, per_rank, self._ranks.rank, allow_pickle, self._buffers
            )
        except Exception as error:
            # Told to the other ranks by the thread: they are on their way to its
            # collectives.
            problem = error
        self._pending = True
        # A daemon: one that waits for a lost rank must not keep its process; the end of
        # a process waits below.
        self._thread = threading.Thread(
            target=self._write,
            args=(lasting(path), staged, problem, options),
            name="smp-checkpoint",
            daemon=True,
        )
        self._thread.start()
        self.stalls = {
            "seconds_save_before": before_is_over - begin,
            "seconds_copying": time.perf_counter() - before_is_over,
            "seconds_agreeing": self._agreeing,
        }
        self._agreeing = 0.0
        note(
            "checkpoint",
            path=os.fspath(path),
            stall_seconds=self.stall_seconds,
            **self.stalls,
            behind=True,
        )

    def _write(
        self,
        path: str,
        staged: Staged | None,
        problem: Exception | None,
        options: SaveOptions,
    ) -> None:
        def staged_here() -> Staged:
            if problem is not None:
                raise problem
            assert staged is not None
            return staged

        # Options and staging fail inside, where all ranks learn of it.
        try:
            write_staged(path, staged_here, options, self._ranks)
        except BaseException as error:
            self._error = error
            return
        # Actions can be added while others run, so the list is emptied until nothing is
        # left; only then is the save over for `after_commit`.
        while True:
            with self._lock:
                deferred, self._deferred = self._deferred, []
                if not deferred:
                    self._pending = False
                    return
            for what, action in deferred:
                _attempt(what, action)

    @property
    def in_flight(self) -> bool:
        """Return whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile; cheap, for once per
        step.

        Raises:
            CheckpointError: the last save failed.
        """
        # A thread that has ended is waited for in no time.
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def settle(self) -> None:
        """Raise the error of the save in flight on all ranks at once, when it has ended
        on all. Call it once per step.

        Collective while a save is in flight (one number over gloo), local otherwise.
        :meth:`check` alone would let the rank whose thread is first leave the others
        behind in a collective of training.

        Raises:
            CheckpointError: the last save failed; on all ranks at the same call.
        """
        if self._thread is None:
            return
        ended = not self._thread.is_alive()
        if self._status_group is not None:
            # The minimum: 1 only where the writer has ended on all ranks.
            begin = time.perf_counter()
            everywhere = torch.tensor(int(ended))
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._status_group)
            ended = bool(everywhere)
            self._agreeing += time.perf_counter() - begin
        if ended:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: it failed. What waited for it (removals) is given up and
                logged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            # Nothing that was to follow this save may happen: it may remove the last
            # good one.
            with self._lock:
                given_up, self._deferred = self._deferred, []
                self._pending = False
            if given_up:
                undone = ", ".join(what for what, _ in given_up)
                logger.warning(
                    "not done, because the save that was to come first failed: %s",
                    undone,
                )
            raise CheckpointError(str(error)) from error

    def after_commit(self, what: str, action: Callable[[], object]) -> None:
        """Run an action once the save in flight has committed, at once when there is
        none. Call it on one rank.

        Args:
            what: its name in messages, as in ``"removal of ..."``.
            action: it runs on the writing thread; an error there is logged.
        """
        # The lock excludes that the thread takes the list between look and append.
        with self._lock:
            if self._pending:
                self._deferred.append((what, action))
                return
        action()

    def remove(self, path: StrPath) -> None:
        """Remove a checkpoint, once the save in flight has committed. Call it on one
        rank.

        Raises:
            CheckpointError: nothing is in flight and the path is not a checkpoint.
        """
        path = lasting(path)
        self.after_commit(f"removal of {path}", lambda: remove_checkpoint(path))

    def close(self) -> None:
        """Wait for the save in flight and free the host buffers; torch ends the process
        group.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            # The memory is freed with the buffers.
            self._buffers = HostBuffers()


def _attempt(what: str, action: Callable[[], object]) -> None:
    """Run a deferred action, and log its error."""
    try:
        action()
    except Exception as error:
        logger.error("%s failed: %s", what, error)


def _finish_at_exit(reference: weakref.ref[AsyncCheckpointer]) -> None:
    """Let the save in flight finish before the process ends; its collectives end within
    the group's timeout."""
    checkpointer = reference()
    if checkpointer is not None:
        try:
            checkpointer.wait()
        except CheckpointError as error:
            logger.error("%s", error)
