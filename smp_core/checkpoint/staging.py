"""The part of one rank in a save: its named tensors and the encoded rest, live or
copied to host memory.

A staged copy no longer depends on the live model: training may go on while it is
written. Host buffers are kept from save to save (pinned where the tensors are on a
GPU), so that staging is one copy and no allocation. The buffers also remember what
follows from names and layouts (names, write items, ties), because training waits while
it is computed.
"""

from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.dtypes import dtype_name
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.save_plan import LazyTensor, StagedTensor, can_tie, tie_key
from smp_core.checkpoint.tree import (
    EncodedRest,
    Path,
    encode_rest,
    iterate_tensors,
    names_of,
    path_text,
)
from smp_core.torch_facts import local_part, streams

_BELOW_A_BYTE = re.compile(r"u?int[1-7]|bits\d.*")
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

    tensors: dict[str, Tensor | StagedTensor | LazyTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    rest: EncodedRest | None = None
    own: EncodedRest = field(default_factory=EncodedRest)
    meshes: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()  # otherwise each look at a DTensor's part is an operator of autograd
def stage(
    state: Mapping[str, Any],
    per_rank: Any,
    rank: int,
    allow_pickle: bool,
    buffers: HostBuffers | None = None,
) -> Staged:
    """Name, check and encode the tensors and values that this rank saves. Not
    collective.

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
    found = list(iterate_tensors(dict(state)))
    paths = [path for path, _ in found]
    naming = Naming(paths) if buffers is None else buffers.naming_of(paths)
    live = dict(
        zip(naming.names.values(), (tensor for _, tensor in found), strict=True)
    )
    tensors: dict[str, Tensor | StagedTensor | LazyTensor] = dict(live)
    # Live tensors are written before anything can change them; only an asynchronous
    # save copies.
    if buffers is None:
        for name, tensor in live.items():
            _check(name, tensor)
    else:
        tensors = buffers.fill(live)
    rest = encode_rest(dict(state), naming.names, allow_pickle) if rank == 0 else None
    own = encode_rest(per_rank, {}, allow_pickle)
    # Values of rest.pt are the live objects; training may change them during the save.
    if buffers is not None:
        rest, own = None if rest is None else _frozen(rest), _frozen(own)
    meshes = _meshes(live) if buffers is None else buffers.layout.meshes
    return Staged(tensors, naming.paths, rest, own, meshes)


class Naming:
    """The names of the tensors at some paths.

    Attributes:
        names: path -> name, in order.
        paths: name -> path.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            _check_keys(path, path)
        self.names = names_of(paths)
        self.paths = {name: path for path, name in self.names.items()}


def _check_keys(path: Path, keys: Path) -> None:
    """Refuse a tensor under a key that the index, which is JSON, cannot hold or would
    not find again (NaN)."""
    for key in keys:
        if isinstance(key, tuple):
            _check_keys(path, key)
        elif type(key) not in (str, int, bool, float, type(None)) or key != key:
            raise CheckpointError(
                f"{path_text(path)} is a tensor under the key {key!r} "
                f"({type(key).__name__}): keys above tensors may be str, int, float, "
                "bool, None or tuples of them; use e.g. str(key)"
            )


def _check(name: str, tensor: Tensor | LazyTensor) -> None:
    if isinstance(tensor, LazyTensor):
        return
    if _BELOW_A_BYTE.fullmatch(dtype_name(tensor.dtype)):
        raise CheckpointError(
            f"{name} is {tensor.dtype}, which torch cannot copy or count in bytes; "
            "save its bytes: tensor.view(torch.uint8)"
        )
    if isinstance(tensor, DTensor):
        # A partial sum has no slice that could be written as the tensor's value.
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                f"{name} is a partial sum over its mesh; reduce it first (redistribute)"
            )
        tensor = tensor.to_local()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name} is {tensor.layout}; only dense tensors can be saved: call .to_dense()"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: it has no values to save")


def _frozen(rest: EncodedRest) -> EncodedRest:
    return EncodedRest(
        rest.tree,
        copy.deepcopy(rest.plain),
        copy.deepcopy(rest.pickle),
        rest.pickled_paths,
    )


def _meshes(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    meshes = {}
    found = [
        # Usually all tensors share one mesh, whose description takes a transfer to the
        # host.
        tensor.device_mesh
        for tensor in tensors.values()
        if isinstance(tensor, DTensor)
    ]
    for mesh in {id(mesh): mesh for mesh in found}.values():
        ranks = mesh.mesh.flatten().tolist()
        described = {
            "axes": list(mesh.mesh_dim_names or []),
            "shape": list(mesh.mesh.shape),
            "ranks": ranks,
        }
        meshes[json.dumps(described)] = described
    return list(meshes.values())


@dataclass(frozen=True, eq=False)
class _Known:
    """The facts that follow from a tensor's :func:`_appearance`.

    Attributes:
        items: DCP's write items of the slices that this rank holds.
        tie: :func:`tie_key`; None also for types of other packages.
        can_tie: False for types of other packages.
        is_local: whether the only slice is the local tensor.
    """

    appearance: Hashable
    items: list[WriteItem]
    tie: Any
    can_tie: bool
    is_local: bool


class Layout:
    """The slices of named tensors. It holds for as long as no tensor appears otherwise.

    Attributes:
        sources: the slices to copy, and whether each is the whole local tensor. Tied
            tensors have theirs once.
        meshes: as in :class:`Staged`.
    """

    def __init__(
        self, known: Mapping[str, _Known], meshes: list[dict[str, Any]]
    ) -> None:
        self.known = dict(known)
        self.meshes = meshes
        self.sources: dict[Place, tuple[WriteItem, bool]] = {}
        self._owners: dict[str, str] = {}
        self._staged: list[tuple[Mapping[Place, Tensor], dict[str, StagedTensor]]] = []
        first: dict[Any, str] = {}
        # The first name over a piece of memory owns the slices; tied names refer to
        # them.
        for name, each in known.items():
            owner = self._owners[name] = (
                name if each.tie is None else first.setdefault(each.tie, name)
            )
            if owner == name:
                for number, item in enumerate(each.items):
                    self.sources[name, number] = (item, each.is_local)

    def holds_for(self, known: Mapping[str, _Known]) -> bool:
        """Return whether these are the same objects in the same order; a name never has
        another name's."""
        return len(known) == len(self.known) and all(
            map(operator.is_, known.values(), self.known.values())
        )

    def staged(self, hosts: Mapping[Place, Tensor]) -> dict[str, StagedTensor]:
        """Return the staged tensors whose slices are in ``hosts``; those of a save
        before where its hosts are used again. Buffers have two sets of hosts at
        most."""
        # The same hosts again: the staged tensors refer to them and need no renewal.
        for hosts_then, staged_then in self._staged:
            if hosts_then is hosts:
                return staged_then
        staged = {}
        for name, each in self.known.items():
            owner = self._owners[name]
            slices = {
                item.index.offset: hosts[owner, number]
                for number, item in enumerate(each.items)
            }
            staged[name] = StagedTensor(
                each.items, slices, each.tie, can_tie=each.can_tie
            )
        # Two sets, because the memory tier fills two files alternately.
        self._staged = [*self._staged[-1:], (hosts, staged)]
        return staged


class HostBuffers:
    """The host memory for staged tensors, kept for the next save of the same shapes.

    Attributes:
        layout: of the tensors of the last save.
    """

    def __init__(self) -> None:
        self.layout = Layout({}, [])
        self._hosts_of: Layout | None = None
        self._kept: dict[Place, Tensor] = {}
        self._items: dict[str, tuple[Hashable, list[WriteItem]]] = {}
        self._naming: tuple[list[Path], Naming] | None = None
        self._known: dict[str, _Known] = {}

    def naming_of(self, paths: list[Path]) -> Naming:
        """Name the tensors at these paths; as in the last save if they are those of
        then."""
        if self._naming is None or self._naming[0] != paths:
            self._naming = paths, Naming(paths)
        return self._naming[1]

    def fill(
        self, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor | StagedTensor | LazyTensor]:
        """Copy this rank's slices, and return when all values have arrived. Tied
        tensors are copied once.

        Raises:
            CheckpointError: a tensor that cannot be saved; nothing is copied.
        """
        # One record for each tensor; the same object as before where nothing has
        # changed.
        self._known = {
            name: self._known_of(name, tensor) for name, tensor in tensors.items()
        }
        if not self.layout.holds_for(self._known):
            # Something has changed, and all that follows from names and layouts is
            # computed anew.
            self.layout = Layout(self._known, _meshes(tensors))
            self._items = {
                name: each for name, each in self._items.items() if name in tensors
            }
        # The slices of this rank, which are copied to where they were staged before.
        sources: dict[Place, Tensor] = {}
        for place, (item, is_local) in self.layout.sources.items():
            tensor = tensors[place[0]]
            source = (
                local_part(tensor)
                if is_local
                else find_tensor_shard(tensor, item.index)
            )
            sources[place] = source.detach() if source.requires_grad else source
        hosts = self._hosts(sources)
        self._copy(sources, hosts)
        return dict(self.layout.staged(hosts))

    def _known_of(self, name: str, tensor: Tensor) -> _Known:
        appearance = _appearance(tensor)
        # A tensor at the same address with the same layout has the same items and ties.
        known = self._known.get(name)
        if (
            known is not None
            and appearance is not None
            and known.appearance == appearance
        ):
            return known
        _check(name, tensor)
        items = self._write_items(name, tensor)
        # Tensors of other packages are asked anew for each save.
        if not can_tie(tensor):
            return _Known(None, items, None, can_tie=False, is_local=False)
        is_local = len(items) == 1 and _is_same(
            find_tensor_shard(tensor, items[0].index), local_part(tensor)
        )
        return _Known(
            appearance, items, tie_key(tensor), can_tie=True, is_local=is_local
        )

    def _write_items(self, name: str, tensor: Tensor) -> list[WriteItem]:
        """Return which slices this rank writes; of a tensor that is laid out as in the
        last save, those of then."""
        if not can_tie(tensor):
            return write_items(name, tensor)
        # All that DCP's items depend on. Making them takes longer than copying a small
        # tensor.
        layout: Hashable = (tensor.shape, tensor.dtype, tensor.requires_grad)
        if isinstance(tensor, DTensor):
            layout = (layout, tensor.device_mesh, tuple(tensor.placements))
        known = self._items.get(name)
        if known is None or known[0] != layout:
            known = self._items[name] = (layout, write_items(name, tensor))
        return known[1]

    def _hosts(self, sources: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        """Return host tensors of the same shapes and dtypes; those of the last save
        where they fit."""
        if self._hosts_of is self.layout:
            return self._kept
        hosts = {}
        for place, source in sources.items():
            # Buffers whose shapes still fit are kept, although the layout has changed.
            host = self._kept.get(place)
            if host is None or (host.shape, host.dtype) != (source.shape, source.dtype):
                host = torch.empty(
                    source.shape,
                    dtype=source.dtype,
                    pin_memory=streams.pins(source.device),
                )
            hosts[place] = host
        self._kept, self._hosts_of = hosts, self.layout
        return hosts

    def _copy(
        self, sources: Mapping[Place, Tensor], hosts: Mapping[Place, Tensor]
    ) -> None:
        copy_to_hosts([(hosts[place], source) for place, source in sources.items()])


def _appearance(tensor: Tensor) -> Hashable:
    """Return what a tensor's write items and tie follow from, its place in memory
    included; None where nobody knows."""
    if not can_tie(tensor):
        return None
    local = local_part(tensor)
    if local.layout is not torch.strided:
        return None
    over = (
        (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    )
    memory = (local.data_ptr(), local.shape, local.stride(), local.device)
    signs = (local.is_conj(), local.is_neg())
    return (tensor.shape, tensor.dtype, tensor.requires_grad, over, memory, signs)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def copy_to_hosts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first one, and return when all values have
    arrived."""
    for host, source in pairs:
        # All copies are issued first, so that the device works without a pause; then
        # one wait for each device.
        host.copy_(source, non_blocking=streams.run_behind(source.device))
    for device in {
        source.device for _, source in pairs if streams.run_behind(source.device)
    }:
        torch.accelerator.synchronize(device)


def write_items(name: str, tensor: Tensor) -> list[WriteItem]:
    """Return which slices of a tensor this rank writes."""
    return list(
        create_default_local_save_plan({name: tensor}, is_coordinator=True).items
    )
