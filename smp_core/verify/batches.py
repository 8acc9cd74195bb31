"""Batches: the samples in them as hashes, and the batches of several ranks joined into
one.

A sample is what one index along the first dim of a batch's tensors selects. Two samples
are the same if the bytes of all their tensors are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from smp_core.checkpoint import iterate_tensors, seed_random_state, set_random_state
from smp_core.checkpoint.random_state import random_state


class NotJoinable(ValueError):
    """The refusal to join batches whose tensors differ in more than their first dim."""


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a nest of mappings and sequences, in order."""
    return [tensor for _, tensor in iterate_tensors(batch, mapping=Mapping)]


def map_batch(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with every tensor changed; what is no tensor stays."""
    if isinstance(batch, Tensor):
        return change(batch)
    # Mappings of other classes (BatchEncoding) keep their class.
    if isinstance(batch, Mapping):
        changed = {key: map_batch(value, change) for key, value in batch.items()}
        return _like(batch, changed)
    if isinstance(batch, (list, tuple)):
        return _like(batch, [map_batch(value, change) for value in batch])
    return batch


def sample_hashes(batch: Any) -> list[str]:
    """Return a hash of each sample, in order; one for the whole batch where its tensors
    have no common first dim."""
    tensors = [
        tensor.detach().cpu().contiguous()
        for tensor in tensors_of(batch)
        if tensor.ndim > 0
    ]
    if not tensors:
        return []
    # Without a common first dim nothing says what one sample is.
    samples = tensors[0].shape[0]
    if any(tensor.shape[0] != samples for tensor in tensors):
        return [_hash(tensors)]
    hashes = []
    for index in range(samples):
        hashes.append(_hash(tensor[index] for tensor in tensors))
    return hashes


def _hash(tensors: Iterable[Tensor]) -> str:
    # Eight bytes: enough to tell some thousand samples apart.
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        # Dtype and shape too: equal bytes of another shape are another sample.
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


READINGS = 5
"""How often the first samples are read with other random numbers: a flip by chance may
come out the same."""


def natural_samples(
    loader: DataLoader[Any],
    batches: int,
    change: Callable[[Any], Any] = lambda batch: batch,
) -> list[str] | None:
    """Return hashes of the samples that a loader's first batches give, in order.

    Random states, also those of samplers, are afterwards what they were.

    Args:
        loader: as one process has it.
        batches: their number.
        change: what becomes of a batch before it is trained on.

    Returns:
        None where samples are made anew each time they are read: augmentations, masks
            that a collator draws.
    """
    # Samplers may have generators of their own, whose states would move.
    samplers = [
        loader,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ]
    found = [getattr(sampler, "generator", None) for sampler in samplers]
    generators = [
        generator for generator in found if isinstance(generator, torch.Generator)
    ]
    readings = []
    # Each reading begins with another seed. A sample that comes out the same every time
    # is not made from random numbers.
    for seed in range(READINGS):
        with _random_states_kept(generators):
            readings.append(_read_with(seed, loader, change))
    if any(reading != readings[0] for reading in readings):
        return None
    with _random_states_kept(generators):
        return _read(loader, batches, change)


def _read_with(
    seed: int, loader: DataLoader[Any], change: Callable[[Any], Any]
) -> list[str]:
    """Return hashes of a loader's first samples, made with the random numbers of a
    seed; their order is not."""
    dataset, batch_sampler = loader.dataset, loader.batch_sampler
    # A stream has no indexes: its first batch is read.
    if isinstance(dataset, IterableDataset):
        seed_random_state(seed)
        return _read(loader, 1, change)
    # The order is fixed by the first batch of indexes, so that only the samples
    # themselves are compared.
    indexes: Any = next(
        iter(loader.sampler if batch_sampler is None else batch_sampler)
    )
    seed_random_state(seed)
    samples = (
        dataset[indexes]
        if batch_sampler is None
        else [dataset[index] for index in indexes]
    )
    return sample_hashes(change(loader.collate_fn(samples)))


def _read(
    loader: DataLoader[Any], batches: int, change: Callable[[Any], Any]
) -> list[str]:
    hashes: list[str] = []
    for _, batch in zip(range(batches), loader, strict=False):
        hashes += sample_hashes(change(batch))
    return hashes


@contextlib.contextmanager
def _random_states_kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Put the random states of Python, numpy, torch and generators back at the end."""
    before = random_state()
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        set_random_state(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def join(batches: Sequence[Any]) -> Any:
    """Return one batch of all samples of several, in their order.

    Raises:
        NotJoinable: tensors of other shapes behind the first dim, or batches of other
            structure.
    """
    # Leaves are concatenated, and nests joined key by key or place by place.
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return _join_tensors(batches)
    if isinstance(first, Mapping):
        # Other keys would mean other samples.
        if any(set(batch) != set(first) for batch in batches):
            raise NotJoinable("the ranks' batches have different keys")
        joined = {}
        for key in first:
            joined[key] = join([batch[key] for batch in batches])
        return _like(first, joined)
    if isinstance(first, (list, tuple)):
        if not tensors_of(first):  # a list of names, one for each sample
            return _like(first, [value for batch in batches for value in batch])
        if any(len(batch) != len(first) for batch in batches):
            raise NotJoinable("the ranks' batches have different lengths")
        return _like(first, [join(values) for values in zip(*batches, strict=True)])
    return first


def _join_tensors(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.ndim == 0:
        return first  # a number that belongs to no sample
    if any(tensor.shape[1:] != first.shape[1:] for tensor in tensors):
        shapes = " and ".join(sorted({str(list(tensor.shape)) for tensor in tensors}))
        raise NotJoinable(f"the ranks' batches have tensors of shapes {shapes}")
    return torch.cat(list(tensors))


def _like(batch: Any, values: Any) -> Any:
    """Return values in the type of a batch: a namedtuple, a BatchEncoding, or a plain
    one."""
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    try:
        return type(batch)(values)
    except TypeError:
        return values
