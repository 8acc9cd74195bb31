"""What stands in for the parts of a training that need values, other ranks or a device, where fake tensors run: for dry
runs (:mod:`smp_core.dry_run.step`) and traces of split layers (:mod:`smp_core.dry_run.split_trace`). Each lasts as long
as its context.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily  # _subclasses: torch's documentation has it
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
    """Let tensor ranks be told to hold the same, which is a question of values, and to draw the same random numbers:
    without values it makes no difference. Blocks are taken to compute the same with a part of their tokens, and models
    over the ranks that share a sequence."""
    holds_alike, own_random = TensorAxis.holds_alike, randomness.own_random
    stand_around_blocks = SplitModel.stand_around_blocks

    def untried(self: SplitModel, in_stages: bool = False, without_values: bool = False) -> None:
        stand_around_blocks(self, in_stages, without_values=True)

    watching, of_call = Trial.watching, Trial.of_call
    Trial.watching = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign,assignment,return-value]
    Trial.of_call = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    SplitModel.stand_around_blocks = untried  # type: ignore[method-assign]
    TensorAxis.holds_alike = lambda *_: True  # type: ignore[method-assign]
    randomness.own_random = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        Trial.watching, Trial.of_call = watching, of_call  # type: ignore[method-assign]
        SplitModel.stand_around_blocks = stand_around_blocks  # type: ignore[method-assign]
        TensorAxis.holds_alike = holds_alike  # type: ignore[method-assign]
        randomness.own_random = own_random


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Let meshes that are made on the way be made of real tensors: their ranks are values."""
    holders = SmpMesh.holders
    concatenate = DeviceMesh._concatenate  # of fully_shard on a model that is split already; it looks at ranks

    def real_holders(self: SmpMesh) -> list[DeviceMesh]:
        with unset_fake_temporarily():
            return holders(self)

    def real_concatenate(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(*args, **kwargs)

    SmpMesh.holders = real_holders  # type: ignore[method-assign]
    DeviceMesh._concatenate = staticmethod(real_concatenate)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SmpMesh.holders = holders  # type: ignore[method-assign]
        DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def trials_apart() -> Iterator[None]:
    """Let DTensor try operations on whole shapes in a fake mode of its own, by which allocations tell them from a
    step's: torch 2.11 tries them in the mode that is active. ``_sharding_prop`` asks for that mode; no public name
    does."""
    detect = _sharding_prop.detect_fake_mode
    _sharding_prop.detect_fake_mode = lambda *_: None
    try:
        yield
    finally:
        _sharding_prop.detect_fake_mode = detect


@contextlib.contextmanager
def devices_attention() -> Iterator[None]:
    """Let attention over split sequences take the kernel that is there on all accelerators, not the CPU's."""
    kernels_for = kernels.kernels_for
    kernels.kernels_for = lambda *_: (FLASH,)
    try:
        yield
    finally:
        kernels.kernels_for = kernels_for


class _Done:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let what runs behind the computation run at once, in this thread: fake tensors and modes are a thread's own."""
    submit = Background.submit

    def run_now(self: Background, run: Callable[[], None]) -> Pending:
        with torch.no_grad():
            run()
        return _Done()

    Background.submit = run_now  # type: ignore[method-assign]
    try:
        yield
    finally:
        Background.submit = submit  # type: ignore[method-assign]


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let ranks be told to agree: whether they do is a question of values, and here is one rank."""
    divergence = Told.divergence
    Told.divergence = lambda self: None  # type: ignore[method-assign]
    try:
        with alike():
            yield
    finally:
        Told.divergence = divergence  # type: ignore[method-assign]


@contextlib.contextmanager
def told_by_stages(formats: list[Format]) -> Iterator[None]:
    """Let a pipeline stage be told that others begin the same batch, and the form of all activations between blocks."""
    begin, draw, encoded, decoded = SameBatches.begin, StepSeeds.draw, Format.encoded, Format.decoded
    is_received, is_new = tied.is_received, Messages.is_new

    def noting(self: Format, device: torch.device) -> torch.Tensor:
        formats.append(self)
        return encoded(self, device)

    SameBatches.begin = lambda *_: ((), 0)  # type: ignore[method-assign]
    StepSeeds.draw = lambda _: 0  # type: ignore[method-assign,assignment,misc]
    Format.encoded = noting  # type: ignore[method-assign]
    Format.decoded = staticmethod(lambda _: formats[0])  # type: ignore[method-assign,assignment]
    tied.is_received = lambda _: True  # type: ignore[assignment,misc]
    Messages.is_new = lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        SameBatches.begin, StepSeeds.draw = begin, draw  # type: ignore[method-assign]
        Format.encoded, Format.decoded = encoded, decoded  # type: ignore[method-assign]
        tied.is_received, Messages.is_new = is_received, is_new  # type: ignore[method-assign]


@contextlib.contextmanager
def noted(allocated: dict[int, str]) -> Iterator[None]:
    """Note buffers that communication objects and the pool of host memory allocate."""
    allocate, take = CommObject.allocate, HostPool.take

    def note(tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        allocated[id(storage)] = kind
        weakref.finalize(storage, allocated.pop, id(storage), None)  # another storage may get its address

    def noting(self: CommObject, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kind = allocated[LATEST] = "gathered" if "Gather" in type(self).__name__ else "other"
        made = allocate(self, size, dtype=dtype, device=device)
        del allocated[LATEST]
        note(made, kind)
        return made

    def taken(self: HostPool, n_bytes: int) -> Any:
        buffer = take(self, n_bytes)
        note(buffer.bytes, "host")
        return buffer

    CommObject.allocate, HostPool.take = noting, taken  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommObject.allocate, HostPool.take = allocate, take  # type: ignore[method-assign]
