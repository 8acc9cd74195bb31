"""What people override in a LightningModule, and the callbacks that they write: parts
of random programs (`tests.lightning.programs`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from tests.lightning.running import whole


def configure_gradient_clipping(
    self: Any,
    optimizer: Any,
    gradient_clip_val: Any = None,
    gradient_clip_algorithm: Any = None,
) -> None:
    bound = 0.3 if self.global_step % 2 else gradient_clip_val
    self.clip_gradients(
        optimizer,
        gradient_clip_val=bound,
        gradient_clip_algorithm=gradient_clip_algorithm,
    )


def optimizer_step(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    """A warm-up by hand, as Lightning's page shows it."""
    optimizer.step(closure=optimizer_closure)
    if self.trainer.global_step < 5:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)


def closure_first(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    """Runs the closure itself and leaves every third step out."""
    if batch_idx % 3 == 2:
        optimizer_closure()
    else:
        optimizer.step(closure=optimizer_closure)


def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)


def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
    """Adds decay to the gradients of the matrices."""
    for parameter in self.net.parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad.add_(parameter.detach(), alpha=1e-2)


def on_after_backward(self: Any) -> None:
    self.counts["backwards"] = self.counts.get("backwards", 0) + 1


def backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    (2 * loss).backward(*args, **kwargs)


def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
    self.counts["schedules"] = self.counts.get("schedules", 0) + 1
    if metric is None:
        scheduler.step()
    else:
        scheduler.step(metric)


def transfer_batch_to_device(
    self: Any, batch: Any, device: torch.device, dataloader_idx: int
) -> Any:
    batch = super(type(self), self).transfer_batch_to_device(
        batch, device, dataloader_idx
    )
    return batch * 1.5 if torch.is_tensor(batch) else batch


def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> Any:
    return -1 if self.current_epoch == 1 and batch_idx == 2 else None


def gradient_norm(self: Any, optimizer: Any) -> None:
    """Logs the norm of all gradients, and of one."""
    squares = [
        float(parameter.grad.norm()) ** 2
        for parameter in self.net.parameters()
        if parameter.grad is not None
    ]
    self.log("norm", sum(squares) ** 0.5)


def configure_callbacks(self: Any) -> list[Callback]:
    return [Noting(self, "of the module")]


def on_train_epoch_end(self: Any) -> None:
    self.log("weights", float(whole(self.net.blocks[0].up.weight).square().sum()))


def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["kept"] = {"counts": dict(self.counts), "tensor": torch.arange(3)}


def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    self.counts.update(checkpoint["kept"]["counts"])


def configure_model(self: Any) -> None:
    if not hasattr(self, "net"):
        self.build()


METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "configure_gradient_clipping": {
        "configure_gradient_clipping": configure_gradient_clipping
    },
    "optimizer_step": {"optimizer_step": optimizer_step},
    "optimizer_step, closure first": {"optimizer_step": closure_first},
    "optimizer_zero_grad": {"optimizer_zero_grad": optimizer_zero_grad},
    "on_before_optimizer_step": {"on_before_optimizer_step": on_before_optimizer_step},
    "on_after_backward": {"on_after_backward": on_after_backward},
    "backward": {"backward": backward},
    "lr_scheduler_step": {"lr_scheduler_step": lr_scheduler_step},
    "transfer_batch_to_device": {"transfer_batch_to_device": transfer_batch_to_device},
    "on_train_batch_start": {"on_train_batch_start": on_train_batch_start},
    "gradient norm": {"on_before_optimizer_step": gradient_norm},
    "configure_callbacks": {"configure_callbacks": configure_callbacks},
    "on_train_epoch_end": {"on_train_epoch_end": on_train_epoch_end},
    "state of the module": {
        "on_save_checkpoint": on_save_checkpoint,
        "on_load_checkpoint": on_load_checkpoint,
    },
    "configure_model": {"configure_model": configure_model},
}


class Noting(Callback):
    """Notes which hooks ran, with where the Trainer was."""

    HOOKS = (
        "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
        "on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_batch_start",
        "on_validation_epoch_end", "on_validation_end", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_before_zero_grad", "on_train_end", "on_fit_end", "on_test_end",
        "on_predict_end", "on_save_checkpoint", "on_load_checkpoint",
    )  # fmt: skip

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name


def noting(hook: str) -> Callable[..., None]:
    def note(self: Noting, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.module.seen.append(
            f"{self.name}: {hook} {trainer.current_epoch} {trainer.global_step}"
        )

    return note


for hook in Noting.HOOKS:
    setattr(Noting, hook, noting(hook))


class Thawing(BaseFinetuning):
    """The front of the network is trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=0.01)


class Rate(Callback):
    """Halves the learning rates at a step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5


class Stop(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 7:
            trainer.should_stop = True


class Skip(Callback):
    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> Any:
        return -1 if trainer.current_epoch == 0 and batch_idx == 3 else None


class Reads(Callback):
    """Whole weights, their sums and a state_dict."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.seen.append(("norm", float(module.net.front.weight.norm())))
        total = sum(float(value.sum()) for value in module.net.state_dict().values())
        module.seen.append(("sum", total))


class Writes(Callback):
    """Puts numbers into weights between steps."""

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            module.net.scale.fill_(1.25)
            module.net.blocks[1].down.weight.mul_(0.9)
            if module.other is not None:
                module.other.layers[0].bias.zero_()


class Edits(Callback):
    """Takes the gradients of a part away, scales others."""

    def on_before_optimizer_step(
        self, trainer: Any, module: Any, optimizer: Any
    ) -> None:
        module.net.norm.weight.grad = None
        gradient = module.net.front.weight.grad
        if gradient is not None:
            gradient.mul_(0.5)


class Swaps(Callback):
    """Other weights for the validation, and back."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = {
            name: value.detach().clone()
            for name, value in module.net.named_parameters()
        }
        with torch.no_grad():
            for parameter in module.net.parameters():
                parameter.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for name, value in module.net.named_parameters():
                value.copy_(self.kept[name])


class Saves(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(
                f"{self.folder}/by-hand-{trainer.current_epoch}.ckpt"
            )


class Average(Callback):
    """An average as people write it: a dictionary of copies, put in place for
    validation, in the checkpoint."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.net.named_parameters():
            if name in self.average:
                self.average[name].mul_(0.8).add_(value, alpha=0.2)
            else:
                self.average[name] = value.detach().clone()

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.average:
            self.kept = {
                name: value.detach().clone()
                for name, value in module.net.state_dict().items()
            }
            module.net.load_state_dict({**self.kept, **self.average})

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.average:
            module.net.load_state_dict(self.kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def callbacks_of(
    names: list[str], folder: Path, has_validation: bool
) -> list[Callback]:
    monitor = "val_loss" if has_validation else "train_epoch"
    made: dict[str, Callable[[], Callback]] = {
        "every n steps": lambda: ModelCheckpoint(
            folder, "n-{step}", every_n_train_steps=2, save_top_k=-1
        ),
        "early": lambda: EarlyStopping(
            monitor, patience=1, min_delta=0.01, strict=False
        ),
        "rates": lambda: LearningRateMonitor("step"),
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "swa": lambda: StochasticWeightAveraging(
            0.01, swa_epoch_start=1, annealing_epochs=1
        ),
        "ema": lambda: EMAWeightAveraging(decay=0.7),
        "freeze and thaw": Thawing,
        "learning rate": Rate,
        "stop": Stop,
        "skip an epoch": Skip,
        "reads weights": Reads,
        "writes weights": Writes,
        "edits gradients": Edits,
        "swaps weights": Swaps,
        "saves by hand": lambda: Saves(str(folder)),
        "ema by hand": Average,
    }
    return [made[name]() for name in names]
