"""``hierarchical="auto"``: whether collectives in two stages are faster for a model, by measured links.

The mesh has the groups of both ways. With a measurement (``SMP_LINKS``) the predicted times of a model's units are
added up (:mod:`smp_core.links`), for the ways its gradients and parameters go: gathers and reductions of a partition
group that spans nodes, or the sum across replicas that share nodes. Without one, two stages send fewer bytes over the
slow link, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from smp_core.config import SmpConfig
from smp_core.links import LINKS_VARIABLE, Links, gather_seconds, reduce_seconds, replica_sum_seconds
from smp_core.mesh import SmpMesh

# Bytes of a payload element; what the scale of each block of 256 elements adds is left out.
_ENCODED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "bfloat16": 2.0}


def settle_stages(
    mesh: SmpMesh, config: SmpConfig, unit_elements: Sequence[int], dtype: torch.dtype
) -> tuple[SmpMesh, SmpConfig]:
    """The mesh and the configuration with what ``hierarchical="auto"`` means for this model.

    Args:
        unit_elements: elements of each unit's parameters.
        dtype: of the model's parameters, as most of them are stored.
    """
    topology = mesh.topology
    if config.asked("hierarchical") != "auto" or not unit_elements:
        return mesh, config
    if not mesh.hierarchical and mesh.replica_stages is None:
        return mesh, config  # there is one stage
    links = Links.stored(topology)
    if links is None or links.flat is None:
        return mesh, config
    gathered = getattr(torch, config.param_dtype) if config.param_dtype not in (None, "auto") else dtype
    reduced = _reduced_in(config, gathered)
    if mesh.hierarchical:
        found = [pair for n in unit_elements for pair in _partition_seconds(links, mesh, config, n, gathered, reduced)]
    else:
        found = [_replica_seconds(links, mesh, config, n, reduced) for n in unit_elements]
    one, two = (sum(seconds) for seconds in zip(*found, strict=True))
    what = "gathers and sums of a micro-batch" if mesh.hierarchical else "sums across replicas"
    why = f"by {LINKS_VARIABLE}, {what} take {1e3 * one:.3g} ms in one stage and {1e3 * two:.3g} ms in two"
    if two > one:
        mesh = replace(
            mesh, hierarchical=False, intra_group=None, inter_group=None, replica_stages=None, gradient_stages=None
        )
    return mesh, config.with_resolved("hierarchical", two <= one, why)


def _partition_seconds(
    links: Links, mesh: SmpMesh, config: SmpConfig, n: int, gathered: torch.dtype, reduced: torch.dtype
) -> list[tuple[float, float]]:
    """Of a unit of ``n`` elements: its gathers over the partition group, and its reduction."""
    degree = mesh.shard_degree
    encoded = _share(config.quantized_all_gather, gathered)
    gather = gather_seconds(links, degree, n * gathered.itemsize, encoded)
    sums = reduce_seconds(links, degree, n * reduced.itemsize, _share(config.quantized_reduce, reduced))
    # What backward gathers from a copy of the node's, or not at all, takes the same either way.
    return [gather, *([gather] if config.reshard_after_forward is True else []), sums]


def _replica_seconds(
    links: Links, mesh: SmpMesh, config: SmpConfig, n: int, reduced: torch.dtype
) -> tuple[float, float]:
    payload = config.quantized_reduce or ("bfloat16" if config.replica_reduce_dtype else None)
    return replica_sum_seconds(links, mesh.shard_degree, n * reduced.itemsize, _share(payload, reduced))


def _reduced_in(config: SmpConfig, gathered: torch.dtype) -> torch.dtype:
    if config.reduce_dtype not in (None, "auto"):
        dtype: torch.dtype = getattr(torch, config.reduce_dtype)
        return dtype
    half = gathered in (torch.float16, torch.bfloat16)
    return torch.float32 if half and config.reduce_dtype == "auto" else gathered


def _share(payload: str | None, dtype: torch.dtype) -> float:
    return min(_ENCODED[payload] / dtype.itemsize, 1.0) if payload else 1.0
