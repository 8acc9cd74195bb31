"""The examples of the Accelerate face run as the README says, and what they save is
what they promise."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from smp_core.checkpoint import is_checkpoint
from tests.harness import ROOT, run_script

LAUNCH = [
    "-m",
    "accelerate_smp.cli",
    "launch",
    "--config_file",
    ROOT / "examples/accelerate/four_ranks_cpu.yaml",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "state", "model"),
    [
        ("train_accelerate", "state", "model"),
        ("train_hf_trainer", "checkpoint-16/smp_state", "final"),
    ],
)
def test_example_learns_and_saves(
    tmp_path: Path, name: str, state: str, model: str
) -> None:
    out = tmp_path / "out"
    options = ["--steps", "16", "--out", out, "--cache-dir", tmp_path / "cache"]
    script = ROOT / "examples" / f"{name}.py"
    finished = run_script([*LAUNCH, script, *options], env={"SMP_RANKS_PER_NODE": "2"})
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    perplexity = [
        float(x)
        for x in re.findall(
            r"validation perplexity [^;]*?([\d.]+)(?: after)?;", finished.stdout
        )
    ]
    loaded = GPT2LMHeadModel.from_pretrained(out / model)
    # One that has learned nothing has the vocabulary's size as its perplexity.
    assert len(perplexity) == 1 and 1 < perplexity[0] < 0.8 * loaded.config.vocab_size
    assert math.isfinite(perplexity[0]) and is_checkpoint(out / state)


@pytest.mark.slow
def test_examples_of_this_face_do_without_lightning_and_import_in_silence() -> None:
    """torchao and torch speak through loggers, by the same names in every example."""
    code = (
        "import sys; sys.path.insert(0, 'examples'); sys.modules['lightning'] = None; "
        "import train_accelerate, train_hf_trainer"
    )
    finished = run_script(["-W", "ignore", "-c", code])
    assert finished.returncode == 0 and finished.stderr == "", finished.stderr
