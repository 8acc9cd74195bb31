"""Auxiliary losses of routers in Transformers' models: which models compute one, and what it reads.

Transformers has no public name for either: ``load_balancing_loss_func`` is the function in a model's module, and
``_can_record_outputs`` says which modules' outputs are the ``router_logits`` that it takes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

LOSS = "load_balancing_loss_func"

_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterLoss:
    """The auxiliary loss of one model.

    Attributes:
        model: whose forward computes it.
        names: where that forward finds the function, under :data:`LOSS`.
        is_on: whether the model's configuration asks for it.
        is_known: whether it is ``E * sum_e f_e P_e``, as most models have it.
    """

    model: Any
    names: dict[str, Any]
    is_on: bool
    is_known: bool

    @property
    def experts(self) -> int | None:
        """Experts of a layer."""
        return self._size("num_experts")

    @property
    def top_k(self) -> int | None:
        """Experts of a token."""
        return self._size("num_experts_per_tok")

    def routers(self) -> list[tuple[nn.Module, int]]:
        """Return the modules whose outputs it reads, each with the place of the logits among its outputs."""
        found = []
        for holder in self.model.modules():
            recorded: Any = (getattr(holder, "_can_record_outputs", None) or {}).get("router_logits")
            if hasattr(recorded, "target_class"):
                inside = [each for each in holder.modules() if isinstance(each, recorded.target_class)]
                found += [(each, recorded.index) for each in inside]
        return list(dict.fromkeys(found))

    def _size(self, name: str) -> int | None:
        for holder in (self.model, self.model.config.get_text_config()):
            if isinstance(getattr(holder, name, None), int):
                return int(getattr(holder, name))
        return None


def router_losses(model: nn.Module) -> list[RouterLoss]:
    """Return the auxiliary losses in a model, also those that are off."""
    found = []
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        names = getattr(forward, "__globals__", {})
        if LOSS in names and LOSS in forward.__code__.co_names:
            is_on = bool(getattr(getattr(module, "config", None), "output_router_logits", False))
            is_known = list(inspect.signature(names[LOSS]).parameters) == _PARAMETERS
            found.append(RouterLoss(module, names, is_on, is_known))
    return found


def loss_over_stages(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that pipeline stages can compute together: the only one that is on, of the known form
    and with routers that are found."""
    losses = [loss for loss in router_losses(model) if loss.is_on]
    if len(losses) != 1 or not losses[0].is_known:
        return None
    return losses[0] if losses[0].routers() and losses[0].experts and losses[0].top_k else None


@contextlib.contextmanager
def without_router_loss(model: nn.Module) -> Iterator[None]:
    """Switch off inside what :func:`loss_over_stages` finds: what goes through blocks is seen without it."""
    loss = loss_over_stages(model)
    if loss is None:
        yield
        return
    loss.model.config.output_router_logits = False
    try:
        yield
    finally:
        loss.model.config.output_router_logits = True
