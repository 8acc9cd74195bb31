"""Stand-ins for what a training needs values, other ranks or a device for, where fake
tensors run: in dry runs (:mod:`smp_core.dry_run.step`) and traces of split layers
(:mod:`smp_core.dry_run.split_trace`). Each lasts as long as its context.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# _subclasses: torch's documentation has it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _sharding_prop

from smp_core.activations import HostPool
from smp_core.cluster import SmpMesh
from smp_core.comm import Background, CommObject, Pending
from smp_core.context_parallel import FLASH, Trial, kernels
from smp_core.pipeline import Format, Messages, SameBatches, StepSeeds, tied
from smp_core.sharding.gradients import Told
from smp_core.tensor_parallel import SplitModel, TensorAxis, randomness

LATEST = -1
"""Stands for the storage that is being allocated; no storage's address."""


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Answer what only values could: tensor ranks hold the same, and draw the same
    random numbers; blocks compute the same with a part of their tokens, and models over
    the ranks that share a sequence."""
    # What depends on values, or on other ranks, has one answer here.
    stand_around_blocks = SplitModel.stand_around_blocks

    def untried(
        self: SplitModel, in_stages: bool = False, without_values: bool = False
    ) -> None:
        stand_around_blocks(self, in_stages, without_values=True)

    with (
        patch.object(Trial, "watching", lambda *_: contextlib.nullcontext()),
        patch.object(Trial, "of_call", lambda *_, **__: None),
        patch.object(SplitModel, "stand_around_blocks", untried),
        patch.object(TensorAxis, "holds_alike", lambda *_: True),
        patch.object(randomness, "own_random", lambda *_: contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Let meshes that are made on the way be made of real tensors: their ranks are
    values. ``_concatenate`` is what fully_shard calls on a model that is split already;
    it looks at ranks, and has no public name."""
    holders = SmpMesh.holders
    concatenate = DeviceMesh._concatenate

    def real_holders(self: SmpMesh) -> list[DeviceMesh]:
        with unset_fake_temporarily():
            return holders(self)

    def real_concatenate(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(*args, **kwargs)

    with (
        patch.object(SmpMesh, "holders", real_holders),
        patch.object(DeviceMesh, "_concatenate", staticmethod(real_concatenate)),
    ):
        yield


def trials_apart() -> AbstractContextManager[Any]:
    """Let DTensor try operations on whole shapes in a fake mode of its own, by which
    allocations tell them from a step's: torch 2.11 tries them in the mode that is
    active. ``_sharding_prop`` asks for that mode; no public name does."""
    # The fake mode that is active is a step's own.
    return patch.object(_sharding_prop, "detect_fake_mode", lambda *_: None)


def devices_attention() -> AbstractContextManager[Any]:
    """Let attention over split sequences take the kernel that is there on all
    accelerators, not the CPU's."""
    return patch.object(kernels, "kernels_for", lambda *_: (FLASH,))


class _Done:
    def wait(self) -> None:
        pass


def at_once() -> AbstractContextManager[Any]:
    """Let what runs behind the computation run at once, in this thread: fake tensors
    and modes are a thread's own."""

    def run_now(self: Background, run: Callable[[], None]) -> Pending:
        with torch.no_grad():
            run()
        return _Done()

    return patch.object(Background, "submit", run_now)


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let ranks agree: only values could show that they do not, and here is one
    rank."""
    with patch.object(Told, "divergence", lambda _: None), alike():
        yield


@contextlib.contextmanager
def told_by_stages(formats: list[Format]) -> Iterator[None]:
    """Answer for the other pipeline stages: they begin the same batch, and activations
    between blocks have the form that the first stage noted."""
    encoded = Format.encoded

    def noting(self: Format, device: torch.device) -> Tensor:
        formats.append(self)
        return encoded(self, device)

    with (
        patch.object(SameBatches, "begin", lambda *_: ((), 0)),
        patch.object(StepSeeds, "draw", lambda _: 0),
        patch.object(Format, "encoded", noting),
        patch.object(Format, "decoded", staticmethod(lambda _: formats[0])),
        patch.object(tied, "is_received", lambda _: True),
        patch.object(Messages, "is_new", lambda *_: False),
    ):
        yield


@contextlib.contextmanager
def noted(allocated: dict[int, str]) -> Iterator[None]:
    """Note buffers that communication objects and the pool of host memory allocate."""
    allocate, take = CommObject.allocate, HostPool.take

    # An address is a number that another storage may get; so each is forgotten when it
    # goes.
    def note(tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        allocated[id(storage)] = kind
        # Another storage may get its address.
        weakref.finalize(storage, allocated.pop, id(storage), None)

    def noting(
        self: CommObject,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        # Gathers are told apart from other buffers by the object that allocates them.
        kind = allocated[LATEST] = (
            "gathered" if "Gather" in type(self).__name__ else "other"
        )
        made = allocate(self, size, dtype=dtype, device=device)
        del allocated[LATEST]
        note(made, kind)
        return made

    def taken(self: HostPool, n_bytes: int) -> Any:
        buffer = take(self, n_bytes)
        note(buffer.bytes, "host")
        return buffer

    with (
        patch.object(CommObject, "allocate", noting),
        patch.object(HostPool, "take", taken),
    ):
        yield
