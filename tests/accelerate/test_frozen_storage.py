"""QLoRA under SmpTrainer: peft's adapters beside a base that is stored as codes train
as with the stock Trainer beside the decoded base, in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerate.lora import adapted as split_adapted, split_adapter
from tests.accelerate.trainers import (
    Run,
    make_dataset,
    make_model,
    make_trainer,
    whole_weights,
)
from tests.core.sharding.frozen_runs import codes_of, with_decoded_base
from tests.harness import run_ranks

pytest.importorskip("peft")


def adapted(seed: int, decoded: str | None = None) -> Any:
    from peft import LoraConfig, get_peft_model

    base = make_model(0).requires_grad_(False)
    if decoded is not None:
        with_decoded_base(base, decoded)
    torch.manual_seed(seed)
    return get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True),
    )


def fit(
    folder: Path,
    knobs: dict[str, Any] | None = None,
    resume: bool = False,
    **flags: Any,
) -> Run:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = adapted(rank, "int8" if knobs is None else None)
    trainer, recorder = make_trainer(
        folder,
        8,
        1,
        knobs,
        model=model,
        max_steps=4,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        **flags,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "adapter"))
    recorder.run.extra["coded"] = len(codes_of(trainer.model))
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


def test_qlora_trains_like_the_stock_trainer_and_its_adapter_is_saved_whole(
    tmp_path: Path,
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    expected = fit(tmp_path / "alone")
    knobs = {"shard_degree": 2, "frozen_storage": "int8"}
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = run_ranks(fit, 2, tmp_path / "ranks", knobs, **saving)
    for seen in first:
        assert seen.extra["coded"] > 4 and len(seen.losses) == 4
        for step, (ours, theirs) in enumerate(
            zip(seen.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= 1e-6 + 2e-7 * step
        for name, value in expected.weights.items():
            # The base bit by bit; adapters to float32's last digits, through steps of
            # Adam that a large epsilon keeps from dividing small gradients by
            # themselves.
            assert (seen.weights[name] - value).abs().max() <= (
                1e-6 if "lora" in name else 0
            )
    # An adapter of peft's own.
    saved = load_file(tmp_path / "ranks" / "adapter" / "adapter_model.safetensors")
    trained = {
        name.replace(".default", ""): value
        for name, value in first[0].weights.items()
        if "lora" in name
    }
    assert saved.keys() == trained.keys() and saved
    assert all(torch.equal(saved[name], value) for name, value in trained.items())
    PeftModel.from_pretrained(make_model(0), tmp_path / "ranks" / "adapter")
    # And the run goes on from the middle, bit by bit.
    shutil.rmtree(tmp_path / "ranks" / "checkpoint-4")
    for again, before in zip(
        run_ranks(fit, 2, tmp_path / "ranks", knobs, resume=True), first, strict=True
    ):
        assert again.losses == before.losses[2:]
        assert all(
            torch.equal(again.weights[name], value)
            for name, value in before.weights.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_adapter_beside_codes_over_split_sequences_has_one_processs_loss_and_gradients(
    name: str,
) -> None:
    """float32: 1e-6."""
    model = with_decoded_base(split_adapted(), name)
    rows = {
        key: torch.stack([row[key] for row in make_dataset(8)])
        for key in ("input_ids", "labels")
    }
    expected = model(**rows).loss
    expected.backward()
    knobs = {"shard_degree": 2, "context_parallel_degree": 2, "frozen_storage": name}
    for loss, gradients in run_ranks(split_adapter, 4, knobs, ranks_per_node=2):
        assert abs(loss - expected.item()) <= 1e-6
        named = [
            (name, p.grad) for name, p in model.named_parameters() if p.grad is not None
        ]
        assert named and all(
            (gradients[name] - gradient).abs().max() <= 1e-6 for name, gradient in named
        )
