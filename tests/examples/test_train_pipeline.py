"""The pipeline example: the same losses in stages, over shard and tensor ranks too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script

SCRIPT = ROOT / "examples" / "train_pipeline.py"


@pytest.mark.slow
def test_losses_are_the_same_in_stages_and_in_three_dimensions(tmp_path: Path) -> None:
    """1e-5: float32 sums in another order, over three steps."""
    losses = []
    for options in (
        ["--stages", "1", "--ranks", "1"],
        ["--ranks", "2", "--schedule", "interleaved:2"],
        [],
    ):
        out = tmp_path / "seen.json"
        command = [
            SCRIPT,
            *options,
            "--steps",
            "3",
            "--out",
            out,
            "--cache-dir",
            tmp_path / "cache",
        ]
        finished = run_script(command)
        assert finished.returncode == 0, (
            finished.stdout[-2000:] + finished.stderr[-4000:]
        )
        losses.append(json.loads(out.read_text()))
    one, two, three_dimensions = losses
    assert len(one) == 3 and one[-1] < one[0]
    assert two == pytest.approx(one, abs=1e-5) and three_dimensions == pytest.approx(
        one, abs=1e-5
    )
