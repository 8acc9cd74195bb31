"""Every precision of the Trainer: 32-true to summation order, half precisions to their
own rounding.

Half precision is compared under SGD: AdamW divides gradients by their size, so that
noise around zero would decide the sign of whole steps.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
    whole,
    worst,
)


class Reordered(LanguageModule):
    """The same batches, samples added up in another order: what float32 leaves open."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens.flip(0))


class Descending(LanguageModule):
    """Plain SGD: weights move in proportion to gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_float32_training_stays_within_summation_order(degree: int) -> None:
    """Losses to 1e-6 + 2e-7 per step, weights to 5x what one process differs from
    itself by when it adds up in another order (AdamW divides noise by noise where a
    gradient is zero up to rounding)."""
    flags: dict[str, Any] = {
        "precision": "32-true",
        "gradient_clip_val": 0.1,
        "accumulate_grad_batches": 2,
    }
    expected, other = fit(LanguageModule, **flags), fit(Reordered, **flags)
    noise, _ = worst(other.weights, expected.weights)
    for run in together(fit, LanguageModule, knobs={"shard_degree": degree}, **flags):
        for step, (ours, theirs) in enumerate(
            zip(run.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= 1e-6 + 2e-7 * step, (
                f"loss of batch {step}: {ours} against {theirs}"
            )
        difference, name = worst(run.weights, expected.weights)
        assert difference <= 5 * noise, (
            f"{name} is {difference} off, one process from itself {noise}"
        )


def fit_half(precision: str, knobs: dict[str, Any] | None = None) -> Run:
    module = Descending(batches=8)
    start = {
        name: value.detach().clone() for name, value in module.state_dict().items()
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(knobs, precision=precision, gradient_clip_val=1.0)
    trainer.fit(module)
    said = [str(warning.message) for warning in caught]
    dtypes = sorted({str(value.dtype) for value in module.state_dict().values()})
    config = getattr(trainer.strategy, "config", None)
    effect = config.effective()["param_dtype"] if config is not None else None
    return report(
        trainer,
        module,
        start=start,
        said=said,
        dtypes=dtypes,
        param_dtype=effect,
        rank=rank(),
    )


def movement(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return (
        float(sum((a[name].double() - b[name].double()).square().sum() for name in b))
        ** 0.5
    )


@pytest.mark.parametrize(
    "precision, knobs, dtype, tolerance",
    [
        # Parameters are gathered in float32; each rank's matrix gradients are rounded
        # to bfloat16.
        ("bf16-mixed", {}, "torch.float32", 0.005),
        # Gathered parameters and each micro-batch's gradients are rounded to bfloat16
        # (2^-9 = 0.2 % at most each); weights and sums stay float32.
        ("bf16-mixed", {"param_dtype": "bfloat16"}, "torch.float32", 0.005),
        # Weights are bfloat16: an update is rounded to the weight's own spacing, and
        # one that is rounded the other way is off by half of it.
        ("bf16-true", {}, "torch.bfloat16", 0.05),
    ],
)
@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_half_precision_trains_like_one_process_in_it(
    degree: int, precision: str, knobs: dict[str, str], dtype: str, tolerance: float
) -> None:
    """Losses to 1 % (bfloat16 counts in steps of 0.5 %), weights to ``tolerance`` of
    the way that they went, four times what is seen."""
    expected = fit_half(precision)
    way = movement(expected.weights, expected.extra["start"])
    for run in together(fit_half, precision, {"shard_degree": degree, **knobs}):
        assert run.extra["dtypes"] == expected.extra["dtypes"] == [dtype]
        for step, (ours, theirs) in enumerate(
            zip(run.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= 0.01 * theirs, (
                f"loss of batch {step}: {ours} against {theirs}"
            )
        assert movement(run.weights, expected.weights) <= tolerance * way


class Slowly(Descending):
    """Steps that bfloat16 weights would round away."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit_with_masters(
    cases: list[tuple[dict[str, Any], dict[str, Any]]], folder: str
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """For each pair of layouts: weights before, and after an epoch on the first and
    another on the second."""
    found = []
    for number, (knobs, there) in enumerate(cases):
        module, saved = (
            Slowly(batches=8),
            f"{folder}/{number}-{dist.get_world_size()}.ckpt",
        )
        start = {
            name: value.detach().bfloat16().float()
            for name, value in module.state_dict().items()
        }
        flags: dict[str, Any] = {"precision": "bf16-true", "gradient_clip_val": 1.0}
        trainer = make_trainer(knobs, **flags)
        trainer.fit(module)
        trainer.save_checkpoint(saved)
        trainer = make_trainer(there, max_epochs=2, **flags)
        trainer.fit(Slowly(batches=8), ckpt_path=saved)
        found.append(
            (
                start,
                {
                    name: whole(v).float()
                    for name, v in trainer.strategy.parallel.model_state().items()
                },
            )
        )
    return found


@pytest.mark.slow  # in the normal run: tests/core/sharding/test_master_dtype.py
def test_masters_of_a_half_precision_model_move_alike_at_every_layout(
    tmp_path: Path,
) -> None:
    """Sharded, replicated, over all replicas, on the host, and from one to the other by
    a checkpoint: to 2 % of the way of one process, whose gradients are rounded to
    bfloat16 in another order. Without masters it is a twentieth."""
    stored, world = (
        {"shard_degree": 4, "master_dtype": "float32"},
        {"shard_degree": 2, "optimizer_shard": "world"},
    )
    host = {"shard_degree": 1, "state_offload": "optimizer"}
    alone: dict[str, Any] = {"optimizer_shard": "world"}
    ((start, expected),) = run_ranks(
        fit_with_masters, 1, [(alone, alone)], str(tmp_path)
    )[0]
    way = movement(expected, start)
    for rank_of in run_ranks(
        fit_with_masters,
        4,
        [(stored, world), (world, host), (host, stored)],
        str(tmp_path),
    ):
        for _, seen in rank_of:
            assert movement(seen, expected) <= 0.02 * way
    ((_, without),) = run_ranks(fit_with_masters, 1, [({}, {})], str(tmp_path))[0]
    assert movement(without, start) < 0.5 * way


@pytest.mark.slow
def test_float16_mixed_on_cpu_is_bfloat16_and_says_so() -> None:
    """Lightning's own word, on rank 0; what took effect is in the strategy's config."""
    runs = together(fit_half, "16-mixed", {"shard_degree": 2}, ranks=2)
    said = " ".join(runs[0].extra["said"])
    assert "fp16 is not supported on CPU" in said and "bf16-mixed" in said
    expected = together(fit_half, "bf16-mixed", {"shard_degree": 2}, ranks=2)
    for run in runs:
        assert run.extra["param_dtype"] is None
        assert_same(run, expected[run.extra["rank"]], tolerance=0.0)
