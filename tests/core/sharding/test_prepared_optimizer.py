"""An optimizer over sharded parameters does what it does in one process, whatever
becomes of its groups, whenever it was made, and whatever it keeps; one that cannot is
refused on all ranks before the first step.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another
order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.scenarios import parallel_model
from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    WORLD,
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

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def adding(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Groups that are added, as callbacks do that thaw a model layer by layer."""
    if step == 1:
        optimizer.add_param_group({"params": model.second[0].bias, "lr": 0.05})
    if step == 2:
        named = [*model.first.named_parameters(), ("gain", model.gain)]
        optimizer.add_param_group({"params": [parameter for _, parameter in named]})


def editing(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Groups that are written to, and states that are dropped."""
    if step == 1:
        optimizer.param_groups[0]["params"].append(model.second[0].bias)
    if step == 2:
        optimizer.param_groups.append(
            {
                **optimizer.param_groups[0],
                "params": [*model.first.parameters()],
                "lr": 0.02,
            }
        )
    if step == 3:
        optimizer.state.clear()
    if step == 4:
        optimizer.param_groups[0]["params"] = [model.head.weight]


def freezing(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Parameters that are switched off and on where the model has them, and where the
    optimizer has them."""
    weight, bias = optimizer.param_groups[0]["params"]
    if step in (1, 3):
        weight.requires_grad_(step == 3)
    if step in (2, 4):
        model.head.bias.requires_grad_(step == 4)
    if step == 5:
        assert weight.requires_grad and bias.requires_grad


def made(kind: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def changed_groups() -> list[str]:
    wrong = []
    for number, (kind, edit) in enumerate(
        itertools.product(("sgd", "adamw"), (adding, editing, freezing))
    ):

        def of_head(model: Any, kind: str = kind) -> torch.optim.Optimizer:
            return made(kind, model.head.parameters())

        # Every edit in every layout, with one of the kinds: three edits, so that the
        # halves change.
        found = unequal(of_head, edit, LAYOUTS[number % 2 :: 2])
        wrong += [f"{kind}, {edit.__name__}, {each}" for each in found]
    return wrong


def test_groups_that_change_after_prepare_are_stepped_as_in_one_process() -> None:
    """And ``zero_grad(set_to_none=False)`` of foreach and fused optimizers, over plain
    and sharded parameters."""
    assert run_ranks(changed_groups, WORLD) == [[]] * WORLD


def strangers() -> list[str]:
    said = []

    def refused(action: Callable[[], Any]) -> None:
        try:
            action()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))

    for knobs in LAYOUTS[:3]:
        parallel = sharded(knobs)
        stranger = nn.Parameter(torch.zeros(3))
        refused(
            lambda p=parallel, s=stranger: p.prepare_optimizer(
                torch.optim.SGD([s], lr=0.1)
            )
        )
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        refused(lambda o=optimizer, s=stranger: o.add_param_group({"params": s}))
        assert len(optimizer.param_groups) == 1
        again = {"params": [next(parallel.module.parameters())]}
        refused(lambda o=optimizer, g=again: o.add_param_group(g))
        optimizer.param_groups[0]["params"].append(stranger)
        refused(optimizer.step)
    return said


def test_parameters_of_no_model_are_refused_whenever_they_come() -> None:
    for said in run_ranks(strangers, WORLD):
        for first, added, twice, later in zip(*[iter(said)] * 4, strict=True):
            assert "group 0: shapes [3]" in first and "of no prepared model" in first
            assert "group 1: shapes [3]" in added
            assert "more than one parameter group" in twice
            assert "group 0: shapes [3]" in later


def made_before() -> list[str]:
    wrong = []
    for kind in ("sgd", "adamw", "adagrad"):
        model = net()
        train(model, made(kind, model.parameters()), range(WORLD))
        expected = weights(model)
        for knobs in LAYOUTS:
            model = net(dist.get_rank())
            optimizer = made(kind, model.parameters())
            listed = list(model.parameters())
            parallel = parallel_model(model, units=["Sequential"], **knobs)
            assert parallel.prepare_optimizer(optimizer)
            assert parallel.stepped(listed) == parallel.stepped()
            assert not parallel.prepare_optimizer(optimizer), (
                "a second fit finds it as it is"
            )
            train(model, optimizer, own_batch(parallel))
            apart = difference(weights(model), expected)
            if not apart <= 1e-12:
                wrong.append(f"{kind}, {knobs}: {apart}")
    return wrong


def test_an_optimizer_made_before_sharding_steps_the_sharded_parameters() -> None:
    """Also one with states from its constructor, and one that is prepared twice."""
    assert run_ranks(made_before, WORLD) == [[]] * WORLD


def stepped_apart() -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        model(batch(0, 0)).backward()
        optimizer.step()
    parallel = parallel_model(model, shard_degree=2)
    try:
        parallel.prepare_optimizer(optimizer)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_states_that_not_every_rank_has_are_refused_on_all() -> None:
    assert all(
        "other states on some ranks" in said for said in run_ranks(stepped_apart, WORLD)
    )


def with_schedule() -> int:
    parallel = sharded({"shard_degree": 2, "state_offload": "optimizer"})
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 / (1 + step)
    )
    parallel.prepare_optimizer(optimizer)
    train(
        parallel.module,
        optimizer,
        own_batch(parallel),
        lambda model, optimizer, step: step and schedule.step(),
    )
    return optimizer.host_bytes()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.filterwarnings("error")
def test_states_are_on_the_host_though_a_schedule_was_made_before() -> None:
    assert all(held > 0 for held in run_ranks(with_schedule, WORLD))


class Mine(torch.optim.SGD):
    """Of a user's own, with nothing unusual."""


class FailsWhereEmpty(torch.optim.SGD):
    """Looks for the largest gradient of what this rank has."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.to_local().abs().max()
        return super().step(closure)


AdamW8bit = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "torchao.optim.adam"})


def kinds_on_shards() -> dict[str, str]:
    said = {}
    for name, kind in {
        "torch": torch.optim.Adafactor,
        "closure": torch.optim.LBFGS,
        "rprop": torch.optim.Rprop,
        "empty": FailsWhereEmpty,
        "torchao": AdamW8bit,
        "mine": Mine,
    }.items():
        parallel = parallel_model(net(), shard_degree=2)
        try:
            parallel.prepare_optimizer(kind(parallel.module.parameters(), lr=0.1))
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    parallel = parallel_model(net(), shard_degree=1)
    parallel.prepare_optimizer(
        torch.optim.Adafactor(parallel.module.parameters(), lr=0.1)
    )
    return said


def test_optimizers_that_cannot_step_shards_are_refused_on_all_ranks() -> None:
    """Also one that would fail on the rank alone whose shard is empty, and leave the
    others waiting."""
    first, *others = run_ranks(kinds_on_shards, WORLD)
    assert all(said == first for said in others)
    # torch's Rprop steps DTensors from 2.15 on, and then as in one process; the trial
    # finds out.
    refused = {
        "torch": "Adafactor",
        "closure": "LBFGS",
        "rprop": "Rprop",
        "empty": "FailsWhereEmpty",
    }
    if first["rprop"] == "accepted":
        del refused["rprop"]
    for name, kind in refused.items():
        assert (
            f"{kind} cannot step sharded parameters" in first[name]
            and "AdamW, or shard_degree=1" in first[name]
        )
    assert "AdamW8bit is torchao's" in first["torchao"]
    assert first["mine"] == "accepted"


def search_lines(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]
) -> list[float]:
    """Steps by a line search; what each returned."""
    returned = []
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            losses = [model(batch(step, rank)) / len(ranks) for rank in ranks]
            for loss in losses:
                loss.backward()
            loss = torch.stack(losses).sum().detach()
            return float(loss) if step == 1 else loss

        returned.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return returned


def line_search(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        parameters, lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
    )


class Even(nn.Module):
    """Rows of which all ranks have as many, which torch asks for when LBFGS flattens
    them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def sharded_line_searches() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Of an optimizer that was made after the model was sharded, and of one that was
    made before and has kept its list of parameters, in another order on other
    ranks."""
    parallel = sharded({"shard_degree": 1})
    optimizer = line_search(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    returned = search_lines(parallel.module, optimizer, own_batch(parallel))
    found = [(returned, weights(parallel.module))]
    model = Even().double()
    listed = list(model.parameters())
    optimizer = line_search(listed[::-1] if dist.get_rank() else listed)
    parallel = parallel_model(model, shard_degree=2)
    parallel.prepare_optimizer(optimizer)
    returned = search_lines(parallel.module, optimizer, own_batch(parallel))
    return [*found, (returned, weights(parallel.module))]


def test_a_line_search_decides_by_the_loss_of_all_ranks() -> None:
    """1e-9: a search divides by small differences of losses."""
    models = (net(), Even().double())
    expected = [
        search_lines(model, line_search(model.parameters()), list(range(WORLD)))
        for model in models
    ]
    for found in run_ranks(sharded_line_searches, WORLD):
        for model, losses, (returned, own) in zip(models, expected, found, strict=True):
            assert returned == pytest.approx(losses, rel=0, abs=1e-9)
            assert difference(own, weights(model)) <= 1e-9


def hooks_of_before() -> list[str]:
    """Of an optimizer that has hooks when it is prepared: gradients are edited before
    its step, weights are averaged behind it. No micro-batch is announced as the last
    one."""

    def averaged(knobs: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shown: dict[str, Any] = {"model": model}
        average = {name: torch.zeros_like(w) for name, w in weights(model).items()}

        def halve(stepped: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in stepped.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

        def follow(*_: Any) -> None:
            for name, value in weights(shown["model"]).items():
                average[name].lerp_(value, 0.5)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(follow)
        if knobs is None:
            train(model, optimizer, range(WORLD))
            return {**average, "model": model.head.weight.detach()}
        parallel = parallel_model(model, units=["Sequential"], **knobs)
        parallel.prepare_optimizer(optimizer)
        shown["model"] = parallel.module
        with parallel.window.accumulate():
            train(parallel.module, optimizer, own_batch(parallel))
        return {**average, "model": weights(parallel.module)["head.weight"]}

    expected, wrong = averaged(None), []
    for knobs in LAYOUTS:
        apart = difference(averaged(knobs), expected)
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_hooks_that_an_optimizer_had_before_see_what_they_see_in_one_process() -> None:
    assert run_ranks(hooks_of_before, WORLD) == [[]] * WORLD
