"""FP8 products in a plan: what a block computes, moves, gathers and keeps where its
linear layers are the native ones of :mod:`smp_core.fp8`. A trace knows which these are,
and which dim of their weights is that of inputs.

A block's products run at the device's FP8 peak, at the share of it that was fitted on
products of bfloat16; attention, head and embedding stay as they are. Casts read an
input, or the gradient of an output, and write its rows and columns, one byte each.
Weights are gathered as FP8 bytes, and transposed for backward; where they are gathered
in the parameters' dtype they are cast in each forward pass. Once in a step all ranks
agree on scales.

In memory there are, beside what bfloat16 has: for backward each layer's own input in
one byte, in the place of inputs that nothing but products keeps; the codes of weights
that are not gathered as such, from forward to backward; and histories and scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from smp_core.plan import ParameterShape, Plan
from smp_core.planner.expert_bytes import dealt_elements, expert_degree
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Figures, ModelTrace

_ROLES, _FLOAT = 3, 4  # magnitudes of inputs, weights and gradients, in float32
_OF_SCALES = 1 + 1 + 4  # the running magnitude, the scale, its inverse 16 bytes apart


def fp8_weights(plan: Plan) -> list[ParameterShape]:
    """Return the weights of FP8 layers, as one tensor rank holds them; none without
    FP8."""
    if plan.knobs.fp8 is None:
        return []
    return [
        each for each in plan.split_shapes.parameters if plan.multiplies_in_fp8(each)
    ]


@dataclass(frozen=True)
class Fp8Layers:
    """The FP8 layers of a block on a rank: elements of their weights, with those of
    experts ``dealt`` to ranks; numbers that a token has as their inputs and outputs, of
    experts as often as it meets them."""

    elements: float = 0.0
    dealt: float = 0.0
    inputs: float = 0.0
    outputs: float = 0.0

    @classmethod
    def of(
        cls, plan: Plan, trace: ModelTrace, weights: list[ParameterShape]
    ) -> Fp8Layers:
        """Add up weights of all blocks, split over tensor ranks or not."""
        elements = dealt = inputs = outputs = 0.0
        for each in weights:
            if not each.name.startswith(trace.inside) or each.fp8_dim is None:
                continue
            # An expert's layer multiplies the rows that meet it: as often as a token
            # goes to experts.
            degree = plan.dealt(each)
            met = trace.experts_of_token if each.name in trace.experts else 1.0
            elements += each.elements / degree
            dealt += each.elements / degree if degree > 1 else 0.0
            inputs += met * each.shape[each.fp8_dim]
            outputs += met * (sum(each.shape[-2:]) - each.shape[each.fp8_dim])
        return cls(
            *(total / trace.blocks for total in (elements, dealt, inputs, outputs))
        )


def gathered_bytes(plan: Plan, trace: ModelTrace) -> tuple[float, float]:
    """Return the bytes that a block gathers of all but experts that are dealt to ranks,
    and of those that are here."""
    whole, dealt = dealt_elements(plan, trace)
    itemsize = plan.dtypes.of_gathered(plan.shapes.first_trained).itemsize
    block = trace.block_elements(plan.layout.tensor) - whole
    layers = Fp8Layers.of(
        plan,
        trace,
        [each for each in fp8_weights(plan) if plan.gathered_itemsize(each) == 1],
    )
    spared = itemsize - 1
    return block * itemsize - (
        layers.elements - layers.dealt
    ) * spared, dealt * itemsize - layers.dealt * spared


def kept_bytes(plan: Plan, trace: ModelTrace, tokens: float) -> float:
    """Return how much more a block keeps for backward, of so many tokens; below 0 where
    it is less."""
    weights = fp8_weights(plan)
    trained = [each for each in weights if each.trainable]
    if not trained:
        return 0.0
    layers = Fp8Layers.of(plan, trace, trained)
    unsplit = Fp8Layers.of(
        plan, trace, [plan.shapes.of_name(each.name) for each in trained]
    )
    # Their inputs are kept in one byte; inputs in bfloat16 that nothing but products
    # kept go away for them.
    inputs = tokens * (
        layers.inputs - trace.product_inputs * layers.inputs / unsplit.inputs
    )
    is_gathered = plan.gathers and plan.gathered_itemsize(weights[0]) == 1
    return inputs + (
        0.0 if is_gathered else Fp8Layers.of(plan, trace, weights).elements
    )


def state_bytes(plan: Plan) -> int:
    """Return the bytes of histories and scales."""
    if plan.knobs.fp8 is None:
        return 0
    return (
        len(fp8_weights(plan))
        * _ROLES
        * _FLOAT
        * (plan.knobs.fp8.amax_history_len + _OF_SCALES)
    )


def amax_bytes(plan: Plan) -> int:
    """Return the bytes of magnitudes that all ranks agree on behind a step: of all
    roles, or of weights alone."""
    if plan.knobs.fp8 is None:
        return 0
    return (
        len(fp8_weights(plan)) * _FLOAT * (_ROLES if plan.knobs.fp8.reduce_amax else 1)
    )


def block_figures(
    plan: Plan,
    trace: ModelTrace,
    hardware: Hardware,
    mode: str,
    micro_batch: int,
    held: float,
) -> Figures:
    """Return the figures of a block on a rank, of the experts that are there. FLOPs of
    FP8 products count as many as the device does of bfloat16 in the same time; without
    FP8 kernels they are emulated, which is planned as without.

    Args:
        mode: of recomputation.
        held: tokens of each sample on a rank.
    """
    found = trace.block[mode].at(micro_batch, held).of_experts_over(expert_degree(plan))
    if plan.knobs.compile is not None:
        found = found.compiled()
    recipe, peak = plan.knobs.fp8, hardware.device.fp8_flops
    if recipe is None or peak is None:
        return found
    # Times are computed at the bfloat16 peak, so that fewer FLOPs stand for the faster
    # ones.
    faster = hardware.device.flops / peak
    weights = [plan.shapes.of_name(each.name) for each in fp8_weights(plan)]
    layers = Fp8Layers.of(plan, trace, weights)

    # Casts: two bytes are read, twice where scales are of the tensor itself, and two
    # written.
    of_element = (6 if recipe.scaling == "dynamic" else 4) * micro_batch * held
    forward, backward = of_element * layers.inputs, of_element * layers.outputs
    if mode == "full":
        backward += of_element * layers.inputs
    # Products read a byte less of each operand that is counted: of inputs and weights
    # in forward, and in backward of those and twice of gradients of outputs.
    counted = [each for each in weights if each.name not in trace.experts]
    own, rows = Fp8Layers.of(plan, trace, counted), micro_batch * held
    passes = 2 if mode == "full" else 1  # in backward, with what is computed again
    read = rows * own.inputs, rows * (passes * own.inputs + 2 * own.outputs)

    # Weights: a byte is read and one written, or three where they come in the
    # parameters' dtype.
    if plan.gathers and recipe.fp8_all_gather:
        backward += 2 * layers.elements
    else:
        forward += 4 * layers.elements
    return replace(
        found,
        forward_products=found.forward_products * faster,
        backward_products=found.backward_products * faster,
        forward_experts=found.forward_experts * faster,
        backward_experts=found.backward_experts * faster,
        forward_moved=found.forward_moved + forward,
        backward_moved=found.backward_moved + backward,
        forward_operands=found.forward_operands - read[0],
        backward_operands=found.backward_operands - read[1],
        forward_matrices=found.forward_matrices - own.elements,
        backward_matrices=found.backward_matrices - passes * own.elements,
    )
