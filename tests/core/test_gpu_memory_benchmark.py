"""benchmarks/gpu_memory.py without a GPU: a dry run of all of it, and what it reads from traces of made-up devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_scaling_model import load
from tests.harness import run_script

benchmark: Any = load("gpu_memory")


@pytest.mark.slow
def test_a_dry_run_of_every_mode(tmp_path: Path) -> None:
    out = tmp_path / "results" / "tiny.json"
    ran = run_script(["benchmarks/gpu_memory.py", "--device", "cpu", "--tiny", "--out", str(out)], timeout=600)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout
    results = json.loads(out.read_text())
    assert results["device"] == "CPU (dry run)"
    for length in (64, 96):
        found = results[f"{length} tokens"]
        assert set(found["modes"]) == set(benchmark.MODES) and f"{length} tokens" in shown
        assert found["copy_ms"] > 0 and found["block_ms"] > 0 and found["goal"]["applies"] in (True, False)
        full = found["modes"]["full"]
        for name, mode in found["modes"].items():
            # What is kept changes no number, in whatever mode; nothing else is known about a CPU.
            assert mode["loss"] == full["loss"], name
            assert mode["step_seconds"] > 0 and mode["longer_than_full"] > -1
            assert (mode.get("host_pool_gib", 0) > 0) == ("offload," in name)
            assert mode["copies_out_ms"] == mode["copies_in_ms"] == 0
        kinds = {name: mode["peak_by_kind_gib"]["activations"] for name, mode in found["modes"].items()}
        assert kinds["full + offload, horizon 1"] < kinds["full + offload, horizon 4"] < kinds["full"] < kinds["none"]


def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": more}


OUT, IN = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
LARGE = {"bytes": 2**20}


def test_copies_beside_compute_are_read_from_the_trace() -> None:
    """Microseconds: kernels run in [0, 150) and [200, 300); copies out in [100, 300), in in [250, 350)."""
    events = [
        {"ph": "M", "name": "process_name"},
        event("kernel", "gemm", 0, 100),
        event("kernel", "flash_fwd", 80, 70),  # on another stream: counted once where they overlap
        event("kernel", "gemm", 200, 100),
        event("gpu_memcpy", OUT, 100, 200, **LARGE),
        event("gpu_memcpy", IN, 250, 100, **LARGE),
        # What is no compute: an annotation over everything, a launch on the CPU, communication, a fill.
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 0, 1000),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 150, 500),
        event("gpu_memset", "Memset (Device)", 150, 50),
        # What is no offloading: the loss, and a copy on the device.
        event("gpu_memcpy", OUT, 160, 5, bytes=4),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 150, 50, **LARGE),
    ]
    found = benchmark.beside_compute(events)
    assert found == {
        "copies_out_ms": 0.2,
        "copies_out_beside_compute": pytest.approx(150 / 200),
        "copies_in_ms": 0.1,
        "copies_in_beside_compute": pytest.approx(50 / 100),
    }


def test_serial_and_hidden_copies_are_told_apart() -> None:
    kernels = [event("kernel", "gemm", start, 90) for start in (0, 100, 200)]
    serial = [*kernels, event("gpu_memcpy", OUT, 90, 10, **LARGE), event("gpu_memcpy", IN, 190, 10, **LARGE)]
    hidden = [*kernels, event("gpu_memcpy", OUT, 110, 60, **LARGE), event("gpu_memcpy", IN, 210, 60, **LARGE)]
    for events, share in ((serial, 0.0), (hidden, 1.0)):
        found = benchmark.beside_compute(events)
        assert found["copies_out_beside_compute"] == found["copies_in_beside_compute"] == share
    assert benchmark.beside_compute(kernels)["copies_in_beside_compute"] is None, "there was none"


@pytest.mark.parametrize(
    ("copy", "second", "expected"),
    [
        (1.0, {"step_seconds": 1.04}, (True, True)),
        (1.0, {"step_seconds": 1.06}, (True, False)),
        (3.0, {"step_seconds": 1.01}, (False, None)),
        (1.0, {"out_of_memory": True}, (True, False)),
    ],
)
def test_the_goal(copy: float, second: dict[str, Any], expected: tuple[bool, bool | None]) -> None:
    shares = {"copies_out_beside_compute": 0.98, "copies_in_beside_compute": 0.91} if "step_seconds" in second else {}
    modes = {"full": {"step_seconds": 1.0}, "full + offload, horizon 2": {**second, **shares}}
    goal = benchmark.compared({"copy_ms": copy, "block_ms": 2.0, "modes": modes})
    assert (goal["applies"], goal["met"]) == expected
    assert goal["copies_beside_compute"] == (0.91 if shares else None)


def test_without_a_gpu_it_says_how_to_try_it(capsys: pytest.CaptureFixture[str]) -> None:
    if benchmark.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err
