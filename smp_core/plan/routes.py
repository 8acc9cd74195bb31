"""What is sent: in how many groups of heads, in how many bytes."""

from __future__ import annotations

import torch

from smp_core.codecs import CodeName
from smp_core.codecs.codec import codec


def compression(payload: CodeName | None, dtype: torch.dtype, elements: int) -> float:
    """Return bytes that ``elements`` elements take on the wire, as a share of what they
    take in their dtype."""
    return (
        min(codec(payload).size(elements) / (elements * dtype.itemsize), 1.0)
        if payload and elements
        else 1.0
    )


def head_groups(heads: int, at_most: int) -> int:
    """Return in how many equal groups keys' heads are exchanged: ``at_most``, or the
    largest divisor of ``heads`` below it."""
    return next(
        groups for groups in range(min(at_most, heads), 0, -1) if heads % groups == 0
    )
