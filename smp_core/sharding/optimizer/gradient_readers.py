"""Warnings about code that looks for gradients where parameters have none: hooks of the
user's between backward and step, and the code that calls an optimizer's step.

With ``optimizer_shard="world"`` gradients are on masters, and a pipeline stage has those
of its own parameters alone. Code is judged by the names that it uses, once.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from smp_core.torch_facts import is_rank_0

_WHERE_GRADIENTS_ARE = (
    "optimizer_shard='world' leaves no gradients on parameters: what %s does with parameter.grad has no effect. This "
    "rank's part of them is the .grad of %s.stepped(parameters), a norm of all is %s.grad_norm(); or write "
    "optimizer_shard='shard'"
)
_GRADIENTS_OF_A_STAGE = (
    "pipeline_parallel_degree: a rank has gradients of its own stage's parameters and None of the others, so what %s "
    "makes of several, a norm or a sum, is of one stage; a norm of all is %s.grad_norm()"
)
_IN_STEP_HOOKS = (
    "optimizer_shard='world': %s is called with this rank's part of each gradient, as one dimension; changes of each "
    "element by itself are right there, a norm, a mean or an index is that of the part. A norm of all is "
    "%s.grad_norm(), clipping %s.clip_grad_norm_(max_norm); or write optimizer_shard='shard'"
)


def say_where_gradients_are(
    hooks: Iterable[Callable[..., Any]],
    parallel: str = "parallel",
    *,
    in_stages: bool = False,
    in_step: bool = False,
) -> None:
    """Warn, on rank 0, of hooks between backward and step whose code names gradients of
    parameters, where parameters have none: what such a hook reads, edits or drops there
    has no effect.

    Args:
        hooks: functions of the user's.
        parallel: what to type for the model's handle.
        in_stages: whether it is parameters of other pipeline stages alone that have
            none.
        in_step: whether the optimizer itself calls them, with masters in its groups.
    """
    found = [hook.__qualname__ for hook in hooks if _names_gradients(hook)]
    if found and is_rank_0():
        said = _GRADIENTS_OF_A_STAGE if in_stages else _WHERE_GRADIENTS_ARE
        said = _IN_STEP_HOOKS if in_step else said
        handles = [parallel] * (said.count("%s") - 1)
        logging.getLogger("smp").warning(said, " and ".join(found), *handles)


def say_of_callers(frame: FrameType | None, *, in_stages: bool = False) -> None:
    """Do the same of the code that calls an optimizer's step, from ``frame`` outwards.

    A loop of the user's own is such code, and a step of Lightning's manual
    optimization. What a trainer's loop was called by is not.
    """
    functions: list[Callable[..., Any]] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_LOOPS):
            break
        # Between the user's line and here; a hook has been named before.
        is_of_library = module.split(".")[0] in _LIBRARIES
        if not is_of_library and frame.f_code not in _named:
            functions.append(_Caller(frame.f_code))
        frame = frame.f_back
    say_where_gradients_are(functions, in_stages=in_stages)


@functools.cache
def say_of_states() -> None:
    """Warn, once, of code that takes a parameter's state from an optimizer, where that
    is of this rank's part."""
    if is_rank_0():
        logging.getLogger("smp").warning(
            "optimizer_shard='world': optimizer.state[parameter] has this rank's part of each state, as one dimension; "
            "optimizer.state_dict(), on all ranks, has states like parameters"
        )


class _Caller:
    """A frame's code, in the form of the function that it belongs to."""

    def __init__(self, code: CodeType) -> None:
        self.__code__ = code
        # Python 3.10 has no qualified names of code.
        self.__qualname__ = getattr(code, "co_qualname", code.co_name)

    def __call__(self) -> None:
        raise NotImplementedError


_LOOPS = ("lightning.pytorch.loops", "pytorch_lightning.loops", "transformers.")
_LIBRARIES = (
    "torch", "functools", "contextlib", "smp_core", "lightning_smp", "accelerate_smp",
    "lightning", "pytorch_lightning", "accelerate",
)  # fmt: skip
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
# Hooks that were named when a run began.
_named: weakref.WeakSet[CodeType] = weakref.WeakSet()


def _names_gradients(hook: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(hook), "__code__", None)
    if code is None:
        return False
    found = _reads_gradients(code)
    if found and not isinstance(hook, _Caller):
        _named.add(code)
    return found


def _reads_gradients(code: CodeType) -> bool:
    """Return whether code, with the functions inside of it, clips by torch's functions
    or takes an attribute ``grad``."""
    clips, attributes = _clips_and_attributes(code)
    return clips or ("grad" in attributes and "stepped" not in attributes)


def _clips_and_attributes(code: CodeType) -> tuple[bool, set[str]]:
    """Return whether code clips by torch's functions, and the attributes it takes."""
    clips, attributes, owner = False, set[str](), None
    for each in dis.get_instructions(code):
        name = each.argval if isinstance(each.argval, str) else None
        is_attribute = each.opname.endswith(("_ATTR", "_METHOD"))
        # Methods of that name of a handle, a window or an accelerator find the masters.
        if name in _CLIPS and (not is_attribute or owner in ("utils", "clip_grad")):
            clips = True
        of_autograd = name == "grad" and owner in ("autograd", "func")
        if is_attribute and name is not None and not of_autograd:
            attributes.add(name)
        owner = name
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            clips_inside, taken = _clips_and_attributes(inner)
            clips = clips or clips_inside
            attributes |= taken
    return clips, attributes
