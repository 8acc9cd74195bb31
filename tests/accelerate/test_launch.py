"""The launchers: one YAML, the same losses whoever starts the script, and errors that say what to type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from accelerate_smp import launch as launching
from accelerate_smp.cli import app
from accelerate_smp.launch import LaunchFile, for_accelerate
from smp_core.config import SmpConfig
from tests.harness import ROOT, run_script

EXAMPLES = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
SCRIPT = ROOT / "tests" / "accelerate" / "scripts" / "bare_loop.py"
CPU = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True}


def write(folder: Path, **document: Any) -> Path:
    path = folder / "smp.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path, tmp_path: Path) -> None:
    """Accelerate's own reader takes their part; every knob exists; degrees fit the processes."""
    from accelerate.commands.config.config_args import ClusterConfig

    file = LaunchFile.read(path)
    processes = int(file.accelerate["num_processes"])
    part = tmp_path / "part.yaml"
    part.write_text(yaml.safe_dump(for_accelerate(file.accelerate, processes, on_cpu=False)))
    ClusterConfig.from_yaml_file(part)
    file.check(processes)


def test_the_settings_of_the_issue_are_shipped() -> None:
    assert {path.stem for path in EXAMPLES} >= {"one_node", "two_nodes_two_hop", "gpt2_30b_128", "long_context", "fp8"}
    large = LaunchFile.read(ROOT / "examples" / "accelerate" / "gpt2_30b_128.yaml")
    assert large.smp.shard_degree == 128 and large.accelerate["num_processes"] == 32 * 8


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**CPU}, ["no `smp_config:` section", "accelerate launch"]),
        ({**CPU, "smp_config": {"shard_degre": 2}}, ["shard_degre", "shard_degree"]),
        ({**CPU, "smp_config": {"shard_degree": 3}}, ["shard_degree=3", "num_processes=4", "1, 2, 4"]),
        ({**CPU, "smp_config": {"tensor_parallel_degree": 2}}, ["tensor_parallel_degree=2", "not built yet"]),
        (
            {**CPU, "smp_config": {}, "parallelism_config": {"dp_shard_size": 3}},
            ["dp_shard_size=3 makes 3", "num_processes=4"],
        ),
        ({**CPU, "smp_config": {}, "parallelism_config": {"dp_shards": 2}}, ["dp_shards", "dp_shard_size"]),
        ({**CPU, "smp_config": {}, "mixed_precision": "fp8"}, ["mixed_precision: fp8", "bf16"]),
    ],
    ids=["no section", "unknown key", "odd degree", "not built", "product", "unknown size", "fp8"],
)
def test_bad_files_are_refused_before_a_worker_starts(
    tmp_path: Path, document: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "launch_command", lambda args: pytest.fail("workers were started"))
    result = CliRunner().invoke(app, ["launch", "--config_file", str(write(tmp_path, **document)), "train.py"])
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


def test_launching_without_a_file_says_what_to_type() -> None:
    result = CliRunner().invoke(app, ["launch", "train.py"])
    assert result.exit_code == 2 and "--config_file" in result.stderr and "accelerate-smp config" in result.stderr


def test_config_asks_and_writes_a_file_that_launches(tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path)], input="1\ny\n4\nno\n2\n")
    assert result.exit_code == 0, result.output
    file = LaunchFile.read(path)
    file.check(4)
    assert file.smp == SmpConfig(shard_degree=2) and file.accelerate["num_processes"] == 4
    again = CliRunner().invoke(app, ["config", "--config-file", str(path)])
    assert again.exit_code == 2 and "--overwrite" in again.stderr


def test_env_shows_versions_and_knobs(tmp_path: Path) -> None:
    path = write(tmp_path, smp_config={"shard_degree": "world"})
    result = CliRunner().invoke(app, ["env", "--config-file", str(path)], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for word in ("accelerate:", "torch:", "shard_degree", "world"):
        assert word in result.stdout


def results(finished: Any) -> dict[str, Any]:
    lines = [line for line in finished.stdout.splitlines() if "RESULT" in line]
    assert finished.returncode == 0 and len(lines) == 1, finished.stdout[-3000:] + finished.stderr[-6000:]
    return json.loads(lines[0].partition("RESULT ")[2])


def starts(folder: Path) -> dict[str, Any]:
    """How to start the script with each launcher: arguments of run_script."""
    path = write(folder, **CPU, mixed_precision="no", smp_config={"shard_degree": 2})
    plain = folder / "accelerate.yaml"
    plain.write_text(yaml.safe_dump({**CPU, "distributed_type": "MULTI_GPU", "main_process_port": 0}))
    posing = {"SMP_RANKS_PER_NODE": "2"}
    knobs = {**posing, "SMP_SHARD_DEGREE": "2"}
    module = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", plain]
    return {
        "accelerate-smp launch": {
            "args": ["-m", "accelerate_smp.cli", "launch", "--config_file", path, SCRIPT, "--smp"],
            "env": posing,
        },
        "torchrun": {"args": [SCRIPT, "--smp"], "nproc": 4, "env": knobs},
        "accelerate launch": {"args": [*module, "-m", "accelerate_smp.run", SCRIPT], "env": knobs},
    }


def check_launcher(folder: Path, name: str) -> None:
    alone = results(run_script([SCRIPT, "--batch-size", "8"]))
    assert alone["ranks"] == 1
    seen = results(run_script(**starts(folder)[name]))
    assert seen["ranks"] == 4 and seen["sharded"]
    # float64: sums in another order.
    assert seen["losses"] == pytest.approx(alone["losses"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun", "accelerate-smp launch", "accelerate launch"])
def test_every_launcher_trains_like_one_process(tmp_path: Path, name: str) -> None:
    check_launcher(tmp_path, name)
