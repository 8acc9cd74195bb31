"""Sequences over context ranks under the Trainer: losses, evaluation, metrics and
predictions of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from smp_core.context_parallel import positions, weighted_mean
from tests.lightning.context_modules import (
    GLOBAL_BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    HfModule,
    rows,
)
from tests.lightning.running import Run, make_trainer, report, together, whole_weights

EXACT: dict[str, Any] = {"precision": "64-true"}


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(64, WIDTH),
        )
        # No bias: a key's has no gradient but rounding, of which Adam makes steps.
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(positions(tokens))
        for block in self.blocks:
            q, k, v = (
                part.unflatten(-1, (2, -1)).transpose(1, 2)
                for part in block(x).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
                1, 2
            ).flatten(2)
        return x @ self.words.weight.T


class PairModule(HfModule):
    """(input, target) and torch's own attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(2)
        self.model = PlainModel()

    def loader(self, batches: int, seed: int, shuffle: bool = False) -> DataLoader:
        made = super().loader(batches, seed, shuffle)
        made.collate_fn = pairs
        return made

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, target = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), target.flatten())
        if self.options.get("weighted"):
            loss = weighted_mean(loss)
            self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, target = batch
        logits = self.model(tokens).flatten(0, 1)
        self.accuracy(logits, target.flatten())
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log(
            "val_loss",
            weighted_mean(F.cross_entropy(logits, target.flatten())),
            sync_dist=True,
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return (
            self.trainer.strategy.full_sequence(self.model(batch[0]))
            if self.context > 1
            else self.model(batch[0])
        )


def pairs(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = (
        torch.stack([sample[key] for sample in samples])
        for key in ("input_ids", "labels")
    )
    return tokens, F.pad(labels, (0, 1), value=-100)[:, 1:]


class Noisy(IterableDataset):
    """Data as it should be on the first context rank, and other data on its peers."""

    def __init__(self, context: int, batches: int) -> None:
        self.context, self.batches = context, batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rank, ranks = (
            (dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else (0, 1)
        )
        data = rows(self.batches, 1)[rank // self.context :: ranks // self.context]
        yield from (
            data
            if rank % self.context == 0
            else [{**row, "input_ids": row["input_ids"] * 0} for row in data]
        )


class StreamModule(HfModule):
    def train_dataloader(self) -> Any:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        data = Noisy(self.context, self.batches)
        return DataLoader(data, batch_size=GLOBAL_BATCH * self.context // ranks)


def life(
    kind: type[HfModule],
    options: dict[str, Any],
    knobs: dict[str, Any] | None = None,
    **flags: Any,
) -> Run:
    """Fit with validation, then predict."""
    on_ranks = dist.is_initialized()
    module = kind(
        context=(knobs or {}).get("context_parallel_degree", 1) if on_ranks else 1,
        **options,
    )
    if (
        on_ranks
        and (knobs or {}).get("context_parallel_degree", 1) > 1
        and kind is not PairModule
    ):
        knobs = {**(knobs or {}), "full_outputs": True}
    trainer = make_trainer(knobs, use_distributed_sampler=True, **flags)
    trainer.fit(module)
    run = report(trainer, module)
    predictions = trainer.predict(module)
    run.extra["predicted"] = [
        batch["logits"] if isinstance(batch, dict) else batch for batch in predictions
    ]
    run.weights = whole_weights(module)
    return run


def predicted_in_order(runs: list[Run], context: int) -> torch.Tensor:
    """Rows as one process has them: sample i of a batch is on data rank i."""
    firsts = [run.extra["predicted"] for run in runs[::context]]
    for rank, run in enumerate(runs):
        for ours, first in zip(
            run.extra["predicted"], firsts[rank // context], strict=True
        ):
            assert torch.equal(ours, first), "context peers predict the same"
    return torch.cat(
        [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*firsts, strict=True)]
    )


def check(
    runs: list[Run], expected: Run, context: int, loss_tolerance: float, per_step: float
) -> None:
    for run in runs:
        assert len(run.losses) == len(expected.losses)
        for step, (ours, theirs) in enumerate(
            zip(run.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= loss_tolerance + per_step * step, (
                f"step {step}: {ours} against {theirs}"
            )
        assert run.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert abs(run.metrics[name] - value) <= 5e-6, name
    ours, theirs = (
        predicted_in_order(runs, context),
        torch.cat(expected.extra["predicted"]),
    )
    assert ours.shape == theirs.shape == (8, LENGTH, VOCABULARY)
    # Logits grow with the weights, whose own differences Adam enlarges where gradients
    # are near zero.
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=2e-4 if ours.dtype == torch.float32 else 1e-9
    )


DEGREES = [(4, 2), (2, 2), (4, 4)]


@pytest.mark.parametrize(
    ("shard", "context"),
    [
        pytest.param(*pair, marks=() if pair == (2, 2) else pytest.mark.slow)
        for pair in DEGREES
    ],
)
def test_steps_of_a_transformers_model_equal_one_process(
    shard: int, context: int
) -> None:
    """float32: losses to 1e-6 + 2e-7 per step, which is summation order; then
    validation, accuracy and predictions."""
    expected = life(HfModule, {})
    knobs = {"shard_degree": shard, "context_parallel_degree": context}
    check(together(life, HfModule, {}, knobs), expected, context, 1e-6, 2e-7)


@pytest.mark.parametrize(
    "weighted", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_pairs_and_torchs_own_attention_equal_one_process(weighted: bool) -> None:
    """float64, in windows of two micro-batches: the loss that the step returns is a
    mean over its own targets; it is weighted before backward, or by the module, which
    can log it then."""
    options, knobs = (
        {"batches": 6, "weighted": weighted},
        {"shard_degree": 4, "context_parallel_degree": 2},
    )
    flags = {**EXACT, "accumulate_grad_batches": 2}
    expected = life(PairModule, options, **flags)
    runs = together(life, PairModule, options, knobs, **flags)
    check(runs, expected, 2, 1e-6, 0.0)
    for name, value in expected.weights.items():
        assert (runs[0].weights[name] - value).abs().max() <= 1e-11, name


def test_context_peers_train_on_the_first_ones_stream() -> None:
    options, knobs = {"batches": 3}, {"shard_degree": 2, "context_parallel_degree": 2}
    expected = life(StreamModule, options, **EXACT)
    check(together(life, StreamModule, options, knobs, **EXACT), expected, 2, 1e-6, 0.0)


def test_losses_in_chunks_are_those_of_all_tokens_at_once() -> None:
    """float32, as above. Logits are there in validation and predictions."""
    options = {"batches": 3}
    knobs = {
        "shard_degree": 4,
        "context_parallel_degree": 2,
        "chunked_cross_entropy": 5,
    }
    expected = life(HfModule, options)
    check(together(life, HfModule, options, knobs), expected, 2, 1e-6, 2e-7)
