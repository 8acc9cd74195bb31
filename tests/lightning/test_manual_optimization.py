"""Manual optimization equals one process: two optimizers, accumulation by hand,
parameters of the LightningModule."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.core.models import VOCABULARY, loss_of
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


@pytest.mark.parametrize(
    "style, degree",
    [
        ("toggled", 2),
        ("leaking", 4),
        pytest.param("in_closure", 2, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("toggled", 4), ("toggled", 1), ("cleared", 2))
        ),
    ],
)
def test_two_optimizers_train_like_one_process(style: str, degree: int) -> None:
    expected = fit(Adversaries, {"style": style}, **EXACT)
    assert_same(
        together(fit, Adversaries, {"style": style}, {"shard_degree": degree}, **EXACT),
        expected,
    )


class StepsLast(Adversaries):
    """Both backward passes, then both steps: the discriminator's forward gathers the
    generator before its step, and nothing frees it in between."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        noise, real = batch[:, :4], batch[:, 4:]
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        generator.zero_grad()
        self.manual_backward(self.note(self.generator_loss(noise)))
        discriminator.zero_grad()
        self.manual_backward(self.note(self.discriminator_loss(noise, real)))
        generator.step()
        discriminator.step()


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_forward_uses_weights_from_before_a_step(degree: int) -> None:
    assert_same(
        together(fit, StepsLast, knobs={"shard_degree": degree}, **EXACT),
        fit(StepsLast, **EXACT),
    )


class Sharing(Adversaries):
    """A layer of the generator is the discriminator's too."""

    def build(self) -> None:
        super().build()
        shared = nn.Linear(6, 6)
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), shared)
        self.discriminator = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 1))

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW(self.generator.parameters(), lr=0.01)
        return [
            generator,
            torch.optim.SGD(self.discriminator[2].parameters(), lr=0.1, momentum=0.9),
        ]


def test_two_networks_may_share_a_unit() -> None:
    style, knobs = {"style": "cleared"}, {"shard_degree": 2, "units": ["Linear"]}
    assert_same(
        together(fit, Sharing, style, knobs, **EXACT), fit(Sharing, style, **EXACT)
    )


class ByHand(LanguageModule):
    """Accumulates two micro-batches by hand; options["way"] says how."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        last = batch_idx % 2 == 1
        block = getattr(
            self.trainer.strategy, "block_backward_sync", contextlib.nullcontext
        )
        context: Any = contextlib.nullcontext()
        if self.options["way"] == "toggle_model":
            context = optimizer.toggle_model(sync_grad=last)
        elif self.options["way"] == "every backward blocked" or (
            self.options["way"] == "block" and not last
        ):
            context = block()
        with context:
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            self.manual_backward(loss / 2)
        if last:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "way",
    [
        "toggle_model",
        "every backward blocked",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("block", "nothing blocked")
        ),
    ],
)
def test_accumulation_by_hand_equals_one_process(way: str) -> None:
    expected = fit(ByHand, {"way": "nothing blocked"}, **EXACT)
    assert_same(
        together(fit, ByHand, {"way": way}, {"shard_degree": 2}, **EXACT), expected
    )


class TwoSpeeds(Adversaries):
    """The generator steps after every second batch, its first backward blocked; the
    discriminator after every one, in the middle of the generator's window."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        noise, real = batch[:, :4], batch[:, 4:]
        slow, fast = self.optimizers()  # type: ignore[misc]
        last = batch_idx % 2 == 1
        with slow.toggle_model(sync_grad=last):
            self.manual_backward(self.note(self.generator_loss(noise) / 2))
        if last:
            slow.step()
            slow.zero_grad()
        with fast.toggle_model():
            fast.zero_grad()
            self.manual_backward(self.note(self.discriminator_loss(noise, real)))
            fast.step()


def test_one_optimizer_may_step_inside_the_window_of_another() -> None:
    assert_same(
        together(fit, TwoSpeeds, knobs={"shard_degree": 2}, **EXACT),
        fit(TwoSpeeds, **EXACT),
    )


class Twins(Adversaries):
    """Two optimizers of one kind, of different learning rates."""

    def configure_optimizers(self) -> Any:
        slow = torch.optim.AdamW(self.generator.parameters(), lr=0.01)
        return [slow, torch.optim.AdamW(self.discriminator.parameters(), lr=0.05)]


def fit_monitored(folder: str, knobs: dict[str, Any] | None = None) -> Run:
    monitor = LearningRateMonitor("step")
    module = Twins(style="toggled", batches=2)
    trainer = make_trainer(
        knobs,
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        **EXACT,
    )
    trainer.fit(module)
    return report(trainer, module, rates=dict(monitor.lrs))


def test_the_learning_rates_of_two_optimizers_of_one_kind_are_both_logged(
    tmp_path: Path,
) -> None:
    expected = fit_monitored(str(tmp_path / "alone"))
    assert list(expected.extra["rates"]) == ["lr-AdamW", "lr-AdamW-1"]
    for run in together(
        fit_monitored, str(tmp_path / "ours"), {"shard_degree": 2}, ranks=2
    ):
        assert_same(run, expected)
        assert run.extra["rates"] == expected.extra["rates"]


class OwnParameters(LanguageModule):
    """Parameters directly on the LightningModule, one of them 0-d, beside a child's;
    uneven: 23 rows."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.randn(VOCABULARY))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.automatic_optimization = not self.options.get("manual", False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens) * self.scale / self.temperature

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self, tokens)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None


@pytest.mark.parametrize(
    "degree", [2, *(pytest.param(degree, marks=pytest.mark.slow) for degree in (1, 4))]
)
@pytest.mark.parametrize("manual", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parameters_of_the_lightning_module_itself_train_like_one_process(
    manual: bool, degree: int
) -> None:
    flags = {
        **EXACT,
        **({} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    }
    expected = fit(OwnParameters, {"manual": manual}, **flags)
    assert_same(
        together(
            fit, OwnParameters, {"manual": manual}, {"shard_degree": degree}, **flags
        ),
        expected,
    )
