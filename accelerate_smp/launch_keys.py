"""Accelerate's own keys in a launch file: which there are, and what those accept that the launcher acts on.

Its launcher reads files of older versions and of every engine; what it does not check here comes out as an error of
argparse, of torch or of a worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig

from accelerate_smp.config import refuse_fsdp1
from smp_core import knob_values as read
from smp_core.config import SmpConfig
from smp_core.config_sources import YAML_SECTION

PRECISIONS = ("no", "bf16", "fp16", "fp8")
# The last two are in files of older versions.
_KEYS = (YAML_SECTION, *(field.name for field in dataclasses.fields(ClusterConfig)), "fp16", "dynamo_backend")
_READERS: dict[str, read.Reader] = {
    "num_processes": read.integer(minimum=1),
    "num_machines": read.integer(minimum=1),
    "machine_rank": read.integer(minimum=0),
    "main_process_port": read.integer(minimum=0),
    "mixed_precision": read.word(*PRECISIONS),
    "use_cpu": read.boolean(),
}


def read_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """A launch file's top level with the values that are checked here in their types.

    Raises:
        ValueError: an unknown key (with the nearest one, or the section it belongs to), a value that is not allowed, a
            machine that is not one of the machines, or FSDP1.
    """
    for key in document:
        if key in SmpConfig.knobs():
            raise ValueError(
                f"{key} is a knob; write it under `{YAML_SECTION}:`, as in `{YAML_SECTION}: {{{key}: ...}}`"
            )
        if key not in _KEYS:
            near = read.nearest_name(str(key), _KEYS)
            hint = f"did you mean {near!r}?" if near else "`accelerate-smp config` writes a file with those that matter"
            raise ValueError(f"unknown key {key!r}; {hint}")
    found = dict(document)
    for key, reader in _READERS.items():
        if found.get(key) is not None:
            # Without quotes `no` is false in YAML.
            found[key] = "no" if key == "mixed_precision" and found[key] is False else reader(key, found[key])
    machines, rank = found.get("num_machines") or 1, found.get("machine_rank") or 0
    if rank >= machines:
        allowed = ", ".join(map(str, range(machines))) if machines <= 8 else f"0 to {machines - 1}"
        raise ValueError(f"machine_rank={rank} is not one of num_machines={machines}; allowed: {allowed}")
    section = found.get("fsdp_config") or {}
    if section or found.get("distributed_type") == "FSDP":
        refuse_fsdp1(section.get("fsdp_version", 1))
    return found
