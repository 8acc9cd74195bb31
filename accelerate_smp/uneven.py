"""Loaders that give some ranks more batches than others: refused, or joined
(:mod:`smp_core.watch.joined`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import send_to_device

from smp_core.outside import changed
from smp_core.watch import count_samples, join

logger = logging.getLogger("smp")


def joined(
    loader: Any, iterate: Callable[[Any], Iterator[Any]]
) -> Iterator[tuple[Any, float]]:
    """Yield a prepared loader's batches until no rank has any more, each with the
    factor of its loss; no sample is repeated to make batches even. Collective.

    The end of the loader, at which Accelerate ends an accumulation window, is that of
    all ranks.

    Args:
        iterate: the loader's own ``__iter__``.
    """

    def own() -> Iterator[Any]:
        yield from iterate(loader)
        loader.begin()  # it has ended for this rank alone

    # One batch ahead of training, so that the last one of all ranks is known as such
    # before its step.
    with _dealing_each_sample_once(loader):
        ahead = join(own(), count_samples)
        try:
            present = next(ahead, None)
            # A loader that keeps its place keeps that of training.
            read_to = getattr(loader, "dl_state_dict", {})
            while present is not None:
                trained_to = loader.dl_state_dict = read_to
                following = next(ahead, None)
                read_to = loader.dl_state_dict
                if following is not None:
                    loader.dl_state_dict = trained_to
                loader.end_of_dataloader = following is None
                batch, weight = present
                device = getattr(loader, "device", None)
                # It may be another rank's.
                yield batch if device is None else send_to_device(batch, device), weight
                present = following
        finally:
            loader.end()


@contextlib.contextmanager
def _dealing_each_sample_once(loader: Any) -> Iterator[None]:
    """Let a prepared loader repeat no sample, inside."""
    sampler = _dealing(getattr(loader, "batch_sampler", None)) or _dealing(
        getattr(loader, "sampler", None)
    )
    if sampler is None:
        logger.warning(
            "join_uneven_inputs: this loader has no batch sampler (its dataset is a stream), and Accelerate repeats "
            "samples of it so that all ranks have as many batches"
        )
        yield
        return
    with changed(sampler, even_batches=False):
        yield


def _dealing(sampler: Any) -> BatchSamplerShard | None:
    """Return what deals batches out to ranks, which others may be around."""
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def require_as_many_batches(loader: Any) -> None:
    """Refuse a prepared loader of which some ranks get a batch more: the others would
    not take part in its gathers.

    Raises:
        ValueError: names the batches and ranks, and what to write.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(sampler, BatchSamplerShard)
        or sampler.even_batches
        or sampler.drop_last
    ):
        return
    dealt, ranks = sampler.batch_sampler, sampler.num_processes
    if sampler.split_batches:
        last = len(dealt.sampler) % dealt.batch_size
        if 0 < last <= dealt.batch_size // ranks * (ranks - 1):
            raise ValueError(
                f"even_batches=False with split_batches=True cuts a last batch of {last} samples into fewer parts than "
                f"there are ranks ({ranks}), which all take part in each forward; write even_batches=True "
                "(Accelerate's default), DataLoader(drop_last=True), or train inside "
                "accelerator.join_uneven_inputs([model], even_batches=False) and leave it out here"
            )
        return
    if not hasattr(dealt, "__len__"):
        return  # ranks that end earlier are named by the watch
    batches = len(dealt)
    if batches % ranks:
        raise ValueError(
            f"even_batches=False deals {batches} batches out to {ranks} ranks: {batches % ranks} of them would get one "
            "more than the others, which take part in each of its forwards. Give all ranks as many batches: "
            "even_batches=True (Accelerate's default, which repeats samples at the end of an epoch) or "
            "DataLoader(drop_last=True); or train inside accelerator.join_uneven_inputs([model], even_batches=False) "
            "and leave it out here"
        )
