"""FP8 under the Trainer: the plugin, the strategy's name, clipping, accumulation,
several optimizers, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from typer.testing import CliRunner

from lightning_smp import Fp8Monitor, Fp8Precision, Fp8Recipe
from smp_core.cli import app
from smp_core.fp8 import convert_to_fp8
from smp_core.fp8.monitoring import Fp8Log, Fp8Watch
from tests.core.fp8 import transformer_engine_stand_in as stand_in
from tests.core.gpt import SmallGpt
from tests.lightning.modules import LanguageModule
from tests.lightning.running import (
    QUIET,
    Run,
    make_trainer,
    read_checkpoint,
    report,
    together,
)
from tests.logged import warnings_said

RECIPE = Fp8Recipe(amax_history_len=4)
BATCHES = 4


class Gpt(LanguageModule):
    def build(self) -> None:
        self.model = SmallGpt(vocabulary=32, width=32, layers=2, heads=2, length=8)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def train(
    knobs: dict[str, Any],
    epochs: int = 1,
    load: str | None = None,
    save: str | None = None,
    compute: str = "float32",
    recipe: Fp8Recipe | None = RECIPE,
    **flags: Any,
) -> Run:
    if recipe is not None:
        flags["plugins"] = [Fp8Precision(recipe, compute)]
    with warnings_said() as said:
        module = Gpt(batches=BATCHES)
        trainer = make_trainer(knobs, max_epochs=epochs, **flags)
        trainer.fit(module, ckpt_path=load)
        if save is not None:
            trainer.save_checkpoint(save)
    fp8 = trainer.strategy.parallel.fp8
    state = (
        None
        if fp8 is None
        else (fp8.state.history.clone(), fp8.state.scale.clone(), fp8.state.steps)
    )
    dtypes = {str(parameter.dtype) for parameter in module.parameters()}
    asked = trainer.strategy.config.effective()["fp8"]
    return report(
        trainer,
        module,
        fp8=state,
        dtypes=dtypes,
        asked=asked,
        said=[s for s in said if "FP8" in s],
    )


def variants() -> dict[str, Run]:
    """Several trainings in one start of the ranks."""
    accumulated = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    return {
        "sharded": train({"shard_degree": 2}, **accumulated),
        "replicated": train({"shard_degree": 1}, **accumulated),
        "recomputed": train({"shard_degree": 2, "activations": "full"}, **accumulated),
        "selective": train(
            {"shard_degree": 2, "activations": "selective"}, **accumulated
        ),
        "by the knob": train(
            {"shard_degree": 2, "fp8": RECIPE.to_dict()}, recipe=None, **accumulated
        ),
        "bfloat16": train({"shard_degree": 2}, compute="bfloat16", **accumulated),
        "without": train(
            {"shard_degree": 2}, recipe=None, precision="bf16-mixed", **accumulated
        ),
    }


@pytest.mark.slow
def test_the_plugin_trains_the_same_however_it_is_sharded_and_recomputed() -> None:
    for runs in together(variants, ranks=2):
        sharded = runs["sharded"]
        assert (
            sharded.extra["asked"] == str(RECIPE)
            and sharded.extra["fp8"][2] == BATCHES // 2
        )
        # Replicas add up micro-batches before ranks, and norms in another order:
        # rounding of gradients, which Adam does not make larger than its step of 1e-2
        # and which an FP8 cast may turn into another number.
        assert runs["replicated"].losses == pytest.approx(sharded.losses, rel=1e-3)
        for name in ("recomputed", "selective", "by the knob"):
            assert runs[name].losses == sharded.losses, name
            assert all(
                torch.equal(runs[name].weights[key], value)
                for key, value in sharded.weights.items()
            ), name
            assert torch.equal(runs[name].extra["fp8"][0], sharded.extra["fp8"][0]), (
                name
            )
        bf16, without = runs["bfloat16"], runs["without"]
        assert (
            bf16.extra["dtypes"] == {"torch.float32"} and bf16.extra["fp8"] is not None
        )
        assert without.extra["fp8"] is None
        # FP8 noise of a handful of steps on a loss of about 14.
        assert bf16.losses != sharded.losses
        for ours, theirs in zip(bf16.losses, without.losses, strict=True):
            assert abs(ours - theirs) <= 2e-2 * theirs


def in_transformer_engine() -> Run:
    recipe = Fp8Recipe(backend="transformer_engine", fp8_all_gather=False)
    with stand_in.installed() as regions:
        run = train({"shard_degree": 2}, recipe=recipe, accumulate_grad_batches=2)
    run.extra |= {
        "passes": [size for _, size in regions.passes],
        "outside": regions.outside,
    }
    return run


def test_training_steps_run_in_a_region_of_transformer_engine() -> None:
    """A stand-in with its signatures."""
    for run in together(in_transformer_engine, ranks=2):
        assert run.extra["passes"] == [2] * BATCHES and run.extra["outside"] == 0
        assert run.losses[-1] < run.losses[0] and run.extra["dtypes"] == {
            "torch.float32"
        }


def saving(folder: str) -> list[Run]:
    knobs = {"shard_degree": 2, "checkpoint": {"full_state_dict": False}}
    return [
        train(knobs, 2),
        train(knobs, 1, save=f"{folder}/sharded"),
        train(knobs, 2, load=f"{folder}/sharded"),
        train({**knobs, "checkpoint": "full"}, 1, save=f"{folder}/whole.ckpt"),
        train({"shard_degree": 1}, 2, load=f"{folder}/whole.ckpt"),
    ]


def going_on(folder: str) -> Run:
    return train({"shard_degree": 2}, 2, load=f"{folder}/sharded")


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    straight, _, sharded, _, whole = together(saving, str(tmp_path), ranks=2)[0]
    for resumed in (sharded, whole):
        assert resumed.losses == straight.losses[BATCHES:]
        assert all(
            torch.equal(resumed.weights[name], value)
            for name, value in straight.weights.items()
        )
        assert torch.equal(resumed.extra["fp8"][0], straight.extra["fp8"][0])
        assert resumed.extra["said"] == []
    for path in ("sharded", "whole.ckpt"):
        checkpoint = read_checkpoint(tmp_path / path)
        assert not [
            name
            for name in checkpoint["state_dict"]
            if "fp8" in name or "scale" in name
        ]
        site = checkpoint["smp_fp8"]["sites"]["model.blocks.0.qkv"]
        assert {name: tuple(value.shape) for name, value in site.items()} == {
            "amax_history": (4, 3),
            "scale": (3,),
        }
        assert all(type(value) is torch.Tensor for value in site.values())

    more = together(going_on, str(tmp_path), ranks=4)[0]
    assert more.extra["fp8"][2] == 2 * BATCHES and more.extra["said"] == []
    for ours, theirs in zip(more.losses, straight.losses[BATCHES:], strict=True):
        # FP8 noise: other ranks add up in another order.
        assert abs(ours - theirs) <= 5e-3 * theirs


def from_bfloat16(folder: str) -> list[Run]:
    train({"shard_degree": 2}, 1, save=folder, recipe=None)
    return [
        train({"shard_degree": 2}, 2, load=folder),
        train({"shard_degree": 2}, 2, load=folder, recipe=None),
    ]


def test_a_checkpoint_without_scales_recalibrates_with_a_warning(
    tmp_path: Path,
) -> None:
    for fp8, plain in together(from_bfloat16, str(tmp_path / "saved"), ranks=2):
        assert fp8.extra["said"] == [
            "the checkpoint has no FP8 scales of any module: calibrated anew in the next step"
        ]
        assert abs(fp8.losses[0] - plain.losses[0]) <= 5e-3 * plain.losses[0]


class ThreeOptimizers(LightningModule):
    """Three networks, stepped one after the other; the third only every other batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            for _ in range(3)
        )
        self.losses: list[torch.Tensor] = []
        self.seen: list[tuple[float, list[bool]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        state = self.trainer.strategy.parallel.fp8.state
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number == 2 and batch_idx % 2:
                continue
            before = state.history.clone()
            self.toggle_optimizer(optimizer)
            loss = self.nets[number](batch).square().mean()
            self.losses.append(loss.detach())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            rolled = (state.history != before).flatten(2).any(0)[:, [0, 2]].all(1)
            calls = self.trainer.strategy.parallel.meter.per_step()[
                "amax_all_reduce/calls"
            ]
            self.seen.append((calls, rolled.tolist()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in self.nets]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            torch.randn(16, 16, generator=torch.Generator().manual_seed(1)),
            batch_size=4,
        )


def three_optimizers() -> Run:
    module = ThreeOptimizers()
    trainer = make_trainer(
        {"shard_degree": 2}, plugins=[Fp8Precision(RECIPE, torch.float32)]
    )
    trainer.fit(module)
    return report(trainer, module, seen=module.seen)


def test_each_of_three_optimizers_rolls_the_histories_of_what_it_trained() -> None:
    for run in together(three_optimizers, ranks=2):
        steps = [(0, 1, 2), (0, 1)]
        expected = [
            (1.0, [n == net for n in range(3) for _ in range(2)])
            for nets in steps
            for net in nets
        ]
        assert run.extra["seen"] == expected
        assert all(torch.isfinite(torch.tensor(run.losses)))


def test_the_name_of_the_strategy_turns_fp8_on() -> None:
    assert StrategyRegistry.get("smp_sharded_fp8").config.fp8 == Fp8Recipe()
    assert StrategyRegistry.get("smp_sharded_fp8").config.shard_degree == "auto"


def contradicting() -> str:
    try:
        train({"shard_degree": 1, "fp8": Fp8Recipe(margin=1)})
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"compute_dtype=torch.float16 is not allowed; allowed: bfloat16, float32",
    ):
        Fp8Precision(compute_dtype=torch.float16)
    with pytest.raises(ValueError, match="did you mean 'margin'"):
        Fp8Precision({"margn": 1})
    with pytest.raises(ValueError, match="write strategy='smp_sharded'"):
        Trainer(**QUIET, devices=1, plugins=[Fp8Precision()]).fit(Gpt(batches=1))
    assert (
        "write the recipe in one of the two places"
        in together(contradicting, ranks=2)[0]
    )


def monitored(path: str) -> Run:
    module = Gpt(batches=BATCHES)
    monitor = Fp8Monitor(every_n_steps=2, path=path, modules=["*.qkv"])
    flags: dict[str, Any] = {
        "callbacks": [monitor],
        "logger": CSVLogger(Path(path).parent, name="csv", version=0),
    }
    trainer = make_trainer(
        {"shard_degree": 2},
        max_epochs=2,
        plugins=[Fp8Precision(RECIPE, "float32")],
        **flags,
    )
    trainer.fit(module)
    return report(
        trainer,
        module,
        scale=trainer.strategy.parallel.fp8.state.scale,
        logged=trainer.logger.log_dir,
    )


def test_the_monitor_logs_rates_and_scales_that_the_report_draws(
    tmp_path: Path,
) -> None:
    log = tmp_path / "fp8.jsonl"
    run = together(monitored, str(log), ranks=2)[0]
    found = Fp8Log.read(log)
    assert found.steps == [1, 3, 5, 7]
    assert found.figures["weight_scale"].keys() == found.figures["input_flushed"].keys()
    assert len(found.figures["input_scale"]) == 8
    rates = [
        v
        for figure in ("input_saturated", "gradient_flushed")
        for vs in found.figures[figure].values()
        for v in vs
    ]
    assert all(0 <= rate < 0.2 for rate in rates)
    # Scaled to the range, a few of the smallest gradients are flushed; nothing of the
    # calibrating step saturates.
    assert max(rates) > 0 and all(
        values[0] == 0 for values in found.figures["input_saturated"].values()
    )
    header = (Path(run.extra["logged"]) / "metrics.csv").read_text().splitlines()[0]
    assert (
        "fp8/model.blocks.0.qkv/input_scale" in header and "blocks.0.up" not in header
    )

    shown = CliRunner().invoke(app, ["fp8-report", str(log)])
    assert shown.exit_code == 0 and "4 probed steps, 1 to 7" in shown.output
    picture = (tmp_path / "fp8.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    for content, words in (("", "holds no step"), ("{}\n{}\n", "line 1: not a line")):
        log.write_text(content)
        refused = CliRunner().invoke(app, ["fp8-report", str(log)])
        assert refused.exit_code != 0 and words in " ".join(refused.output.split())


def test_the_monitor_wants_a_run_in_fp8() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        Fp8Monitor(every_n_steps=0)
    with pytest.raises(ValueError, match="computes without FP8"):
        Trainer(**QUIET, devices=1, callbacks=[Fp8Monitor()]).fit(Gpt(batches=1))
    watch = Fp8Watch("Fp8Monitor", 1, None, ["*", "*.qkv"])
    with pytest.raises(ValueError, match=r"modules='\*.qkv' matches no FP8 layer.* 0"):
        watch.start(convert_to_fp8(nn.Sequential(nn.Linear(16, 16))), "", "")
