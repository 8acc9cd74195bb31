"""A run that was saved goes on as if it had not been interrupted: on other numbers of
ranks, other shard degrees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, Timer
from torch import nn

from tests.lightning.modules import ScheduledModule
from tests.lightning.resuming import BATCHES, assert_goes_on, fit_from
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    report,
    together,
    whole_weights,
)


@contextmanager
def one_rank_world() -> Iterator[None]:
    """This process as the only rank of a process group, as torchrun --nproc-per-node=1
    would start it."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "SMP_RANKS_PER_NODE": "1",
    }
    with patch.dict(os.environ, environment):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_ranks(ranks: int, *args: Any, **kwargs: Any) -> list[Run]:
    if ranks > 1:
        return together(fit_from, *args, ranks=ranks, **kwargs)
    with one_rank_world():
        return [fit_from(*args, **kwargs)]


# (ranks, shard degree) of the run that saves, and of the one that goes on.
MOVES = [
    ((4, 4), (2, 2)),
    ((4, 2), (1, 1)),
    ((2, 2), (4, 4)),
    ((4, 1), (4, 2)),
    ((4, 4), (4, 1)),
    ((4, 2), (2, 1)),
    ((2, 1), (4, 2)),
    ((4, 4), (1, 1)),
    ((1, 1), (4, 4)),
    ((4, 2), (4, 4)),
]


def check_move(before: tuple[int, int], later: tuple[int, int], path: Path) -> None:
    on_ranks(before[0], {"shard_degree": before[1]}, 1, save=str(path))
    assert path.is_dir()
    runs = on_ranks(later[0], {"shard_degree": later[1]}, 3, load=str(path))
    assert_goes_on(runs, fit_from(None, 3))


@pytest.mark.parametrize("before, later", MOVES[:1], ids=str)
def test_a_run_goes_on_with_other_ranks_and_degrees(
    before: tuple[int, int], later: tuple[int, int], tmp_path: Path
) -> None:
    check_move(before, later, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("before, later", MOVES, ids=str)
def test_a_run_goes_on_with_other_ranks_and_degrees_everywhere(
    before: tuple[int, int], later: tuple[int, int], tmp_path: Path
) -> None:
    check_move(before, later, tmp_path / "saved")


def validate_from(knobs: dict[str, Any], path: str) -> Run:
    """Evaluation of a checkpoint by a trainer that has not fitted anything."""
    module = ScheduledModule(batches=BATCHES)
    trainer = make_trainer(knobs, precision="64-true")
    trainer.validate(module, ckpt_path=path, verbose=False)
    return report(trainer, module)


def test_a_saved_run_is_validated_on_other_ranks(tmp_path: Path) -> None:
    """The optimizer's part of the checkpoint is left alone."""
    path = str(tmp_path / "saved")
    saved = on_ranks(4, {"shard_degree": 4}, 1, save=path)[0]
    runs = together(validate_from, {"shard_degree": 1}, path, ranks=2)
    expected = fit_from(None, 1)
    assert_same(runs, Run([], expected.weights, expected.metrics))
    assert_same(runs, Run([], saved.weights, saved.metrics))


class Extended(ScheduledModule):
    """A layer more than was saved."""

    def build(self) -> None:
        super().build()
        self.added = nn.Linear(3, 2)

    @property
    def strict_loading(self) -> bool:
        return False


def validate_extended(path: str) -> Run:
    module = Extended(batches=BATCHES)
    start = whole_weights(module.added)
    trainer = make_trainer({"shard_degree": 2}, precision="64-true")
    trainer.validate(module, ckpt_path=path, verbose=False)
    return report(trainer, module, start=start)


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_strict_loading_what_fits_is_loaded_and_the_rest_kept(
    whole: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    saved = on_ranks(
        4, {"shard_degree": 4, "checkpoint": {"full_state_dict": whole}}, 1, save=path
    )[0]
    runs = together(validate_extended, path, ranks=2)
    # What is not in the checkpoint is rank 0's, the same on all.
    kept = {f"added.{name}": value for name, value in runs[0].extra["start"].items()}
    assert_same(runs, Run([], {**saved.weights, **kept}, saved.metrics))


class WithRecalls(ScheduledModule):
    """Logs a metric of three numbers, which no logger takes."""

    def build(self) -> None:
        super().build()
        self.recalls = torchmetrics.Recall("multiclass", num_classes=3, average=None)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.recalls(batch[:, 0] % 3, batch[:, 1] % 3)
        self.log("recalls", self.recalls, logger=False, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def recalls(epochs: int, load: str | None = None, save: str | None = None) -> Any:
    """Return the metric as a resumed run begins, and as it ends."""
    module = WithRecalls(batches=BATCHES)
    found = Mock(return_value=None)
    module.on_train_epoch_start = lambda: found(trainer.callback_metrics.get("recalls"))  # type: ignore[method-assign]
    trainer = make_trainer(None, max_epochs=epochs)
    trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return found.call_args.args[0], trainer.callback_metrics["recalls"]


def test_a_metric_of_several_numbers_is_saved_and_found_again(tmp_path: Path) -> None:
    with one_rank_world():
        nothing, saved = recalls(1, save=str(tmp_path / "saved"))
        found, _ = recalls(2, load=str(tmp_path / "saved"))
    assert nothing is None and saved.shape == (3,) and saved.any()
    assert torch.equal(found, saved.double())


class WithBackbone(ScheduledModule):
    """A layer that is frozen at first and has no part in the optimizer then."""

    def build(self) -> None:
        super().build()
        self.backbone = nn.Linear(3, 4)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        row = torch.ones(1, 3, dtype=torch.float64)
        return super().loss(tokens) + self.backbone(row).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(
            [p for p in self.parameters() if p.requires_grad], lr=self.lr
        )


def fit_with_callbacks(
    knobs: dict[str, Any] | None,
    epochs: int,
    load: str | None = None,
    save: str | None = None,
    timed: bool = False,
) -> Run:
    """The backbone is unfrozen after the first epoch. ``timed``: with a timer that has
    run out when it is restored."""
    module = WithBackbone(batches=BATCHES)
    limit = timedelta(microseconds=1) if timed else timedelta(days=1)
    callbacks = [
        BackboneFinetuning(1, backbone_initial_lr=1e-3, verbose=False),
        Timer(limit, verbose=False),
    ]
    trainer = make_trainer(
        knobs, max_epochs=epochs, precision="64-true", callbacks=callbacks
    )
    trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return report(trainer, module, steps=trainer.global_step, rates=rates)


def test_callbacks_have_their_states_when_a_resumed_fit_starts(tmp_path: Path) -> None:
    """BackboneFinetuning makes its parameter groups anew, and Timer stops before the
    first step, as in one process, which rounds float64 weights to float32 when it loads
    them."""
    ours, theirs, knobs = (
        str(tmp_path / "ours"),
        str(tmp_path / "theirs"),
        {"shard_degree": 2},
    )
    together(fit_with_callbacks, knobs, 2, save=ours, ranks=2)
    fit_with_callbacks(None, 2, save=theirs)
    expected = fit_with_callbacks(None, 3, load=theirs)
    runs = together(fit_with_callbacks, knobs, 3, load=ours, ranks=2)
    assert_same(runs, expected, tolerance=1e-6)
    assert all(
        run.extra == expected.extra and len(run.extra["rates"]) == 2 for run in runs
    )
    stopped = fit_with_callbacks(None, 3, load=theirs, timed=True).extra["steps"]
    assert all(
        run.extra["steps"] == stopped
        for run in together(
            fit_with_callbacks, knobs, 3, load=ours, timed=True, ranks=2
        )
    )
