"""Backward passes as FSDP2 sees them: which one runs, its end, and what one that failed leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from smp_core.comm.deferred import Deferred
from smp_core.sharding.fsdp.internals import group_of, state_of

FAILED_PASS = (
    "an earlier backward pass failed and left part of its gradients behind; call window.abandon() before the next "
    "forward (in Lightning: trainer.strategy.window.abandon())"
)


# Returns a number for the backward pass that is running, to tell it from the one before; -1 outside of one. Asked for
# with each collective of a unit, so it is torch's function itself.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass is over and FSDP2 has finished it for every root.

    FSDP2's roots queue their own final callbacks while the pass runs, some perhaps after this call; queueing once more
    from the end of the pass puts ours behind all of them.
    """
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(callback))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free what units among ``modules`` keep unsharded, after a forward without backward or inside a window, so that
    their parameters are shards again and nothing reads weights from before a step or before a checkpoint was loaded."""
    for module in modules:
        if isinstance(module, FSDPModule):
            drop_gather(group_of(module))
            module.reshard()


@torch.no_grad()
def forget_passes(modules: Iterable[nn.Module]) -> None:
    """Bring units back to where they are between steps, also from the middle of a forward or backward that failed:
    sharded, nothing in flight, no gradients.

    Args:
        modules: of all units of a model.
    """
    modules = list(modules)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for module in modules:
        drop_gather(group_of(module))  # it has to end: its messages would meet those of the next pass
    if hasattr(FSDPModule, "reset_iter_state"):  # torch >= 2.13
        for module in modules:
            if state_of(module)._is_root:
                module.reset_iter_state()  # type: ignore[operator]
    else:
        _reset(modules)
    for module in modules:
        for parameter in getattr(group_of(module), "fsdp_params", ()):
            parameter.sharded_param.grad = None
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def drop_gather(group: Any) -> None:
    """Forget the gather in flight, if there is one. Its messages have to arrive all the same, or they would meet those
    of the next gather, and on a device it has to be over before its memory is used again."""
    result = None if group is None else group._all_gather_result
    if result is None:
        return
    if result.all_gather_event is not None:  # None without an accelerator
        torch.accelerator.current_stream().wait_event(result.all_gather_event)
    group._all_gather_result = None
    work = result.all_gather_work
    if work is not None and not (isinstance(work, Deferred) and work.has_failed):
        work.wait()


def end_of_reduction(module: nn.Module) -> None:
    """Do for a unit that was reduced outside of a backward pass what the end of one does."""
    group = group_of(module)
    group.finalize_backward()
    group._training_state = TrainingState.IDLE
    _forget_reductions(module)


def _forget_reductions(module: nn.Module) -> None:
    """Let go of what FSDP2 reduced last and keeps until the next, or the end of the pass. The present stream has to
    wait for it already."""
    context = state_of(module)._comm_ctx
    if hasattr(context, "reduce_scatter_states"):  # torch >= 2.13
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None


def _reset(modules: Iterable[nn.Module]) -> None:
    """Reset what a failed pass left, as ``reset_iter_state`` of torch >= 2.13 does."""
    for module in modules:
        state: Any = state_of(module)
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        if state._is_root is not None:
            state._comm_ctx.all_gather_state = None
            state._comm_ctx.post_forward_order.clear()
            _forget_reductions(module)
        group = group_of(module)
        if group is not None:
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
