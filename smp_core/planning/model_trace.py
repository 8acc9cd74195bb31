"""ModelTrace: what a model's blocks and the rest of it compute, move and keep, for any number of samples and tokens.
Measured by :mod:`smp_core.planning.trace`, which says what is counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from smp_core.planning.shapes import Shapes


@dataclass(frozen=True)
class Figures:
    """What was counted of one micro-batch: FLOPs and bytes as the module says.

    Attributes:
        full_attention: FLOPs of attention in forward with those above the diagonal, by the convention of MFU.
        keys: bytes of keys and values that forward's attention reads.
        kept: the highest bytes until backward reaches the last block.
        working: the highest bytes after that.
    """

    forward_products: float = 0.0
    forward_attention: float = 0.0
    forward_moved: float = 0.0
    backward_products: float = 0.0
    backward_attention: float = 0.0
    backward_moved: float = 0.0
    full_attention: float = 0.0
    keys: float = 0.0
    kept: float = 0.0
    working: float = 0.0

    def combined(self, other: Figures, weigh: Callable[[float, float], float]) -> Figures:
        names = [field.name for field in fields(self)]
        return Figures(**{name: weigh(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True)
class Curve:
    """Figures at any number of samples and tokens, through those at (1, s), (2, s) and (1, s / 2)."""

    tokens: int
    one: Figures
    two: Figures
    half: Figures

    def at(self, samples: int, tokens: float) -> Figures:
        """Return the figures of ``samples`` sequences of ``tokens`` tokens each."""
        return _at(self, samples, tokens)


@functools.lru_cache(maxsize=4096)
def _at(curve: Curve, samples: int, tokens: float) -> Figures:
    s = curve.tokens

    def value(name: str) -> float:
        one, two, half = (getattr(figures, name) for figures in (curve.one, curve.two, curve.half))
        of_sample = two - one  # b s (c + d s) at b = 1
        shared = (one - of_sample) / s  # a
        of_half = half - shared * s / 2
        square = 2 * (of_sample - 2 * of_half) / (s * s)  # d
        linear = of_sample / s - square * s  # c
        return max(tokens * (shared + samples * (linear + square * tokens)), 0.0)

    return Figures(**{field.name: value(field.name) for field in fields(Figures)})


@dataclass(frozen=True)
class ModelTrace:
    """A model as the planner sees it.

    Attributes:
        shapes: by recomputation mode; trainable parameters in float32, as mixed precision keeps them.
        blocks: how many.
        block, rest: curves of one block, and of all else, by recomputation mode.
        block_parameters: elements of all blocks together.
        heads: what tensor and context degrees have to divide: the heads of keys; 0: the model is not split over such
            ranks by itself.
        vocabulary: rows of the largest parameter outside blocks.
    """

    shapes: Mapping[str, Shapes]
    blocks: int
    block: Mapping[str, Curve]
    rest: Mapping[str, Curve]
    block_parameters: int
    heads: int = 0
    vocabulary: int = 1

    def rest_degree(self, tensor: int) -> int:
        """Return over how many tensor ranks embedding, head and logits are split: all, or they are replicated."""
        return tensor if self.vocabulary % tensor == 0 else 1

    def of_precision(self, mode: str, precision: str) -> Shapes:
        """Return the shapes with parameters as they are stored: in float32 ("mixed"), or in "bfloat16"."""
        found = self.shapes[mode]
        return found if precision == "mixed" else in_dtype(found, torch.bfloat16)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.elements for parameter in self.shapes["none"].parameters)


def in_dtype(shapes: Shapes, dtype: torch.dtype) -> Shapes:
    """Return the shapes with floating-point parameters in another dtype than the one that they compute in."""
    cast = [replace(each, dtype=dtype) if each.dtype.is_floating_point else each for each in shapes.parameters]
    return replace(shapes, parameters=tuple(cast), checkpoints_itself=False)
