"""Computing with the parameters of a unit that was not called: an error that says so.

A unit's parameters are gathered when its module is called. Who reads ``self.projection.weight`` and computes with it
instead, or calls another method than forward, meets shards, and torch's complaint about mixed tensors. It is found by
what it says, and by whose forward was running; no public exception tells it apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from smp_core.sharding.fsdp.units import ShardedUnit

_MIXED = "mixed torch.Tensor and DTensor"


def explain_uncalled(units: Sequence[ShardedUnit]) -> None:
    """Let errors of the roots' forwards say which unit was computed with and not called."""

    @torch.compiler.disable
    def look(*_: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError):
            name_uncalled(error, units)

    for unit in units:
        if unit.is_root:
            # Torch calls these while the error is on its way, and takes no other in its place: so it gets our words.
            unit.module.register_forward_hook(look, always_call=True)


def name_uncalled(error: RuntimeError, units: Sequence[ShardedUnit]) -> None:
    """Put words into torch's error, if it came from the parameters of a unit that was not called."""
    if _MIXED not in str(error) or not str(error).startswith("aten."):
        return
    frames = [frame for frame in _frames(error.__traceback__) if isinstance(frame.f_locals.get("self"), nn.Module)]
    if any(isinstance(frame.f_locals["self"], ParametrizationList) for frame in frames):
        error.args = (
            "a parameter was parametrized before its unit was called, as PEFT's target_parameters do in each forward; "
            "make the unit a module around both, such as the decoder layer (the default): units=[...] without the "
            f"parametrized module. Torch said: {error}",
        )
        return
    for frame in reversed(frames):
        module = frame.f_locals["self"]
        own = next((unit for unit in units if unit.module is module and not unit.is_gathered()), None)
        method = frame.f_code.co_name
        if own is not None and method != "forward":
            error.args = (
                f"{type(module).__name__}.{method} was called, and the unit {own.name!r} is gathered for its "
                f"forward only; write forward_methods=({_dotted(own.name, method)!r},). Torch said: {error}",
            )
            return
    if not frames:
        return
    caller = frames[-1].f_locals["self"]
    inside = set(caller.modules()) - {caller}
    uncalled = [unit for unit in units if unit.module in inside and not unit.was_called and not unit.is_gathered()]
    if uncalled:
        names = ", ".join(repr(unit.name) for unit in uncalled)
        n = max(sum(p.numel() for p in unit.module.parameters()) for unit in uncalled)
        error.args = (
            f"{type(caller).__name__}.{frames[-1].f_code.co_name} computed with parameters of a unit that it had not "
            f"called ({names}), and a unit's parameters are gathered when it is called; call the module, or leave it "
            f"out of the units: units=[...] without it, units.min_parameters above {n}. Torch said: {error}",
        )


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
