"""The launcher that started this process, and the rank that it gave the process.

This module reads the variables of torchrun (and of anything that sets RANK and
WORLD_SIZE), Open MPI, MVAPICH, MPICH, Intel MPI, SLURM and SageMaker into one form, and
sets none. The innermost launcher wins: torchrun started by srun or by SageMaker numbers
the ranks, not the launcher outside. Sources: torchrun's "Environment Variables", Open
MPI's `OMPI_COMM_WORLD_*`, MVAPICH2's `MV2_COMM_WORLD_*`, those of MPICH's Hydra,
"OUTPUT ENVIRONMENT VARIABLES" of srun(1), and the SageMaker training toolkit's `SM_*`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("smp")

DEFAULT_MASTER_PORT = 29500
Kind = Literal["torchrun", "openmpi", "mvapich", "mpich", "slurm", "sagemaker", "plain"]
# Rank, ranks, rank on the node and ranks on the node, by each mpirun. MPICH's are Intel
# MPI's too.
_MPI: dict[Kind, tuple[str, str, str, str]] = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
MPI_RANKS = tuple(names[0] for names in _MPI.values())
"""The variables by which processes of an mpirun know their ranks."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The launcher's facts about this process.

    Args:
        kind: "torchrun", "openmpi", "mvapich", "mpich" (Intel MPI too), "slurm",
            "sagemaker" (one process for each host, started by SageMaker itself) or
            "plain" (a process by itself).
        rank: number of this process in the world, from 0.
        world_size: number of processes.
        local_rank: number of this process on its node, from 0.
        local_world_size: number of processes on this node; None when the launcher does
            not tell.
        master_addr: the host of rank 0.
        master_port: the port at which the processes meet.

    Raises:
        ValueError: numbers that contradict each other.
    """

    kind: Kind
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str
    master_port: int

    def __post_init__(self) -> None:
        # A launcher that tells nothing about the node allows as many as the world has.
        local = (
            self.world_size if self.local_world_size is None else self.local_world_size
        )
        said = (
            f"{self.kind} says rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
            f"{'unknown' if self.local_world_size is None else local}"
        )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{said}: the rank has to be from 0 to {self.world_size - 1}; {_STALE}"
            )
        if not 0 <= self.local_rank < local:
            raise ValueError(
                f"{said}: the local rank has to be from 0 to {local - 1}; {_STALE}"
            )
        if local > self.world_size:
            raise ValueError(
                f"{said}: more processes on this node than in the world; {_STALE}"
            )
        if self.local_rank > self.rank:
            raise ValueError(
                f"{said}: the local rank cannot be larger than the rank; {_STALE}"
            )
        if not 0 < self.master_port < 65536:
            raise ValueError(
                f"master port {self.master_port} is not allowed; allowed: 1 to 65535; set MASTER_PORT"
            )


_STALE = "variables of two launches may be mixed: unset those of the other one, or start anew with torchrun"


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Return the launch environment of this process.

    Args:
        environ: variables; default os.environ.

    Raises:
        ValueError: a variable is missing, is not a number, or contradicts another one;
            it is named.
    """
    # The innermost launcher numbers the ranks, so it is asked first.
    environ = os.environ if environ is None else environ
    # An empty address is none: processes of several hosts would not meet.
    if not environ.get("MASTER_ADDR", "set"):
        environ = {k: value for k, value in environ.items() if k != "MASTER_ADDR"}
    # torchrun's agent sets RANK; TORCHELASTIC_RUN_ID alone means that RANK is missing.
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpi(environ, "openmpi")
    if "MV2_COMM_WORLD_RANK" in environ:
        return _mpi(environ, "mvapich")
    # SLURM_STEP_ID is there only in processes that srun started, not in a batch script
    # or an interactive shell.
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    # Behind SLURM, whose srun sets these as well.
    if "PMI_RANK" in environ and environ.get("PMI_SIZE") != "1":
        return _mpi(environ, "mpich")
    # sbatch starts the script once: without srun a world of one would train in silence.
    if "SLURM_NTASKS" in environ and environ["SLURM_NTASKS"] != "1":
        logger.warning(
            "SLURM_NTASKS=%s, but srun did not start this process, so it counts as one by itself; "
            "write `srun python ...` to start all of them",
            environ["SLURM_NTASKS"],
        )
    if "SM_HOSTS" in environ:
        return _sagemaker(environ)
    # One variable of two is what is left of another launch.
    for rank, size, *_ in _MPI.values():
        if rank not in environ and environ.get(size, "1") != "1":
            raise _missing(environ, rank, "a number")
    if "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not; "
            "start with torchrun, which sets both, or unset WORLD_SIZE"
        )
    return LaunchEnvironment(
        "plain",
        0,
        1,
        0,
        1,
        environ.get("MASTER_ADDR") or "127.0.0.1",
        _number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    rank = _number(environ, "RANK")
    world = _number(environ, "WORLD_SIZE")
    local_world = (
        _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    )
    # Without local ranks, processes of one node would share a device.
    local = _number(environ, "LOCAL_RANK", 0 if world == 1 else None)
    if world > 1 and "MASTER_ADDR" not in environ:
        raise _missing(environ, "MASTER_ADDR", "the host of rank 0")
    # A world of several waits for its other ranks. It may be a part of a launch: Ray on
    # hosts that srun prepared, one of several instance groups, one model of many.
    if world == 1 and "TORCHELASTIC_RUN_ID" not in environ:
        _require_no_larger_launch(environ)
    return LaunchEnvironment(
        "torchrun",
        rank,
        world,
        local,
        local_world,
        environ.get("MASTER_ADDR") or "127.0.0.1",
        _number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _require_no_larger_launch(environ: Mapping[str, str]) -> None:
    """Refuse a world of one of a shell, in which another launcher has started more
    processes: each of them would train by itself.

    Raises:
        ValueError: on all of them.
    """
    sizes = [size for _, size, *_ in _MPI.values()]
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        sizes += ["SLURM_STEP_NUM_TASKS"]
    told = {size: environ.get(size, "") for size in sizes}
    if "SM_HOSTS" in environ:
        told["SM_HOSTS"] = str(len(_sagemaker_hosts(environ)))
    for size, text in told.items():
        if text.isdecimal() and int(text) > 1:
            raise ValueError(
                f"RANK={environ['RANK']} and WORLD_SIZE=1 are set, but {size} says {text}: each of the {text} "
                "processes would train by itself; unset RANK and WORLD_SIZE to train over all of them, or unset "
                f"{size} if that is meant"
            )


def _mpi(environ: Mapping[str, str], kind: Kind) -> LaunchEnvironment:
    rank, size, local_rank, local_size = _MPI[kind]
    world = _number(environ, size)
    local_world = _number(environ, local_size)
    # mpirun has no variable for rank 0's host, so it comes from elsewhere.
    if "MASTER_ADDR" in environ:
        master = environ["MASTER_ADDR"]
    elif "SM_HOSTS" in environ:
        master = _sagemaker_hosts(environ)[0]
    elif world == local_world:
        master = "127.0.0.1"
    else:
        raise ValueError(
            "mpirun does not tell the processes where rank 0 runs; write "
            "`mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...`"
        )
    return LaunchEnvironment(
        kind,
        _number(environ, rank),
        world,
        _number(environ, local_rank),
        local_world,
        master,
        _number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    # A step may have fewer tasks and nodes than its job.
    size_variable = (
        "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    )
    nodes_variable = (
        "SLURM_STEP_NODELIST"
        if "SLURM_STEP_NODELIST" in environ
        else "SLURM_JOB_NODELIST"
    )
    if "MASTER_ADDR" not in environ and nodes_variable not in environ:
        raise _missing(
            environ,
            nodes_variable,
            "from which the host of rank 0 is read (or set MASTER_ADDR)",
        )
    # Jobs that share a host must not meet at the same port, and all ranks of one job
    # must agree on it.
    job = environ.get("SLURM_JOB_ID", "0")
    port = 15000 + int(job) % 10000 if job.isdecimal() else DEFAULT_MASTER_PORT
    return LaunchEnvironment(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        _number(environ, size_variable),
        _number(environ, "SLURM_LOCALID"),
        _slurm_tasks_here(environ),
        environ.get("MASTER_ADDR") or _first_slurm_host(environ[nodes_variable]),
        _number(environ, "MASTER_PORT", port),
    )


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Count the tasks on this node, from `2(x3),1` (nodes 0-2 have two, node 3 has one)
    and the node's number."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get(
        "SLURM_TASKS_PER_NODE"
    )
    if text is None or "SLURM_NODEID" not in environ:
        return None
    # A number may stand for several nodes in a row.
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(
                f"SLURM's tasks per node {text!r} cannot be read; expected a form such as '4(x2)'"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    if node >= len(tasks):
        raise ValueError(
            f"SLURM_NODEID={node} but SLURM's tasks per node {text!r} list {len(tasks)} nodes; {_STALE}"
        )
    return tasks[node]


def _first_slurm_host(nodelist: str) -> str:
    """Return the first host of `a`, `a,b`, `gpu[03-07,9]` or `gpu[03-07]-ib`."""
    # Text and brackets up to the first comma outside of them; of each bracket the first
    # number.
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist.strip())
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0] if match else "")
    if not host:
        raise ValueError(
            f"SLURM's node list {nodelist!r} cannot be read; set MASTER_ADDR to the host of rank 0"
        )
    return host


def _sagemaker(environ: Mapping[str, str]) -> LaunchEnvironment:
    hosts = _sagemaker_hosts(environ)
    if "SM_CURRENT_HOST" not in environ:
        raise _missing(environ, "SM_CURRENT_HOST", "this host's name in SM_HOSTS")
    if environ["SM_CURRENT_HOST"] not in hosts:
        raise ValueError(
            f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']} is not one of SM_HOSTS={', '.join(hosts)}"
        )
    # One process would leave all GPUs but one idle.
    devices = environ.get("SM_NUM_GPUS", "0")
    if devices.isdecimal() and int(devices) > 1:
        logger.warning(
            "SageMaker started one process on this host, which has %s GPUs; write "
            'distribution={"torch_distributed": {"enabled": True}} in the estimator to start one for each',
            devices,
        )
    rank = hosts.index(environ["SM_CURRENT_HOST"])
    return LaunchEnvironment(
        "sagemaker",
        rank,
        len(hosts),
        0,
        1,
        environ.get("MASTER_ADDR") or hosts[0],
        _number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _sagemaker_hosts(environ: Mapping[str, str]) -> list[str]:
    text = environ["SM_HOSTS"]
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if (
        not isinstance(hosts, list)
        or not hosts
        or not all(isinstance(host, str) and host for host in hosts)
    ):
        raise ValueError(
            f"""SM_HOSTS={text} is not a JSON list of host names, such as '["algo-1", "algo-2"]'"""
        )

    def by_number(host: str) -> list[int | str]:
        """Return a sort key by which "algo-10" comes after "algo-9"."""
        return [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", host)
        ]

    # Every host sorts alike, so all agree which one is rank 0's.
    return sorted(hosts, key=by_number)


def _number(
    environ: Mapping[str, str], variable: str, default: int | None = None
) -> int:
    if variable not in environ:
        if default is not None:
            return default
        raise _missing(environ, variable, "a number")
    text = environ[variable]
    if not text.strip().isdecimal():
        raise ValueError(f"{variable}={text!r} is not a number from 0 up; {_STALE}")
    return int(text)


def _missing(environ: Mapping[str, str], variable: str, meaning: str) -> ValueError:
    # Everything that launchers set, to show what was found instead.
    stems = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMPI_COMM_WORLD_",
        "MV2_COMM_WORLD_",
        "PMI_",
        "MPI_LOCAL",
        "SLURM_",
        "SM_",
    )
    found = ", ".join(
        f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(stems)
    )
    return ValueError(
        f"{variable} ({meaning}) is not set, but other variables of a launcher are ({found[:300]}); "
        "start with torchrun, srun or mpirun, which set all of them, or unset the others"
    )
