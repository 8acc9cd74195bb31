"""Products of split layers that overlap with the messages around them
(``tensor_parallel.overlap``).

Where tokens are split, the input of column layers is gathered right before their
products, and what a row layer computes is added up right behind its product. One can go
on during the other only if the product is made in pieces:

    gather_products    own tokens [..., N/T, H], factors [H, F_i]  ->  all tokens [..., N, H], products [..., N, F_i]
    product_scatter    tokens [..., N, F], a factor [F, H]         ->  own tokens of the sum [..., N/T, H]

"pieces" starts the messages of all pieces of a rank's tokens and multiplies each when
it is there, or sends each sum when it is computed: collectives of any backend. "fused"
is torch's own: its operators over symmetric memory, where devices read each other's
tokens while they multiply (CUDA, peers of one node).

Backward of column layers sends its sum while the weights' gradients are computed, as
everywhere (:mod:`smp_core.tensor_parallel.overlap`); that of a row layer gathers the
gradient by the same two functions. What is kept for backward is what autograd would
keep: gathered inputs, and factors. N tokens, H and F features, T ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.roles import is_conv1d
from smp_core.torch_facts import symmetric_memory_operators

PIECES = 4
"""Parts of a rank's tokens with "pieces": all messages but a quarter can be hidden."""


def gather_products(
    part: Tensor, factors: Sequence[Tensor], axis: TensorAxis
) -> tuple[Tensor, list[Tensor]]:
    """Gather tokens and multiply them by each factor; without autograd, everything
    returned is contiguous."""
    if axis.overlap == "fused":
        n_bytes = axis.degree * part.nbytes
        # Metered as the all-gather that it replaces.
        with axis.meter.ring("tensor_all_gather", axis.ranks, n_bytes):
            gathered, products = symmetric_memory_operators().fused_all_gather_matmul(
                part.contiguous(), list(factors), part.ndim - 2, axis.group.group_name
            )
        # With several samples, tokens are the first dimension in the operator's memory.
        return gathered.contiguous(), [product.contiguous() for product in products]
    # All messages are started at once; products are made in the order of arrival.
    arriving = [axis.start_gather(piece) for piece in part.chunk(PIECES, -2)]
    pieces: list[Tensor] = []
    products_of: list[list[Tensor]] = [[] for _ in factors]
    for finish in arriving:
        pieces.append(finish())
        for found, factor in zip(products_of, factors, strict=True):
            found.append(pieces[-1] @ factor)
    return _in_order(pieces), [_in_order(found) for found in products_of]


def _in_order(pieces: Sequence[Tensor]) -> Tensor:
    """Return [..., N, F] from pieces [T, ..., n, F] of each rank's tokens."""
    return torch.cat(
        [piece[rank] for rank in range(len(pieces[0])) for piece in pieces], -2
    )


def product_scatter(tensor: Tensor, factor: Tensor, axis: TensorAxis) -> Tensor:
    """Multiply, add up over the ranks and return this rank's tokens; without
    autograd."""
    if axis.overlap == "fused":
        n_bytes = tensor[..., 0].numel() * factor.shape[1] * tensor.element_size()
        with axis.meter.ring("tensor_reduce_scatter", axis.ranks, n_bytes):
            total: Tensor = symmetric_memory_operators().fused_matmul_reduce_scatter(
                tensor.contiguous(),
                factor,
                "sum",
                tensor.ndim - 2,
                axis.group.group_name,
            )
        return total.contiguous()
    # Pieces are cut inside each rank's tokens, so that every message has a part for
    # each rank.
    by_rank = tensor.unflatten(-2, (axis.degree, -1))
    # Each sum is under way while the next piece is multiplied.
    leaving = [
        axis.start_reduce_scatter(piece @ factor, -3)
        for piece in by_rank.chunk(PIECES, -2)
    ]
    return torch.cat([finish() for finish in leaving], -2).squeeze(-3)


def factor_of(layer: nn.Module, weight: Tensor, entered: Tensor) -> Tensor:
    """Return what a layer multiplies its input by, [inputs, outputs]: a view of its
    weight.

    Raises:
        ValueError: an operand that autocast would cast, or an input of another dtype.
    """
    # The operands are multiplied as they are, without the casts of autocast.
    kind = entered.device.type
    product = (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else weight.dtype
    )
    if not entered.dtype == weight.dtype == product:
        raise ValueError(
            f"tensor_parallel.overlap: a layer of {weight.dtype} is given {entered.dtype} and multiplies in {product}; "
            "write a precision without autocast (Lightning: 'bf16-true'; Accelerate and Trainer: a bfloat16 model and "
            "mixed_precision='no'), or tensor_parallel={'overlap': 'sums'}"
        )
    return weight if is_conv1d(layer) else weight.t()


def _factor_gradient(factor: Tensor, entered: Tensor, grad: Tensor) -> Tensor:
    """Return a factor's gradient, such that the weight's is contiguous."""
    # The product in this order leaves the layer's own weight gradient contiguous,
    # transposed or not.
    rows, grads = entered.flatten(0, -2), grad.flatten(0, -2)
    return rows.t() @ grads if factor.is_contiguous() else (grads.t() @ rows).t()


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, axis: TensorAxis, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        gathered, products = gather_products(part, factors, axis)
        ctx.axis = axis
        # Gathered tokens are kept, as autograd would keep them: they are not gathered
        # again.
        ctx.save_for_backward(gathered, *factors)
        ctx.set_materialize_grads(False)
        return gathered, *products

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered, *factors = ctx.saved_tensors
        # What others than these layers did with the gathered tokens has its part in
        # their gradient too.
        total = grads[0]
        for factor, grad in zip(factors, grads[1:], strict=True):
            if grad is not None and ctx.needs_input_grad[0]:
                total = (
                    grad @ factor.t() if total is None else total + grad @ factor.t()
                )
        # The sum is under way while the factors' gradients are computed.
        finish = None if total is None else ctx.axis.start_reduce_scatter(total, -2)
        of_factors = [
            _factor_gradient(factor, gathered, grad)
            if grad is not None and needed
            else None
            for factor, grad, needed in zip(
                factors, grads[1:], ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None if finish is None else finish(), None, *of_factors


def column_products(
    part: Tensor, axis: TensorAxis, factors: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gather what column layers read, [..., N/T, H], and return it and its products
    with their factors [H, F_i]."""
    gathered, *products = _ColumnProducts.apply(part, axis, *factors)
    return gathered, products


class _Operands(torch.autograd.Function):
    """Keeps what a row layer's backward needs before its product is made: a block that
    is recomputed ends when the last tensor that is kept was seen again, and makes no
    product whose output is not needed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, factor: Tensor, kept: list[Any]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, factor)
        kept.append(ctx)
        return hidden.view_as(hidden), factor.view_as(factor)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *grads, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, factor: Tensor, axis: TensorAxis, kept: list[Any]
    ) -> Tensor:
        ctx.axis, ctx.kept = axis, kept
        return product_scatter(hidden, factor, axis)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Kept by _Operands, so that a recomputed block gives them without the product.
        hidden, factor = ctx.kept[0].saved_tensors
        gathered, (of_hidden,) = gather_products(grads[0], [factor.t()], ctx.axis)
        needed = ctx.needs_input_grad[1]
        return (
            of_hidden,
            _factor_gradient(factor, hidden, gathered) if needed else None,
            None,
            None,
        )


def row_product(hidden: Tensor, factor: Tensor, axis: TensorAxis) -> Tensor:
    """Return this rank's tokens [..., N/T, H] of the sum of all ranks' products of
    [..., N, F] and [F, H]."""
    kept: list[Any] = []
    return _RowProduct.apply(*_Operands.apply(hidden, factor, kept), axis, kept)
