"""Streams, events and the caching allocator of an accelerator, played on a CPU by a
process of its own.

:mod:`tests.core.streamed_cases` runs the real code on one rank of torch's fake process
group, which takes the way it takes with NCCL. FSDP2, the background and the meter take
their streams and events from the device's module, which is exchanged here for one that
records; a dispatch mode sees which storages every operator reads and writes, and the
host's questions to the device.

The rules: a stream knows what it was made to wait for (vector clocks). Work on a
storage has to know the last write to it, and a write all reads before. A storage that
nobody holds any more goes back to the stream it was taken on, and the next one that is
taken there may be the same memory: whatever was done with it has to be known to that
stream, or its stream was told to the allocator (``record_stream``). Work on a view
counts as work on the bytes from its first element to its last. Every communicator is a
stream of its own, as NCCL's are. Numbers are meaningless.

Memory that was asked for pinned is the host's, and so is what the host computes from it
alone: that is done at once, and has to know of all copies that may still read or write
what it touches. Its own allocator waits for copies.

``torch.multiprocessing.reductions.StorageWeakRef`` and ``_cdata`` are torch's only way
to see a storage end.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree  # the public one comes with optree

# Torch's only hook below autograd.
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.streamed_operators import (
    asks,
    counts,
    group_given,
    is_asynchronous,
    place,
    written_by,
)

WORLD, RANKS_PER_NODE = 4, 2

# Streams


class Stream:
    """What it has been given is numbered; ``known`` says up to which number it waits
    for each stream."""

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.name = name or f"stream {id(self) % 9973}"
        self.known: Counter[Stream] = Counter()
        self.device = torch.device("cpu")

    def learn(self, known: Counter[Stream]) -> None:
        self.known |= known

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.known)

    def wait_event(self, event: Event) -> None:
        self.learn(event.known)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        sanitizer.host_waits("stream.synchronize", self.known)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.known: Counter[Stream] = Counter()

    def record(self, stream: Stream | None = None) -> Event:
        self.known = Counter((stream or current_stream()).known)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).learn(self.known)

    def synchronize(self) -> None:
        sanitizer.host_waits("event.synchronize", self.known)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class GenericEvent(Event):
    """``torch.Event``."""


class GenericStream:
    """What ``torch.accelerator.current_stream()`` returns of a stream. An event of the
    device's module keeps what it has recorded in a place of its own, and to wait for
    one here is to wait for nothing, without a word."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def wait_stream(self, other: Stream) -> None:
        self.stream.wait_stream(other)

    def wait_event(self, event: Event) -> None:
        if isinstance(event, GenericEvent):
            self.stream.wait_event(event)

    def record_event(self) -> Event:
        return GenericEvent().record(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


default, host = Stream(name="default"), Stream(name="host")
launched: Counter[Stream] = Counter()
"""How much each stream was given so far."""
_current = [default]


def current_stream(_: Any = None) -> Stream:
    return _current[-1]


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()


# Memory


@dataclass(frozen=True)
class Use:
    """Work on bytes ``first`` to ``last`` of a storage."""

    stream: Stream
    number: int
    what: str
    first: int
    last: int
    writes: bool

    def is_known_to(self, stream: Stream) -> bool:
        return (
            stream is self.stream
            or max(stream.known[self.stream], host.known[self.stream]) >= self.number
        )

    def meets(self, other: Use) -> bool:
        return (
            self.first < other.last
            and other.first < self.last
            and (self.writes or other.writes)
        )

    def stands_for(self, earlier: Use) -> bool:
        """Whether who knows this one knows the earlier one, wherever that matters."""
        covers = (
            self.first <= earlier.first
            and earlier.last <= self.last
            and self.writes >= earlier.writes
        )
        return covers and earlier.is_known_to(self.stream)

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name}"


@dataclass
class Block:
    """The memory of one storage."""

    ref: StorageWeakRef
    n_bytes: int
    taken_on: Stream
    where: str
    uses: list[Use] = field(default_factory=list)
    told: set[Stream] = field(default_factory=set)
    on_host: bool = False


class Sanitizer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        """How often the host has waited, by line."""
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self._of_groups: dict[str, Stream] = {}
        self.last_async: Event | None = None

    def begin(self) -> None:
        """Forget the memory of the case before: looking through all of it takes longer
        with every case."""
        self._blocks, self._free = {}, []

    def host_waits(self, what: str, known: Counter[Stream]) -> None:
        host.learn(known)
        if where := place():
            self.asked[f"{what} at {where}"] += 1

    def tell(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``record_stream``."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None:
            block.told.add(stream)

    def _collect(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.ref.expired():
                gone = self._blocks.pop(key)
                if not gone.on_host:
                    self._free.append(gone)

    def _block(self, tensor: torch.Tensor, stream: Stream) -> Block:
        storage = tensor.untyped_storage()
        block, n_bytes = self._blocks.get(storage._cdata), storage.nbytes()
        if block is not None and block.n_bytes and not n_bytes:  # freed by resize_
            self._free.append(block)
        if block is None or block.n_bytes != n_bytes:
            block = self._blocks[storage._cdata] = Block(
                StorageWeakRef(storage), n_bytes, stream, place()
            )
            if n_bytes:
                self._take(block)
        return block

    def _take(self, block: Block) -> None:
        """Any free piece of the stream's that is large enough may be the one."""
        fitting = [
            old
            for old in self._free
            if old.taken_on is block.taken_on and old.n_bytes >= block.n_bytes
        ]
        for old in fitting:
            for use in old.uses:
                if use.stream not in old.told and not use.is_known_to(block.taken_on):
                    self.found[
                        f"memory of [{old.where}], of {old.taken_on.name}, is used again by [{block.where}] while "
                        f"{use} may still run"
                    ] += 1
        self._free = [old for old in self._free if old not in fitting]

    def _use(
        self, tensor: torch.Tensor, stream: Stream, what: str, writes: bool
    ) -> None:
        block, size = self._block(tensor, stream), tensor.element_size()
        first = tensor.storage_offset() * size
        spans = (
            (n - 1) * stride
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        use = Use(
            stream,
            stream.known[stream],
            f"{what} [{place()}]",
            first,
            first + (1 + sum(spans)) * size,
            writes,
        )
        for other in block.uses:
            if other.meets(use) and not other.is_known_to(stream):
                kind = "" if other.writes else ", a write,"
                self.found[f"{use}{kind} does not wait for {other}"] += 1
        block.uses = [
            *(other for other in block.uses if not use.stands_for(other)),
            use,
        ]

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a new tensor's memory the host's."""
        block = self._block(tensor, host)
        block.on_host, block.uses = True, []
        return tensor

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.on_host and not block.ref.expired()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            any(issubclass(kind, FakeTensor) for kind in types)
            or detect_fake_mode() is not None
        ):
            return func(*args, **kwargs)  # DTensor asks for shapes
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor's own operators come by
        self._collect()
        name = str(func)
        stream = caller = current_stream()
        caller.learn(host.known)
        if name.startswith("c10d.") and is_asynchronous(func, args, kwargs):
            group = next(
                found for arg in args if (found := group_given(arg)) is not None
            )
            stream = self._of_groups.setdefault(group, Stream(name=f"group {group}"))
            stream.wait_stream(caller)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if counts(leaf)]
        on_host = bool(given) and all(map(self.is_on_host, given))
        if not on_host and asks(name, given):
            self.host_waits(name.split(".")[1], caller.known)
        if on_host:
            stream = caller = host
        stream.known[stream] += 1
        launched[stream] = stream.known[stream]
        written = {id(leaf) for leaf in written_by(func, name, args, kwargs)}
        known = {leaf.untyped_storage()._cdata for leaf in given}
        made = func(*args, **kwargs)
        # What only makes a view touches nothing.
        if not (func.is_view or name.startswith(("aten.detach", "aten._unsafe_view"))):
            for tensor in given:
                self._use(tensor, stream, name, id(tensor) in written)
            for leaf in pytree.tree_leaves(made):
                if counts(leaf) and leaf.untyped_storage()._cdata not in known:
                    self._use(leaf, stream, name, True)
                    self._block(leaf, stream).on_host = on_host
        if stream is not caller:
            self.last_async = stream.record_event()
        return made


# The device


class _Work:
    """What an asynchronous collective returns: waiting makes the present stream
    wait."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self, *_: Any) -> bool:
        current_stream().wait_event(self._event)
        return True


def _asynchronous(collective: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        sanitizer.last_async = None
        work = collective(*args, async_op=async_op, **kwargs)
        return (
            _Work(sanitizer.last_async)
            if async_op and sanitizer.last_async is not None
            else work
        )

    return called


def _asynchronous_method(collective: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        sanitizer.last_async = None
        work = collective(*args)
        return work if sanitizer.last_async is None else _Work(sanitizer.last_async)

    return called


def _asking(
    method: Callable[..., Any],
    what: str,
    is_asked: Callable[..., bool] = lambda *_, **__: True,
) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_asked(*args, **kwargs):
            sanitizer.host_waits(what, current_stream().known)
        return method(*args, **kwargs)

    return called


def _to_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: torch.Tensor) -> torch.Tensor:
        if sanitizer.is_on_host(self):
            return self
        sanitizer.host_waits("cpu", current_stream().known)
        return sanitizer.pin(method(self).clone())

    return called


def _pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = factory(*args, **kwargs)
        if pin_memory:
            sanitizer.pin(made.to_local() if hasattr(made, "to_local") else made)
        return made

    return called


def play_a_device() -> None:
    """To be called before the core is imported, which takes functions of
    torch.distributed as they are then."""
    device: Any = torch.cpu
    device.Stream, device.Event, device.current_stream = Stream, Event, current_stream
    device.stream = device.StreamContext = on_stream
    whole_torch: Any = torch
    whole_torch.Event = GenericEvent
    whole_torch.accelerator.current_stream = lambda *_: GenericStream(current_stream())
    whole_torch.accelerator.synchronize = lambda *_: sanitizer.host_waits(
        "synchronize", launched
    )
    for name in (
        "all_reduce",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
    ):
        if hasattr(dist, name):
            setattr(dist, name, _asynchronous(getattr(dist, name)))
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # torch < 2.13
        if not hasattr(dist, "all_gather_single"):
            setattr(dist, name, _asynchronous(getattr(dist, name)))
    for name in ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
        setattr(
            dist.ProcessGroup,
            name,
            _asynchronous_method(getattr(dist.ProcessGroup, name)),
        )
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: sanitizer.tell(
        self, getattr(stream, "stream", stream)
    )
    tensor.pin_memory = lambda self: self.clone()
    whole_torch.empty, whole_torch.empty_like = (
        _pinning(torch.empty),
        _pinning(torch.empty_like),
    )
    tensor.tolist = _asking(
        tensor.tolist,
        "tolist",
        lambda self: self.numel() > 0 and not sanitizer.is_on_host(self),
    )
    tensor.cpu = _to_host(tensor.cpu)
    # The copy from memory that is not pinned waits.
    whole_torch.tensor = _asking(
        torch.tensor,
        "tensor(device=)",
        lambda *_, **given: given.get("device") is not None,
    )
    from smp_core.tensor_parallel.split_model import SplitModel
    from smp_core.torch_facts import streams

    streams.run_behind = streams.pins = lambda device: True
    split: Any = SplitModel
    around = split.stand_around_blocks
    split.stand_around_blocks = lambda self, in_stages=False: around(
        self, in_stages, without_values=True
    )


sanitizer = Sanitizer()


# Cases
