"""Outputs of units that are views and written into behind them: FSDP2 then does not see
the backward pass come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks

WIDTH, TOKENS = 8, 3


def write_into_the_models_output() -> str:
    model = nn.Linear(WIDTH, WIDTH)
    parallel = parallelize(model, SmpConfig(shard_degree=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    output = model(torch.randn(2, TOKENS, WIDTH))
    output /= 2.0
    output.square().mean().backward()
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_model_that_does_not_hear_of_the_backward_pass_is_an_error_at_the_step() -> (
    None
):
    """No unit heard of it: the step changed nothing, in silence."""
    for said in run_ranks(write_into_the_models_output, 2):
        assert (
            "left gradients in the model" in said
            and "Write x = x + y for x += y" in said
        )
