"""Training steps of the small and the large Llama, for all items that train."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.llama import VOCABULARY, Llama
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
from smp_core.topology import Topology

STEPS, MICRO_BATCHES, LENGTH = 5, 3, 32


@dataclass
class Trained:
    """Losses by step, parameters at the end, and where the host waited for the device,
    by warning and count."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    scale: float | None = None

    def off(self, other: Trained) -> tuple[float, float]:
        """Return the largest relative differences of losses and of parameters."""
        losses = max(
            abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)
        )
        weights = max(
            (
                (value.double() - other.parameters[name].double()).abs().max()
                / other.parameters[name].abs().max()
            ).item()
            for name, value in self.parameters.items()
        )
        return losses, weights


def small_llama(
    device: torch.device, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> Llama:
    """Make a model with the same weights on every device."""
    torch.manual_seed(0)
    return Llama("tiny", LENGTH, dropout).to(dtype).to(device)


def batches(
    device: torch.device, rank: int = 0, world: int = 1
) -> list[list[torch.Tensor]]:
    """Draw the micro-batches of this rank by step."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, MICRO_BATCHES, 2 * world, LENGTH + 1)
    tokens = torch.randint(VOCABULARY["tiny"], shape, generator=generator)[
        :, :, 2 * rank : 2 * rank + 2
    ]
    return [list(step.to(device)) for step in tokens]


def train(
    knobs: Mapping[str, Any],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float64,
    topology: Topology | None = None,
    rank: int = 0,
    compiled: bool = False,
    scale: float | None = None,
) -> Trained:
    """Train five steps of three micro-batches with clipping and AdamW; with float16 as
    well as without, no step asks the device anything but what the knobs do."""
    model = small_llama(device, dtype)
    parallel = parallelize(model, SmpConfig(**knobs), device=device, topology=topology)
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
    parallel.prepare_optimizer(optimizer)
    if compiled:
        for block in model.blocks:
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    scaler = None if scale is None else ShardedGradScaler(device.type, init_scale=scale)
    found, losses = Trained(), []
    world = 1 if topology is None else topology.world_size
    for number, step in enumerate(batches(device, rank, world)):
        with _watched(device, number > 0, found.waits):
            losses.append(_step(parallel, optimizer, step, scaler))
    found.losses = torch.stack(losses).tolist()
    found.parameters = {
        name: _whole(value) for name, value in parallel.module.state_dict().items()
    }
    found.scale = None if scaler is None else scaler.get_scale()
    del parallel, model, optimizer
    gc.collect()  # a model's hooks point back at it
    return found


def _step(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    step: list[torch.Tensor],
    scaler: torch.amp.GradScaler | None,
) -> torch.Tensor:
    """Take one optimizer step; return the mean loss."""
    total = torch.zeros((), device=step[0].device)
    for number, tokens in enumerate(step):
        with parallel.window.accumulate(enabled=number < len(step) - 1):
            loss = parallel.module(tokens) / len(step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        total = total + loss.detach()
    if scaler is not None:
        scaler.unscale_(optimizer)
    parallel.clip_grad_norm_(1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return total


class _watched:
    """Collects torch's warnings about synchronising operations inside the block."""

    def __init__(
        self, device: torch.device, counts: bool, into: dict[str, int]
    ) -> None:
        self._on = counts and device.type == "cuda"
        self._into, self._caught = into, warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        if self._on:
            self._list = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, *error: Any) -> None:
        if not self._on:
            return
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*error)
        for warning in self._list or ():
            # Not what torch says of the mode itself.
            if "called a synchronizing" in str(warning.message):
                line = f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}"
                self._into[line] = self._into.get(line, 0) + 1


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the unsharded value. Collective where it is sharded."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu().clone()
