"""Copies of shards on other nodes: the right bytes at any sizes, and an end where the
neighbour is gone."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from smp_core.checkpoint.memory.save import exchange_copies, pieces
from tests.harness import run_ranks

# Bytes of each rank's file, of four nodes of one rank.
SIZES = [3_000_001, 700_000, 0, 1]


def content(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (SIZES[rank],), dtype=torch.uint8, generator=generator)


def exchanged(piece_bytes: int) -> bool:
    """Send this rank's bytes, of two files, to the next one; whether those of the one
    before have come."""
    rank, world = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % world, (rank - 1) % world
    sent, expected = (
        [content(rank), torch.full((5,), rank)],
        [content(source), torch.full((5,), source)],
    )
    sent[1], expected[1] = sent[1].byte(), expected[1].byte()
    taken = [torch.zeros_like(each) for each in expected]
    exchange_copies(sent, to, taken, source, dist.group.WORLD, piece_bytes)
    return all(map(torch.equal, taken, expected))


def test_copies_of_unequal_sizes_arrive_in_pieces_of_any_size() -> None:
    assert [
        len(piece)
        for piece in pieces([torch.zeros(5), torch.zeros(0), torch.zeros(2)], 2)
    ] == [2, 2, 1, 2]
    for piece_bytes in (256 << 10, 4 << 20):
        assert run_ranks(exchanged, 4, piece_bytes) == [True] * 4


def left_alone(limit: float) -> str:
    """Exchange with a rank that does not come; the error."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
    error = ""
    if dist.get_rank() == 0:
        try:
            exchange_copies([content(0)], 1, [content(1)], 1, group)
        except RuntimeError as raised:
            error = str(raised)
    dist.barrier()
    return error


def test_a_neighbour_that_is_gone_ends_the_exchange() -> None:
    errors = run_ranks(left_alone, 2, 2.0)
    assert errors[0] and not errors[1]
