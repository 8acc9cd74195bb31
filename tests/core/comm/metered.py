"""A step whose bytes are counted, and what a unit's bytes are by formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.gpt import SmallGpt
from tests.core.recording import Call, CallRecorder

LAYERS, MICRO_BATCHES = 3, 2


@dataclass
class Step:
    """One rank's training step."""

    meter: dict[str, float]
    calls: list[Call]
    n_parameters: int


def train_one_step(
    world_micro_batches: int,
    precision: str | None = None,
    *,
    prepared: bool = False,
    **knobs,
) -> Step:
    torch.manual_seed(0)
    parallel = parallelize(
        SmallGpt(layers=LAYERS), SmpConfig(param_dtype=precision, **knobs)
    )
    mesh = parallel.mesh
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
    if prepared:
        parallel.prepare_optimizer(optimizer)
    parallel.meter.close_step()
    generator = torch.Generator().manual_seed(mesh.data_rank)
    with CallRecorder() as recorder:
        for number in range(world_micro_batches):
            with parallel.window.accumulate(number < world_micro_batches - 1):
                parallel.module(
                    torch.randint(101, (2, 9), generator=generator)
                ).backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    parallel.meter.close_step()
    return Step(
        parallel.meter.per_step(),
        recorder.calls,
        len(list(parallel.module.parameters())),
    )


def unit_bytes(p: int, element_size: int = 4) -> list[int]:
    """Bytes of each unit of the model, root first, as it is gathered over ``p`` ranks:
    rows padded to a multiple."""
    model = SmallGpt(layers=LAYERS)

    def padded(parameters) -> int:
        return (
            sum(-(-len(q) // p) * p * (q.numel() // len(q)) for q in parameters)
            * element_size
        )

    inside = {id(q) for q in model.blocks.parameters()}
    return [
        padded(q for q in model.parameters() if id(q) not in inside),
        *(padded(b.parameters()) for b in model.blocks),
    ]


def gathered_and_reduced(p: int, micro_batches: int) -> tuple[int, int]:
    """Bytes gathered and reduced by one step: blocks are gathered for forward and for
    backward, the root once."""
    root, *blocks = unit_bytes(p)
    return micro_batches * (root + 2 * sum(blocks)), micro_batches * (
        root + sum(blocks)
    )


def per_node(steps: list[Step], figure: str) -> list[float]:
    return [
        sum(step.meter.get(figure, 0.0) for step in steps[first : first + 2])
        for first in (0, 2)
    ]
