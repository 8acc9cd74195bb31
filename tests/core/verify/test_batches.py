"""Samples as hashes, and the batches of ranks joined into one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from smp_core.verify.batches import NotJoinable, join, sample_hashes


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


def test_joined_batches_have_all_samples_in_order() -> None:
    batches = [
        {"x": torch.arange(4).view(2, 2) + 10 * rank, "pair": Pair(torch.ones(2), ["a", "b"])} for rank in (0, 1)
    ]
    joined = join(batches)
    assert joined["x"].tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert isinstance(joined["pair"], Pair) and joined["pair"].names == ["a", "b", "a", "b"]
    assert sample_hashes(joined) == [hash_ for batch in batches for hash_ in sample_hashes(batch)]


def test_batches_of_other_shapes_are_not_joined() -> None:
    with pytest.raises(NotJoinable, match=r"\[2, 3\] and \[2, 4\]"):
        join([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}])


def test_samples_are_the_same_only_with_the_same_bytes_in_all_tensors() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 0, 1])
    first, second, third = sample_hashes((x, y))
    assert first == second != third
    assert sample_hashes((x.double(), y))[0] != first
    assert len(sample_hashes((torch.zeros(3), torch.zeros(4)))) == 1  # no common first dim: one hash for the batch
