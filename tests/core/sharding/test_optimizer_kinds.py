"""Optimizers that step parts of tensors (optimizer_shard="world") or some tensors alone
(pipeline stages): the lists hold what they say, and all others are refused with the
line that registers them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.optim import Adafactor, Muon, StepsTogether
from smp_core.sharding.optimizer import kinds as optimizer_kinds
from smp_core.sharding.optimizer.kinds import (
    TORCHS_ELEMENTWISE,
    register_elementwise,
    register_tensorwise,
    require_elementwise,
    require_tensorwise,
)
from tests.core.sharding.optimizer_trial import difference, difference_together


class ClipsInside(torch.optim.SGD):
    """Clips by the norm of all its gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [
            p.grad
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))
        return super().step(closure)


class Stacked(torch.optim.SGD):
    """Keeps a state of two rows for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["pair"] = torch.stack(
                    [parameter.grad, parameter.grad]
                )
        return super().step(closure)


class AcrossTensor(torch.optim.SGD):
    """Divides by the norm of the tensor's gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Mine(torch.optim.AdamW):
    """Of a user's own, with nothing unusual."""


Faked = type("AdamW", (ClipsInside,), {"__module__": "torch.optim.adamw"})
Shampoo = type("MyShampoo", (torch.optim.SGD,), {})


def over_a_tensor(kind: Any) -> Any:
    return kind([nn.Parameter(torch.zeros(4, 4))], lr=0.1)


@pytest.fixture
def own_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_registered_elementwise", "_registered_tensorwise"):
        monkeypatch.setattr(optimizer_kinds, name, set())


def listed(full_names: Any) -> list[Any]:
    """The classes of a list whose packages are installed."""
    found = []
    for full_name in full_names:
        module, _, name = full_name.rpartition(".")
        try:
            found.append(getattr(importlib.import_module(module), name))
        except ImportError:
            continue
    return found


def test_the_lists_hold_what_the_trial_finds() -> None:
    elementwise = [*TORCHS_ELEMENTWISE, *listed(optimizer_kinds._ELEMENTWISE)]
    assert len(elementwise) > 10
    for kind in elementwise:
        assert (
            difference(over_a_tensor(kind)) is None
            and difference_together(over_a_tensor(kind)) is None
        ), kind
    for kind in (*optimizer_kinds._TENSORWISE, Muon, Adafactor):
        assert difference_together(over_a_tensor(kind)) is None, kind


@pytest.mark.parametrize("kind", [ClipsInside, AcrossTensor, Stacked])
def test_the_trial_finds_what_looks_further(kind: Any) -> None:
    assert difference(over_a_tensor(kind)) is not None
    assert (difference_together(over_a_tensor(kind)) is None) == (
        kind is not ClipsInside
    )


class Together(StepsTogether):
    """An optimizer whose ranks exchange something."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


class Further(Together):
    """One that may do something else than what it is derived from."""


@pytest.mark.usefixtures("own_lists")
def test_optimizers_whose_ranks_exchange_step_each_tensor_by_itself() -> None:
    require_tensorwise(over_a_tensor(Together))
    with pytest.raises(
        ValueError, match="Further is not known to step each tensor by itself"
    ):
        require_tensorwise(over_a_tensor(Further))
    with pytest.raises(
        ValueError, match="Together is not known to step each element by itself"
    ):
        require_elementwise(over_a_tensor(Together))


@pytest.mark.usefixtures("own_lists")
def test_only_what_is_listed_or_registered_is_accepted() -> None:
    """A name alone says nothing good, but something bad."""
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop):
        require_elementwise(over_a_tensor(kind))
        require_tensorwise(over_a_tensor(kind))
    require_tensorwise(over_a_tensor(torch.optim.Muon))
    for kind in (
        ClipsInside,
        Faked,
        Shampoo,
        torch.optim.Adafactor,
        torch.optim.LBFGS,
        torch.optim.Muon,
        Mine,
    ):
        with pytest.raises(
            ValueError,
            match=rf"optimizer_shard='world'.*{kind.__name__}.*optimizer_shard='shard'",
        ):
            require_elementwise(over_a_tensor(kind))
    with pytest.raises(
        ValueError,
        match=r"not known.* import register_elementwise; register_elementwise\(Mine\)$",
    ):
        require_elementwise(over_a_tensor(Mine))
    with pytest.raises(
        ValueError,
        match=r"not known.* import register_tensorwise; register_tensorwise\(Mine\)$",
    ):
        require_tensorwise(over_a_tensor(Mine))
    with pytest.raises(ValueError, match="LBFGS looks across all its parameters"):
        require_tensorwise(over_a_tensor(torch.optim.LBFGS))

    register_tensorwise(Mine)
    require_tensorwise(over_a_tensor(Mine))
    with pytest.raises(ValueError, match="not known"):
        require_elementwise(over_a_tensor(Mine))
    register_elementwise(Mine)
    require_elementwise(over_a_tensor(Mine))
    # A derived class may do something else.
    with pytest.raises(ValueError, match="not known"):
        require_elementwise(over_a_tensor(type("Derived", (Mine,), {})))


def test_what_is_known_to_look_further_is_not_registered() -> None:
    with pytest.raises(ValueError, match=r"MyShampoo.*look across a tensor"):
        register_elementwise(Shampoo)
    with pytest.raises(ValueError, match=r"LBFGS.*look across all parameters"):
        register_tensorwise(torch.optim.LBFGS)
