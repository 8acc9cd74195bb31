"""Which optimizers may step parts of tensors, or some tensors without the others.

``optimizer_shard="world"`` steps a part of every tensor on each rank, and a pipeline stage steps its own tensors only.
Whether that gives one process's numbers cannot be found out by trying a few steps: some optimizers begin to look
further only later. So there are lists, a user adds to them with :func:`register_elementwise` and
:func:`register_tensorwise`, and all others are refused. A class counts as itself only: one that is derived from it may
do something else.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from smp_core.optim import Adafactor, AdamW8bit, Muon

K = TypeVar("K", bound=type[torch.optim.Optimizer])

TORCHS_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
    )
)
"""torch's optimizers that step each element by itself, and sharded parameters like unsharded ones."""

STEP_SHARDS: frozenset[type[torch.optim.Optimizer]] = TORCHS_ELEMENTWISE | {AdamW8bit}
"""Optimizers that step each sharded parameter like an unsharded one, by itself: without a trial, in any portions."""

# Of other packages, by name, which are not imported for it.
_ELEMENTWISE = frozenset(
    (
        "torch.optim.rprop.Rprop",
        "lion_pytorch.lion_pytorch.Lion",
        "adan_pytorch.adan.Adan",
        "schedulefree.adamw_schedulefree.AdamWScheduleFree",
        "schedulefree.radam_schedulefree.RAdamScheduleFree",
        "schedulefree.sgd_schedulefree.SGDScheduleFree",
    )
)
_TENSORWISE = (torch.optim.Muon, torch.optim.Adafactor, Muon, AdamW8bit, Adafactor)
# Beginnings and ends of names, in small letters, of kinds that look across a tensor, and across all tensors.
_ACROSS_TENSORS = ("dadapt", "kfac", "lbfgs", "mechanic", "prodigy")
_ACROSS = (
    *_ACROSS_TENSORS,
    *("adafactor", "came", "galore", "kron", "lamb", "lars", "muon", "sara", "shampoo", "soap"),
)
_TORCHAO = "torchao"

_registered_elementwise: set[type[torch.optim.Optimizer]] = set()
_registered_tensorwise: set[type[torch.optim.Optimizer]] = set()


def register_elementwise(kind: K) -> K:
    """Register a class of optimizers that step each element by itself: what becomes of an element follows from its own
    value, gradients and states, and from numbers that are the same for all (rates, the number of steps).

    Args:
        kind: the class; derived ones are registered by themselves. Returned, so that this can be a decorator.

    Raises:
        ValueError: the name is of a kind that is known to look across a tensor.
    """
    if _is_named(kind, _ACROSS):
        raise ValueError(f"register_elementwise({kind.__name__}): optimizers of this name look across a tensor")
    _registered_elementwise.add(kind)
    return kind


def register_tensorwise(kind: K) -> K:
    """Register a class of optimizers that step each tensor by itself: pipeline stages may have it. Whether it can step
    shards is tried all the same; for whole matrices see :mod:`smp_core.optim.owners`.

    Args:
        kind: as of :func:`register_elementwise`.

    Raises:
        ValueError: the name is of a kind that is known to look across all its parameters.
    """
    if _is_named(kind, _ACROSS_TENSORS):
        raise ValueError(f"register_tensorwise({kind.__name__}): optimizers of this name look across all parameters")
    _registered_tensorwise.add(kind)
    return kind


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is not known to step each element by itself.

    Raises:
        ValueError: with the line that registers it.
    """
    kind = type(optimizer)
    if not _steps_elements(kind):
        gives = "optimizer_shard='world' gives each rank a part of every tensor"
        instead = "write optimizer_shard='shard', or use an elementwise optimizer such as AdamW"
        looks_across = "a tensor" if _is_named(kind, _ACROSS) else ""
        if issubclass(kind, AdamW8bit):
            looks_across = "blocks of a row, whose elements share a scale"
        raise _refusal(kind, "element", looks_across, gives, instead)


def require_tensorwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is not known to step each tensor by itself.

    Raises:
        ValueError: with the line that registers it.
    """
    kind = type(optimizer)
    if not (_steps_elements(kind) or kind in _TENSORWISE or kind in _registered_tensorwise):
        steps = "with pipeline_parallel_degree the optimizer steps a stage's parameters alone"
        instead = "use one that looks at one tensor at a time, such as AdamW"
        looks_across = "all its parameters" if _is_named(kind, _ACROSS_TENSORS) else ""
        raise _refusal(kind, "tensor", looks_across, steps, instead)


def refuse_unsaveable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose states checkpoints cannot hold.

    Raises:
        ValueError: it is one of torchao's, whose states are tensors of kinds of their own.
    """
    kind = type(optimizer)
    if any(base.__module__.split(".")[0] == _TORCHAO for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} is torchao's, whose states are tensors of a kind of its own that checkpoints cannot hold "
            "and that differ from degree to degree; write smp_core.optim.AdamW8bit for states of 8 bits, or "
            "torch.optim.AdamW, with optimizer_shard='world' or state_offload='optimizer' for less memory"
        )


def _steps_elements(kind: type[torch.optim.Optimizer]) -> bool:
    full_name = f"{kind.__module__}.{kind.__qualname__}"
    return kind in TORCHS_ELEMENTWISE or kind in _registered_elementwise or full_name in _ELEMENTWISE


def _is_named(kind: type, names: tuple[str, ...]) -> bool:
    classes = [base.__name__.lower() for base in kind.__mro__]
    return any(name.startswith(names) or name.endswith(names) for name in classes)


def _refusal(kind: type, part: str, looks_across: str, why: str, instead: str) -> ValueError:
    """Make the error for an optimizer that looks further than at one part; "": for one of which that is not known."""
    if looks_across:
        return ValueError(f"{why}, but {kind.__name__} looks across {looks_across}; {instead}")
    register = f"register_{part}wise"
    return ValueError(
        f"{why}, but {kind.__name__} is not known to step each {part} by itself; {instead}. If it does, register it "
        f"before training: from smp_core.sharding.optimizer import {register}; {register}({kind.__name__})"
    )
