"""A run that lost processes or a node goes on from shared memory, to the last bit, and
leaves none of it behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smp.memory import PLACE
from smp_core.checkpoint import CheckpointError, save_checkpoint
from smp_core.checkpoint.memory.slots import SharedSlots
from smp_core.checkpoint.memory.tier import MemoryTier, _is_newer
from tests.core.models import LENGTH, TroubledModel
from tests.core.pipeline.cases import example_of, of_all_stages
from tests.core.tensor_parallel.model_cases import build, loss_of as staged_loss
from tests.harness import run_ranks
from tests.lightning.losing import Lost, Watch, copy_slowly
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import Run, make_trainer, report

BATCHES, LOST_AT = 10, 8


class LosingModule(LanguageModule):
    """Computes with numbers of each rank's own generator; ends with an error in a
    batch. options: kind of a model for stages, frozen: beginnings of names."""

    ends_in: int | None = None
    watch: Watch | None = None

    def build(self) -> None:
        kind = self.options.get("kind")
        self.model: Any = (
            TroubledModel() if kind is None else example_of(build(kind, seed=rank()))
        )
        frozen = self.options.get("frozen", ())
        for name, parameter in self.model.named_parameters():
            if name.startswith(tuple(frozen)):
                parameter.requires_grad_(False)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return (
            super().loss(tokens)
            if "kind" not in self.options
            else staged_loss(self.model, tokens[:, :LENGTH])
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.watch is not None:
            self.watch.is_on = False
        if batch_idx == self.ends_in:
            # What would have been committed at some time.
            self.trainer.strategy._memory.tier._saver.wait()
            raise Lost

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))


WORLD = {"shard_degree": "world"}


def train(
    folder: Path,
    resume: bool = False,
    ends_in: int | None = None,
    every: int = 3,
    knobs: dict[str, Any] = WORLD,
    options: dict[str, Any] | None = None,
) -> Run:
    os.environ["SMP_MEMORY_FOLDER"] = str(folder.parent / "memory")
    # Lightning's sampler shuffles by it, alike on stages.
    seed_everything(3 if options else 3 + rank(), verbose=False)
    module = LosingModule(BATCHES, **(options or {}))
    module.ends_in = ends_in
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=every)
    checkpoint = {"memory_every_n_steps": 2}
    trainer = make_trainer(
        {**knobs, "checkpoint": checkpoint},
        callbacks=[saver],
        enable_checkpointing=True,
    )
    ended = ""
    module.watch = Watch(folder) if resume else None
    try:
        trainer.fit(module, ckpt_path="last" if resume else None)
    except Lost:
        ended = "lost"
    opened = module.watch.opened if module.watch else []
    parallel = trainer.strategy.parallel
    if parallel.pipeline is None:
        return report(trainer, module, ended=ended, opened=opened)
    weights = of_all_stages(parallel, dict(module.named_parameters()))
    return Run(
        [float(loss) for loss in module.losses],
        weights,
        {},
        {"ended": ended, "opened": opened},
    )


def lose_and_resume(
    folder: str, lost: list[int], every: int, **case: Any
) -> tuple[Run, Run, Run]:
    top = Path(folder)
    if rank() == 0:
        (top / "memory").mkdir(parents=True)
    dist.barrier()
    plain = train(top / "plain", every=every, **case)
    with mock.patch.object(SharedSlots, "copy_rest", copy_slowly):
        ended = train(top / "run", ends_in=LOST_AT, every=every, **case)
    dist.barrier()
    for node in lost if rank() == 0 else ():
        (gone,) = (top / "memory").glob(f"torch-smp-*/run-*-node{node}")
        shutil.rmtree(gone)
    dist.barrier()
    resumed = train(top / "run", resume=True, every=every, **case)
    dist.barrier()
    left = [*(top / "memory").glob("torch-smp-*/*"), *(top / "run").glob(f"**/{PLACE}")]
    resumed.extra["left"] = [str(path) for path in left]
    return plain, ended, resumed


def check(runs: list[tuple[Run, Run, Run]], resumed_at: int) -> None:
    for plain, ended, resumed in runs:
        assert ended.extra["ended"] == "lost"
        assert ended.losses[:resumed_at] + resumed.losses == plain.losses
        for name, value in plain.weights.items():
            assert torch.equal(value, resumed.weights[name]), name
        assert resumed.extra["left"] == []


@pytest.mark.parametrize(
    ("lost", "every"), [pytest.param([], 100, marks=pytest.mark.slow), ([0], 3)]
)
def test_a_run_goes_on_from_memory(tmp_path: Path, lost: list[int], every: int) -> None:
    """Two nodes of one rank, whose partition group spans both: each part lies on both
    nodes. To the last bit; nobody opens a checkpoint on disk, and none needs to be
    there."""
    runs = run_ranks(lose_and_resume, 2, str(tmp_path), lost, every, ranks_per_node=1)
    check(runs, resumed_at=8)
    opened = {name for _, _, resumed in runs for name in resumed.extra["opened"]}
    assert opened == set()


UNEVEN = {
    "shard_degree": 1,
    "pipeline_parallel_degree": 2,
    "pipeline": {"split": [3, 1], "microbatches": 1},
}
STAGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**UNEVEN, "tensor_parallel_degree": 2}, {"kind": "gpt2_deep"}),
    (
        {**UNEVEN, "shard_degree": 2, "optimizer_shard": "world"},
        {"kind": "gpt2_deep", "frozen": ["transformer.h.3"]},
    ),
    (
        {
            "shard_degree": 1,
            "pipeline_parallel_degree": 4,
            "pipeline": {"microbatches": 1},
        },
        {"kind": "gpt2_deep", "frozen": ["transformer.h.2"]},
    ),
]


def lose_and_resume_each(folder: str, cases: list[int]) -> list[tuple[Run, Run, Run]]:
    return [
        lose_and_resume(
            f"{folder}/{number}",
            [number % 2],
            100,
            knobs=STAGED[number][0],
            options=STAGED[number][1],
        )
        for number in cases
    ]


@pytest.mark.slow  # in the normal run: tests/core/checkpoint/test_memory_tier.py
@pytest.mark.parametrize("cases", [[0], [1, 2]])
def test_a_run_in_stages_goes_on_from_memory(cases: list[int], tmp_path: Path) -> None:
    """Each node of two ranks has stages that no other one has: of other sizes, split
    over tensor ranks or sharded, or with nothing to train. One node is lost."""
    for seen in zip(
        *run_ranks(lose_and_resume_each, 4, str(tmp_path), cases, ranks_per_node=2),
        strict=True,
    ):
        check(list(seen), resumed_at=8)
        opened = {name for _, _, resumed in seen for name in resumed.extra["opened"]}
        assert opened == set()


@pytest.mark.slow  # in the normal run: tests/accelerate/test_memory_tier.py
def test_a_run_whose_memory_is_lost_goes_on_from_disk(tmp_path: Path) -> None:
    runs = run_ranks(lose_and_resume, 2, str(tmp_path), [0, 1], 3, ranks_per_node=1)
    check(runs, resumed_at=6)
    assert all(resumed.extra["opened"] for _, _, resumed in runs)


# Names


def restart_without_a_folder(
    folder: str, kinds: list[str]
) -> dict[str, tuple[int, int, list[str]]]:
    """Lose a run in step 5 and start it again, then end it: the steps at which it
    begins, and what is left."""
    seen = {}
    for kind in kinds:
        top = Path(folder, kind)
        top.mkdir()
        os.environ["SMP_MEMORY_FOLDER"] = str(top)
        begun: list[int] = []
        for attempt in range(3):
            flags: dict[str, Any] = {"default_root_dir": top / "root"}
            if kind == "job":
                (top / str(attempt)).mkdir()
                os.chdir(top / str(attempt))
                flags = {"default_root_dir": None}
            if kind == "default":
                # Counts up its versions.
                flags |= {
                    "enable_checkpointing": True,
                    "logger": CSVLogger(top / "logs"),
                }
            module = LosingModule(BATCHES)
            module.ends_in = (5, 7, None)[attempt]
            trainer = make_trainer(
                {**WORLD, "checkpoint": {"memory_every_n_steps": 1}}, **flags
            )
            with contextlib.suppress(Lost):
                trainer.fit(module, ckpt_path="last")
            begun.append(trainer.global_step - len(module.losses))
        os.chdir(folder)
        seen[kind] = (*begun[1:], [path.name for path in top.glob("torch-smp-*/*")])
    return seen


def test_a_run_without_a_folder_of_checkpoints_is_found_after_a_restart(
    tmp_path: Path,
) -> None:
    """By Trainer's folder, also where a logger numbers those of checkpoints; by the
    launcher's job where that is not given, and the working directory is another one
    each time."""
    kinds = ["none", "default", "job"]
    for seen in run_ranks(
        restart_without_a_folder,
        1,
        str(tmp_path),
        kinds,
        env={"TORCHELASTIC_RUN_ID": "job-7"},
    ):
        assert seen == dict.fromkeys(kinds, (5, 7, []))


def begin_beside(folder: str) -> tuple[str, int]:
    os.environ["SMP_MEMORY_FOLDER"] = f"{folder}/memory"
    module, saver = LosingModule(BATCHES), ModelCheckpoint(f"{folder}/run")
    knobs = {**WORLD, "checkpoint": {"memory_every_n_steps": 1}}
    trainer = make_trainer(knobs, callbacks=[saver], enable_checkpointing=True)
    try:
        trainer.fit(module, ckpt_path="last")
    except CheckpointError as error:
        return str(error), len(module.losses)
    return "", len(module.losses)


def test_a_run_in_the_folder_of_one_that_lives_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_MEMORY_FOLDER", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    lives = MemoryTier(
        1, f"{tmp_path}/run", [[0]], posed=False, layout="", by="lightning"
    )
    lives.leave()
    lives.save({"weights": torch.ones(3)}, 1, {}, None)
    for said, steps in run_ranks(begin_beside, 2, str(tmp_path)):
        assert (
            f"process {os.getpid()} on this machine" in said
            and "give ModelCheckpoint(dirpath=...)" in said
        )
        assert steps == 0
    assert lives.find() is not None
    lives.close(ended_well=True)


class SavesOnce(LanguageModule):
    """Saves a checkpoint of its own in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.trainer.save_checkpoint(
                Path(self.trainer.default_root_dir, "own.ckpt")
            )
        return super().training_step(batch, batch_idx)


def names_of_barriers(folder: str) -> list[str | None]:
    """Train with a state in memory at every step; what ranks waited for one another
    for."""
    os.environ["SMP_MEMORY_FOLDER"] = folder
    knobs = {"shard_degree": "world", "checkpoint": {"memory_every_n_steps": 1}}
    trainer = make_trainer(knobs, default_root_dir=folder, max_steps=4)
    names: list[str | None] = []
    strategy: Any = trainer.strategy
    passes = strategy.barrier

    def barrier(name: str | None = None) -> None:
        with mock.patch.object(dist, "barrier", lambda **_: names.append(name)):
            passes(name)

    with mock.patch.object(strategy, "barrier", barrier):
        trainer.fit(SavesOnce(BATCHES))
    return names


def test_ranks_wait_for_one_another_at_a_checkpoint_but_not_at_a_state_in_memory(
    tmp_path: Path,
) -> None:
    for names in run_ranks(names_of_barriers, 2, str(tmp_path)):
        assert names.count("Trainer.save_checkpoint") == 1, "at the module's own"


@pytest.mark.parametrize(
    ("step", "from_memory"), [(99, True), (100, False), (150, False)]
)
def test_a_checkpoint_of_another_folder_is_compared_by_its_step(
    step: int, from_memory: bool, tmp_path: Path
) -> None:
    """OnExceptionCheckpoint, say, saves there: its sequence numbers are of that
    folder."""
    other = tmp_path / "other" / "on_exception.ckpt"
    other.parent.mkdir()
    save_checkpoint(
        other, {"state_dict": {"weight": torch.ones(2)}}, metadata={"step": step}
    )
    found: Any = SimpleNamespace(manifest=SimpleNamespace(age=(9, 100, "")), step=100)
    assert _is_newer(found, other, in_folder=False) is from_memory
