"""The keys of Accelerate in a launch file, and the values of those that its launcher
acts on.

Its launcher reads files of older versions and of every engine; what it does not check
here comes out as an error of argparse, of torch or of a worker.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from accelerate_smp.config import refuse_fsdp1
from smp_core.config import YAML_SECTION, SmpConfig, values as read

PRECISIONS = ("no", "bf16", "fp16", "fp8")
# The last three are in files of older versions.
_KEYS = (
    YAML_SECTION,
    *(field.name for field in dataclasses.fields(ClusterConfig)),
    "fp16",
    "dynamo_backend",
    "ipex_config",
)
_READERS: dict[str, read.Reader] = {
    "num_processes": read.integer(minimum=1),
    "num_machines": read.integer(minimum=1),
    "machine_rank": read.integer(minimum=0),
    "main_process_port": read.integer(minimum=0),
    "mixed_precision": read.word(*PRECISIONS),
    "use_cpu": read.boolean(),
}
# Every type of one process for each device, whatever the device; on CPU and GPU the
# launcher starts them alike.
_TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "FSDP",
    *(
        f"MULTI_{device}"
        for device in ("XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
    ),
)
# Keys that mean something to another engine or launcher alone, and what to write
# instead.
_FOREIGN = {
    "deepspeed_config": "shard_degree, state_offload and the like in smp_config say what its stages do",
    "megatron_lm_config": "shard_degree and context_parallel_degree are in smp_config",
    "mpirun_config": "num_processes workers are started by torchrun; or type mpirun ... python SCRIPT",
    "ipex_config": "Accelerate has left it behind",
    "downcast_bf16": "write mixed_precision: bf16",
    "command_file": "only pods of TPUs run it",
    "commands": "only pods of TPUs run them",
    **dict.fromkeys(
        (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
        ),
        "no TPUs here",
    ),
}
_FSDP1_KEYS = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward, and shard_degree in smp_config",
    "fsdp_backward_prefetch": "write collectives: {backward_prefetch: ...} in smp_config",
    "fsdp_forward_prefetch": "write collectives: {forward_prefetch: ...} in smp_config",
}
_NOTHING: tuple[Any, ...] = (None, False, "", "no", "NO_PREFETCH", {}, [])


def read_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch file's top level with the values that are checked here in their
    types.

    Raises:
        ValueError: an unknown key (with the nearest one, or the section it belongs to),
            a value that is not allowed, a machine that is not one of the machines,
            FSDP1, another engine's settings, or settings without effect.
    """
    # Every key has to be Accelerate's; a knob that stands outside of its section would
    # have no effect.
    for key in document:
        if key in SmpConfig.knobs():
            raise ValueError(
                f"{key} is a knob; write it under `{YAML_SECTION}:`, as in `{YAML_SECTION}: {{{key}: ...}}`"
            )
        if key not in _KEYS:
            near = read.nearest_name(str(key), _KEYS)
            hint = (
                f"did you mean {near!r}?"
                if near
                else "`accelerate-smp config` writes a file with those that matter"
            )
            raise ValueError(f"unknown key {key!r}; {hint}")
    found = dict(document)
    for key, reader in _READERS.items():
        if found.get(key) is not None:
            # Without quotes `no` is false in YAML.
            found[key] = (
                "no"
                if key == "mixed_precision" and found[key] is False
                else reader(key, found[key])
            )
    # A wrong rank would wait for the others until a timeout.
    machines = found.get("num_machines") or 1
    rank = found.get("machine_rank") or 0
    if rank >= machines:
        allowed = (
            ", ".join(map(str, range(machines)))
            if machines <= 8
            else f"0 to {machines - 1}"
        )
        raise ValueError(
            f"machine_rank={rank} is not one of num_machines={machines}; allowed: {allowed}"
        )
    # Accelerate's default for a file without a version is the first one.
    section = found.get("fsdp_config") or {}
    if section or found.get("distributed_type") == "FSDP":
        refuse_fsdp1(section.get("fsdp_version", 1))
    _refuse_engines(found)
    return found


def refuse_flags(args: Namespace) -> None:
    """Refuse flags of `accelerate launch` that ask for another engine or launcher.

    Raises:
        ValueError: with the flag.
    """
    for flag in ("use_deepspeed", "use_megatron_lm", "tpu", "mpirun_hostfile"):
        if getattr(args, flag, None):
            raise ValueError(
                f"--{flag}: torch-smp shards, and starts its workers with torchrun; leave it out"
            )
    for flag in getattr(args, "nondefault", ()):
        if flag.startswith("parallelism_config_"):
            raise ValueError(
                f"--{flag} has no effect without Accelerate's FSDP; write it into the file"
            )


def _refuse_engines(document: Mapping[str, Any]) -> None:
    """Refuse settings that the launcher, or a worker on another device, would drop in
    silence."""
    where = document.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        raise ValueError(
            f"compute_environment: {where} is not started from here; allowed: LOCAL_MACHINE"
        )
    kind = document.get("distributed_type", "MULTI_GPU")
    kind = "NO" if kind is False else str(kind)  # without quotes
    if kind not in _TYPES and kind in [known.value for known in DistributedType]:
        raise ValueError(
            f"distributed_type: {kind} and torch-smp both want to shard; write MULTI_GPU (MULTI_CPU without GPUs), and "
            "what is to be sharded into smp_config"
        )
    if kind not in _TYPES:
        raise ValueError(
            f"distributed_type: {kind} is not known; allowed: {', '.join(_TYPES)}"
        )
    for key, instead in _FOREIGN.items():
        if document.get(key) not in _NOTHING:
            raise ValueError(
                f"{key} has no effect in torch-smp: {instead}; leave it out"
            )
    if document.get("main_training_function") not in (*_NOTHING, "main"):
        raise ValueError(
            "main_training_function has no effect: the script is run as it is; leave it out"
        )
    if document.get("fsdp_config") and kind != "FSDP":
        raise ValueError(
            f"fsdp_config has no effect with distributed_type: {kind}; write distributed_type: FSDP, or its settings "
            "as knobs into smp_config"
        )
    # Keys of these sections are flags of the launcher with their prefix.
    flags = [
        name
        for name in vars(launch_command_parser().parse_args(["script"]))
        if "_" in name
    ]
    for section, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        for key, value in (document.get(section) or {}).items():
            name = key if str(key).startswith(prefix) else f"{prefix}{key}"
            if name not in flags:
                near = read.nearest_name(name, flags)
                raise ValueError(
                    f"{section}: unknown key {key!r}; "
                    + (f"did you mean {near!r}?" if near else "leave it out")
                )
            if name in _FSDP1_KEYS and value not in _NOTHING:
                raise ValueError(
                    f"{section}: {key} belongs to FSDP1; {_FSDP1_KEYS[name]}"
                )
