"""Optimizer states on the host, and the step with them (ZeRO-Offload, arXiv 2101.06840,
section 4).

An :class:`OnHost` is an optimizer over device parameters that steps copies of them in
host memory: the states, and float32 masters of half precision parameters, never exist
on the device. A step goes through the parameters chunk by chunk, so that on CUDA the
copies run beside the arithmetic: while the host steps one chunk, gradients and
parameters of the next come in on one stream and the results of the one before go out on
another.

To the outside the optimizer is what it was: its groups hold the device parameters (for
clipping, schedulers, scalers), its state is keyed by them and sharded like them (for
checkpoints), its hooks run once per step.

With ``optimizer_shard="world"`` the device parameters are views of this rank's part of
them (:mod:`smp_core.sharding.optimizer.shards`), and nothing here is different.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.sharding.operands import take_part_of_gradient
from smp_core.sharding.optimizer.kinds import STEP_SHARDS, derive, host_kernels
from smp_core.sharding.optimizer.shards import MASTER, local_of, mesh_of
from smp_core.torch_facts import (
    StepsOnHost,
    note_host_master,
    parameters_of,
    streams,
    take_loaded,
)

logger = logging.getLogger("smp")

CHUNK_BYTES = 2**28


class _HostParameter:
    """A parameter's copy on the host: what is stepped (float32 if the parameter is half
    precision, else its dtype)."""

    def __init__(self, parameter: Tensor, pinned: bool) -> None:
        # Half precision is stepped in float32, and copied back in its own dtype.
        low = parameter.dtype in (torch.float16, torch.bfloat16)
        self.parameter = parameter
        self.stepped = torch.empty_like(
            parameter,
            dtype=torch.float32 if low else None,
            device="cpu",
            pin_memory=pinned,
        ).requires_grad_()
        self.gradient = torch.empty_like(
            self.stepped, device="cpu", pin_memory=pinned, requires_grad=False
        )
        # The parameter as the device has it. Kept where it is not the stepped value
        # itself.
        self.low = (
            torch.empty_like(
                parameter, device="cpu", pin_memory=pinned, requires_grad=False
            )
            if low
            else None
        )
        # Whether no value has been taken yet: then the device's is the first.
        self.fresh = True
        # Checkpoints and averages look for the finer weights under the parameter.
        if low:
            note_host_master(parameter, self.stepped)
        held = [self.stepped, self.gradient, *([] if self.low is None else [self.low])]
        sizes = [local_of(each).numel() * each.element_size() for each in held]
        self.n_bytes = sum(sizes)
        # Pinned blocks are rounded up by the allocator.
        self.host_bytes = (
            sum(map(streams.pinned_bytes, sizes)) if pinned else self.n_bytes
        )
        """What they take from the system."""

    def fetch(self) -> None:
        """Copy gradient and parameter from the device. The parameter comes each time:
        loading or averaging weights writes to the device."""
        target = self.stepped if self.low is None else self.low
        local_of(target).copy_(local_of(self.parameter), non_blocking=True)
        # No gradient: the optimizer is to pass over the parameter, as it would on the
        # device.
        if self.parameter.grad is None:
            self.stepped.grad = None
        else:
            local_of(self.gradient).copy_(
                local_of(self.parameter.grad), non_blocking=True
            )
            self.stepped.grad = self.gradient

    def take_over(self) -> None:
        """Take the device's value, once the copies have arrived, where it is not the
        rounded master: it is the newer one."""
        if self.low is None:
            return
        # A master that was loaded is newer than both values.
        master, low = local_of(self.stepped), local_of(self.low)
        loaded = take_loaded(self.parameter)
        if loaded is not None:
            master.copy_(loaded)
            self.fresh = False
        if self.fresh:
            master.copy_(low)
        else:
            # Where the device's value is not the rounded master it was written since,
            # and wins.
            torch.where(master.to(low.dtype) == low, master, low.float(), out=master)
        self.fresh = False

    def put_back(self) -> None:
        if self.low is not None:
            local_of(self.low).copy_(local_of(self.stepped))
        local_of(self.parameter).copy_(
            local_of(self.stepped if self.low is None else self.low), non_blocking=True
        )


class HostOptimizer:
    """The part on the host of an optimizer over device parameters.

    Args:
        optimizer: over device parameters, sharded or plain.
        kind: the class whose ``step`` is to run.
        device: where the parameters are.
    """

    def __init__(
        self, optimizer: Optimizer, kind: type[Optimizer], device: torch.device
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._chunk_bytes = CHUNK_BYTES
        self._pinned = streams.pins(device)
        behind = streams.run_behind(device)
        # Two streams, so that copies in both directions run beside each other.
        self._out: Any = (
            torch.get_device_module(device).Stream(device) if behind else None
        )
        self._in: Any = (
            torch.get_device_module(device).Stream(device) if behind else None
        )
        self._hosted: dict[Tensor, _HostParameter] = {}
        # Chunks of optimizers that look at several parameters together, or count steps
        # per group, would change them.
        self._in_chunks = kind in STEP_SHARDS
        # An optimizer of the same class, whose groups are made for each chunk.
        self._stepper = kind.__new__(kind)
        # As if unpickled, which is torch's own way to make one without parameters.
        self._stepper.__setstate__(
            {**_attributes(optimizer), "state": defaultdict(dict), "param_groups": []}
        )

    @property
    def n_bytes(self) -> int:
        """Host memory of masters, gradients and states, as taken from the system."""
        # "step" is a counter, and a master is counted with its parameter below.
        held = 0
        for entry in self._stepper.state.values():
            state = {
                key: value
                for key, value in entry.items()
                if key not in ("step", MASTER)
            }
            held += sum(
                local_of(v).numel() * v.element_size()
                for _, v in iterate_tensors(state)
            )
        return held + sum(hosted.host_bytes for hosted in self._hosted.values())

    @torch.no_grad()
    def step(self) -> None:
        """Step every parameter that has a gradient."""
        with_gradient = [
            p for p in parameters_of(self._optimizer) if p.grad is not None
        ]
        # One that the user assigned whole becomes this rank's part.
        for parameter in with_gradient:
            take_part_of_gradient(parameter)
        chunks = list(self._chunks(with_gradient))
        # A class of the user's may count steps, whether there is a gradient or not.
        if not chunks and not self._in_chunks:
            chunks = [[]]
        # Gradients and weights have to be complete on the device before they are
        # copied.
        if self._out is not None:
            self._out.wait_stream(
                torch.get_device_module(self._device).current_stream(self._device)
            )
        # Phase by phase: while a chunk is stepped the next one arrives.
        arrivals: list[Any] = [self._fetch(chunk) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                arrivals.append(self._fetch(chunks[number + 1]))
            # The host reads what has arrived, so it waits for the copy itself.
            if arrivals[number] is not None:
                arrivals[number].synchronize()
            self._step_chunk(chunk)
            self._put_back(chunk)
        # What runs next on the device reads the new weights.
        if self._in is not None:
            torch.get_device_module(self._device).current_stream(
                self._device
            ).wait_stream(self._in)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        return torch.get_device_module(self._device).stream(stream)  # type: ignore[no-any-return]

    def _chunks(self, parameters: list[Tensor]) -> Iterator[list[_HostParameter]]:
        # Copies in host memory are made when a parameter has its first gradient.
        chunk: list[_HostParameter] = []
        for parameter in parameters:
            if parameter not in self._hosted:
                self._hosted[parameter] = _HostParameter(parameter, self._pinned)
            hosted = self._hosted[parameter]
            # One chunk for everything, where the optimizer looks at parameters
            # together.
            if (
                chunk
                and self._in_chunks
                and sum(each.n_bytes for each in chunk) + hosted.n_bytes
                > self._chunk_bytes
            ):
                yield chunk
                chunk = []
            chunk.append(hosted)
        if chunk:
            yield chunk

    def _fetch(self, chunk: list[_HostParameter]) -> Any:
        """Start the copies of a chunk. Returns the event after which they are there;
        None: they are."""
        with self._on(self._out):
            for hosted in chunk:
                hosted.fetch()
        return None if self._out is None else self._out.record_event()

    def _step_chunk(self, chunk: list[_HostParameter]) -> None:
        # Values first: the states below belong to these.
        by_parameter = {hosted.parameter: hosted for hosted in chunk}
        for hosted in chunk:
            self._adopt_state(hosted)
            hosted.take_over()
        # The user's options in the groups of now, with host copies as their parameters.
        groups = [
            (group, made)
            for group in self._optimizer.param_groups
            for made in self._groups(group, by_parameter)
        ]
        self._stepper.param_groups = [made for _, made in groups]
        vars(self._stepper).update(_attributes(self._optimizer))
        # Hooks of all optimizers run around the user's step, and not for each chunk.
        step: Any = type(self._stepper).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        step(self._stepper)
        # What the class counts, or a group keeps (a rate that it adapts), goes back to
        # the user's optimizer.
        vars(self._optimizer).update(_attributes(self._stepper))
        for group, made in groups:
            group.update(
                {key: made[key] for key in made if key not in (*_REPLACED, "params")}
            )
        # Checkpoints find the states under the device parameter, and the master among
        # them.
        for hosted in chunk:
            entry = self._stepper.state[hosted.stepped]
            if hosted.low is not None and MASTER not in entry:
                entry[MASTER] = hosted.stepped.detach()
            self._optimizer.state[hosted.parameter] = entry

    def _groups(
        self, group: Mapping[str, Any], chosen: Mapping[Tensor, _HostParameter]
    ) -> Iterator[dict[str, Any]]:
        """Yield the group with the host copies of its chosen parameters, plain ones and
        those of each mesh apart: a fused kernel takes one kind. SGD's takes momentum
        from all or from none, so those that it steps for the first time are apart
        too."""
        hosted = [
            chosen[parameter].stepped
            for parameter in group["params"]
            if parameter in chosen
        ]
        # One that counts its steps counts those without a gradient, too.
        if not hosted and not self._in_chunks:
            yield {**group, "params": []}
        # One group for each mesh, with kernels that take its kind of tensors.
        for mesh in dict.fromkeys(map(mesh_of, hosted)):
            members = [each for each in hosted if mesh_of(each) == mesh]
            kernels = host_kernels(group, members, type(self._stepper))
            begun = [
                bool(self._stepper.state.get(each)) or not kernels.get("fused")
                for each in members
            ]
            for apart in (True, False):
                part = [
                    each
                    for each, has_begun in zip(members, begun, strict=True)
                    if has_begun == apart
                ]
                if part:
                    yield {**group, "params": part, **kernels}

    def _adopt_state(self, hosted: _HostParameter) -> None:
        """Replace our state by one that was put there from outside (a loaded
        checkpoint), or remove it if that was taken away."""
        mine = self._stepper.state.get(hosted.stepped)
        given = self._optimizer.state.get(hosted.parameter)
        # Neither loaded nor taken away: the state is the one that was stepped.
        if given is mine:
            return
        if not given:
            self._stepper.state.pop(hosted.stepped, None)
            return
        entry = {
            key: _in_order_of(hosted.stepped, value)
            for key, value in to_host(given).items()
        }
        if MASTER in entry and hosted.low is not None:
            # Rounded, where a checkpoint has masters in its states alone.
            take_loaded(hosted.parameter)
            local_of(hosted.stepped).copy_(local_of(entry[MASTER]))
            entry[MASTER] = hosted.stepped.detach()
            hosted.fresh = False
        self._stepper.state[hosted.stepped] = entry

    def _put_back(self, chunk: list[_HostParameter]) -> None:
        with self._on(self._in):
            for hosted in chunk:
                hosted.put_back()


def _in_order_of(parameter: Tensor, value: Any) -> Any:
    """Return a state in the parameter's order in memory, which loaded ones may not
    have: fused kernels walk both."""
    if (
        not isinstance(value, Tensor)
        or value.shape != parameter.shape
        or value.stride() == parameter.stride()
    ):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(
        value
    )


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer's class keeps besides states and groups. What an
    instance got since (hooks, the step that a scheduler patched, our own) stays
    outside."""
    apart = ("state", "param_groups", "step")
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in apart and "hooks" not in key and not key.startswith("_smp_")
    }


# What a group asks of the device's kernels, and what the host's get instead.
_REPLACED = ("fused", "foreach", "capturable")


def to_host(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state with its tensors in host memory."""
    return {
        key: map_tensors(value, lambda tensor: tensor.to("cpu"))
        for key, value in entry.items()
    }


class OnHost(StepsOnHost):
    """Methods of an optimizer whose step runs on the host. ``_smp_host`` is its part
    there."""

    __slots__ = ()
    _smp_on_device: Any

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._smp_host.step()
        return loss

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Load states into host memory; torch's own method would cast them to the
        parameters' dtype and bring them to the device."""
        # Options of the groups are torch's to load; states stay out of its hands.
        self._smp_on_device.load_state_dict(self, {**state_dict, "state": {}})
        numbers = chain.from_iterable(
            group["params"] for group in state_dict["param_groups"]
        )
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = to_host(state_dict["state"][number])

    def host_bytes(self: Any) -> int:
        return self._smp_host.n_bytes  # type: ignore[no-any-return]

    # Its hooks run around it, as around every optimizer's.
    step = Optimizer.profile_hook_step(step)
    step.hooked = True  # type: ignore[attr-defined]


def step_on_host(optimizer: Optimizer, device: torch.device) -> None:
    """Make an optimizer over parameters on ``device`` an :class:`OnHost`.

    Raises:
        ValueError: the optimizer evaluates the loss several times in a step.
    """
    kind: Any = type(optimizer)
    if issubclass(kind, torch.optim.LBFGS):
        raise ValueError(
            "state_offload='optimizer' steps once per gradient, LBFGS evaluates the loss several times in a step; "
            "write state_offload='all' or use another optimizer"
        )
    optimizer._smp_host = HostOptimizer(optimizer, kind, device)  # type: ignore[attr-defined]
    # GradScaler would hand its scale to a fused optimizer, whose kernel is not the one
    # that runs. There is no public name for what it looks at,
    # _step_supports_amp_scaling.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    _take_step_from_the_class(optimizer)
    optimizer.__class__ = _on_host(kind)


@functools.cache
def _on_host(kind: Any) -> Any:
    return derive(kind, OnHost, "_smp_on_device")


def _take_step_from_the_class(optimizer: Optimizer) -> None:
    """Let ``step`` on the instance call that of its present class. A scheduler that was
    made before has put the earlier class's step there, wrapped, which hides what an
    :class:`OnHost` does; ``_opt_called`` and ``_wrapped_by_lr_sched`` are what
    schedulers look at, and have no public names."""
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        return
    del optimizer.step
    this = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = this()
        assert optimizer is not None
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
