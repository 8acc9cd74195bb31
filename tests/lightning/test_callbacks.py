"""Lightning's callbacks do under the strategy what they do in one process: checkpoints,
early stopping, the summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary

from smp_core.checkpoint import verify_checkpoint
from tests.lightning.modules import LanguageModule
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    read_checkpoint,
    report,
    together,
    worst,
)

EXACT: dict[str, Any] = {"precision": "64-true", "enable_checkpointing": True}

POLICIES: dict[str, dict[str, Any]] = {
    "top-k": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "best overwritten": {
        "monitor": "val_loss",
        "filename": "best",
        "enable_version_counter": False,
    },
    "every n steps, linked": {
        "every_n_train_steps": 2,
        "save_top_k": -1,
        "save_last": "link",
    },
    "newest, linked": {
        "every_n_train_steps": 3,
        "monitor": "step",
        "mode": "max",
        "save_last": "link",
    },
    "weights only": {"save_weights_only": True, "save_top_k": 1},
}
SAMPLE = ("top-k", "newest, linked")


def fit_saving(policy: str, folder: str, knobs: dict[str, Any] | None = None) -> Run:
    """3 epochs of 4 steps. The module's validation loss falls and then rises."""
    module = LanguageModule(lr=0.05)
    saver = ModelCheckpoint(dirpath=folder, **POLICIES[policy])
    trainer = make_trainer(knobs, callbacks=[saver], max_epochs=3, **EXACT)
    trainer.fit(module)
    scores = {
        Path(path).name: float(score) for path, score in saver.best_k_models.items()
    }
    names = {
        "best": Path(saver.best_model_path).name,
        "last": Path(saver.last_model_path).name,
    }
    run = report(trainer, module, scores=scores, names=names)
    if saver.monitor == "val_loss":
        # By name, through the Trainer: the best epoch's weights, which are not the last
        # one's.
        run.extra["scores"]["validated"] = trainer.validate(
            module, ckpt_path="best", verbose=False
        )[0]["val_loss"]
    return run


def listing(folder: Path) -> dict[str, str]:
    """What is there, with what each link points at."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else ""
        for path in folder.iterdir()
    }


@pytest.mark.parametrize(
    "policy",
    [
        policy if policy in SAMPLE else pytest.param(policy, marks=pytest.mark.slow)
        for policy in POLICIES
    ],
)
def test_model_checkpoint_keeps_what_it_keeps_in_one_process(
    policy: str, tmp_path: Path
) -> None:
    alone, ours = tmp_path / "alone", tmp_path / "ours"
    expected = fit_saving(policy, str(alone))
    runs = together(fit_saving, policy, str(ours), {"shard_degree": 2}, ranks=2)
    assert_same(runs, expected)
    for run in runs:
        assert run.extra["names"] == expected.extra["names"]
        assert run.extra["scores"] == pytest.approx(
            expected.extra["scores"], rel=0, abs=1e-12
        )
    assert listing(ours) == listing(alone)
    for path in alone.iterdir():
        theirs, mine = read_checkpoint(path), read_checkpoint(ours / path.name)
        assert verify_checkpoint(ours / path.name, deep=True) == []
        assert theirs.keys() <= mine.keys(), theirs.keys() - mine.keys()
        assert ("optimizer_states" in mine) == ("optimizer_states" in theirs)
        assert (mine["epoch"], mine["global_step"]) == (
            theirs["epoch"],
            theirs["global_step"],
        )
        difference, name = worst(mine["state_dict"], theirs["state_dict"])
        assert difference <= 1e-12, f"{name} in {path.name} is {difference} off"


def fit_early_stopping(knobs: dict[str, Any] | None = None) -> Run:
    module = LanguageModule(lr=0.05)
    stopper = EarlyStopping("val_loss", patience=2)
    trainer = make_trainer(
        knobs, callbacks=[stopper], max_epochs=20, precision="64-true"
    )
    trainer.fit(module)
    return report(
        trainer, module, stopped=stopper.stopped_epoch, best=float(stopper.best_score)
    )


def test_early_stopping_stops_all_ranks_where_one_process_stops() -> None:
    expected = fit_early_stopping()
    assert 0 < expected.extra["stopped"] < 19
    runs = together(fit_early_stopping, {"shard_degree": 2}, ranks=2)
    assert_same(runs, expected)
    for run in runs:
        assert run.extra["stopped"] == expected.extra["stopped"]
        assert abs(run.extra["best"] - expected.extra["best"]) <= 1e-12


class KeptSummary(ModelSummary):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__(max_depth=2)
        self.kept: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = self._summary(trainer, pl_module)
        self.kept = {
            "table": {
                title: list(column) for title, column in summary._get_summary_data()
            },
            "all": summary.total_parameters,
            "trainable": summary.trainable_parameters,
            "size": summary.model_size,
        }
        super().on_fit_start(trainer, pl_module)


def fit_summarised(knobs: dict[str, Any] | None = None) -> Run:
    summary = KeptSummary()
    module = LanguageModule()
    trainer = make_trainer(
        knobs, callbacks=[summary], enable_model_summary=True, max_steps=1
    )
    trainer.fit(module)
    return report(trainer, module, **summary.kept)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_model_summary_counts_whole_parameters(degree: int) -> None:
    expected = fit_summarised().extra
    assert expected["all"] > expected["trainable"] > 0
    for run in together(fit_summarised, {"shard_degree": degree}):
        types = run.extra["table"]["Type"]
        assert types[0] == "FSDPTroubledModel", "not sharded: the case shows nothing"
        run.extra["table"]["Type"] = [name.removeprefix("FSDP") for name in types]
        assert run.extra == expected
