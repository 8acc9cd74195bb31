"""Dtypes of a plan: what is computed in, reduced in, stored in and stepped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp_core.plan.shapes import ParameterShape

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
        masters: trainable half precision parameters are stored in float32, which is what the optimizer steps; they
            compute in their own dtype.
        stored_as_gathered: trainable parameters of units are stored in what they compute in, where
            ``optimizer_shard="world"`` keeps float32 masters of them.
    """

    gathered: torch.dtype | None
    reduced: torch.dtype | None
    masters: bool = False
    stored_as_gathered: bool = False

    def of_gathered(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.gathered, parameter.dtype)

    def of_stored(self, parameter: ParameterShape) -> torch.dtype:
        if self.stored_as_gathered and parameter.trainable and parameter.is_divided:
            return self.of_gathered(parameter) if self.of_stepped(parameter) == torch.float32 else parameter.dtype
        return self.of_stepped(parameter)

    def of_stepped(self, parameter: ParameterShape) -> torch.dtype:
        has_master = self.masters and parameter.trainable and parameter.dtype in HALF
        return torch.float32 if has_master else parameter.dtype

    def of_reduced(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.reduced, self.of_gathered(parameter))


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
