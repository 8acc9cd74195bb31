"""Optimizer states over all replicas: ``optimizer_shard="world"`` (ZeRO-1 with
``shard_degree=1``, arXiv 1910.02054).

Parameters and gradients stay sharded over the partition group. The flat sums of a
unit's gradients are reduce-scattered across replicas instead of all-reduced; every rank
holds a float32 master of its part, as one 1-D tensor for each parameter that reaches
into it, and the user's optimizer steps those in its own parameter groups. Then the
updated parts are all-gathered in the parameters' dtype. The same bytes as the
all-reduce (fewer for half precision parameters), and 12 of the 16 to 20 bytes per
parameter are divided by the world.

With ``state_offload="optimizer"`` the states and masters of the part live in host
memory (:mod:`smp_core.sharding.optimizer.host`). What the optimizer's groups hold are
then views of the part of the parameters themselves, which take no memory; their
gradients have the masters' dtype all the same.

An optimizer that looks at one element at a time cannot tell the difference. One that
looks across a tensor (Adafactor's factored moments, Muon, a trust ratio) can, and is
refused (:mod:`smp_core.sharding.optimizer.kinds`).

Where parameters are gathered in half precision (``param_dtype``) and stored in float32,
they are stored in what they are gathered in from then on: computing sees the same
numbers, the float32 masters are the weights that are saved.

To the outside the optimizer looks as if it stepped the parameters: ``state_dict()``
puts states together over replicas (collective), with one more entry where masters are
finer than parameters, and ``load_state_dict`` takes the own part.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_core.checkpoint import (
    Path,
    iterate_tensors,
    map_tensors,
    own_part,
    shard_like,
    stepped_parameters,
)
from smp_core.comm import Pending, ReplicaHop
from smp_core.sharding.gradients.parameter_hooks import hooks_of
from smp_core.torch_facts import (
    is_absent,
    load_host_master,
    local_part,
    model_parameter,
    parameters_of,
    stands_for,
    with_host_master,
)

_worlds: weakref.WeakSet[WorldSharding] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    """Look at the optimizers that step from now on."""
    register_optimizer_step_pre_hook(_refuse_unprepared)


def _refuse_unprepared(optimizer: Optimizer, *_: Any) -> None:
    """Refuse an optimizer that would step nothing: it has the parameters themselves,
    which receive no gradients."""
    if not hasattr(optimizer, "_smp_homes") and any(
        world.has_master(parameter)
        for world in _worlds
        for parameter in parameters_of(optimizer)
    ):
        raise ValueError(
            f"{type(optimizer).__name__} was not prepared, and with optimizer_shard='world' parameters have no "
            "gradients that it could step; write parallel.prepare_optimizer(optimizer) (in Lightning return it from "
            "configure_optimizers, under Accelerate prepare it with the model), or optimizer_shard='shard'"
        )


MASTER = "smp_master"
"""Entry of an optimizer state: the float32 values of a half precision parameter, so
that checkpoints have them."""


class FlatShard:
    """Parameters whose gradients are summed as one flat tensor, of which each rank of
    the hop's group steps a part.

    Args:
        names, parameters: in the order in which they lie in the flat tensor; DTensors
            or plain.
        sizes: elements of each in the flat tensor: its local ones and padding.
        on_host: the optimizer makes and keeps masters in host memory; ``masters`` are
            views of parameters.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        sizes: Sequence[int],
        hop: ReplicaHop,
        on_host: bool = False,
    ) -> None:
        self.names, self.parameters, self._hop = tuple(names), tuple(parameters), hop
        self.on_host = on_host
        # Phase 1: where each parameter begins in the flat tensor, and which stretch of
        # it this rank steps.
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.n = sum(sizes)
        self._start, self.size = hop.own_part(self.n)
        # Phase 2: a master for every parameter, of no elements where none are in the
        # stretch.
        self.masters = tuple(self._make_master(i) for i in range(len(self.parameters)))
        # Flags as they were when parameter and master last agreed.
        self._trained = [parameter.requires_grad for parameter in self.parameters]
        self.holds_weights = False
        """Whether parameters were stored as finely as masters until they were made, and
        are what is computed with now: to the outside the masters are the weights."""
        self._sum: Tensor | None = None
        self._pending: Pending | None = None

    def _own(self, i: int) -> tuple[slice, slice]:
        """Return the part of parameter i that is this rank's: in the parameter's local
        elements, and in this rank's part."""
        offset, n = self._offsets[i], local_of(self.parameters[i]).numel()
        # The stretch may begin or end in the middle of a parameter, or miss it: then
        # both slices are empty.
        first = min(max(self._start, offset), offset + n)
        last = max(min(self._start + self.size, offset + n), first)
        return slice(first - offset, last - offset), slice(
            first - self._start, last - self._start
        )

    def _own_values(self, i: int) -> Tensor:
        return local_of(self.parameters[i]).reshape(-1)[self._own(i)[0]]

    def _make_master(self, i: int) -> nn.Parameter:
        parameter, own = self.parameters[i], self._own_values(i)
        dtype = master_dtype(parameter)
        # On the host the optimizer makes its own copies: here a view is enough.
        master = nn.Parameter(own if self.on_host else own.to(dtype).clone())
        master.grad_dtype = dtype
        # By this note others find the model's parameter behind a master.
        stands_for(master, parameter)
        return master

    @property
    def master_bytes(self) -> int:
        """Bytes of masters on the device."""
        return 0 if self.on_host else sum(each.nbytes for each in self.masters)

    def gradients(self) -> list[Tensor]:
        """List this rank's sum and the masters' gradients."""
        held = [self._sum, *(master.grad for master in self.masters)]
        return [each for each in held if each is not None]

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Take up what was written into parameters from outside (a loaded checkpoint);
        elsewhere masters, which may be finer, are kept."""
        every_own = [self._own_values(i) for i in range(len(self.masters))]
        if self.on_host:
            for master, own in zip(self.masters, every_own, strict=True):
                master.data = own  # where the parameter is now
            return
        # Equal dtypes are copied in one kernel. Otherwise a master that rounds to the
        # parameter is kept: it is the same value, with more digits.
        pairs = list(zip(self.masters, every_own, strict=True))
        _copy_each([pair for pair in pairs if pair[0].dtype == pair[1].dtype])
        for master, own in pairs:
            if master.dtype != own.dtype:
                same = master.to(own.dtype) == own
                master.copy_(torch.where(same, master, own.to(master.dtype)))

    def follow_flags(self) -> None:
        """Let ``requires_grad`` be one flag of a parameter and its master, whichever it
        was set on since: code that walks the optimizer's groups (Lightning's
        ``toggle_optimizer``) sets it on masters."""
        for i, (parameter, master) in enumerate(
            zip(self.parameters, self.masters, strict=True)
        ):
            # A flag that differs from the last one that both had was set by a user.
            set_on_master = master.requires_grad != self._trained[i]
            self._trained[i] = (master if set_on_master else parameter).requires_grad
            if parameter.requires_grad != self._trained[i]:
                parameter.requires_grad_(self._trained[i])
            if master.requires_grad != self._trained[i]:
                master.requires_grad_(self._trained[i])

    # Gradients

    def send(self, flat: Tensor, key: str) -> None:
        """Start summing ``flat`` [n] over replicas."""
        # Only this rank's stretch of the sum arrives here.
        self._sum = flat.new_empty(self.size)
        self._pending = self._hop.scatter(flat, self._sum, key)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def set_gradients(
        self,
        divisor: int,
        seen: Sequence[bool] | None,
        own: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Set the masters' ``.grad`` from the sums, divided, of parameters that
        received a gradient on some rank (None: all); it is added to what an earlier
        window of the same step left there.

        Args:
            own: what parameters with hooks have a gradient of besides, by place.
        """
        self.wait()
        if self._sum is None:
            return
        # What this rank steps, already the mean over all ranks.
        mean = self._sum / divisor
        changed = self._change_by_hooks(mean, seen, own or {})
        for i, master in enumerate(self.masters):
            # A parameter without any gradient in the job stays without one, as in one
            # process.
            if seen is None or seen[i]:
                gradient = changed.get(i, mean[self._own(i)[1]]).to(
                    master_dtype(self.parameters[i])
                )
                master.grad = (
                    gradient if master.grad is None else master.grad + gradient
                )
        self._sum = None

    def _change_by_hooks(
        self, mean: Tensor, seen: Sequence[bool] | None, own: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return this rank's parts of gradients that hooks of parameters have seen, by
        place. Collective."""
        # Hooks have to see whole gradients: their parts are gathered, for these
        # parameters only.
        hooks = {
            i: hooks_of(parameter)
            for i, parameter in enumerate(self.parameters)
            if seen is None or seen[i]
        }
        parts = {
            i: mean[self._own(i)[1]]
            for i, of_parameter in hooks.items()
            if of_parameter or i in own
        }
        changed = {}
        for i, gradient in self.put_together(parts).items():
            gradient = gradient + own[i] if i in own else gradient
            of_parameter = hooks[i]
            if of_parameter is not None:
                gradient = of_parameter.change(gradient)
            changed[i] = self.own_of(i, gradient).to(mean.device)
        return changed

    def take_gradients(self) -> None:
        """Move gradients that autograd left in the parameters' own ``.grad``, equal on
        all replicas, to the masters."""
        for i, (parameter, master) in enumerate(
            zip(self.parameters, self.masters, strict=True)
        ):
            # Every replica has the same gradient, of which each takes its part.
            if parameter.grad is not None:
                gradient = self.own_of(i, parameter.grad).to(master_dtype(parameter))
                master.grad = (
                    gradient if master.grad is None else master.grad + gradient
                )
                parameter.grad = None

    def forget(self) -> None:
        """Drop sums and gradients."""
        self.wait()
        self._sum = None
        for master in self.masters:
            master.grad = None

    # Weights and states

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Bring every rank's part of the masters into all ranks' parameters, in the
        parameters' dtype. Collective."""
        # Phase 1: the part in the dtype in which it is sent; parameters of a shard have
        # one dtype.
        dtype = self.parameters[0].dtype
        part = torch.zeros(self.size, dtype=dtype, device=self.masters[0].device)
        _copy_each(
            [(part[self._own(i)[1]], master) for i, master in enumerate(self.masters)]
        )
        # Phase 2: all parts, then each parameter's local elements without the padding.
        whole = self._hop.gather(part, self.n)
        locals_ = [local_of(parameter) for parameter in self.parameters]
        ends = [
            offset + local.numel()
            for offset, local in zip(self._offsets, locals_, strict=True)
        ]
        arrived = [
            whole[offset:end] for offset, end in zip(self._offsets, ends, strict=True)
        ]
        _copy_each(
            [
                (local, new.view(local.shape))
                for local, new in zip(locals_, arrived, strict=True)
            ]
        )

    @torch.no_grad()
    def put_together(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return tensors like parameters from every rank's parts of them, by place of
        the parameter. Collective."""
        if not parts:
            return {}
        # Zeros stand for the parameters that are not asked for.
        dtype = next(iter(parts.values())).dtype
        part = torch.zeros(self.size, dtype=dtype, device=self.masters[0].device)
        for i, value in parts.items():
            part[self._own(i)[1]] = value.to(dtype)
        whole, found = self._hop.gather(part, self.n), {}
        for i in parts:
            parameter = self.parameters[i]
            shape = local_of(parameter).shape
            local = whole[self._offsets[i] : self._offsets[i] + shape.numel()].view(
                shape
            )
            found[i] = like(parameter, local, on_host=self.on_host)
        return found

    def own_slice(self, i: int) -> slice:
        """Return the place of this rank's part in the elements of parameter i's
        shard."""
        return self._own(i)[0]

    def own_of(self, i: int, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor like parameter i."""
        return local_of(value).reshape(-1)[self._own(i)[0]].clone()


class WorldSharding:
    """All flat shards of a model, and the optimizers that step them."""

    def __init__(self, shards: Sequence[FlatShard]) -> None:
        self.shards = tuple(shards)
        # By identity, since tensors compare by value.
        self._place = {
            id(parameter): (shard, i)
            for shard in self.shards
            for i, parameter in enumerate(shard.parameters)
        }
        _watch_steps()
        _worlds.add(self)

    def has_master(self, parameter: Tensor) -> bool:
        return id(parameter) in self._place

    def stepped(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return what an optimizer steps in the place of parameters: their masters,
        where they have one."""
        found = []
        for parameter in parameters:
            place = self._place.get(id(parameter))
            found.append(parameter if place is None else place[0].masters[place[1]])
        return found

    def own_slice(self, parameter: Tensor) -> slice:
        """Return the place of this rank's part in the elements of the shard of a
        parameter, which has a master."""
        shard, i = self._place[id(parameter)]
        return shard.own_slice(i)

    def part_of_state(self, parameter: Tensor, entry: Any) -> Any:
        """Return this rank's part of what an optimizer state has for a parameter, which
        has a master."""
        place = self._place.get(id(parameter))
        if place is None:
            return entry
        shard, i = place

        def own(value: Tensor) -> Tensor:
            # Counters, and tensors of other shapes, belong to all of the parameter.
            return (
                shard.own_of(i, value)
                if value.ndim and value.shape == parameter.shape
                else value
            )

        return map_tensors(entry, own)

    def follow_parameters(self) -> None:
        """Take up what was written into parameters from outside."""
        for shard in self.shards:
            shard.follow_parameters()

    def follow_flags(self) -> None:
        for shard in self.shards:
            shard.follow_flags()

    def after_step(self, optimizer: Optimizer) -> None:
        """Bring what the optimizer has stepped into the parameters. Collective."""
        # A shard is sent only if this optimizer steps it: others may step the rest.
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        for shard in self.shards:
            if any(id(master) in stepped for master in shard.masters):
                shard.update_parameters()

    def full_state(
        self, optimizer: Optimizer, numbered: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a numbered state dict with tensors like parameters instead of parts.
        Collective."""
        # Phase 1: of each shard, the parameters that have a state, and its parts by
        # entry.
        state = dict(numbered["state"])
        places = self._numbers(optimizer)
        for shard in self.shards:
            here = {
                i: number
                for number, (owner, i) in places.items()
                if owner is shard and number in state
            }
            parts: dict[Path, dict[int, Tensor]] = {}
            for i, number in here.items():
                for path, value in iterate_tensors(state[number]):
                    if value.ndim:  # the others are counters and the like
                        parts.setdefault(path, {})[i] = value
            # Phase 2: one collective for each entry, in an order that is the same on
            # all ranks.
            whole: dict[int, Tensor] = {}
            for path in sorted(parts, key=str):
                for i, value in shard.put_together(parts[path]).items():
                    whole[id(parts[path][i])] = value

            def in_place_of(part: Tensor, whole: dict[int, Tensor] = whole) -> Tensor:
                return whole.get(id(part), part)

            # Phase 3: the parts in their states give way to whole tensors.
            for number in here.values():
                state[number] = map_tensors(state[number], in_place_of)
            # Phase 4: masters that are finer than their parameters go along as one more
            # entry.
            finer = {
                i: shard.masters[i].detach()
                for i in here
                if not shard.holds_weights  # those are saved as weights
                and shard.masters[i].dtype != shard.parameters[i].dtype
            }
            for i, value in shard.put_together(finer).items():
                state[here[i]] = {**state[here[i]], MASTER: value}
        return {**numbered, "state": state}

    @torch.no_grad()
    def own_state(
        self, optimizer: Optimizer, numbered: dict[str, Any]
    ) -> dict[str, Any]:
        """Do the reverse of :meth:`full_state`, but for masters."""
        places, state = self._numbers(optimizer), {}
        # Numbers without a place are of parameters that have no master (0-d ones, say).
        for number, entry in numbered["state"].items():
            if number not in places:
                state[number] = entry
                continue
            shard, i = places[number]
            state[number] = dict(self.part_of_state(shard.parameters[i], entry))
        return {**numbered, "state": state}

    def weights(self) -> dict[int, Tensor]:
        """Return masters that are the weights, also those on the host, put together
        like their parameters, by the parameter's id. Collective."""
        found = {}
        for shard in self.shards:
            parts: dict[int, Tensor] = {}
            # Weights were stored as finely as masters until these were made.
            if shard.holds_weights:
                parts = {i: master.detach() for i, master in enumerate(shard.masters)}
            # On the host the optimizer's own float32 copies are the finer weights.
            elif shard.on_host and shard.parameters[0].dtype != master_dtype(
                shard.parameters[0]
            ):
                parts = {
                    i: with_host_master(master)
                    for i, master in enumerate(shard.masters)
                }
            found.update(
                {
                    id(shard.parameters[i]): value
                    for i, value in shard.put_together(parts).items()
                }
            )
        return found

    @torch.no_grad()
    def take_weights(self, weights: Mapping[int, Tensor]) -> None:
        """Copy weights as :meth:`weights` returns them into masters and parameters."""
        for shard in self.shards:
            # The parameter gets the value rounded, its master all of it.
            for i, parameter in enumerate(shard.parameters):
                if id(parameter) in weights:
                    local_of(parameter).copy_(local_of(weights[id(parameter)]))
                    own = shard.own_of(i, weights[id(parameter)])
                    if not shard.on_host:
                        shard.masters[i].copy_(own)
                    elif own.dtype != parameter.dtype:
                        load_host_master(shard.masters[i], own)

    def _numbers(self, optimizer: Optimizer) -> dict[int, tuple[FlatShard, int]]:
        """Return torch's number of a parameter -> its place."""
        stepped = parameters_of(optimizer)
        return {
            number: self._place[id(model_parameter(parameter))]
            for number, parameter in enumerate(stepped)
            if id(model_parameter(parameter)) in self._place
        }


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy every (target, source). torch._foreach_copy_ is one kernel for all of them
    and has no public name."""
    # Many parameters have no element in this rank's stretch: their masters are empty.
    filled = [
        (target.detach(), source.detach()) for target, source in pairs if target.numel()
    ]
    if filled:
        targets, sources = map(list, zip(*filled, strict=True))
        torch._foreach_copy_(targets, sources)


def master_dtype(parameter: Tensor) -> torch.dtype:
    return (
        torch.float32
        if parameter.dtype in (torch.float16, torch.bfloat16)
        else parameter.dtype
    )


def local_of(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach()


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """Return the mesh that a parameter is sharded over; None: a plain tensor."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def like(parameter: Tensor, local: Tensor, on_host: bool = False) -> Tensor:
    """Return a copy of a local part as a DTensor sharded like ``parameter``, or as a
    plain tensor where that is one."""
    # Not from_local, which would bring the local part to the mesh's device.
    made = torch.empty_like(
        parameter,
        dtype=local.dtype,
        device="cpu" if on_host else None,
        requires_grad=False,
    )
    local_of(made).copy_(local)
    return made


def sharded_states(
    optimizer: Optimizer, numbered: Mapping[str, Any], on_host: bool
) -> dict[Any, Any]:
    """Return the states of a numbered state dict, in which unsharded tensors become
    this rank's parts: one process may have saved them, or a rank gathered them.

    Args:
        on_host: the optimizer keeps its states in host memory.
    """
    states = dict(numbered["state"])
    saved = [number for group in numbered["param_groups"] for number in group["params"]]
    # Torch itself refuses groups of other lengths when it loads the rest.
    for number, parameter in zip(saved, stepped_parameters(optimizer), strict=False):
        if number in states:
            states[number] = sharded_state(parameter, states[number], on_host)
    return states


def sharded_state(parameter: Tensor, entry: Any, on_host: bool = False) -> Any:
    """Return a parameter's state, in which unsharded tensors become this rank's
    parts."""
    part = functools.partial(_own_state, parameter, on_host=on_host)
    return map_tensors(entry, part)


def _own_state(parameter: Tensor, value: Tensor, *, on_host: bool) -> Tensor:
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.shape or is_absent(parameter):
        return shard_like(parameter, value)
    return like(parameter, own_part(value, parameter), on_host=on_host)
