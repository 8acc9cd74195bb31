"""What a loop edits around a step (gradients that are assigned, states of a parameter,
kernels that are asked for) has one process's effect, to 1e-12 in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from smp_core.engine.parallel_model import ParallelModel
from smp_core.sharding.optimizer.kinds import register_elementwise
from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    STEPS,
    WORLD,
    Net,
    batch,
    difference,
    net,
    own_batch,
    sharded,
    train,
    unequal,
    weights,
)
from tests.harness import run_ranks
from tests.logged import warnings_said

Edit = Callable[[nn.Module], None]


def assigned_by_columns(model: nn.Module) -> None:
    """What torch lays out by columns, or has on all ranks."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.ndim == 2:
            mean = gradient.mean(dim=0, keepdim=True)
            parameter.grad = mean.expand(parameter.shape) * 2


def assigned_whole(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.full(parameter.shape, 0.3, dtype=parameter.dtype)


def stepped(
    make: Callable[[Any], torch.optim.Optimizer],
    edit: Edit,
    model: nn.Module,
    parallel: ParallelModel | None,
    scaled: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms, and weights after some steps."""
    optimizer = make(model.parameters())
    ranks = range(WORLD)
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
        ranks = own_batch(parallel)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    norms = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 0)
        for rank in ranks:
            scaler.scale(model(batch(step, rank)) / len(ranks)).backward()
        edit(model)
        scaler.unscale_(optimizer)
        norms.append(
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if parallel is None
            else parallel.clip_grad_norm_(0.05)
        )
        scaler.step(optimizer)
        scaler.update()
    return [float(norm) for norm in norms], weights(model)


def assigned_gradients() -> list[str]:
    wrong = []
    cases: list[tuple[Any, Edit, bool]] = [
        (lambda p: torch.optim.AdamW(p, lr=0.05), assigned_by_columns, False),
        (
            lambda p: torch.optim.Adamax(p, lr=0.05, foreach=False),
            assigned_whole,
            False,
        ),
        (lambda p: torch.optim.AdamW(p, lr=0.05, fused=True), assigned_whole, True),
    ]
    layouts = [each for each in LAYOUTS if each.get("optimizer_shard") != "world"]
    for make, edit, scaled in cases:
        norms, expected = stepped(make, edit, net(), None, scaled)
        for knobs in layouts:
            parallel = sharded(knobs)
            own = stepped(make, edit, parallel.module, parallel, scaled)
            apart = difference(own[1], expected)
            off = max(abs(a - b) for a, b in zip(own[0], norms, strict=True))
            if not max(apart, off) <= 1e-12:
                wrong.append(f"{edit.__name__}, {knobs}: {apart}, norms {off}")
    return wrong


def test_gradients_in_any_layout_are_clipped_and_stepped() -> None:
    """A norm of gradients that every rank has whole counted them once for each; kernels
    that take no plain tensor beside a shard failed."""
    assert run_ranks(assigned_gradients, WORLD) == [[]] * WORLD


def forgets(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """States of some parameters are made anew, as restarts of adapters do it."""
    first, bias = model.head.weight, model.first[0].weight
    if step == 2:
        assert first in optimizer.state and optimizer.state.get(bias)
        optimizer.state[first] = {}
        optimizer.state.pop(bias)
        assert bias not in optimizer.state
    if step == 4:
        del optimizer.state[bias]
        optimizer.state[first] = {
            "momentum_buffer": torch.full_like(first, 0.01, requires_grad=False)
        }


def forgotten_states() -> list[str]:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    return unequal(sgd, forgets)


def test_states_are_set_and_taken_away_by_the_parameter() -> None:
    """Under ``optimizer_shard="world"`` they are those of masters: an entry under the
    parameter was one that nothing read."""
    assert run_ranks(forgotten_states, WORLD) == [[]] * WORLD


@register_elementwise
class _Counting(torch.optim.SGD):
    """A user's own: a rate that falls with each step, and in each group."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / (self.steps + group["count"])
        return super().step(closure)


def counted_steps(model: Net, parallel: ParallelModel | None) -> Any:
    groups = [{"params": [*model.head.parameters()]}, {"params": [model.gain]}]
    optimizer = _Counting(groups, lr=0.1)
    ranks = range(WORLD)
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
        ranks = own_batch(parallel)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.gain.requires_grad_(step % 2 == 0)
        for rank in ranks if step != 2 else []:
            (model(batch(step, rank)) / len(ranks)).backward()
        optimizer.step()
    return weights(model)


def hooked_steps() -> list[str]:
    """Hooks of all optimizers see the user's, and each step of it once."""
    parallel = sharded({"shard_degree": 2, "state_offload": "optimizer"})
    optimizer = torch.optim.Adam(parallel.module.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda each, *_: seen.append(each)),
        register_optimizer_step_post_hook(lambda each, *_: seen.append(each)),
    ]
    train(parallel.module, optimizer, own_batch(parallel))
    for handle in handles:
        handle.remove()
    strangers = [each for each in seen if each is not optimizer]
    return [f"{len(seen)} calls"] * bool(strangers or len(seen) != 2 * STEPS)


def counting() -> list[str]:
    expected, wrong = counted_steps(net(), None), hooked_steps()
    for knobs in LAYOUTS:
        parallel = sharded(knobs)
        apart = difference(counted_steps(parallel.module, parallel), expected)  # type: ignore[arg-type]
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_steps_are_counted_where_there_is_no_gradient() -> None:
    """On the host a step without gradients, or a group without them, was left out; and
    hooks of all optimizers were called for each chunk that is stepped there."""
    assert run_ranks(counting, WORLD) == [[]] * WORLD


def fused_kernels() -> list[str]:
    kinds: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ]
    wrong = []
    for number, make in enumerate(kinds):
        _, expected = stepped(make, lambda model: None, net(), None, True)
        for knobs in LAYOUTS:
            parallel = sharded(knobs)
            edit: Edit = lambda model: None  # noqa: E731
            _, own = stepped(make, edit, parallel.module, parallel, True)
            apart = difference(own, expected)
            if not apart <= 1e-12:
                wrong.append(f"{number}, {knobs}: {apart}")
    return wrong


def test_fused_kernels_that_cannot_run_give_way() -> None:
    """Where a scaler is, too: torch hands its scale to optimizers that were made for
    fused kernels. torch has no fused SGD and Adagrad for shards."""
    assert run_ranks(fused_kernels, WORLD) == [[]] * WORLD


def warned_of_hooks() -> list[str]:
    def clips(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)

    def slows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    with warnings_said() as said:
        for hook in (clips, slows):
            parallel = sharded({"shard_degree": 1, "optimizer_shard": "world"})
            model = parallel.module
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            parallel.prepare_optimizer(optimizer)
            optimizer.register_step_pre_hook(hook)
            train(model, optimizer, own_batch(parallel))
    return [text for text in said if "one dimension" in text]


def test_hooks_before_a_step_that_look_at_parts_of_gradients_are_named() -> None:
    first, *others = run_ranks(warned_of_hooks, WORLD)
    assert len(first) == 1 and "clips is called with" in first[0]
    assert others == [[]] * (WORLD - 1)


def copied_optimizers() -> list[str]:
    said = []
    for knobs in LAYOUTS[:2]:
        parallel = sharded(knobs)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        copied = copy.deepcopy(optimizer)
        for use in (copied.zero_grad, copied.state_dict):
            with pytest.raises(RuntimeError) as refused:
                use()
            said.append(str(refused.value))
    return said


def test_a_copy_of_a_prepared_optimizer_says_what_it_is() -> None:
    for said in run_ranks(copied_optimizers, WORLD):
        assert len(said) == 4
        assert all("is a copy of a prepared optimizer" in each for each in said)
