"""Hooks of parameters, called with complete gradients.

What autograd has of a parameter on one rank is one rank's part of its gradient. A hook
that scales or masks could work on parts; one that clamps, adds or records could not,
and no hook says which it is. So hooks are kept where autograd does not find them, and
are called when the gradients of a backward pass are complete, with what one process
would see:

- those of ``register_hook`` with the mean over ranks of the unsharded gradient, a plain
  tensor; what they return is sharded again
- those of ``register_post_accumulate_grad_hook`` with the parameter that the model
  shows, whose ``.grad`` is a shard (as in FSDP2), and where a plain tensor that they
  bring counts as one that all ranks have

As long as there are any, a window is closed by each of its backward passes
(:class:`smp_core.sharding.gradients.accumulation.AccumulationWindow`).

torch keeps hooks in ``_backward_hooks`` and ``_post_accumulate_grad_hooks``, and has no
public name for them: whatever is registered goes there, and is found there by the
handle that removes it.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from smp_core.checkpoint import shard_like
from smp_core.cluster import SmpMesh

_DEPTH = 6  # of containers in objects in closures
_OURS = -1  # key of what autograd itself is to call; torch counts from 0

Hook = Callable[[Any], Any]

# Of parameters, among global names.
_HOLDERS = (Tensor, Optimizer, Mapping, list, tuple, set)


class _Kept(OrderedDict[int, Hook]):
    """A tensor's hooks as torch and their handles see them: what is registered goes to
    ``store``. Autograd calls what lies in the dict itself, at most one hook of ours."""

    def __init__(
        self, owner: ParameterHooks, store: MutableMapping[int, Hook], ours: Hook | None
    ) -> None:
        super().__init__()
        self.owner, self.store = owner, store
        if ours is not None:
            super().__setitem__(_OURS, ours)

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.store[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.store[key]

    def __contains__(self, key: object) -> bool:
        return key in self.store


class ParameterHooks:
    """The hooks of one parameter. It does not refer to the parameter, which refers to
    it.

    Args:
        parameter: whose hooks they are from now on; those that were registered stay
            registered.
        mesh: the ranks over which its gradient is complete.
        before: called by autograd, where the parameter itself is in a graph, before a
            gradient is accumulated.
        after: called by autograd behind that.
    """

    def __init__(
        self,
        parameter: Tensor,
        mesh: SmpMesh,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:
        # What a user's hook refers to may never be collected.
        self._mesh = weakref.ref(mesh)
        self._has_gradient = False
        # The dicts of before go on as stores: handles that remove hooks look into them.
        self._of_gradient = [_store(parameter._backward_hooks)]
        self._accumulated = [_store(parameter._post_accumulate_grad_hooks)]
        parameter._backward_hooks = _Kept(self, self._of_gradient[0], before)
        parameter._post_accumulate_grad_hooks = _Kept(self, self._accumulated[0], after)  # type: ignore[attr-defined]

    def show_on(self, copy: Tensor) -> None:
        """Take the hooks of an unsharded copy, which a forward shows in the parameter's
        place, now and from now on."""
        given, late = copy._backward_hooks, copy._post_accumulate_grad_hooks
        # What the user registered on the copy joins the parameter's own; handles go on
        # working.
        if not isinstance(given, _Kept):
            if given:
                self._of_gradient.append(given)
            copy._backward_hooks = _Kept(self, self._of_gradient[-1], None)
        if not isinstance(late, _Kept):
            if late:
                self._accumulated.append(late)
            copy._post_accumulate_grad_hooks = _Kept(self, self._accumulated[-1], None)  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return any(self._of_gradient) or any(self._accumulated)

    @property
    def follow_accumulation(self) -> bool:
        """Return whether there are hooks of ``register_post_accumulate_grad_hook``."""
        return any(self._accumulated)

    def change(self, gradient: Tensor) -> Tensor:
        """Return what hooks make of a complete gradient, sharded or plain, in its own
        layout. Collective over the ranks that hold parts of it, and over all that have
        the parameter where a hook draws random numbers."""
        self._has_gradient = True
        # Without the mesh the model is gone.
        hooks, mesh = list(_each(self._of_gradient)), self._mesh()
        if not hooks or mesh is None:
            return gradient
        whole = unsharded_value(gradient, mesh)
        drawn = _random_states(whole.device)
        # A hook may compute with sharded parameters: its plain gradient counts as
        # replicated.
        with implicit_replication():
            for hook in hooks:
                result = hook(whole)
                whole = whole if result is None else result
        # It computed with the parameter, which is a shard.
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if whole.shape != gradient.shape:
            raise ValueError(
                f"a hook of a parameter returned a gradient of shape {tuple(whole.shape)}; allowed: "
                f"{tuple(gradient.shape)}"
            )
        # A hook that draws random numbers draws others on each rank.
        if mesh.model_degree > 1 and not torch.equal(
            drawn, _random_states(whole.device)
        ):
            whole = whole.contiguous()
            # The same noise on all ranks.
            dist.broadcast(whole, group=mesh.model_group, group_src=0)
        # Back to this rank's part, where the parameter is and in the gradient's dtype.
        return shard_like(gradient, whole.to(gradient.device, gradient.dtype))

    def follow(self, parameter: Tensor) -> None:
        """Call the hooks that follow the accumulation, if there was a gradient to
        accumulate since the last time."""
        if not self._has_gradient:
            return
        self._has_gradient = False
        # A plain tensor that the hook brings is the same on all ranks.
        with implicit_replication():
            for hook in list(_each(self._accumulated)):
                hook(parameter)


def hooks_of(parameter: Tensor) -> ParameterHooks | None:
    """Return the hooks of a parameter that are kept here; None: autograd calls them."""
    kept = parameter._backward_hooks
    return kept.owner if isinstance(kept, _Kept) else None


def shows_hooks(copy: Tensor) -> bool:
    """Return whether an unsharded copy shows the hooks of its parameter, which is all
    that ever changes about them."""
    return (
        type(copy._backward_hooks) is _Kept
        and type(copy._post_accumulate_grad_hooks) is _Kept
    )  # type: ignore


def registered_hooks(parameter: Tensor) -> list[Hook]:
    """Return the hooks of a parameter, of both kinds, kept here or by autograd."""
    both = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hook for hooks in both for hook in _store(hooks).values()]


def reached_by_hooks(parameter: Tensor) -> Iterator[Tensor]:
    """Yield tensors that a parameter's hooks refer to: in closures, defaults, global
    names, containers, optimizers."""
    # A search to a small depth: closures may lead anywhere.
    left: list[tuple[Any, int]] = [(hook, 0) for hook in registered_hooks(parameter)]
    seen: set[int] = set()
    while left:
        value, depth = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen and depth < _DEPTH:
            seen.add(id(value))
            left += [(each, depth + 1) for each in _referred_to(value)]


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Let a parameter have the hooks of the one whose place it takes."""
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def _store(hooks: Any) -> MutableMapping[int, Hook]:
    """Return the dict with the hooks that were registered."""
    if isinstance(hooks, _Kept):
        return hooks.store
    return OrderedDict() if hooks is None else hooks


def _each(stores: Iterable[MutableMapping[int, Hook]]) -> Iterator[Hook]:
    for store in stores:
        yield from store.values()


def unsharded_value(gradient: Tensor, mesh: SmpMesh) -> Tensor:
    """Return the whole gradient as a plain tensor on the mesh's device, also of a shard
    in host memory."""
    if not isinstance(gradient, DTensor):
        return gradient
    # Collectives run on the mesh's device; an offloaded shard is brought there.
    if gradient.device.type != mesh.device.type:
        local = gradient.to_local().to(mesh.device)
        gradient = DTensor.from_local(
            local,
            gradient.device_mesh,
            gradient.placements,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
    return gradient.full_tensor()


def _random_states(device: torch.device) -> Tensor:
    """Return the states of the generators that a hook could draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device).cpu())
    return torch.cat(states)


def _referred_to(value: Any) -> list[Any]:
    """Return what a function, a container, or an object of a user's class refers to."""
    # What a function's code can reach: closed-over values, globals that it names,
    # defaults.
    if isinstance(value, FunctionType):
        cells = [
            cell.cell_contents for cell in value.__closure__ or () if cell != CellType()
        ]
        used = [
            value.__globals__[name]
            for name in value.__code__.co_names
            if name in value.__globals__
        ]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [
            *cells,
            *defaults,
            *(each for each in used if isinstance(each, _HOLDERS)),
        ]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Optimizer):
        return [value.param_groups]
    # A module shows the parameters of now.
    if isinstance(value, (nn.Module, type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())
