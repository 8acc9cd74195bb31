"""SIGKILL of one rank or of all, at any instant of a save: the old checkpoint loads,
exact, or the new one does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from smp_core.checkpoint.folders.file_system import UNNAMED_PREFIX
from tests.harness import run_script


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "trials",
    [pytest.param(1, id="sample"), pytest.param(24, marks=pytest.mark.slow, id="full")],
)
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(
    tmp_path: Path, trials: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    module = [
        "-m",
        "tests.core.checkpoint.kill_trials",
        str(tmp_path),
        "--trials",
        str(trials),
        "--seed",
        str(seed),
    ]
    done = run_script(module, timeout=600 + 60 * trials, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, (
        f"seed {seed}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    outcomes = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert len(outcomes) == 4 * trials
    for outcome in outcomes:
        print(outcome)
        if outcome["fresh"]:
            assert outcome["found"] == "2" or outcome["found"].startswith("error: "), (
                f"seed {seed}: {outcome}"
            )
        else:
            assert outcome["found"] in ("1", "2"), f"seed {seed}: {outcome}"
        # A folder that was made and not locked yet goes when it is old: nobody can tell
        # whose it is.
        left = [
            name
            for name in outcome["after_next_save"]
            if not name.startswith(UNNAMED_PREFIX)
        ]
        assert outcome["next_save"] == "2" and left == [], f"seed {seed}: {outcome}"
        assert len(outcome["after_next_save"]) <= 1, f"seed {seed}: {outcome}"
