"""States of callbacks that hold shards: an average of weights by parameter name, say.

Lightning gives callbacks their states before the strategy shards the module, and what
is read from a checkpoint is whole. So a checkpoint notes which tensors were shards; a
callback that has such ones takes its state when the module is sharded, before
``on_fit_start``, with shards like those of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import Path, iterate_tensors, shard_like
from smp_core.torch_facts import clean_name

SHARDED = "smp_sharded"
"""Key of the places of shards in callbacks' states: lists of keys."""


class _Waiting(dict[str, Any]):
    """A state that Lightning passes over, as it does empty ones; hooks see what it
    holds."""

    def __bool__(self) -> bool:
        return False


def note_shards(checkpoint: dict[str, Any]) -> None:
    """Note in a checkpoint dictionary which tensors of callbacks' states are shards."""
    # Where shards are is not seen in what is read, which is whole.
    tensors = iterate_tensors(checkpoint.get("callbacks", {}))
    places = [list(path) for path, tensor in tensors if isinstance(tensor, DTensor)]
    if places:
        checkpoint[SHARDED] = places


def let_wait(content: dict[str, Any], left_out: Iterable[str]) -> None:
    """Let states with tensors that were shards wait for :func:`give_shards`.

    Args:
        left_out: keys of callbacks that load their averages in another way.
    """
    states = content.get("callbacks", {})
    for key in {place[0] for place in content.get(SHARDED, [])} - set(left_out):
        if isinstance(states.get(key), dict):
            states[key] = _Waiting(states[key])


def give_shards(trainer: Trainer, content: dict[str, Any], module: nn.Module) -> None:
    """Give callbacks the states that wait, with shards like those of a sharded module's
    parameters."""
    parameters = {
        clean_name(name): parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = content.get("callbacks", {}).get(callback.state_key)
        if isinstance(state, _Waiting):
            places = [
                tuple(place[1:])
                for place in content[SHARDED]
                if place[0] == callback.state_key
            ]
            given = content["callbacks"][callback.state_key] = dict(state)
            callback.load_state_dict(_sharded(given, (), set(places), parameters))


def _sharded(
    state: Any, path: Path, places: set[Path], parameters: dict[str, nn.Parameter]
) -> Any:
    """Put shards at some places of a nested state."""
    if isinstance(state, Tensor):
        like = _like(str(path[-1]), state, parameters) if path in places else None
        return state if like is None else shard_like(like, state)
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _sharded(value, (*path, key), places, parameters)
    elif type(state) in (list, tuple):
        return type(state)(
            _sharded(value, (*path, i), places, parameters)
            for i, value in enumerate(state)
        )
    return state


def _like(
    name: str, tensor: Tensor, parameters: dict[str, nn.Parameter]
) -> nn.Parameter | None:
    """Return the parameter of a name, or of one that ends so (a submodule's own), or
    any other of the same shape."""
    # By name where names end alike: a state may be of a submodule, with names of its
    # own.
    alike = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.shape == tensor.shape
    }
    ending = [key for key in alike if f".{key}".endswith(f".{name}")]
    chosen = ending or list(alike)
    return alike[chosen[0]] if chosen else None
