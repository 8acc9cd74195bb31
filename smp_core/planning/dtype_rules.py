"""Rules for dtypes: what is gathered, what gradients are reduced in, what parameters are stored in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp_core.planning.draft import Draft
from smp_core.planning.shapes import ParameterShape, Shapes

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """A trainer's precision, as sharding sees it.

    Attributes:
        param_dtype: what parameters are gathered in where the knob says "auto"; None: their own dtype.
        why: said of it.
        cast_forward_inputs: floating-point inputs are cast to that dtype (not under autocast).
        skips_steps: a gradient scaler skips steps whose gradients are inf or nan.
    """

    param_dtype: torch.dtype | None = None
    why: str = "the parameters' own dtype"
    cast_forward_inputs: bool = True
    skips_steps: bool = False


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in effect; None means each tensor's own.

    Attributes:
        gathered: what forward and backward compute with.
        reduced: what gradients are added up in.
        stored: what trainable float32 parameters of units are stored in where ``optimizer_shard="world"`` keeps float32
            masters of them.
    """

    gathered: torch.dtype | None
    reduced: torch.dtype | None
    stored: torch.dtype | None

    def of_gathered(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.gathered, parameter.dtype)

    def of_stored(self, parameter: ParameterShape) -> torch.dtype:
        masters = parameter.trainable and parameter.is_divided and parameter.dtype == torch.float32
        return _or_own(self.stored if masters else None, parameter.dtype)

    def of_reduced(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.reduced, self.of_gathered(parameter))


def settle_precision(draft: Draft, precision: Precision) -> None:
    """Resolve ``param_dtype="auto"`` by the trainer's precision, and leave skipped steps to a gradient scaler."""
    if draft.knobs.param_dtype == "auto":
        draft.settle("param_dtype", name_of(precision.param_dtype), precision.why)
    if precision.skips_steps:
        draft.settle("on_nonfinite_grad_norm", "ignore", "the gradient scaler skips such steps")


def settle_reduce_dtype(draft: Draft, shapes: Shapes) -> None:
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
        if gathered in HALF or (gathered is None and any(p.dtype in HALF for p in shapes.parameters)):
            draft.settle("reduce_dtype", "float32", "gradients are half precision")
        else:
            draft.settle("reduce_dtype", None, "the gradients' own dtype")


def settle_stored_dtype(draft: Draft, shapes: Shapes, gathers: bool) -> torch.dtype | None:
    """Decide what parameters with masters over the world are stored in, if not in their own dtype: what is gathered.
    Not where that would lose digits: FP8 weights are quantised from stored ones, host masters are read from them."""
    knobs = draft.knobs
    dtype = dtype_of(knobs.param_dtype)
    native_fp8 = knobs.fp8 is not None and knobs.fp8.backend == "native"
    if knobs.optimizer_shard != "world" or native_fp8 or knobs.state_offload == "optimizer" or dtype not in HALF:
        return None
    of_units = [shapes.of_name(name) for unit in shapes.units.units for name in unit.parameters]
    if not gathers or not any(p.dtype == torch.float32 and p.trainable for p in of_units):
        return None
    why = f"float32 weights are masters over all ranks; parameters are stored in {knobs.param_dtype}, as they compute"
    draft.settle("optimizer_shard", "world", why)
    return dtype


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that a knob's word names; None: each tensor's own."""
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _or_own(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    return own if dtype is None or not own.is_floating_point else dtype
