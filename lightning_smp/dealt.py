"""Streams dealt out: data rank r of n takes batches r, n + r, 2 n + r, ... of a
DataLoader over an IterableDataset.

Lightning puts no sampler into such a loader, so that every rank would read all of it.
Here every rank reads all of it and keeps its own batches: in each step all data ranks
together have what one process has whose batches are n times as large. Ranks that share
a batch (context, tensor, stages) take the same ones.

    batches      0  1  2  3  4  5  6       of 2 data ranks
    rank 0       0     2     4     6       the last group is not full: 6 counts alone in training (weights 2 and 0), and
    rank 1          1     3     5 (6)      is cut along its samples in evaluation, where ranks may get none of them

A dataset may have dealt itself out by rank. Whether it has is seen, not asked: ranks
compare their first batches at the beginning of each epoch.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader

from smp_core.checkpoint import iterate_tensors, of_kind, set_random_state
from smp_core.checkpoint.random_state import random_state
from smp_core.cluster import of_all_ranks
from smp_core.watch import count_samples, here

logger = logging.getLogger("smp")

_END = object()


class DealtLoader:
    """A data loader whose batches are dealt out to the data ranks. Its attributes are
    the loader's.

    Args:
        loader: gives the same batches on every rank, or this rank's own, which are left
            as they are.
        ranks: the data ranks.
        index: which of them this one is.
        need_alike: whether ranks of one index have to be given the same batches.
        cuts: returns whether the batches left at the end are cut along their samples.
        once: they are, and a rank may get none: it ends before the others.

    Attributes:
        weight: the factor of the present batch's loss.
    """

    __slots__ = (
        "_cuts",
        "_fetched",
        "_has_warned",
        "_index",
        "_is_dealt",
        "_need_alike",
        "_once",
        "_ranks",
        "loader",
        "weight",
    )

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: int,
        index: int,
        need_alike: bool,
        cuts: Callable[[], bool],
        once: bool = False,
    ) -> None:
        self.loader = loader
        self.weight = 1.0
        self._ranks, self._index = ranks, index
        self._need_alike = need_alike
        self._cuts, self._once = cuts, once
        self._is_dealt: bool | None = None
        self._has_warned = False
        self._fetched: deque[float] = deque()

    def __getattr__(self, name: str) -> Any:
        if name in DealtLoader.__slots__:
            raise AttributeError(name)  # a copy that is being made
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DealtLoader.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        # Whether batches are dealt out is known from the first one, which is read for
        # it; random states stay as they were.
        batches = len(self.loader)
        if self._is_dealt is None:
            before = random_state()
            self._first_of(iter(self.loader))
            set_random_state(before)
        if not self._is_dealt:
            return batches
        return (
            batches // self._ranks
            if self.loader.drop_last
            else -(-batches // self._ranks)
        )

    def __iter__(self) -> Iterator[Any]:
        self._fetched.clear()
        # The loader draws the seed of its workers now, as it does for Lightning.
        return self._read(iter(self.loader))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = self._first_of(batches)
        # No rank has a batch: the fingerprints said so to all.
        if first is _END:
            return
        # Weights wait in line with batches that a trainer fetches ahead.
        for batch, weight in self._dealt(chain([first], batches)):
            self._fetched.append(weight)
            yield batch

    def begin_batch(self) -> None:
        """Note that the next of the batches that were fetched is the present one: a
        trainer may fetch ahead."""
        self.weight = self._fetched.popleft()

    def _dealt(self, batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
        # The dataset deals itself out.
        if not self._is_dealt:
            yield from ((batch, 1.0) for batch in batches)
            return
        # One batch for each rank makes a group.
        group: list[Any] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self._ranks:
                # The last batch of a stream may be a short one. (Tokens are counted
                # where batches may be cut.)
                weighs = not (self._once or self._cuts())
                if not weighs:
                    self._warn_of_unequal([_samples(each) for each in group])
                yield (
                    _whole(group, self._ranks, self._index)
                    if weighs
                    else (group[self._index], 1.0)
                )
                group.clear()
        # The rest of the stream: weighed, cut or left out.
        if not group or self.loader.drop_last:
            return
        if self._once:
            yield from _own_samples(group, self._ranks, self._index)
        elif self._cuts():
            bounds = [_bounds(group, self._ranks, rank) for rank in range(self._ranks)]
            self._warn_of_unequal([end - start for _, _, start, end in bounds])
            yield _cut(group, self._ranks, self._index)
        else:
            yield _whole(group, self._ranks, self._index)

    def _warn_of_unequal(self, samples: list[int]) -> None:
        """Say once that ranks train on different numbers of samples with equal weights.

        Nothing is said in an evaluation, where what is logged has its number of
        samples, and where ranks share sequences, whose targets are counted.
        """
        unequal = len(set(samples)) > 1 and sum(samples) > 1
        if not unequal or self._once or not self._need_alike or self._has_warned:
            return
        self._has_warned = True
        _warn(
            f"the last batches of a stream have {', '.join(map(str, samples))} samples on the ranks, whose losses "
            "count alike: a step has no weights where there are several training loaders, or where training_step takes "
            "a dataloader_iter. Write DataLoader(drop_last=True), or zip the loaders into one stream"
        )

    def _first_of(self, batches: Iterator[Any]) -> Any:
        """Return the first batch, and settle whether batches are dealt out. Collective
        over the world."""
        try:
            first = next(batches, _END)
        except Exception:
            self._tell("failed")  # the others wait for a word of this rank
            raise
        # All ranks' fingerprints of the first batch.
        told = self._tell("nothing" if first is _END else _fingerprint(first))
        if self._need_alike:
            _require_alike(told)
        found = dict(told)
        is_same = len(set(found.values())) == 1
        # It was settled in an earlier epoch, and cannot change without batches being
        # seen twice.
        if self._is_dealt and not is_same:
            _warn(
                "a stream was dealt out to the ranks and now differs between them: some samples are seen twice. "
                + _SEED
            )
        elif self._is_dealt is None:
            self._is_dealt = is_same
            self._say_once(found)
        return first

    def _tell(self, own: str) -> list[tuple[int, str]]:
        """Return the indices and fingerprints of all ranks."""
        # A dataset may take minutes to its first batch: the watch says what is waited
        # for.
        with here.waiting("the other ranks' first batch of a stream"):
            return of_all_ranks((self._index, own))

    def _say_once(self, found: dict[int, str]) -> None:
        if self._is_dealt and self._ranks > 1:
            logger.info(
                "a stream that is the same on all ranks is dealt out to %d, batch by batch",
                self._ranks,
            )
        # Right or wrong, depending on the dataset, which cannot be seen: said once.
        elif not self._is_dealt and not _deals_itself_out(self.loader.dataset):
            apart = len(set(found.values())) == len(found)
            which = "every rank" if apart else "some ranks, and the same to others,"
            _warn(
                f"a stream gives other batches to {which} and is left as it is, which is right where the dataset deals "
                f"itself out to {len(found)} ranks; Trainer(use_distributed_sampler=False) says so. Otherwise each "
                f"rank reads all of it. {_SEED}"
            )


_SEED = "Seed what shuffles it alike on all ranks: seed_everything(...), dataset.shuffle(seed=...)"


def read_alike(loader: DataLoader[Any]) -> None:
    """Seed workers as one process does, where Lightning would seed each rank's
    otherwise."""
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)


def _warn(words: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s", words)


def _require_alike(told: list[tuple[int, str]]) -> None:
    # Ranks of one index compute the same samples, each with its part of the model.
    by_index: dict[int, str] = {}
    for rank, (index, fingerprint) in enumerate(told):
        if by_index.setdefault(index, fingerprint) != fingerprint:
            first = next(
                other for other, (place, _) in enumerate(told) if place == index
            )
            raise ValueError(
                f"ranks {first} and {rank} compute the same samples (tensor_parallel_degree, pipeline_parallel_degree) "
                "and their streams differ. Where the dataset deals itself out, use trainer.strategy's "
                "distributed_sampler_kwargs['num_replicas'] and ['rank'] in the place of world size and rank. "
                f"{_SEED}"
            )


def _deals_itself_out(dataset: Any) -> bool:
    # A private name of Hugging Face's datasets: what split_dataset_by_node leaves.
    # There is no public one.
    return getattr(dataset, "_distributed", None) is not None


def _fingerprint(batch: Any) -> str:
    read = xxhash.xxh3_64()
    for leaf in _leaves(batch, {}):
        read.update(leaf)
    return read.hexdigest()


def _leaves(batch: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """Yield what a batch holds as bytes: tensors, arrays, numbers and text, in objects
    of any class.

    Batches of which nothing were read would look alike on all ranks, and be dealt out
    where a dataset has done that itself.

    Args:
        seen: containers that were read, by their ids; objects may lead back to one, and
            all samples to the same one, as large as a dataset.
    """
    # Each rank has a device of its own.
    if isinstance(batch, (type, FunctionType, torch.device)):
        return
    if isinstance(batch, Tensor):
        # As bytes, since NumPy knows no bfloat16.
        plain = batch.detach().cpu().contiguous().reshape(-1)
        yield repr(batch.shape).encode()
        yield plain.view(torch.uint8).numpy().tobytes()
    elif isinstance(batch, (int, float, str, bytes)):
        yield repr(batch).encode()
    # The bytes of an array of objects are their addresses.
    elif isinstance(batch, np.ndarray) and batch.dtype.hasobject:
        yield from _leaves(batch.tolist(), seen)
    # Arrays, their numbers, and pictures.
    elif hasattr(batch, "tobytes"):
        yield batch.tobytes()
    elif isinstance(batch, os.PathLike):
        yield os.fsencode(batch)
    elif id(batch) not in seen:
        # It stays alive there: another object could get its id.
        seen[id(batch)] = batch
        yield from _leaves_inside(batch, seen)


def _leaves_inside(batch: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    if isinstance(batch, MutableMapping):
        for key, value in batch.items():
            yield repr(key).encode()
            yield from _leaves(value, seen)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value, seen)
    elif isinstance(batch, (set, frozenset)):
        # Text has another order in each process.
        yield from sorted(b"".join(_leaves(value, dict(seen))) for value in batch)
    elif attributes := _attributes(batch):
        yield from _leaves(attributes, seen)
    # None, dates, ... What shows its address differs between processes.
    elif " at 0x" not in repr(batch):
        yield repr(batch).encode()


def _attributes(batch: Any) -> dict[str, Any]:
    """Return the attributes that belong to an object."""
    names: list[str] = []
    for kind in type(batch).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    found = {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return {**found, **getattr(batch, "__dict__", {})}


def _whole(group: list[Any], ranks: int, index: int) -> tuple[Any, float]:
    """Return this rank's batch of a group that is not full, and its weight: 0 where it
    is another rank's."""
    # Every rank has to take a step: those without a batch take another's, with no
    # weight. The weights of all ranks add up to their number.
    sizes = [_samples(batch) for batch in group]
    place = index % len(group)
    return group[place], sizes[place] * ranks / sum(sizes) if index < len(
        group
    ) else 0.0


def _bounds(group: list[Any], ranks: int, index: int) -> tuple[Any, int, int, int]:
    """Return the batch of a group that is not full which this rank has samples of,
    their number, and its own."""
    # Ranks are shared out to the batches that are left, and each batch to its ranks.
    place, part = index % len(group), index // len(group)
    parts = len(range(place, ranks, len(group)))
    size = _samples(group[place])
    return group[place], size, size * part // parts, size * (part + 1) // parts


def _own_samples(
    group: list[Any], ranks: int, index: int
) -> Iterator[tuple[Any, float]]:
    """Yield this rank's samples of a group that is not full, if it has any."""
    batch, size, start, end = _bounds(group, ranks, index)
    if start < end:
        yield _rows(batch, size, slice(start, end)), 1.0


def _cut(group: list[Any], ranks: int, index: int) -> tuple[Any, float]:
    """Return this rank's samples of a group that is not full. Where there are fewer
    than ranks, some repeat one."""
    batch, size, start, end = _bounds(group, ranks, index)
    return _rows(batch, size, slice(start, max(end, start + 1))), 1.0


def _samples(batch: Any) -> int:
    """Count the samples of a batch; one that does not tell counts as one."""
    has_rows = any(
        tensor.ndim for _, tensor in iterate_tensors(batch, mapping=MutableMapping)
    )
    return count_samples(batch) if has_rows else 1


def _rows(value: Any, size: int, rows: slice) -> Any:
    """Return a nested batch with these samples of everything that has ``size`` of
    them."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value[rows] if value.ndim and len(value) == size else value
    if isinstance(value, MutableMapping):
        cut = {key: _rows(each, size, rows) for key, each in value.items()}
        same = value.copy() if hasattr(value, "copy") else dict(value)
        same.update(cut)
        return same
    if isinstance(value, (list, tuple)):
        # A list of as many texts as samples is cut; a pair of tensors is a pair of
        # columns.
        holds_batches = any(
            isinstance(each, (Tensor, np.ndarray, MutableMapping)) for each in value
        )
        if len(value) == size and not holds_batches:
            return value[rows]
        return of_kind(type(value), [_rows(each, size, rows) for each in value])
    return value
