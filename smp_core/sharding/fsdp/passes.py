"""Backward passes as FSDP2 sees them: which one runs, its end, and what one that failed leaves behind.

What is read here beyond the public API, and why no public one will do:

- ``torch.autograd.Variable._execution_engine.queue_callback`` and ``torch._C._current_graph_task_id``: the end of a
  backward pass, as FSDP2 itself finds it, and which pass it is;
- ``module._get_fsdp_state()``, its ``_is_root``, ``_state_ctx``, ``_comm_ctx`` and ``_modules_to_run_forward``, and
  ``TrainingState`` of states and groups (``_fully_shard._fsdp_common``; ``_training_state``): what a failed backward
  pass leaves behind, which torch < 2.13 has no ``reset_iter_state`` for; of a group (``_fsdp_param_group``) also
  ``_post_forward_indices`` and ``_to_sharded``, and ``_unsharded_param`` of its parameters; of ``_comm_ctx`` what keeps
  the input of the last reduction alive;
- ``group._all_gather_result`` and ``device_handle``: gathers in flight, prefetched for a forward that never came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

if TYPE_CHECKING:
    from smp_core.sharding.fsdp.units import ShardedUnit


FAILED_PASS = (
    "an earlier backward pass failed and left part of its gradients behind; call window.abandon() before the next "
    "forward (in Lightning: trainer.strategy.window.abandon())"
)


def backward_pass() -> int:
    """A number for the backward pass that is running, to tell it from the one before."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass is over and FSDP2 has finished it for every root.

    FSDP2's roots queue their own final callbacks while the pass runs, some perhaps after this call; queueing once more
    from the end of the pass puts ours behind all of them.
    """
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(callback))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free what units among ``modules`` keep gathered, after a forward without backward or inside a window, so that
    their parameters are shards again and nothing reads weights from before a step or before a checkpoint was loaded."""
    for module in modules:
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None and group._all_gather_result is not None:
                drop_gather(group)
            module.reshard()


@torch.no_grad()
def forget_passes(units: Iterable[ShardedUnit]) -> None:
    """Bring units back to where they are between steps, also from the middle of a forward or backward that failed:
    sharded, nothing in flight, no gradients."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for unit in units:
        state: Any = unit.module._get_fsdp_state()  # type: ignore[operator]
        if state._is_root:
            _wait_for_gathers(state)
            if hasattr(unit.module, "reset_iter_state"):  # torch >= 2.13
                unit.module.reset_iter_state()  # type: ignore[operator]
            else:
                _reset_tree(state)
        for parameter in unit.fsdp_parameters:
            parameter.sharded_param.grad = None
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _wait_for_gathers(root: Any) -> None:
    """Gathers in flight have to end: their messages would meet those of the next pass."""
    for state in root._state_ctx.all_states:
        group = state._fsdp_param_group
        if group is not None and group._all_gather_result is not None:
            drop_gather(group)


def drop_gather(group: Any) -> None:
    """Its messages have to arrive all the same, or they would meet those of the next gather, and on a device it has to
    be over before its memory is used again."""
    result = group._all_gather_result
    if result.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(result.all_gather_event)
    if result.all_gather_work is not None:
        result.all_gather_work.wait()
    group._all_gather_result = None


def forget_reductions(context: Any) -> None:
    """Let go of what FSDP2 reduced last and keeps until the next, or the end of the pass. The present stream has to
    wait for it already."""
    if hasattr(context, "reduce_scatter_states"):  # torch >= 2.13
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None


def _reset_tree(root: Any) -> None:
    context = root._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        if hasattr(context, name):
            setattr(context, name, None)
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        group = state._fsdp_param_group
        if group is not None:
            for name in (
                "_all_gather_result",
                "_post_reduce_event",
                "_all_reduce_state",
                "_reshard_after_forward_event",
            ):
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
