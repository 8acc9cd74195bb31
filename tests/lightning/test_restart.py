"""A run under ``torchrun --max-restarts`` whose ranks are killed goes on by itself,
with the numbers of a run that was left alone: to the last bit on as many ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.harness import ROOT, restarts, run_ranks, run_script
from tests.lightning.restarting import noted, train
from tests.lightning.running import worst


def run_and_compare(folder: Path, plan: dict[str, Any]) -> None:
    """Let torchrun start the run as often as it takes; compare with a run that nobody
    is killed in."""
    expected = run_ranks(
        train, 2, str(folder / "plain"), {**plan, "kills": []}, timeout=900.0
    )[0]
    arguments = [
        "-m",
        "tests.lightning.restarting",
        str(folder / "killed"),
        json.dumps(plan),
    ]
    done = run_script(
        arguments, nproc=2, env=restarts(len(plan["kills"])), timeout=1500.0
    )
    assert done.returncode == 0, done.stderr
    killed = sorted(path.name for path in (folder / "killed").glob("killed-*"))
    assert len(killed) == len(plan["kills"]), killed
    assert noted(folder / "killed", 2) == noted(folder / "plain", 2), (
        "a batch had another loss, or was left out"
    )
    end = torch.load(folder / "killed" / "end.pt", weights_only=False)
    assert end["steps"] == expected.extra["steps"] == plan["epochs"] * plan["batches"]
    for name, value in expected.weights.items():
        assert torch.equal(end["weights"][name], value), name


# Three launches; in the normal run: tests/lightning/test_resume.py and
# test_place_in_data.py.
@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on_by_itself(tmp_path: Path) -> None:
    plan = {
        "epochs": 1,
        "batches": 5,
        "every": 2,
        "checkpoint": "async",
        "kills": [[3, 1, "step"]],
    }
    run_and_compare(tmp_path, plan)


# In 300 steps: either rank or both, before the first checkpoint, in a save, beside one,
# at an epoch's end.
KILLS = [
    *(
        [4, 0, "step"],
        [25, 1, "save"],
        [61, 0, "optimizer"],
        [61, 1, "step"],
        [99, 0, "step"],
        [120, 0, "save"],
    ),
    *([141, 1, "optimizer"], [200, 1, "step"], [255, 0, "save"], [298, 1, "step"]),
]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("checkpoint", ["sharded", "async"])
def test_ten_kills_in_300_steps(checkpoint: str, tmp_path: Path) -> None:
    plan = {
        "epochs": 3,
        "batches": 100,
        "every": 10,
        "checkpoint": checkpoint,
        "kills": KILLS,
    }
    run_and_compare(tmp_path, plan)


class Agents:
    """Two torchruns of one rank each, as on two nodes, whose meeting place is on a
    third."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder, self.plan = folder, plan

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
        ]
        command += [
            "--max-restarts=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.store.port}",
        ]
        command += [
            "--rdzv-id=1",
            "--rdzv-conf=last_call_timeout=20",
            "--local-addr=127.0.0.1",
        ]
        command += [
            "-m",
            "tests.lightning.restarting",
            str(self.folder),
            json.dumps(self.plan),
        ]
        with open(self.folder.parent / f"said-{number}", "wb") as said:
            environment = {**os.environ, **restarts(2)}
            return subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def said(self) -> str:
        return "\n".join(
            path.read_text() for path in sorted(self.folder.parent.glob("said-*"))
        )


def per_step(folder: Path, world: int) -> dict[int, float]:
    """The mean loss of each optimizer step over the batches of all ranks."""
    losses: dict[int, list[float]] = {}
    for batches in noted(folder, world).values():
        for place, values in batches.items():
            assert len(values) == 1, f"a batch had other losses: {place} {values}"
            losses.setdefault(int(place.split()[0]), []).append(
                float.fromhex(values.copy().pop())
            )
    return {step: sum(values) / len(values) for step, values in losses.items()}


@pytest.mark.slow
def test_a_lost_node_leaves_the_others_with_another_degree_and_the_same_samples_in_a_step(
    tmp_path: Path,
) -> None:
    """The node that is left shards over one rank and accumulates two batches; in
    float64, to sums in another order."""
    plan = {
        "epochs": 1,
        "batches": 12,
        "every": 4,
        "checkpoint": "sharded",
        "kills": [[6, 1, "node"]],
    }
    plan |= {"draws": False, "precision": "64-true"}
    expected = run_ranks(train, 2, str(tmp_path / "plain"), {**plan, "kills": []})[0]
    agents = Agents(tmp_path / "killed", plan)
    (tmp_path / "killed").mkdir()
    both = [agents.start(number) for number in range(2)]
    try:
        for each in both:
            each.wait(500)
    finally:
        for each in both:
            each.kill()
    assert sorted(each.returncode for each in both) == [-signal.SIGKILL, 0], (
        agents.said()
    )
    alone, together = per_step(tmp_path / "killed", 1), per_step(tmp_path / "killed", 2)
    plain = per_step(tmp_path / "plain", 2)
    assert set(together) == set(range(6)) and set(alone) == set(range(4, 12)), (
        agents.said()
    )
    assert plain.keys() == together.keys() | alone.keys()
    for seen in (together, alone):
        assert all(abs(loss - plain[step]) <= 1e-12 for step, loss in seen.items())
    end = torch.load(tmp_path / "killed" / "end.pt", weights_only=False)
    assert end["steps"] == expected.extra["steps"] == 12
    assert worst(end["weights"], expected.weights)[0] <= 1e-12
