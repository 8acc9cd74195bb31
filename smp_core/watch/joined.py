"""Ranks of which some have more batches than others train together, as long as any rank
has one.

A rank cannot leave before the others, which gather its parameters in each forward and
backward. One that has run out repeats its last batch (another rank's where it had
none), and so makes the calls that the others make; the loss of a repeated batch counts
nothing, and the others' count for it. Gradients are then the mean over the ranks that
have a batch, or over all their samples: what one process computes from the batches that
there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.cluster import host_group, of_all_ranks
from smp_core.watch.whereabouts import here


def join(
    batches: Iterable[Any], samples: Callable[[Any], int] | None = None
) -> Iterator[tuple[Any, float]]:
    """Yield this rank's batches, and then its last one again, until no rank has any
    more. Each comes with the factor of its loss. Collective over the world, on the
    host: each batch is one small all-reduce.

    Args:
        samples: counts those of a batch, all of which then weigh alike; None: every
            rank's batch weighs alike.
    """
    if dist.is_initialized():
        host_group("batches")  # before a loader may fail on this rank alone
    own, nothing = iter(batches), object()
    last: Any = nothing
    while True:
        # An end of the batches is no error here: this rank goes on with its last one.
        batch = next(own, nothing)
        # A copy of the containers, which steps may change: `batch.pop("labels")`.
        last = _copy(last if batch is nothing else batch)
        weight: float = 1
        # A repeated batch makes the calls, and its loss counts nothing.
        if batch is nothing:
            weight = 0
        elif samples is not None:
            weight = samples(batch)
        if not dist.is_initialized():
            of_all, going_on, ranks = float(weight), float(batch is not nothing), 1
        else:
            # Three sums in one all-reduce: of the weights, of the ranks that have a
            # batch, and of those that have none to repeat.
            with here.waiting("the other ranks' next batch"):
                of_all, going_on, without = _sums(
                    weight, batch is not nothing, last is nothing
                )
                ranks = dist.get_world_size()
                # Ranks that never had a batch borrow one; all take part in sending it.
                if going_on and without:
                    last = _or_anothers(None if last is nothing else last)
        # No rank had a batch: all stop after the same number.
        if not going_on:
            return
        # The mean over ranks divides by all of them, the weights make it one over those
        # with batches; over batches without a sample there is none.
        factor = weight * ranks / of_all if of_all else 0.0
        yield last if batch is nothing else batch, factor


def _copy(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor, MutableMapping)


def _sums(*values: float) -> list[float]:
    """Return the sums of all ranks' values."""
    told = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(told, group=host_group("batches"))
    return told.tolist()


def _or_anothers(own: Any) -> Any:
    """Return this rank's batch, or the first one of another rank, in host memory, where
    it has None."""
    group = host_group("batches")
    # The first rank that has a batch sends it to those without.
    source = of_all_ranks(own is not None, group).index(True)
    sent = [
        map_tensors(own, torch.Tensor.cpu, MutableMapping)
        if dist.get_rank() == source
        else None
    ]
    dist.broadcast_object_list(sent, src=source, group=group)
    return sent[0] if own is None else own


class JoinedLoader:
    """A training loader whose ranks may have different numbers of batches (Lightning:
    what ``train_dataloader`` returns).

    Args:
        loader: of this rank's batches. It is iterated as it is: Lightning puts no
            sampler into it.
        weigh: "ranks" (default): in each step the batches of all ranks that have one
            weigh alike. "samples": all their samples do, which is the mean of one
            process where batches have different sizes.
        samples: counts the samples of a batch; by default the first dimension of its
            first tensor.

    Attributes:
        weight: factor of the present batch's loss: 0.0 where it is repeated, and
            otherwise more than 1.0 while others repeat theirs. Gradients have it by
            themselves; what a step logs has not.

    Raises:
        ValueError: a loader that reads all samples on every rank.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        weigh: Literal["ranks", "samples"] = "ranks",
        samples: Callable[[Any], int] | None = None,
    ) -> None:
        if weigh not in ("ranks", "samples"):
            raise ValueError(
                f"weigh={weigh!r} is not known; allowed: 'ranks', 'samples'"
            )
        if (
            isinstance(loader, DataLoader)
            and type(loader.batch_sampler) is BatchSampler
        ):
            # Lightning would put a DistributedSampler into such a loader; under
            # JoinedLoader it does not, and every rank would read everything.
            if type(loader.sampler) in (SequentialSampler, RandomSampler):
                raise ValueError(
                    "JoinedLoader: no sampler is put into this DataLoader, and every rank would read all of its "
                    "dataset. Where that holds this rank's samples alone write sampler=range(len(dataset)), or "
                    "SubsetRandomSampler(range(len(dataset))); give it a sampler of this rank's samples; or leave "
                    "JoinedLoader out: Lightning then deals out as many samples to each rank"
                )
        self.loader = loader
        self.weight = 1.0
        self._samples = (samples or count_samples) if weigh == "samples" else None
        self._fetched: deque[float] = deque()
        self._length: int | None = None
        self._has_met = False

    @property
    def sampler(self) -> Any:
        """The loader's own, to which Lightning passes each epoch's number."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The loader's own, as :attr:`sampler`."""
        return getattr(self.loader, "batch_sampler", None)

    def meet(self) -> None:
        """Learn the other ranks' lengths. Collective; call it before this one's length
        is needed."""
        self._has_met = True
        lengths: list[Any] = of_all_ranks(length_of(self.loader))
        # One loader without a length makes the length of all unknown.
        self._length = None if None in lengths else max(lengths)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("some rank's batches have no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if not self._has_met and dist.is_initialized():
            raise RuntimeError(
                "JoinedLoader needs strategy='smp_sharded' of lightning_smp, which weighs the losses of ranks that "
                "have a batch; leave it out under other strategies"
            )
        # Weights of an epoch that was broken off must not meet the batches of the next.
        self._fetched.clear()
        for batch, weight in join(self.loader, self._samples):
            self._fetched.append(weight)
            yield batch

    def begin_batch(self) -> None:
        """Note that the next of the batches that were fetched is the present one: a
        trainer may fetch ahead."""
        self.weight = self._fetched.popleft()


def length_of(loader: Any) -> int | None:
    """Return the number of batches; None where the loader does not know it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of an IterableDataset
        return None


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch, of nested mappings,
    lists and tuples.

    Raises:
        ValueError: there is no tensor in it.
    """
    sizes = (
        tensor.shape[0]
        for _, tensor in iterate_tensors(batch, mapping=MutableMapping)
        if tensor.ndim
    )
    size = next(sizes, None)
    if size is None:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no tensor whose first dimension would be its samples; under "
            "Lightning write JoinedLoader(loader, weigh='samples', samples=lambda batch: ...)"
        )
    return int(size)
