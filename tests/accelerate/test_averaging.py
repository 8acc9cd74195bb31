"""An average of the weights beside Trainer is torch's AveragedModel in one process,
through checkpoints, at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from transformers import TrainerCallback

from accelerate_smp import SmpAveragingCallback
from tests.accelerate.trainers import make_trainer, whole_weights
from tests.harness import run_ranks

DECAY, FIRST, EVERY, STEPS = 0.7, 2, 3, 6
FLAGS: dict[str, Any] = {"max_steps": STEPS, "max_grad_norm": 1e9}


class Alone(TrainerCallback):
    """torch's average of a model in one process."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step >= FIRST and (state.global_step - FIRST) % EVERY == 0:
            self.average.update_parameters(model)


Weights = dict[str, torch.Tensor]


def alone(
    folder: Path, batch: int = 8, micro_batches: int = 1
) -> tuple[Weights, Weights, float]:
    """The average, the weights, and the loss of the average."""
    trainer, _ = make_trainer(folder, batch, micro_batches, **FLAGS)
    callback = Alone()
    trainer.add_callback(callback)
    trainer.train()
    weights = whole_weights(trainer.model)
    average = dict(callback.average.module.state_dict())
    trainer.model.load_state_dict(average)
    return average, weights, trainer.evaluate()["eval_loss"]


def in_two_fits(
    folder: Path, first: dict[str, Any], second: dict[str, Any], elsewhere: bool
) -> tuple[Weights, Weights, float]:
    """Train to the middle, save, and go on at another layout; ``elsewhere``: in another
    folder, from the checkpoint in the first one."""
    options = {"every_n_steps": EVERY, "start_step": FIRST, "take_at_end": False}
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    trainer, _ = make_trainer(folder, 8, 1, first, **{**FLAGS, **saving})
    trainer.add_callback(SmpAveragingCallback(DECAY, **options))
    trainer.add_callback(_StopAt(3))
    trainer.train()
    resume: Any = True
    if elsewhere:
        resume, folder = folder / "checkpoint-3", folder / "elsewhere"
    trainer, _ = make_trainer(folder, 8, 1, second, **{**FLAGS, **saving})
    callback = SmpAveragingCallback(DECAY, device="cpu", **options)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    with callback.averaged():
        average, loss = whole_weights(trainer.model), trainer.evaluate()["eval_loss"]
    assert [each.name for each in (folder / "averages").iterdir()] == ["step-6"]
    return average, whole_weights(trainer.model), loss


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "elsewhere"),
    [
        ({"shard_degree": 4}, {"shard_degree": 2}, True),
        ({"shard_degree": 2, "optimizer_shard": "world"}, {"shard_degree": 4}, False),
        ({"shard_degree": 4}, {"shard_degree": 1, "optimizer_shard": "world"}, False),
    ],
    ids=str,
)
def test_averages_as_torch_does_in_one_process(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], elsewhere: bool
) -> None:
    """To 5 times what one process differs from itself by when it adds up in another
    order, as all runs in float32."""
    average, weights, loss = alone(tmp_path / "alone")
    assert apart(average, weights) > 1e-3
    other_average, other_weights, _ = alone(
        tmp_path / "other", batch=4, micro_batches=2
    )
    noise = max(apart(average, other_average), apart(weights, other_weights))
    assert noise < 1e-5
    for seen_average, seen_weights, seen_loss in run_ranks(
        in_two_fits, 4, tmp_path / "ranks", first, second, elsewhere
    ):
        assert (
            apart(seen_average, average) <= 5 * noise
            and apart(seen_weights, weights) <= 5 * noise
        )
        assert abs(seen_loss - loss) <= 2e-6


def apart(seen: Weights, expected: Weights) -> float:
    return max(
        (seen[name] - value).abs().max().item() for name, value in expected.items()
    )


def taken_at_end(folder: Path) -> float:
    trainer, _ = make_trainer(folder, 8, 1, {"shard_degree": 2}, **FLAGS)
    callback = SmpAveragingCallback(DECAY)
    trainer.add_callback(callback)
    trainer.train()
    seen = whole_weights(trainer.model)
    with callback.averaged():
        average = whole_weights(trainer.model)
    # The best model would be loaded, and written over at once.
    trainer.args.load_best_model_at_end = True
    with pytest.raises(ValueError, match="write take_at_end=False"):
        trainer.train()
    return apart(seen, average)


def test_the_average_is_taken_when_training_ends(tmp_path: Path) -> None:
    assert run_ranks(taken_at_end, 2, tmp_path) == [0.0, 0.0]


def test_wrong_options_and_whole_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="decay=1: allowed are numbers from 0 to below 1"
    ):
        SmpAveragingCallback(1)
    with pytest.raises(ValueError, match="every_n_steps=0: must be at least 1"):
        SmpAveragingCallback(every_n_steps=0)
    with (
        pytest.raises(ValueError, match="no step has been averaged yet"),
        SmpAveragingCallback().averaged(),
    ):
        pass
    trainer, _ = make_trainer(tmp_path, 8, 1, **FLAGS)
    trainer.add_callback(SmpAveragingCallback())
    with pytest.raises(
        ValueError, match=r"use SmpTrainer, or torch\.optim.swa_utils\.AveragedModel"
    ):
        trainer.train()
