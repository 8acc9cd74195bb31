"""Trainers of the tests in this folder: on the ranks of the pool, posing as torchrun's,
and in one process.

`together` runs a module under `SmpShardedStrategy` on gloo ranks that pose as nodes of
two and `alone` runs it in the pytest process under Lightning's own single-device
strategy; both return a `Run`, and `assert_same` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lightning_smp import SmpShardedStrategy
from smp_core.checkpoint import read_rest
from tests.harness import run_ranks

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


@dataclass
class Run:
    """What a run showed: a loss per training batch, whole weights, logged metrics, and
    what the case added."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def strategy(**knobs: Any) -> SmpShardedStrategy:
    return SmpShardedStrategy(cluster_environment=TorchElasticEnvironment(), **knobs)


def make_trainer(knobs: dict[str, Any] | None = None, **flags: Any) -> Trainer:
    """On a rank of the pool: a Trainer with our strategy; in the pytest process: on one
    device without it."""
    if dist.is_initialized():
        flags = {
            "strategy": strategy(**(knobs or {})),
            "devices": dist.get_world_size(),
            **flags,
        }
    else:
        flags = {"devices": 1, **flags}
    return Trainer(**{**QUIET, **flags})


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


def whole_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {
        name.replace("_orig_mod.", ""): whole(value)
        for name, value in state.items()
        if torch.is_tensor(value)
    }


def report(trainer: Trainer, module: LightningModule, **extra: Any) -> Run:
    """Collective on ranks: losses are averaged over them, weights made whole."""
    losses = (
        torch.stack([loss.double() for loss in module.losses])
        if module.losses
        else torch.zeros(0)
    )
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Run(losses.tolist(), whole_weights(module), metrics, extra)


def fit(
    kind: type[LightningModule],
    options: dict[str, Any] | None = None,
    knobs: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **flags: Any,
) -> Run:
    """The case most tests run on every rank, and alone."""
    module = kind(**(options or {}))
    trainer = make_trainer(knobs, **flags)
    trainer.fit(module, ckpt_path=ckpt_path)
    return report(trainer, module)


def fit_twice(
    kind: type[LightningModule],
    options: dict[str, Any],
    folder: Path,
    first: dict[str, Any],
    second: dict[str, Any],
    **flags: Any,
) -> tuple[Trainer, LightningModule]:
    """Fits an epoch, saves, and goes on in another trainer with other knobs. Losses are
    those of both."""
    trainer, module = make_trainer(first, **flags), kind(**options)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "half.ckpt")
    losses = module.losses
    trainer, module = make_trainer(second, max_epochs=2, **flags), kind(**options)
    trainer.fit(module, ckpt_path=folder / "half.ckpt")
    module.losses = losses + module.losses
    return trainer, module


def together(
    case: Callable[..., Run], *args: Any, ranks: int = 4, **kwargs: Any
) -> list[Run]:
    """``case`` on the ranks of the pool, two to a node."""
    return run_ranks(case, ranks, *args, ranks_per_node=2, **kwargs)


def worst(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Largest difference of any element of any weight, and whose it is."""
    assert ours.keys() == theirs.keys(), (
        f"only one has {sorted(ours.keys() ^ theirs.keys())}"
    )
    return max(
        (float((ours[name].double() - theirs[name].double()).abs().max()), name)
        for name in theirs
    )


def assert_same(
    runs: Sequence[Run] | Run, expected: Run, tolerance: float = 1e-12
) -> None:
    """Losses, metrics and weights of every rank are within ``tolerance`` of the one
    process's.

    1e-12 is a few hundred float64 rounding errors of sums in another order; any wrong
    factor, missing reduction or stale weight is many orders larger.
    """
    for run in [runs] if isinstance(runs, Run) else runs:
        assert len(run.losses) == len(expected.losses)
        for step, (ours, theirs) in enumerate(
            zip(run.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= tolerance, (
                f"loss of batch {step}: {ours} against {theirs}"
            )
        assert run.metrics.keys() == expected.metrics.keys()
        for name, theirs in expected.metrics.items():
            # Metrics are kept in float32 by Lightning unless they are float64
            # themselves.
            assert abs(run.metrics[name] - theirs) <= tolerance, (
                f"{name}: {run.metrics[name]} against {theirs}"
            )
        difference, name = worst(run.weights, expected.weights)
        assert difference <= tolerance, f"{name} is {difference} off"


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Everything in a checkpoint, sharded folder or file, tensors whole."""
    if Path(path).is_file():
        return torch.load(path, weights_only=False)
    return read_rest(path, tensors=["*"])


class SaveAt(Callback):
    """Calls trainer.save_checkpoint when a batch has ended."""

    def __init__(self, path: str, epoch: int, batch: int) -> None:
        self.path, self.place = path, (epoch, batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path)
