"""The example of experts: the same losses with experts gathered, and dealt to 2 and 4
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script

SCRIPT = ROOT / "examples" / "train_moe.py"


@pytest.mark.slow
def test_losses_are_the_same_at_every_degree(tmp_path: Path) -> None:
    """1e-5: float32 sums in another order, over three steps."""
    out = tmp_path / "seen.json"
    options = [
        "--length",
        "64",
        "--steps",
        "3",
        "--out",
        out,
        "--cache-dir",
        tmp_path / "cache",
    ]
    finished = run_script([SCRIPT, *options])
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    one, two, four = json.loads(out.read_text())
    assert [seen["degree"] for seen in (one, two, four)] == [1, 2, 4]
    assert one["losses"][-1] < one["losses"][0] and one["bytes_of_tokens"] == 0
    for seen in (two, four):
        assert seen["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert seen["bytes_of_tokens"] > 0 and seen["bytes"] < one["bytes"]
