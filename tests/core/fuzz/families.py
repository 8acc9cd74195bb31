"""How the small models of random runs are built, wrapped and called: by family.

A new family: a class in `tests.core.fuzz.models`, and a line in `FAMILIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from smp_core.plan.units import Entry
from tests.core.fuzz.models import (
    Adapters,
    Adversaries,
    Attention,
    Cells,
    Conv,
    Experts,
    Gpt,
    Mlp,
    Odd,
    Recurrent,
    Shared,
    Stepping,
    Ways,
)


def one_path(rng: random.Random, methods: bool) -> str:
    return ""


@dataclass(frozen=True)
class Family:
    """How a model is built, wrapped, called and cut into patterns (parts of parameter
    names).

    Args:
        classes: class names for ``units``; of its blocks.
        globs: over module names, for ``units`` and ``activations.checkpoint``.
        patterns: what is frozen, edited, or put into parameter groups.
        paths: draws a path; (generator, whether it may use methods that
            ``forward_methods`` names).
        differs: whether replicas may take other paths.
        other_ways: draws a path through the same units, which may differ inside a
            partition group.
        branches: globs over the modules that paths leave out, for ``units.optional``.
        methods: for ``forward_methods``.
        entries: what a step calls; ``"apart"``: each child is parallelized by itself.
        parts: beginnings of parameter names, each with an optimizer of its own.
    """

    build: Callable[[], nn.Module]
    classes: tuple[str, ...]
    globs: tuple[str, ...]
    patterns: tuple[str, ...]
    paths: Callable[[random.Random, bool], str] = one_path
    differs: bool = False
    other_ways: Callable[[random.Random, str], str] | None = None
    branches: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    entries: tuple[Entry | str, ...] = ("forward",)
    parts: tuple[str, ...] = ("",)

    def frozen_to_begin_with(self) -> set[str]:
        return {
            name
            for name, parameter in self.on_meta().named_parameters()
            if not parameter.requires_grad
        }

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.build().double()


def cell_path(rng: random.Random, methods: bool) -> str:
    """All cells or some, in order, seldom one of them twice, each by its ways."""
    cells = [cell for cell in range(3) if rng.random() < 0.8]
    if cells and rng.random() < 0.15:
        cells.append(rng.choice(cells))
    return " ".join(
        f"{cell}{rng.choice(['lr', 'lr', 'l', 'r', *(['e'] if methods else [])])}"
        for cell in cells
    )


def other_ways(rng: random.Random, path: str) -> str:
    return " ".join(f"{step[0]}{rng.choice(['lr', 'l', 'r'])}" for step in path.split())


def expert_path(rng: random.Random, methods: bool) -> str:
    return " ".join(name for name in "abc" if rng.random() < 0.6)


def some_of(steps: str) -> Callable[[random.Random, bool], str]:
    """Draws most of the steps, in order."""

    def path(rng: random.Random, methods: bool) -> str:
        return " ".join(step for step in steps if rng.random() < 0.75)

    return path


def way_path(rng: random.Random, methods: bool) -> str:
    """Some branches, in any order."""
    return " ".join(rng.sample("lra", rng.randint(0, 3)))


def turn(rng: random.Random, methods: bool) -> str:
    return rng.choice(["d", "g"])


FAMILIES: dict[str, Family] = {
    "mlp": Family(Mlp, ("Sequential",), ("enter*",), ("enter.0", "enter.4", "bias")),
    "cells": Family(
        Cells,
        ("Cell",),
        ("cells.*",),
        ("cells.1", "left", "right", "enter", "gain", "shift", "bias"),
        cell_path,
        True,
        other_ways,
        branches=("cells",),
        methods=("cells.0.encode", "cells.1.encode", "cells.2.encode"),
    ),
    "attention": Family(
        Attention,
        ("TransformerEncoderLayer",),
        ("layers.?",),
        ("layers.0", "in_proj", "norm", "bias"),
        some_of("01"),
        True,
        branches=("layers.?",),
    ),
    "gpt": Family(
        Gpt,
        ("GptBlock",),
        ("blocks.*",),
        ("blocks.1", "norm", "up.weight", "places", "qkv"),
        some_of("012"),
        True,
        branches=("blocks",),
    ),
    "recurrent": Family(Recurrent, ("GRU",), ("second",), ("enter", "second", "bias")),
    "conv": Family(
        Conv, ("Residual",), ("wide.*", "narrow.?"), ("wide", "body.0", "norm", "down")
    ),
    "odd": Family(
        Odd,
        ("OddBlock",),
        ("blocks.*",),
        ("nothing", "row", "columns", "gate", "gain", "directions"),
        some_of("01"),
        True,
        branches=("OddBlock",),
    ),
    "shared": Family(
        Shared,
        ("Half", "Pair"),
        ("encoder", "layers.*"),
        ("embedding", "own", "pair", "up.weight"),
        some_of("ed012"),
        True,
        branches=("encoder", "decoder", "layers.*"),
    ),
    "experts": Family(
        Experts,
        ("Sequential", "Pair"),
        ("experts.*",),
        ("experts.a", "gate", "bias"),
        expert_path,
        True,
        branches=("experts",),
    ),
    "adapters": Family(
        Adapters,
        ("Adapted", "Pair"),
        ("blocks.*", "frozen.*"),
        ("base", "down", "frozen.1", "enter"),
        some_of("0123"),
        True,
        branches=("blocks", "frozen"),
    ),
    "ways": Family(
        Ways,
        ("Linear",),
        ("left", "right"),
        ("bias", "common", "left", "own", "adapted", "base"),
        way_path,
        True,
        branches=("left", "right", "adapted"),
        entries=("forward", "steps", "children"),
    ),
    "stepping": Family(
        Stepping,
        ("Pair",),
        ("first.*",),
        ("first", "shift", "gate", "bias"),
        entries=("steps", "children"),
    ),
    "adversaries": Family(
        Adversaries,
        ("Pair",),
        ("generator.*",),
        ("generator", "critic.0", "bias"),
        turn,
        entries=("children", "apart"),
        parts=("generator", "critic"),
    ),
}


WITH_ADAPTERS = ("adapters", "ways")


def matching(
    model: nn.Module, patterns: Sequence[str] | str
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with one of the patterns in their names, without ``leave``."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for name, parameter in model.named_parameters():
        if any(pattern in name for pattern in patterns) and not name.startswith(
            "leave."
        ):
            yield name, parameter
