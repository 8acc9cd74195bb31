"""Tutorials' scripts print the same losses on one process and on ranks that pose as
nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script

BLOCK = re.compile(r"<!-- this runs -->\n\n```python\n(.*?\n)```", re.DOTALL)
# Sums of float32 in another order; printed are three digits or more.
TOLERANCE = 2e-3


def losses(script: Path, ranks: int | None) -> list[float]:
    """Run a script in its folder on so many ranks, two of which pose as a node."""
    environment = {
        "SMP_RANKS_PER_NODE": "2" if ranks else None,
        "PYTHONPATH": str(ROOT),
    }
    done = run_script([script], nproc=ranks, env=environment, cwd=script.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        float(found)
        for found in re.findall(
            r"^(?:\{'loss': '|loss )([0-9.]+)", done.stdout, re.MULTILINE
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block", "ranks"),
    [
        ("lightning", 0, 4),
        ("hugging-face", 0, 4),
        ("hugging-face", 1, 4),
        ("from-smp", 0, 2),
    ],
)
def test_a_script_prints_one_processs_losses(
    page: str, block: int, ranks: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / f"tutorial-{page}.md").read_text(encoding="utf-8")
    found = {}
    for number in (None, ranks):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(BLOCK.findall(text)[block])
        found[number] = losses(folder / "train.py", number)
    assert found[None] and found[ranks] == pytest.approx(found[None], abs=TOLERANCE)
    shown = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    for loss in found[ranks]:
        assert min(abs(loss - number) for number in shown) < TOLERANCE, (
            f"the page does not show {loss}"
        )
