"""Rules for dtypes: what is gathered, what gradients are reduced in, what parameters are stored in."""

from __future__ import annotations

import torch

from smp_core.config import SmpConfig
from smp_core.plan import HALF, ModelDraft, dtype_of, name_of


def settle_precision(draft: ModelDraft) -> None:
    """Resolve ``param_dtype="auto"`` by the trainer's precision, and leave skipped steps to a gradient scaler."""
    precision = draft.precision
    if draft.knobs.param_dtype == "auto":
        draft.settle("param_dtype", name_of(precision.param_dtype), precision.why)
    if precision.skips_steps:
        draft.settle("on_nonfinite_grad_norm", "ignore", "the gradient scaler skips such steps")


def settle_reduce_dtype(draft: ModelDraft) -> None:
    """Resolve ``reduce_dtype="auto"``: float32 where gradients would be half precision, else the gradients' own.

    Raises:
        ValueError: float16, which sums that are not divided yet would overflow.
    """
    asked = draft.knobs.reduce_dtype
    if asked == "float16":
        raise ValueError(
            "reduce_dtype='float16': gradients are added up before they are divided and would overflow; "
            "allowed: 'auto', 'float32', 'bfloat16'"
        )
    if asked == "auto":
        gathered = dtype_of(draft.knobs.param_dtype)
        if gathered in HALF or (gathered is None and any(p.dtype in HALF for p in draft.shapes.parameters)):
            draft.settle("reduce_dtype", "float32", "gradients are half precision")
        else:
            draft.settle("reduce_dtype", None, "the gradients' own dtype")


def settle_masters(draft: ModelDraft) -> bool:
    """Resolve ``master_dtype``, and warn where weights in half precision have none.

    Returns:
        whether these weights are stored in float32. (Masters on the host, and of a model that came sharded, are beside
        the weights, unless FP8 weights are quantised from what is stored.)

    Raises:
        ValueError: masters of half precision weights that came sharded.
    """
    knobs, asked, shapes = draft.knobs, draft.knobs.master_dtype, draft.shapes
    came_sharded, replicas = draft.given is not None, draft.layout.replicate
    half = [parameter for parameter in shapes.parameters if parameter.trainable and parameter.dtype in HALF]
    if not half:
        draft.settle("master_dtype", "float32" if asked == "float32" else None, "no trainable weight is half precision")
        return False
    if came_sharded and asked == "float32":
        raise ValueError(
            f"master_dtype='float32' and a model that came sharded ({shapes.kind}) with {name_of(half[0].dtype)} "
            "weights; shard it in float32 with MixedPrecisionPolicy(param_dtype=...), or let torch-smp shard it"
        )
    over_replicas = knobs.optimizer_shard == "world" and (replicas > 1 or not came_sharded)
    makers = {"optimizer_shard='world'": over_replicas, "state_offload='optimizer'": knobs.state_offload == "optimizer"}
    by = [knob for knob, makes in makers.items() if makes]
    if asked == "auto":
        why = f"{by[0]} steps float32 masters" if by else "the optimizer steps half precision weights themselves"
        draft.settle("master_dtype", "float32" if by else None, why)
    if asked == "auto" and not by:
        draft.warnings.append(without_masters(half[0].dtype))
    resolved = draft.knobs.master_dtype == "float32"
    beside = came_sharded or (knobs.state_offload == "optimizer" and not quantises_stored(knobs))
    return resolved and not beside


def without_masters(dtype: torch.dtype) -> str:
    """Return what it costs that weights in half precision have no masters."""
    steps = round(2 / torch.finfo(dtype).eps)
    return (
        f"weights are {name_of(dtype)} and have no float32 masters: an optimizer step that changes a weight by less "
        f"than 1/{steps} of it is rounded away, at learning rates like 1e-5 most steps; write master_dtype='float32' "
        "(weights, gradients and optimizer states are stored in float32), or train float32 weights in mixed precision "
        "(Lightning: precision='bf16-mixed'); master_dtype=None says that this is meant"
    )


def settle_stored_dtype(draft: ModelDraft) -> bool:
    """Decide whether parameters with masters over the world are stored in what they compute in.
    Not where that would lose digits: FP8 weights are quantised from stored ones, host masters are read from them."""
    knobs, shapes = draft.knobs, draft.shapes
    dtype = dtype_of(knobs.param_dtype)
    over_world = knobs.optimizer_shard == "world" and draft.gathers and draft.given is None
    if not over_world or quantises_stored(knobs) or knobs.state_offload == "optimizer":
        return False
    of_units = [shapes.of_name(name) for unit in shapes.units.units for name in unit.parameters]
    stepped = (torch.float32, *HALF) if draft.masters else (torch.float32,)
    if dtype not in HALF or not any(p.dtype in stepped and p.trainable for p in of_units):
        return False
    why = f"float32 weights are masters over all ranks; parameters are stored in {knobs.param_dtype}, as they compute"
    draft.settle("optimizer_shard", "world", why)
    return True


def quantises_stored(knobs: SmpConfig) -> bool:
    """Return whether FP8 weights are quantised from the stored ones."""
    return knobs.fp8 is not None and knobs.fp8.backend == "native"
