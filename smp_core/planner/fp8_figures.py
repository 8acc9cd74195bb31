"""FP8 products in a plan: what a block computes, moves and gathers where its linear layers are the native ones of
:mod:`smp_core.fp8`.

A block's products run at the device's FP8 peak, at the share of it that was fitted on products of bfloat16; attention,
head and embedding stay as they are. Casts read an input, or the gradient of an output, and write its rows and columns,
one byte each. Weights are gathered as FP8 bytes, and transposed for backward; where they are gathered in the
parameters' dtype they are cast in each forward pass. Once in a step all ranks agree on scales. Memory is planned as of
bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from smp_core.config import Fp8Recipe
from smp_core.plan import Plan
from smp_core.planner.expert_bytes import dealt_elements, expert_degree
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Figures, ModelTrace

_OF_AMAX = 12
"""Bytes of a weight's three float32 magnitudes."""


def _recipe(plan: Plan, hardware: Hardware) -> Fp8Recipe | None:
    """Return how products run in FP8; None: they do not, or are emulated, which is planned as without."""
    return None if hardware.device.fp8_flops is None else plan.knobs.fp8


def gathers_fp8(plan: Plan, hardware: Hardware) -> bool:
    """Return whether blocks are gathered as FP8 bytes."""
    recipe = _recipe(plan, hardware)
    return recipe is not None and recipe.fp8_all_gather


def amax_bytes(plan: Plan, trace: ModelTrace, hardware: Hardware) -> float:
    """Return the bytes of magnitudes that all ranks agree on behind a step."""
    of_block, _ = trace.linear_layers
    return 0.0 if _recipe(plan, hardware) is None else _OF_AMAX * trace.blocks * of_block


def block_figures(
    plan: Plan, trace: ModelTrace, hardware: Hardware, mode: str, micro_batch: int, held: float
) -> Figures:
    """Return the figures of a block on a rank, of the experts that are there. FLOPs of FP8 products count as many as
    the device does of bfloat16 in the same time.

    Args:
        mode: of recomputation.
        held: tokens of each sample on a rank.
    """
    found = trace.block[mode].at(micro_batch, held).of_experts_over(expert_degree(plan))
    recipe, peak = _recipe(plan, hardware), hardware.device.fp8_flops
    if recipe is None or peak is None:
        return found
    faster = hardware.device.flops / peak

    # Casts: two bytes are read, twice where scales are of the tensor itself, and two written.
    _, widths = trace.linear_layers
    of_element = 6 if recipe.scaling == "dynamic" else 4
    casts = of_element / 2 * widths * micro_batch * held  # half of the widths are inputs, half outputs
    again = casts if mode == "full" else 0.0

    # Weights: a byte is read and one written, or three where they come in the parameters' dtype.
    whole, dealt = dealt_elements(plan, trace)
    elements = trace.block_elements() - (whole - dealt) * plan.layout.tensor
    is_gathered = gathers_fp8(plan, hardware) and plan.gathers
    forward, backward = (0.0, 2 * elements) if is_gathered else (4 * elements, 0.0)
    return replace(
        found,
        forward_products=found.forward_products * faster,
        backward_products=found.backward_products * faster,
        forward_experts=found.forward_experts * faster,
        backward_experts=found.backward_experts * faster,
        forward_moved=found.forward_moved + casts + forward,
        backward_moved=found.backward_moved + casts + again + backward,
    )
