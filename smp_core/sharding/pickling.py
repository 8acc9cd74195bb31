"""No shard is pickled in silence: `torch.save(model.state_dict())` on one rank would write that rank's part.

A DTensor pickles its local shard and says nothing. Gathering it would need all ranks, and a script that saves calls
`torch.save` on one of them. The reducer is registered for the type with `copyreg`, which every pickler reads (also
cloudpickle, dill and `all_gather_object`); safetensors and numpy refuse DTensors by themselves.
"""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

from torch.distributed.tensor import DTensor

from smp_core.torch_facts import is_absent


def refuse_to_pickle_shards() -> None:
    """Make it an error, from here on, to pickle a DTensor of which this process holds a part. One that is unsharded
    here (replicated, or on a mesh of one rank) is pickled as a plain tensor."""
    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]


def is_a_part(tensor: object) -> bool:
    """Return whether it is a tensor of which this process holds a part, or (other pipeline stages') nothing."""
    if is_absent(tensor):
        return True
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def _reduce(tensor: DTensor) -> tuple[Any, ...]:
    if not is_a_part(tensor):
        plain: tuple[Any, ...] = tensor.to_local().detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return plain
    raise pickle.PicklingError(
        f"torch.save or pickle of a sharded tensor {tuple(tensor.shape)} would write this rank's part alone, which is "
        f"{tuple(tensor.to_local().shape)}; to get whole tensors on rank 0 call on every rank "
        "accelerator.get_state_dict(model), or smp_core.checkpoint.full_state_dict(state) for any state; for a "
        "checkpoint that any number of ranks loads: accelerator.save_state, trainer.save_checkpoint or fabric.save; to "
        "save this part on purpose: tensor.to_local()"
    )
