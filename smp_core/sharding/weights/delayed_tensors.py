"""The tensors of delayed initialisation: a full-size host copy to initialise, this
rank's slice of it, real storage.

Every registered parameter or buffer of a model is one `Slot`. Floating-point copies are
lent out filled with NaN, so that values an initialiser forgot are seen; integer and
bool ones are recognised by their version counter or a marker.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import own_part
from smp_core.torch_facts import is_absent, local_part


@dataclass(eq=False)
class Slot:
    """One registered tensor. Tied tensors are one slot that belongs to the first module
    that names it."""

    tensor: Tensor
    fqn: str
    # Every (module, name) it is registered under, the owner's first.
    places: list[tuple[nn.Module, str]]
    is_parameter: bool
    # Born on meta; tensors that were real are lent as scratch copies and never written.
    delayed: bool
    # Highest level of initialiser that has written it, -1: has no values yet.
    level: int = -1

    @property
    def owner(self) -> nn.Module:
        return self.places[0][0]

    def full_copy(self, with_values: bool) -> Tensor:
        """Return a full-size host copy: the present values if asked for and there are
        any (a collective for DTensors that every rank of their mesh makes), else NaN or
        a marker. Of what lies on other pipeline stages there are none."""
        # Real values may be read at any time, sharded ones by all ranks together.
        has_values = (self.level >= 0 or not self.delayed) and not is_absent(
            self.tensor
        )
        if has_values and (with_values or not _can_be_nan(self.tensor.dtype)):
            source = (
                self.tensor.full_tensor()
                if isinstance(self.tensor, DTensor)
                else self.tensor
            )
            full = source.detach().to("cpu", copy=True)
        else:
            # What is left of it afterwards shows what was not initialised.
            full = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
            full.fill_(_marker(self.tensor.dtype))
        if self.is_parameter:
            full = nn.Parameter(full, requires_grad=self.tensor.requires_grad)
        # Initialisers look at what was noted on the parameter.
        _copy_attributes(self.tensor, full)
        return full

    def store(self, full: Tensor, level: int, device: torch.device) -> None:
        """Copy this rank's part of `full` into the tensor, which gets its storage on
        `device` the first time."""
        # The first store of a slot: until then the tensor is on the meta device.
        if self.level < 0:
            self._give_storage(device)
        self.level = level
        if isinstance(self.tensor, DTensor):
            self.tensor.to_local().copy_(own_part(full, self.tensor))
        else:
            self.tensor.copy_(full)

    def _give_storage(self, device: torch.device) -> None:
        # The registered object stays the same one where torch allows it, so that ties,
        # FSDP's references and all others hold. Assigning `.data` instead would be
        # lost, because FSDP keeps its own view.
        old, new = self.tensor, self.tensor
        # Only this rank's part gets storage.
        if isinstance(old, DTensor):
            local = torch.empty_like(old.to_local(), device=device)
            new = DTensor.from_local(
                local,
                old.device_mesh,
                old.placements,
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
        else:
            new = torch.empty_like(old, device=device)
        if self.is_parameter:
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        _copy_attributes(old, new)
        if weakref.getweakrefs(old):
            # Recurrent layers keep weak references, which swap_tensors refuses;
            # `Module.to()` renews them
            self.tensor = new
            for module, name in self.places:
                setattr(module, name, new)
        else:
            torch.utils.swap_tensors(old, new)


def holds_values(full: Tensor) -> bool:
    """Return whether something has filled a lent copy. True only if no element of a
    floating-point tensor is NaN; for other dtypes, if any element differs from the
    marker."""
    if full.numel() == 0:
        return True
    if not _can_be_nan(full.dtype):
        return bool((full != _marker(full.dtype)).any())
    # A finite sum proves it without a mask as large as the tensor
    half = full.dtype in (torch.float16, torch.bfloat16)
    total = full.detach().sum(dtype=torch.float32 if half else None)
    return bool(torch.isfinite(total)) or not bool(torch.isnan(full).any())


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor, or the local part of a DTensor, has no storage."""
    return local_part(tensor).is_meta


def _can_be_nan(dtype: torch.dtype) -> bool:
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def _marker(dtype: torch.dtype) -> float | int:
    if _can_be_nan(dtype):
        return float("nan")
    # A value that no initialiser is likely to fill in.
    return (
        0
        if dtype == torch.bool or dtype.is_floating_point
        else torch.iinfo(dtype).max - 1
    )


def _copy_attributes(source: Tensor, target: Tensor) -> None:
    target.__dict__.update(
        {name: value for name, value in source.__dict__.items() if name != "_is_param"}
    )


@contextlib.contextmanager
def classes_before_sharding(model: nn.Module) -> Iterator[None]:
    """Give modules their own class back for a while.

    `fully_shard` turns an Embedding into an FSDPEmbedding. Initialisers that ask for
    the exact class or its name must see the model as it was written, else the weights
    would depend on the wrap plan.
    """
    sharded = [
        (module, type(module))
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    # The user's class is the first in the order of bases that is none of FSDP2's.
    try:
        for module, sharded_class in sharded:
            module.__class__ = next(
                c for c in sharded_class.__mro__ if not issubclass(c, FSDPModule)
            )  # type: ignore[assignment]
        yield
    finally:
        for module, sharded_class in sharded:
            module.__class__ = sharded_class  # type: ignore[assignment]
