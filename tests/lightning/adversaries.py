"""A module with two optimizers that it steps itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lightning.modules import GLOBAL_BATCH, LanguageModule, loader


class Adversaries(LanguageModule):
    """A generator [4] -> [6] and a discriminator [6] -> [1] with an optimizer each.

    options["style"]: how the other one's gradients are kept out of a step.
    """

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW(self.generator.parameters(), lr=0.01)
        return [
            generator,
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        rows = torch.randn(
            self.batches * GLOBAL_BATCH, 10, generator=generator, dtype=torch.float64
        )
        return loader(rows, shuffle=True)

    def generator_loss(self, noise: torch.Tensor) -> torch.Tensor:
        said = self.discriminator(self.generator(noise))
        return F.binary_cross_entropy_with_logits(said, torch.ones_like(said))

    def discriminator_loss(
        self, noise: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        said = self.discriminator(real)
        made = self.discriminator(self.generator(noise).detach())
        return F.binary_cross_entropy_with_logits(
            said, torch.ones_like(said)
        ) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))

    def evaluation_step(self, batch: torch.Tensor, name: str) -> torch.Tensor:
        loss = self.generator_loss(torch.zeros(len(batch), 4, dtype=torch.float64))
        self.log(name, loss, sync_dist=True)
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        noise, real = batch[:, :4], batch[:, 4:]
        optimizers = self.optimizers()
        losses = (
            lambda: self.generator_loss(noise),
            lambda: self.discriminator_loss(noise, real),
        )
        for optimizer, loss_function in zip(optimizers, losses, strict=True):  # type: ignore[arg-type]
            getattr(self, self.options["style"])(optimizer, loss_function)

    def note(self, loss: torch.Tensor) -> torch.Tensor:
        self.losses.append(loss.detach())
        return loss

    def toggled(self, optimizer: Any, loss_function: Any) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.note(loss_function()))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def cleared(self, optimizer: Any, loss_function: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.note(loss_function()))
        optimizer.step()

    def leaking(self, optimizer: Any, loss_function: Any) -> None:
        """The discriminator's step sees what the generator's backward left, in one
        process as on ranks."""
        self.manual_backward(self.note(loss_function()))
        optimizer.step()
        optimizer.zero_grad()

    def in_closure(self, optimizer: Any, loss_function: Any) -> None:
        def closure() -> torch.Tensor:
            loss = self.note(loss_function())
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model():
            optimizer.step(closure=closure)
