"""Refusal of loaders that give some ranks more batches than others."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard


def require_as_many_batches(loader: Any) -> None:
    """Refuse a prepared loader of which some ranks get a batch more: the others would not take part in its gathers.

    Raises:
        ValueError: names the batches and ranks, and what to write.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.drop_last:
        return
    dealt, ranks = sampler.batch_sampler, sampler.num_processes
    if sampler.split_batches:
        last = len(dealt.sampler) % dealt.batch_size
        if 0 < last <= dealt.batch_size // ranks * (ranks - 1):
            raise ValueError(
                f"even_batches=False with split_batches=True cuts a last batch of {last} samples into fewer parts than "
                f"there are ranks ({ranks}), which all take part in each forward; write even_batches=True "
                "(Accelerate's default), or DataLoader(drop_last=True)"
            )
        return
    if not hasattr(dealt, "__len__"):
        return  # ranks that end earlier are named by the watch
    batches = len(dealt)
    if batches % ranks:
        raise ValueError(
            f"even_batches=False deals {batches} batches out to {ranks} ranks: {batches % ranks} of them would get one "
            "more than the others, which take part in each of its forwards. Give all ranks as many batches: "
            "even_batches=True (Accelerate's default, which repeats samples at the end of an epoch), or "
            "DataLoader(drop_last=True)"
        )
