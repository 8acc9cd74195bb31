"""Times of gathers and reductions, as :mod:`smp_core.cluster.links` fits them.

Timed is what the engine calls, through its own communication objects. Inside nodes and
between them these are the stages of two-stage collectives: on gloo messages between all
pairs of ranks, since gloo's own reduce-scatter puts a whole all-reduce on the wire;
elsewhere the backend's collectives. Over all ranks it is the collective in one stage:
the backend's all-gather and all-reduce, and its reduce-scatter, on gloo messages again.
All nodes run at the same time, and between nodes all ranks of each node, as in
training: what they share, they share here too.

A sample is the time of a few calls one after the other, so that it matters little when
each rank began, on an accelerator until the device is done. The slowest rank counts,
and the median of the samples. Sizes grow until a call is expected to take longer than
``LONGEST_CALL``, so that a place takes seconds on fast links and half a minute at
worst.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from smp_core.cluster import (
    KINDS,
    Collectives,
    Kind,
    LinkFit,
    Links,
    of_all_ranks,
    prefers_messages,
    ring_bytes,
    rounds,
)
from smp_core.comm.exchange import GATHER, gather_rows
from smp_core.comm.flat import FlatAllGather, FlatAllReduce, FlatReduceScatter
from smp_core.comm.meter import CommMeter
from smp_core.topology import Topology

SIZES = tuple(1 << exponent for exponent in range(12, 27, 2))
"""Bytes of the whole tensor, the gathered one or the one to be reduced: 4 KiB to 64
MiB."""

LONGEST_CALL = 1.0
"""Seconds."""

TIMEOUT = timedelta(minutes=2)
"""A rank that is gone in the middle of a call is not waited for any longer."""

# A line fits fewer points too well: its error would mean nothing.
_FEWEST_SIZES = 3
# Long enough that what buffers on the way take up at once does not count.
_SAMPLE_SECONDS, _MOST_CALLS = 0.05, 50
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 5

T = TypeVar("T")


def measure(
    topology: Topology, device: torch.device, *, sizes: Sequence[int] = SIZES
) -> Links:
    """Time the links. Collective over the world; seconds on fast links, less than a
    minute or two on slow ones.

    Args:
        device: of this rank's tensors.
        sizes: bytes of the unsharded tensors, ascending.

    Raises:
        RuntimeError: a rank has no memory for its tensors; raised on all of them, and
            names it. What fails in the middle of a collective is raised on the rank
            where it failed, which has to end then, as the others find out by the
            connections that close or by the process group's timeout.
    """
    k, m = topology.ranks_per_node, topology.num_nodes
    meter = CommMeter(topology, dist.get_rank(), device.type, enabled=False)
    # Which links there are: inside nodes, between them, and over all ranks at once.
    intra = inter = flat = None
    if k > 1:
        intra = _in_groups(topology.nodes, meter, device, sizes)
    if m > 1:
        inter = _in_groups(
            list(zip(*topology.nodes, strict=True)), meter, device, sizes
        )
    if k > 1 and m > 1:
        flat = _in_groups([range(k * m)], meter, device, sizes, stage=False)
    return Links(m, k, intra, inter, flat, _described(device))


def _in_groups(
    groups: Sequence[Sequence[int]],
    meter: CommMeter,
    device: torch.device,
    sizes: Sequence[int],
    *,
    stage: bool = True,
) -> Collectives:
    """Time all ``groups`` at once. ``stage``: as a stage of a collective in two."""
    group = _own_group(groups, meter.rank)
    g = dist.get_world_size(group)
    fits = {}
    for kind in KINDS:
        points: list[tuple[float, float]] = []
        for asked in sizes:
            # Expected from the time of the last size.
            expected = (
                points[-1][1] / points[-1][0] * ring_bytes(kind, g, asked)
                if points
                else 0.0
            )
            if len(points) >= _FEWEST_SIZES and expected > LONGEST_CALL:
                break
            call, n_bytes = _together(
                partial(_prepared, kind, asked, group, meter, device, stage)
            )
            points.append((ring_bytes(kind, g, n_bytes), _median_seconds(call, device)))
        # What was timed: messages of ours, or the library's collective.
        messages = (
            prefers_messages(group, device)
            and kind != "all_reduce"
            and (stage or kind == "reduce_scatter")
        )
        fits[kind] = LinkFit.through(
            points, rounds(kind, g), "messages" if messages else "library"
        )
    return Collectives(g, **fits)


def _own_group(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    """Return the one this rank is in. All are made, on every rank in the same order as
    torch.distributed wants it."""
    made = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in groups]
    return next(
        group for group, ranks in zip(made, groups, strict=True) if rank in ranks
    )


def _prepared(
    kind: Kind,
    n_bytes: int,
    group: dist.ProcessGroup,
    meter: CommMeter,
    device: torch.device,
    stage: bool,
) -> tuple[Callable[[], object], int]:
    """Return the call, on float32 tensors of its own, and the bytes of the unsharded
    tensor."""
    g, me = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(g, max(n_bytes // 4 // g, 1), device=device)
    if kind == "all_reduce":
        all_reduce = FlatAllReduce(meter)
        return lambda: all_reduce(rows.view(-1), group), rows.nbytes
    if kind == "reduce_scatter":
        # Zeros: values do not change the time.
        reduce_scatter, out = FlatReduceScatter(meter), torch.zeros_like(rows[0])
        return lambda: reduce_scatter(
            out, rows.view(-1), group, dist.ReduceOp.SUM
        ), rows.nbytes
    if stage:
        return lambda: gather_rows(rows, group, GATHER), rows.nbytes
    all_gather = FlatAllGather(meter)
    return lambda: all_gather(rows.view(-1), rows[me], group), rows.nbytes


def _together(prepare: Callable[[], T]) -> T:
    """Prepare on all ranks; an error on any of them is raised on every one, before a
    rank waits in a collective."""
    made, said = None, None
    try:
        made = prepare()
    except (RuntimeError, MemoryError) as error:  # out of memory, most likely
        said = f"{type(error).__name__}: {error}"
    # All ranks know whether one of them has failed before they go on.
    failed = [
        f"rank {rank}: {text}"
        for rank, text in enumerate(of_all_ranks(said))
        if text is not None
    ]
    if failed:
        raise RuntimeError(f"links cannot be measured: {'; '.join(failed[:4])}")
    assert made is not None
    return made


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one call, the same on every rank."""
    for _ in range(2):  # the first one makes connections
        (warm,) = _slowest([_sample(call, device, 1)], device)
    # As many calls as make a sample long enough to be measured.
    calls = min(max(int(_SAMPLE_SECONDS / warm), 1), _MOST_CALLS)
    samples = min(
        max(int(LONGEST_CALL / (warm * calls)), _FEWEST_SAMPLES), _MOST_SAMPLES
    )
    return statistics.median(
        _slowest([_sample(call, device, calls) for _ in range(samples)], device)
    )


def _sample(call: Callable[[], object], device: torch.device, calls: int) -> float:
    _slowest([0.0], device)  # all begin together
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - began) / calls


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    worst = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def _described(device: torch.device) -> str:
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return (
        f"{dist.get_backend()} on {device.type}{name}, torch {torch.__version__}, {platform.system()} "
        f"{platform.release()}, {os.cpu_count()} CPUs"
    )
