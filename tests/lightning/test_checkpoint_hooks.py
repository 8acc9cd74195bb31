"""What hooks do to a checkpoint, before it is written and before it is loaded, has the
effect it has in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from smp_core.checkpoint.optimizers import parameter_names
from tests.core.models import TroubledModel, loss_of
from tests.lightning.modules import LanguageModule
from tests.lightning.running import (
    Run,
    make_trainer,
    read_checkpoint,
    report,
    together,
    whole,
    whole_weights,
)

EXACT: dict[str, Any] = {"precision": "64-true", "max_epochs": 2}
WHOLE = {"checkpoint": "full"}


class Noted(nn.Module):
    """A weight with extra state. It was once called "legacy" and half as large, and
    loading says what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))
        self.note = "new"
        self.found = 0.0
        self.register_load_state_dict_pre_hook(self.translate)
        self.register_load_state_dict_post_hook(self.look)

    def forward(self) -> torch.Tensor:
        return self.weight.pow(2).mean()

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    @staticmethod
    def translate(
        module: nn.Module, state: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        if f"{prefix}legacy" in state:
            state[f"{prefix}weight"] = 2 * state.pop(f"{prefix}legacy")

    @staticmethod
    def look(module: Noted, incompatible: Any) -> None:
        module.found = float(whole(module.weight).sum())


def momenta_of(trainer: Trainer) -> dict[Any, torch.Tensor]:
    """Sums of the first optimizer's momenta by parameter name, as it is now."""
    states = trainer.optimizers[0].state_dict()["state"]
    names = parameter_names(trainer.lightning_module, trainer.optimizers[0])
    return {
        names[number]: whole(entry["exp_avg"]).sum() for number, entry in states.items()
    }


class Old(LanguageModule):
    """What was trained and saved, under names that have changed since."""

    def build(self) -> None:
        self.old = TroubledModel()
        self.noted = Noted()
        self.noted.note = "old"
        self.shift = nn.Linear(5, 2)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.old, tokens) + self.noted()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["shift.bias"]
        state["noted.legacy"] = state.pop("noted.weight") / 2
        checkpoint["average"] = {
            name: value * 0.5
            for name, value in state.items()
            if name.startswith("old.blocks.1")
        }
        checkpoint["state_dict"] = dict(state)


class CallbackThatAdds(Callback):
    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["state_dict"] = {**checkpoint["state_dict"], "added": torch.ones(2)}


class New(Old):
    """Loads it, with every kind of edit. ``shift`` is drawn, other values on every
    rank.

    options["reordered"]: whether the optimizer's parameters have another order, which a
    file's numbers do not know.
    """

    strict_loading = False

    def build(self) -> None:
        super().build()
        parts = dict(self.named_children())
        order = ["noted", "shift", "old"] if self.options["reordered"] else list(parts)
        for name in parts:
            delattr(self, name)
        for name in order:
            setattr(self, name.replace("old", "model"), parts[name])
        self.noted.note = "new"

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, tokens) + self.noted()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert isinstance(state, dict)
        self.added = state.pop("added").clone()
        self.average = {
            name: value.sum() for name, value in checkpoint["average"].items()
        }
        for name in [name for name in state if name.startswith("old.")]:
            state[name.replace("old.", "model.")] = state.pop(name)
        state["shift.weight"] = torch.randn(2, 5, dtype=torch.float64)
        state["model.unused.weight"].mul_(3)
        state["model.unused.bias"] = torch.full_like(state["model.unused.bias"], 7.0)
        if self.options.get("replaced"):
            checkpoint["state_dict"] = dict(state)
        for saved in checkpoint.get("optimizer_states", []):
            saved["param_groups"][0]["lr"] = 0.25
            gain = next(
                entry for entry in saved["state"].values() if entry["exp_avg"].ndim == 0
            )
            gain["exp_avg"] = gain["exp_avg"] + 1

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.rate = optimizer.param_groups[0]["lr"]
        self.momenta = momenta_of(self.trainer)
        self.loaded = whole_weights(self)


def fit_and_save(path: str, knobs: dict[str, Any] | None = None) -> Run:
    module = Old(batches=2)
    trainer = make_trainer(
        knobs, callbacks=[CallbackThatAdds()], **{**EXACT, "max_epochs": 1}
    )
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return report(trainer, module, momenta=momenta_of(trainer))


def load(path: str, knobs: dict[str, Any], replaced: bool, fitting: bool) -> Run:
    """What a run begins with."""
    module = New(batches=2, replaced=replaced, reordered="checkpoint" not in knobs)
    trainer = make_trainer(knobs, **EXACT)
    if fitting:
        trainer.fit(module, ckpt_path=path)
    else:
        trainer.validate(module, ckpt_path=path, verbose=False)
        module.loaded = whole_weights(module)
    seen = {
        name: getattr(module, name, None)
        for name in ("rate", "momenta", "added", "average")
    }
    return report(
        trainer,
        module,
        **seen,
        loaded=module.loaded,
        note=module.noted.note,
        found=module.noted.found,
    )


FORMS: dict[str, dict[str, Any]] = {
    "folder": {"shard_degree": 2},
    "folder, over the world": {"shard_degree": 2, "optimizer_shard": "world"},
    "file": {"shard_degree": 4, "checkpoint": "full"},
}


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("folder", 2),
        *(
            pytest.param(form, 4, marks=pytest.mark.slow)
            for form in ("folder, over the world", "file")
        ),
    ],
)
def test_what_hooks_edit_is_what_is_saved_and_loaded(
    form: str, ranks: int, tmp_path: Path
) -> None:
    path, knobs = str(tmp_path / "saved"), FORMS[form]
    saved = together(fit_and_save, path, knobs, ranks=ranks)[0]
    was = {
        name.replace("old.", "model."): value for name, value in saved.weights.items()
    }
    there = read_checkpoint(path)
    assert there["state_dict"].keys() == {
        *saved.weights,
        "noted._extra_state",
        "noted.legacy",
        "added",
    } - {
        "noted.weight",
        "shift.bias",
    }
    for fitting in (True, False):
        runs = together(load, path, knobs, fitting, fitting, ranks=ranks)
        for run in runs:
            loaded = run.extra["loaded"]
            drawn, kept = loaded.pop("shift.weight"), loaded.pop("shift.bias")
            assert torch.equal(
                drawn, runs[0].extra["loaded"].get("shift.weight", drawn)
            ), "ranks drew their own"
            expected = {
                name: value
                for name, value in was.items()
                if not name.startswith("shift")
            }
            expected["model.unused.weight"] = expected["model.unused.weight"] * 3
            expected["model.unused.bias"] = torch.full_like(
                expected["model.unused.bias"], 7.0
            )
            assert kept.shape == (2,) and loaded.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(loaded[name], value), name
            assert run.extra["note"] == "old"
            assert run.extra["found"] == pytest.approx(
                float(was["noted.weight"].sum()), rel=1e-12
            )
            assert torch.equal(run.extra["added"], torch.ones(2))
            for name, value in run.extra["average"].items():
                assert float(value) == pytest.approx(
                    float(saved.weights[name].sum()) / 2, rel=1e-12, abs=1e-12
                )
            if fitting:
                assert run.extra["rate"] == 0.25
                momenta = {
                    name.replace("old.", "model."): value
                    for name, value in saved.extra["momenta"].items()
                }
                momenta["model.gain"] = momenta["model.gain"] + 1
                assert run.extra["momenta"].keys() == momenta.keys()
                for name, value in run.extra["momenta"].items():
                    assert float(value) == pytest.approx(
                        float(momenta[name]), rel=1e-12, abs=1e-12
                    ), name
