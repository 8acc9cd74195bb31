"""FSDP2's own options about gathers and reductions in flight, by its public methods: how many units ahead gathers run,
how many gradients wait for their reduction, a communicator of its own for reductions, symmetric memory.

``"auto"`` follows measured links (``SMP_LINKS``, :mod:`smp_core.links`): while a message of n bytes is on its way, the
link of latency L and bandwidth B has room for L x B bytes, so that ``ceil(L x B / n)`` units in flight keep it busy,
at least one and at most ``MOST_IN_FLIGHT``, since each takes memory. n is the message of the median unit: the shard of
one rank, as it travels. The link is what was measured for gathers (prefetching) or reductions (buffers): between nodes
where the partition group spans them in two stages, over all ranks where it does so in one, inside a node otherwise.
Without a measurement the depth is FSDP2's own.

Newer torch versions have more of these than others (:func:`smp_core.compat.fsdp_has`); what this torch, this device or
the group's communication objects cannot do is refused by name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.compat import fsdp_has
from smp_core.config import SmpConfig
from smp_core.links import LINKS_VARIABLE, PLACES, Collectives, LinkFit, Links, Place
from smp_core.mesh import SmpMesh

MOST_IN_FLIGHT = 4

# What a knob's "auto" is without a measurement: FSDP2's own behaviour.
_OWN = {"forward_prefetch": 0, "backward_prefetch": 1, "reduce_scatter_buffers": 1}
_METHODS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "symmetric_memory": "set_symm_mem_for_comm",
}


def units_in_flight(link: LinkFit, message_bytes: float) -> int:
    """How many messages of this size cover latency x bandwidth of the link: between 1 and ``MOST_IN_FLIGHT``."""
    if message_bytes <= 0:
        return 1
    return min(max(math.ceil(link.latency * link.bandwidth / message_bytes), 1), MOST_IN_FLIGHT)


def settle_fsdp_options(
    config: SmpConfig, mesh: SmpMesh, unit_elements: Sequence[int], dtype: torch.dtype
) -> SmpConfig:
    """``config`` with what takes effect of these knobs, and why.

    Args:
        unit_elements: elements of each unit's parameters; none where nothing is sharded.
        dtype: what parameters are gathered in, as the model has most of them.

    Raises:
        ValueError: an option that this torch, device or configuration does not have.
    """
    for knob, method in _METHODS.items():
        asked = getattr(config, knob)
        if asked == "auto" or asked is False or (knob in _OWN and asked == _OWN[knob]):
            continue
        if mesh.shard_degree == 1:
            why = "shard_degree=1: nothing is gathered or reduced in a partition group"
            config = config.with_resolved(knob, _OWN.get(knob, False), why)
        else:
            _require(config, knob, method, mesh)
    if config.symmetric_memory:
        why = "torch's own collectives in the partition group, which the meter does not count"
        config = config.with_resolved("symmetric_memory", True, why)
    asked_auto = [knob for knob in _OWN if getattr(config, knob) == "auto"]
    links = Links.stored(mesh.topology) if asked_auto and unit_elements and mesh.shard_degree > 1 else None
    for knob in asked_auto:
        config = config.with_resolved(knob, *_by_links(knob, config, mesh, links, unit_elements, dtype))
    return config


def _by_links(
    knob: str, config: SmpConfig, mesh: SmpMesh, links: Links | None, unit_elements: Sequence[int], dtype: torch.dtype
) -> tuple[int, str]:
    between = mesh.topology.spans_nodes(mesh.shard_ranks)
    if mesh.shard_degree == 1:
        return _OWN[knob], "shard_degree=1: nothing is gathered"
    in_one_stage = between and not mesh.hierarchical and links is not None and links.flat is not None
    place: Place = "flat" if in_one_stage else "inter" if between else "intra"
    measured: Collectives | None = None if links is None else getattr(links, place)
    if measured is None:
        nodes, k = mesh.topology.num_nodes, mesh.topology.ranks_per_node
        return _OWN[knob], f"no measured links of {nodes} x {k} ranks ({LINKS_VARIABLE})"
    link = measured.all_gather
    if knob == "reduce_scatter_buffers":
        missing = _missing(config, knob, _METHODS[knob], mesh)
        if missing:
            return _OWN[knob], missing
        link = measured.reduce_scatter
        quantized: str | None = config.quantized_reduce
        dtype = getattr(torch, config.reduce_dtype) if config.reduce_dtype not in (None, "auto") else dtype
    else:
        quantized = config.quantized_all_gather
    itemsize = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}[quantized] if quantized and between else dtype.itemsize
    message = statistics.median_low(unit_elements) * itemsize / mesh.shard_degree
    count = units_in_flight(link, message)
    room = link.latency * link.bandwidth
    return count, (
        f"by {LINKS_VARIABLE}, {room / 1024:.0f} KiB are on their way {PLACES[place]}, a unit's message has "
        f"{message / 1024:.0f} KiB" + (f"; at most {MOST_IN_FLIGHT}" if count == MOST_IN_FLIGHT else "")
    )


def _require(config: SmpConfig, knob: str, method: str, mesh: SmpMesh) -> None:
    missing = _missing(config, knob, method, mesh)
    if missing:
        instead = 1 if knob in _OWN else "false"
        raise ValueError(f"{knob}={getattr(config, knob)!r}: {missing}; write {knob}={instead}")


def _missing(config: SmpConfig, knob: str, method: str, mesh: SmpMesh) -> str | None:
    """Why FSDP2's method can do nothing here."""
    if not fsdp_has(method):
        return f"torch {torch.__version__} has no FSDPModule.{method}"
    if mesh.device.type != "cuda":
        return f"it is about streams and NCCL, and the device is {mesh.device.type}, where reductions are synchronous"
    if knob == "separate_reduce_scatter_group":
        if mesh.hierarchical:
            return "collectives in two stages have groups of their own; hierarchical=false has one stage"
        if config.quantized_reduce and mesh.topology.spans_nodes(mesh.shard_ranks):
            return "quantized_reduce does not reduce over FSDP2's group"
    if knob == "symmetric_memory":
        if mesh.hierarchical:
            return (
                "collectives in two stages are torch-smp's own, not NCCL's symmetric ones; hierarchical=false has one"
            )
        for other in ("quantized_all_gather", "quantized_reduce"):
            if getattr(config, other):
                return f"{other} sends payloads of torch-smp's own"
        if config.reduce_scatter_buffers not in (1, "auto"):
            return "torch keeps one buffer of symmetric memory; reduce_scatter_buffers has to be 1"
    return None


def apply_fsdp_options(model: nn.Module, config: SmpConfig) -> None:
    """Hand settled options to the model's roots, before the first forward. Collective with
    ``separate_reduce_scatter_group``."""
    forward, backward = config.forward_prefetch, config.backward_prefetch
    assert isinstance(forward, int) and isinstance(backward, int)
    prefetch(model, forward=forward, backward=backward)
    for root in _roots(model):
        if config.separate_reduce_scatter_group:
            root.set_separate_reduce_scatter_group(True)
        if config.reduce_scatter_buffers != 1:
            root.set_reduce_scatter_max_input_buffers(config.reduce_scatter_buffers)  # type: ignore[arg-type]


def prefetch(model: nn.Module, *, forward: int, backward: int) -> None:
    """Gather ahead of use: in forward the next ``forward`` units in the order in which they are registered (0: FSDP2's
    own, which overlaps by streams only), in backward the ``backward`` before (1: FSDP2's own, by the order in which
    they ran)."""
    for root in _roots(model):
        units: list[FSDPModule] = [module for module in root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
        for place, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + forward])
            if backward > 1:
                unit.set_modules_to_backward_prefetch(units[max(place - backward, 0) : place][::-1])


def _roots(model: nn.Module) -> Iterable[FSDPModule]:
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in inside:
            inside.update(module.modules())  # type: ignore[attr-defined]
            yield module
