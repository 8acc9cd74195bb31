"""What holds for all sharded models of a process, from the first one on:
:func:`change_this_process`.

Unsharded tensors may be operands beside shards (operands.py), random numbers in them
are those of whole tensors (random_values.py), backward passes find the parameters that
they name (named_gradients.py), `.data` is watched (fsdp/data_attribute.py), errors of
others are explained (error_notes.py); and here:

``float(p.norm())``, ``p.mean().item()`` and ``if p.isnan().any():`` are numbers of
whole tensors, and ``p.tolist()`` has all of them: torch's ``DTensor.item()`` gives this
rank's part of a result that is not added up yet; here it adds up first, over the ranks
that hold the parameter together, as every other operation on such a result does; so
they all have to ask.

No shard is pickled in silence: `torch.save(model.state_dict())` on one rank would write
that rank's part. Gathering it would need all ranks, and a script that saves calls
`torch.save` on one of them. The reducer is registered for the type with `copyreg`,
which every pickler reads (also cloudpickle, dill and `all_gather_object`); safetensors
and numpy refuse DTensors by themselves.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from smp_core.cluster import SmpMesh
from smp_core.sharding.error_notes import explain_uncaught_errors
from smp_core.sharding.fsdp import name_of_shard, watch_data_attribute
from smp_core.sharding.named_gradients import follow_named_gradients
from smp_core.sharding.operands import compute_with_unsharded_tensors
from smp_core.sharding.random_values import draw_whole_tensors, note_mesh
from smp_core.torch_facts import ABSENT, is_absent


def change_this_process(mesh: SmpMesh) -> None:
    """Switch on what holds for all sharded models of this process; ``mesh``: of one
    more of them."""
    # For every model; the rest is registered once for the process.
    note_mesh(mesh)
    explain_uncaught_errors()
    _change_once()


@functools.cache
def _change_once() -> None:
    compute_with_unsharded_tensors()
    draw_whole_tensors()
    follow_named_gradients()
    watch_data_attribute(name_of_shard)
    # A DTensor of which this process holds a part is refused; one that is unsharded
    # here (replicated, or on a mesh of one rank) is pickled as a plain tensor.
    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]
    # What calls item() follows it: float, bool, int; lists of numbers are read
    # elsewhere.
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _item)
    DTensor.tolist = _tolist  # type: ignore[assignment, method-assign]
    # torch.autograd's detect_anomaly asks it of gradients; each rank looks at its part,
    # without messages.
    torch.library.register_torch_dispatch("aten::_is_any_true", DTensor, _is_any_true)


def _item(
    kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None
) -> Any:
    if is_absent(args[0]):
        raise RuntimeError(ABSENT % list(args[0].shape))
    # A number of the whole tensor: what is not added up yet is added up here.
    return function(args[0].full_tensor())


def _tolist(tensor: DTensor) -> Any:
    if is_absent(tensor):
        raise RuntimeError(ABSENT % list(tensor.shape))
    return tensor.full_tensor().tolist()


def _is_any_true(
    kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None
) -> Any:
    return function(args[0].to_local())


def is_a_part(tensor: object) -> bool:
    """Return whether it is a tensor of which this process holds a part, or (other
    pipeline stages') nothing."""
    if is_absent(tensor):
        return True
    # Replicated, or on one rank: all of the tensor is here.
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def _reduce(tensor: DTensor) -> tuple[Any, ...]:
    # A plain tensor is pickled in its place.
    if not is_a_part(tensor):
        return tensor.to_local().detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    raise pickle.PicklingError(
        f"torch.save or pickle of a sharded tensor {tuple(tensor.shape)} would write this rank's part alone, which is "
        f"{tuple(tensor.to_local().shape)}; to get whole tensors on rank 0 call on every rank "
        "accelerator.get_state_dict(model), or smp_core.checkpoint.full_state_dict(state) for any state; for a "
        "checkpoint that any number of ranks loads: accelerator.save_state, trainer.save_checkpoint or fabric.save; to "
        "save this part on purpose: tensor.to_local()"
    )
