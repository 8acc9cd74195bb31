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
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.split_batches:
        return
    batches, ranks = len(sampler.batch_sampler), sampler.num_processes
    if batches % ranks and not sampler.drop_last:
        raise ValueError(
            f"even_batches=False deals {batches} batches out to {ranks} ranks: {batches % ranks} of them would get one "
            "more than the others, which take part in each of its forwards. Give all ranks as many batches: "
            "even_batches=True (Accelerate's default, which repeats samples at the end of an epoch), or "
            "DataLoader(drop_last=True)"
        )
