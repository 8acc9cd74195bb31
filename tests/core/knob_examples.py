"""Values that every knob of SmpConfig allows, as hypothesis strategies, and how a
person writes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from smp_core.config import SmpConfig
from smp_core.config.plan_recipes import AutoPlan, Planner
from smp_core.config.recipe import Recipe
from smp_core.config.recipes import (
    Activations,
    Checkpoint,
    Collectives,
    Compile,
    Compression,
    DelayedInit,
    Pipeline,
    TensorParallel,
    Units,
)
from smp_core.config.rules import contradictions
from smp_core.fp8 import Fp8Recipe

_NAMES = st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.*]{0,8}", fullmatch=True)).map(
    tuple
)
_COUNT_OR_AUTO = st.integers(0, 4) | st.just("auto")
_ONE_OR_AUTO = st.integers(1, 4) | st.just("auto")

FIELDS: dict[type[Recipe], dict[str, Any]] = {
    TensorParallel: {
        "plan": st.sampled_from(
            ["auto", {"*.q_proj": "column", "*.o_proj": "row"}, {"*.qkv": "column:3"}]
        ),
        "sequence_parallel": st.booleans(),
        "across_nodes": st.booleans(),
        "overlap": st.sampled_from(["sums", "pieces", "fused"]),
    },
    Pipeline: {
        "microbatches": _ONE_OR_AUTO,
        "schedule": st.sampled_from(["1f1b", "gpipe"]),
        "split": st.just("auto") | st.lists(st.integers(1, 9), min_size=1).map(tuple),
    },
    Units: {
        "modules": st.just("auto") | _NAMES,
        "min_parameters": st.integers(0, 10**12),
        "optional": st.just("auto") | _NAMES,
    },
    DelayedInit: {"seed": st.integers(0, 2**40)},
    Activations: {
        "checkpoint": st.sampled_from(
            ["none", "full", "selective", "every:3", {"*.mlp": "full"}]
        ),
        "check": st.booleans(),
        "offload": st.booleans(),
        "loading_horizon": st.integers(1, 9),
        "offload_min_bytes": st.integers(0, 10**9),
        "offload_host_gib": st.none() | st.floats(0.1, 1e4),
    },
    Compile: {
        "mode": st.sampled_from([None, "max-autotune"]),
        "backend": st.sampled_from(["inductor", "aot_eager"]),
        "fullgraph": st.booleans(),
        "dynamic": st.sampled_from([None, True, False]),
        "options": st.sampled_from([None, {"epilogue_fusion": True}]),
    },
    Compression: {
        "gather": st.sampled_from([None, "int8", "fp8"]),
        "gather_inside_nodes": st.booleans(),
        "gather_after_steps": st.integers(0, 1000),
        "gather_exclude": st.lists(
            st.sampled_from(["*norm*", "*.bias"]), unique=True
        ).map(tuple),
        "reduce": st.sampled_from([None, "int8", "int4", "bf16"]),
        "error_feedback": st.sampled_from([True, False, "auto"]),
    },
    Collectives: {
        "hierarchical": st.booleans() | st.just("auto"),
        "forward_prefetch": _COUNT_OR_AUTO,
        "backward_prefetch": _ONE_OR_AUTO,
        "reduce_scatter_buffers": _ONE_OR_AUTO,
        "separate_reduce_scatter_group": st.booleans(),
        "symmetric_memory": st.booleans(),
        "context_head_groups": _ONE_OR_AUTO,
        "expert_transport": st.sampled_from(["all_to_all", "deep_ep"]),
        "meter": st.booleans(),
    },
    AutoPlan: {
        "sequence": st.none() | st.integers(2, 10**6),
        "micro_batch": st.none() | st.integers(1, 64),
        "global_batch": st.none() | st.integers(1, 4096),
        "cluster": st.sampled_from([None, "4xp5", "cluster.yaml"]),
    },
    Planner: {
        "memory_headroom": st.floats(0, 1, exclude_max=True),
        "device_memory_gib": st.none() | st.floats(0.01, 1e4),
        "optimizer": st.sampled_from(["auto", "adamw", "sgd-momentum"]),
    },
    Checkpoint: {
        "full_state_dict": st.booleans(),
        "async_save": st.booleans(),
        "verify": st.sampled_from(["auto", "sizes", "digests"]),
        "allow_batch_change": st.booleans(),
        "preemption_grace_s": st.floats(0, 1e4),
        "memory_every_n_steps": st.integers(0, 1000),
    },
}


def some(recipe: type[Recipe]) -> Any:
    """Recipes with some of their fields drawn."""
    return st.fixed_dictionaries({}, optional=FIELDS[recipe]).map(
        lambda fields: recipe(**fields)
    )


VALUES: dict[str, Any] = {
    "shard_degree": st.integers(1, 64).map(lambda n: n * 6)
    | st.sampled_from(["node", "world", "auto"]),
    "context_parallel_degree": st.sampled_from([1, 2, 3, 6]),
    "expert_parallel_degree": st.sampled_from([1, 2, 4, "node", "auto"]),
    "router_balance": st.sampled_from(["auto", "rank", "global"]),
    "router_bias_update_rate": st.none() | st.floats(1e-6, 1.0),
    "expert_capacity_factor": st.none() | st.floats(1e-6, 8.0),
    "tensor_parallel_degree": st.integers(1, 9),
    "tensor_parallel": some(TensorParallel),
    "pipeline_parallel_degree": st.integers(1, 9),
    "pipeline": some(Pipeline),
    "reshard_after_forward": st.booleans() | st.sampled_from(["auto", 2, 3, 6, "node"]),
    "keep_between_micro_batches": st.sampled_from(
        ["shards", "parameters", "gradients"]
    ),
    "units": some(Units),
    "forward_methods": st.lists(
        st.sampled_from(["generate", "model.encode"]), unique=True
    ).map(tuple),
    "delayed_init": st.none() | some(DelayedInit),
    "param_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "reduce_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "master_dtype": st.sampled_from(["auto", None, "float32"]),
    "on_nonfinite_grad_norm": st.sampled_from(["ignore", "skip", "raise"]),
    "optimizer_shard": st.sampled_from(["shard", "world"]),
    "state_offload": st.sampled_from([None, "optimizer", "all"]),
    "frozen_storage": st.sampled_from([None, "int8", "int4"]),
    "activations": some(Activations),
    "compile": st.none() | some(Compile),
    "compression": some(Compression),
    # Weights that travel in FP8 exclude values of two other knobs
    # (tests/core/config/test_fp8_recipe.py).
    "fp8": st.sampled_from(
        [
            None,
            Fp8Recipe(fp8_all_gather=False),
            Fp8Recipe(fp8_all_gather=False, margin=1),
        ]
    ),
    "chunked_cross_entropy": st.none() | st.integers(1, 10**6),
    "collectives": some(Collectives),
    "plan": st.none() | some(AutoPlan),
    "planner": some(Planner),
    "checkpoint": some(Checkpoint),
}


def consistent(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values, from the first knob on, that go together."""
    kept: dict[str, Any] = {}
    defaults = {knob: getattr(SmpConfig(), knob) for knob in SmpConfig.knobs()}
    for knob, value in values.items():
        if not any(
            contradictions(SimpleNamespace(**{**defaults, **kept, knob: value}))
        ):
            kept[knob] = value
    return kept


def as_text(value: Any) -> str:
    """The value as a person writes it into an environment variable."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Recipe):
        return json.dumps(value.to_dict())
    return json.dumps(value) if isinstance(value, (tuple, dict)) else str(value)
