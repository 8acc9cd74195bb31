"""Launches drawn from a seed, by every launcher, with variables of another one around
them: the processes agree who they are, or all of them are refused in words."""

from __future__ import annotations

import random

import pytest

from smp_core.cluster.launch import launch_environment

Environ = dict[str, str]
KINDS = ("torchrun", "by hand", "openmpi", "mvapich", "mpich", "slurm", "sagemaker")

# Without these a process is one by itself, or of the whole job.
MARKS = {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SM_HOSTS"}


def processes(kind: str, nodes: int, per_node: int) -> list[Environ]:
    """The variables of each process, in the order of its ranks."""
    world, found = nodes * per_node, []
    for rank in range(world):
        node, local = divmod(rank, per_node)
        four = [str(number) for number in (rank, world, local, per_node)]
        if kind in ("torchrun", "by hand"):
            names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
            environ = dict(zip(names, four, strict=True))
            environ |= {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
            if kind == "torchrun":
                environ["TORCHELASTIC_RUN_ID"] = "none"
        elif kind in ("openmpi", "mvapich"):
            start = "OMPI" if kind == "openmpi" else "MV2"
            parts = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"]
            names = [f"{start}_COMM_WORLD_{part}" for part in parts]
            environ = dict(zip(names, four, strict=True))
        elif kind == "mpich":
            names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
            environ = dict(zip(names, four, strict=True))
        elif kind == "slurm":
            environ = {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": four[0],
                "SLURM_STEP_NUM_TASKS": four[1],
                "SLURM_NTASKS": "64",
                "SLURM_LOCALID": four[2],
                "SLURM_NODEID": str(node),
                "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
                "SLURM_STEP_NODELIST": f"node[0-{nodes - 1}]" if nodes > 1 else "node0",
            }
        else:
            hosts = ", ".join(f'"algo-{1 + number}"' for number in range(world))
            environ = {"SM_HOSTS": f"[{hosts}]", "SM_CURRENT_HOST": f"algo-{1 + rank}"}
        found.append(environ)
    return found


def drawn(seed: int) -> tuple[str, list[Environ]]:
    """A launch, often with what is around it, in it, or left of another one."""
    generator = random.Random(seed)
    kind = generator.choice(KINDS)
    nodes = generator.choice((1, 1, 2, 3))
    per_node = 1 if kind == "sagemaker" else generator.choice((1, 2, 4))
    launched = processes(kind, nodes, per_node)
    outside: Environ = {}
    chance = generator.random()
    if chance < 0.2:  # a platform's host, on which the launcher was started
        outside = processes("sagemaker", nodes, 1)[0]
    elif chance < 0.4:  # a notebook's, or of a test that was run by hand
        outside = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    elif chance < 0.5:
        outside = {"WORLD_SIZE": generator.choice(("1", "4"))}
    elif chance < 0.6:  # a shell in a container that mpirun started
        outside = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    if generator.random() < 0.3:
        address = {"MASTER_ADDR": generator.choice(("", "head", "127.0.0.1"))}
        launched = [{**address, **each} for each in launched]
    if generator.random() < 0.2:
        launched = [{**each, "MASTER_PORT": "29511"} for each in launched]
    if generator.random() < 0.15 and not outside:  # one is not handed on
        lost = generator.choice(sorted(set(launched[0]) - MARKS))
        for each in launched:
            each.pop(lost, None)
    return kind, [{**outside, **each} for each in launched]


def outcome(environs: list[Environ]) -> str:
    """ "agree", "refused", or what is wrong."""
    found, words = [], []
    for environ in environs:
        try:
            found.append(launch_environment(environ))
        except ValueError as error:
            words.append(str(error))
    if words:
        return "refused" if len(words) == len(environs) else f"some only: {words[0]}"
    ranks = [each.rank for each in found]
    if ranks != list(range(len(environs))):
        return f"ranks {ranks}"
    shared = {(e.kind, e.world_size, e.master_addr, e.master_port) for e in found}
    if len(shared) > 1 or found[0].world_size != len(environs):
        return f"different launches: {shared}"
    return "agree" if found[0].master_addr else "no address"


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1000, 2000))],
)
def test_all_processes_of_a_launch_agree_or_are_refused(first: int) -> None:
    agreed = 0
    for seed in range(first, first + 1000):
        kind, environs = drawn(seed)
        told = outcome(environs)
        assert told in ("agree", "refused"), (seed, kind, environs)
        agreed += told == "agree"
    assert agreed > 600
