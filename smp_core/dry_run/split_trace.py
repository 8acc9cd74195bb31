"""Traces of a model whole, and with its layers split over tensor ranks: the child
process of a plan.

    python -m smp_core.dry_run.split_trace QUESTION OUT     as of :func:`smp_core.planner.trace.trace`

What a rank keeps of split layers, and gathers for them, is found by running them, on
rank 0 of a fake process group whose collectives do nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# _subclasses: torch's documentation has it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from smp_core.comm import CommMeter
from smp_core.dry_run.without_values import alike
from smp_core.outside import answer_parent
from smp_core.planner import (
    Instants,
    ModelTrace,
    Source,
    SplitRun,
    SplitTrace,
    between,
    copied,
    trace,
)
from smp_core.tensor_parallel import TensorAxis, apply_tensor_parallel
from smp_core.topology import Topology

_MOST_TENSOR_RANKS = 16


def trace_model(
    words: str, tokens: int, given: Mapping[str, Any] | None = None
) -> ModelTrace:
    """Trace a model in this process, which has no process group:
    :func:`smp_core.planner.trace.trace_model`, with the degrees that its layers can be
    split over."""
    with alike():
        return trace.trace_model(words, tokens, given, run_split)


def run_split(
    source: Source,
    lists: list[str],
    heads: int,
    tokens: int,
    modes: Sequence[trace.Recomputation],
) -> SplitTrace:
    """Run two blocks over the fewest and the most ranks:
    :data:`smp_core.planner.trace.Splitting`."""
    dims: dict[str, int] = {}
    # Degrees that split the same parameters.
    by_split: dict[frozenset[str], list[int]] = {}
    unsplit: dict[int, str] = {}
    for degree in (
        n
        for n in range(2, _MOST_TENSOR_RANKS + 1)
        if heads % n == 0 or _MOST_TENSOR_RANKS % n == 0
    ):
        # A degree that the layers cannot be split over is kept with its reason.
        try:
            with _over(copied(source.model, None).model, degree) as found:
                # Others have keys of their own for several ranks.
                if heads % degree == 0:
                    by_split.setdefault(frozenset(found), []).append(degree)
                    dims |= found
        except ValueError as error:
            unsplit[degree] = str(error)
    # The ends of each kind are run; what lies between follows from them.
    ends = {n for kind in by_split.values() for n in (kind[0], kind[-1])}
    most = 2 * math.lcm(*ends)  # half a sequence is split, too
    if not ends or tokens < 2 * most:
        return SplitTrace(unsplit=unsplit)
    # Sizes that a run must not mistake for others are kept apart.
    rows = {
        size // n
        for n in (1, *ends)
        for p in source.model.parameters()
        for size in p.shape
    }
    tokens = trace.told_apart(tokens - tokens % most, rows, most)
    places = [(1, tokens), (2, tokens), (1, tokens // 2)]
    runs: dict[int, dict[str, list[SplitRun]]] = {}
    # A copy of the model, since splitting changes it.
    for degree in ends:
        copy = copied(source.model, None)
        runs[degree] = {}
        with _over(copy.model, degree):
            for mode in modes:
                meters = [trace.measured(copy, lists, mode, *place) for place in places]
                runs[degree][mode] = [
                    SplitRun(meter.instants, meter.kept) for meter in meters
                ]
    instants: dict[tuple[int, str], Instants] = {}
    for kind, mode in itertools.product(by_split.values(), modes):
        for degree in kind:
            # Between the ends of a kind, bytes are a + b / ranks.
            pairs = zip(runs[kind[0]][mode], runs[kind[-1]][mode], strict=True)
            at = [
                between(degree, kind[0], one, kind[-1], other) for one, other in pairs
            ]
            kept = tuple(each.kept for each in at)
            instants[degree, mode] = Instants.of(
                tokens, *(each.instants for each in at), kept=kept
            )
    return SplitTrace(instants, dims, unsplit)


def _split_dim(parameter: nn.Parameter) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    (placement,) = parameter.placements
    return placement.dim if isinstance(placement, Shard) else None


@contextlib.contextmanager
def _over(model: nn.Module, degree: int) -> Iterator[dict[str, int]]:
    """Split a model's layers as training does, for as long as the context lasts; yield
    the dims by parameter."""
    # A mesh is of real tensors, whatever mode is active.
    with unset_fake_temporarily():
        dist.init_process_group("fake", rank=0, world_size=degree)
        mesh = init_device_mesh("cpu", (degree,))
    try:
        axis = TensorAxis(
            mesh.get_group(),
            CommMeter(Topology.uniform(degree, degree), 0, enabled=False),
        )
        split = apply_tensor_parallel(
            model, mesh, axis, plan="auto", sequence_parallel=True
        )
        split.stand_around_blocks(without_values=True)
        yield {
            name: dim
            for name, p in model.named_parameters()
            if (dim := _split_dim(p)) is not None
        }
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_parent(lambda question: trace_model(*question))
