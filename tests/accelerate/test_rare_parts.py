"""Adapters of PEFT's kinds, and callbacks that change what is trained, as in one
process.

float64: weights to 1e-9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from accelerate_smp import SmpTrainer
from tests.accelerate.program_parts import make_model, make_rows, padding
from tests.accelerate.rare_parts import ADAPTERS, CALLBACKS, with_adapter
from tests.accelerate.trainers import whole_weights
from tests.core.tensor_parallel.model_cases import Wide
from tests.harness import run_ranks

pytest.importorskip("peft")

Weights = dict[str, torch.Tensor]


def trained(
    folder: Path,
    adapter: str | None,
    callback: str | None,
    knobs: dict[str, Any] | None,
) -> Weights:
    """What is trained, after three steps of Trainer."""
    split = ("tensor_parallel_degree", "pipeline_parallel_degree")
    ranks = 1 if knobs is None else dist.get_world_size()
    readers = 1 if any(name in split for name in knobs or {}) else ranks
    # Weights of other ranks than the first differ before they are sharded.
    rank = 0 if knobs is None else dist.get_rank()
    model = make_model("llama", 5 + rank)
    if adapter is not None:
        model = with_adapter(model, adapter)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // readers,
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    options: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": make_rows("llama", 16, "fixed", 1),
        "data_collator": padding,
        "callbacks": [] if callback is None else [CALLBACKS[callback](None)],
    }
    trainer: Trainer = (
        Trainer(**options) if knobs is None else SmpTrainer(**options, smp_config=knobs)
    )
    with Wide():
        trainer.train()
    weights = whole_weights(trainer.model)
    if adapter is not None:
        saved = folder / f"{adapter} {knobs}"
        trainer.save_model(str(saved))
        trainer.accelerator.wait_for_everyone()
        written = load_file(saved / "adapter_model.safetensors")
        weights |= {f"saved {name}": value for name, value in written.items()}
    return weights


def all_trained(
    folder: Path,
    parts: list[tuple[str | None, str | None]],
    knobs: dict[str, Any] | None,
) -> list[Weights]:
    return [trained(folder, *part, knobs) for part in parts]


def check(
    folder: Path,
    parts: list[tuple[str | None, str | None]],
    knobs: dict[str, Any] | None = None,
) -> None:
    expected = all_trained(folder, parts, None)
    for seen in run_ranks(all_trained, 2, folder, parts, knobs or {"shard_degree": 2}):
        for part, ours, theirs in zip(parts, seen, expected, strict=True):
            assert ours.keys() == theirs.keys(), part
            for name, value in theirs.items():
                assert torch.allclose(ours[name], value, rtol=0, atol=1e-9), (
                    part,
                    name,
                )


def test_some_rare_parts_are_as_in_one_process(tmp_path: Path) -> None:
    check(tmp_path, [("dora", "freezes"), ("of embeddings", None), (None, "keeps")])


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"shard_degree": 2}, id="shards", marks=pytest.mark.slow),
        pytest.param(
            {
                "tensor_parallel_degree": 2,
                "tensor_parallel": {"sequence_parallel": False},
            },
            id="splits",
        ),
        pytest.param(
            {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}},
            id="stages",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_prompts_are_trained_and_saved_as_in_one_process(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """PEFT computes them when it saves, which the rank that writes does alone."""
    check(tmp_path, [("prompt", None), ("p-tuning", None)], knobs)


@pytest.mark.slow
def test_rare_parts_are_as_in_one_process(tmp_path: Path) -> None:
    kinds: list[tuple[str | None, str | None]] = [(kind, None) for kind in ADAPTERS]
    check(tmp_path, [*kinds, *((None, name) for name in CALLBACKS)])
