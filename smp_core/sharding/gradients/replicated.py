"""Gradients of parameters that every rank holds whole: 0-d ones, those tied across
units, and all of them with ``shard_degree=1``, where partitioning would only copy.

Inside a window each rank adds up its own micro-batches; at the window's end the sums
are added up over all ranks, one collective per group of parameters, and divided once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smp_core.cluster import SmpMesh
from smp_core.comm import Pending, Route
from smp_core.sharding.gradients.parameter_hooks import ParameterHooks, hooks_of
from smp_core.sharding.optimizer.shards import FlatShard


@dataclass(eq=False)
class ReplicatedGradients:
    """Partial sums of plain parameters' gradients in the present window.

    Attributes:
        route: over all ranks whose gradients are added up.
        reduce_dtype: what sums are sent in; None: the gradients' own dtype.
        on_backward: called whenever a backward pass reaches one of the parameters.
        mesh: the ranks over which gradients are complete, for hooks of parameters.
        parameters: by name.
        reached: names of which this rank has a gradient in the window.
    """

    route: Route
    reduce_dtype: torch.dtype | None
    on_backward: Callable[[], None]
    mesh: SmpMesh
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    # What is sent together: lists of names, in the order in which they came.
    _groups: list[list[str]] = field(default_factory=list)
    _shards: dict[str, FlatShard] = field(default_factory=dict)
    # Of the pass that runs, and of those before.
    _this_pass: set[str] = field(default_factory=set)
    _was_trainable: set[str] = field(default_factory=set)
    # Partial sums of earlier micro-batches, while .grad is empty.
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _in_flight: list[tuple[list[str], torch.Tensor, Pending | None]] = field(
        default_factory=list
    )
    # .grad of earlier closed passes, of parameters with hooks.
    _closed: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def add(self, group: Mapping[str, nn.Parameter]) -> None:
        """Add parameters by name, to be reduced together."""
        self._groups.append(list(group))
        self.parameters.update(group)
        for name, parameter in group.items():
            # Others can have no gradient, and no hooks.
            if parameter.is_floating_point() or parameter.is_complex():
                ParameterHooks(
                    parameter,
                    self.mesh,
                    before=self._before(name),
                    after=self._note(name),
                )

    def end_of_pass(self) -> None:
        """Take what the pass left in ``.grad`` into the partial sums.

        A gradient closed earlier in the same optimizer step is in there too. It is
        equal on all ranks, so it comes back unchanged from the mean over them.
        """
        for name in self._this_pass:
            parameter = self.parameters[name]
            assert parameter.grad is not None
            # Earlier micro-batches are in the sum; the first one simply moves there.
            if name in self._sums:
                # Half precision would lose what is small against the sum so far.
                self._sums[name] = self._sums[name].to(
                    self.reduce_dtype or parameter.dtype
                )
                self._sums[name] += parameter.grad
            else:
                self._sums[name] = parameter.grad
            parameter.grad = None
        self.reached |= self._this_pass
        self._this_pass.clear()
        # A parameter that is frozen later goes on being sent, as on the other ranks.
        self._was_trainable |= {
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }

    def shard_over_world(self, on_host: bool) -> list[FlatShard]:
        """Scatter sums over all ranks from now on, for masters to be stepped; not of
        0-d parameters, and of what is trained only later: those stay replicated and
        every rank steps them.

        Args:
            on_host: see :class:`smp_core.sharding.optimizer.shards.FlatShard`.
        """
        # One flat tensor for a group and dtype, like the sums of units.
        if not self._shards:
            for number, names_of_group in enumerate(self._groups):
                for dtype, names in self._by_dtype(names_of_group).items():
                    parameters = [
                        self.parameters[name]
                        for name in names
                        if self.parameters[name].ndim
                    ]
                    # 0-d parameters cannot be cut, so every rank keeps those.
                    if parameters:
                        names = [name for name in names if self.parameters[name].ndim]
                        sizes = [parameter.numel() for parameter in parameters]
                        self._shards[f"whole {number} {dtype}"] = FlatShard(
                            names, parameters, sizes, self.route.hop, on_host
                        )
        return list(self._shards.values())

    def _by_dtype(self, group: Iterable[str]) -> dict[torch.dtype, list[str]]:
        found: dict[torch.dtype, list[str]] = {}
        for name in group:
            if self._takes_part(name):
                found.setdefault(self.parameters[name].dtype, []).append(name)
        return found

    def send(self) -> None:
        """Start adding up over all ranks. Every rank sends every parameter that takes
        part, whether it received a gradient or not."""
        # Hooks are to see the gradient of this pass alone.
        for name in self.taking_part():
            self._set_aside(name)
        if not self.route.adds_up:
            return
        # What masters are stepped with is scattered: each rank gets its part of the
        # sum.
        held: set[str] = set()
        for key, shard in self._shards.items():
            held.update(shard.names)
            flat = torch.cat(
                [self._contribution(name).reshape(-1) for name in shard.names]
            )
            shard.send(flat.to(self.reduce_dtype or flat.dtype), key)
        # Everything else is added up on all ranks, in one message for each dtype.
        for number, group in enumerate(self._groups):
            for dtype, names in self._by_dtype(
                name for name in group if name not in held
            ).items():
                flat = torch.cat(
                    [self._contribution(name).reshape(-1) for name in names]
                )
                flat = flat.to(self.reduce_dtype or dtype)
                work = self.route.hop(
                    flat, f"whole {number} {dtype}" + (", rest" if held else "")
                )
                self._in_flight.append((names, flat, work))

    def wait(self) -> None:
        """Wait for what is in flight."""
        for shard in self._shards.values():
            shard.wait()
        for _, _, work in self._in_flight:
            if work is not None:
                work.wait()

    def finish(self, seen: Mapping[str, bool] | None) -> None:
        """Set ``.grad`` of the parameters that received a gradient on some rank
        (``seen``; None: all of them). Collective where parameters have hooks."""
        self.wait()
        for shard in self._shards.values():
            # What was frozen since the shard was made is in its sum, as zeros.
            reached = [
                self._takes_part(name) if seen is None else seen[name]
                for name in shard.names
            ]
            shard.set_gradients(self.route.divisor, reached)
            # The masters have the gradients now.
            for name in shard.names:
                self._sums.pop(name, None)
        # The flat sum is cut into the parameters again.
        for names, flat, _ in self._in_flight:
            flat /= self.route.divisor
            for name, part in zip(
                names,
                flat.split([self.parameters[n].numel() for n in names]),
                strict=True,
            ):
                self._sums[name] = part.view_as(self.parameters[name])
        # What no rank has received keeps its .grad.
        for name, gradient in self._sums.items():
            if seen is None or seen[name]:
                self._set_gradient(name, gradient)
        # Of those that received none in this pass.
        for name, closed in self._closed.items():
            self.parameters[name].grad = closed
        self.forget()

    def _set_gradient(self, name: str, gradient: torch.Tensor) -> None:
        parameter = self.parameters[name]
        hooks = hooks_of(parameter)
        if hooks:
            gradient = hooks.change(gradient)
        # Hooks have seen one pass; the earlier ones of the step are added behind them.
        closed = self._closed.pop(name, None)
        if closed is not None:
            gradient = gradient + closed
        parameter.grad = _laid_out_like(parameter, gradient)

    def _set_aside(self, name: str) -> None:
        """Set the ``.grad`` of earlier passes of a parameter with hooks aside: they are
        to see that of one pass."""
        parameter = self.parameters[name]
        if name not in self._closed and hooks_of(parameter):
            self._closed[name], parameter.grad = parameter.grad, None

    def drop(self, dropped: set[int], set_to_none: bool) -> None:
        """Drop the partial sums of parameters with these ids, or
        (``set_to_none=False``) leave them at zero."""
        for name, parameter in self.parameters.items():
            if id(parameter) not in dropped:
                continue
            if set_to_none:
                self._sums.pop(name, None)
                self.reached.discard(name)
                self._closed.pop(name, None)
            elif name in self._sums:
                self._sums[name].zero_()

    def forget(self) -> None:
        self._closed.clear()
        self._sums.clear()
        self._in_flight.clear()
        self._this_pass.clear()
        self._was_trainable.clear()
        self.reached.clear()

    def taking_part(self) -> Iterable[str]:
        """Return the parameters that are trainable, or were in an earlier micro-batch
        of the window."""
        return (name for name in self.parameters if self._takes_part(name))

    def _takes_part(self, name: str) -> bool:
        return self.parameters[name].requires_grad or name in self._was_trainable

    def _contribution(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        # What an earlier window of the same step closed counts, if no sum has taken it
        # in.
        if name in self._sums:
            return self._sums[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    # Autograd holds these hooks where Python's garbage collector does not look: a
    # strong reference from there would keep the model, its mesh and the process groups
    # for good.

    def _before(self, name: str) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)

        def before(_: torch.Tensor) -> None:
            if (this := owner()) is not None:
                this._set_aside(name)

        return before

    def _note(self, name: str) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)

        def note(parameter: torch.Tensor) -> None:
            if (this := owner()) is not None:
                this.on_backward()
                # Autograd comes by, and leaves nothing, where it was frozen since
                # forward.
                if parameter.requires_grad:
                    this._this_pass.add(name)

        return note


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the dtype that the parameter wants and in its strides:
    fused optimizers walk both in the order of memory."""
    # A gradient in other strides is copied once, into the parameter's.
    dtype = parameter.grad_dtype or torch.promote_types(parameter.dtype, gradient.dtype)
    if gradient.stride() == parameter.stride():
        return gradient.to(dtype)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(gradient)
