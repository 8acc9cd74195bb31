"""Batches in equal parts, and whether two are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch
import xxhash

from smp_core.checkpoint.tree import iterate_tensors, map_tensors

_split_maps = functools.partial(map_tensors, mapping=MutableMapping)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch into equal parts along its first dim; numbers, text and 0-d tensors go into each.

    Args:
        batch: nested dicts, lists and tuples.

    Raises:
        ValueError: tensors of different length, a length that ``count`` does not divide, a list of things that are no
            tensors.
    """
    lengths = {tensor.shape[0] for _, tensor in iterate_tensors(batch, mapping=MutableMapping) if tensor.ndim}
    if len(lengths) != 1:
        found = f"tensors of {', '.join(map(str, sorted(lengths)))} samples" if lengths else "no tensors"
        raise ValueError(f"a batch of {found} cannot be cut into {count} micro-batches; its tensors need one first dim")
    (length,) = lengths
    if length % count:
        raise ValueError(
            f"pipeline.microbatches={count} does not divide a batch of {length} samples; write a number that does, or "
            "drop_last=True where it is the last batch"
        )
    _refuse_lists(batch, length)
    size = length // count

    def part(number: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[number * size : (number + 1) * size] if tensor.ndim else tensor

    return [_split_maps(batch, functools.partial(part, number)) for number in range(count)]


def _refuse_lists(batch: Any, length: int) -> None:
    if isinstance(batch, MutableMapping):
        for value in batch.values():
            _refuse_lists(value, length)
    elif isinstance(batch, (list, tuple)):
        if len(batch) == length and not any(isinstance(item, torch.Tensor) for item in batch) and length > 1:
            raise ValueError(
                f"a batch holds a list of {length} {type(batch[0]).__name__}, one for each sample, which cannot be cut "
                "into micro-batches; make it a tensor"
            )
        for value in batch:
            _refuse_lists(value, length)


def digest(batch: Any) -> tuple[Hashable, Callable[[], str]]:
    """Return what is alike in batches of one kind (paths, shapes and dtypes), and a function that reads the values."""
    tensors = list(iterate_tensors(batch, mapping=MutableMapping))
    kind = tuple((path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in tensors)

    def values() -> str:
        found = xxhash.xxh3_64()
        for _, tensor in tensors:
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    return kind, values
