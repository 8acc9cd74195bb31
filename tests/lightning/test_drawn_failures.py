"""Random failures of random runs: all ranks end, the texts name the rank that was
struck, nothing stays in memory, and the run goes on to one process's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import run_script


def conduct(folder: Path, seed: int, trials: int) -> None:
    done = run_script(
        ["-m", "tests.lightning.failing_trials", folder, str(trials), str(seed)],
        timeout=300.0 * trials,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == trials, done.stderr
    assert not [line for line in lines if line["wrong"]], lines


def test_a_run_that_fails_somewhere_ends_and_goes_on(tmp_path: Path) -> None:
    conduct(tmp_path, 504, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1080, 8))
def test_runs_that_fail_anywhere_end_and_go_on(seed: int, tmp_path: Path) -> None:
    conduct(tmp_path, seed, 8)
