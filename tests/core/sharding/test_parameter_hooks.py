"""Hooks of parameters beyond what random runs draw (tests/core/fuzz/hooks.py): who may
register them where, what they may refer to, and layers whose weights torch makes anew
in each forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.fuzz.hooks import Net, whole
from tests.core.scenarios import Net as Cells, parallel_model
from tests.harness import run_ranks


def _samples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def _sharded(model: nn.Module, **knobs: Any) -> ParallelModel:
    return parallel_model(model, units=("Cell",), **knobs)


def _words(act: Callable[[], object]) -> str:
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# Optimizers that step in backward


def _steps_in_backward(
    model: nn.Module, ranks: Sequence[int]
) -> dict[str, torch.Tensor]:
    """torch's tutorial: an optimizer of each parameter, which a hook steps."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        losses = [
            model(_samples(number, rank), number != 1).square().mean() for rank in ranks
        ]
        (sum(losses) / len(ranks)).backward()  # type: ignore[union-attr]
    return {name: whole(p) for name, p in model.named_parameters()}


def steps_in_backward() -> list[dict[str, torch.Tensor]]:
    found = []
    for degree in (1, 2, 4):
        model = _net()
        _sharded(model, shard_degree=degree)
        found.append(_steps_in_backward(model, [dist.get_rank()]))
    return found


def test_optimizers_that_step_in_backward_train_like_one_process() -> None:
    expected = _steps_in_backward(_net(), range(4))
    for by_degree in run_ranks(steps_in_backward, 4, ranks_per_node=2):
        for weights in by_degree:
            for name, weight in expected.items():
                assert torch.allclose(weights[name], weight, rtol=0, atol=1e-12), name


# Refusals


def refusals() -> dict[str, str]:
    found = {}

    def refers(model: nn.Module) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        model.enter.bias.register_post_accumulate_grad_hook(
            lambda p: optimizers[p].step()
        )

    def decays(model: nn.Module) -> None:
        weight = model.enter.weight
        weight.register_hook(lambda gradient: gradient + 0.1 * weight)

    def on_one_rank(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            model.leave.weight.register_hook(lambda gradient: None)

    for register in (refers, decays, on_one_rank):
        model = _net()
        register(model)
        found[register.__name__] = _words(
            lambda model=model: _sharded(model, shard_degree=2)
        )

    # Registered later on one rank: known when the window closes, on all ranks.
    model = _net()
    _sharded(model, shard_degree=1)
    if dist.get_rank() == 1:
        model.leave.weight.register_hook(lambda gradient: None)
    found["later on one rank"] = _words(lambda: model(_samples(0, 0)).sum().backward())

    # With masters there is no .grad to look at.
    model = _net()
    model.enter.bias.register_post_accumulate_grad_hook(lambda p: None)
    parallel = _sharded(model, shard_degree=1, optimizer_shard="world")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["masters"] = _words(lambda: parallel.prepare_optimizer(optimizer))

    # A list of before: what it is asked for would be nothing.
    model = _net()
    kept, teacher = list(model.parameters()), None
    _sharded(model, shard_degree=2)
    teacher = copy.deepcopy(kept[0])
    teacher.grad = torch.ones_like(teacher)
    assert teacher.grad is not None
    found["kept"] = _words(lambda: torch.nn.utils.clip_grad_norm_(kept, 1.0))
    return found


def test_hooks_and_lists_that_could_do_nothing_are_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, 2, ranks_per_node=2):
        for name in ("refers", "decays"):
            assert (
                "refers to parameters that Net had before it was sharded" in found[name]
            ), name
            assert "on_fit_start" in found[name]
        assert "leave.weight has a hook" in found["on_one_rank"]
        assert "only on rank 1 'leave.weight' has a hook" in found["later on one rank"]
        assert "optimizer_shard='shard'" in found["masters"]
        assert "make the list anew from model.parameters()" in found["kept"]


# Random numbers, other axes


def noise() -> list[torch.Tensor]:
    """Ranks whose generators differ draw one noise, or replicas would drift apart."""
    found = []
    for degree in (1, 2):
        model = _net()
        _sharded(model, shard_degree=degree)
        model.enter.weight.register_hook(
            lambda gradient: gradient + torch.randn_like(gradient)
        )
        torch.manual_seed(dist.get_rank())
        model(_samples(0, 0)).sum().backward()
        found.append(whole(model.enter.weight.grad))
    return found


def test_a_hook_that_draws_random_numbers_gives_all_ranks_the_same() -> None:
    first, *others = run_ranks(noise, 4, ranks_per_node=2)
    for other in others:
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True)
        )


def _trained(model: nn.Module, ranks: Sequence[int]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        # One forward: a spectral norm changes with each.
        model(
            torch.cat([_samples(number, rank) for rank in ranks]).requires_grad_()
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()}


def _hooked(seen: list[torch.Tensor]) -> nn.Module:
    model = _net()
    for name in ("cells.0.layer.weight", "cells.1.layer.bias", "enter.bias"):
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    return model


def over_tensor_ranks() -> tuple[dict[str, torch.Tensor], int]:
    seen: list[torch.Tensor] = []
    model = _hooked(seen)
    recipe = {"plan": {"cells.*.layer": "column_gather"}, "sequence_parallel": False}
    asked = SmpConfig(
        tensor_parallel_degree=2,
        tensor_parallel=recipe,
        shard_degree=2,
        units=("Cell",),
    )
    parallel = parallelize(model, asked)
    return _trained(model, [parallel.mesh.rank // 2]), len(seen)


def test_hooks_see_unsplit_gradients_of_split_layers() -> None:
    seen: list[torch.Tensor] = []
    expected = _trained(_hooked(seen), range(2))
    for weights, count in run_ranks(over_tensor_ranks, 4, ranks_per_node=2):
        assert count == len(seen)
        for name, weight in expected.items():
            assert torch.allclose(weights[name], weight, rtol=0, atol=1e-12), name


# Weights that torch makes anew in each forward


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_hook = nn.utils.weight_norm(nn.Linear(6, 6))
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.singular = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.first: list[str] = []
        for name, module in self.named_children():
            module.register_forward_hook(lambda *_, name=name: self.first.append(name))
            module.register_full_backward_hook(
                lambda *_, name=name: self.first.append(f"back {name}")
            )

    def forward(self, x: torch.Tensor, _: bool = True) -> torch.Tensor:
        for module in self.children():
            x = x + torch.tanh(module(x))
        return x


def _normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def normed() -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    found = []
    for knobs in (
        {"shard_degree": 1},
        {"shard_degree": 2},
        {"shard_degree": 2, "units": ("Linear", "ParametrizedLinear")},
    ):
        model = _normed()
        parallel_model(model, **knobs)
        weights = _trained(model, [dist.get_rank()])
        found.append((weights, model.first))
    return found


def test_normed_and_parametrized_weights_and_modules_hooks_are_as_in_one_process() -> (
    None
):
    model = _normed()
    expected = _trained(model, range(2))
    for by_knobs in run_ranks(normed, 2, ranks_per_node=2):
        for weights, first in by_knobs:
            assert first == model.first
            for name, weight in expected.items():
                assert torch.allclose(weights[name], weight, rtol=0, atol=1e-12), name


# Averages, as a list of tensors beside the model


class Average:
    """The arithmetic of diffusers' EMAModel, with its copies of what `parameters` were
    when it was made."""

    def __init__(self, parameters: Any) -> None:
        self.kept = [parameter.clone().detach() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        for kept, parameter in zip(self.kept, parameters, strict=True):
            kept.sub_(0.1 * (kept - parameter))

    def copy_to(self, parameters: Any) -> None:
        for kept, parameter in zip(self.kept, parameters, strict=True):
            parameter.data.copy_(kept.to(parameter.device).data)


def _averaged(
    model: nn.Module, teacher: nn.Module, ranks: Sequence[int]
) -> dict[str, torch.Tensor]:
    average, optimizer = (
        Average(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    for number in range(3):
        x = torch.cat([_samples(number, rank) for rank in ranks])
        with torch.no_grad():
            target = teacher(x)
        (model(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        for kept, parameter in zip(
            teacher.parameters(), model.parameters(), strict=True
        ):
            kept.data.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    average.copy_to(model.parameters())
    teacher.load_state_dict(model.state_dict())
    return {
        name: whole(p)
        for each in (model, teacher)
        for name, p in each.named_parameters(prefix=str(id(each) == id(teacher)))
    }


def averaged() -> list[dict[str, torch.Tensor]]:
    found = []
    for degree in (1, 2):
        model = _net()
        teacher = copy.deepcopy(model)  # before sharding; both are sharded then
        for each in (model, teacher):
            _sharded(each, shard_degree=degree)
        found.append(_averaged(model, teacher, [dist.get_rank()]))
    return found


def test_averages_made_after_sharding_and_sharded_teachers_are_one_processs() -> None:
    model = _net()
    expected = _averaged(model, copy.deepcopy(model), range(2))
    for by_degree in run_ranks(averaged, 2, ranks_per_node=2):
        for weights in by_degree:
            for name, weight in expected.items():
                assert torch.allclose(weights[name], weight, rtol=0, atol=1e-12), name


# Terms of the loss that are made of parameters


def _penalized(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]
) -> dict[str, torch.Tensor]:
    """A penalty on a weight that no forward uses, whose hook doubles the gradient."""
    weight = model.cells[1].never.weight
    weight.register_hook(lambda gradient: 2 * gradient)
    for number in range(2):
        penalty = model.cells[1].never.weight.square().sum()
        for rank in ranks:
            loss = model(_samples(number, rank), "0lr 1lr").square().mean()
            ((loss + penalty) / len(ranks)).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()}


def _cells() -> nn.Module:
    torch.manual_seed(0)
    return Cells(2).double()


def penalized() -> list[dict[str, torch.Tensor]]:
    found = []
    for shard in ("shard", "world"):
        parallel = _sharded(_cells(), shard_degree=2, optimizer_shard=shard)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        found.append(_penalized(parallel.module, optimizer, [parallel.mesh.data_rank]))
    return found


def test_hooks_see_penalties_on_parameters_that_received_nothing_else() -> None:
    model = _cells()
    expected = _penalized(model, torch.optim.SGD(model.parameters(), lr=0.1), range(4))
    for by_shard in run_ranks(penalized, 4, ranks_per_node=2):
        for weights in by_shard:
            for name, weight in expected.items():
                assert torch.allclose(weights[name], weight, rtol=0, atol=1e-12), name
