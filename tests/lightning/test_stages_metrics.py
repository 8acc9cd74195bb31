"""What steps in pipeline stages log and keep: torchmetrics and lists of outputs, as in
one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from tests.core.tensor_parallel.models import TOKENS, VOCABULARY
from tests.harness import run_ranks
from tests.lightning.running import Run, assert_same, make_trainer, together
from tests.lightning.staged import StagedModule, knobs_of


class Keeping(StagedModule):
    """options: on_step: whether a metric is logged for each step."""

    def build(self) -> None:
        super().build()
        self.trained = torchmetrics.SumMetric()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=VOCABULARY)
        self.scores = torchmetrics.MetricCollection(
            {"seen": torchmetrics.SumMetric(), "worst": torchmetrics.MaxMetric()}
        ).set_dtype(torch.float64)
        self.spread = torchmetrics.CatMetric().set_dtype(torch.float64)
        self.outputs: list[Any] = []
        self.by_kind: dict[str, list[Any]] = {"mean": []}
        self.by_loader: list[list[Any]] = [[], []]
        self.counts, self.sums = [0, 0], [torch.zeros((), dtype=torch.float64)]
        self.total: Any = 0.0
        self.steps = 0
        self._private: list[torch.Tensor] = []
        self.tokens: set[int] = set()
        self.histogram = np.zeros(VOCABULARY)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        self.trained(len(batch))
        self.log(
            "trained",
            self.trained,
            on_step=bool(self.options.get("on_step")),
            on_epoch=True,
        )
        return loss

    def on_validation_epoch_start(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.mean.zero_()

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch)
        self.accuracy(logits.flatten(0, 1), batch.flatten())
        self.log("accuracy", self.accuracy)
        self.scores["seen"].update((logits.argmax(-1) == batch).sum())
        self.scores["worst"].update(logits.max())
        self.log_dict(self.scores)
        self.spread.update(logits.mean())
        self.outputs.append(logits.mean(-1).detach())
        self.by_kind["mean"].append({"of": batch_idx, "value": logits.mean()})
        self.by_loader[1].append(logits.mean(-1).detach())
        self.counts[batch_idx % 2] += len(batch)
        self.sums[0] += logits.sum()
        self.total += logits.sum()
        self._private.append(logits.sum())
        self.tokens.update(logits.argmax(-1).flatten().tolist())
        np.add.at(self.histogram, batch[:, 0].numpy(), 1)
        self.mean += logits.mean()
        return logits.mean()

    def on_validation_epoch_end(self) -> None:
        kept = torch.cat(self.outputs)
        assert kept.shape[1] == TOKENS and [
            each["of"] for each in self.by_kind["mean"]
        ] == list(range(len(self.outputs)))
        self.log("kept", kept.square().mean(), sync_dist=True)
        self.log(
            "means",
            torch.stack([each["value"] for each in self.by_kind["mean"]]).mean(),
            sync_dist=True,
        )
        self.log("total", self.total, sync_dist=True, reduce_fx="sum")
        means = torch.cat(self.by_loader[1]).square().mean()
        self.log("of_loader", means, sync_dist=True)
        counted = float(self.counts[0] + 3 * self.counts[1])
        self.log("counted", counted, sync_dist=True, reduce_fx="sum")
        self.log("summed", self.sums[0], sync_dist=True, reduce_fx="sum")
        private = torch.stack(self._private).sum()
        self.log("private", private, sync_dist=True, reduce_fx="sum")
        weighed = float(self.histogram @ np.arange(VOCABULARY))
        self.log("histogram", weighed, sync_dist=True, reduce_fx="sum")
        largest = float(max(self.tokens))
        self.log("largest", largest, sync_dist=True, reduce_fx="max")
        self.log("buffer", self.mean, sync_dist=True)
        self.log("spread", self.spread.compute().mean())
        self.spread.reset()
        self.outputs.clear()
        self.by_kind["mean"].clear()


def keep(batch_size: int, knobs: dict[str, Any], on_step: bool = False) -> Run:
    torch.manual_seed(0)
    module = Keeping(kind="plain", batch_size=batch_size, on_step=on_step)
    trainer = make_trainer(
        knobs,
        max_epochs=2,
        precision="64-true",
        num_sanity_val_steps=1,
        log_every_n_steps=1,
    )
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Run(metrics=metrics, weights={"outputs": torch.tensor(len(module.outputs))})


def test_metrics_and_kept_outputs_are_those_of_one_process() -> None:
    """Two micro-batches in a batch and two ranks that read their own; a sum counts each
    batch once."""
    expected = keep(8, {})
    names = {"trained", "accuracy", "seen", "worst", "kept", "means", "total", "spread"}
    names |= {"of_loader", "counted", "summed"}
    names |= {"private", "histogram", "largest", "buffer"}
    assert names <= expected.metrics.keys()
    assert_same(together(keep, 4, knobs_of(2, shard=2)), expected)


def kept_for_each_step() -> str:
    try:
        keep(8, knobs_of(2), on_step=True)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_metric_for_each_step_is_one_of_an_uncut_batch() -> None:
    """Of several micro-batches it would be the last one's."""
    expected = keep(8, {}, on_step=True)
    assert_same(
        run_ranks(keep, 2, 8, knobs_of(2, microbatches=1), on_step=True), expected
    )
    for said in run_ranks(kept_for_each_step, 2):
        assert (
            "pipeline.microbatches=2 parts" in said
            and "write on_step=False, on_epoch=True" in said
        )
