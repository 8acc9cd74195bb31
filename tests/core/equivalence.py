"""Training on ranks and in one process, and what equal means."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.models import Trajectory, TroubledModel, global_batches, loss_of

STEPS, SAMPLES = 3, 8

KEPT = {"reshard_after_forward": False, "keep_between_micro_batches": "parameters"}

HELD = {"reshard_after_forward": True, "keep_between_micro_batches": "gradients"}

BOTH = {"reshard_after_forward": False, "keep_between_micro_batches": "gradients"}


def build(dtype: torch.dtype, **knobs) -> ParallelModel:
    torch.manual_seed(dist.get_rank())
    model = TroubledModel().to(dtype)
    return parallelize(model, SmpConfig(**knobs))


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .clone()
        for name, value in model.state_dict().items()
    }


def train_together(
    dtype: torch.dtype,
    micro_batches: int,
    mutation: str | None = None,
    *,
    disturbed: bool = False,
    **knobs,
) -> Trajectory:
    """``disturbed``: evaluations and a reading of the state dict between micro-batches;
    in every second step no micro-batch is announced as the last, so that clipping
    closes the window."""
    parallel = build(dtype, **knobs)
    model, mesh = parallel.module, parallel.mesh
    if mutation == "no replica hop":
        for each in parallel.window._units:
            each.send = lambda: None
    elif mutation == "one parameter left out":
        parallel.window._replicated.send = lambda: None
    elif mutation == "held for ever":
        parallel.window._reduce_held = lambda: None
    elif mutation == "gathered for ever":
        model.set_reshard_after_backward(False)
        parallel.window._keep_gathered = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    seen = Trajectory()
    for step, micro in enumerate(global_batches(STEPS, micro_batches, SAMPLES)):
        total = torch.zeros((), dtype=dtype)
        for number, tokens in enumerate(micro):
            mine = tokens.chunk(mesh.data_size)[mesh.data_rank]
            with parallel.window.accumulate(
                number < micro_batches - 1 or (disturbed and step % 2 == 1)
            ):
                loss = loss_of(model, mine) / micro_batches
                loss.backward()
            total += loss.detach()
            if disturbed and number < micro_batches - 1:
                evaluate_inside(model, mine, loss * micro_batches, with_state=step == 2)
        norm = parallel.clip_grad_norm_(0.1)
        assert not isinstance(norm, DTensor) and norm.ndim == 0
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        seen.losses.append(total.item() / mesh.data_size)
        seen.norms.append(norm.item())
    seen.weights = full_weights(model)
    return seen


def evaluate_inside(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    trained: torch.Tensor,
    with_state: bool,
) -> None:
    """The loss is that of training, before and after weights are read."""
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(
                loss_of(model, tokens), trained, rtol=0, atol=1e-15
            )
        if with_state:
            full_weights(model)


def assert_close(
    seen: Trajectory, expected: Trajectory, loss_tolerance, weight_tolerance: float
) -> None:
    for step, (ours, theirs) in enumerate(
        zip(seen.losses, expected.losses, strict=True)
    ):
        assert abs(ours - theirs) <= loss_tolerance(step), (
            f"loss of step {step}: {ours} against {theirs}"
        )
    for step, (ours, theirs) in enumerate(zip(seen.norms, expected.norms, strict=True)):
        assert abs(ours - theirs) <= loss_tolerance(step), (
            f"norm of step {step}: {ours} against {theirs}"
        )
    assert seen.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        worst = (seen.weights[name] - value).abs().max().item()
        assert worst <= weight_tolerance, f"{name} is {worst} off"
