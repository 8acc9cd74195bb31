"""The casts to FP8: value * scale, clamped, rounded to nearest even; with the amax, and
on the device the transpose.

Every cast clamps first: above E4M3's range torch 2.11 makes nan and torch 2.13
saturates, also infinities, without a trace. Infinities are found in the amax instead.
nan stays nan.

There are two ways to the same numbers: a Triton kernel that reads the tensor once
(CUDA, where Triton is installed) and the eager formula (everywhere; the kernel is
tested against it). There is no third one by ``torch.compile``: on CUDA it needs Triton
itself.

Shape letters: R rows (tokens), C columns (features).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp_core.fp8.scaling import LARGEST, Fp8State, scale_for, state_numbered
from smp_core.torch_facts import device_multiplies_fp8, has_triton


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix in FP8, of value ``data * inverse_scale``.

    Attributes:
        rows: ``[R, C]``, row-major; None if only the transpose is needed.
        columns: ``[C, R]``, row-major, the same numbers transposed; None if no product
            reads it.
        inverse_scale: 0-d float32.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse_scale: torch.Tensor


@torch.no_grad()
def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, 0-d float32; nan if there is one, 0 for an empty
    tensor."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x, ord=torch.inf).float()


def cast_eager(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Cast a tensor of any shape.

    Scales are powers of two, so the product is exact in every dtype that has float32's
    exponents.
    """
    # float16 has fewer exponents than scales: the product is taken in float32.
    if x.dtype == torch.float16:
        x = x.float()
    return (x * scale.to(x.dtype)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def transposed(x8_RC: torch.Tensor) -> torch.Tensor:
    """Make a row-major copy ``[C, R]`` of FP8 numbers, moved as bytes."""
    if x8_RC.device.type == "cuda" and has_triton() and x8_RC.numel():
        from smp_core.fp8.triton_casts import transposed_fused

        return transposed_fused(x8_RC)
    return transposed_eager(x8_RC)


def transposed_eager(x8_RC: torch.Tensor) -> torch.Tensor:
    """Do the same without Triton."""
    return x8_RC.view(torch.uint8).t().contiguous().view(x8_RC.dtype)


@torch.no_grad()
def quantize(
    x_RC: torch.Tensor,
    state: Fp8State,
    site: int,
    role: int,
    *,
    columns: bool = False,
    recording: bool = True,
) -> Quantized:
    """Cast ``x_RC`` by the scale in effect for this site and role, or by its own amax
    while that is not calibrated.

    Args:
        columns: make the transpose, too.
        recording: record the amax in the history (not in evaluation).
    """
    # Phase 1: the scale of its history; without one the tensor is read once more for
    # its own.
    dtype = state.formats[role]
    if state.uses_history(site, role):
        scale, inverse = state.scales(site, role)
        amax = None
    else:
        amax = amax_of(x_RC)
        scale = scale_for(amax, LARGEST[dtype], state.recipe.margin)
        inverse = 1.0 / scale

    # Phase 2: the cast.
    if device_multiplies_fp8(x_RC.device) and has_triton() and x_RC.numel():
        from smp_core.fp8.triton_casts import cast_fused

        # The kernel's maximum goes where it is recorded.
        into_slot = recording and amax is None and not torch.compiler.is_compiling()
        slot = state.current[site, role] if into_slot else None
        data, data_t, found = cast_fused(x_RC, scale, dtype, columns=columns, amax=slot)
    else:
        # By formulas: the same numbers, read several times.
        data = cast_eager(x_RC, scale, dtype)
        data_t = transposed(data) if columns else None
        slot = None
        found = amax_of(x_RC) if amax is None and recording else x_RC.new_zeros(())
    # Phase 3: the amax is recorded. A graph may not write into the state, and does that
    # by an operator of its own.
    if recording:
        recorded = found if amax is None else amax
        counted = state.counts is not None
        if torch.compiler.is_compiling():
            seen = (x_RC, scale) if counted else (None, None)
            inverse = _recorded(recorded, inverse, *seen, state.number, site, role)
        else:
            if slot is None:
                state.record(site, role, recorded)
            if counted:
                _count(state, site, role, x_RC, scale)
    return Quantized(data, data_t, inverse)


@torch.library.custom_op("smp::fp8_recorded", mutates_args=())
def _recorded(
    amax: torch.Tensor,
    inverse: torch.Tensor,
    x: torch.Tensor | None,
    scale: torch.Tensor | None,
    number: int,
    site: int,
    role: int,
) -> torch.Tensor:
    """Record an amax, and count ``x`` if it is given, in the state with this number.

    In a compiled graph the state's tensors would be inputs that the graph writes into,
    and of which it saves some for backward if it recomputes: autograd refuses them
    then, because other layers have written into them since. Recording twice does no
    harm. The product needs ``inverse``, of which a copy is returned, so that this is
    not left out.
    """
    state = state_numbered(number)
    state.record(site, role, amax)
    if x is not None and scale is not None and state.counts is not None:
        _count(state, site, role, x, scale)
    return inverse.clone()


@_recorded.register_fake
def _(amax: torch.Tensor, inverse: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(inverse)


@torch.no_grad()
def _count(
    state: Fp8State, site: int, role: int, x: torch.Tensor, scale: torch.Tensor
) -> None:
    """Add to the counts of saturated, flushed (not zero before, zero in FP8) and all
    elements."""
    assert state.counts is not None
    counts, dtype = state.counts[site, role], state.formats[role]
    scaled = (x.float() * scale).abs()
    counts[0] += (scaled > LARGEST[dtype]).sum()
    counts[1] += (
        (scaled > 0) & (scaled.clamp(max=LARGEST[dtype]).to(dtype).float() == 0)
    ).sum()
    counts[2] += x.numel()
