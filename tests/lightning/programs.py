"""Random programs of Lightning: modules, data, callbacks and flags of the Trainer drawn
from seeds, each run on ranks and in one process.

`draw` makes a program of a seed, a dict of plain values; `run` plays it and returns
what a user sees of it: losses, rows of the logger, the order of hooks, learning rates,
checkpoints by name with their scores, weights, predictions. The ranks' batches together
are those of one process (see `tests.lightning.modules`).
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.blocks import WIDTH, Block, rows
from tests.lightning.program_parts import METHODS, Noting, callbacks_of
from tests.lightning.running import QUIET, strategy, whole_weights

BATCH = 4  # samples over all ranks
Program = dict[str, Any]

OPTIMIZERS = ("SGD", "AdamW", "Adam", "RMSprop", "NAdam", "Adagrad", "groups")
SCHEDULES = (
    "none",
    "step",
    "epoch",
    "every second step",
    "plateau",
    "one cycle",
    "of the module",
    "cosine restarts",
)
OPTIMIZATIONS = (
    "automatic",
    "automatic",
    "automatic",
    "by hand",
    "two by hand",
    "in windows by hand",
)
LOADERS = (
    "one",
    "one",
    "one",
    "dict, shortest",
    "dict, longest",
    "list, sequential",
    "list, all",
)
OVERRIDES = (
    "configure_gradient_clipping", "optimizer_step", "optimizer_step, closure first", "optimizer_zero_grad",
    "on_before_optimizer_step", "on_after_backward", "backward", "lr_scheduler_step",
    "transfer_batch_to_device", "on_train_batch_start", "gradient norm", "configure_callbacks",
    "on_train_epoch_end", "state of the module", "configure_model", "metric objects", "hyperparameters",
)  # fmt: skip
CALLBACKS = (
    "every n steps", "early", "rates", "accumulation", "swa", "ema", "freeze and thaw", "learning rate",
    "stop", "skip an epoch", "reads weights", "writes weights", "edits gradients", "swaps weights", "saves by hand",
    "ema by hand",
)  # fmt: skip
KNOBS: dict[str, tuple[Any, ...]] = {
    "shard_degree": (1, "node", "world"),
    "keep_between_micro_batches": (None, None, "gradients", "parameters"),
    "optimizer_shard": (None, None, "world"),
    "activations": (None, None, "full"),
    "reshard_after_forward": (True, False),
}


def draw(seed: int) -> Program:
    rng = random.Random(seed)

    def some(values: tuple[str, ...], most: int) -> list[str]:
        return rng.sample(values, rng.randint(0, most))

    optimization = rng.choice(OPTIMIZATIONS)
    is_automatic = optimization == "automatic"
    validation = rng.choice(
        ("epoch", "epoch", "second epoch", "two batches", "half an epoch", "none")
    )
    flags: dict[str, Any] = {
        "max_epochs": rng.randint(1, 4),
        "num_sanity_val_steps": rng.choice((0, 0, 2)),
        "log_every_n_steps": rng.choice((1, 2, 3)),
        "detect_anomaly": rng.random() < 0.1,
        "inference_mode": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        flags["max_steps"] = rng.randint(1, 9)
    if rng.random() < 0.2:
        flags["limit_train_batches"] = rng.choice((2, 0.5, 3))
    if rng.random() < 0.2:
        flags["limit_val_batches"] = rng.choice((1, 0.5))
    if rng.random() < 0.15:
        flags["reload_dataloaders_every_n_epochs"] = rng.choice((1, 2))
    if is_automatic:
        flags["accumulate_grad_batches"] = rng.choice((1, 1, 2, 3))
        if rng.random() < 0.4:
            flags["gradient_clip_val"] = rng.choice((0.05, 0.5))
            flags["gradient_clip_algorithm"] = rng.choice(("norm", "value"))
    if validation == "second epoch":
        flags["check_val_every_n_epoch"] = 2
    elif validation in ("two batches", "half an epoch"):
        flags["val_check_interval"] = 2 if validation == "two batches" else 0.5
    drawn = {name: rng.choice(values) for name, values in KNOBS.items()}
    knobs = {name: value for name, value in drawn.items() if value is not None}
    optimizer = rng.choice(OPTIMIZERS)
    if knobs.get("keep_between_micro_batches") == "parameters":
        del knobs["reshard_after_forward"]
    overrides, callbacks = some(OVERRIDES, 5), some(CALLBACKS, 4)
    schedule = rng.choice(SCHEDULES)
    # What Lightning refuses, or cannot do, in one process.
    if not is_automatic or "swa" in callbacks:
        callbacks = [
            name
            for name in callbacks
            if name not in ("accumulation", "freeze and thaw")
        ]
    if optimization == "two by hand":
        callbacks = [name for name in callbacks if name != "swa"]
    if "accumulation" in callbacks:
        flags.pop("accumulate_grad_batches", None)
    if "configure_gradient_clipping" in overrides:
        flags.pop("gradient_clip_val", None)
    if optimizer in ("Adagrad", "RMSprop") and schedule == "one cycle":
        schedule = "epoch"
    if "swa" in callbacks:  # copies the module before it is configured
        overrides = [name for name in overrides if name != "configure_model"]
    if {"on_before_optimizer_step", "edits gradients", "gradient norm"} & {
        *overrides,
        *callbacks,
    }:
        # Parameters have no gradients there, as is said.
        knobs.pop("optimizer_shard", None)
    if "freeze and thaw" in callbacks:
        schedule = "none"
        overrides = [name for name in overrides if name != "configure_model"]
    after = some(
        ("validate", "validate best", "test", "predict", "fit again", "resume"), 3
    )
    ends_early = (
        {"stop", "skip an epoch"} & {*callbacks}
        or "max_steps" in flags
        or "on_train_batch_start" in overrides
    )
    if ends_early and "resume" in after:
        # Lightning, in one process, begins the epoch's data anew.
        after.remove("resume")
    return {
        "seed": seed,
        "optimization": optimization,
        "optimizer": optimizer,
        "schedule": schedule,
        "train": BATCH * rng.randint(3, 6) + rng.choice((0, 0, 2)),
        "val": rng.randint(5, 12),
        "loaders": rng.choice(LOADERS),
        "val_loaders": rng.choice((0 if validation == "none" else 1, 1, 2))
        if validation != "none"
        else 0,
        "overrides": overrides,
        "callbacks": callbacks,
        "output": rng.choice(("tensor", "dict")),
        "flags": flags,
        "knobs": knobs,
        "after": after,
    }


def is_alone() -> bool:
    return not dist.is_initialized()


def world() -> int:
    return 1 if is_alone() else dist.get_world_size()


class Net(nn.Module):
    """[samples, tokens, WIDTH] -> the same; a part that is tied and one that is
    normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.front.weight  # tied
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.back(self.norm(x)) * self.scale


class Other(nn.Module):
    """The second network, which tells the first one's outputs from data."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(-1)


class Drawn(LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.overrides = program, set(program["overrides"])
        self.automatic_optimization = program["optimization"] == "automatic"
        self.losses: list[torch.Tensor] = []
        self.seen: list[Any] = []
        self.counts: dict[str, int] = {"steps": 0, "closures": 0}
        if "configure_model" not in self.overrides:
            self.build()
        if "hyperparameters" in self.overrides:
            self.save_hyperparameters(
                {"width": WIDTH, "seed": program["seed"]}, logger=False
            )
        if "metric objects" in self.overrides:
            self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
            self.largest = torchmetrics.MaxMetric().set_dtype(torch.float64)

    def build(self) -> None:
        torch.manual_seed(self.program["seed"])
        self.net, self.other = self.build_networks()
        generator = torch.Generator().manual_seed(self.program["seed"])
        # The same in whichever precision it is built.
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )

    def build_networks(self) -> tuple[nn.Module, nn.Module | None]:
        return Net(), Other()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(x), x.flip(-1) * 0.5)

    @staticmethod
    def rows_of(batch: Any) -> torch.Tensor:
        """The rows of a batch of any loader."""
        if isinstance(batch, Mapping):
            return torch.cat(
                [Drawn.rows_of(part) for part in batch.values() if part is not None]
            )
        if isinstance(batch, (list, tuple)):
            return torch.cat(
                [Drawn.rows_of(part) for part in batch if part is not None]
            )
        return batch

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = self.rows_of(batch)
        if self.program["optimization"] != "automatic":
            return self.step_by_hand(x, batch_idx)
        loss = self.loss(x) + 0.1 * F.softplus(self.other(self.net(x))).mean()
        self.noted(loss)
        self.log(
            "train",
            loss,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(x),
            prog_bar=True,
        )
        if self.program["output"] == "dict":
            return {"loss": loss, "predicted": x.detach().sum()}
        return loss

    def noted(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def step_by_hand(self, x: torch.Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        kind = self.program["optimization"]
        if kind == "two by hand":
            first, second = optimizers
            self.toggle_optimizer(first)
            made = self.net(x)
            loss = (
                F.mse_loss(made, x.flip(-1) * 0.5)
                + 0.1 * F.softplus(-self.other(made)).mean()
            )
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(
                first, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
            )
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            told = (
                F.softplus(-self.other(x)).mean()
                + F.softplus(self.other(self.net(x).detach())).mean()
            )
            second.zero_grad()
            self.manual_backward(told)
            if batch_idx % 2 == 0:
                second.step()
            self.untoggle_optimizer(second)
            self.noted(told)
            self.log("told", told, sync_dist=True, batch_size=len(x))
        else:
            loss = self.loss(x) + 0.1 * F.softplus(self.other(self.net(x))).mean()
            length = 2 if kind == "in windows by hand" else 1
            self.manual_backward(loss / length)
            if (batch_idx + 1) % length == 0:
                optimizers.step()
                optimizers.zero_grad()
        self.step_schedules()
        self.noted(loss)
        self.log(
            "train",
            loss,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(x),
        )

    def step_schedules(self) -> None:
        """As manual optimization has to."""
        schedulers: Any = self.lr_schedulers()
        for scheduler in (
            schedulers
            if isinstance(schedulers, list)
            else [schedulers]
            if schedulers
            else []
        ):
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()

    def evaluate(self, batch: Any, name: str) -> None:
        x = self.rows_of(batch)
        made = self.net(x)
        error = (made - x.flip(-1) * 0.5).square().mean((1, 2))
        self.log(f"{name}_loss", error.mean(), sync_dist=True, batch_size=len(x))
        self.log(
            f"{name}_largest",
            error.max(),
            sync_dist=True,
            reduce_fx="max",
            batch_size=len(x),
        )
        self.log(
            f"{name}_count",
            float(len(x)),
            sync_dist=True,
            reduce_fx="sum",
            batch_size=len(x),
        )
        if "metric objects" in self.overrides:
            self.error.update(made, x)
            self.largest.update(error)
            self.log(f"{name}_error", self.error)
            self.log(f"{name}_metric", self.largest)

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, "test")

    def predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor:
        return self.net(self.rows_of(batch)).mean((1, 2))

    # Optimizers

    def optimizer_of(self, parameters: Any, lr: float = 0.02) -> torch.optim.Optimizer:
        kind = self.program["optimizer"]
        if kind == "SGD":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)
        if kind == "groups":
            trained = list(parameters)
            groups = [
                {"params": trained[:3], "weight_decay": 0.1},
                {"params": trained[3:], "lr": lr / 2},
            ]
            return torch.optim.AdamW(groups, lr=lr, eps=1e-3)
        more = {} if kind == "Adagrad" else {"eps": 1e-3}
        return getattr(torch.optim, kind)(parameters, lr=lr, **more)

    def schedule_of(self, optimizer: torch.optim.Optimizer) -> Any:
        kind, schedules = self.program["schedule"], torch.optim.lr_scheduler
        if kind == "none":
            return None
        if kind == "plateau":
            monitor = "val_loss" if self.program["val_loaders"] == 1 else "train_epoch"
            scheduler: Any = schedules.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.05
            )
            return {
                "scheduler": scheduler,
                "monitor": monitor,
                "interval": "epoch",
                "strict": False,
            }
        if kind == "one cycle":
            scheduler = schedules.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
        elif kind == "of the module":
            scheduler = schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        elif kind == "cosine restarts":
            scheduler = schedules.CosineAnnealingWarmRestarts(optimizer, T_0=3)
        else:
            scheduler = schedules.StepLR(optimizer, step_size=1, gamma=0.8)
        frequency = 2 if kind == "every second step" else 1
        return {
            "scheduler": scheduler,
            "interval": "epoch" if kind == "epoch" else "step",
            "frequency": frequency,
        }

    def configure_optimizers(self) -> Any:
        if self.program["optimization"] == "two by hand":
            optimizers = [
                self.optimizer_of(self.net.parameters()),
                self.optimizer_of(self.other.parameters()),
            ]
            schedulers = [
                scheduler
                for each in optimizers
                if (scheduler := self.schedule_of(each))
            ]
            return optimizers, schedulers
        if "freeze and thaw" in self.program["callbacks"]:
            trained = [each for each in self.parameters() if each.requires_grad]
            optimizer = self.optimizer_of(trained)
        else:
            optimizer = self.optimizer_of(self.parameters())
        scheduler = self.schedule_of(optimizer)
        return (
            {"optimizer": optimizer, "lr_scheduler": scheduler}
            if scheduler
            else optimizer
        )

    # Data

    def loader(self, samples: int, seed: int, is_training: bool = False) -> DataLoader:
        """In training Lightning's sampler shuffles on ranks, whatever the loader
        says."""
        data = rows(samples, seed)
        if not is_alone():
            return DataLoader(data, batch_size=BATCH // world())
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=is_training)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)

    def train_dataloader(self) -> Any:
        program = self.program
        samples, kind = program["train"] // world() * world(), program["loaders"]
        first = self.loader(samples, 1, is_training=True)
        if kind == "one":
            return first
        second = self.loader(BATCH * 4, 2, is_training=True)
        if kind.startswith("dict"):
            mode = "min_size" if kind == "dict, shortest" else "max_size_cycle"
            return CombinedLoader({"a": first, "b": second}, mode)
        return CombinedLoader(
            [first, second], "max_size" if kind == "list, all" else "max_size_cycle"
        )

    def val_dataloader(self) -> Any:
        loaders = [
            self.loader(self.program["val"] + 3 * number, 5 + number)
            for number in range(2)
        ]
        return loaders[: self.program["val_loaders"]]

    def test_dataloader(self) -> Any:
        return self.loader(7, 8)

    def predict_dataloader(self) -> Any:
        return self.loader(8, 9)


def module_of(program: Program) -> LightningModule:
    """A module of a class that has just the methods that were drawn."""
    methods: dict[str, Any] = {}
    for name in program["overrides"]:
        methods.update(METHODS.get(name, {}))
    kind = type("Program", (Drawn,), methods)
    return kind(program)


def trainer_of(
    program: Program,
    module: LightningModule,
    folder: Path,
    knobs: dict[str, Any],
    **more: Any,
) -> Trainer:
    has_validation = bool(program["val_loaders"])
    monitor = "val_loss" if program["val_loaders"] == 1 else None
    saver = ModelCheckpoint(
        folder,
        "{epoch}-{step}",
        monitor=monitor,
        save_top_k=2 if monitor else 1,
        save_last=True,
    )
    callbacks = [
        Noting(module, "c"),
        *callbacks_of(program["callbacks"], folder, has_validation),
        saver,
    ]
    log = CSVLogger(folder, "log", "v")
    flags = {
        **QUIET,
        "enable_checkpointing": True,
        "logger": log,
        **program["flags"],
        **more,
    }
    if not is_alone():
        flags |= {"strategy": strategy(**knobs), "devices": world()}
    return Trainer(callbacks=callbacks, precision="64-true", **flags)


def gathered(trainer: Trainer, batches: Any) -> torch.Tensor:
    """The predictions of all ranks that read different samples, by value."""
    found = torch.cat(batches)
    if not is_alone():
        strategy: Any = trainer.strategy
        of_ranks: list[Any] = [None] * world()
        dist.all_gather_object(of_ranks, (strategy.data_rank, found))
        found = torch.cat(list(dict(of_ranks).values()))
    return found.flatten().sort().values


def weights_of(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """Whole, of all stages."""
    parallel = getattr(trainer.strategy, "_parallel", None)
    if parallel is None or parallel.pipeline is None:
        return whole_weights(module)
    # Imports Transformers, which takes seconds.
    from tests.core.pipeline.cases import of_all_stages

    weights = of_all_stages(parallel, dict(module.named_parameters()))
    weights.setdefault("net.back.weight", weights["net.front.weight"])  # tied
    parallel.broadcast_buffers()
    saved = module.state_dict().keys()
    buffers = {
        name: buffer.clone() for name, buffer in module.named_buffers() if name in saved
    }
    return {**weights, **buffers}


def table(trainer: Trainer) -> list[dict[str, str]]:
    """Rows of the log so far."""
    trainer.logger.save()
    path = Path(trainer.logger.log_dir) / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def run(
    program: Program,
    folder: str,
    again: dict[str, Any] | None = None,
    make: Callable[[Program], LightningModule] = module_of,
) -> dict[str, Any]:
    """Play a program; ``again``: other knobs for what resumes; ``make``: its module.
    Collective on ranks."""
    place = Path(folder)
    module: Any = make(program)
    trainer = trainer_of(program, module, place, program["knobs"])
    trainer.fit(module)
    seen: dict[str, Any] = {"log": [], "metrics": {}}

    def note(name: str) -> None:
        seen["metrics"][name] = {
            key: float(value) for key, value in trainer.callback_metrics.items()
        }
        seen[f"weights {name}"] = weights_of(trainer, module)
        rates = [
            [group["lr"] for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        seen[f"rates {name}"] = [float(rate) for rates_of in rates for rate in rates_of]
        seen[f"place {name}"] = [trainer.current_epoch, trainer.global_step]

    note("fit")
    saver: Any = trainer.checkpoint_callback
    seen["names"] = [Path(saver.best_model_path).name, Path(saver.last_model_path).name]
    seen["scores"] = {
        Path(path).name: float(score) for path, score in saver.best_k_models.items()
    }
    for name in program["after"]:
        if name == "validate" and program["val_loaders"]:
            seen[name] = trainer.validate(module, verbose=False)
        elif (
            name == "validate best"
            and program["val_loaders"] == 1
            and saver.best_model_path
        ):
            seen[name] = trainer.validate(module, ckpt_path="best", verbose=False)
            note(name)
        elif name == "test":
            seen[name] = trainer.test(module, verbose=False)
        elif name == "predict":
            seen[name] = gathered(trainer, trainer.predict(module))
        elif name == "fit again":
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2
            trainer.fit_loop.epoch_loop.max_steps = -1
            trainer.should_stop = False
            trainer.fit(module)
            note(name)
        elif name == "resume":
            trainer.save_checkpoint(place / "resume.ckpt")
            losses, hooks = module.losses, module.seen
            module = make(program)
            module.losses, module.seen = losses, hooks
            epochs = trainer.current_epoch + 2
            trainer = trainer_of(
                program,
                module,
                place,
                again or program["knobs"],
                max_epochs=epochs,
                max_steps=-1,
            )
            trainer.fit(
                module, ckpt_path=str(place / "resume.ckpt"), weights_only=False
            )
            note(name)
    seen["files"] = sorted(
        path.name for path in place.iterdir() if path.name.endswith(".ckpt")
    )
    seen["log"] = table(trainer) if trainer.is_global_zero else []
    losses = torch.stack(module.losses) if module.losses else torch.zeros(0)
    if not is_alone():
        dist.all_reduce(losses)
        losses /= world()
    return {
        "losses": losses.tolist(),
        "seen": module.seen,
        "counts": dict(module.counts),
        **seen,
    }
