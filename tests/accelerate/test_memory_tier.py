"""Runs of Trainer and of a bare loop that lost processes, or a node, go on from shared
memory to the last bit."""

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
from accelerate.state import PartialState
from transformers import TrainerCallback, integrations, trainer as trainer_module
from transformers.trainer_utils import BestRun, HPSearchBackend

from smp_core.checkpoint import CheckpointError
from smp_core.checkpoint.memory.slots import SharedSlots
from smp_core.checkpoint.memory.tier import MemoryTier
from tests.accelerate.running import (
    SAMPLES,
    fresh_accelerator,
    full_weights,
    make_loader,
    make_optimizer,
    prepared,
)
from tests.accelerate.trainers import Run, make_model, make_trainer, whole_weights
from tests.core.checkpoint.states import step_in
from tests.core.models import TroubledModel, loss_of
from tests.harness import run_ranks
from tests.lightning.losing import Lost, Watch, copy_slowly

STEPS, LOST_IN, SAVED_AT = 7, 5, 4


class Loses(TrainerCallback):
    """Ends the run in a step; watches the disk until the first step of a resumed run
    begins."""

    def __init__(self, trainer: Any, ends_in: int | None, watch: Watch | None) -> None:
        self.trainer, self.ends_in, self.watch = trainer, ends_in, watch

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.is_on = False
        if state.global_step == self.ends_in:
            # What would have been committed at some time.
            self.trainer.accelerator.memory._saver.wait()
            raise Lost


def with_trainer(
    folder: Path, case: dict[str, Any], resume: bool = False, ends_in: int | None = None
) -> Run:
    """Dropout draws from each rank's generator; an evaluation follows step 4."""
    model = make_model(dist.get_rank())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    checkpoint = {"memory_every_n_steps": case["every"]}
    trainer, recorder = make_trainer(
        folder,
        4,
        1,
        {"shard_degree": case["shard"], "checkpoint": checkpoint},
        model=model,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVED_AT,
        eval_strategy="steps",
        eval_steps=SAVED_AT,
    )
    watch = Watch(folder) if resume else None
    trainer.add_callback(Loses(trainer, ends_in, watch))
    run = recorder.run
    try:
        trainer.train(resume_from_checkpoint="last" if resume else None)
    except Lost:
        run.extra["ended"] = "lost"
    run.weights = whole_weights(trainer.model)
    logged = [
        entry["step"]
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
    run.extra |= {"opened": [] if watch is None else watch.opened, "logged": logged}
    return run


def with_loop(
    folder: Path, case: dict[str, Any], resume: bool = False, ends_in: int | None = None
) -> Run:
    """Windows of two batches, and numbers of each rank's own generator in the loss."""
    checkpoint = {"memory_every_n_steps": case["every"]}
    accelerator, optimizer, model, loader, scheduler = prepared(
        torch.float32, 2, STEPS, shard_degree=case["shard"], checkpoint=checkpoint
    )
    torch.manual_seed(7 + dist.get_rank())
    watch = Watch(folder) if resume else None
    accelerator.load_newest_state(folder)
    if watch is not None:
        watch.is_on = False
    run, done = Run(), accelerator.optimizer_steps
    run.extra["opened"] = [] if watch is None else watch.opened
    for number, batch in enumerate(
        accelerator.skip_first_batches(loader, 2 * done), 2 * done
    ):
        if number == 2 * LOST_IN and ends_in is not None:
            accelerator.memory._saver.wait()
            run.extra["ended"] = "lost"
            accelerator.close_memory(ended_well=False)  # as at the end of a process
            return run
        with accelerator.accumulate(model):
            loss = loss_of(model, batch["tokens"]) * (1 + 0.1 * torch.rand(()))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number % 2:
            run.losses.append(loss.item())
        if number == 2 * SAVED_AT - 1:
            accelerator.save_state(str(folder / f"step-{SAVED_AT:08d}"))
        accelerator.keep_state()
    # The next run is in this process.
    with mock.patch.object(PartialState, "destroy_process_group"):
        accelerator.end_training()
    run.weights = full_weights(model)
    return run


RUNS = {"trainer": with_trainer, "loop": with_loop}


def lose_and_resume(
    kind: str, folder: str, cases: list[dict[str, Any]]
) -> list[tuple[Run, Run, Run, list[str]]]:
    train, seen = RUNS[kind], []
    for number, case in enumerate(cases):
        top = Path(folder, str(number))
        os.environ["SMP_MEMORY_FOLDER"] = str(top)
        if dist.get_rank() == 0:
            top.mkdir()
        dist.barrier()
        plain = train(top / "plain", case) if number == 0 else seen[0][0]
        with mock.patch.object(SharedSlots, "copy_rest", copy_slowly):
            ended = train(top / "run", case, ends_in=LOST_IN)
        dist.barrier()
        for node in case["lost"] if dist.get_rank() == 0 else ():
            (gone,) = top.glob(f"torch-smp-*/run-*-node{node}")
            shutil.rmtree(gone)
        dist.barrier()
        resumed = train(top / "run", case, resume=True)
        dist.barrier()
        seen.append(
            (plain, ended, resumed, [str(path) for path in top.glob("torch-smp-*/*")])
        )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shard"),
    [("trainer", "node"), ("loop", "world")],
)
def test_a_run_goes_on_from_memory_or_from_what_is_newer_on_disk(
    kind: str, shard: str, tmp_path: Path
) -> None:
    """Two nodes of two ranks. A node is lost, whose shards the other one has (replicas,
    or copies): nobody opens a checkpoint on disk. And a state that is older than the
    newest one on disk."""
    cases = [
        {"shard": shard, "every": 1, "lost": [1]},
        {"shard": shard, "every": 3, "lost": []},
    ]
    for seen in run_ranks(
        lose_and_resume, 4, kind, str(tmp_path), cases, ranks_per_node=2
    ):
        for (plain, ended, resumed, left), resumed_at in zip(
            seen, (LOST_IN, SAVED_AT), strict=True
        ):
            assert ended.extra["ended"] == "lost"
            assert len(plain.losses) == STEPS
            assert ended.losses[:resumed_at] + resumed.losses == plain.losses
            for name, value in plain.weights.items():
                assert torch.equal(value, resumed.weights[name]), name
            assert resumed.extra.get("logged", []) == plain.extra.get("logged", [])
            assert left == []
        (_, _, from_memory, _), (_, _, from_disk, _) = seen
        assert from_memory.extra["opened"] == [] and from_disk.extra["opened"]


def begin_beside(folder: str) -> list[str]:
    os.environ["SMP_MEMORY_FOLDER"] = f"{folder}/memory"
    said = []
    for train in RUNS.values():
        try:
            train(Path(folder, "run"), {"shard": "world", "every": 1}, resume=True)
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_run_in_the_folder_of_one_that_lives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_MEMORY_FOLDER", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    live = [
        MemoryTier(1, f"{tmp_path}/run", [[0]], posed=False, layout="", by=by)
        for by in ("trainer", "loop")
    ]
    for said in run_ranks(begin_beside, 2, str(tmp_path)):
        assert [f"process {os.getpid()} on this machine" in each for each in said] == [
            True,
            True,
        ]
        assert (
            "output_dir=...) another folder" in said[0]
            and "load_newest_state(...) with another folder" in said[1]
        )
    for each in live:
        each.close(ended_well=True)


# Several trainings in one process


def train_in_phases(folder: Path) -> list[tuple[int, list[int], list[str]]]:
    """Of each phase of a script: the step it begins at, its steps, and the states in
    memory at its end."""
    accelerator = fresh_accelerator(
        schedule_in_optimizer_steps=True, checkpoint={"memory_every_n_steps": 1}
    )
    seen = []
    for phase, steps in enumerate((6, 3, 2)):
        model = TroubledModel()
        optimizer, scheduler = make_optimizer(model)
        optimizer, model, scheduler = accelerator.prepare(optimizer, model, scheduler)
        assert accelerator.load_newest_state(folder / f"phase-{phase}") is None
        begin, counted = accelerator.optimizer_steps, []
        for batch in make_loader(steps, 1, SAMPLES):
            accelerator.backward(loss_of(model, batch["tokens"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.keep_state()
            counted.append(accelerator.optimizer_steps)
        accelerator.memory._saver.wait()
        dist.barrier()
        manifests = folder.glob(
            f"memory/torch-smp-*/phase-{phase}-*/rank-{dist.get_rank():05d}-*/manifest.json"
        )
        seen.append((begin, counted, sorted(map(step_in, manifests))))
        if phase == 0:
            accelerator.free_memory()  # the phase after it does without
    with mock.patch.object(PartialState, "destroy_process_group"):
        accelerator.end_training()
    return seen


class Trials:
    """Stands for optuna."""

    def ensure_available(self) -> None: ...

    def run(self, trainer: Any, trials: int, direction: str) -> BestRun:
        for number in range(trials):
            with contextlib.suppress(Lost):
                trainer.train(
                    trial=SimpleNamespace(
                        number=number, params={"learning_rate": 1e-3 * (number + 1)}
                    )
                )
        return BestRun("0", 0.0, {})


def search(folder: Path) -> tuple[list[str], list[str]]:
    """A search whose first trial is lost in step 3: states in memory then, and at the
    end."""
    knobs = {"shard_degree": "world", "checkpoint": {"memory_every_n_steps": 1}}
    trainer, _ = make_trainer(
        folder / "run", 4, 1, knobs, max_steps=4, optim="adamw_torch"
    )
    trainer.model_init = lambda trial: make_model()
    then: list[str] = []

    def in_memory() -> list[str]:
        dist.barrier()
        found = folder.glob(
            f"memory/torch-smp-*/run-*/rank-{dist.get_rank():05d}-*/manifest.json"
        )
        return sorted(
            f"{path.parents[1].name.rpartition('-')[0]} {step_in(path)}"
            for path in found
        )

    class Loses(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3 and not then:
                trainer.kept._tier._saver.wait()
                then.extend(in_memory())
                trainer.save_training()  # as one that is told to end in an evaluation
                raise Lost

    trainer.add_callback(Loses())
    with (
        mock.patch.dict(
            trainer_module.ALL_HYPERPARAMETER_SEARCH_BACKENDS,
            {HPSearchBackend.OPTUNA: Trials},
        ),
        mock.patch.object(integrations, "hp_params", lambda trial: trial.params),
        mock.patch.object(SharedSlots, "copy_rest", copy_slowly),
    ):
        trainer.hyperparameter_search(
            lambda trial: trial.params, n_trials=2, backend="optuna"
        )
    return then, in_memory()


def train_twice(folder: str) -> tuple[Any, Any]:
    os.environ["SMP_MEMORY_FOLDER"] = f"{folder}/memory"
    if dist.get_rank() == 0:
        Path(folder, "memory").mkdir()
    dist.barrier()
    phases = train_in_phases(Path(folder))
    dist.barrier()
    left = [path.name for path in Path(folder).glob("memory/torch-smp-*/*")]
    dist.barrier()
    return (phases, left), search(Path(folder))


def test_trainings_of_one_process_count_and_keep_their_own_steps(
    tmp_path: Path,
) -> None:
    """Phases of a script begin at step 0, and free all memory together. Trials have a
    folder each; of each, optimizers wait for the copy (a state that changes meanwhile
    is given up), and the memory is freed; what they save is in it."""
    for (phases, left), (then, in_the_end) in run_ranks(train_twice, 2, str(tmp_path)):
        steps = [list(range(1, count + 1)) for count in (6, 3, 2)]
        kept = [counted[-2:] for counted in steps]
        assert phases == [
            (0, counted, names) for counted, names in zip(steps, kept, strict=True)
        ]
        assert left == []
        assert then == ["run-0-trainer 2", "run-0-trainer 3"]
        assert in_the_end == then, "for a run that goes on with it"
    saved = [
        path.parent.relative_to(tmp_path).as_posix()
        for path in tmp_path.glob("run/**/smp_state")
    ]
    assert sorted(saved) == ["run/run-0/checkpoint-3"]
