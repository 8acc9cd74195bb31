"""What SmpAccelerator looks at before Accelerate takes this process for one of a job:
its launcher, its device and the backend of its group."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs

from smp_core.cluster import LaunchEnvironment, launch_environment

logger = logging.getLogger("smp")


def other_launch() -> LaunchEnvironment | None:
    """Return the launch by srun, mpirun or SageMaker that this process is of, and tell
    Accelerate of it, which reads torchrun's variables; None: there is none.

    Accelerate would take each of the processes for one by itself.
    """
    if "RANK" in os.environ or dist.is_initialized():
        return None
    launch = launch_environment()
    if launch.world_size == 1:
        return None
    # Afterwards it is too late: Accelerate reads them once (see `require_all_ranks`).
    if PartialState._shared_state == {}:
        os.environ.update(
            RANK=str(launch.rank),
            WORLD_SIZE=str(launch.world_size),
            LOCAL_RANK=str(launch.local_rank),
            MASTER_ADDR=launch.master_addr,
            MASTER_PORT=str(launch.master_port),
        )
        if launch.local_world_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
    return launch


def require_all_ranks(launch: LaunchEnvironment | None, ranks: int) -> None:
    """Refuse to train alone in a process of several.

    Raises:
        ValueError: with the launcher, and what to type.
    """
    if launch is not None and launch.world_size != ranks:
        raise ValueError(
            f"{launch.kind} has started {launch.world_size} processes, and Accelerate has taken this one for {ranks}: "
            "it knows torchrun's variables, and has read them before (TrainingArguments does). Start with torchrun or "
            "accelerate-smp launch, or write SmpAccelerator() in front of what reads them"
        )


def must_say_cpu() -> bool:
    """Return whether Accelerate has to be told ``cpu=True``.

    Accelerate takes a CPU process for a single one unless it is told, even under
    torchrun. Its ``_shared_state`` is the only sign that no state has been made yet.
    """
    launched = int(os.environ.get("LOCAL_RANK", -1)) != -1
    return (
        launched
        and not torch.accelerator.is_available()
        and PartialState._shared_state == {}
    )


def check_backend(device: torch.device, asked: InitProcessGroupKwargs | None) -> None:
    """Refuse a process group that cannot send from the device."""
    backends = dist.get_backend_config()  # "cpu:gloo,cuda:nccl"
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"the process group's backend {backends!r} sends nothing from {device.type}; allowed there: 'gloo', 'mpi'; "
            "write init_process_group('gloo'), or leave it to SmpAccelerator"
        )
    # InitProcessGroupKwargs says nccl also where only a timeout was asked.
    if asked is not None and asked.backend == "nccl" and "nccl" not in backends:
        logger.info(
            "InitProcessGroupKwargs(backend='nccl') has no effect on %s: it is %s",
            device.type,
            backends,
        )
