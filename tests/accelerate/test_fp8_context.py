"""FP8 under Trainer and a bare loop, with sequences that several ranks hold and with
recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accelerate_smp.trainer import SmpTrainer
from smp_core.fp8 import Fp8Recipe, convert_to_fp8
from tests.accelerate.context_rows import BATCH, LENGTH, VOCABULARY, make_rows
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.accelerate.trainers import Recorder, Run, whole_weights
from tests.harness import run_ranks

RECIPE = Fp8Recipe(amax_history_len=4)
SHARED = {"shard_degree": 2, "context_parallel_degree": 2}


def make_model() -> LlamaForCausalLM:
    """Layers of sizes that FP8 takes; float64, so that attention in another order does
    not flip casts."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).double()


def run_trainer(folder: Path, steps: int, knobs: dict[str, Any] | None) -> Run:
    """SmpTrainer on ranks; with None the stock Trainer in one process, with a model
    that is converted by hand."""
    model = make_model()
    options: dict[str, Any] = {"smp_config": {"fp8": RECIPE, **(knobs or {})}}
    if knobs is None:
        fp8, optimizer = (
            convert_to_fp8(model, RECIPE),
            torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0),
        )
        fp8.follow(optimizer)
        options = {
            "optimizers": (
                optimizer,
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            )
        }
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=knobs is None,
    )
    recorder = Recorder()
    trainer = (Trainer if knobs is None else SmpTrainer)(
        model=model,
        args=arguments,
        train_dataset=make_rows(20 * BATCH, 1),
        callbacks=[recorder],
        **options,
    )
    trainer.train()
    state = fp8.state if knobs is None else trainer.accelerator.parallel.fp8.state
    recorder.run.weights = whole_weights(trainer.model)
    recorder.run.extra = {
        "history": state.history,
        "scale": state.scale,
        "sites": len(state.names),
    }
    return recorder.run


def bare_loop(steps: int, knobs: dict[str, Any] | None) -> Run:
    """Under SmpAccelerator on ranks; with None in plain torch."""
    model = make_model()
    fp8 = convert_to_fp8(model, RECIPE) if knobs is None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(make_rows(steps * BATCH, 1), batch_size=BATCH)
    if fp8 is None:
        accelerator = fresh_accelerator(fp8=RECIPE, **(knobs or {}))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        fp8.follow(optimizer)
    run = Run()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward() if fp8 is not None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        run.losses.append(
            (mean if fp8 is not None else accelerator.reduce(mean, "mean")).item()
        )
    run.weights = full_weights(model)
    return run


def variants(folder: Path) -> dict[str, Run]:
    recomputing = {**SHARED, "activations": "full"}
    return {
        "shared": run_trainer(folder, 20, SHARED),
        "again": run_trainer(folder, 4, SHARED),
        "recomputed": run_trainer(folder, 4, recomputing),
        "loop": bare_loop(4, SHARED),
        "loop, recomputed": bare_loop(4, recomputing),
    }


def assert_like(shared: Run, whole: Run) -> None:
    """First loss within 1e-6: scales are powers of two, so the amax of a rank's own
    tokens casts almost every value to the same FP8 number. The mean of all steps within
    0.5 %."""
    assert len(shared.losses) == len(whole.losses)
    assert abs(shared.losses[0] - whole.losses[0]) <= 1e-6 * whole.losses[0]
    assert abs(sum(shared.losses) - sum(whole.losses)) <= 5e-3 * sum(whole.losses)


@pytest.mark.slow
def test_shared_sequences_train_in_fp8_as_whole_ones_do_also_recomputing(
    tmp_path: Path,
) -> None:
    """Recomputing changes nothing, not even a bit."""
    trainer, loop = run_trainer(tmp_path / "alone", 20, None), bare_loop(4, None)
    ranks = run_ranks(variants, 2, tmp_path, ranks_per_node=2)
    for found in ranks:
        shared = found["shared"]
        assert shared.extra["sites"] == trainer.extra["sites"] == 14
        assert_like(shared, trainer)
        assert_like(found["loop"], loop)
        assert torch.equal(shared.extra["scale"], ranks[0]["shared"].extra["scale"]), (
            "equal on all ranks"
        )
        for first, second in (("again", "recomputed"), ("loop", "loop, recomputed")):
            assert found[first].losses == found[second].losses
            assert all(
                torch.equal(found[second].weights[key], value)
                for key, value in found[first].weights.items()
            )
        assert torch.equal(
            found["again"].extra["history"], found["recomputed"].extra["history"]
        )
