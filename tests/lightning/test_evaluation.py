"""validate, test and predict give one process's numbers, before, between and after
training, and do not disturb it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning.modules import (
    LanguageModule,
    LateModule,
    PictureModule,
    loader,
    pictures,
    token_rows,
)
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
)

EXACT: dict[str, Any] = {"precision": "64-true"}


@contextmanager
def as_with_nccl() -> Iterator[None]:
    """Lightning never evaluates in inference mode under gloo, but does under NCCL: take
    that branch."""
    with patch(
        "lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False
    ):
        yield


def in_order(predictions: list[torch.Tensor]) -> torch.Tensor:
    """All ranks' predictions in the order of the data set: rank r of W has the samples
    r, r + W, ..."""
    mine = torch.cat(predictions).detach()
    if not dist.is_initialized():
        return mine
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1).flatten(0, 1)


def evaluate(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    validated = trainer.validate(module, verbose=False)[0]
    return {**validated, **trainer.test(module, verbose=False)[0]}


class Unsized(IterableDataset[torch.Tensor]):
    """A stream of batches, the same on every rank, that does not know its length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from token_rows(1, seed=11).split(2)


def evaluate_streams(knobs: dict[str, Any] | None = None) -> dict[str, float]:
    module, stream = LanguageModule(batches=1), DataLoader(Unsized(), batch_size=None)
    trainer = make_trainer(knobs, **EXACT, num_sanity_val_steps=1, max_epochs=1)
    validated = trainer.validate(module, stream, verbose=False)[0]
    trainer.fit(module, val_dataloaders=stream)
    tested = trainer.test(module, stream, verbose=False)[0]
    assert trainer.predict(module, stream)
    return {
        **validated,
        **tested,
        **{name: value.item() for name, value in trainer.callback_metrics.items()},
    }


def test_evaluation_takes_loaders_that_do_not_know_their_length() -> None:
    expected = evaluate_streams()
    for found in together(evaluate_streams, {"shard_degree": 2}):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)


def evaluate_around_fit(knobs: dict[str, Any] | None = None) -> Run:
    """predict, validate and test, then fit with sanity check and evaluation after every
    second batch, then again."""
    module = LanguageModule(batches=5)
    trainer = make_trainer(
        knobs,
        **EXACT,
        num_sanity_val_steps=2,
        val_check_interval=2,
        accumulate_grad_batches=2,
        max_epochs=2,
    )
    seen: dict[str, Any] = {}
    with as_with_nccl():
        seen["predictions before"] = in_order(trainer.predict(module))  # type: ignore[arg-type]
        seen["before"] = evaluate(trainer, module)
        trainer.fit(module)
        seen["after"] = evaluate(trainer, module)
        seen["predictions after"] = in_order(trainer.predict(module))  # type: ignore[arg-type]
    return report(trainer, module, **seen)


@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 2},
        pytest.param(
            {"shard_degree": 4, "reshard_after_forward": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_evaluation_around_and_inside_fit_equals_one_process(
    knobs: dict[str, Any],
) -> None:
    expected = evaluate_around_fit()
    assert expected.extra["before"] != expected.extra["after"]
    runs = together(evaluate_around_fit, knobs)
    assert_same(runs, expected)
    for run in runs:
        for when in ("before", "after"):
            ours, theirs = run.extra[when], expected.extra[when]
            assert ours == pytest.approx(theirs, rel=0, abs=1e-12)
            predictions = run.extra[f"predictions {when}"]
            assert (
                predictions - expected.extra[f"predictions {when}"]
            ).abs().max() <= 1e-12


def normalised_by_rank(ranks: int) -> Run:
    """What ranks that each normalise their own part of the batch compute, in one
    process: gradients are averaged, and the running statistics are rank 0's."""
    module = PictureModule().double()
    model, optimizer = module.model, module.configure_optimizers()
    losses = []
    for images, labels in loader(*pictures(module.batches), shuffle=True):
        for number in range(ranks):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = module.loss((images[number::ranks], labels[number::ranks])) / ranks
            loss.backward()
            losses.append(loss.item())
            if number > 0:
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
        optimizer.step()
        optimizer.zero_grad()
    per_batch = (
        torch.tensor(losses, dtype=torch.float64).view(-1, ranks).sum(1).tolist()
    )
    module.eval()
    with torch.no_grad():
        parts = [
            module.loss(batch).item()
            for batch in loader(*pictures(module.val_batches, seed=8))
        ]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Run(per_batch, weights, {"val_loss": sum(parts) / len(parts)})


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_rank_evaluates_with_the_batch_norm_statistics_of_rank_0(
    degree: int,
) -> None:
    assert_same(
        together(fit, PictureModule, knobs={"shard_degree": degree}, **EXACT),
        normalised_by_rank(4),
    )


def validate_and_fit(knobs: dict[str, Any] | None = None, **flags: Any) -> Run:
    module = PictureModule()
    trainer = make_trainer(knobs, **EXACT, **flags)
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_sync_batchnorm_normalises_by_the_global_batch(degree: int) -> None:
    """The flag alone makes the ranks' BatchNorm that of one process, running statistics
    included, and also when the module was evaluated, and so sharded, before."""
    runs = together(validate_and_fit, {"shard_degree": degree}, sync_batchnorm=True)
    assert_same(runs, validate_and_fit())


def late_fit(options: dict[str, Any], knobs: dict[str, Any] | None = None) -> Run:
    """A module built in configure_model, which Lightning calls again for every validate
    and test."""
    module = LateModule(**options)
    trainer = make_trainer(knobs, **EXACT)
    before = trainer.validate(module, verbose=False)[0]
    start: dict[str, torch.Tensor] = {}
    with patch.object(
        LateModule,
        "on_train_start",
        lambda self: start.update(report(trainer, self).weights),
    ):
        trainer.fit(module)
    after = evaluate(trainer, module)
    return report(trainer, module, start=start, before=before, after=after)


def assert_same_evaluations(runs: list[Run], expected: Run) -> None:
    assert_same(runs, expected)
    assert expected.extra["before"] != expected.extra["after"]
    for run in runs:
        for when in ("before", "after"):
            assert run.extra[when] == pytest.approx(
                expected.extra[when], rel=0, abs=1e-12
            )


def test_configure_model_called_again_keeps_what_was_trained() -> None:
    runs = together(late_fit, {}, {"shard_degree": 2}, ranks=2)
    assert_same_evaluations(runs, late_fit({"once": True}))


def test_delayed_init_starts_equal_everywhere_and_trains_like_one_process() -> None:
    """The same bits for every shard degree; one process that starts from them ends
    where the ranks do."""
    runs = {
        degree: together(late_fit, {}, {"shard_degree": degree, "delayed_init": True})
        for degree in (1, 4)
    }
    start = runs[1][0].extra["start"]
    assert float(start["model.head.weight"].abs().max()) > 0
    for run in [*runs[1], *runs[4]]:
        assert all(
            torch.equal(run.extra["start"][name], value)
            for name, value in start.items()
        )
    expected = late_fit({"once": True, "weights": start})
    for degree in runs:
        assert_same_evaluations(runs[degree], expected)


def two_trainers(knobs: dict[str, Any] | None = None) -> Run:
    module = LanguageModule()
    make_trainer(knobs, **EXACT).fit(module)
    second = make_trainer(knobs, **EXACT, accumulate_grad_batches=2)
    second.fit(module)
    after = evaluate(make_trainer(knobs, **EXACT), module)
    return report(second, module, after=after)


def test_a_second_trainer_goes_on_with_the_same_module() -> None:
    expected = two_trainers()
    runs = together(two_trainers, {"shard_degree": 2}, ranks=2)
    assert_same(runs, expected)
    assert runs[0].extra["after"] == pytest.approx(
        expected.extra["after"], rel=0, abs=1e-12
    )


def evaluate_in_inference_mode(folder: str, knobs: dict[str, Any] | None = None) -> Run:
    """What a script does that wants no gradients anywhere, and then trains all the
    same, which one process, whose parameters are inference tensors then, cannot."""
    first = LanguageModule(batches=2)
    trainer = make_trainer(knobs, **EXACT)
    trainer.fit(first)
    path = f"{folder}/saved"
    trainer.save_checkpoint(path)
    module = LanguageModule(batches=2)
    with contextlib.nullcontext() if knobs is None else torch.inference_mode():
        seen = make_trainer(knobs, **EXACT).test(module, ckpt_path=path, verbose=False)[
            0
        ]
        made_inside = LanguageModule(batches=2)
        seen |= make_trainer(knobs, **EXACT).validate(
            made_inside, ckpt_path=path, verbose=False
        )[0]
        make_trainer(knobs, **EXACT).predict(made_inside)
        assert torch.is_inference_mode_enabled() == (knobs is not None)
    trainer = make_trainer(knobs, **EXACT, num_sanity_val_steps=1)
    trainer.fit(module)
    make_trainer(knobs, **EXACT).fit(made_inside)
    return report(trainer, module, seen=seen)


@pytest.mark.slow
def test_evaluation_called_in_inference_mode_can_be_followed_by_training(
    tmp_path: Path,
) -> None:
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    expected = evaluate_in_inference_mode(str(tmp_path / "alone"))
    for run in together(
        evaluate_in_inference_mode, str(tmp_path / "ours"), {"shard_degree": 2}, ranks=2
    ):
        # One process rounds the float64 weights that it loads to float32.
        assert run.extra["seen"] == pytest.approx(
            expected.extra["seen"], rel=0, abs=1e-6
        )
        assert_same(run, expected, tolerance=1e-6)
