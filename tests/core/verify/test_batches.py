"""Samples as hashes, and the batches of ranks joined into one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from smp_core.verify.batches import NotJoinable, join, natural_samples, sample_hashes


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


def test_joined_batches_have_all_samples_in_order() -> None:
    batches = [
        {
            "x": torch.arange(4).view(2, 2) + 10 * rank,
            "pair": Pair(torch.ones(2), ["a", "b"]),
        }
        for rank in (0, 1)
    ]
    joined = join(batches)
    assert joined["x"].tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert isinstance(joined["pair"], Pair) and joined["pair"].names == [
        "a",
        "b",
        "a",
        "b",
    ]
    assert sample_hashes(joined) == [
        hash_ for batch in batches for hash_ in sample_hashes(batch)
    ]


def test_batches_of_other_shapes_are_not_joined() -> None:
    with pytest.raises(NotJoinable, match=r"\[2, 3\] and \[2, 4\]"):
        join([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}])


def test_samples_are_the_same_only_with_the_same_bytes_in_all_tensors() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 0, 1])
    first, second, third = sample_hashes((x, y))
    assert first == second != third
    assert sample_hashes((x.double(), y))[0] != first
    # No common first dim: one hash for the batch.
    assert len(sample_hashes((torch.zeros(3), torch.zeros(4)))) == 1


def augment(x: torch.Tensor, by: str) -> torch.Tensor:
    drawn = {
        "torch": torch.rand(()).item,
        "numpy": np.random.rand,
        "python": random.random,
        "": lambda: 1.0,
    }[by]()
    return x.flip(-1) if drawn < 0.5 else x


class Rows(Dataset):
    def __init__(self, by: str = "") -> None:
        self.by = by

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return augment(torch.arange(3) + index, self.by)


class Stream(IterableDataset):
    def __init__(self, by: str = "") -> None:
        self.rows = Rows(by)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


def masked(rows: list[torch.Tensor]) -> torch.Tensor:
    """A collator of masked language models."""
    tokens = torch.stack(rows)
    return tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -1)


@pytest.mark.parametrize("by", ["torch", "numpy", "python"])
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_samples_that_are_augmented_have_no_natural_order(kind: Any, by: str) -> None:
    """They are others each time they are read, so that ranks read none that one process
    would."""
    assert natural_samples(DataLoader(kind(by), batch_size=8), 2) is None


def test_samples_that_a_collator_masks_have_no_natural_order() -> None:
    assert (
        natural_samples(
            DataLoader(Rows(), batch_size=8, shuffle=True, collate_fn=masked), 2
        )
        is None
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("own_generator", [False, True])
def test_natural_samples_are_those_that_the_loader_gives_next(
    shuffle: bool, own_generator: bool
) -> None:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2) if own_generator else None
    loader = DataLoader(Rows(), batch_size=8, shuffle=shuffle, generator=generator)
    found = natural_samples(loader, 2)
    expected = [
        hash_
        for _, batch in zip(range(2), loader, strict=False)
        for hash_ in sample_hashes(batch)
    ]
    assert found == expected and len(expected) == 16


def test_natural_samples_are_hashed_as_they_are_trained_on() -> None:
    """Under --float64 float32 data are trained on in float64, which is another hash."""
    loader = DataLoader(torch.arange(6, dtype=torch.float32).view(3, 2), batch_size=3)
    assert natural_samples(loader, 1, torch.Tensor.double) == sample_hashes(
        next(iter(loader)).double()
    )
    stream = natural_samples(DataLoader(Stream(), batch_size=8), 1)
    assert stream is not None and len(stream) == 8
