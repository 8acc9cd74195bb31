"""Calls of torch.autograd that name the parameters whose gradients they want.

``loss.backward(inputs=parameters)`` accumulates gradients of these alone. What graphs
hold of a parameter in shards is the copy that forwards gathered: torch finds no path to
the shard and leaves it without a gradient, in silence. So copies are named in their
place, whose gradients are reduced like any other.

``torch.autograd.grad(loss, parameters)`` returns gradients and accumulates none. Those
of whole parameters are of this rank's samples, as under DistributedDataParallel, which
is said once; those of shards that a forward has gathered are an error, also where torch
would give None or zeros for them (``allow_unused``, ``materialize_grads``), or a part.

``torch.autograd.graph.register_multi_grad_hook(parameters, hook)`` waits for gradients in
the graph, which never come to shards: an error, too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_core.sharding.error_notes import NOT_IN_GRAPH
from smp_core.sharding.fsdp import in_graphs, name_of_shard
from smp_core.sharding.gradients.parameter_hooks import hooks_of
from smp_core.torch_facts import is_rank_0, model_parameter

logger = logging.getLogger("smp")


def backward(
    before: Callable[..., None], *args: Any, inputs: Any = None, **kwargs: Any
) -> None:
    """Name copies in the place of shards; in the place of ``torch.autograd.backward``."""
    # Without inputs every leaf of the graph is meant.
    if inputs is not None:
        kwargs["inputs"] = _with_copies(inputs)
    before(*args, **kwargs)


def grad(
    before: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse shards, and say whose gradients those of others are; in the place of
    ``torch.autograd.grad``."""
    if any(hooks_of(each) is not None for each in _tensors(inputs)):
        _refuse_gathered(outputs, inputs)
        _say_whose()
    return before(outputs, inputs, *args, **kwargs)


def register_multi_grad_hook(
    before: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse shards, whose gradients are set behind the graph; in the place of the
    function of that name in ``torch.autograd.graph``."""
    tensors = list(tensors)
    for each in _tensors(tensors):
        name = name_of_shard(each)
        if name is not None:
            raise ValueError(
                f"register_multi_grad_hook is given {name}, a parameter in shards, for which the hook would never be "
                "called; write parameter.register_hook(hook), which is given the complete gradient, or read "
                "parameter.grad behind backward"
            )
    return before(tensors, *args, **kwargs)


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


def _refuse_gathered(outputs: Any, inputs: Any) -> None:
    """Refuse parameters in shards of which the graph holds gathered copies.

    Raises:
        RuntimeError: torch would find no path to them.
    """
    # Keyed by the copy, which is not the parameter itself only of what was gathered.
    shards: dict[Any, Tensor] = {
        copy: each for each in _tensors(inputs) if (copy := in_graphs(each)) is not each
    }
    left: list[Any] = [each.grad_fn for each in _tensors(outputs)] if shards else []
    known = set()
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        is_leaf = type(node).__name__ == "AccumulateGrad"
        shard = shards.get(node.variable) if is_leaf else None
        if shard is not None:
            raise RuntimeError(
                f"torch.autograd.grad has no gradient of {name_of_shard(shard)}: {NOT_IN_GRAPH}"
            )
        left += [before for before, _ in node.next_functions]


@functools.cache
def _say_whose() -> None:
    if is_rank_0() and dist.is_initialized() and dist.get_world_size() > 1:
        logger.warning(
            "torch.autograd.grad returns gradients of parameters that are of each rank's own samples, as under "
            "DistributedDataParallel: nothing adds them up over ranks, also where they become a .grad. Write "
            "loss.backward(), or loss.backward(inputs=parameters), which does"
        )
