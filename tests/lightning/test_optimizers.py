"""Optimizers as users make them under Lightning: in ``__init__``, used by several fits,
with rates that are tensors, beside schedules. All of them train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.adversaries import Adversaries
from tests.lightning.modules import LanguageModule
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
)

EXACT: dict[str, Any] = {"precision": "64-true"}
WORLD: dict[str, Any] = {"shard_degree": 1, "optimizer_shard": "world"}


class MadeInInit(LanguageModule):
    def build(self) -> None:
        super().build()
        self.made = torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.made


def fit_twice(knobs: dict[str, Any] | None = None) -> Run:
    module = MadeInInit(batches=2)
    for _ in range(2):
        trainer = make_trainer(knobs, **EXACT)
        trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize(
    "knobs", [pytest.param({"shard_degree": 2}, marks=pytest.mark.slow), WORLD], ids=str
)
def test_an_optimizer_made_in_init_trains_the_sharded_module_in_every_fit(
    knobs: dict[str, Any],
) -> None:
    assert_same(together(fit_twice, knobs, ranks=2), fit_twice())


class TensorRate(LanguageModule):
    """A rate that is a tensor, and a schedule that is made before the strategy sees the
    optimizer."""

    def configure_optimizers(self) -> Any:
        rate = torch.tensor(0.01, dtype=torch.float64)
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def resumed(knobs: dict[str, Any], path: str) -> Run:
    """One epoch, saved, and another one from there in a new run."""
    for epoch, ckpt_path in ((1, None), (2, path)):
        module = TensorRate(batches=2)
        trainer = make_trainer(knobs, max_epochs=epoch, **EXACT)
        trainer.fit(module, ckpt_path=ckpt_path)
        if epoch == 1:
            trainer.save_checkpoint(path)
    on_host = getattr(trainer.optimizers[0], "host_bytes", int)()
    return report(
        trainer,
        module,
        on_host=on_host,
        rate=float(trainer.optimizers[0].param_groups[0]["lr"]),
    )


RESUMED = [
    {"shard_degree": 2, "state_offload": "optimizer"},
    {**WORLD, "checkpoint": "full"},
]


@pytest.mark.parametrize(
    "knobs", [pytest.param(RESUMED[0], marks=pytest.mark.slow), RESUMED[1]], ids=str
)
def test_a_rate_that_is_a_tensor_and_its_schedule_go_on_after_a_resume(
    knobs: dict[str, Any], tmp_path: Path
) -> None:
    expected = fit(TensorRate, {"batches": 2}, max_epochs=2, **EXACT)
    expected.losses = expected.losses[2:]
    for run in together(resumed, knobs, str(tmp_path / "ours.ckpt"), ranks=2):
        assert_same(run, expected)
        assert run.extra["rate"] == 0.01 * 0.5**4
        assert ("state_offload" in knobs) == (run.extra["on_host"] > 0)


@pytest.mark.parametrize(
    "style", ["toggled", pytest.param("cleared", marks=pytest.mark.slow)]
)
def test_two_optimizers_over_the_world_keep_their_gradients_apart(style: str) -> None:
    """What an optimizer steps are masters then; switching them off has to switch off
    the parameters."""
    knobs = {"shard_degree": 2, "optimizer_shard": "world"}
    runs = together(fit, Adversaries, {"style": style}, knobs, **EXACT)
    assert_same(runs, fit(Adversaries, {"style": style}, **EXACT))


class Marked(LanguageModule):
    """Notes on its parameters which of them are not to decay, as Mamba does and S4."""

    def build(self) -> None:
        super().build()
        for parameter in self.model.parameters():
            if parameter.ndim < 2:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        groups: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "_no_weight_decay", False)].append(parameter)
        decayed, others = groups[False], groups[True]
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 5.0},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.01,
        )


@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 2},
        pytest.param(WORLD, marks=pytest.mark.slow),
        pytest.param(
            {"shard_degree": 2, "state_offload": "all"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_what_is_noted_on_a_parameter_is_there_when_its_optimizer_is_made(
    knobs: dict[str, Any],
) -> None:
    options = {"batches": 2}
    runs = together(fit, Marked, options, knobs, ranks=2, **EXACT)
    assert_same(runs, fit(Marked, options, **EXACT))
