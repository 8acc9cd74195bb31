"""Random failures of random programs of Trainer and Accelerate: all ranks end, the
texts name the rank that was struck, and the run goes on to one process's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import run_script


def conduct(folder: Path, seed: int, trials: int) -> None:
    done = run_script(
        ["-m", "tests.accelerate.failing_trials", folder, str(trials), str(seed)],
        timeout=300.0 * trials,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == trials, done.stderr
    assert not [line for line in lines if line["wrong"]], lines


@pytest.mark.slow
@pytest.mark.parametrize("seed", [44, *range(1000, 1080, 8)])
def test_programs_that_fail_anywhere_end_and_go_on(seed: int, tmp_path: Path) -> None:
    conduct(tmp_path, seed, 1 if seed < 1000 else 8)
