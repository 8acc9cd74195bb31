"""Code that looks an optimizer's parameters up among the module's, and callbacks that
keep tensors by parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch.distributed.tensor import DTensor

from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    report,
    together,
    whole,
)

EXACT: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}


class Plain(LanguageModule):
    def build(self) -> None:
        torch.manual_seed(0)
        self.model = PlainModel()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.1)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(
        self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer)


class ByName(Callback):
    """Halves the second moment of one parameter, found by its name, and notes names by
    group."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        (optimizer,) = trainer.optimizers
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.names.append(names[parameter])
                if names[parameter] == "model.head.weight":
                    optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)


def finetuned(knobs: dict[str, Any], unfreezes: bool) -> Run:
    module, by_name = Plain(batches=2), ByName()
    callbacks = [Unfreeze(), by_name] if unfreezes else [by_name]
    trainer = make_trainer(knobs, max_epochs=3, callbacks=callbacks, **EXACT)
    trainer.fit(module)
    return report(trainer, module, names=by_name.names)


def finetuned_over(layouts: list[tuple[dict[str, Any], bool]]) -> list[Run]:
    return [finetuned(*layout) for layout in layouts]


def test_parameters_of_an_optimizer_are_found_among_the_modules() -> None:
    world = {"optimizer_shard": "world"}
    # Units that are thawed after the optimizer was made have no masters, which is
    # refused.
    layouts = [
        ({"shard_degree": 1, **world}, True),
        ({"shard_degree": 2, **world}, False),
    ]
    each_expected = [finetuned({}, unfreezes) for _, unfreezes in layouts]
    for runs in together(finetuned_over, layouts):
        for run, expected in zip(runs, each_expected, strict=True):
            assert_same(run, expected)
            assert run.extra["names"] == expected.extra["names"]


class Average(Callback):
    """An average by parameter name, and one without names, in its own state."""

    by_name: dict[str, torch.Tensor] | None = None
    listed: list[torch.Tensor]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.by_name is None:
            self.by_name = {
                name: p.detach().clone() for name, p in pl_module.named_parameters()
            }
            self.listed = [p.detach().clone() for p in pl_module.model.parameters()]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        assert self.by_name is not None
        for name, p in pl_module.named_parameters():
            self.by_name[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        for kept, p in zip(self.listed, pl_module.model.parameters(), strict=True):
            kept.lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"by_name": self.by_name, "listed": self.listed, "whole": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.by_name, self.listed = state_dict["by_name"], state_dict["listed"]
        assert not isinstance(state_dict["whole"], DTensor)


def averaged(folder: str, first: dict[str, Any], second: dict[str, Any]) -> Run:
    """Two epochs, the second resumed from a checkpoint, perhaps on another layout."""
    path = str(Path(folder) / "one.ckpt")
    trainer = make_trainer(first, callbacks=[Average()], **EXACT)
    trainer.fit(Plain(batches=3).double())
    trainer.save_checkpoint(path)
    # Lightning loads before it converts.
    module, average = Plain(batches=3).double(), Average()
    trainer = make_trainer(second, max_epochs=2, callbacks=[average], **EXACT)
    trainer.fit(module, ckpt_path=path)
    assert average.by_name is not None
    averages = [*average.by_name.values(), *average.listed]
    return report(trainer, module, averages=[whole(each) for each in averages])


def averaged_over(
    folder: str, layouts: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[Run]:
    return [
        averaged(f"{folder}/{place}", *layout) for place, layout in enumerate(layouts)
    ]


TWO: dict[str, Any] = {"shard_degree": 2}
FULL: dict[str, Any] = {"shard_degree": 2, "checkpoint": {"full_state_dict": True}}
MOVES = [(TWO, {"shard_degree": 4}), (TWO, {"shard_degree": 1}), (FULL, TWO)]


@pytest.mark.parametrize(
    "layouts", [MOVES[:1], pytest.param(MOVES[1:], marks=pytest.mark.slow)], ids=len
)
def test_tensors_by_parameter_in_a_callbacks_state_come_back_as_they_were(
    layouts: list[tuple[dict[str, Any], dict[str, Any]]], tmp_path: Path
) -> None:
    expected = averaged(str(tmp_path / "alone"), {}, {})
    for runs in together(averaged_over, str(tmp_path / "ranks"), layouts):
        for run in runs:
            assert_same(run, expected)
            for ours, theirs in zip(
                run.extra["averages"], expected.extra["averages"], strict=True
            ):
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
