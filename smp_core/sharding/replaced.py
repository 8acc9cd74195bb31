"""Parameters that sharding has put others in the place of, so that what was made from the old ones finds the new ones.

An optimizer (or a list for clipping) that was made before the model was sharded holds parameters that the model has no
longer: nothing it does would reach the model. Hooks of such parameters move to those of now; reading ``.grad`` of a
replaced parameter, which stays empty, is an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from smp_core.checkpoint import iterate_tensors, map_tensors, path_text, shard_like
from smp_core.cluster import of_all_ranks
from smp_core.sharding.gradients.parameter_hooks import move_hooks, reached_by_hooks, registered_hooks
from smp_core.sharding.weights.rank_0 import broadcast_from_rank_0

_all: weakref.WeakSet[ReplacedParameters] = weakref.WeakSet()


class ReplacedParameters:
    """The parameters of a model before it was sharded -> those it has now, by name.

    Made before anything is sharded. It keeps no parameter alive: what nobody holds is freed unit by unit.

    Attributes:
        model: the name of its class.
        hooked: the parameters that have hooks, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        named = list(model.named_parameters(remove_duplicate=False))
        self._before = [(name, TensorWeakRef(parameter)) for name, parameter in named]
        self.hooked = {name: parameter for name, parameter in named if registered_hooks(parameter)}
        self._now = WeakIdKeyDictionary()

    def settle(self, model: nn.Module) -> None:
        """Note which parameters the model has now; they get the hooks of those that they replace.

        Raises:
            ValueError: a hook refers to replaced parameters.
        """
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, reference in self._before:
            old, new = reference(), after.get(name)
            if old is not None and new is not None and new is not old:
                self._now[old] = new
                if type(old) is nn.Parameter:
                    old.__class__ = _Replaced
        self._before.clear()
        _all.add(self)
        for name, old in self.hooked.items():
            if old in self._now:
                self._require_no_reference(name, old)
                move_hooks(old, self._now[old])
        self.hooked.clear()

    def _require_no_reference(self, name: str, old: torch.Tensor) -> None:
        if any(tensor in self._now for tensor in reached_by_hooks(old)):
            raise ValueError(
                f"a hook of {name} refers to parameters that {self.model} had before it was sharded (an optimizer, a "
                "dict by parameter, a weight), which are trained no more; register it on the parameters that "
                "model.parameters() has after prepare(model), in Lightning in on_fit_start"
            )

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._now

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what stands in the place of a parameter now; one that was not replaced is itself."""
        found: torch.Tensor = self._now.get(parameter, parameter)
        return found

    def current_states(
        self, states: Iterable[tuple[torch.Tensor, Any]], device: torch.device
    ) -> dict[torch.Tensor, Any]:
        """Return optimizer states of replaced parameters as those of the parameters that the model has now: rank 0's,
        as the weights are; tensors of a parameter's shape become shards of it. Collective over the world.

        Args:
            states: (replaced parameter, its entry in ``optimizer.state``).
            device: where tensors can be sent from.

        Raises:
            ValueError: ranks have different states, or a state is on the meta device.
        """
        states = list(states)
        require_alike([entry for _, entry in states])
        found = {}
        for old, entry in states:
            new = self.current(old)
            tensors = [tensor for _, tensor in iterate_tensors(entry)]
            if any(tensor.is_meta for tensor in tensors):
                raise ValueError(
                    "the optimizer made states of parameters on the meta device, which have no values; make it after "
                    "the model was sharded: in Lightning in configure_optimizers, elsewhere after prepare(model)"
                )
            broadcast_from_rank_0(tensors, device)
            found[new] = map_tensors(entry, functools.partial(shard_like, new))
        return found


class _Replaced(nn.Parameter):
    """A parameter that a model had before it was sharded. It receives no gradient: a list of such parameters that is
    clipped or stepped would do nothing."""

    @property
    def grad(self) -> torch.Tensor | None:
        raise RuntimeError(
            f"a parameter of shape {list(self.shape)} was read for its gradient, which a model had before it was "
            "sharded, and which receives none any more: make the list anew from model.parameters() after "
            "prepare(model), in Lightning in on_fit_start"
        )

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


def of_replaced(parameters: Iterable[torch.Tensor]) -> tuple[str | None, int]:
    """Count the parameters that a model had before it was sharded.

    Returns:
        (the class of a model that had some, their number); None, 0 without.
    """
    owners = [each.model for parameter in parameters for each in _all if parameter in each]
    return (owners[0], len(owners)) if owners else (None, 0)


def require_alike(entries: list[Any]) -> None:
    """Compare what optimizer states consist of. Collective over the world.

    Raises:
        ValueError: ranks differ; the same error on all of them.
    """
    own = []
    for entry in entries:
        tensors = iterate_tensors(entry)
        own.append([f"{path_text(path)} {list(tensor.shape)} {tensor.dtype}" for path, tensor in tensors])
    if any(said != own for said in of_all_ranks(own)):
        raise ValueError(
            "the optimizer has other states on some ranks than on others; prepare it before its first step, and bring "
            "its states with a checkpoint"
        )
