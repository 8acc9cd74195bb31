"""The work that the kernels of context parallelism are asked for, counted from their
calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from smp_core.context_parallel import kernels
from smp_core.context_parallel.fastest import Kernel, Masks


@dataclass(eq=False)
class AttentionWork:
    """The work that the kernels were asked for.

    Attributes:
        pairs: (query, key) pairs that are not masked, times query heads, forward and
            backward alike.
        calls: kernel calls by name.
    """

    pairs: int = 0
    calls: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def count_attention_work() -> Iterator[AttentionWork]:
    """Count the work of this process's kernels inside the block."""
    found = AttentionWork()
    real = kernels._with_a_kernel

    def counted(
        tensors: tuple[Tensor, ...], masks: Masks, work: Callable[[Kernel], Any]
    ) -> Any:
        rows, _, heads, _ = tensors[0].shape
        pairs = sum(
            visible_pairs(q, k, masks.causal, masks.window) for q, k in masks.segments
        )

        def noted(kernel: Kernel) -> Any:
            found.calls[kernel.name] = found.calls.get(kernel.name, 0) + 1
            found.pairs += rows * heads * pairs
            return work(kernel)

        return real(tensors, masks, noted)

    with mock.patch.object(kernels, "_with_a_kernel", counted):
        yield found


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Count the (query, key) pairs of a rectangle, aligned at its end, that are not
    masked."""
    if not causal:
        return queries * keys
    # Keys that the first and the last query see.
    # The number of visible keys grows by one from query to query: an arithmetic series.
    last = [keys - queries + i + 1 for i in (0, queries - 1)]
    total = (last[0] + last[1]) * queries // 2
    # What a window hides grows by one as well, from the first query that has more keys.
    if window is not None and last[1] > window:
        over = last[1] - window
        skipped = max(0, last[0] - window - 1)
        total -= over * (over + 1) // 2 - skipped * (skipped + 1) // 2
    return total
