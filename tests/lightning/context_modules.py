"""Modules whose sequences several ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, GLOBAL_BATCH, WIDTH = 37, 22, 4, 16


def rows(batches: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows with other numbers of targets; every second one is two documents."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(batches * GLOBAL_BATCH):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels, position_ids = tokens.clone(), torch.arange(LENGTH)
        labels[: row % 5] = -100
        if row % 2:
            start = 3 + row % 7
            labels[start], position_ids[start:] = -100, torch.arange(LENGTH - start)
        found.append(
            {"input_ids": tokens, "labels": labels, "position_ids": position_ids}
        )
    return found


class HfModule(LightningModule):
    """A Transformers model as it is written without context parallelism, but for where
    the targets are."""

    def __init__(self, context: int = 1, batches: int = 8, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.context, self.batches, self.options = context, batches, options
        self.losses: list[torch.Tensor] = []
        self.model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                use_cache=False,
            )
        )
        self.accuracy = torchmetrics.Accuracy(
            "multiclass", num_classes=VOCABULARY, ignore_index=-100
        )

    def loader(self, batches: int, seed: int, shuffle: bool = False) -> DataLoader:
        """``shuffle``: as Lightning's sampler does on ranks."""
        data: Any = rows(batches, seed)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        sampler = (
            DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
            if ranks == 1
            else None
        )
        return DataLoader(
            data, batch_size=GLOBAL_BATCH * self.context // ranks, sampler=sampler
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.model(**batch)
        targets = batch.get("shift_labels")
        if targets is None:
            targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        self.accuracy(out.logits.flatten(0, 1), targets.flatten())
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", out.loss, sync_dist=True)
        return out.loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {
            "logits": self.model(
                **{k: v for k, v in batch.items() if "labels" not in k}
            ).logits
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return self.loader(self.batches, 1, shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(2, 2)

    def predict_dataloader(self) -> Any:
        return self.loader(2, 3)
