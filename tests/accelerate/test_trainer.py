"""transformers' Trainer on four ranks: what one process trains, saves and resumes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.accelerate.trainers import (
    LENGTH,
    VOCABULARY,
    Run,
    assert_close,
    fit,
    life,
    make_trainer,
    noise_between,
    seen_samples,
)
from tests.harness import run_ranks

BATCH = 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Run, float]]:
    """The stock Trainer in one process, per accumulation, and how far it is from itself
    in another order."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {}
    for micro_batches in (1, 3):
        run = fit(folder, BATCH, micro_batches)
        other = fit(folder, BATCH // 2, 2 * micro_batches)
        runs[micro_batches] = run, noise_between(run, other)
    return runs


CASES = [
    pytest.param(*case, marks=() if case == (4, 3) else pytest.mark.slow)
    for case in itertools.product((1, 2, 4), (1, 3))
]


@pytest.mark.parametrize(("degree", "micro_batches"), CASES)
def test_training_equals_the_stock_trainer_in_one_process(
    alone: dict[int, tuple[Run, float]], tmp_path: Path, degree: int, micro_batches: int
) -> None:
    expected, noise = alone[micro_batches]
    knobs = {"shard_degree": degree}
    for seen in run_ranks(
        fit, 4, tmp_path, BATCH, micro_batches, knobs, ranks_per_node=2
    ):
        assert_close(seen, expected, noise)


def test_nothing_is_pinned_where_there_is_no_device(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, 8, 1, {}, use_cpu=True)
    assert not trainer.get_train_dataloader().pin_memory
    assert not trainer.get_eval_dataloader().pin_memory


def test_evaluation_prediction_best_model_and_saving(tmp_path: Path) -> None:
    """evaluate() before, inside and after train(), predict(), load_best_model_at_end
    and save_model() give what the stock Trainer gives in one process; losses to 1e-6 +
    2e-7 per step, logits to 2e-5 (they grow with the weights)."""
    # A learning rate at which the best checkpoint is not the last one.
    flags = {"num_train_epochs": 2, "learning_rate": 2e-2, "max_grad_norm": 1.0}
    expected = life(tmp_path / "alone", BATCH, 3, **flags)
    results = run_ranks(
        life,
        2,
        tmp_path / "ranks",
        BATCH,
        3,
        {"shard_degree": 2},
        ranks_per_node=2,
        **flags,
    )
    for seen in results:
        assert seen.extra["before"] == pytest.approx(expected.extra["before"], abs=1e-6)
        assert seen.extra["after"] == pytest.approx(expected.extra["after"], abs=5e-6)
        assert seen.extra["best"] == expected.extra["best"]
        assert (
            seen.extra["predicted"]
            == expected.extra["predicted"]
            == (22, LENGTH, VOCABULARY)
        )
        torch.testing.assert_close(
            seen.extra["logits"], expected.extra["logits"], atol=2e-5, rtol=0
        )
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "ranks" / "final")
    for name, value in results[0].weights.items():
        assert torch.equal(loaded.state_dict()[name], value), name
    again = GPT2LMHeadModel.from_pretrained(
        tmp_path / "ranks" / results[0].extra["best"]
    )
    assert all(
        torch.equal(again.state_dict()[name], value)
        for name, value in results[0].weights.items()
    )


@pytest.mark.slow
def test_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved by 4 ranks at step 2 of 6, gone on with by 2 ranks (another shard degree)
    and by one: steps and weights are those of the run that was not interrupted."""
    flags = {"save_strategy": "steps", "save_steps": 2}
    expected = fit(tmp_path / "alone", BATCH, 1)
    noise = noise_between(expected, fit(tmp_path / "other", BATCH // 2, 2))
    run_ranks(
        fit,
        4,
        tmp_path / "ranks",
        BATCH,
        1,
        {"shard_degree": 4},
        ranks_per_node=2,
        **flags,
    )
    checkpoint = str(tmp_path / "ranks" / "checkpoint-2")
    resumed = run_ranks(
        fit, 2, tmp_path / "two", BATCH, 1, {"shard_degree": 2}, resume=checkpoint
    )
    resumed.append(fit(tmp_path / "one", BATCH, 1, {}, resume=checkpoint))
    for seen in resumed:
        assert_close(seen, expected, noise, first_step=2)


@pytest.mark.slow
def test_resume_with_another_global_batch_goes_on_at_the_same_sample(
    tmp_path: Path,
) -> None:
    """16 samples were seen in 2 steps of 8; with 4 samples a step the run goes on with
    the 17th, as its fifth step."""
    flags = {"save_strategy": "steps", "save_steps": 2}
    run_ranks(
        fit,
        4,
        tmp_path / "ranks",
        BATCH,
        1,
        {"shard_degree": 2},
        ranks_per_node=2,
        **flags,
    )
    checkpoint = str(tmp_path / "ranks" / "checkpoint-2")
    for batches in run_ranks(seen_samples, 2, tmp_path / "two", 4, checkpoint):
        assert len(batches) == (48 - 16) // 4
        assert batches == seen_samples(tmp_path / "alone", 4, None)[4:]
