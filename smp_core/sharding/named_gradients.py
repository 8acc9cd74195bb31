"""Calls of torch.autograd that name the parameters whose gradients they want.

``loss.backward(inputs=parameters)`` accumulates gradients of these alone. What graphs
hold of a parameter in shards is the copy that forwards gathered: torch finds no path to
the shard and leaves it without a gradient, in silence. So copies are named in their
place, whose gradients are reduced like any other.

``torch.autograd.grad(loss, parameters)`` returns gradients and accumulates none. Those
of whole parameters are of this rank's samples, as under DistributedDataParallel, which
is said once; those of shards are an error of torch's, with a note
(:mod:`smp_core.sharding.error_notes`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.sharding.fsdp import in_graphs
from smp_core.sharding.gradients.parameter_hooks import hooks_of
from smp_core.torch_facts import is_rank_0, model_parameter

logger = logging.getLogger("smp")


def follow_named_gradients() -> None:
    """Let calls that name parameters of sharded models do what they do in one process,
    or say that they do not. Of the process, once."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(backward)
    def with_copies(*args: Any, inputs: Any = None, **kwargs: Any) -> None:
        # Without inputs every leaf of the graph is meant.
        if inputs is not None:
            kwargs["inputs"] = _with_copies(inputs)
        backward(*args, **kwargs)

    @functools.wraps(grad)
    def of_this_rank(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(hooks_of(each) is not None for each in _tensors(inputs)):
            _say_whose()
        return grad(outputs, inputs, *args, **kwargs)

    torch.autograd.backward, torch.autograd.grad = with_copies, of_this_rank


def _with_copies(inputs: Any) -> Any:
    # Edges of the graph, which are tuples of a kind of their own, stay as they are.
    if isinstance(inputs, dict):
        inputs = inputs.values()
    elif not isinstance(inputs, Tensor) and hasattr(inputs, "node"):
        return inputs
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    copies = []
    for each in given:
        # A master stands for its parameter.
        is_tensor = isinstance(each, Tensor)
        copies.append(in_graphs(model_parameter(each)) if is_tensor else each)
    return copies


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
        return
    values = inputs.values() if isinstance(inputs, dict) else inputs
    for each in values:
        if isinstance(each, Tensor):
            yield each


@functools.cache
def _say_whose() -> None:
    if is_rank_0() and dist.is_initialized() and dist.get_world_size() > 1:
        logger.warning(
            "torch.autograd.grad returns gradients of parameters that are of each rank's own samples, as under "
            "DistributedDataParallel: nothing adds them up over ranks, also where they become a .grad. Write "
            "loss.backward(), or loss.backward(inputs=parameters), which does"
        )
