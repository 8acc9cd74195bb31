"""Parameters that travel in another form than they are computed in: FSDP2's all-gather
extensions. FP8 weights are stored in high precision; frozen ones (``frozen_storage``)
are stored as the codes that they travel as.

FSDP2's documented place for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` is a
tensor subclass as the parameter, which state dicts would then show. So they are put
where FSDP2 looks for them at the first forward: ``FSDPParam._sharded_local_tensor``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.codecs import RowCodec
from smp_core.fp8 import WeightGather
from smp_core.sharding.fsdp.param_group import ParamGroup
from smp_core.torch_facts import CodedTensor, as_codes, decode_rows


def travel(
    group: ParamGroup, gather_of: Callable[[nn.Module, str], WeightGather | None]
) -> None:
    """Let FSDP2 communicate parameters as ``gather_of`` (module, parameter's name in
    it) says; None: as they are."""
    # FSDP2 asks its own object for the local tensor; of the class that it gets here, ours
    # answers.
    for member, places in zip(group.members, group.places(), strict=True):
        gather = gather_of(*places[0])
        if gather is not None:
            member.__class__ = _travelling(member.__class__)
            member.travelling = _Travelling(member, gather)


@functools.cache
def _travelling(kind: Any) -> type:
    """Return a class of FSDP2's parameters, such that they travel as their
    :class:`WeightGather` says."""
    return type(
        str(kind.__name__),
        (kind,),
        {"_sharded_local_tensor": property(lambda member: member.travelling)},
    )


class _Travelling:
    """Answers to what FSDP2 asks about the local tensor of such a parameter."""

    def __init__(
        self, member: Any, gather: WeightGather, shard: Tensor | None = None
    ) -> None:
        self._member = member
        self._gather = gather
        self._shard = shard

    def size(self) -> torch.Size:
        return self._member.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> _Travelling:
        """Copy a shard in host memory to the device, before it is cast."""
        there = self._member._sharded_param_data.to(device, non_blocking=non_blocking)
        return _Travelling(self._member, self._gather, there)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        # FSDP2 asks either the shard itself, or the copy that `to` has brought to the
        # device.
        shard = self._member._sharded_param_data if self._shard is None else self._shard
        payload, inverse_scale = self._gather.pack(shard.view(self.size()))
        return (payload,), (inverse_scale,)

    def fsdp_post_all_gather(
        self,
        gathered: Any,
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # Of a layer that is split over tensor ranks: the gather fills its local part.
        if isinstance(out, DTensor):
            out = out.to_local()
        weight = self._gather.unpack(
            gathered[0],
            metadata[0],
            _gathered_size(self._member.sharded_param),
            dtype,
            out,
        )
        return None if weight is None else (weight, ())


def _gathered_size(parameter: Any) -> torch.Size:
    """Return the size of what a partition group holds of a sharded parameter: all of
    it, or one tensor rank's part, where the axes inside the first are those of a layer
    that is split in equal parts."""
    # Axis 0 is the one that FSDP2 gathers over; along the others a rank keeps its part.
    size = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        if axis > 0 and not placement.is_replicate():
            size[placement.dim] //= parameter.device_mesh.size(axis)
    return torch.Size(size)


@torch.no_grad()
def store_as_codes(group: ParamGroup, indices: Iterable[int], codec: RowCodec) -> None:
    """Store parameters' shards as codes from now on, in which they also travel. They
    stay the same objects."""
    for index in indices:
        member = group.members[index]
        member.__class__ = _coded(member.__class__)
        _encode(member, codec)


def _encode(member: Any, codec: Any) -> None:
    # With padding: all ranks send equally many codes.
    padded = member._sharded_param_data.view(member.padded_sharded_param_size)
    kept = member.sharded_param
    local = as_codes(padded, kept.to_local().shape, codec)
    if padded.is_pinned():
        local.codes = local.codes.pin_memory()
    # The new parameter takes the old one's place under the old one's identity.
    stored = nn.Parameter(
        member.to_sharded_dtensor(local), requires_grad=kept.requires_grad
    )
    stored.__dict__.update(kept.__dict__)  # what others have noted on it
    torch.utils.swap_tensors(kept, stored)
    member._sharded_param_data = local.codes.view(-1)
    member.travelling = _Coded(member, local)


@functools.cache
def _coded(kind: Any) -> type:
    """Return a class of FSDP2's parameters, such that they are stored as codes."""

    def reset_sharded_param(member: Any) -> None:
        # FSDP2 calls this when shards were exchanged, moved or cast.
        local = member.sharded_param.to_local()
        if isinstance(local, CodedTensor):
            member.travelling = _Coded(member, local)
            return
        # Moved or cast, which decodes.
        coder = member.travelling.local.coder
        kind.reset_sharded_param(member)
        _encode(member, coder)

    members = {
        "_sharded_local_tensor": property(lambda member: member.travelling),
        "reset_sharded_param": torch.no_grad()(reset_sharded_param),
    }
    return type(str(kind.__name__), (kind,), members)


class _Coded:
    """Answers to what FSDP2 asks about the local tensor of a parameter that is stored
    as codes."""

    def __init__(self, member: Any, local: CodedTensor) -> None:
        self._member, self.local = member, local

    def size(self) -> torch.Size:
        return self._member.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> _Coded:
        """Copy codes in host memory to the device."""
        local = self.local
        codes = local.codes.to(device, non_blocking=non_blocking)
        return _Coded(
            self._member, CodedTensor(codes, local.shape, local.dtype, local.coder)
        )

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        # A trained weight would go on being gathered from codes of its first values.
        if self._member.sharded_param.requires_grad:
            name = self.local.coder.name
            raise ValueError(
                f"a weight {tuple(outer_size)} is to be trained (requires_grad=True) and is stored in {name} codes "
                f"(frozen_storage={name!r}), because it was frozen when the model was prepared; make trainable what "
                "is to be trained before that, or leave frozen_storage out"
            )
        return (self.local.codes,), None

    def fsdp_post_all_gather(
        self,
        gathered: Any,
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (codes,) = gathered
        # FSDP2 gives no memory in the first gather, and that of before in later ones.
        decoded = out
        if decoded is None:
            decoded = torch.empty(
                self._member.sharded_param.shape, dtype=dtype, device=codes.device
            )
        # What autograd saved of it stays valid: torch's own .data has no version of it.
        unversioned = torch.Tensor.data.__get__(decoded)  # type: ignore[attr-defined]
        decode_rows(self.local.coder, codes, unversioned)
        # FSDP2 would keep them as long as the weight; the next gather makes room.
        codes.untyped_storage().resize_(0)
        return (decoded, (decoded,)) if out is None else None
