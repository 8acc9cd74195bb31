"""Batches cut into equal parts, and a check that all stages begin the same batch."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Hashable, Iterable, MutableMapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from smp_core.checkpoint import Path, iterate_tensors, map_tensors
from smp_core.cluster import Axis, SmpMesh, of_all_ranks
from smp_core.torch_facts import all_gather_single
from smp_core.watch import here, innermost_user_line

BatchKind = tuple[tuple[Path, tuple[int, ...], str], ...]
"""The path, shape and dtype of each tensor of a batch."""

_split_maps = functools.partial(map_tensors, mapping=MutableMapping)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch into equal parts along its first dim; numbers, text
    and 0-d tensors go into each.

    Args:
        batch: nested dicts, lists and tuples.

    Raises:
        ValueError: tensors of different length, a length that ``count`` does not
            divide, a list of things that are no tensors.
    """
    if count == 1:
        return [_split_maps(batch, lambda tensor: tensor)]
    # The samples are the first dim of all tensors that have one.
    lengths = {
        tensor.shape[0]
        for _, tensor in iterate_tensors(batch, mapping=MutableMapping)
        if tensor.ndim
    }
    if len(lengths) != 1:
        found = (
            f"tensors of {', '.join(map(str, sorted(lengths)))} samples"
            if lengths
            else "no tensors"
        )
        raise ValueError(
            f"pipeline.microbatches={count}: a batch of {found} cannot be cut; its tensors need one first dim, or "
            "write pipeline={'microbatches': 1}"
        )
    (length,) = lengths
    if length % count:
        raise ValueError(
            f"pipeline.microbatches={count} does not divide a batch of {length} samples; write a number that does, or "
            "drop_last=True where it is the last batch"
        )
    _refuse_lists(batch, length)
    # Views of the batch, no copies.
    size = length // count

    def part(number: int, tensor: Tensor) -> Tensor:
        return tensor[number * size : (number + 1) * size] if tensor.ndim else tensor

    return [
        _split_maps(batch, functools.partial(part, number)) for number in range(count)
    ]


def _refuse_lists(batch: Any, length: int) -> None:
    # A list with one thing for each sample would go whole into every part.
    if isinstance(batch, MutableMapping):
        for value in batch.values():
            _refuse_lists(value, length)
    elif isinstance(batch, (list, tuple)):
        # Lists with tensors inside are batches of several loaders.
        has_tensors = any(iterate_tensors(batch, mapping=MutableMapping))
        if len(batch) == length and not has_tensors and length > 1:
            raise ValueError(
                f"a batch holds a list of {length} {type(batch[0]).__name__}, one for each sample, which cannot be cut "
                "into micro-batches; make it a tensor"
            )
        for value in batch:
            _refuse_lists(value, length)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return one digest of the bytes of all tensors, which are read to the host."""
    read = xxhash.xxh3_64()
    for tensor in tensors:
        read.update(
            tensor.detach()
            .cpu()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return read.hexdigest()


class SameBatches:
    """Compares what the stages of one column begin."""

    def __init__(self, mesh: SmpMesh) -> None:
        self._group = mesh.column.host
        self._ranks = mesh.layout.ranks(mesh.rank, Axis.PIPELINE)
        self._known: set[Hashable] = set()

    def begin(self, call: str, batch: Any, number: int = 0) -> tuple[BatchKind, int]:
        """Meet the other stages where a batch begins. Collective over them, between
        hosts.

        Args:
            call: which kind of call begins, in words.
            number: the first stage's goes to all.

        Returns:
            what is alike in batches of one kind (paths, shapes and dtypes), and the
            first stage's number.

        Raises:
            ValueError: stages make different calls, or read batches of different shapes
                or, where these are new, of different values; on all of them.
        """
        # Paths, shapes and dtypes make the kind of a batch; values do not.
        tensors = list(iterate_tensors(batch, mapping=MutableMapping))
        kind = tuple(
            (path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in tensors
        )
        # One number for what is called and with what: shifted, as a hash fills 64 bits.
        code = xxhash.xxh3_64_intdigest(repr((call, kind)).encode()) >> 1  # of int64
        own = torch.tensor([number, code])
        told = own.new_empty(2 * len(self._ranks))
        with here.waiting("the other pipeline stages to begin a batch"):
            all_gather_single(told, own, group=self._group)
            numbers, codes = told.view(-1, 2).T.tolist()
        if len(set(codes)) > 1:
            self._refuse_calls(call, [tuple(tensor.shape) for _, tensor in tensors])
        # Values are compared once for each kind: each comparison reads a whole batch.
        if kind not in self._known:
            self._require_values([tensor for _, tensor in tensors])
            self._known.add(kind)
        return kind, numbers[0]

    def _refuse_calls(self, call: str, shapes: list[tuple[int, ...]]) -> None:
        line = innermost_user_line(traceback.extract_stack())
        found = of_all_ranks(
            f"{call} with tensors of {', '.join(map(str, shapes)) or 'no shapes'} ({line})",
            self._group,
        )
        said = "; ".join(
            f"rank {rank}: {where}"
            for rank, where in zip(self._ranks, found, strict=True)
        )
        raise ValueError(
            f"pipeline stages went apart: {said}. All of them have to make the same calls with the same batches: take "
            "the call out of `if rank == 0:` and its like, and give all ranks as many batches"
        )

    def _require_values(self, tensors: list[Tensor]) -> None:
        if len(set(of_all_ranks(digest_of(tensors), self._group))) > 1:
            raise ValueError(
                f"pipeline stages read different batches; all ranks of a column ({', '.join(map(str, self._ranks))}) "
                "have to read the same samples: leave use_distributed_sampler at True, and seed data that are made at "
                "random"
            )
