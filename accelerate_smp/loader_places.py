"""The orders of prepared loaders, and their places in an epoch: what a checkpoint says of
them, and how they go on there.

Most loaders have an epoch, to whose start they go back; ``skip_first_batches`` does the
rest. torchdata's StatefulDataLoader (``use_stateful_dataloader=True``) keeps its place
by itself, counted in batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from accelerate.data_loader import (
    DataLoaderDispatcher,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from torch.utils.data import IterableDataset

from smp_core.checkpoint import CheckpointError
from smp_core.cluster import of_rank_0

logger = logging.getLogger("smp")


def begin_with_its_sampler(loader: Any) -> None:
    """Let a prepared loader that keeps its place read nothing before its first epoch.

    Accelerate asks it for its state when it makes it, and with workers that begins an
    epoch: with the order of the loader that was given, which each rank draws for
    itself, in the place of the seeded one that a resumed run has.
    """
    if getattr(loader, "use_stateful_dataloader", False):
        _go_to(loader, {})


def share_order(loader: Any) -> None:
    """Let all ranks read a prepared loader in rank 0's order. Collective.

    A seeded sampler takes its seed from torch's on this rank, which may differ from
    others' (``set_seed(seed, device_specific=True)``): some samples would be read by
    two ranks, and some by none.
    """
    is_dispatched = isinstance(loader, DataLoaderDispatcher)
    if not is_dispatched and hasattr(loader, "get_sampler"):
        sampler = loader.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = of_rank_0(lambda: sampler.initial_seed)


def state_of(loader: Any) -> dict[str, Any]:
    """Return the place of a prepared loader, as a checkpoint keeps it."""
    state: dict[str, Any] = {"of": _what_it_reads(loader)}
    if getattr(loader, "use_stateful_dataloader", False):
        place = loader.state_dict()
        # One whose epoch has ended begins the next, as one does that has not begun.
        if place and not place.get("_iterator_finished"):
            state["loader"] = place
            state["counts"] = _samples_of_a_count(loader)
    # That of the epoch in progress; a sampler that has been read to its end, ahead of
    # training, is in the next one.
    state["epoch"] = getattr(loader, "iteration", 0)
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler):
        state["sampler"] = {
            "epoch": state["epoch"],
            "initial_seed": sampler.initial_seed,
        }
    return state


def pairs(
    loaders: Sequence[Any], saved: Sequence[dict[str, Any]]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield prepared loaders, each with its place of before: the next one of a loader
    that read as many samples, shuffled or not, whatever was prepared in between. The
    rest are paired by their order."""
    left, others = list(saved), []
    for loader in loaders:
        own = _what_it_reads(loader)
        # By position: places may hold tensors, which do not compare.
        found = next(
            (place for place, state in enumerate(left) if state.get("of") == own), None
        )
        if found is None:
            others.append(loader)
        else:
            yield loader, left.pop(found)
    yield from zip(others, left, strict=False)


def _what_it_reads(loader: Any) -> list[Any]:
    """Return what tells loaders apart on any number of ranks: the samples of its data
    set, None of a stream, and whether a seed orders them."""
    data: Any = getattr(loader, "dataset", None)
    is_counted = isinstance(data, Sized) and not isinstance(data, IterableDataset)
    samples = len(data) if is_counted else None
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return [samples, isinstance(sampler, SeedableRandomSampler)]


def restore(loader: Any, saved: dict[str, Any], path: str) -> None:
    """Let a prepared loader go on at a place.

    Raises:
        CheckpointError: the place is counted in batches of another size.
    """
    if getattr(loader, "use_stateful_dataloader", False):
        place = saved.get("loader", {})
        now = _samples_of_a_count(loader)
        before = saved.get("counts", now)
        if place and before != now:
            raise CheckpointError(
                f"{path} holds the place of a StatefulDataLoader, counted in batches of {before} samples (of all ranks "
                f"together), and the loader prepared here counts batches of {now}: it would see samples twice, or "
                "never. Prepare it with the batch_size that keeps the number, or load a checkpoint of an epoch's end"
            )
        _go_to(loader, place)
    elif "loader" in saved:
        logger.warning(
            "%s holds the place of a StatefulDataLoader in its epoch, which this loader begins; go on with "
            "accelerator.skip_first_batches(loader, n), or write DataLoaderConfiguration(use_stateful_dataloader=True)",
            path,
        )
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if "sampler" in saved and isinstance(sampler, SeedableRandomSampler):
        sampler.epoch, sampler.initial_seed = (
            saved["sampler"]["epoch"],
            saved["sampler"]["initial_seed"],
        )
    if "epoch" in saved and hasattr(loader, "set_epoch"):
        loader.set_epoch(saved["epoch"])


def _go_to(loader: Any, place: dict[str, Any]) -> None:
    loader.load_state_dict(place)
    # What the next save says, if that comes before a batch.
    loader.dl_state_dict = place


def _samples_of_a_count(loader: Any) -> int:
    """Return the samples of all ranks by which a loader moves on when it counts one."""
    dealt = loader.dataset
    if isinstance(loader, DataLoaderDispatcher):
        # Rank 0 reads a batch for each rank, one after another.
        return _size(loader.base_dataloader.batch_sampler)
    if isinstance(dealt, IterableDatasetShard):
        ranks = 1 if dealt.split_batches else dealt.num_processes
        return int(dealt.batch_size) * ranks
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    split = getattr(batches, "split_batches", False)
    return _size(batches) * (1 if split else getattr(batches, "num_processes", 1))


def _size(batches: Any) -> int:
    """Return the samples of a batch; 1 where only batches can be counted."""
    return getattr(batches, "batch_size", None) or 1
