"""``float(p.norm())``, ``p.mean().item()`` and ``if p.isnan().any():`` are numbers of whole tensors.

torch's ``DTensor.item()`` gives this rank's part of a result that is not added up yet. Here it adds up first, over the
ranks that hold the parameter together, as every other operation on such a result does; so they all have to ask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from smp_core.torch_facts import ABSENT, is_absent


@functools.cache
def reduce_scalars() -> None:
    """Make ``item()`` of a DTensor collective over its mesh, wherever its ranks hold parts, and with it what calls it
    (``float``, ``bool``, ``int``, ``tolist``)."""
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _item)


def _item(kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None) -> Any:
    if is_absent(args[0]):
        raise RuntimeError(ABSENT % list(args[0].shape))
    return function(args[0].full_tensor())
