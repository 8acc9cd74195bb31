"""launch_environment: one form for what torchrun, Open MPI, SLURM and SageMaker tell a
process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from smp_core.cluster.launch import LaunchEnvironment, launch_environment
from tests.harness import ROOT, run_script

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-10", "algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, LaunchEnvironment("torchrun", 5, 8, 1, 4, "head", 1234)),
        # Two of Ray's workers, on eight hosts that srun prepared.
        (
            {
                **{**SLURM, "SLURM_STEP_NUM_TASKS": "8"},
                **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
                **{"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head"},
            },
            LaunchEnvironment("torchrun", 1, 2, 1, 2, "head", 29500),
        ),
        (
            {**SLURM, **SAGEMAKER, **TORCHRUN},
            LaunchEnvironment("torchrun", 5, 8, 1, 4, "head", 1234),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            LaunchEnvironment("torchrun", 0, 1, 0, None, "127.0.0.1", 29500),
        ),
        (
            {**MVAPICH, "MASTER_ADDR": "head"},
            LaunchEnvironment("mvapich", 3, 4, 1, 2, "head", 29500),
        ),
        (
            {**MPICH, "MASTER_ADDR": "head"},
            LaunchEnvironment("mpich", 3, 4, 1, 2, "head", 29500),
        ),
        # What srun sets for MPI programs, and a shell that mpirun started.
        (
            {**MPICH, **SLURM, "MASTER_PORT": "1"},
            LaunchEnvironment("slurm", 5, 8, 1, 4, "gpu03", 1),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
            LaunchEnvironment("plain", 0, 1, 0, 1, "127.0.0.1", 29500),
        ),
        (
            {**OPENMPI, "MASTER_ADDR": "head"},
            LaunchEnvironment("openmpi", 3, 4, 1, 2, "head", 29500),
        ),
        (
            {**OPENMPI, **SAGEMAKER},
            LaunchEnvironment("openmpi", 3, 4, 1, 2, "algo-1", 29500),
        ),
        (
            {
                **OPENMPI,
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            LaunchEnvironment("openmpi", 3, 4, 3, 4, "127.0.0.1", 29500),
        ),
        (SLURM, LaunchEnvironment("slurm", 5, 8, 1, 4, "gpu03", 18456)),
        (
            {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "7"},
            LaunchEnvironment("slurm", 5, 8, 1, 4, "head", 7),
        ),
        (
            {**SLURM, "SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
            LaunchEnvironment("slurm", 5, 7, 1, 3, "gpu03", 18456),
        ),
        (SAGEMAKER, LaunchEnvironment("sagemaker", 1, 3, 0, 1, "algo-1", 29500)),
        ({}, LaunchEnvironment("plain", 0, 1, 0, 1, "127.0.0.1", 29500)),
        (
            {"WORLD_SIZE": "1"},
            LaunchEnvironment("plain", 0, 1, 0, 1, "127.0.0.1", 29500),
        ),
    ],
)
def test_each_launcher_is_read(
    environ: dict[str, str], found: LaunchEnvironment
) -> None:
    assert launch_environment(environ) == found


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-07,9]", "gpu03"),
        ("gpu[3,5],cpu1", "gpu3"),
        ("gpu[03-07]-ib", "gpu03-ib"),
        ("rack[2-3]n[07,09],cpu1", "rack2n07"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_the_meeting_point(
    nodelist: str, first: str
) -> None:
    assert (
        launch_environment({**SLURM, "SLURM_STEP_NODELIST": nodelist}).master_addr
        == first
    )


def without(environ: dict[str, str], *variables: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in variables}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            without(TORCHRUN, "RANK"),
            r"RANK .* is not set, but other variables.*WORLD_SIZE=8.*torchrun",
        ),
        (without(TORCHRUN, "WORLD_SIZE"), r"WORLD_SIZE .* is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), r"LOCAL_RANK .* is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), r"MASTER_ADDR .* is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({**TORCHRUN, "RANK": "8"}, "torchrun says rank 8 of 8, .* from 0 to 7"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not a number"),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "local rank 4 of 4: the local rank has to be from 0 to 3",
        ),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"},
            "more processes on this node than in the world",
        ),
        ({**TORCHRUN, "RANK": "0"}, "the local rank cannot be larger than the rank"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "master port 70000 is not allowed"),
        (OPENMPI, "mpirun -x MASTER_ADDR="),
        (MPICH, "mpirun -x MASTER_ADDR="),
        (without(MPICH, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS .* is not set"),
        (
            without(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE .* is not set",
        ),
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST .* is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "'many' cannot be read"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 but .* list 2 nodes"),
        (without(SAGEMAKER, "SM_CURRENT_HOST"), "SM_CURRENT_HOST .* is not set"),
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-7"},
            "SM_CURRENT_HOST=algo-7 is not one of SM_HOSTS",
        ),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS=algo-1 is not a JSON list"),
    ],
)
def test_missing_and_contradictory_variables_are_named(
    environ: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        launch_environment(environ)


def test_a_process_that_srun_did_not_start_is_by_itself_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="smp"):
        found = launch_environment(
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
        )
    assert (found.kind, found.world_size) == ("plain", 1)
    assert "srun python" in caplog.text


def test_one_sagemaker_process_on_many_gpus_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="smp"):
        launch_environment({**SAGEMAKER, "SM_NUM_GPUS": "8"})
    assert "torch_distributed" in caplog.text


# In the normal run: a run under torchrun, tests/lightning/test_endings.py.
@pytest.mark.slow
def test_what_torchrun_really_sets_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "from smp_core.cluster.launch import launch_environment\n"
        "here = launch_environment()\n"
        "print(f'{here.kind} {here.rank} {here.world_size} {here.local_rank} {here.local_world_size}\\n', end='')\n"
    )
    finished = run_script([script], nproc=2, env={"PYTHONPATH": str(ROOT)})
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n")) == [
        "",
        "torchrun 0 2 0 2",
        "torchrun 1 2 1 2",
    ]
