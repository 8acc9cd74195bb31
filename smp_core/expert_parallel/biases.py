"""Biases of routers that move by all ranks' choices (DeepSeek-V3, arXiv 2412.19437,
2.1.2).

A bias is added to an expert's score where experts are chosen and has no gradient: a
step raises it by a fixed rate where the expert got fewer tokens than the mean, and
lowers it where it got more.

Shape letters: E experts of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_core.expert_parallel.losses import Sums
from smp_core.plan import Plan
from smp_core.torch_facts import after_each_step, is_absent, lies_in

_BIAS, _COUNTS = "e_score_correction_bias", "_smp_choices_of_step"


class Biases:
    """Biases of routers that are updated once a step.

    Attributes:
        names: of the modules that hold them.
        rate: how far one moves in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rate: float,
        sums: Sums,
        device: torch.device,
    ) -> None:
        self.rate = rate
        self._sums = sums
        self._followed = False
        # The module with the bias, and that with the experts.
        self._pairs: list[tuple[Any, Any]] = []
        named = dict(model.named_modules())
        # All of the model, also of other stages: the start-up line counts them.
        self.names = tuple(
            name
            for name, module in named.items()
            if isinstance(_bias_of(module), torch.Tensor)
        )
        if not self.names:
            raise ValueError(
                f"router_bias_update_rate={rate}: no router of {plan.shapes.kind} has a bias ({_BIAS}); leave it out"
            )
        for name in self.names:
            # A step of 0.001 is lost in half precision.
            bias: Any = _bias_of(named[name])
            if bias.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"router_bias_update_rate={rate}: {name}.{_BIAS} is {bias.dtype}, in which small steps are lost; "
                    "keep it in float32 (module.float() of the router's bias), or leave the rate out"
                )
            experts = named[_experts_near(name, plan, bias.numel(), rate)]
            if any(map(is_absent, experts.parameters())):
                continue  # another pipeline stage counts its choices
            setattr(
                experts,
                _COUNTS,
                torch.zeros(bias.numel(), dtype=torch.int64, device=device),
            )
            experts.register_forward_pre_hook(_count, with_kwargs=True)
            self._pairs.append((named[name], experts))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update after each step of the first optimizer that is given; others step the
        same model in the same step."""
        if not self._followed:
            self._followed = True
            after_each_step(optimizer, self.update)

    @torch.no_grad()
    def update(self) -> None:
        """Move all biases by the choices since the last time. Collective."""
        if not self._pairs:
            return
        counts = [getattr(experts, _COUNTS) for _, experts in self._pairs]
        # One message for all layers; each rank then takes the same steps.
        everyones = torch.cat(counts)
        self._sums(everyones)
        parts = everyones.split([len(count) for count in counts])
        for (router, _), count_E in zip(self._pairs, parts, strict=True):
            bias = _bias_of(router)
            # Computed in whole numbers: exactly the sign of mean - count.
            direction_E = (count_E.sum() - count_E * len(count_E)).sign()
            bias.add_(direction_E.to(bias).view(bias.shape), alpha=self.rate)
        # The next step counts from zero.
        for count_E in counts:
            count_E.zero_()


def _bias_of(module: Any) -> Any:
    return getattr(module, _BIAS, None)


def _experts_near(name: str, plan: Plan, size: int, rate: float) -> str:
    """Return the experts that a bias is for: those in the smallest part of the model
    that holds both."""
    # From the router outwards, until experts are found.
    around = name
    while True:
        inside = [site for site in plan.shapes.experts if lies_in(site.name, around)]
        if inside:
            break
        if not around:
            raise ValueError(
                f"router_bias_update_rate={rate}: torch-smp knows no experts near {name}; leave it out"
            )
        around = around.rpartition(".")[0]
    if len(inside) > 1 or inside[0].experts != size:
        raise ValueError(
            f"router_bias_update_rate={rate}: {name} has a bias of {size} experts, and near it are "
            f"{', '.join(f'{site.name} ({site.experts})' for site in inside)}; leave it out"
        )
    return inside[0].name


def _count(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the choices of tokens that arrive. A recomputation counts again, in each
    micro-batch of a step alike, and only the sign of what is counted is used."""
    # An evaluation moves no biases.
    if not (experts.training and torch.is_grad_enabled()):
        return
    chosen = (*args, *kwargs.values())[1].reshape(-1)
    getattr(experts, _COUNTS).scatter_add_(0, chosen, torch.ones_like(chosen))
