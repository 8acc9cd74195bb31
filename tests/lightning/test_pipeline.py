"""Lightning's Trainer over pipeline stages equals one process, with a training_step
that knows nothing of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision

from lightning_smp import SmpMonitor
from smp_core.pipeline.times import Computation
from tests.core.pipeline.cases import of_all_stages
from tests.core.tensor_parallel.model_cases import Wide
from tests.core.tensor_parallel.models import TOKENS
from tests.harness import run_ranks
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    together,
    whole_weights,
    worst,
)
from tests.lightning.staged import StagedModule, knobs_of
from tests.logged import warnings_said
from tests.older_transformers import needs_buffers_filled


class HookedModule(StagedModule):
    """Hooks of one parameter in each of two blocks, which no rank of two stages holds
    together."""

    def _build_model(self) -> None:
        super()._build_model()
        matrices = [
            name
            for name, p in self.model.named_parameters()
            if p.ndim > 1 and ".h." in name
        ]
        for name in (matrices[0], matrices[-1]):
            self.model.get_parameter(name).register_hook(
                lambda gradient: gradient.clamp(-1e-3, 1e-3)
            )


def train(
    kind: str,
    batch_size: int,
    knobs: dict[str, Any],
    ckpt_path: Path | None = None,
    steps: Path | None = None,
    watched: Path | None = None,
    pairs: bool = False,
    sliced: bool = False,
    scale: float = 0.0,
    averaged: bool = False,
    hooked: bool = False,
    **flags: Any,
) -> Run:
    """``watched``: the best model by the validation loss is kept there, and the run
    ends when it does not fall; ``steps``: every optimizer step is, and the weights are
    averaged; ``averaged``: they are, from the second epoch."""
    callbacks: list[Any] = []
    if scale:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        flags = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], **flags}
    if averaged:
        flags = {
            "callbacks": [
                StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)
            ],
            **flags,
        }
    if steps is not None:
        every = ModelCheckpoint(steps, "{step}", every_n_train_steps=1, save_top_k=-1)
        flags = {
            "enable_checkpointing": True,
            "callbacks": [EMAWeightAveraging(decay=0.8), every],
            **flags,
        }
    if watched is not None:
        callbacks = [
            ModelCheckpoint(
                watched, "{epoch}-{step}", monitor="val_loss", save_top_k=1
            ),
            EarlyStopping("val_loss", min_delta=10.0, patience=3),
        ]
        flags = {"enable_checkpointing": True, "callbacks": callbacks, **flags}
    with nullcontext() if scale else Wide():  # a scaler casts its own numbers
        late = bool(knobs.get("delayed_init"))
        staged = HookedModule if hooked else StagedModule
        module = staged(
            kind=kind, batch_size=batch_size, pairs=pairs, sliced=sliced, late=late
        )
        flags = {
            "gradient_clip_val": 0.5,
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            **flags,
        }
        trainer = make_trainer(knobs, **flags)
        with warnings_said() as said:
            trainer.fit(module, ckpt_path=ckpt_path)
    losses = torch.stack([loss.double() for loss in module.losses])
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    parallel: Any = getattr(trainer.strategy, "_parallel", None)
    assert not late or parallel.config.delayed_init is not None, (
        "something was on the meta device"
    )
    if parallel is None or parallel.pipeline is None:
        weights = whole_weights(module)
    else:
        weights = of_all_stages(parallel, dict(module.named_parameters()))
        parallel.broadcast_buffers()
        weights |= {
            name: value.clone()
            for name, value in module.named_buffers()
            if name in module.state_dict()
        }
        assert not parallel.window.is_open
    extra: dict[str, Any] = {"calls": module.calls, "steps": trainer.global_step}
    if dist.is_initialized():
        extra["said"] = said
        extra["counts"] = [text for text in said if "LightningModule keeps" in text]
    if callbacks:
        best, stopping = callbacks
        extra |= {
            "best": Path(best.best_model_path).stem,
            "checks": stopping.wait_count,
            "stop": trainer.should_stop,
        }
        metrics["best"] = float(best.best_model_score)
    return Run(losses.tolist(), weights, metrics, extra)


def named_once(run: Run) -> Run:
    """Tied names are one parameter on ranks."""
    run.weights.pop("model.lm_head.weight", None)
    return run


def test_a_fit_equals_one_process(tmp_path: Path) -> None:
    """With validation in the middle of epochs, which a ModelCheckpoint and an
    EarlyStopping watch."""
    flags: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2}
    expected = named_once(train("gpt2", 8, {}, watched=tmp_path / "alone", **flags))
    assert expected.metrics.keys() == {
        "train_loss",
        "train_loss_step",
        "train_loss_epoch",
        "twice",
        "val_loss",
        "best",
    }
    assert expected.extra["steps"] == 4 and expected.extra["stop"], (
        "two epochs of four batches in windows of two"
    )
    runs = together(
        train, "gpt2", 4, knobs_of(2, shard=2), watched=tmp_path / "ranks", **flags
    )
    assert_same(runs, expected)
    assert [run.extra.pop("calls") for run in runs] == [2 * 8] * 4, (
        "training_step runs once for each micro-batch"
    )
    expected.extra.pop("calls")
    said = [run.extra.pop("counts") for run in runs]
    assert all(run.extra.pop("said") is not None for run in runs)
    assert len(said[0]) == 1 and "(calls), here once for each micro-batch" in said[0][0]
    assert said[1:] == [[]] * 3, "rank 0 says it, once"
    assert all(run.extra == expected.extra for run in runs), (
        "callbacks agree everywhere"
    )


@pytest.mark.slow
def test_hooks_of_parameters_see_gradients_of_whole_batches() -> None:
    flags: dict[str, Any] = {"hooked": True, "max_epochs": 1}
    expected = named_once(train("gpt2", 8, {}, **flags))
    assert_same(together(train, "gpt2", 4, knobs_of(2, shard=2), **flags), expected)


def test_micro_batches_are_split_over_ranks_that_share_sequences_and_their_losses_scaled() -> (
    None
):
    """Each rank of a pair has as many targets, so that what is logged is the mean over
    all. A gradient scaler multiplies losses by a power of two (autocast leaves float64
    as it is)."""
    flags: dict[str, Any] = {"pairs": True, "max_epochs": 1}
    expected = train("plain", 8, {}, **flags)
    knobs = {**knobs_of(2, shard=2, microbatches=4), "context_parallel_degree": 2}
    runs = together(train, "plain", 8, knobs, scale=2.0**14, **flags)
    assert_same(runs, expected)
    assert not any("the loss" in text for run in runs for text in run.extra["said"])
    # The last stage looks at the gradients of its scores, and ends no rank.
    sliced = together(train, "plain", 8, knobs, sliced=True, **flags)
    for rank, run in enumerate(sliced):
        said = [text for text in run.extra["said"] if "the loss takes of" in text]
        assert len(said) == (1 if rank > 1 else 0), said


@needs_buffers_filled
@pytest.mark.slow
def test_runs_go_on_in_mid_epoch_with_other_numbers_of_stages(tmp_path: Path) -> None:
    """Two stages, one, and two of another size, each from the first of an epoch's two
    steps. Averages of weights, optimizer states and schedules too; from a sharded
    folder, and from an ordinary file into a model that was built on the meta device,
    which writes such a file too."""
    first, second, third, alone = (
        tmp_path / name for name in ("first", "second", "third", "alone")
    )
    expected = named_once(train("gpt2", 8, {}, max_epochs=3, steps=alone))
    together(train, "gpt2", 8, knobs_of(2), steps=first, max_epochs=1, ranks=2)
    flat = {"shard_degree": 2, "checkpoint": "full"}
    together(
        train,
        "gpt2",
        4,
        flat,
        ranks=2,
        ckpt_path=first / "step=1.ckpt",
        steps=second,
        max_epochs=2,
    )
    split = {
        **knobs_of(2, shard=2, split=[1, 1], schedule="gpipe"),
        "checkpoint": "full",
        "delayed_init": True,
    }
    runs = together(
        train,
        "gpt2",
        4,
        split,
        ckpt_path=second / "step=3.ckpt",
        steps=third,
        max_epochs=3,
    )
    for run in runs:
        assert_same(
            Run(weights=run.weights, metrics=run.metrics),
            Run(weights=expected.weights, metrics=expected.metrics),
        )
    ours, theirs = (
        torch.load(folder / "step=5.ckpt", weights_only=True)
        for folder in (third, alone)
    )
    for key in ("state_dict", "current_model_state"):
        assert worst(ours[key], theirs[key])[0] <= 1e-12
    mine, other = ours["optimizer_states"][0], theirs["optimizer_states"][0]
    assert (
        mine["param_groups"] == other["param_groups"]
        and mine["state"].keys() == other["state"].keys()
    )
    assert (
        max(
            worst(mine["state"][number], entry)[0]
            for number, entry in other["state"].items()
        )
        <= 1e-12
    )


@pytest.mark.parametrize(
    "cases",
    [[("odd", 1)], pytest.param([("odd", 1), ("gpt2", 2)], marks=pytest.mark.slow)],
    ids=["odd", "both"],
)
def test_stochastic_weight_averaging_is_that_of_one_process(
    cases: list[tuple[str, int]],
) -> None:
    """BatchNorm's statistics are those of batches of the epoch that follows, whole
    ones: of micro-batches they would be others, as they are in training."""
    flags: dict[str, Any] = {"averaged": True, "max_epochs": 3, "limit_val_batches": 0}
    results = run_ranks(averages, 2, cases, flags)
    for number, (kind, _) in enumerate(cases):
        assert_same(
            [runs[number] for runs in results], named_once(train(kind, 8, {}, **flags))
        )


def averages(cases: list[tuple[str, int]], flags: dict[str, Any]) -> list[Run]:
    return [
        train(kind, 8, knobs_of(2, microbatches=count), **flags)
        for kind, count in cases
    ]


class Batches(Callback):
    """The computations of this rank's stage in each batch."""

    def __init__(self) -> None:
        self.seen: list[list[Computation]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if dist.is_initialized():
            self.seen.append(trainer.strategy.parallel.pipeline.times.last)


def watched(
    knobs: dict[str, Any], batch_size: int, picture: Path | None
) -> tuple[list[list[Computation]], dict[str, float]]:
    """Four steps, two batches in each; the clock runs from the second step on."""
    seen, monitor = Batches(), SmpMonitor(every_n_steps=4)
    module = StagedModule(kind="gpt2_deep", batch_size=batch_size)
    with Wide():
        make_trainer(
            knobs,
            callbacks=[seen, monitor],
            max_epochs=2,
            limit_val_batches=0,
            accumulate_grad_batches=2,
        ).fit(module)
    if picture is not None:
        monitor.save_timeline(picture)
    return seen.seen, monitor.latest


def test_the_monitor_reports_the_bubble_and_counts_each_sample_once(
    tmp_path: Path,
) -> None:
    """Of the recorded computations, over interleaved stages; FLOPs and tokens of a
    sample are those of one process."""
    _, alone = watched({}, 8, None)
    results = run_ranks(
        watched, 2, knobs_of(2, schedule="interleaved:2"), 8, tmp_path / "timeline.png"
    )
    # Without the first step.
    batches_of = [[each for each in seen[2:]] for seen, _ in results]
    computed = [
        sum(each.end - each.begin for batch in seen for each in batch)
        for seen in batches_of
    ]
    lasted = max(sum(batch[-1].end for batch in seen) for seen in batches_of)
    for seen, report in results:
        assert [len(batch) for batch in seen] == [2 * 2 * 2] * 8, (
            "chunks, micro-batches, directions"
        )
        for stage in range(2):
            assert (
                abs(
                    report[f"bubble_share_stage_{stage}"]
                    - (1 - computed[stage] / lasted)
                )
                < 1e-9
            )
            assert abs(report[f"seconds_stage_{stage}"] - computed[stage] / 3) < 1e-9
        assert abs(report["bubble_share"] - (1 - sum(computed) / 2 / lasted)) < 1e-9
        assert report["samples"] == alone["samples"] == 2 * 4 * 8
        assert (
            abs(report["tokens_per_second"] / report["samples_per_second"] - TOKENS)
            < 1e-9
        )
        flops = [2 * report["tflops_per_device"] / report["samples_per_second"]]
        assert (
            abs(
                flops[0] / (alone["tflops_per_device"] / alone["samples_per_second"])
                - 1
            )
            < 1e-9
        )
    assert (tmp_path / "timeline.png").stat().st_size > 1000
