"""The FP8 example as a user runs it: both runs learn, and end at the same loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import run_script


@pytest.mark.slow
def test_both_curves_fall_together(tmp_path: Path) -> None:
    flags = [
        "--steps",
        "40",
        "--vocab-size",
        "300",
        "--max-mb",
        "0.3",
        "--width",
        "32",
        "--seq-len",
        "32",
    ]
    done = run_script(
        [
            "examples/train_fp8.py",
            "--out",
            tmp_path,
            "--cache-dir",
            tmp_path / "cache",
            *flags,
        ]
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "fp8.json").read_text())
    for losses in report["loss"].values():
        assert len(losses) == 40 and losses[-1] < losses[0] - 0.5
    last = report["last_20"]
    assert report["loss"]["FP8"] != report["loss"]["bfloat16"]
    assert abs(last["FP8"] - last["bfloat16"]) < 5e-3 * last["bfloat16"]
    assert "fp8: 8 weights in 8 Float8Conv1D" in done.stdout
    assert (tmp_path / "fp8.png").read_bytes().startswith(b"\x89PNG")
