"""The GPU benchmark of FP8 runs to its end, on a CPU that poses as a device with FP8 tensor cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import run_script


@pytest.mark.slow
def test_the_benchmark_for_gpus_can_be_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    run = run_script(["benchmarks/gpu_fp8.py", "--device", "cpu", "--tiny", "--out", str(tmp_path / "found.json")])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rehearsal"] and all(check["ok"] for check in found["correctness"])
    # fused casts in 2 x 3 x 4 kinds, nan in 2 formats, 2 x 3 products, 3 sizes in 2 steps
    assert len(found["correctness"]) == 24 + 2 + 6 + 6
    [layer], steps = found["layers"], found["steps"]
    assert all(isinstance(layer[kind], float) for kind in ("bfloat16", "native", "native, compiled"))
    assert [step["step"] for step in steps] == ["eager", "compiled"]
    assert all(isinstance(step[kind], float) for step in steps for kind in ("bfloat16", "native"))
    assert "times and goals mean nothing" in run.stdout


def test_a_cpu_is_not_measured() -> None:
    run = run_script(["benchmarks/gpu_fp8.py"])
    assert run.returncode == 2 and "nothing to measure here" in run.stderr
