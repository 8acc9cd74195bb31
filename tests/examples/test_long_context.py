"""The long-context example: the same losses over 1, 2 and 4 ranks, less memory; and its plan on meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script

SCRIPT = ROOT / "examples" / "train_long_context.py"


@pytest.mark.slow
def test_losses_are_the_same_at_every_degree_and_memory_falls(tmp_path: Path) -> None:
    """1e-5: float32 sums in another order, over two steps. Memory: per-token tensors dominate at 1,024 tokens."""
    out = tmp_path / "seen.json"
    options = ["--length", "1024", "--steps", "2", "--out", out, "--cache-dir", tmp_path / "cache"]
    finished = run_script([SCRIPT, *options], env={"SMP_RANKS_PER_NODE": "2"}, timeout=290)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    one, two, four = json.loads(out.read_text())
    assert [seen["degree"] for seen in (one, two, four)] == [1, 2, 4]
    for seen in (two, four):
        assert seen["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    assert four["kept_bytes"] < 0.6 * two["kept_bytes"] < 0.6 * one["kept_bytes"]


def test_the_walk_through_of_smp_plans_on_meta() -> None:
    finished = run_script([SCRIPT, "--plan"], timeout=120)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "8.03 billion parameters" in finished.stdout and "2,048 of 16,384 tokens" in finished.stdout
