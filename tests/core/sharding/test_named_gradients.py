"""Calls of torch.autograd that name parameters: gradients of these alone, as in one
process; or a line that says whose they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    STEPS,
    WORLD,
    batch,
    difference,
    net,
    own_batch,
    sharded,
    weights,
)
from tests.harness import run_ranks


def train_named(
    model: Any, optimizer: torch.optim.Optimizer, ranks: range | list[int]
) -> None:
    """Two backward passes a step, each with gradients of other parameters; a matrix
    that is tied across units and a 0-d one among them."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            loss = model(batch(step, rank)) / len(ranks)
            loss.backward(
                inputs=[*model.first.parameters(), model.gain], retain_graph=True
            )
            loss.backward(inputs=model.head.bias)
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def named_in_backward() -> list[str]:
    model = net()
    train_named(model, adam(model), range(WORLD))
    expected, wrong = weights(model), []
    for knobs in LAYOUTS:
        parallel = sharded(knobs)
        optimizer = adam(parallel.module)
        parallel.prepare_optimizer(optimizer)
        train_named(parallel.module, optimizer, own_batch(parallel))
        apart = difference(weights(parallel.module), expected)
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_backward_trains_the_parameters_that_it_names() -> None:
    assert run_ranks(named_in_backward, WORLD) == [[]] * WORLD


def returned() -> list[str]:
    said: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = said.append  # type: ignore[method-assign, assignment]
    logging.getLogger("smp").addHandler(handler)
    parallel = sharded({"shard_degree": 1})
    x = batch(0, parallel.mesh.rank).requires_grad_()
    # Gradients of inputs are a rank's own samples' in one process, too.
    torch.autograd.grad(parallel.module(x), x)
    assert not said
    for _ in range(2):
        torch.autograd.grad(parallel.module(x), [parallel.module.head.weight])  # type: ignore[union-attr]
    logging.getLogger("smp").removeHandler(handler)
    # Of shards there are none: not None, either, nor the gradient of a part of the loss.
    module = sharded({"shard_degree": WORLD}).module
    loss = module(batch(0, 0)).sum() + module.head.weight.full_tensor().sum()  # type: ignore[union-attr]
    for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):
        with pytest.raises(RuntimeError, match="no gradient of head"):
            torch.autograd.grad(
                loss,
                [module.head.weight],  # type: ignore[union-attr]
                retain_graph=True,
                **options,
            )
    # A hook would wait for a gradient that never comes to them.
    with pytest.raises(ValueError, match=r"register_multi_grad_hook.* head.*weight"):
        torch.autograd.graph.register_multi_grad_hook([module.head.weight], print)  # type: ignore[list-item, union-attr]
    seen: list[Any] = []
    y = module(batch(0, 0))
    torch.autograd.graph.register_multi_grad_hook([y], seen.append)
    y.sum().backward()
    assert len(seen) == 1
    return [record.getMessage() for record in said]


def test_gradients_that_are_returned_are_said_to_be_the_ranks_own() -> None:
    first, *others = run_ranks(returned, WORLD)
    assert len(first) == 1 and "of each rank's own samples" in first[0]
    assert others == [[]] * (WORLD - 1)
