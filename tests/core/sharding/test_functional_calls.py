"""torch.func over a sharded model: derivatives of what it computes are one process's;
other parameters in the place of shards are refused in the first call as in later ones.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another
order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, vmap

from tests.core.scenarios import parallel_model
from tests.harness import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(3, 2)).double()


def derivatives(model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)
    each = vmap(jacrev(lambda row: model(row)))(x)
    second = hessian(lambda rows: model(rows).square().sum())(x)
    return [vmap(model)(x), each, second, jacfwd(model)(x), model(x)]


def of_a_sharded_model() -> list[Tensor]:
    model = parallel_model(net(), shard_degree=2, units=["Sequential"]).module
    return [each.detach() for each in derivatives(model)]


def test_derivatives_by_torch_func_are_those_of_one_process() -> None:
    expected = derivatives(net())
    for found in run_ranks(of_a_sharded_model, 2):
        for own, one in zip(found, expected, strict=True):
            assert (own - one).abs().max() <= 1e-12


def replaced_in_a_call(called_before: bool) -> str:
    model = parallel_model(net(), shard_degree=2, units=["Sequential"]).module
    x = torch.ones(3, 4, dtype=torch.float64)
    if called_before:
        model(x)
    whole = {"0.2.bias": torch.ones(3, dtype=torch.float64)}
    with pytest.raises(ValueError) as refused:
        functional_call(model, whole, (x,))
    # The model itself is as it was.
    assert torch.isfinite(model(x)).all()
    return str(refused.value)


@pytest.mark.parametrize("called_before", [False, True])
def test_other_parameters_in_a_call_are_refused(called_before: bool) -> None:
    for said in run_ranks(replaced_in_a_call, 2, called_before):
        assert said.startswith("0.2.bias was replaced")
