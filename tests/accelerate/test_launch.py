"""The launchers: one YAML, the same losses whoever starts the script, and errors that
say what to type."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from typer.testing import CliRunner

from accelerate_smp import launch as launching
from accelerate_smp.cli import app
from accelerate_smp.launch import LaunchFile, for_accelerate
from smp_core.config import SmpConfig
from tests.harness import ROOT, free_port, run_script

EXAMPLES = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
SCRIPT = ROOT / "tests" / "accelerate" / "scripts" / "bare_loop.py"
CPU = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "num_processes": 4,
    "use_cpu": True,
}


def write(folder: Path, **document: Any) -> Path:
    path = folder / "smp.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path, tmp_path: Path) -> None:
    """Accelerate's own reader takes their part; every knob exists; degrees fit the
    processes."""
    from accelerate.commands.config.config_args import ClusterConfig

    file = LaunchFile.read(path)
    processes = int(file.accelerate["num_processes"])
    part = tmp_path / "part.yaml"
    part.write_text(
        yaml.safe_dump(for_accelerate(file.accelerate, processes, on_cpu=False))
    )
    ClusterConfig.from_yaml_file(part)
    file.check(processes)


def test_the_settings_of_the_issue_are_shipped() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "one_node",
        "two_nodes_two_hop",
        "gpt2_30b_128",
        "long_context",
        "fp8",
    }
    large = LaunchFile.read(ROOT / "examples" / "accelerate" / "gpt2_30b_128.yaml")
    assert large.smp.shard_degree == 128 and large.accelerate["num_processes"] == 32 * 8


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**CPU}, ["no `smp_config:` section", "accelerate launch"]),
        ({**CPU, "smp_config": {"shard_degre": 2}}, ["shard_degre", "shard_degree"]),
        (
            {**CPU, "smp_config": {"shard_degree": 3}},
            ["shard_degree=3", "num_processes=4", "1, 2, 4"],
        ),
        (
            {**CPU, "smp_config": {}, "parallelism_config": {"dp_shard_size": 3}},
            ["dp_shard_size=3 makes 3", "num_processes=4"],
        ),
        (
            {**CPU, "smp_config": {}, "parallelism_config": {"dp_shards": 2}},
            ["dp_shards", "dp_shard_size"],
        ),
        (
            {**CPU, "smp_config": {}, "mixed_precision": "fp8"},
            ["mixed_precision: fp8", "bf16"],
        ),
        (
            {**CPU, "smp_config": {}, "num_proceses": 2},
            ["unknown key 'num_proceses'", "'num_processes'"],
        ),
        (
            {**CPU, "smp_config": {}, "shard_degree": 2},
            ["shard_degree is a knob", "under `smp_config:`"],
        ),
        (
            {**CPU, "smp_config": {}, "num_processes": "four"},
            ["num_processes='four'", "an integer of at least 1"],
        ),
        (
            {**CPU, "smp_config": {}, "num_processes": 0},
            ["num_processes=0", "an integer of at least 1"],
        ),
        (
            {**CPU, "smp_config": {}, "mixed_precision": "foo"},
            ["mixed_precision='foo'", "'no', 'bf16'"],
        ),
        (
            {**CPU, "smp_config": {}, "use_cpu": "maybe"},
            ["use_cpu='maybe'", "true, false"],
        ),
        (
            {**CPU, "smp_config": {}, "num_machines": 2, "machine_rank": 2},
            ["machine_rank=2", "allowed: 0, 1"],
        ),
        (
            {**CPU, "smp_config": {}, "distributed_type": "FSDP"},
            ["fsdp_version=1", "write fsdp_version: 2"],
        ),
        (
            {**CPU, "smp_config": {}, "fsdp_config": {"fsdp_version": 1}},
            ["fsdp_version=1", "write fsdp_version: 2"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_files_are_refused_before_a_worker_starts(
    tmp_path: Path,
    document: dict[str, Any],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        launching, "launch_command", lambda args: pytest.fail("workers were started")
    )
    result = CliRunner().invoke(
        app, ["launch", "--config_file", str(write(tmp_path, **document)), str(SCRIPT)]
    )
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


# Every key of Accelerate's YAML: honoured, or refused with these values.
HONOURED = {
    *(
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
    ),
    *(
        "machine_rank",
        "num_machines",
        "gpu_ids",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
    ),
    *(
        "same_network",
        "enable_cpu_affinity",
        "fp8_config",
        "fsdp_config",
        "parallelism_config",
        "dynamo_config",
    ),
}
REFUSED: list[tuple[str, Any, str]] = [
    ("compute_environment", "AMAZON_SAGEMAKER", "LOCAL_MACHINE"),
    *(
        ("distributed_type", engine, "MULTI_GPU")
        for engine in ("DEEPSPEED", "MEGATRON_LM", "XLA", "MULTI_GPUS")
    ),
    ("deepspeed_config", {"zero_stage": 3}, "smp_config"),
    ("megatron_lm_config", {"megatron_lm_tp_degree": 2}, "smp_config"),
    ("mpirun_config", {"mpirun_hostfile": "hosts"}, "torchrun"),
    ("main_training_function", "train", "leave it out"),
    ("ipex_config", {"ipex": True}, "leave it out"),
    ("downcast_bf16", True, "bf16"),
    ("tpu_name", "pod", "leave it out"),
    ("tpu_zone", "here", "leave it out"),
    ("tpu_use_cluster", True, "leave it out"),
    ("tpu_use_sudo", True, "leave it out"),
    ("tpu_vm", ["a"], "leave it out"),
    ("tpu_env", ["A=1"], "leave it out"),
    ("command_file", "commands.sh", "leave it out"),
    ("commands", ["ls"], "leave it out"),
    ("fsdp_config", {"fsdp_version": 2}, "distributed_type: FSDP"),
    ("dynamo_config", {"dynamo_bakend": "inductor"}, "dynamo_backend"),
]


def test_every_key_of_accelerates_file_is_honoured_or_refused(tmp_path: Path) -> None:
    refused = {key for key, _, _ in REFUSED}
    assert {
        field.name for field in dataclasses.fields(ClusterConfig)
    } <= HONOURED | refused
    for key, value, word in REFUSED:
        path = write(tmp_path, **{**CPU, "smp_config": {}, key: value})
        with pytest.raises(ValueError, match=key) as error:
            LaunchFile.read(path)
        assert word in str(error.value), key
    fsdp = {**CPU, "smp_config": {}, "distributed_type": "FSDP"}
    for key, word in (
        ("fsdp_reshard_after_foward", "'fsdp_reshard_after_forward'"),
        ("fsdp_backward_prefetch", "smp_config"),
        ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
    ):
        path = write(
            tmp_path, **fsdp, fsdp_config={"fsdp_version": 2, key: "HYBRID_SHARD"}
        )
        with pytest.raises(ValueError, match=key) as error:
            LaunchFile.read(path)
        assert word in str(error.value), key
    # What `accelerate config` writes for everybody.
    always = {
        "downcast_bf16": "no",
        "tpu_env": [],
        "tpu_use_cluster": False,
        "main_training_function": "main",
    }
    LaunchFile.read(
        write(tmp_path, **{**CPU, **always, "smp_config": {}, "rdzv_backend": "static"})
    )


@pytest.mark.parametrize(
    "flag",
    ["--use_deepspeed", "--use_megatron_lm", "--tpu", "--parallelism_config_cp_size=2"],
)
def test_flags_of_other_engines_are_refused(flag: str, tmp_path: Path) -> None:
    path = write(tmp_path, **CPU, smp_config={})
    with pytest.raises(ValueError, match=flag.partition("=")[0]):
        launching.launch(["--config_file", str(path), flag, str(SCRIPT)])


@pytest.mark.parametrize("module", [False, True])
def test_a_launched_script_gets_ours_for_accelerates_own(
    module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launching, "launch_command", started.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    script = ["-m", "json.tool"] if module else [str(SCRIPT)]
    launching.launch(
        [
            "--config_file",
            str(write(tmp_path, **CPU, smp_config={})),
            *script,
            "--lr",
            "1",
        ]
    )
    assert started[0].module and started[0].training_script == "accelerate_smp.run"
    assert started[0].training_script_args == [*script, "--lr", "1"]


def test_a_variable_wins_over_a_launched_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "launch_command", lambda args: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "SMP_FP8": "e4m3"})
    path = write(tmp_path, **CPU, mixed_precision="bf16", smp_config={"fp8": "hybrid"})
    launching.launch(["--config_file", str(path), str(SCRIPT)])
    assert os.environ["SMP_FP8"] == "e4m3"


def test_a_script_that_is_not_there_starts_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launching, "launch_command", lambda args: pytest.fail("workers were started")
    )
    path = write(tmp_path, **CPU, smp_config={})
    result = CliRunner().invoke(
        app, ["launch", "--config_file", str(path), str(tmp_path / "trian.py")]
    )
    assert result.exit_code == 2 and "trian.py: no such file" in result.stderr


def test_no_without_quotes_is_a_precision(tmp_path: Path) -> None:
    """YAML reads it as false."""
    assert (
        LaunchFile.read(
            write(tmp_path, **CPU, smp_config={}, mixed_precision=False)
        ).accelerate["mixed_precision"]
        == "no"
    )


@pytest.mark.parametrize("by_signal", [False, True], ids=["error", "signal"])
def test_a_worker_that_fails_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    """Its own traceback has been printed by then; the launcher's, of torchrun or of a
    single process, is not."""
    code = -9 if by_signal else 3
    failure = ProcessFailure(local_rank=1, pid=17, exitcode=code, error_file="<N/A>")
    errors = {
        "rank 1": ChildFailedError("train.py", {1: failure}),
        "the script": CalledProcessError(code, "train.py"),
    }
    how = "was ended by SIGKILL" if by_signal else "ended with exit status 3"
    path = write(tmp_path, **CPU, mixed_precision="no", smp_config={})
    for who, error in errors.items():
        monkeypatch.setattr(launching, "launch_command", mock.Mock(side_effect=error))
        with mock.patch.dict(os.environ):
            result = CliRunner().invoke(
                app, ["launch", "--config_file", str(path), str(SCRIPT)]
            )
        assert result.stderr == f"accelerate-smp: {who} {how}; its output is above\n"
        assert result.exit_code == (137 if by_signal else 3)


def test_launching_without_a_file_says_what_to_type() -> None:
    result = CliRunner().invoke(app, ["launch", "train.py"])
    assert (
        result.exit_code == 2
        and "--config_file" in result.stderr
        and "accelerate-smp config" in result.stderr
    )


def test_config_asks_and_writes_a_file_that_launches(tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    result = CliRunner().invoke(
        app, ["config", "--config-file", str(path)], input="1\ny\n4\nno\n2\n"
    )
    assert result.exit_code == 0, result.output
    file = LaunchFile.read(path)
    file.check(4)
    assert (
        file.smp == SmpConfig(shard_degree=2) and file.accelerate["num_processes"] == 4
    )
    again = CliRunner().invoke(app, ["config", "--config-file", str(path)])
    assert again.exit_code == 2 and "--overwrite" in again.stderr


def test_config_asks_again_until_an_answer_is_one(tmp_path: Path) -> None:
    """A wrong answer costs that answer, not all of them."""
    path = tmp_path / "made.yaml"
    typed = [
        "0",
        "many",
        "2",
        "y",
        "0",
        "4",
        "2",
        "1",
        "host",
        "0",
        "99999",
        "29500",
        "foo",
        "fp16",
        "bf16",
        "3",
        "4",
    ]
    result = CliRunner().invoke(
        app, ["config", "--config_file", str(path)], input="\n".join(typed) + "\n"
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("Error: answer=") == 9
    file = LaunchFile.read(path)
    file.check(8)
    found = file.accelerate
    assert (found["num_machines"], found["num_processes"], found["machine_rank"]) == (
        2,
        8,
        1,
    )
    assert (
        found["main_process_port"],
        found["mixed_precision"],
        file.smp.shard_degree,
    ) == (29500, "bf16", 4)


@pytest.mark.parametrize("spelling", ["--config_file", "--config-file"])
def test_env_shows_versions_and_knobs(tmp_path: Path, spelling: str) -> None:
    path = write(tmp_path, smp_config={"shard_degree": "world"})
    result = CliRunner().invoke(
        app, ["env", spelling, str(path)], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0
    for word in ("accelerate:", "torch:", "shard_degree", "world"):
        assert word in result.stdout


def results(finished: Any) -> dict[str, Any]:
    lines = [line for line in finished.stdout.splitlines() if "RESULT" in line]
    assert finished.returncode == 0 and len(lines) == 1, (
        finished.stdout[-3000:] + finished.stderr[-6000:]
    )
    return json.loads(lines[0].partition("RESULT ")[2])


def starts(folder: Path) -> dict[str, Any]:
    """How to start the script with each launcher: arguments of run_script."""
    path = write(folder, **CPU, mixed_precision="no", smp_config={"shard_degree": 2})
    plain = folder / "accelerate.yaml"
    plain.write_text(
        yaml.safe_dump({**CPU, "distributed_type": "MULTI_GPU", "main_process_port": 0})
    )
    posing = {"SMP_RANKS_PER_NODE": "2"}
    knobs = {**posing, "SMP_SHARD_DEGREE": "2"}
    module = [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        plain,
    ]
    return {
        "accelerate-smp launch": {
            "args": [
                "-m",
                "accelerate_smp.cli",
                "launch",
                "--config_file",
                path,
                SCRIPT,
                "--smp",
            ],
            "env": posing,
        },
        "torchrun": {"args": [SCRIPT, "--smp"], "nproc": 4, "env": knobs},
        "accelerate launch": {
            "args": [*module, "-m", "accelerate_smp.run", SCRIPT],
            "env": knobs,
        },
    }


def check_launcher(folder: Path, name: str) -> None:
    alone = results(run_script([SCRIPT, "--batch-size", "8"]))
    assert alone["ranks"] == 1
    seen = results(run_script(**starts(folder)[name]))
    assert seen["ranks"] == 4 and seen["sharded"]
    # float64: sums in another order.
    assert seen["losses"] == pytest.approx(alone["losses"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torchrun", "accelerate-smp launch", "accelerate launch"]
)
def test_every_launcher_trains_like_one_process(tmp_path: Path, name: str) -> None:
    check_launcher(tmp_path, name)


ALONE = """
import sys
from accelerate_smp import SmpAccelerator

if sys.argv[1] == "late":
    from transformers import TrainingArguments

    TrainingArguments("out", use_cpu=True).device
accelerator = SmpAccelerator()
print("ranks", accelerator.num_processes, accelerator.process_index, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["slurm", "openmpi"])
def test_other_launchers_ranks_train_together(tmp_path: Path, launcher: str) -> None:
    """Accelerate reads torchrun's variables only: each process would train alone."""
    (tmp_path / "script.py").write_text(ALONE)

    def started(rank: int, port: int) -> dict[str, str | None]:
        if launcher == "slurm":
            own = {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost",
            }
        else:
            own = {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            }
        return {**own, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}

    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                run_script,
                [tmp_path / "script.py", "early"],
                env=started(rank, port),
            )
            for rank in range(2)
        ]
        ended = [run.result() for run in runs]
    for rank, end in enumerate(ended):
        assert f"ranks 2 {rank}" in end.stdout, end.stderr
    if launcher == "slurm":  # Accelerate itself refuses the other, on CPU
        late = run_script([tmp_path / "script.py", "late"], env=started(0, port))
        assert late.returncode != 0
        assert "slurm has started 2 processes" in late.stderr
        assert "write SmpAccelerator() in front" in late.stderr
