"""Work behind the computation: a thread on CPU, a stream of its own on an accelerator.

A hop across replicas of several stages cannot be handed to a library as one
asynchronous call, and running it where it is asked for could dead-lock: replicas may
ask in the middle of a backward pass, or at its end, or only after they have heard from
one another that there is something to send. So stages run behind the caller, one
submission after another, in the order of submission, which is the same on all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from smp_core.torch_facts import streams


class Pending(Protocol):
    """Something to wait for; ``dist.Work`` is one."""

    def wait(self) -> object: ...


class _Task:
    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class _Recorded:
    """Work on a stream. Holds what was launched, and with it the tensors it uses, until
    it was waited for: memory that is given up before may be allocated again by the
    stream it came from, while this one still reads it."""

    def __init__(self, event: torch.Event, run: Callable[[], None]) -> None:
        self.event = event
        self.run: Callable[[], None] | None = run

    def wait(self) -> None:
        # Not torch.accelerator's stream: it waits for a torch.Event only, and passes by
        # torch.cuda's without a word.
        self.event.wait()
        self.run = None


class Background:
    """Runs functions in order behind the caller. On CPU their errors are raised by
    ``wait``.

    The thread lives while there is work, so that none is left behind, and is a daemon,
    so that a rank whose peers are gone can still end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._tasks: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._running = False

    def submit(self, run: Callable[[], None]) -> Pending:
        """Run ``run`` after everything submitted before it. Tensors it uses live at
        least until the returned object has been waited for.

        On an accelerator ``run`` is called at once and what it launches goes to the
        stream, behind what the caller's stream has launched so far.
        """
        if streams.run_behind(self.device):
            return self._on_stream(run)
        task = _Task(run)
        # The thread ends when it finds nothing to do: both look at the list under the
        # lock.
        with self._lock:
            self._tasks.append(task)
            if not self._running:
                self._running = True
                threading.Thread(
                    target=self._work, name="smp-background", daemon=True
                ).start()
        return task

    def _work(self) -> None:
        # Grad mode is per thread.
        with torch.no_grad():
            while True:
                with self._lock:
                    if not self._tasks:
                        self._running = False
                        return
                    task = self._tasks.popleft()
                try:
                    task.run()
                except BaseException as error:  # raised where somebody waits
                    task.error = error
                # First nothing of the work is alive in this thread any more, then its
                # end is announced: its tensors may be freed then.
                done = task.done
                del task
                done.set()

    def _on_stream(self, run: Callable[[], None]) -> Pending:
        module = torch.get_device_module(self.device.type)
        if self._stream is None:
            # As FSDP2's own: its small kernels are not to queue behind those of the
            # pass.
            self._stream = module.Stream(self.device, priority=-1)
        # What the caller has launched so far is complete before this begins.
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            run()
        return _Recorded(self._stream.record_event(), run)
