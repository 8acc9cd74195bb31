"""The activation offloading: inputs of checkpointed modules wait in host memory for
backward.

A checkpointed module keeps nothing but its inputs, and a pair of saved-tensor hooks
around its call receives them. At most H modules' inputs are on the device at once (H is
``activation_loading_horizon`` of SageMaker SMP).

    forward     The inputs of a module arrive. The oldest inputs on the device are freed there, and the next oldest
                start their copy to the host, which may take a module's compute time. The inputs of the last H modules
                stay on the device: backward begins with them.
    backward    A module takes its inputs, and starts the copies to the device of the H - 1 modules that come next. With
                H = 1 no copy starts early, and each is waited for.

Copies to the host and copies to the device have a CUDA stream each. Device memory
belongs to the compute stream: the compute stream waits for a copy to the host before
memory is freed, and a copy to the device waits for the work that used the memory
before. Without CUDA the same copies run synchronously.

Not offloaded are parameters and tensor subclasses (fp8 weights, DTensors), tensors
without a gradient (masks, positions), small tensors, and an input that a second module
takes too (an encoder's output in every block of a decoder).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# _subclasses: torch's documentation of fake tensors has it.
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from smp_core.activations.host_pool import HostBuffer, HostPool
from smp_core.plan import CheckpointedModule
from smp_core.torch_facts import streams, uncompiled

# A fake tensor stands for a plain one, in dry runs.
_PLAIN = (Tensor, FakeTensor)


class _Parked:
    """An offloaded input: on the device, in a host buffer, or both. Autograd's graph
    keeps it alive."""

    def __init__(self, tensor: Tensor, pool: HostPool) -> None:
        # Autograd checks saved tensors for changes in place, by _version, but not the
        # tensors that hooks pack.
        self.version = tensor._version
        self.device_tensor: Tensor | None = tensor
        # What the tensor looked like, so that it can be made again.
        self.size, self.stride, self.dtype, self.device = (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        self.n_bytes = tensor.numel() * tensor.element_size()
        # Its memory on the host, and when copies to and from it are over.
        self.buffer: HostBuffer | None = None
        self.copied_out: Any = None
        self.copied_in: Any = None
        self._pool = pool

    def on_host(self) -> Tensor:
        assert self.buffer is not None
        return torch.as_strided(
            self.buffer.bytes[: self.n_bytes].view(self.dtype), self.size, self.stride
        )

    def check_unchanged(self) -> None:
        if (
            self.device_tensor is not None
            and self.device_tensor._version != self.version
        ):
            raise RuntimeError(
                "activations.offload: the input of a checkpointed module was changed in place before backward had "
                "it; recomputation would start from other values. Write the operation without the underscore, or leave "
                "the module out of activations.checkpoint"
            )

    def __del__(self) -> None:
        # Fetched ahead and not used: the copy must not write into memory given back.
        if self.copied_in is not None:
            self.copied_in.synchronize()
        if self.buffer is not None:
            self._pool.give(self.buffer)


class Offloader:
    """The offloader of the inputs of one model's checkpointed modules.

    Args:
        device: where the model computes.
        horizon: the number of modules whose inputs may be on the device at once.
        pool: host buffers.
        min_bytes: smaller tensors stay on the device.
    """

    def __init__(
        self, device: torch.device, horizon: int, pool: HostPool, *, min_bytes: int
    ) -> None:
        self.device = device
        self.horizon = horizon
        self.pool = pool
        self.min_bytes = min_bytes
        behind = streams.run_behind(device)
        self._module: Any = torch.get_device_module(device)
        # A stream for each direction, so that copies run beside each other and the
        # pass.
        self._out = self._module.Stream(device) if behind else None
        self._in = self._module.Stream(device) if behind else None
        self._parked: list[weakref.ref[_Parked]] = []  # in forward's order
        self._seen = WeakIdKeyDictionary()
        self.bytes_out = 0
        """The bytes copied to the host so far."""
        self.bytes_in = 0
        """The bytes copied back to the device so far."""

    def on_device(self) -> list[int]:
        """List the bytes of each offloaded input that is on the device now, in
        forward's order."""
        return [
            parked.n_bytes
            for parked in self._alive()
            if parked.device_tensor is not None
        ]

    def on_host(self) -> list[int]:
        """List the bytes of each offloaded input that is on the host and not on the
        device."""
        return [
            parked.n_bytes for parked in self._alive() if parked.device_tensor is None
        ]

    def _alive(self) -> list[_Parked]:
        found = [parked for each in self._parked if (parked := each()) is not None]
        if len(found) < len(self._parked):
            self._parked = [weakref.ref(parked) for parked in found]
        return found

    @contextlib.contextmanager
    def inputs_parked(self, given: Iterable[Any]) -> Iterator[None]:
        """Offload the tensors ``given`` to a module that autograd saves inside the
        block."""
        # Compared by memory: autograd saves tensors of its own.
        wanted = [tensor for tensor in given if self._may_leave(tensor)]
        parked: dict[int, _Parked] = {}

        def pack(tensor: Tensor) -> Tensor | _Parked:
            number = next(
                (i for i, each in enumerate(wanted) if _same_memory(each, tensor)), None
            )
            if number is None:
                return tensor
            if number not in parked:
                parked[number] = self._park(wanted[number].detach())
            return parked[number]

        try:
            with saved_tensors_hooks(pack, self._unpack):
                yield
        finally:  # autograd keeps the hooks, and these would keep the tensors
            parked.clear()
            wanted.clear()

    def _may_leave(self, given: Any) -> bool:
        """Return whether a module's argument may be offloaded; see this module's
        docstring."""
        # Plain tensors with a gradient, on the device.
        if (
            type(given) not in _PLAIN
            or not given.requires_grad
            or given.device.type != self.device.type
        ):
            return False
        if given.numel() * given.element_size() < self.min_bytes or not _is_dense(
            given
        ):
            return False
        # A second module takes it, too: it has to stay for that one.
        first_use = given not in self._seen
        self._seen[given] = True
        return first_use

    @torch.no_grad()
    def _park(self, tensor: Tensor) -> _Parked:
        """Offload the oldest inputs, so that with ``tensor`` at most ``horizon`` are on
        the device."""
        parked = _Parked(tensor, self.pool)
        staying = [each for each in self._alive() if each.device_tensor is not None]
        # Its copy to the host began when the one before left; the compute stream waits
        # for it.
        while len(staying) >= self.horizon:
            leaving = staying.pop(0)
            self._copy_out(leaving)
            leaving.check_unchanged()
            if leaving.copied_out is not None:
                self._module.current_stream(self.device).wait_event(leaving.copied_out)
            leaving.device_tensor = None
        # The copy of the next to leave runs while its successors compute.
        self._parked.append(weakref.ref(parked))
        staying.append(parked)
        if len(staying) == self.horizon:
            self._copy_out(staying[0])
        return parked

    def _copy_out(self, parked: _Parked) -> None:
        """Start the copy to the host, unless the host has the input already."""
        if parked.buffer is not None:
            return
        assert parked.device_tensor is not None
        parked.check_unchanged()
        parked.buffer = self.pool.take(parked.n_bytes)
        self.bytes_out += parked.n_bytes
        # Without streams the copy is over at once.
        if self._out is None:
            parked.on_host().copy_(parked.device_tensor)
            return
        # Only what was computed may be copied, and only when the buffer's last reader
        # is done.
        self._out.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._out):
            if parked.buffer.free_after is not None:
                self._out.wait_event(parked.buffer.free_after)
            parked.on_host().copy_(parked.device_tensor, non_blocking=True)
            parked.copied_out = parked.buffer.free_after = self._out.record_event()

    def _copy_in(self, parked: _Parked) -> None:
        """Start the copy to the device, unless the device has the input already."""
        if parked.device_tensor is not None:
            return
        assert parked.buffer is not None
        # Memory of the compute stream, which may hold other data until now.
        parked.device_tensor = torch.empty_strided(
            parked.size, parked.stride, dtype=parked.dtype, device=parked.device
        )
        self.bytes_in += parked.n_bytes
        if self._in is None:
            parked.device_tensor.copy_(parked.on_host())
            parked.version = parked.device_tensor._version
            return
        self._in.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._in):
            self._in.wait_event(parked.copied_out)
            parked.device_tensor.copy_(parked.on_host(), non_blocking=True)
            parked.copied_in = parked.buffer.free_after = self._in.record_event()
        parked.version = parked.device_tensor._version

    @torch.no_grad()
    def _unpack(self, packed: Tensor | _Parked) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # The input itself.
        packed.check_unchanged()
        self._copy_in(packed)
        tensor = packed.device_tensor
        assert tensor is not None
        if packed.copied_in is not None:
            self._module.current_stream(self.device).wait_event(packed.copied_in)
            packed.copied_in = None
        if packed.buffer is not None:
            # Its memory may be used again as soon as it is given up.
            if packed.copied_out is not None:
                self._module.current_stream(self.device).wait_event(packed.copied_out)
            # Backward has it now; the host keeps it for a second backward.
            packed.device_tensor = None
        # The inputs that backward takes next.
        in_order = self._alive()
        here = next(i for i, each in enumerate(in_order) if each is packed)
        following = in_order[max(here - self.horizon + 1, 0) : here]
        for each in reversed(following):
            self._copy_in(each)
        return tensor


def park_inputs(
    model: nn.Module, chosen: CheckpointedModule, offloader: Offloader
) -> None:
    """Let ``offloader`` take the inputs of a checkpointed module. In place, before
    ``fully_shard``.

    The hooks are around ``torch.compile``, not inside, so that they see the tensors
    that a compiled module saves.
    """
    module: Any = model.get_submodule(chosen.name)
    # What torch.compile returns has its forward as an attribute of the instance.
    if uncompiled(module) is not module:
        module.forward = _watched(module.forward, offloader, skip=0)
        return
    kind: type[nn.Module] = type(module)
    module.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "forward": _watched(kind.forward, offloader, skip=1),
            "__module__": kind.__module__,
        },
    )


def _watched(
    forward: Callable[..., Any], offloader: Offloader, skip: int
) -> Callable[..., Any]:
    """Wrap a module's forward so that ``offloader`` takes its inputs.

    Args:
        skip: the number of leading arguments that are no inputs (``self``).
    """

    @torch.compiler.disable(recursive=False)
    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offloader.inputs_parked([*args[skip:], *kwargs.values()]):
            return forward(*args, **kwargs)

    return watched


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill one stretch of memory, in any order of
    dims."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
