"""Lightning's own callbacks that average weights work over shards, with one process's
numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from tests.harness import run_ranks
from tests.lightning import modules
from tests.lightning.modules import LanguageModule, PictureModule
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    read_checkpoint,
    report,
    together,
)

BATCHES = 5
# The middle of a window is evaluated too: 5 batches, windows of 2, evaluation after
# each batch.
EXACT: dict[str, Any] = {
    "precision": "64-true",
    "accumulate_grad_batches": 2,
    "val_check_interval": 1,
}
KNOBS: dict[str, dict[str, Any]] = {
    "node": {"shard_degree": 2},
    "replicas": {"shard_degree": 1},
    "kept": {"shard_degree": 2, "keep_between_micro_batches": "parameters"},
    "world": {"shard_degree": 1, "optimizer_shard": "world"},
    "world-host": {
        "shard_degree": 1,
        "optimizer_shard": "world",
        "state_offload": "optimizer",
    },
    "host": {"shard_degree": 2, "state_offload": "all"},
}


class OwnRule(EMAWeightAveraging):
    """As users write it: another rule of when to average."""

    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return epoch_idx is not None or step_idx == 2

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.was_set_up = stage


def callback_of(kind: str) -> Any:
    return {
        "ema": lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=1),
        "mean": lambda: WeightAveraging(),
        "multi": lambda: WeightAveraging(
            device="cpu", use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(0.8)
        ),
        "own": lambda: OwnRule(decay=0.7),
        "": lambda: Callback(),
        "swa": lambda: StochasticWeightAveraging(
            swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2
        ),
    }[kind]()


class Losses:
    """Losses of the evaluations are compared too. Built in float64: what Lightning
    averages is a copy in the dtype that the module was built in."""

    def build(self: Any) -> None:
        super().build()  # type: ignore[misc]
        self.double()

    def validation_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().validation_step(batch, batch_idx)  # type: ignore[misc]
        self.losses.append(loss.detach())
        return loss


class Language(Losses, LanguageModule):
    pass


class Pictures(Losses, PictureModule):
    pass


def fit_averaging(
    kind: str,
    knobs: dict[str, Any] | None = None,
    module: type[LightningModule] = Language,
    load: str | None = None,
    also: Sequence[Callback] = (),
    **flags: Any,
) -> Run:
    made = module(batches=BATCHES)
    trainer = make_trainer(
        knobs, callbacks=[callback_of(kind), *also], **{**EXACT, **flags}
    )
    trainer.fit(made, ckpt_path=load)
    return report(
        trainer,
        made,
        called=[
            each.was_set_up for each in trainer.callbacks if hasattr(each, "was_set_up")
        ],
    )


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        ("ema", "world"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mean", "kept"),
                ("ema", "node"),
                ("multi", "replicas"),
                ("own", "world-host"),
                ("own", "host"),
            )
        ),
    ],
)
def test_averages_evaluations_and_final_weights_are_those_of_one_process(
    kind: str, knobs: str
) -> None:
    """Also swapped in the middle of a window."""
    expected = fit_averaging(kind, max_epochs=2)
    runs = together(fit_averaging, kind, KNOBS[knobs], max_epochs=2, ranks=2)
    assert_same(runs, expected)
    assert all(run.extra == expected.extra for run in runs)
    plain = fit_averaging("", max_epochs=2)
    assert plain.losses != expected.losses


@pytest.mark.parametrize(
    "knobs", [pytest.param("node", marks=pytest.mark.slow), "world"]
)
def test_stochastic_weight_averaging_is_that_of_one_process(knobs: str) -> None:
    """With BatchNorm it goes through the data once more, without steps, for the
    statistics of the average."""
    flags: dict[str, Any] = {"max_epochs": 4, "val_check_interval": 1.0}
    assert_same(
        together(
            fit_averaging,
            "swa",
            KNOBS[knobs],
            Pictures,
            sync_batchnorm=True,
            **flags,
            ranks=2,
        ),
        fit_averaging("swa", None, Pictures, **flags),
    )
    assert_same(
        together(fit_averaging, "swa", KNOBS[knobs], **flags, ranks=2),
        fit_averaging("swa", **flags),
    )


class OwnAverages(Callback):
    """Averages that a script makes of a module before `fit`, and updates with what is
    trained then."""

    def __init__(self, module: LightningModule) -> None:
        self.average = AveragedModel(
            module.model, multi_avg_fn=get_ema_multi_avg_fn(0.8)
        )
        self.teacher = copy.deepcopy(module.model)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        self.average.update_parameters(pl_module.model)
        for mine, trained in zip(
            self.teacher.parameters(), pl_module.model.parameters(), strict=True
        ):
            mine.data = 0.9 * mine.data + 0.1 * trained.data

    def weights(self) -> dict[str, torch.Tensor]:
        kept = {"average": self.average.module, "teacher": self.teacher}
        return {
            f"{kind}.{name}": value
            for kind, model in kept.items()
            for name, value in model.state_dict().items()
        }


def fit_with_own_averages(knobs: dict[str, Any] | None = None) -> Run:
    # As after seed_everything: all ranks' copies are equal.
    with mock.patch.object(modules, "rank", return_value=0):
        module = Language(batches=2)
    own = OwnAverages(module)
    trainer = make_trainer(knobs, callbacks=[own], precision="64-true")
    trainer.fit(module)
    run = report(trainer, module)
    return Run(run.losses, {**run.weights, **own.weights()}, run.metrics)


@pytest.mark.parametrize(
    "knobs", ["node", pytest.param("world", marks=pytest.mark.slow)]
)
def test_a_callbacks_copies_of_before_fit_average_as_in_one_process(knobs: str) -> None:
    runs = together(fit_with_own_averages, KNOBS[knobs], ranks=2)
    assert_same(runs, fit_with_own_averages())


class Drawn:
    """Case ``number`` of rules, dtypes that the module is built in, models and
    layouts."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.rule = draw.choice(["mean", "ema", "own function", "many tensors", "swa"])
        # torch's kernels for many tensors cannot average float64 weights into a float32
        # copy, which one process has.
        self.built_in = (
            "float64"
            if self.rule == "many tensors"
            else draw.choice(["float32", "float32", "mixed"])
        )
        self.pictures = draw.random() < 0.4
        self.knobs = KNOBS[draw.choice(list(KNOBS))]
        self.averages_buffers = draw.random() < 0.5
        self.device = draw.choice([None, "cpu"])
        self.decay, self.every = draw.choice([0.5, 0.9, 0.999]), draw.choice([1, 2])

    def callback(self) -> Any:
        options: dict[str, Any] = {
            "device": self.device,
            "use_buffers": self.averages_buffers,
        }
        if self.rule == "ema":
            return EMAWeightAveraging(
                decay=self.decay, update_every_n_steps=self.every, **options
            )
        if self.rule == "own function":
            return WeightAveraging(
                avg_fn=lambda old, new, count: (old * count + new) / (count + 1),
                **options,
            )
        if self.rule == "many tensors":
            made = (
                get_swa_multi_avg_fn()
                if self.every == 1
                else get_ema_multi_avg_fn(self.decay)
            )
            return WeightAveraging(multi_avg_fn=made, **options)
        if self.rule == "swa":
            return StochasticWeightAveraging(
                swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2, device=self.device
            )
        return WeightAveraging(**options)

    def fit(self) -> Run:
        module: Any = (PictureModule if self.pictures else LanguageModule)(batches=2)
        for place, child in enumerate(module.model.modules()):
            if self.built_in == "float64" or (self.built_in == "mixed" and place % 2):
                child.double()
        sync = {"sync_batchnorm": True} if dist.is_initialized() else {}
        flags: dict[str, Any] = {"precision": "64-true", "max_epochs": 3, **sync}
        trainer = make_trainer(self.knobs, callbacks=[self.callback()], **flags)
        trainer.fit(module)
        return report(trainer, module)


def fit_drawn(numbers: Sequence[int]) -> list[Run]:
    return [Drawn(number).fit() for number in numbers]


@pytest.mark.parametrize(
    "numbers", [range(3), pytest.param(range(3, 206), marks=pytest.mark.slow)], ids=str
)
def test_drawn_averages_have_the_arithmetic_of_one_process(
    numbers: Sequence[int],
) -> None:
    """Also where the module is built in another dtype than it is trained in: Lightning
    averages a copy as built."""
    of_ranks = run_ranks(fit_drawn, 2, numbers, ranks_per_node=2)
    for number, *runs in zip(numbers, *of_ranks, strict=True):
        try:
            assert_same(runs, Drawn(number).fit())
        except AssertionError as error:
            raise AssertionError(f"case {number}, {vars(Drawn(number))}") from error


def interrupted(
    kind: str,
    knobs: dict[str, Any] | None,
    there: dict[str, Any],
    epochs: int,
    folder: str,
) -> list[Run]:
    """A run of some epochs, what goes on from its first under other knobs, and an
    evaluation of what was saved."""
    every_epoch = ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    runs = [
        fit_averaging(
            kind,
            knobs,
            also=[every_epoch],
            enable_checkpointing=True,
            max_epochs=epochs,
        )
    ]
    saved = f"{folder}/epoch=0.ckpt"
    runs.append(fit_averaging(kind, there, load=saved, max_epochs=epochs))
    module = Language(batches=BATCHES)
    trainer = make_trainer(there, **EXACT)
    trainer.validate(module, ckpt_path=saved, verbose=False)
    return [*runs, report(trainer, module)]


@pytest.mark.parametrize(
    ("kind", "knobs", "there"),
    [
        ("ema", {"shard_degree": 2}, {"shard_degree": 1, "optimizer_shard": "world"}),
        pytest.param(
            "ema", {"shard_degree": 2}, {"shard_degree": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            "multi",
            {"shard_degree": 2, "checkpoint": "full"},
            {"shard_degree": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "swa",
            {"shard_degree": 1, "optimizer_shard": "world"},
            {"shard_degree": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_goes_on_with_its_average(
    kind: str, knobs: Any, there: Any, tmp_path: Path
) -> None:
    """What is saved as the weights is the average, and evaluated when it is loaded
    without the callback."""
    epochs = 3 if kind == "swa" else 2  # it begins in the third
    expected = fit_averaging(kind, max_epochs=epochs)
    per_epoch = len(expected.losses) // epochs
    world = max(2, there["shard_degree"])
    ranks = run_ranks(
        interrupted, world, kind, knobs, there, epochs, str(tmp_path), ranks_per_node=2
    )
    for whole, resumed, evaluated in ranks:
        assert_same(whole, expected)
        assert_same(
            resumed,
            Run(expected.losses[per_epoch:], expected.weights, expected.metrics),
        )
        last = expected.losses[per_epoch - 2 : per_epoch]
        assert (
            evaluated.losses == pytest.approx(last, rel=0, abs=1e-12) or kind == "swa"
        )


def resumed_in_half_precision(knobs: dict[str, Any], folder: str) -> bool:
    """Whether a run that goes on from its second epoch ends, to the last bit, where the
    whole one ends."""
    flags: dict[str, Any] = {
        "precision": "bf16-true",
        "max_epochs": 3,
        "module": LanguageModule,
    }
    every_epoch = ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    whole = fit_averaging(
        "ema", knobs, also=[every_epoch], enable_checkpointing=True, **flags
    )
    resumed = fit_averaging("ema", knobs, load=f"{folder}/epoch=1.ckpt", **flags)
    return all(
        torch.equal(value, resumed.weights[name])
        for name, value in whole.weights.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["shard", "world"])
def test_an_average_of_half_precision_weights_loses_nothing_by_a_resume(
    shard: str, tmp_path: Path
) -> None:
    """It is float32, while the weights in the checkpoint are of the model's dtype."""
    knobs = {"shard_degree": 2, "optimizer_shard": shard}
    assert all(
        run_ranks(resumed_in_half_precision, 4, knobs, str(tmp_path), ranks_per_node=2)
    )
    saved = read_checkpoint(tmp_path / "epoch=1.ckpt")
    average, current = (
        saved["state_dict"]["model.embed.weight"],
        saved["current_model_state"]["model.embed.weight"],
    )
    assert average.dtype == current.dtype == torch.bfloat16 and not torch.equal(
        average, current
    )
    assert saved["smp_average"]["model.embed.weight"].dtype == torch.float32


def averaged_elements(knobs: dict[str, Any]) -> tuple[int, int]:
    """Elements of the average's parameters on this rank, and of all parameters of the
    module."""
    module, callback = Language(batches=1), callback_of("ema")
    make_trainer(knobs, callbacks=[callback], precision="64-true").fit(module)
    average = callback._average_model.module
    return sum(part.numel() for part in average.parts), sum(
        parameter.numel() for parameter in module.parameters()
    )


@pytest.mark.parametrize(
    ("shard", "parts"), [pytest.param("shard", 2, marks=pytest.mark.slow), ("world", 4)]
)
def test_no_rank_holds_more_of_an_average_than_its_part(shard: str, parts: int) -> None:
    """The masters of its part with optimizer_shard="world"; uneven rows are at most one
    more per tensor."""
    knobs = {"shard_degree": 2, "optimizer_shard": shard}
    for held, elements in run_ranks(averaged_elements, 4, knobs, ranks_per_node=2):
        assert held <= elements / parts * 1.25


def refused() -> list[str]:
    messages = []
    clipped = WeightAveraging(
        avg_fn=lambda average, current, count: (
            average + (current - average) / current.norm()
        )
    )
    for callback in (ModelPruning("l1_unstructured", amount=0.5), clipped):
        with pytest.raises(ValueError) as caught:
            make_trainer({}, callbacks=[callback], **EXACT).fit(Language(batches=1))
        messages.append(str(caught.value))
    return messages


def test_what_cannot_work_on_shards_is_refused_by_name() -> None:
    for pruning, averaging in run_ranks(refused, 2):
        assert "ModelPruning" in pruning and "smp checkpoint consolidate" in pruning
        assert "avg_fn=" in averaging and "get_ema_avg_fn" in averaging
