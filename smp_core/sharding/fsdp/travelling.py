"""Parameters that travel in another form than they are stored in: FSDP2's all-gather extensions.

FSDP2's documented place for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` is a tensor subclass as the parameter,
which state dicts would then show. So they are put where FSDP2 looks for them: ``FSDPParam._sharded_local_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from smp_core.fp8.gathered import WeightGather


def travel(parameters: Iterable[FSDPParam], gather_of: Callable[[nn.Module, str], WeightGather | None]) -> None:
    """Let FSDP2 communicate parameters as ``gather_of`` (module, parameter's name in it) says; None: as they are."""
    for parameter in parameters:
        gather = gather_of(parameter._module_info.module, parameter._module_info.param_name)
        if gather is not None:
            parameter.__class__ = _TravellingParameter
            parameter.travelling = _Travelling(parameter, gather)  # type: ignore[attr-defined]
            parameter._init_extensions()


class _TravellingParameter(FSDPParam):
    """A parameter of FSDP2 that travels as its :class:`WeightGather` says."""

    travelling: _Travelling

    @property
    def _sharded_local_tensor(self) -> Any:  # type: ignore[override]
        return self.travelling


class _Travelling:
    """Answers to what FSDP2 asks about the local tensor of such a parameter."""

    def __init__(self, parameter: FSDPParam, gather: WeightGather, shard: torch.Tensor | None = None) -> None:
        self._parameter, self._gather, self._shard = parameter, gather, shard

    def size(self) -> torch.Size:
        return self._parameter.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> _Travelling:
        """Copy a shard in host memory to the device, before it is cast."""
        there = self._parameter._sharded_param_data.to(device, non_blocking=non_blocking)
        return _Travelling(self._parameter, self._gather, there)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        shard = self._parameter._sharded_param_data if self._shard is None else self._shard
        payload, inverse_scale = self._gather.pack(shard.view(self.size()))
        return (payload,), (inverse_scale,)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        if isinstance(out, DTensor):
            out = out.to_local()  # of a layer that is split over tensor ranks
        weight = self._gather.unpack(
            gathered[0], metadata[0], _gathered_size(self._parameter.sharded_param), dtype, out
        )
        return None if weight is None else (weight, ())


def _gathered_size(parameter: Any) -> torch.Size:
    """Return the size of what a partition group holds of a sharded parameter: all of it, or one tensor rank's part,
    where the axes inside the first are those of a layer that is split in equal parts."""
    size = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        if axis > 0 and not placement.is_replicate():
            size[placement.dim] //= parameter.device_mesh.size(axis)
    return torch.Size(size)
