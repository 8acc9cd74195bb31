"""Every example takes the memory flags and makes the same knobs of them; what they save
changes no loss."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_core.config import SmpConfig
from tests.harness import ROOT, run_script

EXAMPLES = sorted((ROOT / "examples").glob("train_*.py"))
FLAGS = [
    "--activation-checkpointing",
    "full",
    "--activation-offloading",
    "--activation-loading-horizon",
    "1",
]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_takes_the_flags(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # Dataclasses look themselves up there.
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    arguments = [*FLAGS, "--state-offload", "optimizer"]
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    read = module.read_flags
    flags = read(arguments) if read.__code__.co_argcount else read()
    assert SmpConfig.from_dict(module.memory_knobs(flags)) == SmpConfig(
        activations={"checkpoint": "full", "offload": True, "loading_horizon": 1},
        state_offload="optimizer",
    )


@pytest.mark.slow
def test_long_context_with_offloaded_inputs(tmp_path: Path) -> None:
    found = []
    for flags in ([], [*FLAGS, "--state-offload", "optimizer"]):
        out = tmp_path / f"{len(flags)}.json"
        options = [
            "--ranks",
            "2",
            "--context-parallel-degree",
            "2",
            "--length",
            "512",
            "--steps",
            "2",
            *flags,
        ]
        script = ROOT / "examples" / "train_long_context.py"
        done = run_script(
            [script, *options, "--out", out, "--cache-dir", tmp_path / "cache"]
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found.append(json.loads(out.read_text()))
    plain, saved = found
    # The first loss is to the last bit the same; before the second one another kernel
    # has stepped (fused, on the host).
    assert saved["losses"][0] == plain["losses"][0]
    assert saved["losses"][1] == pytest.approx(plain["losses"][1], abs=1e-5)
    assert saved["activation_bytes"] < 0.5 * plain["activation_bytes"]


@pytest.mark.slow
def test_fp8_with_recomputation(tmp_path: Path) -> None:
    curves = []
    for flags in ([], ["--activation-checkpointing", "full"]):
        out = tmp_path / str(len(flags))
        small = [
            "--steps",
            "6",
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
                out,
                "--cache-dir",
                tmp_path / "cache",
                *small,
                *flags,
            ]
        )
        assert done.returncode == 0, done.stderr
        curves.append(json.loads((out / "fp8.json").read_text())["loss"])
    assert curves[0] == curves[1]
