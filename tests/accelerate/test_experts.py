"""A mixture of experts under SmpAccelerator and SmpTrainer, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from accelerate_smp.trainer import SmpTrainer
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import Recorder, Run, whole_weights
from tests.core.expert_parallel import models as models  # makes its models known
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    alone,
    batches,
    build,
    differences,
    full,
    loss_of,
    optimizer_of,
)
from tests.harness import run_ranks

BATCH, STEPS = 8, 3


def bare_loop() -> Training:
    """The degree comes from SMP_EXPERT_PARALLEL_DEGREE."""
    seen = Training()
    accelerator = fresh_accelerator(cpu=True, shard_degree=4)
    rows = batches(1).flatten(0, 2)
    model: Any = build("Qwen3Moe", seed=dist.get_rank())
    loader = DataLoader([{"tokens": row} for row in rows], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    assert accelerator.smp_config.expert_parallel_degree == 2
    with Wide():
        for step, batch in enumerate(loader):
            loss = loss_of(model, batch["tokens"])
            accelerator.backward(loss)
            total = accelerator.gather(loss.detach()[None]).mean()
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            seen.take(model, total.item(), norm.item(), step)
            optimizer.step()
            optimizer.zero_grad()
        seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


@pytest.mark.slow
def test_a_bare_loop_equals_one_process() -> None:
    """float64, 1e-12: sums in another order."""
    knobs = {"SMP_EXPERT_PARALLEL_DEGREE": "2"}
    for seen in run_ranks(bare_loop, 4, ranks_per_node=2, env=knobs):
        assert differences(seen, alone("Qwen3Moe", 1)) == []


def fit(
    folder: Path,
    batch: int,
    knobs: dict[str, Any] | None = None,
    kind: str = "Mixtral",
    resume: str | None = None,
) -> Run:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no" if knobs is None else "steps",
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=knobs is None,
    )
    recorder = Recorder()
    rows = [
        {"input_ids": row, "labels": row} for row in batches(1, STEPS).flatten(0, 2)
    ]
    options: dict[str, Any] = {} if knobs is None else {"smp_config": knobs}
    trainer = (Trainer if knobs is None else SmpTrainer)(
        model=build(kind).float(),
        args=arguments,
        train_dataset=rows,
        callbacks=[recorder],
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


EXPERTS = {"shard_degree": 2, "expert_parallel_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 1}}


@pytest.mark.parametrize(
    "knobs, batch",
    [
        pytest.param({"router_balance": "global"}, BATCH // 4, marks=pytest.mark.slow),
        (STAGES, BATCH // 2),
    ],
)
def test_trainer_equals_one_process(
    knobs: dict[str, Any], batch: int, tmp_path: Path
) -> None:
    """float32: losses and norms to 2e-5, weights to 1e-4, which Adam's steps make of
    rounding. Auxiliary losses too."""
    expected = fit(tmp_path / "alone", BATCH, kind="balanced in float32")
    ranks = (tmp_path / "ranks", batch, {**EXPERTS, **knobs}, "balanced in float32")
    for seen in run_ranks(fit, 4, *ranks, ranks_per_node=2):
        assert len(seen.losses) == STEPS
        assert (
            max(abs(a - b) for a, b in zip(seen.losses, expected.losses, strict=True))
            < 2e-5
        )
        assert (
            max(abs(a - b) for a, b in zip(seen.norms, expected.norms, strict=True))
            < 2e-5
        )
        assert seen.weights.keys() == expected.weights.keys()
        assert all(
            (seen.weights[name] - value).abs().max() < 1e-4
            for name, value in expected.weights.items()
        )


def whole_and_resumed(folder: Path) -> tuple[Run, Run]:
    """A run, and one that goes on from its save behind the second of three steps, in
    the middle of the epoch."""
    knobs = {"shard_degree": 4, "expert_parallel_degree": 2}
    whole = fit(folder, 2, knobs)
    return whole, fit(folder, 2, knobs, resume=str(folder / "checkpoint-2"))


@pytest.mark.slow  # in the normal run: tests/core/expert_parallel/test_checkpoints.py
def test_a_resumed_trainer_has_the_same_bits(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(
        whole_and_resumed, 4, tmp_path, ranks_per_node=4, timeout=300
    ):
        assert resumed.losses == whole.losses[2:]
        assert all(
            (resumed.weights[name] == value).all()
            for name, value in whole.weights.items()
        )
