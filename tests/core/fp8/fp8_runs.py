"""A model with FP8 linears in training, and what a run shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.fp8 import Fp8Recipe
from tests.core.gpt import SmallGpt

VOCABULARY, WIDTH, LENGTH = 64, 32, 9

RECIPE = Fp8Recipe(amax_history_len=4)


class Recomputing(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def build(
    *, dtype: torch.dtype = torch.float32, recompute: bool = False, **knobs
) -> ParallelModel:
    torch.manual_seed(dist.get_rank())  # the others take rank 0's weights
    model = SmallGpt(
        vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, length=LENGTH - 1
    ).to(dtype)
    if recompute:
        model.blocks = nn.ModuleList(Recomputing(block) for block in model.blocks)
    return parallelize(model, SmpConfig(**knobs))


def batches(steps: int, samples: int = 4) -> torch.Tensor:
    return torch.randint(
        VOCABULARY, (steps, samples, LENGTH), generator=torch.Generator().manual_seed(7)
    )


@dataclass
class Run:
    """What a run showed: losses are the mean over data ranks; histories are those of
    the last step."""

    losses: list[float] = field(default_factory=list)
    histories: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: torch.Tensor | None = None
    amax_calls: list[float] = field(default_factory=list)
    gathered: list[float] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


def train(
    parallel: ParallelModel,
    tokens: torch.Tensor,
    micro_batches: int = 1,
    lr: float = 1e-2,
) -> Run:
    model, mesh = parallel.module, parallel.mesh
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parallel.prepare_optimizer(optimizer)
    run = Run()
    for batch in tokens:
        mine = batch.chunk(mesh.data_size)[mesh.data_rank]
        total = torch.zeros(())
        for number, micro in enumerate(mine.chunk(micro_batches)):
            with parallel.window.accumulate(number < micro_batches - 1):
                loss = model(micro) / micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        parallel.meter.close_step()
        figures = parallel.meter.per_step()
        run.amax_calls.append(figures.get("amax_all_reduce/calls", 0.0))
        run.gathered.append(
            figures.get("all_gather/intra_bytes", 0.0)
            + figures.get("all_gather/inter_bytes", 0.0)
        )
        dist.all_reduce(total)
        run.losses.append(total.item() / mesh.data_size)
        run.histories.append(
            parallel.fp8.state.history[0].clone() if parallel.fp8 else torch.zeros(0)
        )
    run.weights = whole(model)
    run.scales = parallel.fp8.state.scale.clone() if parallel.fp8 else None
    run.kinds = {type(value).__name__ for value in model.state_dict().values()}
    return run


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("block.", ""): (
            value.full_tensor() if isinstance(value, DTensor) else value
        )
        .detach()
        .clone()
        for name, value in model.state_dict().items()
    }


def runs_of(variants: list[dict], steps: int = 4, samples: int = 4) -> list[Run]:
    """One run for each set of knobs (and ``micro_batches``), on the ranks of one
    case."""
    found = []
    for variant in variants:
        knobs = {"fp8": RECIPE, **variant}
        micro_batches = knobs.pop("micro_batches", 1)
        found.append(train(build(**knobs), batches(steps, samples), micro_batches))
    return found


def decibels(expected: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal to quantisation noise."""
    noise = (expected.double() - seen.double()).pow(2).sum()
    return 10 * math.log10((expected.double().pow(2).sum() / noise).item())
