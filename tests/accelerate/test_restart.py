"""Runs of Trainer and of a bare loop under ``torchrun --max-restarts`` go on by
themselves when ranks are killed, with the losses of a run that was left alone, to the
last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT, restarts, run_script
from tests.lightning.restarting import noted

SCRIPT = ROOT / "tests" / "accelerate" / "scripts" / "restarting.py"
KILLS = [
    [2, 0],
    [25, 1],
    [61, 0],
    [61, 1],
    [99, 0],
    [120, 0],
    [141, 1],
    [200, 1],
    [255, 0],
    [298, 1],
]


IN_MEMORY = {"memory_every_n_steps": 3}


def run(
    kind: str, folder: Path, plan: dict[str, Any]
) -> dict[int, dict[str, set[str]]]:
    folder.mkdir()
    (memory := folder / "memory").mkdir()
    environment = {
        **restarts(len(plan["kills"])),
        "PYTHONPATH": str(ROOT),
        "SMP_MEMORY_FOLDER": str(memory),
    }
    done = run_script(
        [SCRIPT, kind, folder, json.dumps(plan)],
        nproc=2,
        env=environment,
        timeout=1500.0,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.glob("ended-*")} == {"ended-0", "ended-1"}, (
        done.stderr
    )
    assert list(memory.glob("torch-smp-*/*")) == [], (
        "nothing stays after a run that ended well"
    )
    assert len(list(folder.glob("killed-*"))) == len(plan["kills"])
    return noted(folder, 2)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    [
        ("trainer", "async"),
        ("loop", "sharded"),
        ("trainer", IN_MEMORY),
        ("loop", IN_MEMORY),
    ],
)
def test_ten_kills_in_300_steps(
    kind: str, checkpoint: str | dict[str, Any], tmp_path: Path
) -> None:
    plan = {"steps": 300, "every": 10, "checkpoint": checkpoint, "kills": KILLS}
    expected = run(kind, tmp_path / "plain", {**plan, "kills": []})
    assert len(expected[0]) == 300
    assert run(kind, tmp_path / "killed", plan) == expected
