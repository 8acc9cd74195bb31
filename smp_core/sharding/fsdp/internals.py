"""The way to FSDP2's internals, and every private name that this room uses.

FSDP2 has public methods for what a unit communicates with, when it is gathered ahead, freed and reduced. It has none
for what a unit consists of, for who shows its parameters, and for what a failed pass leaves behind. The list is what a
maintainer reads beside the diff of a new torch; `tests/core/test_architecture.py` holds it against the code, and its
length against the number it had: it may only become shorter.

The way in:

- ``_get_fsdp_state``, ``_fsdp_param_group``: a module's unit and its parameters. Nothing public leads to them.

What a unit consists of:

- ``fsdp_params``, ``sharded_param``, ``padded_sharded_param_size``: which parameters, in which order and padding, make
  up the flat tensor that ``set_all_reduce_hook`` hands out;
- ``mp_policy``, ``offload_policy``: what a pre-sharded model computes and reduces in, and where its shards live;
- ``to_sharded_dtensor``: a gradient like its parameter. ``DTensor.from_local`` takes ten times as long, for each
  parameter in each step;
- ``_module_info``, ``param_name``, ``shared_modules``, ``shared_param_names``: where a parameter is shown, to refuse
  one that was replaced, and to know which weight of which layer is gathered;
- ``reset_sharded_param``, ``_sharded_param_data``: shards that were exchanged since (stored in another dtype from the
  first optimizer on; tied after they were sharded), of which FSDP2 takes note at the first forward only;
- ``_init_mp_dtypes``: the same for dtypes, also of units that were frozen when FSDP2 looked for them.

Gathers (patched: ``unshard``, ``wait_for_unshard`` and ``reshard`` of the group, through which every gather goes, in
whatever mode forward runs):

- ``wait_for_unshard``, ``is_sharded``, ``is_unsharded``, ``_to_sharded``, ``to_unsharded``: what an earlier call left,
  used or undone;
- ``_all_gather_result``, ``all_gather_event``, ``all_gather_work``: gathers in flight, prefetched for a forward that
  never came;
- ``_setattr_on_modules`` (patched), ``_unsharded_param``: modules show shards between calls, gathered parameters inside
  them; and which parameters received a gradient;
- ``FSDPParam``, ``_fsdp_param``, ``_sharded_local_tensor``, ``_init_extensions``: weights that are gathered in FP8. The
  documented way, a tensor subclass as the parameter, would show in state dicts;
- ``HSDPMeshInfo``, ``post_forward_mesh_info``, ``_init_sharded_post_forward_param_metadata``:
  ``reshard_after_forward=<int>`` would make two process groups for every unit; here all units share two;
- ``is_dtensor``: FSDP2 refuses to keep such copies of layers that are split over tensor ranks.

Calls and backward passes (patched: ``pre_forward`` and ``post_backward`` of the group, which every way into a unit goes
through: how often it is used, and what it received before it is reduced):

- ``pre_forward``, ``_pre_forward``, ``_post_forward``: ``register_fsdp_forward_method`` replaces the method on the
  module by one whose signature Lightning misreads;
- ``_pre_forward_hook_handle``, ``_post_forward_hook_handle``, ``_python_dispatch``, ``_disable_current_modes``: inside
  a selectively checkpointed module a unit's hooks must not be taken for operations of the model;
- ``_state_ctx``, ``iter_forward_root``: which call is the outermost;
- ``post_backward_final_callback_queued``: whether an earlier pass failed;
- ``_execution_engine``, ``queue_callback``, ``_C``, ``_current_graph_task_id``: the end of a backward pass, as FSDP2
  itself finds it, and which pass it is;
- ``unsharded_accumulated_grad``: unsharded gradients that wait for the window's last pass;
- ``post_backward``, ``finalize_backward``, ``_training_state``, ``TrainingState``, ``_fsdp_common``,
  ``_fully_shard``: their reduction where no pass does it;
- ``_comm_ctx``, ``reduce_scatter_states``, ``reduce_scatter_state`` (torch < 2.13): the input of the last reduction,
  kept alive until the next;
- ``_partial_reduce_output``: what torch's own two-hop holds between micro-batches.

What a failed pass leaves, where torch (< 2.13) has no ``reset_iter_state``:

- ``_is_root``: which module to call it on, in every torch;
- ``all_gather_state``, ``post_forward_order``, ``_modules_to_run_forward``, ``_post_reduce_event``,
  ``_all_reduce_state``, ``_reshard_after_forward_event``, ``_post_forward_indices``.

Tensors and modules, which FSDP2 takes as they are:

- ``_local_tensor``, ``_cdata``: somebody assigned to ``.data``, which DTensor ignores. ``to_local`` makes a new tensor
  each time;
- ``_version``: somebody wrote into a tensor;
- ``_backward_hooks``, ``_post_accumulate_grad_hooks``: where ``register_hook`` and its sibling put what they are given.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def state_of(module: nn.Module | FSDPModule) -> Any:
    """Return FSDP2's state of a module that ``fully_shard`` was called on."""
    return module._get_fsdp_state()  # type: ignore[operator]


def group_of(module: nn.Module | FSDPModule) -> Any:
    """Return what is gathered and reduced together with a module that ``fully_shard`` was called on; None: no
    parameters."""
    return state_of(module)._fsdp_param_group
