"""The check that all ranks have the same number of batches, where data loaders tell it.

A rank that has run out of batches never comes to the next gather or reduction, and the others wait for it until the
timeout.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from smp_core.cluster import SmpMesh
from smp_core.watch import JoinedLoader


def require_equal_training(trainer: Trainer) -> None:
    """Check the numbers of batches before training. Collective.

    Raises:
        ValueError: an epoch has more batches on one rank than on another, and more than one of them are trained on.
    """
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, trainer.num_training_batches)
    windows = min(counts) // (trainer.accumulate_grad_batches or 1)
    if len(set(counts)) > 1 and not 0 <= trainer.max_steps <= windows:
        raise _uneven("limit_train_batches", dict(enumerate(counts)))


def require_joined_alone(trainer: Trainer, mesh: SmpMesh) -> None:
    """Refuse a :class:`~smp_core.watch.joined.JoinedLoader` where its weights would not be those of what is trained on.

    Raises:
        ValueError: it is one of several training loaders, ranks share a batch, or steps fetch batches themselves.
    """
    loaders = [] if trainer.train_dataloader is None else CombinedLoader(trainer.train_dataloader).flattened
    if not any(isinstance(loader, JoinedLoader) for loader in loaders):
        return
    if not isinstance(trainer.train_dataloader, JoinedLoader):
        raise ValueError(
            "JoinedLoader is one of several training loaders, which all may end at different batches; zip them to one "
            "iterable and give train_dataloader a JoinedLoader of that"
        )
    if mesh.data_size < mesh.topology.world_size:
        raise ValueError(
            "JoinedLoader where ranks share a batch (context, tensor or pipeline degree above 1) is not built yet; "
            "give all ranks as many batches (drop_last=True)"
        )
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        raise ValueError(
            "JoinedLoader: training_step(dataloader_iter) takes batches by itself, so that which one is the present "
            "one is not known; write training_step(batch, batch_idx)"
        )


def require_equal_evaluation(limit: str, batches: Any, mesh: SmpMesh) -> None:
    """Check the numbers of batches before an evaluation, among ranks that gather parameters together. Collective.

    Args:
        limit: the Trainer's argument that bounds the number of batches.
        batches: of each of this rank's data loaders.

    Raises:
        ValueError: they differ.
    """
    # Pipeline stages take every batch together, and any two partition groups share one with some stage.
    stage = mesh.shard_degree * mesh.tensor_degree
    together = mesh.topology.world_size if mesh.pipeline_degree > 1 else stage
    if together == 1:
        return
    counts: list[Any] = [None] * mesh.topology.world_size
    dist.all_gather_object(counts, batches)
    for first in range(0, len(counts), together):
        group = counts[first : first + together]
        if any(each != group[0] for each in group):
            raise _uneven(limit, dict(enumerate(group, first)))


def _uneven(limit: str, counts: dict[int, Any]) -> ValueError:
    shown = ", ".join(f"rank {rank}: {count}" for rank, count in list(counts.items())[:8])
    return ValueError(
        f"ranks have different numbers of batches ({shown}), and those that have more would wait for the others. Leave "
        f"use_distributed_sampler at True, use drop_last=True, or write {limit}={min(counts.values())}"
    )
