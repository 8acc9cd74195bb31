"""`fit` under the strategy equals one process: shardings, windows, evaluation inside
them, clipping, schedules."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

from smp_core.sharding.gradients.unit_window import UnitWindow
from smp_core.sharding.optimizer.grad_norm import NonfiniteGradNormError
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank, token_rows
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
)

EXACT: dict[str, Any] = {"precision": "64-true"}

# Accumulation that the epoch's 5 batches are no multiple of; validation after batch 3,
# inside a window of 2.
WINDOWS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 1},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 2, "val_check_interval": 3, "gradient_clip_val": 0.1},
    {
        "gradient_clip_val": 0.02,
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": 2,
    },
]
KNOBS: list[dict[str, Any]] = [
    {"shard_degree": 1},
    {"shard_degree": 2},
    {"shard_degree": 4},
    {"shard_degree": 4, "collectives": {"hierarchical": False}},
    {"shard_degree": 2, "reshard_after_forward": False},
    {"shard_degree": 4, "keep_between_micro_batches": "parameters"},
    {
        "shard_degree": 2,
        "keep_between_micro_batches": "gradients",
        "reshard_after_forward": True,
    },
]
CASES = list(itertools.product(range(len(WINDOWS)), range(len(KNOBS))))
SAMPLE = [(2, 6), (3, 5), (4, 0)]


def check_fit(window: int, knobs: int) -> None:
    flags = {**EXACT, "max_epochs": 2, **WINDOWS[window]}
    options = {"batches": 5}
    expected = fit(LanguageModule, options, **flags)
    assert_same(together(fit, LanguageModule, options, KNOBS[knobs], **flags), expected)


@pytest.mark.parametrize(
    "window, knobs",
    [SAMPLE[0], pytest.param(*SAMPLE[1], marks=pytest.mark.slow), SAMPLE[2]],
)
def test_fit_equals_one_process(window: int, knobs: int) -> None:
    check_fit(window, knobs)


@pytest.mark.slow
@pytest.mark.parametrize("window, knobs", CASES)
def test_fit_equals_one_process_everywhere(window: int, knobs: int) -> None:
    check_fit(window, knobs)


def fit_without_replica_hop(*args: Any, **kwargs: Any) -> Run:
    with patch.object(UnitWindow, "send"):
        return fit(*args, **kwargs)


def test_the_comparison_fails_without_the_replica_hop() -> None:
    expected = fit(LanguageModule, **EXACT)
    runs = together(
        fit_without_replica_hop, LanguageModule, knobs={"shard_degree": 2}, **EXACT
    )
    with pytest.raises(AssertionError, match=r"against|off"):
        assert_same(runs, expected)


class CountCollectives(Callback):
    """Calls per kind in each optimizer step, as the meter has them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.units = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            parallel = trainer.strategy.parallel  # type: ignore[attr-defined]
            self.units = len(parallel.units)
            self.steps.append(parallel.meter.per_step())


def fit_counting(knobs: dict[str, Any], **flags: Any) -> Run:
    module, count = LanguageModule(batches=8), CountCollectives()
    trainer = make_trainer(knobs, callbacks=[count], **flags)
    trainer.fit(module)
    return report(trainer, module, steps=count.steps, units=count.units)


def test_replicas_are_reduced_once_per_unit_and_optimizer_step() -> None:
    """4 micro-batches over U units: 4U reduce-scatters, U replica reductions and one
    for what is replicated whole (the 0-d gain)."""
    for run in together(fit_counting, {"shard_degree": 2}, accumulate_grad_batches=4):
        units = run.extra["units"]
        assert units > 1 and len(run.extra["steps"]) == 2
        for step in run.extra["steps"]:
            assert step["reduce_scatter/calls"] == 4 * units
            assert step["all_reduce/calls"] == units + 1


@pytest.mark.parametrize("reductions", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_unit_that_stays_gathered_is_gathered_once_per_optimizer_step(
    reductions: int,
) -> None:
    """Also with an evaluation inside of windows, whose gathers belong to no step; those
    of its window come twice. And it is reduced once where gradients are held."""
    kept = "gradients" if reductions == 1 else "parameters"
    knobs = {"shard_degree": 2, "keep_between_micro_batches": kept}
    for run in together(
        fit_counting, knobs, accumulate_grad_batches=4, val_check_interval=6, ranks=2
    ):
        units = run.extra["units"]
        assert [step["all_gather/calls"] for step in run.extra["steps"]] == [
            units,
            2 * units,
        ]
        assert [step["reduce_scatter/calls"] for step in run.extra["steps"]] == [
            reductions * units
        ] * 2


class Halved(Callback):
    """Evaluates other weights than those that are trained, as who averages weights
    does."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scale(pl_module, 0.5)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scale(pl_module, 2.0)

    @torch.no_grad()
    def _scale(self, module: LightningModule, factor: float) -> None:
        for parameter in module.parameters():
            parameter.mul_(factor)


def fit_halved(knobs: dict[str, Any], **flags: Any) -> Run:
    module = LanguageModule(batches=5)
    trainer = make_trainer(knobs, callbacks=[Halved()], **flags)
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize("knobs", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_weights_that_are_put_in_place_for_an_evaluation_are_evaluated(
    knobs: int,
) -> None:
    """And those that are put back are trained on; also inside a window through which
    units stay gathered. Half and twice are exact."""
    flags = {**EXACT, **WINDOWS[3]}
    assert_same(together(fit_halved, KNOBS[knobs], **flags), fit_halved({}, **flags))


class Scheduled(LanguageModule):
    """options["schedule"]: one stepped per batch, per epoch, or by the validation
    loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        kind = self.options["schedule"]
        scheduler: Any
        if kind == "step":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=self.lr, total_steps=20
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }
        if kind == "epoch":
            return [optimizer], [
                torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            ]
        # Any change counts as too little, so that the rate falls while the loss still
        # does.
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=0, threshold=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(
            torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        )


@pytest.mark.parametrize(
    "schedule", ["step", pytest.param("epoch", marks=pytest.mark.slow), "plateau"]
)
def test_learning_rates_follow_the_schedule_of_one_process(schedule: str) -> None:
    """The rate after every batch is among the losses that are compared."""
    flags = {**EXACT, "max_epochs": 3, "accumulate_grad_batches": 2}
    expected = fit(Scheduled, {"schedule": schedule}, **flags)
    assert len(set(expected.losses[1::2])) > 1, (
        "the rate never changed: the case shows nothing"
    )
    assert_same(
        together(
            fit,
            Scheduled,
            {"schedule": schedule},
            {"shard_degree": 2},
            **flags,
            ranks=2,
        ),
        expected,
    )


def fit_by_name(name: str, **flags: Any) -> Run:
    module: LightningModule = LanguageModule()
    # Where all is planned: a micro-batch, which steps take.
    module.example_input_array = token_rows(1)[:2]
    trainer = make_trainer(strategy=name, plugins=[TorchElasticEnvironment()], **flags)
    trainer.fit(module)
    config = trainer.strategy.config  # type: ignore[attr-defined]
    planned = [knob for knob in config.knobs() if config.why(knob) == "the plan"]
    return report(
        trainer,
        module,
        degree=config.shard_degree,
        planned=planned,
        why=config.why("plan"),
    )


NAMED = [
    ("smp_sharded", 2),
    pytest.param("smp_sharded_node", 2, marks=pytest.mark.slow),
    pytest.param("smp_sharded_world", 4, marks=pytest.mark.slow),
    ("smp_sharded_auto", 1),  # all of it fits one rank
]


@pytest.mark.parametrize("name, degree", NAMED)
def test_strategies_chosen_by_name_train_like_one_process(
    name: str, degree: int
) -> None:
    """On CPU the automatic degree is one node, here 2 ranks."""
    runs = together(fit_by_name, name, **EXACT)
    assert_same(runs, fit(LanguageModule, **EXACT))
    assert [run.extra["degree"] for run in runs] == [degree] * 4
    if name == "smp_sharded_auto":
        assert (
            "shard_degree" in runs[0].extra["planned"]
            and "planned for 8 x" in runs[0].extra["why"]
        )
    assert all(run.extra == runs[0].extra for run in runs)


class BlowsUp(LanguageModule):
    """The loss of the second batch is infinite, on one rank only. options["skip"]:
    leaves such a step out itself, as on_nonfinite_grad_norm="skip" has to."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and rank() == 0 else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self.options.get("skip") and not all(
            bool(gradient.isfinite().all()) for gradient in gradients
        ):
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "flags",
    [pytest.param({}, marks=pytest.mark.slow), {"gradient_clip_val": 0.1}],
    ids=["unclipped", "clipped"],
)
def test_a_step_with_a_gradient_that_is_not_finite_is_left_out_on_all_ranks(
    flags: dict[str, Any],
) -> None:
    expected = fit(BlowsUp, {"skip": True}, **EXACT, **flags)
    assert all(bool(value.isfinite().all()) for value in expected.weights.values())
    knobs = {"shard_degree": 2, "on_nonfinite_grad_norm": "skip"}
    assert_same(together(fit, BlowsUp, knobs=knobs, **EXACT, **flags), expected)


def fit_blowing_up(knobs: dict[str, Any]) -> str:
    try:
        fit(BlowsUp, knobs=knobs)
    except NonfiniteGradNormError as error:
        return str(error)
    return "nothing was raised"


def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks_if_asked() -> None:
    knobs = {"shard_degree": 2, "on_nonfinite_grad_norm": "raise"}
    for message in run_ranks(fit_blowing_up, 4, knobs, ranks_per_node=2):
        assert "on_nonfinite_grad_norm='skip'" in message


def fit_and_drop(degree: int) -> list[str]:
    module = LanguageModule(batches=2)
    trainer = make_trainer({"shard_degree": degree})
    trainer.fit(module)
    held = {"trainer": trainer, "module": module, "parallel": trainer.strategy.parallel}  # type: ignore[attr-defined]
    references = {name: weakref.ref(value) for name, value in held.items()}
    del module, trainer, held
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_finished_run_is_freed(degree: int) -> None:
    """Notebooks and sweeps fit one model after another in one process."""
    for left in run_ranks(fit_and_drop, 2, degree):
        assert left == []
