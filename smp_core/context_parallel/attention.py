"""Attention over sequences that several ranks hold: two operators of torch.library,
forward and backward.

Each rank gathers the keys and values of all ranks, computes the attention of its own
queries over them, and frees them; backward gathers them again, and reduce-scatters the
gradients of keys and values (the all-gather form of context parallelism: Llama 3, arXiv
2407.21783, section 3.3.2). Saved for backward are this rank's queries, keys, values,
output and LSE, and no tensor of the unsplit sequence's length.

The two are operators, and not an autograd.Function, so that activation checkpointing
can keep their results (``torch.ops.smp.context_attention.default`` in a selective
policy: nothing is gathered for the recomputation), and ``torch.compile`` takes them as
they are.

An attention sink s (one number per head that only the softmax's denominator sees; Xiao
et al., arXiv 2309.17453, section 3.3, and gpt-oss) needs no kernel of its own: with it
LSE' = log(exp(LSE) + exp(s)), and the output shrinks by exp(LSE - LSE') = sigmoid(LSE -
s). Backward gets the new output and LSE': a kernel makes the weights out of LSE' and
subtracts delta = sum(grad * output) from their gradients, which is all that a key of
weight exp(s - LSE') and value 0 changes for the other keys. The sink's own gradient is
the weight times (0 - delta), summed over rows and tokens.

Shape letters: B rows, L tokens of this rank, S tokens of all, H query heads, K key and
value heads, D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from smp_core.activations import keep_outputs_of
from smp_core.context_parallel import kernels
from smp_core.context_parallel.fastest import Masks
from smp_core.context_parallel.key_value_exchange import (
    ContextGroup,
    Pair,
    gather_keys_values,
    group_numbered,
    head_ranges,
    reduce_gradients,
)
from smp_core.context_parallel.sequence_plan import KernelCall, SequencePlan, decode

SLICED = (
    "a step that slices tokens (x[:, :-1]) or adds some (a class token) does so in each rank's part; let the batch "
    "bring tokens and their targets, of one length (docs/context-batches.md), or write context_parallel_degree=1"
)


def attention(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKE: torch.Tensor,
    plan: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from this rank's queries to the unsplit sequence. Collective over the
    context group.

    Args:
        q_BLHD, k_BLKD, v_BLKE: this rank's tokens, in the plan's order. H is a multiple
            of K: query head h uses key head h // (H / K). float64, float32, bfloat16 or
            float16, all three the same.
        plan: :meth:`SequencePlan.encode` of the batch.
        causal: whether a token sees only its document's earlier tokens, and itself.
        window: how many tokens it sees at most, itself included; needs ``causal``.
            None: all.
        scale: factor of the scores; default 1 / sqrt(D).
        sinks: [H], a score for each head that takes part in the softmax and has no
            value; its gradient is that of this rank's tokens. Any floating point dtype.

    Returns:
        [B, L, H, E], of the inputs' dtype.

    Raises:
        ValueError: shapes that do not fit one another or the plan, different dtypes, a
            window without causality.
    """
    _check(q_BLHD, k_BLKD, v_BLKE, causal, window)
    if sinks is not None and sinks.shape != q_BLHD.shape[2:3]:
        raise ValueError(
            f"sinks {tuple(sinks.shape)} do not fit {q_BLHD.shape[2]} query heads; give one score per head"
        )
    scale = q_BLHD.shape[-1] ** -0.5 if scale is None else float(scale)
    return context_attention(
        q_BLHD, k_BLKD, v_BLKE, plan, scale, causal, window, sinks
    )[0]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
) -> None:
    """Refuse shapes and dtypes that do not fit one another."""
    if any(tensor.dim() != 4 for tensor in (q, k, v)):
        raise ValueError(
            f"queries, keys and values have 4 dims [B, L, H, D], not {q.dim()}, {k.dim()} and {v.dim()}"
        )
    if (
        q.shape[:2] != k.shape[:2]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit: rows, tokens and "
            "the head size are the same (cross-attention and caches of earlier tokens have no context parallel form)"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key and value heads"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}; give all three one dtype"
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"window={window} with causal={causal}; allowed: a window of 1 token or more, causal only"
        )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, L, H, E] and the LSE [B, H, L]; :func:`attention`
    describes and checks the arguments."""
    # The plan says which rank holds what; the group moves keys and values.
    layout, group = _plan_for(q, plan)
    rows, length, heads, _ = q.shape
    out = q.new_empty(rows, length, heads, v.shape[3])
    lse = q.new_empty(rows, heads, length, dtype=kernels.lse_dtype(q.dtype))
    # Groups of heads, one after another: the next keys arrive while this group
    # computes.
    ranges = head_ranges(k.shape[2], group.head_groups)
    # Query heads go with the key heads that they use.
    share = heads // k.shape[2]
    pairs = gather_keys_values(k, v, layout, group, ranges)
    for first, last in ranges:
        pair = next(pairs)
        mine = slice(first * share, last * share)
        # Each of this rank's chunks sees one range of keys, of one or several
        # documents.
        for call in layout.calls(group.rank, causal, window):
            row, at, keys = _slices(call)
            part, part_lse = kernels.forward(
                q[row, at, mine],
                pair[0][row, keys],
                pair[1][row, keys],
                Masks(call.segments, scale, causal, window),
            )
            out[row, at, mine] = part
            lse[row, mine, at] = part_lse
        # Freed before the next group's keys are asked for.
        del pair
    # Once for all heads, when LSE is complete.
    if sinks is not None:
        _add_sinks(out, lse, sinks)
    return out, lse


def _add_sinks(
    out_BLHE: torch.Tensor, lse_BHL: torch.Tensor, sinks_H: torch.Tensor
) -> None:
    """Add the sinks to the softmax, in place."""
    sinks_H1 = sinks_H.to(lse_BHL.dtype)[:, None]
    out_BLHE.mul_(torch.sigmoid(lse_BHL - sinks_H1).transpose(1, 2).unsqueeze(-1))
    lse_BHL.copy_(torch.logaddexp(lse_BHL, sinks_H1))


def _gradient_of_sinks(
    grad_BLHE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_BHL: torch.Tensor,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient [H] of the sinks for this rank's tokens, from the output and
    the LSE with sinks."""
    delta_BHL = (grad_BLHE.to(lse_BHL.dtype) * out_BLHE).sum(-1).transpose(1, 2)
    weights_BHL = torch.exp(sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL)
    return -(weights_BHL * delta_BHL).sum((0, 2)).to(sinks_H.dtype)


def differentiate(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of this rank's queries, keys and values."""
    layout, group = _plan_for(q, plan)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ranges = head_ranges(k.shape[2], group.head_groups)
    share = q.shape[2] // k.shape[2]
    # The reduction of one group of heads overlaps with the attention of the next.
    on_its_way: tuple[slice, Callable[[], Pair]] | None = None

    def take(which: slice, wait: Callable[[], Pair]) -> None:
        dk[:, :, which], dv[:, :, which] = wait()

    pairs = gather_keys_values(k, v, layout, group, ranges)
    for first, last in ranges:
        pair = next(pairs)
        mine = slice(first * share, last * share)
        # Half precision would round away small contributions of single ranks.
        sums = [
            torch.zeros_like(gathered, dtype=kernels.lse_dtype(q.dtype))
            for gathered in pair
        ]
        # Several chunks may see one key: their gradients are added up.
        for call in layout.calls(group.rank, causal, window):
            row, at, keys = _slices(call)
            dq[row, at, mine], dk_part, dv_part = kernels.backward(
                grad[row, at, mine],
                q[row, at, mine],
                pair[0][row, keys],
                pair[1][row, keys],
                out[row, at, mine],
                lse[row, mine, at],
                Masks(call.segments, scale, causal, window),
            )
            sums[0][row, keys] += dk_part
            sums[1][row, keys] += dv_part
        del pair, dk_part, dv_part
        reduction = reduce_gradients(sums, layout, group)
        # The group before has had this group's attention to arrive.
        if on_its_way is not None:
            take(*on_its_way)
        on_its_way = slice(first, last), reduction
    assert on_its_way is not None
    take(*on_its_way)
    return dq, dk, dv


def _plan_for(q: torch.Tensor, plan: torch.Tensor) -> tuple[SequencePlan, ContextGroup]:
    """Decode the plan, and check that the queries [B, L, H, D] fit it."""
    layout = decode(plan)
    # A plan of another batch would give attention over the wrong tokens.
    if q.shape[1] != layout.local_length or len(layout.documents) not in (
        1,
        q.shape[0],
    ):
        raise ValueError(
            f"queries of {q.shape[0]} rows of {q.shape[1]} tokens do not fit the batch's plan: "
            f"{layout.local_length} tokens of each sequence on every rank, documents of {len(layout.documents)} rows. "
            f"Attention is over the batch's tokens, all of them: {SLICED}"
        )
    return layout, group_numbered(layout.group)


def _slices(call: KernelCall) -> tuple[slice, slice, slice]:
    """Return the call's slices of rows, of this rank's queries, and of the unsplit
    sequence's keys."""
    row = slice(None) if call.row is None else slice(call.row, call.row + 1)
    return row, slice(*call.queries), slice(*call.keys)


context_attention = torch.library.custom_op("smp::context_attention", mutates_args=())(
    attend
)
context_attention_backward = torch.library.custom_op(
    "smp::context_attention_backward", mutates_args=()
)(differentiate)
INSIDE: dict[Any, Callable[..., Any]] = {
    torch.ops.smp.context_attention.default: attend,
    torch.ops.smp.context_attention_backward.default: differentiate,
}
"""What the operators do, for who wants to see their collectives and temporaries."""


@context_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length, heads, _size = q.shape
    out = q.new_empty(rows, length, heads, v.shape[3])
    return out, q.new_empty(rows, heads, length, dtype=kernels.lse_dtype(q.dtype))


@context_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    # Inputs and results of this rank only; nothing of the unsplit sequence is kept.
    q, k, v, plan, ctx.scale, ctx.causal, ctx.window, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, plan, sinks)


def _backward(
    ctx: Any, grad: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, plan, sinks = ctx.saved_tensors
    grads = context_attention_backward(
        grad, q, k, v, out, lse, plan, ctx.scale, ctx.causal, ctx.window
    )
    of_sinks = None if sinks is None else _gradient_of_sinks(grad, out, lse, sinks)
    return (*grads, None, None, None, None, of_sinks)


def _refuse_twice(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "context_parallel_degree: attention over split sequences has no second derivative (a gradient penalty, "
        "autograd.grad(..., create_graph=True) of a loss through the model); write context_parallel_degree=1"
    )


context_attention.register_autograd(_backward, setup_context=_save)
context_attention_backward.register_autograd(_refuse_twice)
keep_outputs_of(torch.ops.smp.context_attention)


# FLOP counters see the operator and not the kernels inside. Every pair counts, masked
# or not, as in torch's formulas.
@register_flop_formula(torch.ops.smp.context_attention, get_raw=True)
def _forward_flops(q: Any, k: Any, v: Any, plan: Any, *_: Any, **__: Any) -> int:
    rows, length, heads, size = q.shape
    return 2 * rows * heads * length * decode(plan).length * (size + v.shape[3])


@register_flop_formula(torch.ops.smp.context_attention_backward, get_raw=True)
def _backward_flops(
    _: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, plan: Any, *__: Any, **___: Any
) -> int:
    rows, length, heads, size = q.shape
    # scores again, gradients of queries and keys; gradients of weights and values
    return 2 * rows * heads * length * decode(plan).length * (3 * size + 2 * v.shape[3])
