"""SmpCheckpoint: every N steps or at the interval it finds, the newest few, and a
resume from the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch.distributed as dist

from lightning_smp import SmpCheckpoint
from tests.harness import run_ranks
from tests.lightning.modules import ScheduledModule
from tests.lightning.running import make_trainer

BATCHES = 6


def fit(
    folder: str,
    epochs: int,
    load: str | None = None,
    async_save: bool = False,
    **options: Any,
) -> list[int]:
    """The optimizer steps after which it saved."""
    saver = SmpCheckpoint(folder, **options)
    knobs = {"shard_degree": 2, "checkpoint": {"async_save": async_save}}
    trainer = make_trainer(
        knobs, callbacks=[saver], enable_checkpointing=True, max_epochs=epochs
    )
    saved: list[int] = []
    save_checkpoint = trainer.save_checkpoint

    def recorded(*args: Any, **kwargs: Any) -> None:
        saved.append(trainer.global_step)
        save_checkpoint(*args, **kwargs)

    trainer.save_checkpoint = recorded
    trainer.fit(ScheduledModule(batches=BATCHES), ckpt_path=load)
    dist.barrier()  # rank 0 removes
    return saved


def every_four_steps(folder: str, async_save: bool) -> list[Any]:
    first = fit(folder, 1, checkpoint_interval=4, keep_last=2, async_save=async_save)
    between = sorted(os.listdir(folder))
    second = fit(
        folder,
        2,
        load="last",
        checkpoint_interval=4,
        keep_last=2,
        async_save=async_save,
    )
    return [
        first,
        between,
        second,
        sorted(os.listdir(folder)),
        os.readlink(f"{folder}/last.ckpt"),
    ]


@pytest.mark.parametrize(
    "async_save", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_the_newest_few_stay_and_the_newest_is_last(
    async_save: bool, tmp_path: Path
) -> None:
    for first, between, second, after, last in run_ranks(
        every_four_steps, 4, str(tmp_path), async_save, ranks_per_node=2
    ):
        assert first == [4, 6]
        assert between == ["last.ckpt", "step-00000004.ckpt", "step-00000006.ckpt"]
        assert second == [10, 12]
        # The one that the run was resumed from is ModelCheckpoint's to keep.
        assert after == ["last.ckpt", "step-00000010.ckpt", "step-00000012.ckpt"]
        assert last == "step-00000012.ckpt"


def hold(folder: str, name: str) -> None:
    """Leave what a run leaves that is killed while it writes a checkpoint behind
    training."""
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/{name}")
        if os.path.lexists(f"{folder}/last.ckpt"):
            os.unlink(f"{folder}/last.ckpt")
        os.symlink(name, f"{folder}/last.ckpt")
    dist.barrier()


def after_kills(folder: str) -> list[Any]:
    hold(folder, "step-00000004.ckpt")
    first = fit(
        folder, 1, load="last", checkpoint_interval=4, keep_last=2, async_save=True
    )
    between = sorted(os.listdir(folder))
    dist.barrier()
    hold(folder, "step-00000010.ckpt")
    second = fit(
        folder, 2, load="last", checkpoint_interval=4, keep_last=2, async_save=True
    )
    return [first, between, second, sorted(os.listdir(folder))]


@pytest.mark.slow
def test_the_place_of_a_save_that_was_killed_keeps_no_run_from_going_on(
    tmp_path: Path,
) -> None:
    """A run begins anew where its first save was, and otherwise goes on from the save
    before, under the same names."""
    for first, between, second, after in run_ranks(after_kills, 2, str(tmp_path)):
        assert first == [4, 6]
        assert between == ["last.ckpt", "step-00000004.ckpt", "step-00000006.ckpt"]
        assert second == [10, 12]
        assert after == ["last.ckpt", "step-00000010.ckpt", "step-00000012.ckpt"]


def at_its_own_interval(folder: str) -> tuple[list[int], list[int]]:
    often = fit(
        f"{folder}/often",
        2,
        checkpoint_interval="auto",
        mean_time_between_failures=1e-6,
    )
    seldom = fit(
        f"{folder}/seldom",
        2,
        checkpoint_interval="auto",
        mean_time_between_failures=1e12,
    )
    return often, seldom


def test_the_interval_follows_the_time_between_failures(tmp_path: Path) -> None:
    """The first save, after 10 steps, is the measurement; failures all the time make it
    save after every step, failures in ages only at the end. The same on all ranks."""
    results = run_ranks(at_its_own_interval, 2, str(tmp_path))
    assert results == [([10, 11, 12], [10, 12])] * 2


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"every_n_train_steps": 2}, "checkpoint_interval"),
        ({"monitor": "val_loss"}, "ModelCheckpoint"),
        ({"save_top_k": 2}, "keep_last"),
    ],
)
def test_options_that_would_decide_what_it_decides_are_refused(
    tmp_path: Path, option: dict[str, Any], instead: str
) -> None:
    """By a monitored metric the newest would not be what it keeps."""
    with pytest.raises(ValueError, match=f"not of SmpCheckpoint; .*{instead}"):
        SmpCheckpoint(tmp_path, checkpoint_interval=1, **option)


def test_only_what_lies_in_the_folder_is_kept_and_removed(tmp_path: Path) -> None:
    """A run that was preempted before its first regular save had none, and a state from
    elsewhere may name any path."""
    saver = SmpCheckpoint(tmp_path, checkpoint_interval=1)
    own = [str(tmp_path / "step-00000001.ckpt"), str(tmp_path / "epoch=0" / "step=2")]
    others = ["", "/elsewhere", str(tmp_path), f"{tmp_path}/../elsewhere"]
    state = {**saver.state_dict(), "kept": [*own, *others]}
    saver.load_state_dict({**state, "best_model_path": ""})
    assert saver._kept == own


def test_defaults_that_lightnings_cli_hands_over_are_no_wishes(tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(SmpCheckpoint, "saving")
    arguments = parser.parse_args(
        [f"--saving.dirpath={tmp_path}", "--saving.checkpoint_interval=10"]
    )
    handed = vars(arguments.saving)
    assert handed.keys() >= {"monitor", "mode", "save_top_k", "every_n_epochs"}
    assert SmpCheckpoint(**handed).keep_last == 3
    with pytest.raises(ValueError, match="mode is an option of ModelCheckpoint"):
        SmpCheckpoint(**handed | {"mode": "max"})
