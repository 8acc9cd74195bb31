"""Loaders that give some ranks more batches, and resumption that is given as
nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate_smp import SmpMonitor
from accelerate_smp.trainer_memory import KeepsInMemory
from accelerate_smp.uneven import require_as_many_batches
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.core.models import TroubledModel, global_batches, loss_of
from tests.harness import run_ranks

WINDOW = 2
# Of 13 samples in batches of two on two ranks: the fourth step has two on one rank, and
# one more on the other; of 9, the third has one, and the other rank nothing.
SAMPLES = (13, 9)


def tokens_of(samples: int) -> torch.Tensor:
    return global_batches(1, 1, samples)[0, 0]


def step_all(
    accelerator: Any, model: Any, optimizer: Any, batches: Any, evaluation: Any
) -> int:
    """Train on batches, each of which is changed, after an evaluation; return the
    steps."""
    steps = 0
    for batch in batches:
        tokens = batch.pop("tokens")
        model.eval()
        assert sum(len(each["tokens"]) for each in evaluation) == 4, (
            "nobody repeats batches there"
        )
        model.train()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens))
            steps += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    return steps


def joined(samples: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Two epochs, and the end of a third."""
    accelerator = fresh_accelerator(shard_degree=2, gradient_accumulation_steps=WINDOW)
    torch.manual_seed(accelerator.process_index)
    model = TroubledModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, evaluation = (
        DataLoader([{"tokens": row} for row in tokens_of(rows)], batch_size=2)
        for rows in (samples, 7)
    )
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, loader, evaluation
    )
    loader = accelerator.prepare(loader)  # once more changes nothing
    monitor = SmpMonitor(accelerator, model, optimizer, every_n_steps=1)
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batches in (loader, loader, accelerator.skip_first_batches(loader, WINDOW)):
            steps += step_all(accelerator, model, optimizer, batches, evaluation)
    assert monitor.latest["samples"] == 3 * samples - 4 * WINDOW, (
        "a repeated batch is not counted"
    )
    dealt = [len(batch["tokens"]) for batch in loader]
    assert dealt == [2] * len(dealt), "outside, samples are repeated as before"
    return steps, full_weights(model)


def alone(samples: int) -> tuple[int, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = TroubledModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = tokens_of(samples).split(4)
    steps = 0
    for epoch in (batches, batches, batches[WINDOW:]):
        for first in range(0, len(epoch), WINDOW):
            for batch in epoch[first : first + WINDOW]:
                (loss_of(model, batch) / WINDOW).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps, full_weights(model)


def all_joined() -> list[tuple[int, dict[str, torch.Tensor]]]:
    return [joined(samples) for samples in SAMPLES]


def test_joined_ranks_train_like_one_process_on_each_sample_once() -> None:
    expected = [alone(samples) for samples in SAMPLES]
    for runs in run_ranks(all_joined, 2):
        for (steps, weights), (theirs, expected_weights) in zip(
            runs, expected, strict=True
        ):
            assert steps == theirs
            for name, value in expected_weights.items():
                torch.testing.assert_close(weights[name], value, atol=1e-12, rtol=0)


def loader(samples: int, split: bool) -> SimpleNamespace:
    batches = BatchSampler(SequentialSampler(range(samples)), 8, drop_last=False)
    return SimpleNamespace(
        batch_sampler=BatchSamplerShard(
            batches, 4, 0, split_batches=split, even_batches=False
        )
    )


def test_a_last_batch_that_does_not_reach_all_ranks_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"last batch of 2 samples into fewer parts than there are ranks \(4\)",
    ):
        require_as_many_batches(loader(10, split=True))
    require_as_many_batches(loader(15, split=True))
    with pytest.raises(ValueError, match="deals 5 batches out to 4 ranks"):
        require_as_many_batches(loader(40, split=False))


def test_batches_of_unknown_number_are_left_to_the_watch() -> None:
    shard = loader(16, split=False)
    shard.batch_sampler.batch_sampler = iter([])
    require_as_many_batches(shard)


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_a_trainer_that_resumes_from_nothing_leaves_no_state(nothing: object) -> None:
    tier = mock.Mock()
    assert KeepsInMemory(mock.Mock(), tier).begin(nothing, lambda: None) == nothing
    tier.leave.assert_called_once_with()
