"""Trainer's settings that change what is computed: each equals the stock Trainer in one
process with the same setting.

float32 unless said: losses and norms to 1e-6 + 2e-7 per step, weights to 4e-6 (twice
what one process differs from itself in another order). Under bf16 autocast 1e-2: three
digits, and gathered parameters are rounded once more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, Trainer

from accelerate_smp.loss_counts import ReadsValue
from accelerate_smp.trainer import SmpTrainerMixin
from tests.accelerate.trainers import (
    Run,
    assert_close,
    make_model,
    make_trainer,
    whole_weights,
)
from tests.harness import run_ranks

BATCH = 8


class Buffered(GPT2LMHeadModel):
    """With a persistent buffer that training changes, and one that is not saved."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training:
            self.seen += 1.0
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def mean_of_squares(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A user's loss: a sum over this rank's items, divided by the items of the whole
    global batch."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    kept = labels[..., 1:] != -100
    return (logits[..., :-1, :].square().mean(-1) * kept).sum() / num_items_in_batch


def mean_of_all_squares(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A user's loss that takes the count of items and is a mean over this rank's all
    the same."""
    return (
        (outputs["logits"] if isinstance(outputs, dict) else outputs.logits)
        .square()
        .mean()
    )


class Classifier(GPT2LMHeadModel):
    """Takes every keyword and returns a mean, as BERT's classifiers do."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = super().forward(input_ids=input_ids).logits.mean(1)
        return {
            "loss": torch.nn.functional.cross_entropy(logits, input_ids[:, 0]),
            "logits": logits,
        }


class OwnTrainer(Trainer):
    """Computes a mean itself, as TRL's trainers do: nothing is multiplied in there."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return mean_of_all_squares(model(**inputs), inputs["labels"])


def variant(folder: Path, knobs: dict[str, Any] | None, name: str, **flags: Any) -> Run:
    if name == "bf16":
        flags |= {"bf16": True, "use_cpu": True}
    if name == "gradient checkpointing":
        flags["gradient_checkpointing"] = True
    if name == "label smoothing":
        flags["label_smoothing_factor"] = 0.2
    if name == "buffers":
        torch.manual_seed(0)
        flags["model"] = Buffered(make_model().config)
    if name == "classifier":
        torch.manual_seed(0)
        flags["model"] = Classifier(make_model().config)
    if name == "own trainer":
        flags["kind"] = OwnTrainer
    # Ranks that hold stages of one model read one batch.
    shares = (knobs or {}).get("pipeline_parallel_degree", 1)
    trainer, recorder = make_trainer(folder, BATCH * shares, 2, knobs, **flags)
    if name == "own loss":
        trainer.compute_loss_func = mean_of_squares
    if name == "own mean":
        trainer.compute_loss_func = mean_of_all_squares
    trainer.train()
    if name == "buffers":
        trainer.save_model(str(folder / "final"))
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


def all_variants(
    folder: Path, knobs: dict[str, Any] | None, names: list[str], **flags: Any
) -> dict[str, Run]:
    return {name: variant(folder / name, knobs, name, **flags) for name in names}


VARIANTS = ["bf16", "gradient checkpointing", "label smoothing", "own loss", "buffers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "degree",
    [
        2,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_settings_of_trainer_mean_what_they_mean_in_one_process(
    tmp_path: Path, degree: int
) -> None:
    expected = all_variants(tmp_path / "alone", None, VARIANTS)
    results = run_ranks(
        all_variants,
        4,
        tmp_path / "ranks",
        {"shard_degree": degree},
        VARIANTS,
        ranks_per_node=2,
    )
    for seen in results:
        for name in VARIANTS:
            if name == "bf16":
                assert seen[name].losses == pytest.approx(
                    expected[name].losses, abs=1e-2
                )
                assert seen[name].losses != expected["gradient checkpointing"].losses, (
                    "bf16 changed nothing"
                )
                assert all(
                    value.dtype == torch.float32
                    for value in seen[name].weights.values()
                )
            elif name == "buffers":
                # Other weights than the rest; the buffer is the subject, and Adam makes
                # noise of its own.
                assert seen[name].losses == pytest.approx(
                    expected[name].losses, abs=5e-6
                )
            else:
                assert_close(seen[name], expected[name], 8e-7)
    saved = Buffered.from_pretrained(tmp_path / "ranks" / "buffers" / "final")
    assert torch.equal(saved.seen, torch.full((3,), 6.0)), "one forward per micro-batch"
    for name, value in results[0]["buffers"].weights.items():
        assert torch.equal(saved.state_dict()[name], value), name


MEANS = ["classifier", "own mean", "own trainer"]


def test_a_mean_is_not_multiplied_by_ranks(tmp_path: Path) -> None:
    """Trainer multiplies a loss that is handed the count of targets, whether or not it
    divides by it."""
    expected = all_variants(tmp_path / "alone", None, MEANS)
    for seen in run_ranks(
        all_variants, 2, tmp_path / "ranks", {"shard_degree": 2}, MEANS
    ):
        for name in MEANS:
            assert_close(seen[name], expected[name], 8e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 2},
        {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}},
    ],
    ids=["shards", "stages"],
)
def test_a_mean_of_a_compiled_model_is_not_multiplied_either(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """Checkpointing recomputes behind the pass in which the use of the count is
    seen."""
    expected = all_variants(tmp_path / "alone", None, MEANS)
    flags = {"torch_compile": True, "torch_compile_backend": "eager"}
    if "shard_degree" in knobs:
        flags["gradient_checkpointing"] = True
    for seen in run_ranks(all_variants, 2, tmp_path / "ranks", knobs, MEANS, **flags):
        for name in MEANS:
            assert_close(seen[name], expected[name], 8e-7)


@pytest.mark.parametrize(
    ("use", "seen"),
    [
        (lambda count: count.to(torch.float64).device, False),
        (lambda count: torch.is_floating_point(count.detach()), False),
        (lambda count: torch.ones(2).sum() / count.to("cpu"), True),
        (lambda count: torch.stack([count, count]), True),
        (lambda count: 1 / int(count), True),
        (lambda count: torch.div(torch.ones(2), other=count), True),
    ],
)
def test_what_reads_a_count_is_told_from_what_moves_it(use: Any, seen: bool) -> None:
    count = torch.tensor(5)
    with ReadsValue(count) as reads:
        use(count)
    assert reads.seen == seen


class Numbers(torch.utils.data.IterableDataset):
    """Samples without a length; every rank makes the same ones, as from a shared
    stream."""

    def __iter__(self) -> Any:
        for number in range(24):
            tokens = torch.full((5,), number)
            yield {"input_ids": tokens, "labels": tokens}


def stream(folder: Path) -> tuple[list[list[int]], int]:
    trainer, _ = make_trainer(folder, BATCH, 1, {"shard_degree": 2}, max_steps=3)
    trainer.train_dataset = Numbers()
    seen: list[list[int]] = []
    compute_loss = trainer.compute_loss

    def watched(
        model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        seen.append(
            trainer.accelerator.gather(inputs["input_ids"][:, 0].contiguous()).tolist()
        )
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    trainer.train()
    return seen, trainer.state.global_step


def test_iterable_data_sets_are_shared_out_once(tmp_path: Path) -> None:
    for seen, steps in run_ranks(stream, 2, tmp_path, ranks_per_node=2):
        assert steps == 3
        assert [sorted(batch) for batch in seen] == [
            list(range(8 * n, 8 * n + 8)) for n in range(3)
        ]


def test_a_search_on_several_ranks_prunes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Optuna prunes by default, on rank 0 alone: the others hung in the trial that it
    had left."""

    class NopPruner:
        pass

    class Searches:
        args = SimpleNamespace(world_size=2)

        def hyperparameter_search(self, *_: Any, **options: Any) -> dict[str, Any]:
            return options

    class Ours(SmpTrainerMixin, Searches):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    pruners = ModuleType("optuna.pruners")
    pruners.NopPruner = NopPruner  # type: ignore[attr-defined]
    for name, module in (("optuna", ModuleType("optuna")), (pruners.__name__, pruners)):
        monkeypatch.setitem(sys.modules, name, module)
    trainer = Ours()
    options = trainer.hyperparameter_search(None, None, 9, n_jobs=1)
    assert isinstance(options.pop("pruner"), NopPruner) and options == {"n_jobs": 1}
    assert "prunes no trial" in caplog.text
    for refused in ({"pruner": object()}, {"timeout": 1}, {"catch": (OSError,)}):
        name = next(iter(refused))
        with pytest.raises(ValueError, match=rf"search\({name}=.* leave {name} out"):
            trainer.hyperparameter_search(**refused)
    # Other backends, and one process, get what is given.
    given = {"backend": "wandb", "timeout": 60}
    assert trainer.hyperparameter_search(**given) == given
    trainer.args = SimpleNamespace(world_size=1)
    assert trainer.hyperparameter_search(timeout=60) == {"timeout": 60}
