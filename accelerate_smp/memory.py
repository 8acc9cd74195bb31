"""The newest state in shared memory, under a bare loop: gone on from at the start, kept
at the end of steps."""

from __future__ import annotations

import atexit
import os
from typing import Any

from accelerate_smp import checkpoints
from accelerate_smp.handle import parallel_of
from accelerate_smp.saved_states import SavedStatesAccelerator, load
from smp_core.checkpoint import (
    NoSuchFolder,
    Ranks,
    first_undamaged,
    join,
    readable_checkpoints,
)
from smp_core.checkpoint.memory import MemoryCheckpoint, MemoryTier
from smp_core.config import SmpConfig
from smp_core.entry import memory_tier
from smp_core.topology import Topology
from smp_core.watch import meet


class StatesInMemoryAccelerator(SavedStatesAccelerator):
    """An Accelerator that goes on from the newest of memory and disk, and keeps states
    in memory. The hooks of saves (``_save_model_state_pre_hook``,
    ``_load_model_state_pre_hook``) have no public name in Accelerate.

    Attributes:
        memory: the states of ``checkpoint.memory_every_n_steps``, while a run keeps
            them: one of :meth:`load_newest_state`, or Trainer's.
    """

    memory: MemoryTier | None = None
    _phases_before: tuple[MemoryTier, ...] = ()
    _asked: SmpConfig
    _topology: Topology | None
    _kept_until = 0  # the optimizer step that keep_state() has seen last

    def load_newest_state(
        self, root: str | os.PathLike[str], **options: Any
    ) -> str | None:
        """Load the newest state that is whole: of the checkpoints in a folder and, with
        ``checkpoint={"memory_every_n_steps": N}``, of what an earlier process of the
        run kept in memory. Collective.

        Call it after ``prepare``, once, also where there may be nothing yet; broken
        checkpoints are skipped, with a warning that names them.

        Args:
            root: the folder that :meth:`save_state` is given folders in. It names the
                run in memory.
            options: as of :meth:`load_state`.

        Returns:
            what was loaded, for a message; None where there is nothing: the run begins
            at step 0, whatever this process has trained before.
            ``optimizer_steps`` tells where it goes on.

        Raises:
            CheckpointError: all checkpoints there are broken, or what was found does
                not fit; on all ranks.
        """
        if not self.smp:
            raise ValueError(
                "load_newest_state() reads folders of torch-smp; with smp=False use load_state(folder)"
            )
        meet("accelerator.load_newest_state(...)")
        self.wait_for_save()
        text = os.fspath(root)
        newest: MemoryCheckpoint | str | None
        memory = self.make_memory(text, "loop")
        newest = (
            self._newest_on_disk(text)
            if memory is None
            else memory.newest(lambda: self._newest_on_disk(text))
        )
        if newest is None:
            self.resume_counting(0)
        else:
            load(self, newest, **options)
        # States that are kept from here on are of this run; what is there at the
        # process's end stays for the next start.
        if memory is not None:
            memory.begin(self.optimizer_steps)
            atexit.register(self.close_memory, ended_well=False)
        self._kept_until = self.optimizer_steps
        return None if newest is None else os.fspath(newest)

    def make_memory(
        self, saves_to: str, by: str, inside: str = ""
    ) -> MemoryTier | None:
        """Make what a run keeps its states in (:func:`smp_core.entry.memory_tier`);
        None without the knob, and in one process. Collective.

        What a phase of the loop before has kept stays until the last one has ended:
        started again, the script needs it.
        """
        if not self._keeps_states or self._topology is None:
            return None
        if self.memory is not None:
            self.memory.close(ended_well=False)
            self._phases_before = (*self._phases_before, self.memory)
        self.memory = memory_tier(self._asked, self._topology, saves_to, by, inside)
        return self.memory

    @property
    def _keeps_states(self) -> bool:
        return self.smp and bool(self.smp_config.checkpoint.memory_every_n_steps)

    def _newest_on_disk(self, root: str) -> str | None:
        def names() -> list[str]:
            try:
                return readable_checkpoints(root)
            except NoSuchFolder:
                return []

        found = Ranks().on_first(f"no checkpoint of {root} was loaded", names)
        newest_first = [join(root, name) for name in reversed(found)]
        return (
            first_undamaged(newest_first, self.smp_config.checkpoint.verify)
            if newest_first
            else None
        )

    def keep_state(self) -> None:
        """Keep the newest state in shared memory, at every Nth step of
        ``checkpoint={"memory_every_n_steps": N}``. Collective.

        Call it at the end of each step, schedules included. It does nothing without the
        knob, in one process, and inside an accumulation window. What :meth:`save_state`
        saves is kept; the call returns when what may change before the next optimizer
        step has been copied.

        Raises:
            RuntimeError: :meth:`load_newest_state` was not called: it names the run.
            ValueError: hooks of ``register_save_state_pre_hook``, which write into the
                folder of a save.
            CheckpointError: the state, or the one before, could not be kept; on all
                ranks.
        """
        if not self._keeps_states or self._topology is None:
            return
        # What there has to be.
        if self.memory is None:
            raise RuntimeError(
                "keep_state() does not know whose state it keeps: call accelerator.load_newest_state('checkpoints') "
                "after prepare(), also where there is nothing to load yet"
            )
        if self._save_model_state_pre_hook or self._load_model_state_pre_hook:
            raise ValueError(
                "register_save_state_pre_hook and register_load_state_pre_hook read and write files in the folder of a "
                "save, which a state in memory does not have; use register_for_checkpointing, or write "
                "checkpoint={'memory_every_n_steps': 0}"
            )
        # Between windows, once a step.
        step = self.optimizer_steps
        handles = map(parallel_of, self._models)
        if step == self._kept_until or any(
            handle is not None and handle.window.is_open for handle in handles
        ):
            return
        self._kept_until = step
        if self.memory.is_due(step):
            checkpoints.keep(self, self.memory, {"step": step})

    def load_state(self, *arguments: Any, **options: Any) -> None:
        """Load as without states in memory, once the newest one has been copied. What
        was kept is removed: training goes on from elsewhere."""
        if self.memory is not None:
            self.memory.before_update()
        super().load_state(*arguments, **options)
        if self.memory is not None:
            self.memory.set_back(self.optimizer_steps)
            self._kept_until = self.optimizer_steps

    def close_memory(self, ended_well: bool) -> None:
        """Free the states in memory if the run ended well; otherwise they stay, and a
        line says so. Collective if it ended well."""
        before, self._phases_before = self._phases_before, ()
        memory, self.memory = self.memory, None
        # The states of all phases stay if the run failed: the script starts with the
        # first phase again.
        for each in before if ended_well else ():
            each.close(ended_well)
        if memory is not None:
            memory.close(ended_well)
