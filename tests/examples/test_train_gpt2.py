"""The main example as a user runs it: it learns, and what it saves is the model that
was trained."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, GPT2LMHeadModel

from examples.corpus import Corpus, TextData
from tests.harness import ROOT, free_port, going_on, run_script

SMALL = [
    "--vocab-size",
    "300",
    "--seq-len",
    "64",
    "--max-mb",
    "0.6",
    "--validation-blocks",
    "64",
]
STEPS = 45
FEW = 12
"""Steps of the normal run: what is written is complete, but nothing much has been
learned."""
SCRIPT = "examples/train_gpt2.py"


def cached(folder: Path) -> Corpus:
    [built] = [path for path in folder.iterdir() if path.is_dir()]
    return Corpus(built, json.loads((built / "facts.json").read_text()))


def check(
    out: Path, cache: Path, batch_size: int, ranks: int = 4, steps: int = STEPS
) -> dict[str, Any]:
    """What a finished run has to show; everything is recomputed here from the files
    alone."""
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert len(results["loss"]) == steps
    # The first loss is that of a model that knows nothing; the mean of ten steps takes
    # the noise of batches out.
    assert abs(results["loss"][0] - np.log(300)) < 0.1
    if steps == STEPS:
        assert np.mean(results["loss"][-10:]) < results["loss"][0] - 1
        # 0.86 where this was written; a model that ignores what came before cannot get
        # below 1.
        assert results["validation_perplexity"] < 0.93 * results["unigram_perplexity"]
    assert results["loss"][-1] < results["loss"][0]
    # torchmetrics adds logarithms up in float32.
    assert results["validation_perplexity"] == pytest.approx(
        np.exp(results["validation_loss"]), rel=1e-5
    )
    folder = out / "transformers"
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    blocks = TextData(
        cached(cache), 64, batch_size, ranks=ranks, validation_blocks=64
    ).validation_blocks
    with torch.no_grad():
        losses = [
            F.cross_entropy(
                model(block["input_ids"][None]).logits[0], block["targets"]
            ).item()
            for block in map(blocks.__getitem__, range(len(blocks)))
        ]
    # Float32 forwards of the ranks against float64: some 1e-6.
    assert abs(np.mean(losses) - results["validation_loss"]) <= 1e-5
    assert abs(results["plain_validation_loss"] - results["validation_loss"]) <= 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"])
        == "def f(x):\n    return x"
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "smp/samples_per_second" in (out / "metrics.csv").read_text()
    return results


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (2, FEW),
        *(pytest.param(ranks, STEPS, marks=pytest.mark.slow) for ranks in (2, 4)),
    ],
)
def test_ranks_train_a_model_that_plain_transformers_loads(
    ranks: int, steps: int, tmp_path: Path
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    batch = 16 // ranks
    # Importing takes longer than a few steps: the second rank does without.
    forked = ["-m", "tests.examples.forked_ranks"] if steps == FEW else []
    run = f"{SCRIPT} --ranks {ranks} --nodes 2 --accelerator cpu --shard-degree 2 --accumulate 2".split()
    run += ["--batch-size", str(batch), "--steps", str(steps), "--delayed-init"]
    done = run_script(
        [*forked, *run, *SMALL, "--cache-dir", cache, "--out", out],
        env={"MASTER_PORT": str(free_port())},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = check(out, cache, batch, ranks, steps)
    assert (
        f"perplexity {results['validation_perplexity']:.1f}; unigram baseline"
        in done.stdout
    )
    assert re.search(r"Difference +\S+ \(allowed 1e-05\): equal", done.stdout)
    assert re.search(
        r"Monitor: \S+ samples/s, .* MB sent to other nodes, \S+ MB inside the node",
        done.stdout,
    )
    for word in ("Warning", "Traceback"):
        assert word not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_both_shardings_over_the_same_batches(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    done = run_script(
        [
            SCRIPT,
            "--demo",
            *SMALL,
            "--steps",
            str(STEPS),
            "--cache-dir",
            cache,
            "--out",
            out,
        ],
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    four, two = (
        check(out / name, cache, batch)
        for name, batch in (("degree-4", 8), ("degree-2", 4))
    )
    assert (out / "plot.png").exists()
    # Another order of float32 sums; training lets the difference grow.
    np.testing.assert_allclose(four["loss"], two["loss"], atol=5e-3)
    # Degree 2 sends each gradient once between nodes; degree 4 also gathers parameters
    # there, twice for blocks.
    assert np.median(two["bytes_between_nodes"]) < np.median(
        four["bytes_between_nodes"]
    )


@pytest.mark.slow  # in the normal run: tests/lightning/test_endings.py
def test_ctrl_c_ends_all_ranks_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--demo", *SMALL, "--steps", "100000"]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--cache-dir", str(tmp_path), "--out", str(tmp_path / "out")],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "MASTER_PORT": str(free_port())},
            start_new_session=True,
        )
    family: list[psutil.Process] = []
    try:
        while "Epoch 0:" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        # A terminal sends it to every process of the foreground group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(240) == 130, log.read_text(errors="replace")
        assert not going_on([member.pid for member in family], str(tmp_path))
        text = log.read_text(errors="replace")
        assert "Interrupted." in text
        assert "Traceback" not in text
    finally:
        for member in [*family, process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module of this process, where its start would take longer than
    what is tested."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("train_gpt2")
    monkeypatch.setattr(module, "quiet", lambda: None)
    return module


def test_thirty_billion_parameters_are_planned_without_memory_for_them(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        example.main(["--model-config", "gpt2-30b", "--precision", "bf16-mixed"]) == 0
    )
    printed = capsys.readouterr().out
    assert "29.97 billion parameters on 8 x 8 ranks" in printed
    assert "(auto)" in printed


def test_bad_flags_say_what_to_type(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(["--ranks", "4", "--nodes", "3"])
    assert (
        "--ranks 4 cannot be dealt out to --nodes 3 evenly" in capsys.readouterr().err
    )
    assert (
        example.main(
            ["--data", str(tmp_path / "nothing"), "--cache-dir", str(tmp_path)]
        )
        == 2
    )
    assert "has no UTF-8 text" in capsys.readouterr().err
