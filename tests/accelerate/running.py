"""The bare loop of the tests in this folder: under SmpAccelerator on ranks of the pool,
and in plain torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate_smp import SmpAccelerator
from tests.core.equivalence import full_weights as full_weights
from tests.core.models import Trajectory, TroubledModel, global_batches, loss_of

STEPS, SAMPLES, MAX_NORM = 4, 8, 0.1


def fresh_accelerator(**arguments: Any) -> SmpAccelerator:
    """Accelerate keeps its state in class attributes; the ranks of the pool live from
    case to case."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return SmpAccelerator(**arguments)


def make_optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.9**step
    )


def make_loader(steps: int, micro_batches: int, batch_size: int) -> DataLoader:
    tokens = global_batches(steps, micro_batches, SAMPLES).flatten(0, 2)
    return DataLoader([{"tokens": sample} for sample in tokens], batch_size=batch_size)


def train_alone(
    dtype: torch.dtype, micro_batches: int, steps: int = STEPS
) -> Trajectory:
    """One process, whole global batches, plain torch."""
    torch.manual_seed(0)
    model = TroubledModel().to(dtype)
    optimizer, scheduler = make_optimizer(model)
    seen = Trajectory()
    batches = iter(make_loader(steps, micro_batches, SAMPLES))
    for _ in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            loss = loss_of(model, next(batches)["tokens"]) / micro_batches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.losses.append(total)
        seen.norms.append(norm.item())
    seen.weights = full_weights(model)
    return seen


def prepared(
    dtype: torch.dtype, micro_batches: int, steps: int = STEPS, **arguments: Any
) -> tuple[Any, ...]:
    arguments = {
        "gradient_accumulation_steps": micro_batches,
        "schedule_in_optimizer_steps": True,
        **arguments,
    }
    accelerator = fresh_accelerator(**arguments)
    torch.manual_seed(accelerator.process_index)
    model = TroubledModel().to(dtype)
    optimizer, scheduler = make_optimizer(model)
    loader = make_loader(steps, micro_batches, SAMPLES // accelerator.num_processes)
    # The optimizer stands before the model on purpose.
    return (accelerator, *accelerator.prepare(optimizer, model, loader, scheduler))


def train(
    accelerator: Any,
    optimizer: Any,
    model: Any,
    loader: Any,
    scheduler: Any,
    max_norm: float = 0.1,
) -> Trajectory:
    """The loop as Accelerate's documentation writes it."""
    seen = Trajectory()
    total = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch["tokens"])
            accelerator.backward(loss)
            total += (
                accelerator.reduce(loss.detach().double(), "mean")
                / accelerator.gradient_accumulation_steps
            )
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                assert not isinstance(norm, DTensor) and norm.ndim == 0
                seen.norms.append(norm.item())
                seen.losses.append(total.item())
                total.zero_()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    seen.weights = full_weights(model)
    return seen


def train_together(
    dtype: torch.dtype, micro_batches: int, **arguments: Any
) -> Trajectory:
    seen = train(*prepared(dtype, micro_batches, **arguments))
    dist.barrier()
    return seen
