"""Scripts that know nothing of torch-smp, under ``-m accelerate_smp.run``; and what the
monitor reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2LMHeadModel

from accelerate_smp.callbacks import SmpMonitorCallback
from tests.accelerate.trainers import make_trainer
from tests.harness import ROOT, run_ranks, run_script

SCRIPT = ROOT / "tests" / "accelerate" / "scripts" / "run_clm.py"


def flags(folder: Path, batch: int) -> list[str]:
    return [
        f"--output_dir={folder}",
        "--do_train",
        "--do_eval",
        f"--per_device_train_batch_size={batch}",
        "--per_device_eval_batch_size=4",
        "--num_train_epochs=2",
        "--logging_steps=1",
        "--save_steps=4",
        "--report_to=none",
        "--disable_tqdm=true",
        "--gradient_accumulation_steps=2",
    ]


def logged(folder: Path) -> list[dict[str, Any]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "grad_norm" in entry]


@pytest.mark.slow
def test_a_trainer_script_runs_unmodified(tmp_path: Path) -> None:
    """run_clm as Transformers' examples write it: losses and norms of one process with
    the stock Trainer, to 1e-6 + 2e-7 per step, and a model that from_pretrained
    loads."""
    alone = run_script([SCRIPT, *flags(tmp_path / "alone", 4), "--use_cpu"])
    assert alone.returncode == 0 and "TRAINER Trainer 1" in alone.stdout, alone.stderr[
        -3000:
    ]
    command = ["-m", "accelerate_smp.run", SCRIPT, *flags(tmp_path / "ranks", 1)]
    env = {"SMP_SHARD_DEGREE": "2", "SMP_RANKS_PER_NODE": "2"}
    together = run_script(command, nproc=4, env=env)
    assert together.returncode == 0 and "TRAINER SmpTrainer 4" in together.stdout, (
        together.stderr[-5000:]
    )
    expected, seen = logged(tmp_path / "alone"), logged(tmp_path / "ranks")
    assert len(seen) == len(expected) == 8
    for step, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        for what in ("loss", "grad_norm"):
            assert abs(ours[what] - theirs[what]) <= 1e-6 + 2e-7 * step, (
                f"{what} of step {step}"
            )
    evaluated = [
        json.loads((tmp_path / name / "eval_results.json").read_text())
        for name in ("alone", "ranks")
    ]
    assert evaluated[0]["eval_loss"] == pytest.approx(
        evaluated[1]["eval_loss"], abs=5e-6
    )
    GPT2LMHeadModel.from_pretrained(tmp_path / "ranks")


def monitored(
    folder: str, evaluate: bool
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """The log, and what the meter of this rank counted in steps and outside of them."""
    more = {"eval_strategy": "steps", "eval_steps": 2} if evaluate else {}
    trainer, _ = make_trainer(
        folder, 8, 2, {"shard_degree": 2}, logging_steps=1, **more
    )
    trainer.add_callback(SmpMonitorCallback(peak_tflops=1.0))
    trainer.train()
    meter = trainer.accelerator.parallel.meter
    return (
        [e for e in trainer.state.log_history if "grad_norm" in e],
        meter.totals(),
        meter.outside(),
    )


@pytest.mark.slow
def test_monitor_reports_the_jobs_figures(tmp_path: Path) -> None:
    """Bytes do not depend on evaluations in between, rates are of the whole job, all
    ranks log the same."""
    runs = [
        run_ranks(monitored, 4, str(tmp_path), each, ranks_per_node=2)
        for each in (False, True)
    ]
    for (_, alone, nothing), (_, between, outside) in zip(*runs, strict=True):
        assert alone == between
        assert sum(nothing.values()) == 0 < outside["all_gather/calls"]
    logs = [[log for log, _, _ in results] for results in runs]
    plain, evaluated = (results[0] for results in logs)
    assert len(plain) == 3
    for entry, other in zip(plain[1:], evaluated[1:], strict=True):
        assert entry["bytes_between_nodes"] == other["bytes_between_nodes"] > 0
        assert entry["bytes_inside_nodes"] == other["bytes_inside_nodes"] > 0
        assert entry["tokens_per_second"] == pytest.approx(
            9 * entry["samples_per_second"]
        )
        assert (
            entry["mfu"] == pytest.approx(entry["tflops_per_device"])
            and entry["mfu"] > 0
        )
    for results in logs:
        for run in results[1:]:
            sent = [
                [entry["bytes_between_nodes"] for entry in one]
                for one in (run, results[0])
            ]
            assert sent[0] == sent[1]
