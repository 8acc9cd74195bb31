"""Whole training programs, drawn at random, are as in one process, or refused by an
error that says what to type.

Programs of Trainer: its history, states, predictions, callbacks, weights, and what
plain Transformers loads from its checkpoints, resumptions on other layouts among them.
Where stock Trainer itself has other numbers on several ranks (``program["by"]`` says
why), it is run there. Bare loops of Accelerate: losses, norms, samples of each batch,
evaluations, weights and files. float64: 1e-9, and 5e-6 for losses that Trainer adds up
in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerate import loops, programs
from tests.accelerate.program_checks import loop_problems, problems, report


def program(seed: int, **changes: Any) -> programs.Program:
    return {**programs.USUAL, "seed": seed, **changes}


def loop(seed: int, **changes: Any) -> loops.Loop:
    return {**loops.USUAL, "seed": seed, **changes}


def check_programs(cases: list[programs.Program], folder: Path, right: int = 1) -> None:
    found = problems(cases, folder)
    assert not report(found, cases), report(found, cases)
    assert list(found.values()).count(None) >= right


def check_loops(cases: list[loops.Loop], folder: Path, right: int = 1) -> None:
    found = loop_problems(cases, folder)
    assert not report(found, cases), report(found, cases)
    assert list(found.values()).count(None) >= right


RESUMED = {
    "which": "middle",
    "world": 2,
    "knobs": {"shard_degree": 2},
    "ignore_data_skip": False,
    "stock": False,
}
SAVED = {
    "num_train_epochs": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}
# What was wrong once.
CASES = [
    # The samples of a step were counted as those of more ranks, and accumulation was
    # halved.
    program(
        1,
        micro_batches=2,
        arguments=SAVED,
        accelerator_config={"split_batches": True},
        resume={**RESUMED, "world": 4},
    ),
    # Ranks of one batch counted its operations once each; behind an evaluation Trainer
    # divided the optimizer's groups by meshes, and no other layout could load their
    # states.
    program(
        2,
        knobs={**programs.SHARED["tensor"], "shard_degree": 1},
        arguments={**SAVED, "num_train_epochs": 1},
        script=["predict", "train"],
        resume=RESUMED,
    ),
    program(3, knobs={**programs.SHARED["context"], "shard_degree": 2}),
    program(4, knobs={**programs.SHARED["pipeline"], "shard_degree": 1}, batch=8),
    # Ranks of a batch read other samples, which was refused with words about a sampler
    # of the user's.
    program(
        5,
        world=4,
        data="batch_rebalance",
        lengths="ragged",
        knobs={**programs.SHARED["tensor"], "shard_degree": 2},
    ),
    # The second epoch went on in the order of the first; the loss of a training had one
    # rank's losses of the steps after the last logged one.
    program(
        6,
        data="own loader",
        overrides=["own loader"],
        arguments={**SAVED, "logging_steps": 3},
        resume=RESUMED,
    ),
    # Batches were skipped for one rank alone.
    program(
        7,
        arguments={**SAVED, "num_train_epochs": 1},
        accelerator_config={"dispatch_batches": True},
        resume=RESUMED,
    ),
    # A trial of the model looked for labels that Trainer had taken out of the batch.
    program(
        8,
        knobs={**programs.SHARED["context"], "shard_degree": 2},
        arguments={"max_steps": 2, "logging_steps": 1, "label_smoothing_factor": 0.1},
        script=["train", "evaluate"],
    ),
    # The second epoch came in the order of the first.
    program(
        9, data="batch_rebalance", lengths="ragged", arguments=SAVED, resume=RESUMED
    ),
    # The last batch of an evaluation had the loss of rank 0.
    program(
        11,
        eval_data="stream",
        accelerator_config={"split_batches": True},
        script=["train", "evaluate"],
    ),
    # Labels that were the batch's own were refused as others.
    program(
        12,
        knobs={**programs.SHARED["context"], "shard_degree": 2},
        overrides=["plain loss"],
        script=["train", "evaluate"],
        micro_batches=2,
        samples=32,
    ),
    # A mean over each micro-batch was taken for a part of the batch's loss, because the
    # model takes the count of targets, which it does not divide by.
    program(
        14,
        model="bert",
        knobs={**programs.SHARED["pipeline"], "shard_degree": 1},
        batch=8,
        script=["train", "evaluate"],
    ),
    program(
        15,
        model="bert",
        world=4,
        knobs={**programs.SHARED["pipeline"], "shard_degree": 2},
        batch=8,
        script=["evaluate", "train", "evaluate"],
    ),
]


RESUMED_LOOP = {"world": 2, "knobs": {"shard_degree": 2}}
LOOPS = [
    # What was left of the second epoch, and the third, came in the order of the first.
    loop(1, epochs=3, tells_epoch=False, save_after=6, resume=RESUMED_LOOP),
    loop(
        2,
        epochs=3,
        tells_epoch=False,
        save_after=6,
        resume=RESUMED_LOOP,
        data="own sampler",
    ),
    # So did the second epoch behind a state that the last batch of the first had left.
    loop(3, tells_epoch=False, save_after=4, resume={**RESUMED_LOOP, "world": 4}),
    # The last batch was one of the next epoch: its incomplete end had been read ahead.
    loop(4, samples=14, tells_epoch=False, save_after=3, resume=RESUMED_LOOP),
    # Batches were skipped for one rank alone.
    loop(
        5, how={"dispatch_batches": True}, epochs=1, save_after=2, resume=RESUMED_LOOP
    ),
    # On several ranks a batch sampler of the user's, or a data set, did not hear of the
    # epoch.
    loop(6, data="own batches"),
    loop(7, data="aging"),
    # Where nothing was left of an epoch, rank 0 had no batch to deal out.
    loop(
        9,
        how={"dispatch_batches": True},
        tells_epoch=False,
        save_after=4,
        resume=RESUMED_LOOP,
    ),
    loop(
        8,
        data="own batches",
        epochs=3,
        tells_epoch=False,
        save_after=6,
        resume=RESUMED_LOOP,
    ),
]


def test_what_was_wrong_once_is_as_in_one_process(tmp_path: Path) -> None:
    cases = [CASES[1], CASES[-2]]
    check_programs(cases, tmp_path, right=len(cases))
    check_loops([LOOPS[3], LOOPS[5]], tmp_path, right=2)


def test_a_sum_over_labels_of_shared_sequences_is_refused(tmp_path: Path) -> None:
    """Their targets are elsewhere, and the sum was 0 in every step."""
    case = program(
        13,
        knobs={**programs.SHARED["context"], "shard_degree": 2},
        overrides=["own sum"],
    )
    assert problems([case], tmp_path) == {13: "refused"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_that_was_wrong_once_is_as_in_one_process(tmp_path: Path) -> None:
    check_programs(CASES, tmp_path, right=len(CASES))
    check_loops(LOOPS, tmp_path, right=len(LOOPS))


def test_a_drawn_program_of_trainer_is_as_in_one_process_or_refused(
    tmp_path: Path,
) -> None:
    check_programs([programs.draw(seed) for seed in range(2)], tmp_path)


def test_a_drawn_loop_is_as_in_one_process_or_refused(tmp_path: Path) -> None:
    check_loops([loops.draw(seed) for seed in range(3)], tmp_path, right=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 340, 24))
def test_many_drawn_programs_of_trainer_are_as_in_one_process_or_refused(
    tmp_path: Path, first: int
) -> None:
    check_programs(
        [programs.draw(seed) for seed in range(first, first + 24)], tmp_path, right=18
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 340, 60))
def test_many_drawn_loops_are_as_in_one_process_or_refused(
    tmp_path: Path, first: int
) -> None:
    check_loops(
        [loops.draw(seed) for seed in range(first, first + 60)], tmp_path, right=45
    )
