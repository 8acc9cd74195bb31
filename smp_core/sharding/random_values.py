"""Random numbers in sharded tensors (``nn.init``, ``p.normal_()``,
``torch.randn_like(p)``): those that one process draws for the whole tensor, at every
degree.

torch draws for this rank's part: on CPU ranks with equal seeds draw equal numbers then,
so that rows repeat; on CUDA numbers differ by rank, and with the number of ranks. Here
every rank draws the whole tensor and keeps its part, from the state that rank 0's
generator has, so that replicas agree, too. It takes the memory of the whole tensor
while it draws, and all ranks have to ask. Dropout of a DTensor is left to torch: it
belongs to a computation and not to a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import own_part
from smp_core.cluster import SmpMesh
from smp_core.sharding.optimizer.shards import local_of
from smp_core.torch_facts import ABSENT, is_absent

_aten = torch.ops.aten
# Filled in place: only the shape of the tensor counts.
_IN_PLACE = (
    *(
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.log_normal_.default,
        _aten.cauchy_.default,
    ),
    *(
        _aten.exponential_.default,
        _aten.geometric_.default,
        _aten.bernoulli_.float,
        _aten.bernoulli_.Tensor,
    ),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
)
# New tensors like a sharded one.
_LIKE = (
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
# New tensors whose distribution each element decides.
_OF_VALUES = (
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.poisson.default),
    *(_aten.normal.Tensor_float, _aten.normal.Tensor_Tensor),
)
_meshes: list[weakref.ref[SmpMesh]] = []


def note_mesh(mesh: SmpMesh) -> None:
    """Let random numbers in DTensors of this mesh be those of whole tensors."""
    # References to meshes that are gone are dropped.
    _meshes[:] = [each for each in _meshes if each() not in (None, mesh)]
    _meshes.append(weakref.ref(mesh))


def draw_whole_tensors() -> None:
    """Draw random numbers in DTensors as those of whole tensors. Of the process,
    once."""
    for function in (*_IN_PLACE, *_LIKE, *_OF_VALUES):
        torch.library.register_torch_dispatch(function, DTensor, _draw)


def _draw(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    target: DTensor = args[0]
    if is_absent(target):
        raise RuntimeError(ABSENT % list(target.shape))
    # What is drawn into a tensor, or like it, needs its shape alone; a distribution needs
    # the values.
    first = _whole(target) if function in _OF_VALUES else _like_whole(target)
    others = map(_whole, args[1:])
    named = {name: _whole(value) for name, value in (kwargs or {}).items()}
    with _state_of_rank_0(target, named.get("generator")):
        drawn = function(first, *others, **named)
    # Every rank has drawn all of it, and keeps its part.
    own = own_part(drawn, target)
    if function in _IN_PLACE:
        local_of(target).copy_(own)
        return target
    made = torch.empty_like(target, dtype=drawn.dtype)
    local_of(made).copy_(own)
    return made


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like_whole(target: DTensor) -> Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device=local_of(target).device)


@contextmanager
def _state_of_rank_0(
    target: DTensor, generator: torch.Generator | None
) -> Iterator[None]:
    """Draw from the state that the generator has on the first rank that holds a part of
    the model. A rank whose own is another one goes on with that afterwards."""
    device = local_of(target).device
    if generator is None:
        # The generator that torch itself would take on this device.
        generator = torch.default_generator
        if device.type != "cpu":
            generator = torch.get_device_module(device).default_generators[device.index]
    mesh = mesh_on(target.device_mesh)
    if mesh is None:
        yield
        return
    # Rank 0's state is sent, so that replicas and shards draw the same numbers.
    own = generator.get_state()
    sent = own.to(mesh.device, copy=True)
    dist.broadcast(sent, group_src=0, group=mesh.model_group)
    state = sent.to(own.device)
    generator.set_state(state)
    try:
        yield
    finally:
        # A rank with another state has not drawn from its own.
        if not torch.equal(state, own):
            generator.set_state(own)


def mesh_on(device_mesh: DeviceMesh) -> SmpMesh | None:
    """Return the mesh of a sharded model that the ranks of a DTensor's mesh belong
    to."""
    # Several models may be sharded, on meshes of the same or of other ranks.
    ranks = set(device_mesh.mesh.flatten().tolist())
    meshes = [mesh for each in _meshes if (mesh := each()) is not None]
    return next((each for each in meshes if ranks <= _ranks_of(each)), None)


def _ranks_of(mesh: SmpMesh) -> set[int]:
    """Return the ranks that hold parts of the mesh's models; none once its groups were
    destroyed."""
    try:
        return set(dist.get_process_group_ranks(mesh.model_group))
    except KeyError:
        return set()
