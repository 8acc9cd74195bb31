"""With ``optimizer_shard="world"`` parameters have no gradients: whoever looks for them
under Trainer is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from accelerate_smp.trainer import SmpTrainer
from tests.accelerate import program_parts, program_runs
from tests.harness import run_ranks
from tests.logged import warnings_said


class Drops(TrainerCallback):
    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        for parameter in model.parameters():
            parameter.grad = None


class Reads(Drops):
    """Inherits the one event, and has the other."""

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.seen = [parameter.grad for parameter in model.parameters()]


class Knows(TrainerCallback):
    """Looks where they are."""

    trainer: Any = None

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        parallel = self.trainer.accelerator.parallel
        self.seen = [stepped.grad for stepped in parallel.stepped(model.parameters())]


class Clips(SmpTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        # Finds them itself.
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


class Scales(SmpTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss


def words(
    folder: Path,
    kind: type[SmpTrainer],
    callbacks: list[TrainerCallback],
    knobs: dict[str, Any],
) -> list[str]:
    """What is said about gradients in a training."""
    program_runs.reset()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    rows = program_parts.make_rows("dict", 16, "fixed", 1)
    trainer = kind(
        model=program_parts.make_model("dict", 1),
        args=args,
        train_dataset=rows,
        callbacks=callbacks,
        smp_config=knobs,
    )
    for callback in callbacks:
        if isinstance(callback, Knows):
            callback.trainer = trainer
    with warnings_said() as said:
        trainer.train()
    return [line for line in said if "leaves no gradients" in line]


def all_words(folder: Path) -> list[list[str]]:
    world = {"shard_degree": 1, "optimizer_shard": "world"}
    return [
        words(folder, Scales, [Reads()], world),
        words(folder, Clips, [Knows()], world),
        words(folder, Scales, [Reads()], {"shard_degree": 2}),
    ]


def test_callbacks_and_steps_that_look_for_gradients_are_named(tmp_path: Path) -> None:
    of_rank_0, of_rank_1 = run_ranks(all_words, 2, tmp_path)
    (said,), of_others, of_shards = of_rank_0
    for name in (
        "Reads.on_optimizer_step",
        "Drops.on_pre_optimizer_step",
        "Scales.training_step",
    ):
        assert name in said
    assert (
        "trainer.accelerator.parallel.stepped(parameters)" in said
        and "optimizer_shard='shard'" in said
    )
    assert of_others == [] and of_shards == []
    assert of_rank_1 == [[], [], []]
