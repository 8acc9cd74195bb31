"""FSDP2 of torch 2.11 and 2.12; goes with a floor of 2.13. A failed pass has to be
reset by hand, and one input of a reduction is kept at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule

from smp_core.sharding.fsdp.param_group_2_13 import ParamGroup213


class ParamGroup211(ParamGroup213):
    """The parameter group of torch 2.11 and 2.12."""

    def _let_go_of_reductions(self) -> None:
        self.module._get_fsdp_state()._comm_ctx.reduce_scatter_state = None


def reset_passes(modules: Iterable[FSDPModule]) -> None:
    """Do what ``reset_iter_state`` of torch >= 2.13 does."""
    # What reset_iter_state does in later releases, for every module and its group.
    for module in modules:
        state: Any = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        # Roots share one context of communication; a module that never ran has none.
        if state._is_root is not None:
            state._comm_ctx.all_gather_state = None
            state._comm_ctx.post_forward_order.clear()
            state._comm_ctx.reduce_scatter_state = None
        group = state._fsdp_param_group
        if group is not None:
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
