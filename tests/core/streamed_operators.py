"""Operators as an accelerator sees them: which ask the host, what they write, whose
line called them."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree  # the public one comes with optree

# Operators whose result the host has to know, or whose result's size: it waits for the
# device.
_ASKING = (
    *(
        "aten._local_scalar_dense.",
        "aten.is_nonzero.",
        "aten.equal.",
        "aten.nonzero",
        "aten.masked_select",
    ),
    *(
        "aten.bincount",
        "aten._unique2",
        "aten.unique_dim",
        "aten.unique_consecutive",
        "aten.repeat_interleave.Tensor",
    ),
)
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put")
# Files whose lines are worth naming.
_OURS = ("/smp_core/", "/_fully_shard/", "/amp/grad_scaler.py")


def counts(leaf: Any) -> bool:
    if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.is_meta:
        return False
    return leaf.numel() > 0 and leaf.untyped_storage().nbytes() > 0


def asks(name: str, given: list[torch.Tensor]) -> bool:
    """Whether an operator makes the host wait; places of a mask that is an index are
    counted first."""
    masks = name.startswith(_INDEXING) and any(
        each.dtype in (torch.bool, torch.uint8) for each in given[1:]
    )
    return masks or name.startswith(_ASKING)


def written_by(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    by_name = [
        (argument, kwargs[argument.name])
        for argument in func._schema.arguments
        if argument.name in kwargs
    ]
    given = [*zip(func._schema.arguments, args, strict=False), *by_name]
    found = [
        value
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if name.startswith("c10d."):
        found.append(args[0])
    if name.startswith("fsdp.all_gather_copy_in"):
        found.append(args[1])
    return pytree.tree_leaves(found)


def is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """What a collective was given as ``async_op``; trailing arguments that have their
    default are left out."""
    given = (
        dict(
            zip(
                (argument.name for argument in func._schema.arguments),
                args,
                strict=False,
            )
        )
        | kwargs
    )
    defaults = {
        argument.name: argument.default_value for argument in func._schema.arguments
    }
    return bool(given.get("async_op", defaults.get("async_op")))


def group_given(argument: Any) -> str | None:
    try:
        return str(dist.ProcessGroup.unbox(argument).group_name)
    except (RuntimeError, TypeError):
        return None


def place() -> str:
    """The nearest lines of ours, of FSDP2 and of torch's loss scaling, innermost
    first."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        file = frame.f_code.co_filename
        if any(part in file for part in _OURS):
            lines.append(
                f"{file.rsplit('/', 1)[-1]}:{frame.f_code.co_name}:{frame.f_lineno}"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)
