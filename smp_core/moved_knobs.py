"""Names that knobs had when they were flat, and how they are written now: for complaints, and for the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smp_core.fp8.recipe import Fp8Recipe
from smp_core.knob_recipe import Recipe
from smp_core.recipes import RECIPES, DelayedInit

MOVED: dict[str, str] = {
    "context_head_groups": "collectives.context_head_groups",
    "hierarchical": "collectives.hierarchical",
    "reshard_after_backward": "keep_between_micro_batches",
    "reduce_every_micro_batch": "keep_between_micro_batches",
    "forward_prefetch": "collectives.forward_prefetch",
    "backward_prefetch": "collectives.backward_prefetch",
    "reduce_scatter_buffers": "collectives.reduce_scatter_buffers",
    "separate_reduce_scatter_group": "collectives.separate_reduce_scatter_group",
    "symmetric_memory": "collectives.symmetric_memory",
    "wrap": "units.modules",
    "wrap_min_parameters": "units.min_parameters",
    "init_seed": "delayed_init.seed",
    "replica_reduce_dtype": "compression.reduce",
    "memory_headroom": "planner.memory_headroom",
    "device_memory_gib": "planner.device_memory_gib",
    "planned_optimizer": "planner.optimizer",
    "save_full_state_dict": "checkpoint.full_state_dict",
    "async_save": "checkpoint.async_save",
    "verify_checkpoint": "checkpoint.verify",
    "allow_batch_change": "checkpoint.allow_batch_change",
    "comm_meter": "collectives.meter",
    "activation_checkpointing": "activations.checkpoint",
    "activation_checkpointing_check": "activations.check",
    "activation_offloading": "activations.offload",
    "activation_loading_horizon": "activations.loading_horizon",
    "activation_offloading_min_bytes": "activations.offload_min_bytes",
    "activation_offloading_host_gib": "activations.offload_host_gib",
    "quantized_all_gather": "compression.gather",
    "quantize_inside_nodes": "compression.gather_inside_nodes",
    "quantize_after_steps": "compression.gather_after_steps",
    "quantize_exclude": "compression.gather_exclude",
    "quantized_reduce": "compression.reduce",
    "error_feedback": "compression.error_feedback",
}
"""Former knob -> where it is now: a knob, or a field of one."""

_CLASSES: dict[str, type[Recipe]] = {**RECIPES, "delayed_init": DelayedInit, "fp8": Fp8Recipe}


def now_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return knob -> value as it is written now, in place of former knobs.

    Args:
        values: former knob -> value; others are left out. Two of one recipe become one value.
    """
    found: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        knob, _, field = MOVED.get(name, "").partition(".")
        if field:
            fields.setdefault(knob, {})[field] = _as_read(_CLASSES[knob], field, value)
    for knob, given in fields.items():
        found[knob] = _CLASSES[knob].shortest(given)
    if values.keys() & {"reshard_after_backward", "reduce_every_micro_batch"}:
        found.update(_kept(values))
    return found


def moved(values: Mapping[str, Any]) -> ValueError:
    """Return the complaint about former knobs among keywords, a mapping or a file, with what to write."""
    former = ", ".join(f"{name}={value!r}" for name, value in values.items() if name in MOVED)
    now = ", ".join(f"{knob}={value!r}" for knob, value in now_written(values).items())
    return ValueError(f"{former} is now written {now}")


def moved_variable(variable: str, name: str, text: str) -> ValueError:
    """Return the complaint about an environment variable of a former knob."""
    now = [
        f"{variable.removesuffix(name.upper())}{knob.upper()}={_as_text(value)}"
        for knob, value in now_written({name: text}).items()
    ]
    return ValueError(f"environment variable {variable}={text} is now written {' '.join(now)}")


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    frees = str(values.get("reshard_after_backward", True)).lower() != "false"
    reduces = str(values.get("reduce_every_micro_batch", True)).lower() != "false"
    if reduces:
        return {"keep_between_micro_batches": "shards" if frees else "parameters"}
    # Gradients alone, without the parameters that "gradients" keeps too where nothing else is said.
    alone = {"reshard_after_forward": values.get("reshard_after_forward", True)} if frees else {}
    return {"keep_between_micro_batches": "gradients", **alone}


def _as_read(recipe: type[Recipe], field: str, value: Any) -> Any:
    """Return the value as the field reads it; one that it refuses stays as it is, and is refused where it is moved
    to."""
    try:
        read = recipe.readers()[field](field, value)
    except ValueError:
        return value
    return list(read) if isinstance(read, tuple) else read


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else f"'{json.dumps(value)}'"
