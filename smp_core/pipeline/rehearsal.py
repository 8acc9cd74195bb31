"""A rehearsal: all stages of a model run one after the other in one process before
anything is sharded, on the example that its chain was recorded with.

Each chunk runs as its stage will run it: without the blocks and parameters of other
stages, with stand-ins before the blocks. So a model whose code needs on one stage what
another one has is refused on all ranks, before one of them fails in its first forward
and the others wait for it; and what the last chunk gives is compared with what the
whole model gives, so that nothing that other blocks give beside the chain's tensor is
missing in silence.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smp_core.pipeline.messages import Format
from smp_core.pipeline.stage import Stage, StageDone
from smp_core.pipeline.stand_ins import Played, played_of
from smp_core.plan import Example, Stages, example_of, without_router_loss
from smp_core.plan.chain import (
    KeptTensors,
    is_played,
    numbers_of,
    refusal_of,
    running_the_example,
    state_restored,
    with_fake_values,
)
from smp_core.torch_facts import caches_in, first_names, seed_generators
from smp_core.watch import innermost_user_line

_INSTEAD = "write what needs it into a block, or into a module of its own that is called before the blocks"


def rehearse(model: nn.Module, stages: Stages) -> list[str]:
    """Run all stages of a model that is not sharded yet. Random numbers, buffers and
    modules stay as they were.

    Args:
        model: with values, or on the meta device: then shapes are compared.

    Returns:
        the names of saved buffers and of numbers that each forward changes.

    Raises:
        ValueError: a stage fails, or what the last one gives is not what the whole
            model gives; says where.
    """
    refusal = refusal_of(model)
    module = model.get_submodule(stages.chain.module)
    # Random states of these devices are put back.
    devices = {
        parameter.device for parameter in module.parameters() if parameter.is_cuda
    }
    # Values that a model lacks are faked; buffers and losses of routers stay as they
    # are.
    with (
        with_fake_values(model, refusal),
        state_restored(model) as changed,
        without_router_loss(model),
        torch.no_grad(),
    ):
        with torch.random.fork_rng(devices), _Undropped(), _seeded(model, stages):
            # The whole model first, then chunk after chunk, with the same seeds.
            example = example_of(model, module, refusal)
            kept = KeptTensors(model)
            whole = _run(module, example, refusal), _kept_numbers(kept, model, stages)
            kept, numbers = KeptTensors(model), numbers_of(model)
            given = (
                _in_stages(model, module, stages, example, refusal),
                _kept_numbers(kept, model, stages),
            )
            # A cache grows once; what the second forward changes too is a count.
            counted = [
                name
                for name, number in numbers_of(model).items()
                if numbers.get(name, number) != number
            ]
            different = None if is_played(module) else _first_difference(whole, given)
            # A model that differs from itself (noise of its own) proves nothing.
            if different is not None and _is_the_same(
                whole[0], _run(module, example, refusal)
            ):
                where = different.removeprefix("0").removeprefix("1").lstrip(".")
                which = f" {where}" if where else ""
                raise ValueError(
                    f"{refusal}its output{which} is another in stages: something behind the blocks, or between "
                    "two of them, needs more than the one tensor that blocks hand on (an earlier "
                    "activation, what other blocks return beside it); add it to that tensor, or leave it out of what "
                    "the model gives"
                )
    return [*changed, *counted]


def _kept_numbers(
    kept: KeptTensors, model: nn.Module, stages: Stages
) -> dict[str, Tensor]:
    """Return the losses that the last chunk's forward has left around the blocks, by
    their places."""
    blocks = [model.get_submodule(name) for name in stages.chain.blocks]
    inside = {module for block in blocks for module in block.modules()}
    numbers = {}
    for place, module, tensor in kept.found():
        if tensor.numel() == 1 and tensor.is_floating_point() and module not in inside:
            numbers[place] = tensor.detach().clone()
    return numbers


@contextlib.contextmanager
def _seeded(model: nn.Module, stages: Stages) -> Iterator[None]:
    """Let what is drawn inside be the same in stages: each block begins with a seed,
    and what follows a module that has a stand-in, which draws nothing."""
    chain = stages.chain
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            functools.partial(_seed, number)
        )
        for number, name in enumerate(chain.blocks, 1)
    ]
    handles += [
        model.get_submodule(each.name).register_forward_hook(
            functools.partial(_seed, -number)
        )
        for number, each in enumerate(chain.stand_ins, 1)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _seed(number: int, *_: Any) -> None:
    seed_generators(number)


def _run(module: nn.Module, example: Example, refusal: str) -> Any:
    args, kwargs = example
    seed_generators(0)
    with running_the_example(module, refusal):
        return module(*args, **kwargs)


def _in_stages(
    model: nn.Module, module: nn.Module, stages: Stages, example: Example, refusal: str
) -> Any:
    """Return what the last chunk gives."""
    names = first_names(model)
    given: Any = None
    try:
        # Copies are made once, as each stage will make them.
        played = played_of(model, stages.chain)
    except Exception as error:
        raise ValueError(
            f"{refusal}its modules before the blocks cannot be copied for stages without them "
            f"({type(error).__name__}: {error})"
        ) from error
    # What each chunk gives is what the next one gets.
    for chunk in range(stages.n_chunks):
        number = chunk % stages.count
        try:
            # Without other stages' parameters: what needs one fails here and not in
            # training.
            with _without_others(model, names, stages.owned(number)):
                given = _given_by(model, module, stages, chunk, given, example, played)
            # What cannot be sent is refused as well.
            if chunk < stages.n_chunks - 1:
                Format.of(given).encoded(torch.device("cpu"))
        except Exception as error:
            if isinstance(error, _UsedElsewhere):
                what = f"{error} works in its forward, and another stage holds it"
            else:
                what = (
                    "its forward fails where blocks are on other stages, of which it has the one tensor that they hand "
                    f"on: {type(error).__name__}: {error}"
                )
            line = innermost_user_line(traceback.extract_tb(error.__traceback__))
            where = f" ({line})" if line else ""
            raise ValueError(
                f"{refusal}on stage {number} of {stages.count} {what}{where}; {_INSTEAD}"
            ) from error
    return given


def _given_by(
    model: nn.Module,
    module: nn.Module,
    stages: Stages,
    chunk: int,
    taken: Tensor | None,
    example: Example,
    played: Mapping[str, Played],
) -> Any:
    args, kwargs = example
    # A stage without messages and seeds: only what it leaves out is looked at.
    stage = Stage(
        model,
        stages,
        chunk % stages.count,
        played,
        dtype=None,
        outside=_never,
        entered=lambda: None,
        passed=lambda _: None,
        replaced=lambda _: None,
    )
    stage.show(chunk)
    stage.incoming, stage.is_running = taken, True
    seed_generators(0)
    try:
        return module(*args, **kwargs)
    except StageDone as done:
        return done.given
    finally:
        stage.remove()


def _never(*_: Any) -> Any:
    raise AssertionError("a call outside of a step")


# Parameters of other stages


class _UsedElsewhere(Exception):
    """The parameter's name, where an operator takes one that is on another stage."""


class _Elsewhere(Tensor):
    """Stands for a parameter of another stage: its attributes are known, and no
    operator may take it."""

    called = "a parameter"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Attributes may be read; an operator that needs values may not have them.
        found = [
            each
            for each in _flat([*args, *(kwargs or {}).values()])
            if isinstance(each, _Elsewhere)
        ]
        called = next((each.called for each in found), cls.called)
        if getattr(func, "__name__", "") not in _LOOKS:
            raise _UsedElsewhere(called)
        seen = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(seen, _Elsewhere):
            seen.called = called
        return seen


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


_LOOKS = {
    "__get__", "__set__", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex",
    "element_size", "get_device", "is_contiguous", "__len__", "__repr__", "detach", "requires_grad_", "__hash__",
}  # fmt: skip


@contextlib.contextmanager
def _without_others(
    model: nn.Module, names: Mapping[nn.Parameter, str], own: frozenset[str]
) -> Iterator[None]:
    """Put what no operator may take in the place of the parameters of other stages."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if names[parameter] not in own
    ]
    try:
        for module, name, parameter in places:
            # One element, expanded: no memory, and the shape that code asks for.
            nothing = torch.empty(
                (), dtype=parameter.dtype, device=parameter.device
            ).expand(parameter.shape)
            absent = nn.Parameter(nothing.as_subclass(_Elsewhere), requires_grad=False)
            absent.called = names[parameter]  # type: ignore[attr-defined]
            setattr(module, name, absent)
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


# Comparison


class _Undropped(TorchFunctionMode):
    """Dropout gives what it takes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        # Its dropout is the fifth argument, or a keyword.
        if func is F.scaled_dot_product_attention:
            args = args[:4] + (0.0,) * (len(args) > 4) + args[5:]
            kwargs = {**kwargs}
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


_DROPOUTS: set[Callable[..., Any]] = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip


def _first_difference(whole: Any, given: Any, path: str = "") -> str | None:
    """Return the place of the first tensor that is another; None: there is none. A
    tensor for which nothing stands is none: who uses it is told so."""
    if isinstance(whole, Tensor) and isinstance(given, Tensor):
        try:
            # Chunks run the same operators, so that differences are rounding at most.
            torch.testing.assert_close(given, whole, equal_nan=True)
        except AssertionError:
            return path
        return None
    # A tensor in one and something else in the other is a difference, None is not.
    if isinstance(whole, Tensor):
        return None if given is None else path
    parts, others = _parts(whole), _parts(given)
    if len(parts) > len(others) > 0:
        return path
    for name, part in parts.items():
        if name in others:
            found = _first_difference(
                part, others[name], f"{path}.{name}".removeprefix(".")
            )
            if found is not None:
                return found
    return None


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        caches = caches_in(value)
        return {name: part for name, part in value.items() if name not in caches}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return {}


def _is_the_same(one: Any, other: Any) -> bool:
    return _first_difference(one, other) is None
