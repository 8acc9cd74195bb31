"""Random numbers of ranks that compute one layer: dropout of whole activations is the
same on all, of split ones not.

Ranks begin with generators in one state, and each draws the same numbers from it. In
blocks whose tokens are split each rank draws from a generator of its own: masks of
equal parts would be equal. Its seed is drawn from the common one, so that this goes on
alike, and a recomputed forward, whose generator is put back, draws the same again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smp_core.outside import changed
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.roles import transformers_model
from smp_core.torch_facts import DROPOUTS, Args, seed_generators


def settle_random(model: nn.Module, axis: TensorAxis, splits_tokens: bool) -> list[str]:
    """Let blocks whose tokens are split draw other numbers on each rank; return what
    draws any. Refuse dropout where tokens are not split."""
    found = _random_parts(model)
    if found and not splits_tokens:
        refuse_random(found)
    axis.draws = bool(found)
    return found


def refuse_random(found: list[str], where: str = "") -> None:
    """Refuse dropout among whole tokens: some of a block's is of split activations and
    some is not, and nothing says which.

    Args:
        found: what draws random numbers.
        where: tokens are whole, and why; ends with "and ".
    """
    split = "" if where else "write tensor_parallel={'sequence_parallel': true}, or "
    raise ValueError(
        f"tensor_parallel_degree: {where}dropout without sequence parallelism is not built yet "
        f"({', '.join(found[:5])}); {split}set the probability to 0.0 before the model is built"
    )


def _random_parts(model: nn.Module) -> list[str]:
    """Name what draws random numbers in training: dropout, and noise of routers."""
    modules = dict(model.named_modules())
    # Modules of torch, by their probability.
    found = [
        name
        for name, module in modules.items()
        if isinstance(module, DROPOUTS) and module.p > 0
    ]
    found += [
        name
        for name, module in modules.items()
        if isinstance(module, nn.MultiheadAttention) and module.dropout
    ]
    # Transformers' functional dropout has its probability in the configuration; heads
    # of other tasks are not in blocks.
    known = transformers_model(model)
    options = {} if known is None else known.config.to_dict()
    return [*found, *_random_options("config", options)]


def _random_options(where: str, options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(name, int):  # of id2label
            continue
        if isinstance(value, dict):  # of a part: text_config, vision_config
            yield from _random_options(f"{where}.{name}", value)
        elif (
            ("drop" in name or "jitter" in name)
            and isinstance(value, float)
            and value > 0
            and not name.startswith(("classifier", "summary"))
        ):
            yield f"{where}.{name}"


class NotedDropout(TorchFunctionMode):
    """Notes calls of dropout functions, whose probability no module or configuration
    shows.

    Attributes:
        called: their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            is_on = given.get("training", True) and given.get("p", 0.5)
        elif name == "scaled_dot_product_attention":
            is_on = dict(enumerate(args)).get(4) or kwargs.get("dropout_p")
        else:
            is_on = False
        if is_on:
            self.called.add(name)
        return func(*args, **kwargs)


@dataclass(eq=False)
class RandomForward:
    """The forward of a block that draws random numbers: where activations are split,
    each rank draws others."""

    module: nn.Module
    original: Callable[..., Any]
    axis: TensorAxis
    checked: bool = False

    # Seeds are not compiled; the block inside is.
    @functools.partial(torch.compiler.disable, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self.original(*args, **kwargs)
        # Evaluation draws nothing. In training the generators are compared once.
        device = _device_of(args, kwargs)
        if not self.checked:
            require_one_state(self.axis, device)
            self.checked = True
        with own_random(self.axis, device):
            return self.original(*args, **kwargs)


def require_one_state(axis: TensorAxis, device: torch.device) -> None:
    """Compare generators: what ranks compute alike, they have to drop alike. Collective
    over the axis.

    Raises:
        ValueError: they differ; says how to seed.
    """
    state = torch.random.get_rng_state().double()
    if device.type != "cpu":
        state = torch.cat(
            [state, torch.get_device_module(device).get_rng_state(device).double()]
        )
    if not axis.holds_alike(state.to(device)):
        raise ValueError(
            f"the random states of tensor ranks differ: those of tensor_parallel_degree={axis.degree} "
            "neighbours have to be the same for dropout; write torch.manual_seed(seed + mesh.data_rank) after "
            "the model is parallelized, or one seed for all ranks"
        )


@contextlib.contextmanager
def own_random(axis: TensorAxis, device: torch.device) -> Iterator[None]:
    """Let each rank draw other random numbers inside, and all the same ones behind
    it."""
    # Drawn from the common generator, which then goes on alike on all ranks.
    seed = int(torch.randint(2**62, (), device="cpu"))
    with changed(axis, drawn=seed), _seeded(seed + 1 + axis.rank, device):
        yield


@contextlib.contextmanager
def same_random(
    axis: TensorAxis, args: Args, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Let all ranks draw the same inside a block of :func:`own_random`, for a call that
    every rank computes alike."""
    if axis.drawn is None:
        yield
        return
    # A step that no rank's own seed makes, so that numbers are neither a rank's nor
    # those of the last such call.
    axis.drawn += axis.degree + 1
    with _seeded(axis.drawn, _device_of(args, kwargs)):
        yield


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators inside, and restore them after."""
    # The device's generator is restored with the CPU's.
    on_device = device.type != "cpu"
    forked = (
        torch.random.fork_rng([device], device_type=device.type)
        if on_device
        else torch.random.fork_rng([])
    )
    with forked:
        seed_generators(seed)
        yield


def _device_of(args: Args, kwargs: Mapping[str, Any]) -> torch.device:
    return next(
        value.device
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor)
    )
