"""SmpTrainer and SmpAccelerator over tensor ranks, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import (
    VOCABULARY,
    assert_close,
    fit,
    life,
    make_dataset,
    make_trainer,
    noise_between,
)
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

BATCH = 8
# Sequences of 9 tokens, and a vocabulary of 61 words: neither can be split. Trainer
# prepares loaders before the model, which decides about the shard degree.
KNOBS = {"tensor_parallel_degree": 2, "tensor_parallel": {"sequence_parallel": False}}


def test_trainer_evaluates_trains_saves_and_predicts_as_in_one_process(
    tmp_path: Path,
) -> None:
    """float32: see tests.accelerate.trainers.assert_close."""
    expected = life(tmp_path / "alone", BATCH, 3)
    noise = noise_between(expected, fit(tmp_path / "other", BATCH // 2, 6))
    flags = {"per_device_train_batch_size": BATCH // 2}
    results = run_ranks(life, 4, tmp_path / "ranks", BATCH, 3, KNOBS, **flags)
    for seen in results:
        assert_close(seen, expected, noise)
        assert seen.extra["before"] == pytest.approx(expected.extra["before"], abs=1e-6)
        assert seen.extra["after"] == pytest.approx(expected.extra["after"], abs=5e-6)
        assert (
            seen.extra["predicted"] == expected.extra["predicted"]
            and seen.extra["predicted"][2] == VOCABULARY
        )
        torch.testing.assert_close(
            seen.extra["logits"], expected.extra["logits"], atol=2e-5, rtol=0
        )
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "ranks" / "final")
    assert all(
        torch.equal(loaded.state_dict()[name], value)
        for name, value in results[0].weights.items()
    )


class Masked(torch.utils.data.Dataset):
    """Samples of which workers mask other tokens each time."""

    def __init__(self) -> None:
        self.rows = make_dataset(32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = self.rows[number]["input_ids"]
        masked = tokens.where(torch.rand(tokens.shape) > 0.3, 1)
        return {"input_ids": masked, "labels": tokens}


def masked(folder: Path, knobs: dict[str, Any] | None) -> list[float]:
    ranks = 1 if knobs is None else 2
    flags = {"dataloader_num_workers": 1, "max_steps": 2}
    trainer, recorder = make_trainer(folder, BATCH * ranks, 1, knobs, **flags)
    trainer.train_dataset = Masked()
    trainer.train()
    return recorder.run.losses


def test_workers_of_ranks_that_share_a_batch_draw_alike(tmp_path: Path) -> None:
    """Trainer seeds workers by process: each tensor rank masked other tokens. float32:
    as of other trainings."""
    expected = masked(tmp_path / "alone", None)
    for seen in run_ranks(masked, 2, tmp_path / "ranks", KNOBS):
        assert seen == pytest.approx(expected, abs=2e-6)


class Shuffled(torch.utils.data.Sampler):
    """An order of torch's own random numbers."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        return iter(torch.randperm(16).tolist())


class Orders(Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return Shuffled()


class Shows(TrainerCallback):
    """Draws on one rank alone, as code does that shows some samples."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            torch.rand(1)


def parted(folder: Path, layouts: list[dict[str, Any]]) -> list[str]:
    said = []
    for knobs in layouts:
        flags = {"kind": Orders, "num_train_epochs": 2}
        trainer, _ = make_trainer(folder, 2 * BATCH, 1, knobs, **flags)
        trainer.add_callback(Shows())
        try:
            trainer.train()
            said.append("trained")
        except ValueError as error:
            said.append(f"step {trainer.state.global_step}: {error}")
    return said


def test_ranks_that_share_a_batch_and_draw_another_order_are_told(
    tmp_path: Path,
) -> None:
    """Tensor ranks computed on from other tokens, and stages compared the first batch
    alone."""
    stages = {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}}
    for seen in run_ranks(parted, 2, tmp_path, [KNOBS, stages]):
        for said in seen:
            assert said.startswith(
                "step 2: ranks 0, 1 share a batch and read different"
            )


def bare_loop(micro_batches: int) -> Training:
    seen = Training()
    parallelism = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = fresh_accelerator(
        parallelism_config=parallelism,
        gradient_accumulation_steps=micro_batches,
        cpu=True,
        plan={"sequence": 8, "micro_batch": 4, "cluster": "2x2:a100-40g@0.01gbps"},
    )
    rows = batches(micro_batches).flatten(0, 2)
    model: Any = build("llama", seed=dist.get_rank())
    loader = DataLoader([{"tokens": row} for row in rows], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    with Wide():
        total = torch.zeros((), dtype=torch.float64)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch["tokens"])
                accelerator.backward(loss)
                total += (
                    accelerator.gather_for_metrics(loss.detach()[None]).mean()
                    / micro_batches
                )
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    seen.take(model, total.item(), norm.item(), len(seen.losses))
                    total.zero_()
                optimizer.step()
                optimizer.zero_grad()
        seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    config = accelerator.smp_config  # nodes are so slow that gathering less pays
    assert (config.shard_degree, config.tensor_parallel_degree) == (2, 2)  # as given
    assert (
        config.why("keep_between_micro_batches") == "the plan"
        and config.keep_between_micro_batches != "shards"
    )
    return seen


@pytest.mark.slow  # in the normal run: Trainer, above
def test_a_bare_loop_equals_one_process() -> None:
    """Under Accelerate's own name for the degree; what is open is planned."""
    for seen in run_ranks(bare_loop, 4, 2, ranks_per_node=2):
        assert differences(seen, alone("llama", 2)) == []


def rates_where_all_ranks_share_a_batch() -> list[float]:
    accelerator = fresh_accelerator(cpu=True, tensor_parallel_degree=2)
    model: Any = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loader = DataLoader(
        [{"tokens": row} for row in batches(1, 2).flatten(0, 2)], batch_size=BATCH
    )
    model, optimizer, loader, halved = accelerator.prepare(
        model, optimizer, loader, halved
    )
    rates = []
    for batch in loader:
        accelerator.backward(
            model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        )
        optimizer.step()
        halved.step()
        rates.append(halved.get_last_lr()[0])
    return rates


def test_a_schedule_counts_a_batch_once_where_all_ranks_share_it() -> None:
    """Accelerate's own counts processes."""
    for rates in run_ranks(rates_where_all_ranks_share_a_batch, 2):
        assert rates and rates == [0.5**step for step in range(1, len(rates) + 1)]
