"""LightningModules and data of the tests in this folder.

The ranks' batches together are what one process sees in one batch:
`DistributedSampler`, which Lightning puts into every loader on ranks and shuffles in
training, deals out one permutation, to rank r of W the places r, r + W, ...
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.core.models import LENGTH, VOCABULARY, WIDTH, TroubledModel, loss_of

GLOBAL_BATCH = 8


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def token_rows(batches: int, seed: int = 7) -> torch.Tensor:
    """Tokens [batches * GLOBAL_BATCH, LENGTH + 1], equal wherever it is called."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        VOCABULARY, (batches * GLOBAL_BATCH, LENGTH + 1), generator=generator
    )


def loader(
    *tensors: torch.Tensor, shuffle: bool = False, kind: type[DataLoader] = DataLoader
) -> DataLoader:
    """Batches of GLOBAL_BATCH samples over all ranks. ``shuffle``: as Lightning's
    sampler does on ranks."""
    data: Any = TensorDataset(*tensors) if len(tensors) > 1 else tensors[0]
    if dist.is_initialized():
        return kind(data, batch_size=GLOBAL_BATCH // dist.get_world_size())
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
    return kind(data, batch_size=GLOBAL_BATCH, sampler=sampler)


class LanguageModule(LightningModule):
    """TroubledModel (tied, frozen, unused, uneven and 0-d parameters) with AdamW; other
    initial weights on each rank.

    Args:
        batches: training batches per epoch.
        val_batches: validation batches.
        lr: learning rate.
        options: read by subclasses.
    """

    def __init__(
        self, batches: int = 4, val_batches: int = 2, lr: float = 1e-2, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(rank())
        self.batches, self.val_batches, self.lr, self.options = (
            batches,
            val_batches,
            lr,
            options,
        )
        self.losses: list[torch.Tensor] = []
        self.build()

    def build(self) -> None:
        self.model = TroubledModel()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, tokens)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def evaluation_step(self, batch: Any, name: str) -> torch.Tensor:
        loss = self.loss(batch)
        self.log(name, loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.evaluation_step(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.evaluation_step(batch, "test_loss")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)

    def train_dataloader(self) -> Any:
        return loader(token_rows(self.batches), shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(token_rows(self.val_batches, seed=8))

    def test_dataloader(self) -> Any:
        return loader(token_rows(self.val_batches, seed=9))

    def predict_dataloader(self) -> Any:
        return loader(token_rows(self.val_batches, seed=10))


class PlainModel(nn.Module):
    """Embedding, two blocks and a head, all of modules that can initialise
    themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 11),
                nn.Tanh(),
                nn.Linear(11, WIDTH),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class LateModule(LanguageModule):
    """Built in `configure_model`.

    options["weights"]: what it starts from. options["once"]: not built again when it is
    there, as Lightning asks; on one device a second build would lose what was trained.
    """

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if self.options.get("once") and hasattr(self, "model"):
            return
        torch.manual_seed(rank())
        self.model = PlainModel()
        if "weights" in self.options:
            self.load_state_dict(self.options["weights"])


class PictureModule(LanguageModule):
    """A convolutional network with BatchNorm on pictures [3, 6, 6] of 4 classes."""

    def build(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Sequential(nn.Conv2d(5, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(24, 4),
        )

    def loss(self, batch: Any) -> torch.Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.model(pictures), labels)

    def configure_optimizers(self) -> Any:
        """BatchNorm takes a scale out of the weights before it, whose gradient along it
        is noise: AdamW would amplify that."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        return loader(*pictures(self.batches), shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(*pictures(self.val_batches, seed=8))


def pictures(batches: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures float64 [batches * GLOBAL_BATCH, 3, 6, 6], of other mean and spread from
    one to the next, and labels."""
    generator = torch.Generator().manual_seed(seed)
    count = batches * GLOBAL_BATCH
    spread, mean = torch.rand(
        2, count, 1, 1, 1, generator=generator, dtype=torch.float64
    )
    noise = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    return noise * (0.5 + spread) + mean, torch.randint(
        4, (count,), generator=generator
    )


class ScheduledModule(LanguageModule):
    """LanguageModule whose learning rate changes with every step; hyper-parameters say
    how to build it."""

    def build(self) -> None:
        super().build()
        self.save_hyperparameters({"batches": self.batches, "lr": self.lr})

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=20
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
