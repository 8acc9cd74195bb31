"""Batches of ranks that are joined: which come, and with which factors."""

from __future__ import annotations

import torch.distributed as dist

from smp_core.watch.joined import join
from tests.harness import run_ranks

# Samples that count in the batches of each rank: in the second step none do.
COUNTED = ((2, 0, 3), (1, 0))


def joined() -> list[tuple[int, float]]:
    own = COUNTED[dist.get_rank()] if dist.is_initialized() else COUNTED[0]
    return [(batch[0], factor) for batch, factor in join([[n] for n in own], sum)]


def test_batches_without_a_sample_that_counts_end_no_epoch() -> None:
    assert run_ranks(joined, 2) == [
        [(2, 4 / 3), (0, 0.0), (3, 2.0)],
        [(1, 2 / 3), (0, 0.0), (0, 0.0)],
    ]
    assert joined() == [(2, 1.0), (0, 0.0), (3, 1.0)]
