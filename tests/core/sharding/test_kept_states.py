"""What an optimizer keeps over sharded parameters, its states and flags, is there after
a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.live_state import full_state_dict
from smp_core.checkpoint.optimizers import (
    load_full_optimizer_state,
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.sharding.optimizer.kinds import register_elementwise
from tests.core.scenarios import parallel_model
from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    WORLD,
    Averages,
    difference,
    net,
    own_batch,
    sharded,
    train,
    weights,
)
from tests.harness import run_ranks


def averages() -> list[str]:
    def edit(model: Any, optimizer: Any, step: int) -> None:
        optimizer.eval() if step == 3 else None
        seen.append(weights(model))
        optimizer.train()

    wrong = []
    seen: list[Any] = []
    model = net()
    train(model, Averages(model.parameters(), lr=0.1), range(WORLD), edit)
    expected = [*seen, weights(model)]
    for knobs in LAYOUTS[:4]:
        seen = []
        parallel = sharded(knobs)
        optimizer = Averages(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        train(parallel.module, optimizer, own_batch(parallel), edit)
        apart = max(map(difference, [*seen, weights(parallel.module)], expected))
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_optimizers_that_move_weights_for_evaluation_move_the_models() -> None:
    assert run_ranks(averages, WORLD) == [[]] * WORLD


@register_elementwise
class Hoarder(torch.optim.SGD):
    """Momentum with every kind of value in its states and groups; each of them counts
    in a step."""

    def __init__(self, parameters: Any, lr: Any, betas: Any = (0.9, 0.5)) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(
                lr=lr,
                betas=betas,
                options={"factors": [lr * 2, None, "text", True]},
                none=None,
                words="sgd",
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, other = group["betas"]
            assert (
                group["options"]["factors"][1:] == [None, "text", True]
                and group["words"] == "sgd"
            )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    state.update(
                        count=torch.tensor(0.0, dtype=torch.float64),
                        number=0,
                        flag=False,
                        nothing=None,
                        nested={"deep": [zeros.clone()]},
                    )
                    state.update(
                        pair=(zeros.clone(), torch.tensor(1.0, dtype=torch.float64))
                    )
                state["count"] += 1
                state["number"] += 1
                state["flag"] = not state["flag"]
                moment, scale = state["pair"]
                moment.mul_(beta).add_(parameter.grad)
                deep = state["nested"]["deep"][0].mul_(other).add_(moment)
                scale.mul_(0.9)
                size = (
                    group["lr"]
                    * scale
                    * (1 + state["count"] / 10)
                    * (2 if state["flag"] else 1)
                    / state["number"]
                )
                parameter.sub_(
                    deep * size.to(deep.dtype)
                    + moment * (group["options"]["factors"][0] / 10)
                )


def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    """In float64: torch's kernels round a float32 rate at different places."""
    rate, *betas = torch.tensor([1e-2, 0.9, 0.99], dtype=torch.float64)
    return torch.optim.AdamW(parameters, lr=rate, betas=tuple(betas))


def hoarder(parameters: Any) -> torch.optim.Optimizer:
    return Hoarder(
        parameters,
        lr=torch.tensor(0.05, dtype=torch.float64),
        betas=(torch.tensor(0.9), torch.tensor(0.5)),
    )


MAKERS = {"tensor rate": tensor_rate, "hoarder": hoarder}


def until_step_3(model: Any, optimizer: Any, step: int) -> None:
    if step == 3:
        raise StopIteration


def resumed(
    folder: str, moves: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[str]:
    wrong = []
    for name, make in MAKERS.items():
        model = net()
        train(model, make(model.parameters()), range(WORLD))
        expected = weights(model)
        for number, (before, after) in enumerate(moves):
            path = f"{folder}/{name} {number}"
            parallel = sharded(before)
            optimizer = make(parallel.module.parameters())
            parallel.prepare_optimizer(optimizer)
            with contextlib.suppress(StopIteration):
                train(parallel.module, optimizer, own_batch(parallel), until_step_3)
            named = {
                "model": parallel.model_state(),
                "optimizer": named_optimizer_state(parallel.module, optimizer),
            }
            save_checkpoint(path, named)
            in_one_file = full_state_dict(
                {"optimizer": optimizer.state_dict()}, rank0_only=False
            )["optimizer"]
            for way in ("folder", "file"):
                again = sharded(after, seed=1)
                state = again.model_state()
                load_checkpoint(path, {"model": state})
                again.take_model_state(state)
                its_optimizer = make(again.module.parameters())
                again.prepare_optimizer(its_optimizer)
                if way == "folder":
                    load_named_optimizer_state(
                        path, ("optimizer",), again.module, its_optimizer
                    )
                else:
                    load_full_optimizer_state(its_optimizer, in_one_file)
                train(again.module, its_optimizer, own_batch(again), begin=3)
                apart = difference(weights(again.module), expected)
                if not apart <= 1e-12:
                    wrong.append(f"{name}, {way}, {before} to {after}: {apart}")
    return wrong


MOVES = [
    (LAYOUTS[0], LAYOUTS[0]),
    (LAYOUTS[0], LAYOUTS[1]),
    (LAYOUTS[2], LAYOUTS[3]),
    (LAYOUTS[3], LAYOUTS[4]),
    (LAYOUTS[4], {"shard_degree": 1}),
]


@pytest.mark.parametrize(
    "moves", [MOVES[1:4:2], pytest.param(MOVES, marks=pytest.mark.slow)], ids=len
)
def test_whatever_an_optimizer_keeps_is_there_after_a_resume(
    moves: list[Any], tmp_path: Path
) -> None:
    """Tensors in groups, alone and in tuples; tensors like parameters and others in
    nested states; numbers, flags."""
    assert run_ranks(resumed, WORLD, str(tmp_path), moves) == [[]] * WORLD


def kernels_after_loading() -> list[tuple[Any, Any]]:
    parallel = parallel_model(net(), shard_degree=2, units=["Sequential"])
    optimizer = torch.optim.RMSprop(parallel.module.parameters(), lr=0.01)
    parallel.prepare_optimizer(optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(foreach=True, lr=0.5)
    optimizer.load_state_dict(saved)
    train(parallel.module, optimizer, own_batch(parallel))
    return [(group["lr"], group["foreach"]) for group in optimizer.param_groups]


def test_loaded_flags_leave_the_choice_of_kernels() -> None:
    """Plain and sharded parameters of one group cannot be stepped by one foreach
    kernel."""
    assert run_ranks(kernels_after_loading, WORLD) == [[(0.5, False)]] * WORLD


IN_PARTS: list[dict[str, Any]] = [
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 2, "optimizer_shard": "world", "state_offload": "optimizer"},
    {"shard_degree": 4, "state_offload": "optimizer"},
]


def loaded_unsharded() -> list[str]:
    wrong = []
    model = net()
    train(model, tensor_rate(model.parameters()), range(4))
    for knobs in IN_PARTS:
        parallel = sharded(knobs)
        first = tensor_rate(parallel.module.parameters())
        parallel.prepare_optimizer(first)
        with contextlib.suppress(StopIteration):
            train(parallel.module, first, own_batch(parallel), until_step_3)
        unsharded = full_state_dict({"": first.state_dict()}, rank0_only=False)[""]
        second = tensor_rate(parallel.module.parameters())
        parallel.prepare_optimizer(second)
        second.load_state_dict(unsharded)
        train(parallel.module, second, own_batch(parallel), begin=3)
        apart = difference(weights(parallel.module), weights(model))
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_every_rank_loads_its_part_of_unsharded_states() -> None:
    """As one process has saved them, or ``full_state_dict`` has gathered them."""
    assert run_ranks(loaded_unsharded, 4) == [[]] * 4
