"""The modules that are checkpointed, and the mode of each.

A mode by itself is for the wrapped blocks of the model. ``{glob: mode}`` is for any
modules: the model is walked from the root down, the first pattern (a class name, or a
glob over module names) that matches a module decides about it and about everything
inside of it, so nothing is ever checkpointed twice.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from smp_core.config import did_you_mean
from smp_core.torch_facts import uncompiled

Mode = Literal["full", "selective"]


@dataclass(frozen=True)
class CheckpointedModule:
    """A module by its name in the model, and what is kept of its activations: its
    inputs ("full"), or also the outputs of the operations in
    :mod:`smp_core.activations.selective` ("selective")."""

    name: str
    mode: Mode


def checkpoints_itself(model: nn.Module) -> bool:
    """Return whether the model's own checkpointing (``gradient_checkpointing`` of
    Transformers) is on in any module."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True
        for module in model.modules()
    )


def plan_checkpointing(
    model: nn.Module, blocks: Sequence[str], setting: str | Mapping[str, str]
) -> list[CheckpointedModule]:
    """Return the modules to be checkpointed, in the model's order.

    Args:
        blocks: names of the model's wrapped blocks
            (:attr:`smp_core.plan.units.WrapPlan.blocks`).
        setting: ``activations.checkpoint``.

    Raises:
        ValueError: the model has no blocks, or a pattern matches nothing that another
            one does not have already.
    """
    if isinstance(setting, str):
        if setting == "none":
            return []
        if not blocks:
            raise ValueError(
                f"activations.checkpoint={setting!r}: {type(model).__name__} has no repeated blocks to checkpoint; "
                'name the classes in units=["MyBlock"], or the modules in activations={"checkpoint": {"layers.*": '
                '"full"}}'
            )
        return _of_group(blocks, setting)
    # By pattern, and then in the order in which the model lists its modules.
    groups = _claimed(model, setting)
    chosen = [
        each
        for pattern, members in groups.items()
        for each in _of_group(members, setting[pattern])
    ]
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(chosen, key=lambda each: order[each.name])


def _of_group(members: Sequence[str], setting: str) -> list[CheckpointedModule]:
    if setting == "none":
        return []
    # "every:2" is full recomputation of every second one.
    every = int(setting.removeprefix("every:")) if setting.startswith("every:") else 1
    mode: Mode = "selective" if setting == "selective" else "full"
    return [CheckpointedModule(name, mode) for name in members[::every]]


def _claimed(model: nn.Module, setting: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {pattern: [] for pattern in setting}

    # What a pattern has claimed is not looked into.
    def visit(name: str, module: nn.Module) -> None:
        if name:
            for pattern in setting:
                if _matches(pattern, name, module):
                    groups[pattern].append(name)
                    return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    # A pattern without modules: they lie inside of others, or there are none.
    for pattern, members in groups.items():
        if members:
            continue
        elsewhere = [
            name
            for name, module in model.named_modules()
            if name and _matches(pattern, name, module)
        ]
        if elsewhere:
            raise ValueError(
                f"activations.checkpoint[{pattern!r}]: {elsewhere[0]} and all else that it matches lie inside "
                "modules that other patterns match; the first pattern that matches the outermost module decides"
            )
        names = {type(module).__name__ for module in model.modules()}
        names |= {name for name, _ in model.named_modules() if name}
        raise ValueError(
            f"activations.checkpoint[{pattern!r}] matches no class name and no module name of "
            f"{type(model).__name__}{did_you_mean(pattern, sorted(names))}"
        )
    return groups


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return type(uncompiled(module)).__name__ == pattern or fnmatch.fnmatchcase(
        name, pattern
    )
