"""A LightningModule that knows nothing of the pipeline stages that it trains in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.core.pipeline.cases import example_of
from tests.core.tensor_parallel.model_cases import batches, build, loss_of
from tests.lightning.modules import LanguageModule


class StagedModule(LanguageModule):
    """options: batch_size; kind of the model; pairs: batches are (tokens, targets);
    sliced: the step leaves out the first token of each; late: built in configure_model."""

    def build(self) -> None:
        self.calls = 0
        if not self.options.get("late"):
            self._build_model()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self._build_model()

    def _build_model(self) -> None:
        self.model = example_of(
            build(self.options["kind"], seed=torch.initial_seed() % 100)
        )

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, torch.Tensor):
            return loss_of(self.model, batch)
        tokens, targets = batch
        scores = self.model(tokens)
        if self.options.get("sliced"):
            scores, targets = scores[:, 1:], targets[:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        tokens = batch if isinstance(batch, torch.Tensor) else batch[0]
        self.log_dict(
            {"twice": 2 * loss.detach()}, sync_dist=True, batch_size=len(tokens)
        )
        return {"loss": loss, "tokens": tokens.numel()} if batch_idx % 2 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                "interval": "step",
            }
        ]

    def train_dataloader(self) -> Any:
        return self._loader(batches(1, 4).flatten(0, 2), shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(batches(1, 2).flatten(0, 2).flip(0), shuffle=False)

    def _loader(self, data: Any, shuffle: bool) -> Any:
        if self.options.get("pairs"):
            data = TensorDataset(data, data.roll(-1, 1))
        if dist.is_initialized():
            return DataLoader(data, batch_size=self.options["batch_size"])
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
        return DataLoader(data, batch_size=self.options["batch_size"], sampler=sampler)


def knobs_of(stages: int, shard: int = 1, **recipe: Any) -> dict[str, Any]:
    return {
        "shard_degree": shard,
        "pipeline_parallel_degree": stages,
        "pipeline": recipe or "1f1b",
    }
