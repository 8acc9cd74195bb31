"""The checkpoints of transformers' Trainer, and the resumption from them.

Trainer hands saving and loading to methods of its own, one for each part
(``_save_optimizer_and_scheduler``, ``_load_rng_state``, ...); those are overridden
here:

    checkpoints     beside the model the folder ``smp_state``: sharded weights and optimizer states by name, schedule,
                    scaler, random states; loads on any number of ranks
    resume          the data position counted in samples, so that another global batch goes on where the last ended

Accelerator has no public name for the loaders that it prepared (``_dataloaders``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerState, trainer as trainer_module
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    IntervalStrategy,
    has_length,
)

from accelerate_smp import checkpoints
from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.averaging import SmpAveragingCallback
from accelerate_smp.callbacks import SmpMonitorCallback
from accelerate_smp.handle import parallel_of
from accelerate_smp.trainer_memory import KeepsInMemory
from accelerate_smp.trainer_preemption import LeavesWhenTold
from accelerate_smp.transformers_names import sort_checkpoints
from smp_core.checkpoint import (
    CheckpointError,
    OpenCheckpoint,
    Ranks,
    first_undamaged,
    is_checkpoint,
    load_full_optimizer_state,
    open_checked,
    read_manifest,
    surplus,
)
from smp_core.outside import changed
from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")

STATE_FOLDER = "smp_state"

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class CheckpointingTrainerMixin(_Base):
    """A mixin before a Trainer class whose accelerator is :class:`SmpAccelerator`."""

    accelerator: SmpAccelerator

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as Trainer does; ``save_total_limit`` removes older checkpoints once
        this one has committed."""
        # Trainer would remove older checkpoints before this one is complete.
        limit = self.args.save_total_limit
        with changed(self.args, save_total_limit=None):
            super()._save_checkpoint(model, trial)
        if limit is None or limit <= 0 or not self.accelerator.is_main_process:
            return
        # Chosen now: by the time this one has committed the next may have its folder,
        # with nothing whole in it, and the working directory may be another one.
        run_dir = os.path.abspath(self._get_output_dir(trial=trial))
        found = _oldest_first(run_dir, self.state.global_step)
        best = self.state.best_model_checkpoint
        best = best and os.path.abspath(best)

        def rotate() -> None:
            for path in _surplus(found, limit, best):
                shutil.rmtree(path, ignore_errors=True)

        checkpoints.after_commit(
            self.accelerator, f"rotation of the checkpoints in {run_dir}", rotate
        )

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as Trainer does. It removes checkpoints after the entry that ends a
        training: saves end before."""
        if "train_runtime" in logs:
            self.accelerator.wait_for_save()
        super().log(logs, *arguments, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        facts, random = self.facts_of_save()
        checkpoints.write(
            self.accelerator,
            os.path.join(output_dir, STATE_FOLDER),
            facts,
            [self.lr_scheduler],
            random,
        )

    def facts_of_save(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what the manifest of a save says, and this rank's random states; None:
        the present ones."""
        # In samples, which hold on any number of ranks.
        facts: dict[str, Any] = {
            "step": self.state.global_step,
            **self._data_position(),
        }
        # A checkpoint before or in an evaluation goes back to where that begins.
        if self.leaves is None:
            return facts, None
        return {
            **facts,
            "lacks_evaluation": self.leaves.lacks_evaluation,
        }, self.leaves.random

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        """Log, evaluate and save as Trainer does after a step; then keep the state in
        memory."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SmpMonitorCallback):
                callback.before_log_evaluate_save(self.state, self.control)
        super()._maybe_log_save_evaluate(*arguments, **keywords)
        if self.kept is not None:
            self.kept.after_step()

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the state folder has it."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the state folder has them."""

    def samples_of_a_batch(self) -> int:
        """Return the samples that all ranks read together; with ``split_batches`` they
        share the batch of one."""
        readers = (
            1
            if self.accelerator.split_batches
            else self.args.world_size // self.accelerator.batch_degree
        )
        return int(self._train_batch_size) * readers

    def _data_position(self) -> dict[str, Any]:
        """Return the run's place in the epoch's samples, and the samples of a step."""
        per_step = self.get_total_train_batch_size(self.args)
        loader: Any = self.callback_handler.train_dataloader
        epoch = self.state.epoch or 0.0
        # A stream without length is one epoch to Trainer, as long as the training.
        stream = self.args.max_steps * self.args.gradient_accumulation_steps
        batches = len(loader) if has_length(loader) else stream
        return {
            "epoch": int(epoch),
            "samples_in_epoch": round((epoch - int(epoch)) * batches)
            * self.samples_of_a_batch(),
            "samples_per_step": per_step,
        }

    # Resuming

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Train as Trainer does. ``resume_from_checkpoint=True`` skips broken
        checkpoints, with a warning that names them; ``"last"`` does too, and begins
        from nothing where no save has been completed yet, for jobs that are started
        again and again with the same command.

        With another number of ranks or another batch size, gradient accumulation is
        adapted so that an optimizer step keeps its number of samples.

        Raises:
            ValueError: no accumulation keeps it, and ``checkpoint.allow_batch_change``
                is not set.
        """
        self._opened, self._resumes_from = {}, None
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        try:
            self._trial_in_training = trial
            self._run_folder = os.path.abspath(str(self._get_output_dir(trial)))
            # Memory is looked at first: "last" and True may mean what it has.
            with self._keeping_in_memory():
                resume_from_checkpoint = self._beginning(resume_from_checkpoint)
                if isinstance(resume_from_checkpoint, str) and self._has_state(
                    resume_from_checkpoint
                ):
                    self._keep_global_batch(resume_from_checkpoint)
                    self._resumes_from = resume_from_checkpoint
                self._tell_averages(resume_from_checkpoint)
                with self._leaving_when_told(), self._skipping_batches():
                    return super().train(
                        resume_from_checkpoint, trial, *arguments, **keywords
                    )
        # A save in flight ends before the process does, or its folder would stay half.
        except BaseException:
            if self.accelerator.background_saves is not None:
                try:
                    self.accelerator.wait_for_save()
                except CheckpointError as error:  # what went wrong first is raised
                    logger.error("%s", error)
            raise

    kept: KeepsInMemory | None = None
    _trial_in_training: Any = None  # of a search, in training
    _run_folder: str  # of a trial its own
    _resumes_from: str | None = None  # a checkpoint of ours
    _steps_per_epoch: int  # optimizer steps

    @contextlib.contextmanager
    def _keeping_in_memory(self) -> Iterator[None]:
        """Keep the newest state in shared memory while training goes on; free it if
        that ends well. Collective."""
        tier = self.accelerator.make_memory(self._run_folder, "trainer", STATE_FOLDER)
        if tier is None:
            yield
            return
        self.kept = KeepsInMemory(self, tier)  # type: ignore[arg-type]
        self.add_callback(self.kept)
        # States stay for the next start unless training came to its end.
        ended_well = False
        try:
            yield
            ended_well = True
        finally:
            self.remove_callback(self.kept)
            kept, self.kept = self.kept, None
            kept.close(ended_well)

    def _tell_averages(self, resume: str | bool | None) -> None:
        """Let averages of weights begin where the run does."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SmpAveragingCallback):
                callback.begins_from = resume if isinstance(resume, str) else None

    def _beginning(self, resume: str | bool | None) -> str | bool | None:
        """Return where to begin: ``"last"`` and True become the newest of disk and
        memory. Collective."""
        if self.kept is not None:
            begin: str | bool | None = self.kept.begin(resume, self._newest_undamaged)
            if self.kept.loaded is not None:
                self._opened = {
                    os.path.join(str(begin), STATE_FOLDER): self.kept.loaded
                }
            return begin
        if resume == "last":
            return self._newest_undamaged()
        return self._newest_undamaged() or True if resume is True else resume

    def _skipping_batches(self) -> contextlib.AbstractContextManager[None]:
        """Let Trainer skip the batches of an epoch as the accelerator does, which knows
        who reads them."""
        # A function of Trainer's module, which it looks up there.
        skip = self.accelerator.skip_first_batches
        return changed(trainer_module, skip_first_batches=skip)

    leaves: LeavesWhenTold | None = None

    @contextlib.contextmanager
    def _leaving_when_told(self) -> Iterator[None]:
        """Take notices of the job's end while training goes on, and keep what
        checkpoints say of evaluations."""
        if not self.accelerator.sharding:
            yield
            return
        self.leaves = LeavesWhenTold(self)
        self.add_callback(self.leaves)
        try:
            yield
        finally:
            self.accelerator.preemption.restore()
            self.remove_callback(self.leaves)
            self.leaves = None

    def save_training(self) -> None:
        """Save a checkpoint of the present step, in the middle of training.
        Collective."""
        self._save_checkpoint(self.model, self._trial_in_training)

    _opened: Mapping[str, OpenCheckpoint] = {}

    def _state_of(self, checkpoint: str) -> OpenCheckpoint:
        """Open the state folder, once for a resumption: all its parts are of one save.
        Collective the first time."""
        path = os.path.join(checkpoint, STATE_FOLDER)
        if path not in self._opened:
            verify = self.accelerator.smp_config.checkpoint.verify
            self._opened = {
                path: open_checked(
                    path, verify, Ranks(), f"checkpoint {path} was not loaded"
                )
            }
        return self._opened[path]

    def _has_state(self, checkpoint: str) -> bool:
        path = os.path.join(checkpoint, STATE_FOLDER)
        return path in self._opened or is_checkpoint(path)

    def _newest_undamaged(self) -> str | None:
        """Return the newest complete checkpoint of the run, None where there is none at
        all. Collective."""
        ranks = Ranks()

        def candidates() -> list[str]:
            folder = self._run_folder
            found = sort_checkpoints(folder)[::-1] if os.path.isdir(folder) else []
            return [path for path in found if not self._looks_unfinished(path)]

        # The first rank lists: others may see an older state of a shared file system.
        found = ranks.on_first("no checkpoint to resume from", candidates)
        ours = [
            path for path in found if os.path.isdir(os.path.join(path, STATE_FOLDER))
        ]
        if not ours or ours[0] != found[0]:
            # Trainer's own, which have nothing to check.
            return found[0] if found else None
        states = [os.path.join(path, STATE_FOLDER) for path in ours]
        return os.path.dirname(
            first_undamaged(states, self.accelerator.smp_config.checkpoint.verify)
        )

    def _looks_unfinished(self, path: str) -> bool:
        """Return whether a crash came before the optimizer states or the Trainer's own
        state were there."""
        # Any of the two: ours, or Trainer's of another program.
        states = (STATE_FOLDER, trainer_module.OPTIMIZER_NAME)
        lacking = []
        if not any(os.path.exists(os.path.join(path, state)) for state in states):
            lacking.append(STATE_FOLDER)
        try:
            TrainerState.load_from_json(
                os.path.join(path, trainer_module.TRAINER_STATE_NAME)
            )
        except (OSError, ValueError, TypeError):
            lacking.append(trainer_module.TRAINER_STATE_NAME)
        if lacking:
            logger.warning(
                "BROKEN CHECKPOINT SKIPPED: %s has no (readable) %s",
                path,
                " and no ".join(lacking),
            )
        return bool(lacking)

    def _keep_global_batch(self, checkpoint: str) -> None:
        saved = self._state_of(checkpoint).manifest.metadata.get("samples_per_step")
        steps = self.args.gradient_accumulation_steps
        now = self.get_total_train_batch_size(self.args)
        if (
            saved in (None, now)
            or self.accelerator.smp_config.checkpoint.allow_batch_change
        ):
            return
        change = f"an optimizer step had {saved} samples when {checkpoint} was saved and has {now} here"
        # Samples of one micro-batch over all ranks have to divide those of a step.
        if saved % (now // steps):
            raise ValueError(
                f"{change} (per_device_train_batch_size x ranks x gradient_accumulation_steps={steps}), and no "
                "accumulation keeps it; change per_device_train_batch_size, or write "
                "checkpoint={'allow_batch_change': True} in smp_config to go on with another global batch"
            )
        self.args.gradient_accumulation_steps = saved // (now // steps)
        # All ranks find the same; rank 0 says it.
        say = logger.warning if is_rank_0() else logger.debug
        say(
            "%s: gradient_accumulation_steps is %d instead of %d, which keeps it at %d",
            change,
            self.args.gradient_accumulation_steps,
            steps,
            saved,
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if self._has_state(resume_from_checkpoint):
            return  # weights follow with the optimizer, once the model is sharded
        target: Any = model or self.model
        if parallel_of(target) is not None:
            raise ValueError(
                f"{resume_from_checkpoint} has no folder {STATE_FOLDER} and the model is sharded already; resume "
                "before evaluate() or predict(), or load it with from_pretrained"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._has_state(checkpoint):
            where = self._state_of(checkpoint)
            # Trainer asks for them later.
            checkpoints.read(self.accelerator, where, [self.lr_scheduler], random=False)
            return
        # A checkpoint of plain Trainer: whole states, which each rank reads and takes
        # its part of.
        stock = os.path.join(checkpoint, trainer_module.OPTIMIZER_NAME)
        if not os.path.isfile(stock):
            logger.warning(
                "%s holds no optimizer states: they start afresh", checkpoint
            )
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        saved = torch.load(stock, map_location="cpu", weights_only=True)
        load_full_optimizer_state(
            getattr(self.optimizer, "optimizer", self.optimizer), saved
        )
        schedule = os.path.join(checkpoint, trainer_module.SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not self._has_state(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._has_state(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        opened = self._state_of(checkpoint)
        # The last thing that Trainer loads; an evaluation that is lacking draws from
        # here on.
        checkpoints.restore_random(self.accelerator, opened, self.args.seed)
        if (
            opened.manifest.metadata.get("lacks_evaluation")
            and self.args.eval_strategy != IntervalStrategy.NO
        ):
            self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)

    def _load_best_model(self) -> None:
        self.accelerator.wait_for_save()
        if self.accelerator.memory is not None:
            self.accelerator.memory.before_update()
        best = self.state.best_model_checkpoint
        if best is None or not self._has_state(best):
            super()._load_best_model()
            return
        logger.info("loading the best model from %s (%s)", best, self.state.best_metric)
        checkpoints.load_weights(self.model, os.path.join(best, STATE_FOLDER))

    def get_train_dataloader(self) -> Any:
        """Make the loader of the batch size that was asked for: Transformers 4.57 goes
        on with the checkpoint's."""
        if not self.args.auto_find_batch_size:
            self._train_batch_size = self.args.train_batch_size
        return super().get_train_dataloader()

    def set_initial_training_values(
        self, *arguments: Any, **keywords: Any
    ) -> tuple[Any, ...]:
        """Count epochs and steps as Trainer does, and note the steps of an epoch."""
        values: tuple[Any, ...] = super().set_initial_training_values(
            *arguments, **keywords
        )
        self._steps_per_epoch = values[1]
        return values

    def _load_callback_state(self) -> None:
        """Load callbacks' states as Trainer does, before it computes the data position
        from the number of steps; with another global batch that number is counted in
        samples.
        """
        super()._load_callback_state()
        if self._resumes_from is None:
            return
        saved = self._state_of(self._resumes_from).manifest.metadata
        per_step = self.get_total_train_batch_size(self.args)
        if saved.get("samples_per_step", per_step) == per_step:
            return
        # Whole optimizer steps of today's size: samples of a part of one are seen
        # again.
        steps = saved["samples_in_epoch"] // per_step
        replayed = saved["samples_in_epoch"] - steps * per_step
        was = self.state.global_step
        self.state.global_step = saved["epoch"] * self._steps_per_epoch + steps
        logger.warning(
            "the global batch was %d samples and is %d now: going on after %d samples of epoch %d (%d are seen again); "
            "step %d is counted as step %d, the schedule goes on from where it was",
            saved["samples_per_step"],
            per_step,
            steps * per_step,
            saved["epoch"],
            replayed,
            was,
            self.state.global_step,
        )


def _oldest_first(run_dir: str, step: int) -> list[str]:
    """List the checkpoints in the order of their saves; the one of ``step``, saved just
    now, is at the end."""
    just_now = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
    by_step: list[str] = [
        path for path in sort_checkpoints(run_dir) if Path(path) != Path(just_now)
    ]
    return [*sorted(by_step, key=_age), just_now]


def _age(checkpoint: str) -> tuple[int, int, str]:
    try:
        return read_manifest(os.path.join(checkpoint, STATE_FOLDER)).age
    except CheckpointError:
        return (-1, 0, "")


def _surplus(found: list[str], limit: int, best: str | None) -> list[str]:
    """List the oldest checkpoints, so that ``limit`` complete ones stay; the newest and
    the best stay as in Trainer."""
    # The best one stays beside the newest, and counts.
    older_best = [
        path for path in found[:-1] if best is not None and Path(path) == Path(best)
    ]
    others = [path for path in found if path not in older_best]
    states = [os.path.join(path, STATE_FOLDER) for path in others]
    return others[: len(surplus(states, max(1, limit - len(older_best))))]
