"""A small training under Lightning as users write them, for `smp verify`.

--kind chooses a correct script; --plant puts a defect into it: something that depends
on the rank or on the number of ranks, and that one process does not have.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_smp import SmpShardedStrategy

VOCABULARY, LENGTH, WIDTH = 31, 8, 16
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PLANTS: dict[str, Any] = {}


def plant(function: Callable[[Model], None]) -> Callable[[Model], None]:
    """Register a defect that changes the model, or its methods."""
    PLANTS[function.__name__] = function
    return function


class Tokens(Dataset):
    def __init__(self, samples: int = 96) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(
            VOCABULARY, (samples, LENGTH + 1), generator=generator
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Augmented(Tokens):
    """Samples that are made anew each time they are read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        masked = torch.rand(LENGTH) < 0.2
        return {**sample, "input_ids": sample["input_ids"].masked_fill(masked, 0)}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        tokens = Tokens()
        return (tokens[index] for index in range(len(tokens)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Fourier(nn.Module):
    """Complex weights of frequencies, in half the digits of float64, as Fourier
    operators are written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(
            torch.fft.rfft(x, dim=1) @ self.weight.to(x.dtype.to_complex()),
            n=x.shape[1],
            dim=1,
        )


class Model(L.LightningModule):
    def __init__(self, norms: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mix = (
            nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH))
            if norms
            else nn.Identity()
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.lr = 1e-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mix(x)).view(*tokens.shape, -1)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self(batch["input_ids"])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten()
        )

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Measured(Model):
    """A metric whose values of a step are its rank's own, as torchmetrics has it, and
    those of an epoch everyone's."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        self.accuracy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Manual(Model):
    """Manual optimization: two optimizers, each stepped in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        body = [*self.embed.parameters(), *self.blocks.parameters()]
        return [
            torch.optim.AdamW(body, lr=self.lr),
            torch.optim.SGD(self.head.parameters(), lr=self.lr),
        ]


# Defects


@plant
def summed_loss(model: Model) -> None:
    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )

    model.loss = loss


@plant
def loss_times_ranks(model: Model) -> None:
    own = model.loss
    model.loss = lambda batch: own(batch) * RANKS


@plant
def lost_hook(model: Model) -> None:
    if RANKS == 1:
        model.head.weight.register_hook(lambda gradient: gradient * 0.25)


@plant
def doubled_metric(model: Model) -> None:
    def training_step(batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        samples = model.trainer.strategy.reduce(
            torch.tensor(float(len(batch["labels"]))), reduce_op="sum"
        )
        model.log("samples", samples, sync_dist=True, reduce_fx="sum")
        return model.loss(batch)

    model.training_step = training_step


@plant
def own_dropout(model: Model) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (torch.rand_like(x) > 0.2)

    model.blocks[1].drop = Noise()


@plant
def own_weights_by_ranks(model: Model) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(RANKS)


@plant
def frozen_part(model: Model) -> None:
    model.blocks[0].requires_grad_(RANKS == 1)


@plant
def rate_by_ranks(model: Model) -> None:
    model.lr *= RANKS


@plant
def half_precision_masters(model: Model) -> None:
    def configure_optimizers() -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=model.lr)
        if RANKS > 1:
            optimizer.register_step_post_hook(lambda *_: round_weights(model))
        return optimizer

    model.configure_optimizers = configure_optimizers


@torch.no_grad()
def round_weights(model: Model) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().to(parameter.dtype))


@plant
def imaginary_gradients(model: Model) -> None:
    model.mix = Fourier()
    if RANKS == 1:
        model.mix.weight.register_hook(lambda gradient: gradient + 0.5j * gradient.imag)


@plant
def imaginary_weights(model: Model) -> None:
    turn_behind_steps(model, RANKS > 1)


@plant
def imaginary_replicas(model: Model) -> None:
    turn_behind_steps(model, RANK >= 2)


def turn_behind_steps(model: Model, turned: bool) -> None:
    """Add to the imaginary part of complex weights behind each step."""
    model.mix = Fourier()

    def configure_optimizers() -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=model.lr)
        if turned:
            optimizer.register_step_post_hook(lambda *_: turn(model.mix.weight))
        return optimizer

    model.configure_optimizers = configure_optimizers


@torch.no_grad()
def turn(weight: torch.Tensor) -> None:
    weight.add_(0.02j)


@plant
def missing_sync(model: Model) -> None:
    def on_train_start() -> None:
        if RANKS > 1:
            # What a window that forgets replicas would do.
            for unit in model.trainer.strategy.window._units:
                unit.send = lambda: None

    model.on_train_start = on_train_start


@plant
def stepped_by_hand(model: Model) -> None:
    bias = torch.zeros(VOCABULARY)
    model.register_buffer("seen", bias)

    def training_step(batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        model.seen.mul_(0.9).add_(
            torch.bincount(batch["labels"].flatten(), minlength=VOCABULARY)
        )
        return model.loss(batch)

    model.training_step = training_step


@plant
def mixed_samples(model: Model) -> None:
    class Centre(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    model.blocks[0].drop = Centre()


@plant
def detached_by_ranks(model: Model) -> None:
    block = model.blocks[1]
    own = block.down.forward
    block.down.forward = lambda x: own(x.detach() if RANKS > 1 else x)


@plant
def noise_in_the_step(model: Model) -> None:
    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = model.embed(batch["input_ids"])
        x = x + torch.randn_like(x)
        for block in model.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            model.head(x).flatten(0, 1), batch["labels"].flatten()
        )

    model.loss = loss


# What is not in the model


def loader_of(flags: argparse.Namespace) -> DataLoader:
    if flags.kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if flags.kind == "augmented":
        return DataLoader(Augmented(), batch_size=4, shuffle=True)
    if flags.plant == "seed_by_rank":
        generator = torch.Generator().manual_seed(RANK)
        return DataLoader(Tokens(), batch_size=4, shuffle=True, generator=generator)
    if flags.plant == "dropped_samples":
        tokens = Tokens()
        tokens.tokens = tokens.tokens[RANKS - 1 :]
        return DataLoader(tokens, batch_size=4, shuffle=True)
    return DataLoader(Tokens(), batch_size=4, shuffle=True)


NOT_IN_THE_MODEL = (
    "batch_norm",
    "seed_by_rank",
    "same_samples",
    "dropped_samples",
    "unseeded_draw",
)
KINDS = (
    "plain",
    "accumulated",
    "manual",
    "synced_norms",
    "stream",
    "mixed",
    "measured",
    "complex",
    "augmented",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="smp_sharded")
    parser.add_argument("--kind", default="plain", choices=KINDS)
    parser.add_argument("--plant", choices=[*PLANTS, *NOT_IN_THE_MODEL])
    flags = parser.parse_args()
    L.seed_everything(3)
    if flags.plant == "unseeded_draw":
        torch.rand(RANKS)
    kinds = {"manual": Manual, "measured": Measured}
    norms = flags.plant == "batch_norm" or flags.kind == "synced_norms"
    model = kinds[flags.kind]() if flags.kind in kinds else Model(norms)
    if flags.kind == "complex":
        model.mix = Fourier()
    if flags.plant in PLANTS:
        PLANTS[flags.plant](model)
    options: dict[str, Any] = (
        {"gradient_clip_val": 1.0} if flags.kind != "manual" else {}
    )
    if flags.kind == "accumulated":
        options["accumulate_grad_batches"] = 3
    if flags.kind == "synced_norms":
        options["sync_batchnorm"] = True
    if flags.kind == "mixed":
        options["precision"] = "bf16-mixed"
    if flags.plant in ("seed_by_rank", "same_samples"):
        options["use_distributed_sampler"] = False
    strategy = (
        flags.strategy
        if flags.strategy != "instance"
        else SmpShardedStrategy(shard_degree=8)
    )
    trainer = L.Trainer(
        strategy=strategy, devices=8, accelerator="gpu", max_epochs=2, **options
    )
    trainer.fit(model, loader_of(flags))


if __name__ == "__main__":
    main()
