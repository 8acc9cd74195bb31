"""Every batch counts once, whoever holds copies or parts of it, and every sample once, whatever their number.

Cases are drawn: ways to log, gather and sum, on layouts of shard, tensor and pipeline ranks, with numbers of samples
that no number of ranks divides; each is compared with one process in float64.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.blocks import PLAN, Blocks, rows
from tests.lightning.running import Run, assert_same, make_trainer, report, together


class Outside(Callback):
    """Metrics that are no part of the module."""

    def __init__(self) -> None:
        self.seen = torchmetrics.SumMetric().set_dtype(torch.float64)
        self.results: list[float] = []
        self.batches = 0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen.update(outputs["square"].sum())
        self.batches += len(batch)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.results.append(float(self.seen.compute()))
        self.results.append(float(trainer.strategy.reduce(torch.tensor(self.batches), reduce_op="sum")))
        self.seen.reset()
        self.batches = 0


class Counting(LightningModule):
    """options: loss, one of LOSSES; samples of training, validation; batch, samples of a rank's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.model = Blocks()
        self.example_input_array = self.model.dummy_inputs
        self.count, self.confusion = torchmetrics.SumMetric(), torchmetrics.ConfusionMatrix("binary")
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
        self.log("train_samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        value = self.model(batch).mean((1, 2))
        self.count.update(float(len(batch)))
        self.confusion.update((value > 0).int(), torch.ones(len(batch), dtype=torch.int))
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
        if self.trainer.sanity_checking:
            self.outputs.clear()
        values = self.kept["values"].compute().flatten().sort().values
        own = torch.cat(self.outputs) if self.outputs else torch.zeros(0, dtype=torch.float64)
        strategy: Any = self.trainer.strategy
        numbers = {"own": own.sum(), "total": self.total, "seen": torch.tensor(float(self.seen))}
        summed = {name: float(strategy.reduce(number, reduce_op="sum")) for name, number in numbers.items()}
        gathered = self.all_gather(torch.tensor(self.seen)).sum()
        self.found = {**summed, "gathered": float(gathered), "values": values.tolist(), **self.found}
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
        self.found["predicted"] = float(strategy.reduce(torch.tensor(self.seen), reduce_op="sum"))
        self.seen = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(BasePredictionWriter):
    """What is written, by the index of its sample."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.at_batch: dict[int, float] = {}
        self.at_end: dict[int, float] = {}

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Sequence[int], *_: Any) -> None:
        self.at_batch |= dict(zip(indices, prediction.tolist(), strict=True))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
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
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=seed == 0)  # as Lightning's on ranks
    return DataLoader(data, batch_size=size * data_ranks, sampler=sampler)


def count(options: dict[str, Any], knobs: dict[str, Any] | None = None) -> Run:
    """Fit with validation, validate and test other numbers of samples, predict. In one process a batch is those of all
    ranks."""
    module, outside, writer = Counting(**options), Outside(), Writer()
    trainer = make_trainer(knobs, precision="64-true", callbacks=[outside, writer], num_sanity_val_steps=1)
    first, second, third = options["samples"]
    make = functools.partial(loader, data_ranks=options["data_ranks"])
    seen: dict[str, Any] = {}

    def keep(name: str, result: Any = None) -> None:
        seen[name] = (result, module.found)
        module.found = {}

    trainer.fit(module, make(4 * options["data_ranks"], 0, 2), make(first, 2, 2))
    run = report(trainer, module)
    keep("fit")
    keep("validate", trainer.validate(module, [make(second, 3, 1), make(third, 4, 2)], verbose=False))
    keep("test", trainer.test(module, make(third, 5, 2), verbose=False))
    predictions = trainer.predict(module, make(second, 6, 2))
    keep("predict")
    seen["written"] = [everywhere(writer.at_batch), everywhere(writer.at_end)]
    seen["outside"] = outside.results
    return replace(run, extra={"seen": seen, "predicted": sum(map(len, predictions or []))})


def assert_alike(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        ours, theirs = sorted(ours.items()), sorted(theirs.items())
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for place, (own, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(own, their, f"{path}.{place}")
    else:
        assert ours == (pytest.approx(theirs, rel=0, abs=1e-11) if isinstance(theirs, float) else theirs), path


def drawn(seed: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Ranks, options and knobs of a case."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 4])
    tensor, stages = draw.choice([(1, 1), (2, 1), (2, 1), (1, 2), *([(2, 2), (4, 1)] if ranks == 4 else [])])
    data = ranks // tensor // stages
    knobs: dict[str, Any] = {"shard_degree": draw.choice([degree for degree in (1, 2, 4) if data % degree == 0])}
    if tensor > 1:
        knobs |= {"tensor_parallel_degree": tensor, "tensor_parallel": PLAN}
    losses = ["contrastive", "weighted", "mean"]
    if stages > 1:
        knobs |= {"pipeline_parallel_degree": stages, "pipeline": {"microbatches": 2}}
        losses = ["mean"]
    samples = [draw.randint(1, 13) for _ in range(3)]
    loss, in_log = draw.choice(losses), stages == 1 and draw.random() < 0.7
    return ranks, {"loss": loss, "samples": samples, "data_ranks": data, "metric_in_log": in_log}, knobs


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
    assert sum(run.extra["predicted"] for run in runs) == copies * expected.extra["predicted"]


@pytest.mark.parametrize("seed", range(5))
def test_every_batch_and_every_sample_counts_once(seed: int) -> None:
    check(seed)
