"""Ranks of which one runs out of batches before the other train like one process, which
sees the batches there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_smp import JoinedLoader, SmpMonitor
from lightning_smp.uneven import require_equal_training
from tests.core.models import LENGTH, VOCABULARY
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank, token_rows
from tests.lightning.running import Run, assert_same, make_trainer, report, together

# Samples of each rank's batches: one ends two batches before the other.
SIZES = ((4, 4, 3, 2, 4), (4, 1, 4))
EPOCHS = 2


def batches_of(place: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(place)
    return [
        torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        for size in SIZES[place]
    ]


class Stream(IterableDataset):
    """Without a length: Lightning fetches a batch ahead."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Streaming(LanguageModule):
    """options: weigh; sized, whether loaders tell their length. In one process a batch
    is those of all ranks."""

    def train_dataloader(self) -> Any:
        if dist.is_initialized():
            own: Any = batches_of(rank())
            stream = (
                own
                if self.options["sized"]
                else DataLoader(Stream(own), batch_size=None)
            )
            return JoinedLoader(stream, self.options["weigh"])
        mine, theirs = batches_of(0), batches_of(1)
        together = [
            [mine[place], *theirs[place : place + 1]] for place in range(len(mine))
        ]
        return DataLoader(Stream(together), batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, torch.Tensor):
            return self.loss(batch)
        if self.options["weigh"] == "samples":
            return self.loss(torch.cat(batch))
        return torch.stack([self.loss(part) for part in batch]).mean()


def fit(options: dict[str, Any], folder: str | None = None, **flags: Any) -> Run:
    """folder: the run is saved in the middle of the second epoch, when one rank
    repeats, and another one goes on."""
    monitor = SmpMonitor(every_n_steps=1)
    flags = {
        "limit_val_batches": 0,
        "max_epochs": EPOCHS,
        "callbacks": [monitor],
        **flags,
    }
    path = None if folder is None else f"{folder}/left"
    if path is not None:
        saving = LambdaCallback(
            on_train_batch_end=lambda at, *_: (
                at.global_step == 9 and at.save_checkpoint(path)
            )
        )
        make_trainer({"shard_degree": 2}, **{**flags, "callbacks": [saving]}).fit(
            Streaming(**options).double()
        )
    module = Streaming(**options).double()
    trainer = make_trainer({"shard_degree": 2}, **flags)
    trainer.fit(module, ckpt_path=path)
    run = report(
        trainer, module, steps=trainer.global_step, samples=monitor.latest["samples"]
    )
    return replace(run, metrics={})  # of the monitor


@pytest.mark.parametrize(
    ("weigh", "sized", "window"),
    [
        ("samples", False, 1),
        ("ranks", True, 2),
        *(pytest.param("ranks", False, 2, marks=pytest.mark.slow),),
    ],
)
def test_a_rank_that_runs_out_trains_like_one_process(
    weigh: str, sized: bool, window: int
) -> None:
    options, flags = (
        {"weigh": weigh, "sized": sized},
        {"accumulate_grad_batches": window},
    )
    runs = together(fit, options, ranks=2, **flags)
    assert_same(runs, fit(options, **flags))
    for run in runs:
        assert run.extra["steps"] == EPOCHS * -(-5 // window)
        assert run.extra["samples"] == EPOCHS * sum(map(sum, SIZES)), (
            "a repeated batch is not counted"
        )


def test_it_goes_on_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    options = {"weigh": "samples", "sized": False}
    assert_same(together(fit, options, str(tmp_path), ranks=2), fit(options))


class Fetching(Streaming):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("it is refused before")


class Shuffled(Sampler[int]):
    """Of this rank's rows; told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 - 2 * rank()))


def refusals() -> tuple[dict[str, str], list[int]]:
    """What is said on this rank where a loader cannot be joined; and the epochs that a
    sampler was told."""
    options: dict[str, Any] = {"weigh": "ranks", "sized": True}
    own, module = batches_of(0), Streaming(**options).double()
    two, nothing = {"shard_degree": 2}, {"limit_val_batches": 0}
    cases: dict[str, Any] = {
        "several": (two, nothing, module, {"one": JoinedLoader(own), "other": own}),
        "no tensor": (two, nothing, module, JoinedLoader(["text"], "samples")),
        "fetches": (two, nothing, Fetching(**options).double(), JoinedLoader(own)),
    }
    said = {}
    for name, (knobs, flags, fitted, *loaders) in cases.items():
        with pytest.raises(ValueError) as caught:
            make_trainer(knobs, **flags).fit(fitted, *loaders)
        said[name] = str(caught.value)
    with pytest.raises(RuntimeError) as failed:
        next(iter(JoinedLoader(own)))
    said["other strategy"] = str(failed.value)
    sampler = Shuffled()
    loader = DataLoader(token_rows(1), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    make_trainer(two, **nothing, max_epochs=2).fit(
        Streaming(**options).double(), JoinedLoader(loader)
    )
    return said, sampler.epochs


def test_what_cannot_be_joined_is_refused_on_all_ranks() -> None:
    for said, epochs in run_ranks(refusals, 2):
        assert sorted(set(epochs)) == [0, 1]
        assert "write training_step(batch, batch_idx)" in said["fetches"]
        assert "needs strategy='smp_sharded'" in said["other strategy"]
        assert "one of several training loaders" in said["several"]
        assert "samples=lambda batch" in said["no tensor"]
    trainer, mesh = (
        SimpleNamespace(
            train_dataloader=JoinedLoader([]),
            num_training_batches=1,
            accumulate_grad_batches=1,
        ),
        SimpleNamespace(data_size=1),
    )
    mesh.topology = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="where ranks share a batch"):
        require_equal_training(trainer, mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every rank would read all of its dataset"):
        JoinedLoader(DataLoader(TensorDataset(torch.zeros(2))))
    with pytest.raises(ValueError, match="allowed: 'ranks', 'samples'"):
        JoinedLoader([], "tokens")  # type: ignore[arg-type]
    JoinedLoader(DataLoader(TensorDataset(torch.zeros(2)), batch_sampler=[[0], [1]]))
