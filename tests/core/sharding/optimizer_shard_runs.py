"""Models and optimizers of the tests of `optimizer_shard`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from tests.core.gpt import SmallGpt
from tests.core.scenarios import parallel_model

RECIPES: dict[str, dict[str, Any]] = {
    "bfloat16 model": {},
    "mixed": {"param_dtype": "bfloat16"},
}


def bf16_model(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = SmallGpt(layers=2)
    return model.bfloat16() if recipe == "bfloat16 model" else model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Not Adam, which makes steps out of the noise of gradients that are zero."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


BF16_STEPS, BF16_MICRO = 4, 2


def bf16_tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(101, (2, 9), generator=generator)


def one_process_with_masters(recipe: str) -> dict[str, torch.Tensor]:
    computing = bf16_model(recipe).bfloat16()
    masters = {
        name: nn.Parameter(p.detach().float())
        for name, p in bf16_model(recipe).named_parameters()
    }
    optimizer = momentum(masters.values())
    for step in range(BF16_STEPS):
        for name, parameter in computing.named_parameters():
            parameter.data.copy_(masters[name].data)
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for micro, rank in itertools.product(range(BF16_MICRO), range(4)):
            computing.zero_grad()
            (computing(bf16_tokens(step, micro, rank)) / BF16_MICRO).backward()
            for name, parameter in computing.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / 4
        optimizer.step()
    return {name: master.detach() for name, master in masters.items()}


@dataclass
class HalfPrecisionRun:
    weights: dict[str, torch.Tensor]
    stored: set[torch.dtype]
    gathered_between_nodes: float
    said: str


def half_precision_run(
    recipe: str,
    knobs: dict[str, Any],
    steps: tuple[int, int],
    load: str | None = None,
    save: str | None = None,
) -> HalfPrecisionRun:
    parallel = parallel_model(bf16_model(recipe), **{**RECIPES[recipe], **knobs})
    optimizer = momentum(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    if load is not None:
        state = parallel.model_state()
        load_checkpoint(load, {"model": state})
        parallel.take_model_state(state)
        load_named_optimizer_state(load, ("optimizer",), parallel.module, optimizer)
    for step in range(*steps):
        for micro in range(BF16_MICRO):
            with parallel.window.accumulate(micro < BF16_MICRO - 1):
                (
                    parallel.module(bf16_tokens(step, micro, dist.get_rank()))
                    / BF16_MICRO
                ).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = parallel.meter.unfinished().get("all_gather/inter_bytes", 0.0)
    state, named = (
        parallel.model_state(),
        named_optimizer_state(parallel.module, optimizer),
    )
    if save is not None:
        save_checkpoint(save, {"model": state, "optimizer": named})
    # For a bfloat16 model the weights are those of its optimizer state.
    names = [name for name, _ in parallel.module.named_parameters()]
    fine = {name: named["state"][name].get("smp_master", state[name]) for name in names}
    weights = {
        name: v.full_tensor() if isinstance(v, DTensor) else v
        for name, v in fine.items()
    }
    stored = {parameter.dtype for parameter in parallel.module.parameters()}
    return HalfPrecisionRun(
        weights, stored, sent, str(parallel.config.why("optimizer_shard"))
    )


def assert_near(
    seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """float32 sums of eight gradients in another order, through four steps; an update
    that was lost to bfloat16 would be 2**-9 of a weight off."""
    for name, value in expected.items():
        assert seen[name].dtype == torch.float32
        assert (seen[name] - value).abs().max() <= 2e-6, name
