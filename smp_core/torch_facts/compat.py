"""Differences between versions of torch (>= 2.11) and of Transformers' models, in one
place; and what torch has no public way to ask.

Private names: operators over symmetric memory stand in a private module
(``_symmetric_memory``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TESTED_TORCH = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""The releases that the tests ran on (docs/versions.md)."""

# torch 2.13 renamed these two and warns at the old names.
_HAS_NEW_NAMES = hasattr(dist, "all_gather_single")
all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# Knob -> method of FSDP2's modules that not every version has (the first two: 2.13).
FSDP_METHODS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "symmetric_memory": "set_symm_mem_for_comm",
}

# What Transformers' blocks (and their like) call the cache that they append keys and
# values to. Since 5.24 they call it "cache", which may be anything in other models.
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_NEW_CACHE = "cache"


def seed_generators(number: int) -> None:
    """Seed the generators of the CPU and of the accelerator, where there is one.

    ``torch.manual_seed`` would do, but formats the stack that it is called from once
    for each kind of device that has not been started, which takes milliseconds.
    """
    torch.default_generator.manual_seed(number)
    if torch.accelerator.is_available():
        device: Any = torch.get_device_module()
        # Of Apple's there is one.
        getattr(device, "manual_seed_all", device.manual_seed)(number)


def caches_in(named: Mapping[str, Any]) -> list[str]:
    """List the names in a call's keywords, or in a model's output, under which there
    are caches of keys and values."""
    found = [name for name in named if name in _CACHES and named[name] is not None]
    # The name alone would be a guess in other models.
    if _NEW_CACHE in list(named) and hasattr(named[_NEW_CACHE], "get_seq_length"):
        found.append(_NEW_CACHE)
    return found


def without_caches(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with None for caches, to which a second run would
    append once more. Those of GPT-2 come by position."""
    plain = tuple(None if hasattr(arg, "get_seq_length") else arg for arg in args)
    return plain, {**kwargs, **dict.fromkeys(caches_in(kwargs))}


class TrialGenerator(torch.Generator):
    """The random numbers of a trial: they stay random inside of another trial, which
    makes constants of what a model draws."""


def transformers_models(model: nn.Module) -> list[Any]:
    """List every Transformers model in ``model``, outer ones first."""
    # The class is in a file that Transformers, which torchmetrics imports too, reads
    # late: importing it takes seconds, and it has no instances before.
    if "transformers.modeling_utils" not in sys.modules:
        return []
    from transformers.modeling_utils import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def embeddings_of(model: Any) -> tuple[Any, Any]:
    """Return the input embedding and the head of a Transformers model, None for what it
    has not: models of speech raise where they are asked."""
    found = []
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            found.append(get())
        except (NotImplementedError, AttributeError):
            found.append(None)
    return found[0], found[1]


def is_rank_0() -> bool:
    """Return whether this process is the one that speaks for all: rank 0, or one
    without others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def symmetric_memory_operators() -> Any:
    """Return torch's operators over symmetric memory; they are defined when their
    module is imported."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def depends_on(result: Tensor, *inputs: Tensor) -> Tensor:
    """Return the result of an autograd function's forward such that a compiled graph of
    torch < 2.13 knows that it depends on ``inputs``. Those versions look for operators
    that autograd could follow, find none in products of FP8 numbers, and take the
    gradients for zero."""
    # Eager runs and later versions follow the autograd function itself.
    if _HAS_NEW_NAMES or not torch.compiler.is_compiling():
        return result
    for each in inputs:
        # Of no elements: 0, whatever they are.
        result = result + each[:0].sum().to(result.dtype)
    return result
