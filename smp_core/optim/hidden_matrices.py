"""Which parameters of a model Muon steps: the matrices between its embeddings and its
head.

Embeddings and the head look up and choose rows, of which few are used in a step;
vectors and single numbers are no matrices; kernels of convolutions are not written as
matrices. All of them are AdamW's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from smp_core.optim.muon import Split

logger = logging.getLogger("smp")

_MOST_NAMES = 4
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def muon_groups(
    model: nn.Module,
    *,
    adamw: Mapping[str, Any] | None = None,
    by_adamw: Sequence[str] = (),
    split: Mapping[str, int | Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trainable parameters as groups for :class:`smp_core.optim.Muon`,
    and log which are whose.

    Args:
        adamw: AdamW's options, for what is no hidden matrix: ``{"lr": 3e-4, "betas":
            (0.9, 0.95)}``.
        by_adamw: globs of names of further parameters that AdamW is to step: tables
            that are no ``nn.Embedding``.
        split: matrices side by side in one: ``{"*.c_attn.weight": 3,
            "*.qkv_proj.weight": (4096, 1024, 1024), "*.q_proj.weight": 32}``: by globs
            of names, how many along the outputs, or their sizes.

    Raises:
        ValueError: a glob names no matrix, its parts do not fit, or two of them cut one
            matrix in different ways.
    """
    # Phase 1: what is a table or a head.
    tables = _tables(model)
    found: dict[tuple[str, Split | None], dict[str, nn.Parameter]] = {}
    unused = {*by_adamw, *(split or {})}
    # Phase 2: each trainable parameter once, to AdamW or Muon.
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # Each parameter once, under its first name.
            if not parameter.requires_grad or any(
                parameter is each for of in found.values() for each in of.values()
            ):
                continue
            left_out = [glob for glob in by_adamw if fnmatchcase(name, glob)]
            unused.difference_update(left_out)
            if left_out or id(parameter) in tables or not _is_matrix(module, parameter):
                found.setdefault(("adamw", None), {})[name] = parameter
                continue
            # Matrices, whole or in parts.
            globs = [glob for glob in split or {} if fnmatchcase(name, glob)]
            unused.difference_update(globs)
            if len({str((split or {})[glob]) for glob in globs}) > 1:
                raise ValueError(
                    f"muon_groups(split=...): {name} is named by {' and '.join(map(repr, globs))}, which cut it in "
                    "different ways; let one of them name it"
                )
            parts = (
                _split(name, module, parameter, (split or {})[globs[0]])
                if globs
                else None
            )
            found.setdefault(("muon", parts), {})[name] = parameter
    # Phase 3: a glob that names nothing is a mistake.
    if unused:
        raise ValueError(
            f"muon_groups: {', '.join(map(repr, sorted(unused)))} names no trainable parameter it could be of"
        )
    return [
        _group(algorithm, parts, named, adamw or {})
        for (algorithm, parts), named in found.items()
    ]


def _group(
    algorithm: str,
    parts: Split | None,
    named: Mapping[str, nn.Parameter],
    adamw: Mapping[str, Any],
) -> dict[str, Any]:
    names = list(named)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    sizes = "" if parts is None else f", as {len(parts[1])} matrices each"
    total = sum(parameter.numel() for parameter in named.values())
    text = ", ".join(names[:_MOST_NAMES]) + more
    logger.info(
        "by %s: %d parameters of %s elements%s: %s",
        algorithm,
        len(names),
        f"{total:,}",
        sizes,
        text,
    )
    options: Mapping[str, Any] = adamw if algorithm == "adamw" else {"split": parts}
    return {"params": list(named.values()), "algorithm": algorithm, **options}


def _tables(model: nn.Module) -> set[int]:
    """Return ids of the weights of embeddings, and of heads: what Transformers' model
    says, or whose outputs are as many as the largest embedding has rows. (A layer may
    be as wide as a table of positions is long.)"""
    embeddings = [
        module for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    # The largest embedding is the vocabulary's.
    words = max((module.num_embeddings for module in embeddings), default=0)
    heads: list[nn.Module] = []
    for module in model.modules():
        head_of: Any = getattr(module, "get_output_embeddings", None)
        said = head_of() if callable(head_of) else None
        # Several of them, for codebooks.
        heads += said.modules() if isinstance(said, nn.Module) else ()
        if isinstance(module, nn.Linear) and module.out_features == words:
            heads.append(module)
    weights = [getattr(module, "weight", None) for module in (*embeddings, *heads)]
    return {id(weight) for weight in weights if weight is not None}


def _is_matrix(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix, or a stack of them as fused experts
    are."""
    is_stack = parameter.ndim == 3 and parameter.shape[0] > 1
    return (
        not isinstance(module, _CONVOLUTIONS)
        and parameter.is_floating_point()
        and min(parameter.shape, default=0) > 0
        and (parameter.ndim == 2 or is_stack)
    )


def _split(
    name: str, module: nn.Module, parameter: nn.Parameter, parts: int | Sequence[int]
) -> Split:
    # Transformers' Conv1D has its outputs in columns.
    dim = 1 if type(module).__name__ == "Conv1D" else 0
    length = parameter.shape[dim]
    # A number means equal parts.
    if isinstance(parts, int):
        parts = (
            [length // parts] * parts if parts > 0 and length % parts == 0 else [parts]
        )
    if parameter.ndim != 2 or sum(parts) != length:
        raise ValueError(
            f"muon_groups(split=...): {name} has {length} outputs, which {parts} do not make up"
        )
    return dim, tuple(parts)
