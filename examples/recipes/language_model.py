"""LanguageModel: the LightningModule of the recipes that train one. Nothing in here
knows about sharding."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from recipe import Run
from transformers import AutoModelForCausalLM

from lightning_smp import SmpMonitor, SmpShardedStrategy


class LanguageModel(L.LightningModule):
    """A causal language model of Transformers with random weights."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_of = run
        self.losses: list[float] = []
        self.model: Any = None

    def configure_model(self) -> None:
        # Here and not in __init__: with delayed_init no rank ever holds the whole
        # model.
        if self.model is None:
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(self.run_of.config)

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), self.run_of.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, self.run_of.learning_rate
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def train(
    run: Run, module: L.LightningModule, data: Any = None, **arguments: Any
) -> list[float]:
    """Train on all ranks, save where it was asked for, and return the mean loss of each
    optimizer step.

    Args:
        module: appends the loss of each batch, the mean over all ranks, to its
            ``losses``.
        data: samples; None: the text.
        arguments: of the Trainer, beside :meth:`Run.trainer_arguments`.
    """
    strategy = SmpShardedStrategy(**run.knobs)
    monitor = SmpMonitor(every_n_steps=max(1, run.steps // 4))
    callbacks = [monitor, *arguments.pop("callbacks", ())]
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=callbacks,
        **{**run.trainer_arguments(), **arguments},
    )
    trainer.fit(module, run.loader(data))
    if run.flags.out is not None:
        trainer.save_checkpoint(run.flags.out / "checkpoint")
    by_step = (
        torch.tensor(module.losses, dtype=torch.float64)
        .view(-1, run.accumulate)
        .mean(1)
        .tolist()
    )
    run.say(
        f"loss {by_step[0]:.4f} -> {by_step[-1]:.4f} in {len(by_step)} steps of {run.size.global_batch} samples"
    )
    run.say(f"{monitor.latest['samples_per_second']:.3f} samples/s at the end")
    return by_step
