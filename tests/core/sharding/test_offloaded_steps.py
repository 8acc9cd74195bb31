"""A step whose states are on the host is one step to hooks, schedules, closures and
whoever edits weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.sharding.optimizer import host as host_optimizer
from tests.core.activations.models import build, tokens
from tests.core.sharding import prepared_runs
from tests.core.sharding.state_offload_runs import (
    adamw,
    bfloat16_parameters,
    gradients,
    master_steps,
    offloaded,
)
from tests.harness import run_ranks


def test_masters_survive_a_state_dict() -> None:
    expected, _ = master_steps(12)
    parameters = bfloat16_parameters()
    optimizer = offloaded(parameters, adamw)
    for step in range(6):
        gradients(step, parameters)
        optimizer.step()
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = offloaded(again, adamw)
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(6, 12):
        gradients(step, again)
        resumed.step()
    assert all(map(torch.equal, again, expected))


def test_weights_written_from_outside_are_stepped_from() -> None:
    """A loaded checkpoint or a swapped average counts, also where the master remembers
    another value."""
    for dtype in (torch.float32, torch.bfloat16):
        parameters = [nn.Parameter(torch.ones(4, dtype=dtype))]
        optimizer = offloaded(parameters, lambda given: torch.optim.SGD(given, lr=0.25))
        for value in (1.0, 5.0):
            parameters[0].data.fill_(value)
            parameters[0].grad = torch.ones(4, dtype=dtype)
            optimizer.step()
            assert torch.equal(
                parameters[0], torch.full((4,), value - 0.25, dtype=dtype)
            )


def test_states_are_loaded_in_the_order_in_which_parameters_lie_in_memory() -> None:
    """A file holds rows; fused kernels walk a parameter and its states side by side."""

    def stepped(
        optimizer: torch.optim.Optimizer, parameter: nn.Parameter
    ) -> torch.Tensor:
        parameter.grad = torch.sin(torch.arange(6.0)).view(3, 2).t()
        optimizer.step()
        return parameter.detach().clone()

    by_columns, of_one_piece = (nn.Parameter(torch.ones(3, 2).t()) for _ in range(2))
    saved, expected = offloaded([by_columns], adamw), offloaded([of_one_piece], adamw)
    stepped(saved, by_columns), stepped(expected, of_one_piece)
    states = saved.state_dict()
    for entry in states["state"].values():
        entry |= {
            key: value.contiguous()
            for key, value in entry.items()
            if key.startswith("exp_avg")
        }
    resumed = offloaded([by_columns], adamw)
    resumed.load_state_dict(states)
    assert torch.equal(stepped(resumed, by_columns), stepped(expected, of_one_piece))


def test_hooks_schedules_and_closures_are_those_of_one_step() -> None:
    parameters = [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
    ]
    optimizer = offloaded(parameters[:2], lambda given: torch.optim.SGD(given, lr=1.0))
    optimizer.add_param_group({"params": [parameters[2]], "lr": 0.5})
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 / (1 + step)
    )
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        for parameter in parameters[::2]:  # the second has no gradient
            parameter.grad = torch.ones(3)
        return 7.0

    for _ in range(2):
        assert optimizer.step(closure) == 7.0
        scheduler.step()
    assert calls == ["before", "closure", "after"] * 2
    assert [parameter[0].item() for parameter in parameters] == [
        1 - 1 - 0.5,
        1.0,
        1 - 0.5 - 0.25,
    ]


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_in_its_groups_is_kept() -> None:
    parameters = bfloat16_parameters()
    with mock.patch.object(host_optimizer, "CHUNK_BYTES", 1):
        optimizer = offloaded(parameters, lambda given: Counting(given, lr=0.1))
    for step in range(3):
        gradients(step, parameters)
        optimizer.step()
    assert optimizer.param_groups[0]["count"] == 3


def test_momentum_of_a_parameter_that_is_reached_later() -> None:
    """Its first step is taken together with later steps of others."""
    ours, plain = (
        [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))] for _ in range(2)
    )
    optimizers = [
        offloaded(ours, lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
        torch.optim.SGD(plain, lr=0.1, momentum=0.9),
    ]
    for step in range(3):
        for parameters, optimizer in zip((ours, plain), optimizers, strict=True):
            parameters[0].grad = torch.full((3,), 1.0 + step)
            parameters[1].grad = torch.full((3,), 2.0) if step else None
            optimizer.step()
    assert all(map(torch.equal, ours, plain))


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        offloaded(bfloat16_parameters(), torch.optim.LBFGS)


def norms_agree() -> float:
    """Norms with offloaded gradients are those without."""
    norms = []
    for offload in (None, "all"):
        parallel = build(layers=2, shard_degree=2, state_offload=offload)
        parallel.module(tokens(parallel.mesh.rank)).backward()
        norms.append(parallel.clip_grad_norm_(1e-3).item())
    assert norms[0] == norms[1] and dist.get_world_size() == 2
    return norms[0]


def test_norms_of_offloaded_gradients() -> None:
    assert run_ranks(norms_agree, 2)[0] > 0


def assigned_whole() -> list[float]:
    """Gradients that were masked out of place, which makes whole ones of shards."""

    def train(model: Any, optimizer: torch.optim.Optimizer, ranks: Any) -> Any:
        mask = (torch.arange(25).view(5, 5) % 3 > 0).double()
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                loss = model(prepared_runs.batch(step, rank)) / len(ranks)
                loss.backward()
            head, bias = model.head.weight, model.first[0].bias
            head.grad = head.grad * mask[:1]
            bias.grad = bias.grad * mask[1]
            optimizer.step()
        return prepared_runs.weights(model)

    model = prepared_runs.net()
    expected = train(model, adamw(model.parameters()), range(2))
    apart = []
    for knobs in ({"state_offload": "optimizer"}, {"state_offload": "all"}):
        parallel = prepared_runs.sharded({"shard_degree": 2, **knobs})
        optimizer = adamw(parallel.module.parameters())
        parallel.prepare_optimizer(optimizer)
        own = train(parallel.module, optimizer, [dist.get_rank()])
        apart.append(prepared_runs.difference(own, expected))
    return apart


def test_gradients_that_were_assigned_whole_are_stepped_in_parts() -> None:
    assert all(max(apart) <= 1e-12 for apart in run_ranks(assigned_whole, 2))
