"""The nearest matrix with orthonormal rows or columns, roughly: a Newton-Schulz iteration of fifth order.

Muon's update (Keller Jordan, https://kellerjordan.github.io/posts/muon/). The coefficients are chosen for speed:
singular values come out between about 0.7 and 1.2 and not at 1. The operations are torch.optim.Muon's, in its order, so
that a matrix comes out bit for bit as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def orthogonalize(
    matrices: torch.Tensor, *, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return each matrix with its singular values brought near 1.

    Args:
        matrices: [..., rows, columns], of any floating dtype; a stack of matrices is computed as one product a step.
        coefficients: a, b and c of ``aX + (bA + cA²)X`` with ``A = XXᵀ``.
        eps: the least norm that a matrix is divided by at the start.
        dtype: of the iteration and of what is returned; torch.optim.Muon's is bfloat16.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype, copy=True)
    if is_tall:  # products of the shorter side with itself
        x = x.mT
    if x.ndim == 2:
        x.div_(x.norm().clamp(min=eps))
        product: Callable[..., torch.Tensor] = torch.addmm
    else:
        x = x.reshape(-1, *x.shape[-2:])
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
        product = torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.reshape(matrices.shape)


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the operations of one matrix: three products a step, two of them of the shorter side with itself."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
