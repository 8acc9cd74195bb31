"""SmpAveragingCallback: an exponential average of the weights beside Trainer's
training, sharded as they are.

The average is a :class:`smp_core.engine.averaging.ShardedAverage`: it takes as much
memory as what this rank steps, and an update sends nothing. It is saved with each of
Trainer's checkpoints, in a folder of its own beside them (``averages/step-N`` in
``output_dir``), which any layout loads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_avg_fn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import (
    is_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from smp_core.engine import RankWeights, ShardedAverage, take_written

logger = logging.getLogger("smp")

_FOLDER = "averages"


class SmpAveragingCallback(TrainerCallback):
    """Keeps an exponential average (EMA) of the weights, and saves and resumes it with
    Trainer's checkpoints.

    The average begins as the weights after the first step that counts; each later one
    moves it by ``1 - decay`` of the way to the weights. Buffers are not averaged.

    Args:
        decay: share of the average that stays in an update, from 0 to below 1.
        every_n_steps: optimizer steps between two updates, >= 1.
        start_step: the first optimizer step that counts.
        device: where the average is kept, ``"cpu"`` for host memory; None: with the
            weights.
        take_at_end: whether the weights are the average when training has ended.

    Attributes:
        average: the average, from the beginning of training on.

    Raises:
        ValueError: an option is out of range; when training starts, a model that is not
            sharded by SmpTrainer, or ``take_at_end`` with ``load_best_model_at_end``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every_n_steps: int = 1,
        start_step: int = 1,
        device: str | torch.device | None = None,
        take_at_end: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: allowed are numbers from 0 to below 1")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.device, self.take_at_end = device, take_at_end
        self.average: ShardedAverage | None = None
        # The checkpoint that a run begins from, as SmpTrainer says before it begins.
        self.begins_from: str | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        parallel = parallel_of(model)
        if parallel is None:
            raise ValueError(
                "SmpAveragingCallback averages the weights of a model that SmpTrainer has sharded; use SmpTrainer, or "
                "torch.optim.swa_utils.AveragedModel with a model that is not sharded"
            )
        # Trainer loads the best model first, which the average would write over.
        if args.load_best_model_at_end and self.take_at_end:
            raise ValueError(
                "SmpAveragingCallback(take_at_end=True) would put the average in the place of the best model, which "
                "load_best_model_at_end=True loads; write take_at_end=False, or load_best_model_at_end=False"
            )
        # Made when the model is sharded: the average has the same shards.
        device = None if self.device is None else torch.device(self.device)
        self.average = ShardedAverage(
            parallel, device, avg_fn=get_ema_avg_fn(self.decay)
        )
        if self.begins_from is None:
            return
        # Beside the checkpoint, which may be another run's.
        saved = Path(self.begins_from).absolute().parent / _FOLDER
        saved /= f"step-{state.global_step}"
        if is_checkpoint(saved):
            template = self.average.state_dict()
            load_checkpoint(saved, template)
            self.average.load_state_dict(template)
        elif state.global_step > self.start_step and state.is_world_process_zero:
            logger.warning(
                "there is no average in %s: averaging begins with the weights of now",
                saved,
            )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        assert self.average is not None
        counted = state.global_step - self.start_step
        if counted >= 0 and counted % self.every_n_steps == 0:
            self.average.update_parameters()

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Save the average, and remove those of Trainer's checkpoints that are there no
        more. Collective."""
        assert self.average is not None
        saved = _folder(args, state)
        save_checkpoint(
            saved, self.average.state_dict(), metadata={"step": state.global_step}
        )
        if not state.is_world_process_zero:
            return
        # An average goes when Trainer has removed the checkpoint that it belongs to.
        for other in saved.parent.glob("step-*"):
            of_trainer = Path(
                str(args.output_dir), f"checkpoint-{other.name.removeprefix('step-')}"
            )
            if other != saved and not of_trainer.exists():
                remove_checkpoint(other)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        assert self.average is not None
        if self.take_at_end and self.average.n_averaged:
            self._write(self.average.module.parts)  # type: ignore[arg-type, union-attr]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model compute with the average, to evaluate it or to save it as a
        model. Collective.

        Raises:
            ValueError: nothing has been averaged yet.
        """
        if self.average is None or not self.average.n_averaged:
            raise ValueError(
                "SmpAveragingCallback.averaged(): no step has been averaged yet"
            )
        # The trained weights wait in copies, of this rank's parts, until the block
        # ends.
        weights = [part.clone() for part in RankWeights(self.average.parallel).parts]
        self._write(self.average.module.parts)  # type: ignore[arg-type, union-attr]
        try:
            yield
        finally:
            self._write(weights)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        """Write values into what this rank steps."""
        assert self.average is not None
        for part, value in zip(
            RankWeights(self.average.parallel).parts, values, strict=True
        ):
            part.copy_(value)
        take_written(self.average.parallel)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), _FOLDER, f"step-{state.global_step}")
