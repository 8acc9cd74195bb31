"""SmpAccelerator and SmpTrainer over pipeline stages, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from accelerate_smp.callbacks import SmpMonitorCallback
from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import (
    VOCABULARY,
    Run,
    assert_close,
    fit,
    life,
    make_model,
    make_trainer,
    noise_between,
)
from tests.core.pipeline.cases import example_of, of_all_stages
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    alone as one_process,
    batches,
    build,
    differences,
    loss_of,
    optimizer_of,
)
from tests.core.tensor_parallel.models import STEPS
from tests.harness import run_ranks

BATCH = 8


def bare_loop(
    kind: str, micro_batches: int, samples: int, scale: float = 0.0, **knobs: Any
) -> tuple[Training, int]:
    """``samples`` of a batch for each rank that reads its own; ``scale``: of a gradient
    scaler."""
    seen, called = Training(), 0
    knobs = {"shard_degree": 1, "pipeline_parallel_degree": 2, **knobs}
    accelerator = fresh_accelerator(
        gradient_accumulation_steps=micro_batches, cpu=True, **knobs
    )
    if scale:  # of mixed_precision="fp16", which is refused on CPU
        accelerator.scaler = ShardedGradScaler("cpu", init_scale=scale)
    rows = batches(micro_batches).flatten(0, 2)
    with nullcontext() if scale else Wide():  # a scaler casts its own numbers
        model: Any = example_of(build(kind, seed=dist.get_rank()))
        loader = DataLoader([{"tokens": row} for row in rows], batch_size=samples)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer_of(model), loader
        )
        if scale:
            # Gradients are unscaled then.
            accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        total = torch.zeros((), dtype=torch.float64)

        @accelerator.pipeline_step
        def step(batch: dict[str, torch.Tensor], factor: float) -> dict[str, Any]:
            nonlocal called
            called += 1
            loss = loss_of(model, batch["tokens"]) * factor
            return {"loss": loss, "twice": 2 * loss}

        for batch in loader:
            with accelerator.accumulate(model):
                returned = step(batch, 1.0)
                loss = returned["loss"]
                assert returned["twice"] == 2 * loss.detach()
                accelerator.backward(loss)
                total += (
                    accelerator.gather_for_metrics(loss.detach()[None]).mean()
                    / micro_batches
                )
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    if len(seen.losses) in (0, STEPS - 1):
                        found = {
                            name: p.grad
                            for name, p in model.named_parameters()
                            if p.grad is not None
                        }
                        gradients = of_all_stages(accelerator.parallel, found)
                        seen.gradients |= {
                            f"{len(seen.losses)} {name}": g
                            for name, g in gradients.items()
                        }
                    seen.losses.append(total.item())
                    seen.norms.append(norm.item())
                    total.zero_()
                optimizer.step()
                optimizer.zero_grad()
        seen.weights = of_all_stages(
            accelerator.parallel, dict(model.named_parameters())
        )
        if scale:
            assert (
                accelerator.scaler.get_scale() == scale
                and not accelerator.optimizer_step_was_skipped
            )
            with accelerator.accumulate(model):
                accelerator.backward(step(batch, 1.0)["loss"])
                if dist.get_rank() == 0:
                    next(
                        p for p in model.parameters() if p.grad is not None
                    ).grad.fill_(torch.inf)
                optimizer.step()
            assert (
                accelerator.optimizer_step_was_skipped
                and accelerator.scaler.get_scale() == scale / 2
            )
            after = of_all_stages(accelerator.parallel, dict(model.named_parameters()))
            assert all(
                torch.equal(after[name], value) for name, value in seen.weights.items()
            )
    return seen, called


def assert_loop(
    results: list[tuple[Training, int]], kind: str, micro_batches: int, calls: int
) -> None:
    whole = one_process(kind, micro_batches)
    # Tied names are one parameter on ranks.
    names = {name.partition(" ")[2] for name in whole.gradients}
    expected = Training(
        whole.losses,
        whole.norms,
        whole.gradients,
        {n: w for n, w in whole.weights.items() if n in names},
    )
    for seen, called in results:
        assert differences(seen, expected) == []
        assert called == calls, "the function runs once for each micro-batch"


def test_a_bare_loop_equals_one_process() -> None:
    """Tied embeddings, two batches in a window, four micro-batches in a batch."""
    results = run_ranks(bare_loop, 2, "gpt2", 2, 8, pipeline={"microbatches": 4})
    assert_loop(results, "gpt2", 2, 4 * 2 * STEPS)


def test_a_gradient_scaler_in_a_bare_loop() -> None:
    """The scale is a power of two. An inf on the first stage alone skips the step on
    all."""
    results = run_ranks(
        bare_loop, 2, "plain", 1, 8, 2.0**14, pipeline={"microbatches": 2}
    )
    assert_loop(results, "plain", 1, 2 * (STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{"shard_degree": 2}, {"shard_degree": 1}, {"tensor_parallel_degree": 2}]
)
def test_a_bare_loop_on_four_ranks(knobs: dict[str, Any]) -> None:
    samples = 8 if "tensor_parallel_degree" in knobs else 4
    results = run_ranks(
        bare_loop,
        4,
        "llama",
        2,
        samples,
        pipeline={"microbatches": 2, "schedule": "gpipe"},
        **knobs,
    )
    assert_loop(results, "llama", 2, 2 * 2 * STEPS)


def assert_life(results: list[Run], expected: Run, noise: float, folder: Path) -> None:
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
    loaded = GPT2LMHeadModel.from_pretrained(folder / "final")
    assert all(
        torch.equal(loaded.state_dict()[name], value)
        for name, value in results[0].weights.items()
    )


KNOBS = {
    "shard_degree": 1,
    "pipeline_parallel_degree": 2,
    "pipeline": {"microbatches": 2},
}


def test_trainer_evaluates_trains_saves_and_predicts_as_in_one_process(
    tmp_path: Path,
) -> None:
    """float32: see tests.accelerate.trainers.assert_close. Labels are missing unevenly
    over micro-batches."""
    expected = life(tmp_path / "alone", BATCH, 3)
    noise = noise_between(expected, fit(tmp_path / "other", BATCH // 2, 6))
    flags = {"per_device_train_batch_size": BATCH}
    results = run_ranks(life, 2, tmp_path / "ranks", BATCH, 3, KNOBS, **flags)
    assert_life(results, expected, noise, tmp_path / "ranks")


@pytest.mark.slow
def test_trainer_on_four_ranks(tmp_path: Path) -> None:
    expected = life(tmp_path / "alone", BATCH, 3)
    noise = noise_between(expected, fit(tmp_path / "other", BATCH // 2, 6))
    flags = {"per_device_train_batch_size": BATCH // 2}
    results = run_ranks(
        life,
        4,
        tmp_path / "ranks",
        BATCH,
        3,
        {**KNOBS, "shard_degree": "auto"},
        **flags,
    )
    assert_life(results, expected, noise, tmp_path / "ranks")


def figures(folder: Path, batch: int, knobs: dict[str, Any] | None) -> dict[str, float]:
    trainer, _ = make_trainer(
        folder,
        batch,
        2,
        knobs,
        per_device_train_batch_size=BATCH,
        max_steps=3,
        logging_steps=3,
    )
    monitor = SmpMonitorCallback()
    trainer.add_callback(monitor)
    trainer.train()
    if knobs is not None:
        monitor.save_timeline(folder / "timeline.png")
    return monitor.latest


@pytest.mark.slow
def test_the_monitor_reports_the_bubble_and_counts_each_sample_once(
    tmp_path: Path,
) -> None:
    """Rates of one report share one clock, so that their ratios are exact."""
    alone = figures(tmp_path, BATCH, None)
    for seen in run_ranks(figures, 2, tmp_path, BATCH, KNOBS):
        for name, ranks in (("tokens_per_second", 1), ("tflops_per_device", 2)):
            ratio, expected = (
                each[name] / each["samples_per_second"] for each in (seen, alone)
            )
            assert ranks * ratio == pytest.approx(expected, rel=1e-9), name
        shares = [seen[f"bubble_share_stage_{stage}"] for stage in range(2)]
        assert seen["bubble_share"] == pytest.approx(sum(shares) / 2) and all(
            0 < share < 1 for share in shares
        )
        assert seen["seconds_stage_0"] > 0
    assert (tmp_path / "timeline.png").exists()


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse(folder: Path) -> dict[str, str]:
    trainer, _ = make_trainer(folder, 4, 1, KNOBS)
    accelerator = trainer.accelerator
    model, optimizer = accelerator.prepare(
        trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    )
    tokens = torch.ones(4, 6, dtype=torch.long)

    @accelerator.pipeline_step
    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    @accelerator.pipeline_step
    def gathering(batch: torch.Tensor) -> str:
        loss = model(input_ids=batch, labels=batch).loss
        return said(lambda: accelerator.gather(loss))

    def zeroed() -> None:
        loss = step(tokens)
        optimizer.zero_grad()
        accelerator.backward(loss)

    found = {
        "changed": said(lambda: accelerator.backward(2 * step(tokens))),
        "zeroed": said(zeroed),
        "no step": said(
            lambda: accelerator.backward(torch.ones((), requires_grad=True))
        ),
        "outside": said(lambda: model(input_ids=tokens)),
        "uneven": said(lambda: step(tokens[:3])),
        "another": said(lambda: accelerator.prepare_model(torch.nn.Linear(2, 2))),
    }
    with torch.no_grad():
        found["cache"] = said(
            lambda: model.generate(tokens, max_new_tokens=2, pad_token_id=0)
        )
        torch.manual_seed(0)
        written = model.generate(
            tokens, max_new_tokens=2, pad_token_id=0, use_cache=False, do_sample=True
        )
        found["written"] = str(written.tolist())
        found["gather"] = gathering(tokens)
    return found


def test_misuse_is_refused_in_words(tmp_path: Path) -> None:
    first, last = run_ranks(misuse, 2, tmp_path)
    for found in (first, last):
        assert "multiplied by 2 before backward" in found["changed"]
        assert "gradients were zeroed between" in found["zeroed"]
        assert (
            "compute the loss in a function under @accelerator.pipeline_step"
            in found["no step"]
        )
        assert "GPT2LMHeadModel was called outside of a step" in found["outside"]
        assert "pipeline.microbatches=2 does not divide a batch of 3" in found["uneven"]
        assert (
            "pipeline_parallel_degree=2: a second model (Linear) is not built yet"
            in found["another"]
        )
        assert "generate(use_cache=False)" in found["cache"]
        assert found["written"] == first["written"]
        assert "cannot gather inside a step" in found["gather"]


class Looking(GPT2LMHeadModel):
    """Takes pictures too, which the call that stages are found by has not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.look = torch.nn.Linear(3, config.n_embd)

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, labels: Any = None, pixels: Any = None, **_: Any
    ) -> Any:
        embedded = self.transformer.wte(input_ids)
        if pixels is not None:
            embedded = embedded + self.look(pixels)
        return super().forward(inputs_embeds=embedded, labels=labels)


def looking() -> str:
    accelerator = fresh_accelerator(cpu=True, **KNOBS)
    torch.manual_seed(0)
    model = accelerator.prepare(Looking(make_model().config))

    @accelerator.pipeline_step
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss

    tokens = torch.ones(4, 6, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "pixels": torch.ones(4, 6, 3)}
    return said(lambda: step(batch))


def test_a_module_that_stages_were_cut_without_is_named() -> None:
    for words in run_ranks(looking, 2):
        assert "look was called on a stage that has none of its parameters" in words
        assert "model.example_input_array" in words
