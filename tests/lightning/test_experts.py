"""A mixture of experts under the Trainer: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.expert_parallel import models as models  # makes its models known
from tests.core.pipeline.cases import of_all_stages
from tests.core.tensor_parallel.model_cases import (
    Wide,
    batches,
    build,
    loss_of,
    own_loss,
)
from tests.harness import run_ranks
from tests.lightning.running import (
    Run,
    SaveAt,
    assert_same,
    make_trainer,
    report,
    together,
    whole_weights,
)
from tests.lightning.staged import StagedModule, knobs_of

BATCH, STEPS = 8, 6


class Experts(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = build(kind, seed=4)
        self.losses: list[torch.Tensor] = []

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with Wide():
            loss = loss_of(self.model, tokens)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, tokens: torch.Tensor, batch_idx: int) -> None:
        with Wide():
            self.log(
                "val_loss",
                own_loss(logits_of(self.model, tokens), tokens),
                sync_dist=True,
            )

    def configure_optimizers(self) -> Any:
        # No steps made of rounding.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def loader(self) -> DataLoader:
        rows = list(batches(1, STEPS).flatten(0, 2))
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: Any = DistributedSampler(rows, ranks, rank, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(rows, batch_size=BATCH // ranks, sampler=sampler)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = loader


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def trained(
    knobs: dict[str, Any] | None = None,
    kind: str = "own experts",
    save: str = "",
    load: str | None = None,
) -> Run:
    """Two epochs; saved in the middle of the first, or loaded from there."""
    module = Experts(kind)
    savers = [SaveAt(save, 0, 3)] if save else []
    flags: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "max_epochs": 2,
    }
    trainer = make_trainer(knobs, precision="64-true", callbacks=savers, **flags)
    trainer.fit(module, ckpt_path=load)
    return report(trainer, module)


KNOBS = {"shard_degree": 4, "expert_parallel_degree": "node"}


def test_a_fit_equals_one_process() -> None:
    """float64, 1e-12: sums in another order."""
    expected = trained()
    assert len(expected.losses) == 2 * STEPS
    assert_same(together(trained, KNOBS), expected)


@pytest.mark.slow  # in the normal run: over stages
def test_auxiliary_losses_are_those_of_one_process() -> None:
    """float64, 1e-12, as above."""
    expected = trained(kind="balanced")
    assert_same(
        together(trained, {**KNOBS, "router_balance": "global"}, "balanced"), expected
    )


def staged(batch_size: int, knobs: dict[str, Any], **flags: Any) -> Run:
    """One epoch through pipeline stages; what is logged and the losses are means over
    ranks."""
    with Wide():
        module = StagedModule(kind="balanced on 4 stages", batch_size=batch_size)
        trainer = make_trainer(
            knobs, gradient_clip_val=0.5, accumulate_grad_batches=2, **flags
        )
        trainer.fit(module)
    losses = torch.stack([loss.double() for loss in module.losses])
    parallel = getattr(trainer.strategy, "_parallel", None)
    if parallel is None:
        weights = whole_weights(module)
    else:
        weights = of_all_stages(parallel, dict(module.named_parameters()))
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Run(losses.tolist(), weights, metrics)


@pytest.mark.slow
def test_auxiliary_losses_over_stages_are_those_of_one_process() -> None:
    """float64, 1e-12, as above. An evaluation has the loss of a rank's tokens: all of
    them where a stage is one rank."""
    expected = staged(8, {})
    assert "val_loss" in expected.metrics
    assert_same(together(staged, 8, knobs_of(4, microbatches=1)), expected)


@pytest.mark.slow
def test_auxiliary_losses_over_stages_of_several_ranks_are_those_of_one_process() -> (
    None
):
    """float64, 1e-12, as above."""
    expected = staged(8, {}, limit_val_batches=0)
    knobs = {**knobs_of(2, shard=2, microbatches=1), "expert_parallel_degree": 2}
    assert_same(together(staged, 4, knobs, limit_val_batches=0), expected)


def saved_and_resumed(path: str) -> tuple[Run, Run]:
    return trained(KNOBS, save=path), trained(
        {**KNOBS, "expert_parallel_degree": 2}, load=path
    )


@pytest.mark.slow  # in the normal run: tests/core/expert_parallel/test_checkpoints.py
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_another_degree(
    tmp_path: Path,
) -> None:
    """float64, 1e-12, as above."""
    for whole, resumed in run_ranks(
        saved_and_resumed, 4, str(tmp_path / "saved"), ranks_per_node=4, timeout=300
    ):
        assert len(resumed.losses) == 2 * STEPS - 4
        rest = Run(whole.losses[4:], whole.weights, whole.metrics, whole.extra)
        assert_same(resumed, rest)
