"""The newest state of transformers' Trainer in shared memory: kept where Trainer saves,
and gone on from.

Trainer reads where a run stands from a file, ``trainer_state.json``, in the folder that
it resumes from. A state in memory has its text, which is written into the run's folder
in memory before Trainer looks there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    trainer as trainer_module,
)
from transformers.trainer_callback import ExportableState

from accelerate_smp import checkpoints
from smp_core.checkpoint import Ranks, read_rest
from smp_core.checkpoint.memory import MemoryCheckpoint, MemoryTier

_TRAINER_STATE = "trainer_state"


class KeepsInMemory(TrainerCallback):
    """Keeps the newest state in shared memory.

    Args:
        trainer: one whose accelerator is :class:`SmpAccelerator`.
        tier: of the accelerator.

    Attributes:
        loaded: the state in memory that the run goes on from; None: it does not.
    """

    def __init__(self, trainer: Trainer, tier: MemoryTier) -> None:
        self._trainer: Any = trainer
        self._tier = tier
        self.loaded: MemoryCheckpoint | None = None

    def begin(self, resume: Any, on_disk: Callable[[], str | None]) -> Any:
        """Decide where the run begins. Collective.

        Args:
            resume: as of ``train(resume_from_checkpoint=...)``.
            on_disk: returns the newest undamaged checkpoint.

        Returns:
            what to resume from: a folder with ``trainer_state.json``, or as given.
        """
        # The run begins elsewhere: what memory has of one before is removed.
        if resume is not True and resume != "last":
            self._tier.leave()
            return resume
        newest = self._tier.newest(on_disk)
        if not isinstance(newest, MemoryCheckpoint):
            return True if newest is None and resume is True else newest
        self.loaded = newest
        folder = self._tier.folder

        # Trainer reads where it stands from this file.
        def write() -> None:
            text = read_rest(newest, _TRAINER_STATE)
            folder.write("", trainer_module.TRAINER_STATE_NAME, text.encode())

        Ranks().together(f"{newest.address} was not loaded", write)
        return folder.path

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self._tier.begin(state.global_step)

    def after_step(self) -> None:
        """Keep the state of the present step if it is due. Collective; where Trainer
        saves, so that what it logs and evaluates after the step is in it."""
        trainer = self._trainer
        step = trainer.state.global_step
        if not self._tier.is_due(step):
            return
        # As Trainer does before it saves: its state has what was computed up to here.
        trainer.store_flos()
        writes = trainer.accelerator.is_main_process
        text, _ = Ranks().together(
            "the state was not kept", lambda: _text_of(trainer) if writes else ""
        )
        facts, random = trainer.facts_of_save()
        more = {_TRAINER_STATE: text}
        checkpoints.keep(
            trainer.accelerator, self._tier, facts, [trainer.lr_scheduler], random, more
        )

    def close(self, ended_well: bool) -> None:
        """Free the memory if the run ended well; otherwise the state stays, and a line
        says so."""
        self._trainer.accelerator.close_memory(ended_well)


def _text_of(trainer: Any) -> str:
    """Return what Trainer would write to ``trainer_state.json`` now, callbacks' states
    included."""
    # Several callbacks of one class have a list of states, as Trainer writes them: copies
    # of those that are there already.
    callbacks = dict(trainer.state.stateful_callbacks)
    for name, state in callbacks.items():
        if isinstance(state, list):
            callbacks[name] = list(state)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(callbacks.get(name), list):
                callbacks[name].append(callback.state())
            else:
                callbacks[name] = callback.state()
    fields = {
        field.name: getattr(trainer.state, field.name)
        for field in dataclasses.fields(trainer.state)
    }
    return json.dumps({**fields, "stateful_callbacks": callbacks})
