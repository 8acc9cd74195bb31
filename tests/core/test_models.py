"""Models of many shapes train on ranks like in one process, in float64 to 1e-12 (a few
hundred roundings).

SGD with momentum, not Adam, so that the comparison stays linear in the gradients:
GPT-2's key bias has none but noise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.zoo import SPECIMENS, build
from tests.harness import run_ranks

STEPS, MICRO_BATCHES = 3, 2
TRANSFORMERS = ["GPT-2", "Llama", "ViT"]

Trained = tuple[list[float], dict[str, torch.Tensor]]


def batch_of(name: str, step: int, micro: int, rank: int) -> Any:
    return SPECIMENS[name].batch(
        torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    )


def train_alone(name: str, world: int) -> Trained:
    torch.manual_seed(0)
    model, specimen = build(name), SPECIMENS[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            batches = [batch_of(name, step, micro, rank) for rank in range(world)]
            call = lambda method, *args: method(*args)  # noqa: E731
            total = (
                sum(specimen.loss(model, call, batch) for batch in batches)
                / world
                / MICRO_BATCHES
            )
            total.backward()
            losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {
        key: value.detach().clone() for key, value in model.state_dict().items()
    }


def train_together(names: list[str], **knobs) -> dict[str, Trained]:
    found = {}
    for name in names:
        try:
            found[name] = train_one(name, **knobs)
        except Exception as error:
            raise RuntimeError(f"model {name!r}") from error
    return found


def train_one(name: str, **knobs) -> Trained:
    specimen = SPECIMENS[name]
    torch.manual_seed(0 if dist.get_rank() == 0 else 5)
    parallel = parallelize(
        build(name), SmpConfig(**knobs, **specimen.knobs), entry=specimen.entry
    )
    mesh = parallel.mesh
    model = parallel.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel.prepare_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with parallel.window.accumulate(micro < MICRO_BATCHES - 1):
                run = (
                    parallel.run_as_forward
                    if specimen.entry == "steps"
                    else lambda method, *args: method(*args)
                )
                loss = (
                    specimen.loss(
                        model, run, batch_of(name, step, micro, mesh.data_rank)
                    )
                    / MICRO_BATCHES
                )
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / mesh.data_size)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    parallel.reshard()
    state = model.state_dict().items()
    return losses, {
        key: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .clone()
        for key, value in state
    }


def compare(names: list[str], world: int, **knobs) -> None:
    expected = {name: train_alone(name, world) for name in names}
    for seen in run_ranks(train_together, world, names, timeout=600, **knobs):
        for name in names:
            tolerance = SPECIMENS[name].tolerance
            (losses, weights), (their_losses, their_weights) = (
                seen[name],
                expected[name],
            )
            assert losses == pytest.approx(their_losses, rel=0, abs=tolerance), name
            assert weights.keys() == their_weights.keys()
            for key, value in their_weights.items():
                worst = (weights[key].double() - value.double()).abs().max().item()
                assert worst <= tolerance, f"{name}: {key} is {worst} off"


OTHERS = [
    name for name in SPECIMENS if name not in TRANSFORMERS and "compiled" not in name
]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.slow
def test_models_of_all_shapes_train_like_one_process_with_replicas(degree: int) -> None:
    compare(OTHERS, 4, ranks_per_node=2, shard_degree=degree)


@pytest.mark.parametrize(
    "names",
    [OTHERS[::2], pytest.param(OTHERS[1::2], marks=pytest.mark.slow)],
    ids=["half", "rest"],
)
def test_models_of_all_shapes_train_like_one_process(names: list[str]) -> None:
    compare(names, 2, shard_degree=2)


def test_transformers_models_train_like_one_process() -> None:
    compare(TRANSFORMERS, 2, shard_degree=2)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_transformers_models_train_like_one_process_in_other_layouts(
    degree: int,
) -> None:
    compare(TRANSFORMERS, 4, ranks_per_node=2, shard_degree=degree)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_compiled_models_train_like_one_process(degree: int) -> None:
    compare([name for name in SPECIMENS if "compiled" in name], 2, shard_degree=degree)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
def test_models_of_all_shapes_train_on_three_ranks(reshard: bool) -> None:
    """A number of ranks that divides hardly any dimension."""
    compare(OTHERS, 3, shard_degree=3, reshard_after_forward=reshard)
