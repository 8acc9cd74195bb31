"""The part of one rank in a save: its named tensors and the encoded rest, live or copied to host memory.

A staged copy no longer depends on the live model: training may go on while it is written. Host buffers are kept from
save to save (pinned where the tensors are on a GPU), so that staging is one copy and no allocation.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from smp_core import streams
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.save_plan import LazyTensor, StagedTensor, tie_key
from smp_core.checkpoint.tree import EncodedRest, Path, encode_rest, name_tensors

Place = tuple[str, int]
"""A slice of a tensor that this rank holds: the tensor's name, the slice's number."""


@dataclass(eq=False)
class Staged:
    """The part of one rank in a save.

    Attributes:
        tensors: name -> tensor, or its staged copy.
        paths: name -> path in the state.
        rest: the encoded non-tensor part of the state; only on rank 0.
        own: the encoded ``per_rank`` value.
        meshes: device meshes of the DTensors, for the manifest.
    """

    tensors: dict[str, torch.Tensor | StagedTensor | LazyTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    rest: EncodedRest | None = None
    own: EncodedRest = field(default_factory=EncodedRest)
    meshes: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()  # else each look at a DTensor's part is an operator of autograd
def stage(
    state: Mapping[str, Any], per_rank: Any, rank: int, allow_pickle: bool, buffers: HostBuffers | None = None
) -> Staged:
    """Name, check and encode the tensors and values that this rank saves. Not collective.

    Args:
        state: the nested state.
        per_rank: this rank's own value.
        rank: the rest of the state is encoded on rank 0 only.
        allow_pickle: see :func:`smp_core.checkpoint.save_checkpoint`.
        buffers: copy the tensors into these; None: refer to the live ones.

    Raises:
        CheckpointError: a tensor or value that cannot be saved; the message names it.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state must be a dict, not {type(state).__name__}")
    named = name_tensors(dict(state))
    for name, tensor in named.values():
        _check(name, tensor)
    names = {path: name for path, (name, _) in named.items()}
    rest = encode_rest(dict(state), names, allow_pickle) if rank == 0 else None
    own = encode_rest(per_rank, {}, allow_pickle)
    tensors: dict[str, torch.Tensor | StagedTensor | LazyTensor] = dict(named.values())
    if buffers is not None:
        tensors = buffers.fill(dict(named.values()))
        rest, own = None if rest is None else _frozen(rest), _frozen(own)
    return Staged(tensors, {name: path for path, name in names.items()}, rest, own, _meshes(dict(named.values())))


def _check(name: str, tensor: torch.Tensor | LazyTensor) -> None:
    if isinstance(tensor, LazyTensor):
        return
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"{name} is a partial sum over its mesh; reduce it first (redistribute)")
        tensor = tensor.to_local()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{name} is {tensor.layout}; only dense tensors can be saved: call .to_dense()")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: it has no values to save")


def _frozen(rest: EncodedRest) -> EncodedRest:
    return EncodedRest(rest.tree, copy.deepcopy(rest.plain), copy.deepcopy(rest.pickle), rest.pickled_paths)


def _meshes(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    meshes = {}
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)):
        ranks = mesh.mesh.flatten().tolist()
        described = {"axes": list(mesh.mesh_dim_names or []), "shape": list(mesh.mesh.shape), "ranks": ranks}
        meshes[json.dumps(described)] = described
    return list(meshes.values())


class HostBuffers:
    """The host memory for staged tensors, kept for the next save of the same shapes."""

    def __init__(self) -> None:
        self._kept: dict[Place, torch.Tensor] = {}
        self._items: dict[str, tuple[Hashable, list[WriteItem]]] = {}

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | StagedTensor | LazyTensor]:
        """Copy this rank's slices, and return when all values have arrived. Tied tensors are copied once."""
        items = {name: self._write_items(name, tensor) for name, tensor in tensors.items()}
        keys = {name: tie_key(tensor) if _can_tie(tensor) else None for name, tensor in tensors.items()}
        first: dict[Any, str] = {}
        sources: dict[Place, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if keys[name] is None or first.setdefault(keys[name], name) == name:
                for number, item in enumerate(items[name]):
                    sources[name, number] = find_tensor_shard(tensor, item.index).detach()
        hosts = self._hosts(sources)
        self._copy(sources, hosts)

        staged: dict[str, torch.Tensor | StagedTensor | LazyTensor] = {}
        for name, tensor in tensors.items():
            owner = name if keys[name] is None else first[keys[name]]
            slices = {item.index.offset: hosts[owner, number] for number, item in enumerate(items[name])}
            staged[name] = StagedTensor(items[name], slices, keys[name], can_tie=_can_tie(tensor))
        return staged

    def _write_items(self, name: str, tensor: torch.Tensor) -> list[WriteItem]:
        """Return which slices this rank writes; of a tensor that is laid out as in the last save, those of then."""
        if not _can_tie(tensor):
            return write_items(name, tensor)
        layout: Hashable = (tensor.shape, tensor.dtype, tensor.requires_grad)
        if isinstance(tensor, DTensor):
            layout = (layout, tensor.device_mesh, tuple(tensor.placements))
        known = self._items.get(name)
        if known is None or known[0] != layout:
            known = self._items[name] = (layout, write_items(name, tensor))
        return known[1]

    def _hosts(self, sources: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        """Return host tensors of the same shapes and dtypes; those of the last save where they fit."""
        hosts = {}
        for place, source in sources.items():
            host = self._kept.get(place)
            if host is None or (host.shape, host.dtype) != (source.shape, source.dtype):
                host = torch.empty(source.shape, dtype=source.dtype, pin_memory=streams.pins(source.device))
            hosts[place] = host
        self._kept = hosts
        return hosts

    def _copy(self, sources: Mapping[Place, torch.Tensor], hosts: Mapping[Place, torch.Tensor]) -> None:
        copy_to_hosts([(hosts[place], source) for place, source in sources.items()])


def copy_to_hosts(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first one, and return when all values have arrived."""
    for host, source in pairs:
        host.copy_(source, non_blocking=streams.run_behind(source.device))
    for device in {source.device for _, source in pairs if streams.run_behind(source.device)}:
        torch.accelerator.synchronize(device)


def _can_tie(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) or not hasattr(tensor, "__create_write_items__")


def write_items(name: str, tensor: torch.Tensor) -> list[WriteItem]:
    """Return which slices of a tensor this rank writes."""
    return list(create_default_local_save_plan({name: tensor}, is_coordinator=True).items)
