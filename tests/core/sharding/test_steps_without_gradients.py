"""With ``optimizer_shard="world"`` parameters have no gradients: a loop that looks for
them there is named, and an optimizer that steps the parameters themselves is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from tests.core.scenarios import parallel_model
from tests.core.sharding.prepared_runs import batch, net
from tests.harness import run_ranks
from tests.logged import warnings_said

STEPS_WORLD = {"shard_degree": 1, "optimizer_shard": "world"}


def by_torch(model: Any, parallel: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def by_name(model: Any, parallel: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def by_closure(model: Any, parallel: Any, optimizer: Any, x: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        loss = model(x)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.1, 0.1)
        return loss

    optimizer.step(closure)


def by_window(model: Any, parallel: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    parallel.clip_grad_norm_(0.1)
    optimizer.step()


def of_inputs(model: Any, parallel: Any, optimizer: Any, x: torch.Tensor) -> None:
    x.requires_grad_()
    loss = model(x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    optimizer.step()


LOOPS = (by_torch, by_name, by_closure, by_window, of_inputs)


def words(knobs: dict[str, Any]) -> list[list[str]]:
    """What each loop is told on this rank."""
    found: list[list[str]] = []
    for loop in LOOPS:
        model = net()
        parallel = parallel_model(model, **knobs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        with warnings_said() as said:
            for step in range(2):
                loop(model, parallel, optimizer, batch(step, dist.get_rank()))
        found.append([line for line in said if "no gradients on parameters" in line])
    return found


def test_a_loop_that_looks_for_gradients_on_parameters_is_named_once() -> None:
    told, others = run_ranks(words, 2, STEPS_WORLD)
    assert [len(said) for said in told] == [1, 1, 1, 0, 0]
    for (said,), loop in zip(told[:3], LOOPS[:3], strict=True):
        assert loop.__name__ in said and "grad_norm()" in said
    assert others == [[]] * len(LOOPS)


def test_nothing_is_said_where_parameters_have_gradients() -> None:
    assert run_ranks(words, 2, {"shard_degree": 2})[0] == [[]] * len(LOOPS)


def step_unprepared(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = net()
    parallel = parallel_model(model, **STEPS_WORLD)
    parallel.prepare_optimizer(make(model.parameters(), lr=0.1))
    other = make(model.parameters(), lr=0.1)
    model(batch(0, dist.get_rank())).backward()
    with pytest.raises(ValueError, match=r"was not prepared.*prepare_optimizer\("):
        other.step()
    # The masters are what there is to step.
    make(parallel.stepped(model.parameters()), lr=0.1).step()


def test_an_optimizer_that_would_step_nothing_is_refused() -> None:
    run_ranks(step_unprepared, 2, torch.optim.SGD)
