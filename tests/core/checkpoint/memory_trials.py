"""Kill a world that keeps states in memory at random instants, take a node away or not,
and go on. Run as a script; prints one JSON line for each trial.

Four gloo ranks pose as two nodes. Their model has stages and tensor ranks at a random
layout: tensors of unequal sizes in each stage, some smaller than the group they are
sharded over, some replicated, none in the last stage of some trials. They keep one
state after the other; at a random instant one rank, or all, are killed with SIGKILL,
the rest a little later. Then a node's memory is removed, or none. New ranks have to
find the newest state that any rank knew to be kept, or the one after it, with every
value exact, and to keep the next ones; memory is empty when they have ended well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from smp_core.checkpoint import load_checkpoint, read_per_rank
from smp_core.checkpoint.memory import save as memory_save
from smp_core.checkpoint.memory.tier import MemoryTier
from tests.core.checkpoint.kill_trials import fork

WORLD = 4
# Stages, tensor ranks, sharded over.
LAYOUTS = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)]
STEPS = 400  # more than a trial lasts


class Model:
    """The tensors of a trial: stage -> mesh, and name -> (stage, shape, placements)."""

    def __init__(self, trial: dict[str, Any]) -> None:
        stages, tensor, shard = trial["layout"]
        ranks = torch.arange(WORLD).view(stages, shard, tensor)
        self.meshes = [
            DeviceMesh("cpu", ranks[stage], mesh_dim_names=("shard", "tensor"))
            for stage in range(stages)
        ]
        draw = random.Random(trial["seed"])
        self.tensors: dict[str, tuple[int, tuple[int, ...], list[Any]]] = {}
        for stage in range(stages):
            for number in range(
                0 if stage == 3 and trial["seed"] % 2 else draw.randint(1, 4)
            ):
                shape = (draw.randint(1, 40), draw.choice((2, 6)))
                placements = [
                    draw.choice((Shard(0), Replicate())),
                    draw.choice((Shard(1), Replicate())),
                ]
                self.tensors[f"stage{stage}.{number}"] = (stage, shape, placements)

    def state(self, step: int) -> dict[str, Any]:
        values = {}
        for name, (stage, shape, placements) in self.tensors.items():
            whole = torch.randn(
                shape,
                generator=torch.Generator().manual_seed(
                    1000 * step + len(name) + stage
                ),
            )
            values[name] = distribute_tensor(
                whole * step, self.meshes[stage], placements, src_data_rank=None
            )
        return {
            "state_dict": values,
            "plain": torch.full((3,), float(step)),
            "step": step,
        }


def tier(folder: Path) -> MemoryTier:
    os.environ["SMP_MEMORY_FOLDER"] = str(folder)
    return MemoryTier(1, str(folder / "disk"), [[0, 1], [2, 3]], posed=True, layout="")


def train(rank: int, trial: dict[str, Any], folder: Path) -> None:
    if trial["seed"] % 3:  # as states that are not small
        memory_save._SMALL_BYTES = -1
    model, kept = Model(trial), tier(folder)
    kept.leave()
    for step in range(1, STEPS):
        kept.save(model.state(step), step, {}, (rank, step))
        kept.before_update()
        kept._saver.wait()
        (folder / f"kept-{rank}").write_text(str(step))
        time.sleep(0.01)


def go_on(rank: int, trial: dict[str, Any], folder: Path) -> None:
    model, kept = Model(trial), tier(folder)
    found = kept.find()
    assert found is not None, "nothing was found"
    state = model.state(-1)
    opened = kept.take(found)
    load_checkpoint(opened, state)
    expected = model.state(found.step)
    pairs = [
        (state["state_dict"][name], value)
        for name, value in expected["state_dict"].items()
    ]
    exact = all(torch.equal(local(one), local(other)) for one, other in pairs)
    exact = (
        exact
        and torch.equal(state["plain"], expected["plain"])
        and state["step"] == found.step
    )
    exact = exact and read_per_rank(opened) == [
        (number, found.step) for number in range(WORLD)
    ]
    kept.begin(found.step)
    for step in range(found.step + 1, found.step + 3):
        kept.save(model.state(step), step, {}, (rank, step))
    kept._saver.wait()
    again = kept.find()
    exact = exact and again is not None and again.step == found.step + 2
    kept.close(ended_well=True)
    dist.barrier()
    (folder / f"seen-{rank}").write_text(
        json.dumps([found.step, exact, len(found.sent)])
    )


def local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local()


def world_of(
    work: Callable[..., None], trial: dict[str, Any], folder: Path, store: str
) -> list[int]:
    def begin(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
        )
        work(rank, trial, folder)

    return [fork(lambda rank=rank: begin(rank)) for rank in range(WORLD)]  # type: ignore[misc]


def killed_and_gone_on(trial: dict[str, Any], folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as meeting:
        pids = world_of(train, trial, folder, f"{meeting}/store")
        while not all((folder / f"kept-{rank}").exists() for rank in range(WORLD)):
            time.sleep(0.01)
        time.sleep(trial["instant"])
        for victims in (trial["victims"], range(WORLD)):
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)
            time.sleep(trial["later"])
        for pid in pids:
            os.waitpid(pid, 0)
    known = max(
        int((folder / f"kept-{rank}").read_text() or 0) for rank in range(WORLD)
    )
    for node in trial["lost"]:
        (gone,) = folder.glob(f"torch-smp-*/*-node{node}")
        shutil.rmtree(gone)
    with tempfile.TemporaryDirectory() as meeting:
        statuses = [
            os.waitpid(pid, 0)[1]
            for pid in world_of(go_on, trial, folder, f"{meeting}/store")
        ]
    if any(statuses):
        return {"statuses": statuses}
    seen = [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(WORLD)]
    left = [path.name for path in folder.glob("torch-smp-*/*")]
    (step,) = {found for found, _, _ in seen}
    return {
        "newer": step - known,
        "exact": all(exact for _, exact, _ in seen),
        "sent": seen[0][2],
        "left": left,
    }


def main() -> None:
    top, number, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    for trial_number in range(number):
        trial = {
            "seed": draw.randrange(1 << 30),
            "layout": LAYOUTS[trial_number % len(LAYOUTS)],
            "instant": draw.uniform(0, 0.5),
            "later": draw.uniform(0, 0.05),
            "victims": [draw.randrange(WORLD)]
            if draw.random() < 0.7
            else list(range(WORLD)),
            "lost": draw.choice(([], [0], [1])),
        }
        folder = top / str(trial_number)
        folder.mkdir(parents=True)
        print(json.dumps({**trial, **killed_and_gone_on(trial, folder)}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
