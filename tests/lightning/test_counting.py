"""Every batch counts once, whoever holds copies or parts of it, and every sample once,
whatever their number.

Cases are drawn: ways to log, gather and sum, on layouts of shard, tensor and pipeline
ranks, with numbers of samples that no number of ranks divides; each is compared with
one process in float64.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from tests.core.blocks import PLAN, TOKENS, Blocks, rows
from tests.core.pipeline.cases import of_all_stages
from tests.harness import run_ranks
from tests.lightning.running import Run, assert_same, make_trainer, report, together
from tests.rank_pool import RanksFailed


class Outside(Callback):
    """Metrics that are no part of the module."""

    def __init__(self) -> None:
        self.seen = torchmetrics.SumMetric().set_dtype(torch.float64)
        self.results: list[float] = []
        self.batches = 0

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen.update(outputs["square"].sum())
        self.batches += len(batch)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.results.append(float(self.seen.compute()))
        self.results.append(
            float(trainer.strategy.reduce(torch.tensor(self.batches), reduce_op="sum"))
        )
        self.seen.reset()
        self.batches = 0


class Counting(LightningModule):
    """options: loss, one of LOSSES; samples of training, validation; batch, samples of
    a rank's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.model = Blocks()
        self.example_input_array = self.model.dummy_inputs
        self.count, self.confusion = (
            torchmetrics.SumMetric(),
            torchmetrics.ConfusionMatrix("binary"),
        )
        self.kept = {"values": torchmetrics.CatMetric()}
        self.outputs: list[torch.Tensor] = []
        self.seen = 0
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.losses: list[torch.Tensor] = []
        self.found: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        z = self.model(batch).mean(1)
        strategy: Any = self.trainer.strategy
        if self.options["loss"] == "contrastive":
            if dist.is_initialized():
                z = self.all_gather(z, sync_grads=True).flatten(0, 1)
            z = F.normalize(z, dim=1)
            scores = z @ z.T / 0.2
            loss = (scores.logsumexp(1) - scores.diag()).mean()
        elif self.options["loss"] == "weighted":
            samples = strategy.reduce(torch.tensor(float(len(batch))), reduce_op="sum")
            loss = z.square().sum() * self.trainer.world_size / samples
        else:
            loss = z.square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log(
            "train_samples",
            float(len(batch)),
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            sync_dist=True,
        )
        return loss

    def validation_step(
        self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, torch.Tensor]:
        value = self.model(batch).mean((1, 2))
        self.count.update(float(len(batch)))
        self.confusion.update(
            (value > 0).int(), torch.ones(len(batch), dtype=torch.int)
        )
        self.kept["values"].update(value)
        self.outputs.append(value)
        self.seen += len(batch)
        self.total += value.sum()
        logged = {"on_epoch": True, "sync_dist": True}
        self.log("n_log", float(len(batch)), reduce_fx="sum", **logged)
        self.log("largest", value.max(), reduce_fx="max", **logged)
        self.log("smallest", value.min(), reduce_fx="min", **logged)
        self.log("mean", value.mean(), batch_size=len(batch), on_step=True, **logged)
        if self.options["metric_in_log"]:
            self.log("n_metric", self.count, on_epoch=True)
        return {"square": value.square()}

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        values = self.kept["values"].compute().flatten().sort().values
        own = (
            torch.cat(self.outputs)
            if self.outputs
            else torch.zeros(0, dtype=torch.float64)
        )
        strategy: Any = self.trainer.strategy
        numbers = {
            "own": own.sum(),
            "total": self.total,
            "seen": torch.tensor(float(self.seen)),
        }
        summed = {
            name: float(strategy.reduce(number, reduce_op="sum"))
            for name, number in numbers.items()
        }
        gathered = self.all_gather(torch.tensor(self.seen)).sum()
        self.found = {
            **summed,
            "gathered": float(gathered),
            "values": values.tolist(),
            **self.found,
        }
        self.log("n_confusion", self.confusion.compute().double().sum())
        for metric in (self.confusion, self.kept["values"]):
            metric.reset()
        self.outputs.clear()
        self.seen = 0
        self.total.zero_()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += len(batch)
        return self.model(batch).mean((1, 2))

    def on_predict_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.found["predicted"] = float(
            strategy.reduce(torch.tensor(self.seen), reduce_op="sum")
        )
        self.seen = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(BasePredictionWriter):
    """What is written, by the index of its sample."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.at_batch: dict[int, float] = {}
        self.at_end: dict[int, float] = {}

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        indices: Sequence[int],
        *_: Any,
    ) -> None:
        self.at_batch |= dict(zip(indices, prediction.tolist(), strict=True))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, indices: Any
    ) -> None:
        for batch, places in zip(predictions, indices[0], strict=True):
            self.at_end |= dict(zip(places, batch.tolist(), strict=True))


def everywhere(own: dict[int, float]) -> dict[int, float]:
    if not dist.is_initialized():
        return own
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    return {place: value for each in of_all for place, value in each.items()}


def loader(samples: int, seed: int, size: int, data_ranks: int) -> DataLoader:
    """Of ``size`` samples for each rank that reads its own."""
    data: Any = rows(samples, seed)
    if dist.is_initialized():
        return DataLoader(data, batch_size=size)
    # As Lightning's on ranks.
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=seed == 0)
    return DataLoader(data, batch_size=size * data_ranks, sampler=sampler)


def count(options: dict[str, Any], knobs: dict[str, Any] | None = None) -> Run:
    """Fit with validation, validate and test other numbers of samples, predict. In one
    process a batch is those of all ranks."""
    module, outside, writer = Counting(**options), Outside(), Writer()
    trainer = make_trainer(
        knobs, precision="64-true", callbacks=[outside, writer], num_sanity_val_steps=1
    )
    first, second, third = options["samples"]
    make = functools.partial(loader, data_ranks=options["data_ranks"])
    seen: dict[str, Any] = {}

    def keep(name: str, result: Any = None) -> None:
        seen[name] = (result, module.found)
        module.found = {}

    trainer.fit(module, make(4 * options["data_ranks"], 0, 2), make(first, 2, 2))
    run = report(trainer, module)
    if (knobs or {}).get("pipeline_parallel_degree", 1) > 1:
        strategy: Any = trainer.strategy
        run.weights = of_all_stages(strategy.parallel, dict(module.named_parameters()))
    run.weights.pop("total", None)
    keep("fit")
    keep(
        "validate",
        trainer.validate(
            module, [make(second, 3, 1), make(third, 4, 2)], verbose=False
        ),
    )
    keep("test", trainer.test(module, make(third, 5, 2), verbose=False))
    predictions = trainer.predict(module, make(second, 6, 2))
    keep("predict")
    seen["written"] = [everywhere(writer.at_batch), everywhere(writer.at_end)]
    seen["outside"] = outside.results
    return replace(
        run, extra={"seen": seen, "predicted": sum(map(len, predictions or []))}
    )


def assert_alike(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        ours, theirs = sorted(ours.items()), sorted(theirs.items())
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for place, (own, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(own, their, f"{path}.{place}")
    else:
        assert ours == (
            pytest.approx(theirs, rel=0, abs=1e-11)
            if isinstance(theirs, float)
            else theirs
        ), path


def drawn(seed: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Ranks, options and knobs of a case."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 4])
    tensor, stages = draw.choice(
        [(1, 1), (2, 1), (2, 1), (1, 2), *([(2, 2), (4, 1)] if ranks == 4 else [])]
    )
    data = ranks // tensor // stages
    knobs: dict[str, Any] = {
        "shard_degree": draw.choice(
            [degree for degree in (1, 2, 4) if data % degree == 0]
        )
    }
    if tensor > 1:
        across = {"across_nodes": True} if tensor == 4 else {}  # nodes have two ranks
        knobs |= {
            "tensor_parallel_degree": tensor,
            "tensor_parallel": {**PLAN, **across},
        }
    losses = ["contrastive", "weighted", "mean"]
    if stages > 1:
        knobs |= {"pipeline_parallel_degree": stages, "pipeline": {"microbatches": 2}}
        losses = ["mean"]
    samples = [draw.randint(1, 13) for _ in range(3)]
    loss, in_log = draw.choice(losses), stages == 1 and draw.random() < 0.7
    return (
        ranks,
        {"loss": loss, "samples": samples, "data_ranks": data, "metric_in_log": in_log},
        knobs,
    )


def check(seed: int) -> None:
    ranks, options, knobs = drawn(seed)
    expected, runs = count(options), together(count, options, knobs, ranks=ranks)
    assert_same(runs, expected, 1e-11)
    copies = ranks // options["data_ranks"]
    last_stage = runs[-ranks // knobs.get("pipeline_parallel_degree", 1) :]
    for run in runs:
        logged = {name: run.extra["seen"][name][0] for name in ("validate", "test")}
        assert_alike(logged, {name: expected.extra["seen"][name][0] for name in logged})
    for run in last_stage:  # where steps come to their end
        assert_alike(run.extra["seen"], expected.extra["seen"])
    assert (
        sum(run.extra["predicted"] for run in runs)
        == copies * expected.extra["predicted"]
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_batch_and_every_sample_counts_once(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 210))
def test_every_batch_and_every_sample_counts_once_in_all_cases(seed: int) -> None:
    check(seed)


class Stream(IterableDataset):
    """Without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Fetching(Counting):
    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        raise AssertionError("it is refused before")


def loaders_of_the_users_own() -> tuple[list[Any], list[str]]:
    """Three batches on the first rank and one on the second: a stream, and a loader
    with a length."""
    options = {"loss": "mean", "data_ranks": 2, "metric_in_log": True}
    own = [
        rows(2, 10 * dist.get_rank() + number)
        for number in range(3 - 2 * dist.get_rank())
    ]
    seen: list[Any] = []
    for data in (Stream(own), own):
        loader = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
        module = Counting(**options)
        trainer = make_trainer(
            {"shard_degree": 2}, precision="64-true", use_distributed_sampler=False
        )
        logged = trainer.validate(module, loader, verbose=False)[0]
        seen.append(
            (
                logged["n_log"],
                logged["n_metric"],
                logged["n_confusion"],
                module.found["seen"],
            )
        )
        seen.append(sum(map(len, trainer.predict(module, loader) or [])))
    said = []
    zipped = CombinedLoader([DataLoader(own, batch_size=None)], "max_size")  # type: ignore[arg-type]
    for kind, loaders in (
        (Fetching, DataLoader(own, batch_size=None)),
        (Counting, zipped),
    ):  # type: ignore[arg-type]
        trainer = make_trainer(
            {"shard_degree": 2}, precision="64-true", use_distributed_sampler=False
        )
        with pytest.raises(ValueError) as caught:
            trainer.validate(kind(**options), loaders, verbose=False)
        said.append(str(caught.value))
    return seen, said


def test_loaders_of_the_users_own_may_end_at_different_batches() -> None:
    for place, (seen, said) in enumerate(run_ranks(loaders_of_the_users_own, 2)):
        assert seen == [(8, 8, 8, 8), 6 - 4 * place] * 2
        assert (
            "write validation_step(batch, batch_idx)" in said[0]
            and "mode='sequential'" in said[1]
        )


class Comparing(Counting):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.all_gather(self.model(batch), sync_grads=True).square().mean()


def compare_in_stages() -> str:
    knobs = {
        "shard_degree": 1,
        "pipeline_parallel_degree": 2,
        "pipeline": {"microbatches": 2},
    }
    trainer = make_trainer(knobs, precision="64-true", limit_val_batches=0)
    module = Comparing(loss="mean", data_ranks=1, metric_in_log=False)
    trainer.fit(module, DataLoader(rows(4, 1), batch_size=4))  # type: ignore[arg-type]
    return ""


def test_a_loss_over_all_samples_is_refused_where_stages_see_micro_batches() -> None:
    with pytest.raises(RanksFailed, match="sees micro-batches"):
        run_ranks(compare_in_stages, 2)


def count_by_sample() -> tuple[dict[str, float], int]:
    """What context ranks count is added up; counts of samples go over the data
    group."""
    knobs = {"shard_degree": 2, "context_parallel_degree": 2}
    trainer = make_trainer(knobs, precision="64-true")
    with patch.object(logging.getLogger("smp"), "warning") as warned:
        pairs = TensorDataset(rows(4, 1), torch.zeros(4, TOKENS, dtype=torch.long))
        trainer.validate(BySample(), DataLoader(pairs, batch_size=2), verbose=False)
    said = sum(
        "Where samples are counted" in str(call.args[0])
        for call in warned.call_args_list
    )
    return {
        name: float(value) for name, value in trainer.callback_metrics.items()
    }, said


class BySample(Counting):
    def __init__(self) -> None:
        super().__init__(loss="mean", data_ranks=1, metric_in_log=False)

    def validation_step(self, pair: Any, batch_idx: int) -> None:  # type: ignore[override]
        batch, _ = pair
        group = self.trainer.strategy.data_group  # type: ignore[attr-defined]
        self.log(
            "samples",
            float(len(batch)),
            reduce_fx="sum",
            sync_dist=True,
            sync_dist_group=group,
        )
        self.log(
            "tokens",
            float(batch.shape[0] * batch.shape[1]),
            reduce_fx="sum",
            sync_dist=True,
        )

    def on_validation_epoch_end(self) -> None:
        pass


def test_context_ranks_add_up_tokens_and_samples_over_the_data_group() -> None:
    results = run_ranks(count_by_sample, 2)
    for metrics, _ in results:
        assert metrics == {"samples": 4.0, "tokens": 16.0}
    assert [said for _, said in results] == [1, 0], (
        "rank 0 says once that a sum may have been of samples"
    )


class InGroups(BySample):
    """Notes the mean of the present step's numbers, over all ranks and over a group."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[tuple[float, float]] = []

    def validation_step(self, pair: Any, batch_idx: int) -> None:  # type: ignore[override]
        _, number = pair
        strategy: Any = self.trainer.strategy
        of_all, of_group = (
            float(strategy.reduce(number.double().mean(), group=group))
            for group in (None, strategy.data_group)
        )
        self.means.append((of_all, of_group))


def evaluate_in_groups() -> list[tuple[float, float]]:
    module = InGroups()
    trainer = make_trainer({"shard_degree": 1}, precision="64-true")
    numbers = torch.tensor([2.0, 4.0, 9.0])  # rank 1 has the second one alone
    pairs = TensorDataset(rows(3, 1), numbers)
    trainer.validate(module, DataLoader(pairs, batch_size=1), verbose=False)
    return module.means


def test_a_group_of_an_uneven_evaluation_counts_ranks_that_have_a_batch() -> None:
    first, other = run_ranks(evaluate_in_groups, 2)
    assert first == [(3.0, 3.0), (9.0, 9.0)] and other == first[:1]
