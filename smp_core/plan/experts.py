"""Which modules of a model hold experts that whole ranks can hold, and which models
compute an auxiliary loss of their routers: found without their names.

Transformers marks its fused experts (``use_experts_implementation``): modules with
``num_experts`` whose own parameters have one row for each expert. A model of one's own
marks its modules as an :class:`ExpertSite`.

Transformers has no public name for losses: ``load_balancing_loss_func`` is the function
in a model's module, and ``_can_record_outputs`` says which modules' outputs are the
``router_logits`` that it takes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

# Transformers' mark. It has no public name; the class decorator leaves nothing else
# that other modules do not have.
_MARK = "_is_expert_parallel"

DEALT = "ep"
"""The axis of Transformers' meshes over which its own expert parallelism deals whole
experts."""

DROPPED = "_smp_dropped_choices"
"""Where experts with a capacity count, on their device, since the last report: choices
left out, and all of them."""

_OTHER_LAYOUTS = (
    "DbrxExperts",
    "Llama4TextExperts",
    "LongcatFlashExperts",
    "Step3p7Experts",
    "JetMoeParallelExperts",
    "NllbMoeExperts",
    "SwitchTransformersExperts",
)
"""Experts of Transformers without the mark: a module for each, routers inside, or
weights that multiply inputs."""


class ExpertSite(Protocol):
    """A module of one's own with the experts of one layer, which ranks may divide.

    Every parameter of it has ``num_experts`` rows. Its forward takes tokens ``[T, H]``,
    the experts of each ``[T, K]`` (int64) and their weights ``[T, K]``, and returns
    ``[T, H]``: the sum of the experts' outputs, each times its weight. It has to work
    with any number of tokens and with fewer experts, and to know ``num_experts`` by
    that name.
    """

    smp_experts: ClassVar[bool] = True
    num_experts: int

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer.

    Attributes:
        name: of the module that holds them.
        kind: its class.
        experts: how many.
        problem: why ranks cannot divide them, in words; "" if they can.
    """

    name: str
    kind: str
    experts: int
    problem: str = ""


def experts_of(model: nn.Module) -> tuple[ExpertShape, ...]:
    """Return all modules with experts, in the model's order, also those that ranks
    cannot divide."""
    found = []
    # By mark, and not by class: new models of Transformers come with it.
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _OTHER_LAYOUTS and not hasattr(module, _MARK):
            found.append(
                ExpertShape(
                    name,
                    kind,
                    0,
                    f"{kind} is not of one tensor for all experts of a layer",
                )
            )
        elif getattr(module, "smp_experts", False) or (
            hasattr(module, _MARK) and hasattr(module, "num_experts")
        ):
            problem = _problem(module) or _problem_of_adapters(
                kind, adapters_of(model, name)
            )
            found.append(ExpertShape(name, kind, _count(module), problem))
    return tuple(found)


def adapters_of(model: nn.Module, name: str) -> list[Any]:
    """Return the modules that PEFT put around the experts of this name, the innermost
    first."""
    # PEFT puts its layers around the experts, which then are called `base_layer`.
    found = []
    while name.rpartition(".")[2] == "base_layer":
        name = name.rpartition(".")[0]
        found.append(model.get_submodule(name))
    return found


def _problem_of_adapters(kind: str, adapters: list[Any]) -> str:
    """Return why these adapters cannot stay beside experts that ranks divide; "" if
    they can."""
    for adapter in adapters:
        if not hasattr(adapter, "get_delta_factors"):
            return f"{type(adapter).__name__} around {kind} is not PEFT's LoRA of a parameter (target_parameters)"
        if adapter.merged:
            return f"adapters of {kind} are merged into its weights (call unmerge_adapter() first)"
    return ""


def _count(module: Any) -> int:
    """Return the experts of the layer: of all ranks, also where Transformers' own
    expert parallelism left a rank its part, of which ``num_experts`` is."""
    # Rows of parameters tell of all experts, where the attribute tells of this rank's.
    was_dealt = getattr(module, _MARK, False)
    rows = (
        next((each.shape[0] for each in module.parameters(recurse=False)), 0)
        if was_dealt
        else 0
    )
    return rows or module.num_experts


def _problem(module: Any) -> str:
    own = dict(module.named_parameters(recurse=False))
    # The mark of a split, and parameters that have this rank's experts only.
    if getattr(module, _MARK, False) and _count(module) == module.num_experts:
        return f"{type(module).__name__} was split by Transformers' own expert parallelism, into plain tensors"
    if not own:
        return f"{type(module).__name__} has no parameters of its own (adapters on experts replace them)"
    # Dealing cuts along dimension 0, one row for each expert.
    for name, parameter in module.named_parameters():
        if (
            name not in own
            or parameter.ndim == 0
            or parameter.shape[0] != _count(module)
        ):
            shape = tuple(parameter.shape)
            return f"{name} {shape} of {type(module).__name__} does not have one row for each of its experts"
    return ""


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
        """Return the modules whose outputs it reads, each with the place of the logits
        among its outputs."""
        found = []
        # Each Transformers model inside says which modules' outputs are recorded as
        # logits.
        for holder in self.model.modules():
            recorded: Any = (getattr(holder, "_can_record_outputs", None) or {}).get(
                "router_logits"
            )
            if hasattr(recorded, "target_class"):
                inside = [
                    each
                    for each in holder.modules()
                    if isinstance(each, recorded.target_class)
                ]
                found += [(each, recorded.index) for each in inside]
        return list(dict.fromkeys(found))

    def _size(self, name: str) -> int | None:
        # On the model itself, or in the configuration of its text part.
        for holder in (self.model, self.model.config.get_text_config()):
            if isinstance(getattr(holder, name, None), int):
                return int(getattr(holder, name))
        return None


def router_losses(model: nn.Module) -> list[RouterLoss]:
    """Return the auxiliary losses in a model, also those that are off."""
    found = []
    # By the global name that the forward's code looks up: it is the one to exchange.
    for module in model.modules():
        # A class in TorchScript has none.
        forward: Any = inspect.unwrap(getattr(type(module), "forward", None))  # type: ignore[arg-type]
        names = getattr(forward, "__globals__", {})
        if LOSS in names and LOSS in forward.__code__.co_names:
            is_on = bool(
                getattr(getattr(module, "config", None), "output_router_logits", False)
            )
            is_known = list(inspect.signature(names[LOSS]).parameters) == _PARAMETERS
            found.append(RouterLoss(module, names, is_on, is_known))
    return found


def loss_over_stages(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that pipeline stages can compute together: the only one
    that is on, of the known form and with routers that are found."""
    losses = [loss for loss in router_losses(model) if loss.is_on]
    if len(losses) != 1 or not losses[0].is_known:
        return None
    return (
        losses[0]
        if losses[0].routers() and losses[0].experts and losses[0].top_k
        else None
    )


@contextlib.contextmanager
def without_router_loss(model: nn.Module) -> Iterator[None]:
    """Switch off inside what :func:`loss_over_stages` finds: what goes through blocks
    is seen without it."""
    loss = loss_over_stages(model)
    if loss is None:
        yield
        return
    loss.model.config.output_router_logits = False
    try:
        yield
    finally:
        loss.model.config.output_router_logits = True
