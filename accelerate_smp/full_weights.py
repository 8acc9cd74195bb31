"""The unsharded weights of sharded models, by whatever call a script ends with.

    accelerator.get_state_dict(model)          whole on rank 0; so does save_model, which asks for it
    model.save_pretrained(...), push_to_hub    of Transformers, PEFT, Diffusers, the Hub's mixin, also of a part of the
                                               model: written by rank 0, whole; a class may run its model there
    accelerator.save(...) of shards            refused: it runs on rank 0 alone, which cannot gather them; torch.save
                                               likewise (smp_core/sharding/patched.py)

All but the last have to be called on every rank, which is checked before anything is
gathered.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import Ranks, full_state_dict, iterate_tensors, map_tensors
from smp_core.engine import ParallelModel
from smp_core.sharding import is_a_part
from smp_core.torch_facts import local_part
from smp_core.watch import meet

_PART = "_smp_part_of"


class FullWeightsAccelerator(Accelerator):
    """An Accelerator whose methods to save give unsharded weights."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict on rank 0's CPU, ``{}`` on the others; of a part
        of a sharded model too. Collective.

        Raises:
            RuntimeError: it is not called on every rank.
        """
        handle = parallel_of(model)
        if handle is None and not holds_shards(dict(model.named_parameters())):
            return super().get_state_dict(model, unwrap)
        meet("accelerator.get_state_dict(model)")
        if handle is not None:
            state = full_state(handle)
        else:
            # A part of a sharded model: its stages are those of the model that it is
            # in.
            holding = (
                whole for whole in map(parallel_of, self._models) if whole is not None
            )
            stages = next(
                (
                    whole.stage_group
                    for whole in holding
                    if model in set(whole.module.modules())
                ),
                None,
            )
            state = full_state_dict(model.state_dict(), stages=stages)
        # Of which `save` into safetensors leaves out tied names, as of a module's own.
        return OrderedDict(state)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object as Accelerate does, with unsharded tensors.

        Raises:
            ValueError: ``obj`` has sharded tensors.
        """
        if holds_shards(obj):
            raise ValueError(
                "accelerator.save was given sharded tensors, and rank 0, which writes them, holds a part of each; "
                "write state = accelerator.get_state_dict(model) on every rank and save that, or save_state(folder)"
            )
        super().save(map_tensors(obj, local_part), f, safe_serialization)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks as Accelerate does.

        Raises:
            RuntimeError: a rank is in a call that all have to make.
        """
        meet("accelerator.wait_for_everyone()")
        super().wait_for_everyone()


def save_full(model: nn.Module, handle: ParallelModel) -> None:
    """Let ``save_pretrained`` of the model and its parts write unsharded weights."""
    # Parts too: PEFT's adapter, or the language model inside of a larger one, are saved
    # by themselves.
    for name, part in model.named_modules():
        if callable(getattr(part, "save_pretrained", None)):
            object.__setattr__(part, _PART, (handle, f"{name}." if name else ""))
            part.save_pretrained = types.MethodType(_save_pretrained, part)


def _save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Save as the class does, with unsharded weights that rank 0 writes. Collective,
    unless ``state_dict`` is unsharded already.
    """
    # The class's method, which this one stands in front of.
    own: Any = type(self).save_pretrained  # type: ignore[attr-defined]
    given = kwargs.get("state_dict")
    if given is not None and not given:
        return None  # what get_state_dict gives all ranks but the one that writes
    inside = "state_dict" in vars(self)  # of a model whose parts save themselves
    handle, prefix = getattr(self, _PART)
    if inside:
        return own(self, *args, **kwargs)
    if given is not None and not holds_shards(given):
        # The class may call a part of its model: PEFT's prompts are computed.
        with handle.unsharded(self, given):
            return own(self, *args, **kwargs)
    call = f"{type(self).__name__.removeprefix('FSDP')}.save_pretrained(...)"
    meet(call)
    state = (
        full_state(handle, prefix)
        if given is None
        else full_state_dict(given, stages=handle.stage_group)
    )
    if given is not None:
        kwargs["state_dict"] = state

    # On rank 0 the class writes as ever: parameters are whole inside, and
    # `state_dict()` gives the state.
    def write() -> Any:
        with handle.unsharded(self, state), _showing(self, state):
            return own(self, *args, **kwargs)

    return Ranks().on_first(call, write)


def full_state(handle: ParallelModel, prefix: str = "") -> dict[str, Any]:
    """Return the full state dict of the part of the model whose names begin with
    ``prefix``. Collective."""
    handle.reshard()
    handle.broadcast_buffers()
    state = handle.model_state()
    own = {
        name[len(prefix) :]: value
        for name, value in state.items()
        if name.startswith(prefix)
    }
    return full_state_dict(own, stages=handle.stage_group)


def holds_shards(state: Any) -> bool:
    """Return whether a nested state has tensors of which this rank holds a part."""
    return any(is_a_part(tensor) for _, tensor in iterate_tensors(state))


@contextlib.contextmanager
def _showing(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Make ``state_dict()`` of the model and its parts return values of ``state``
    inside the block."""
    # Classes ask for their own state, or that of a part of them.
    shown = dict(model.named_modules())
    for name, part in shown.items():
        start = f"{name}." if name else ""
        own = {
            key[len(start) :]: value
            for key, value in state.items()
            if key.startswith(start)
        }
        part.state_dict = _giving(own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in shown.values():
            del part.state_dict


def _giving(own: Mapping[str, Tensor]) -> Any:
    def state_dict(*_: Any, prefix: str = "", **__: Any) -> dict[str, Tensor]:
        return {prefix + name: tensor for name, tensor in own.items()}

    return state_dict
