"""One run of a trial (:mod:`smp_core.context_parallel.trial`), after which the state of
the training is as it was before."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smp_core.comm import CommMeter
from smp_core.context_parallel.replaced_attention import SplitBatch, enabled
from smp_core.plan.chain import KeptTensors, state_restored
from smp_core.torch_facts import Args, Kwargs, TrialGenerator

_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_dropout",
    "feature_alpha_dropout",
)
_GENERATORS = (
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "uniform_",
    "normal_",
    "bernoulli_",
    "random_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "cauchy_",
)


@dataclass(eq=False)
class Ran:
    """The result of a run.

    Attributes:
        outputs: tensors of what the call returned, by their names.
        seen: (module, [tokens, 2]) of each call of a module inside: mean and deviation
            of what it gave for a token.
        kept: numbers that modules keep in attributes and lists, by their places.
        drawn: the shapes of random tensors, in their order.
        rounding: the largest rounding error of a dtype that any of them returned.
    """

    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    seen: list[tuple[nn.Module, Tensor | None]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    rounding: float = 0.0


def run(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    active: SplitBatch,
    tokens: int,
    off_by: float | None = None,
) -> Ran:
    """Call a module, or what else is its forward, under a batch.

    Args:
        tokens: of each row.
        off_by: the relative error to add to what each module inside returns.
    """
    ran = Ran()

    # Notes what each module returns, or adds an error to it: of -1, 0 or 1 roundings,
    # in turn.
    def note(inside: nn.Module, _: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if type(first) is not Tensor or not first.is_floating_point():
            return None
        ran.rounding = max(ran.rounding, torch.finfo(first.dtype).eps)
        if off_by is None:
            ran.seen.append((inside, _by_token(first, tokens)))
        elif first is output:
            errors = (torch.arange(first.numel(), device=first.device) % 3 - 1).view(
                first.shape
            ) * off_by
            return first + first * errors.to(first.dtype)
        return None

    handles = [inside.register_forward_hook(note) for inside in module.modules()]
    # Filled behind FSDP2's gather, and zero again before it frees.
    for inside in module.modules():
        if any(True for _ in inside.parameters(recurse=False)):
            zeros = _Zeros()
            handles += [
                inside.register_forward_pre_hook(zeros.fill),
                inside.register_forward_hook(
                    zeros.clear, prepend=True, always_call=True
                ),
            ]
    kept = KeptTensors(module)
    # Without randomness, and with what draws all the same left as it was.
    state, devices = random.getstate(), _accelerators()
    try:
        random.seed(0)
        with (
            torch.random.fork_rng(devices),
            enabled(active),
            _WithoutRandomness(ran.drawn),
        ):
            ran.outputs = list(tensors_of(forward(*args, **kwargs)))
        for place, _, tensor in kept.found():
            if tensor.numel() == 1 and tensor.is_floating_point():
                ran.kept[place] = tensor.detach().clone().squeeze()
    finally:
        random.setstate(state)
        for handle in handles:
            handle.remove()
    return ran


class _Zeros:
    """Fills parameters of a module that are zero for the time of a call: a gate of
    zeros would hide what it multiplies."""

    def __init__(self) -> None:
        self._filled: list[Tensor] = []

    def fill(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            # Parts of tensors are other numbers on each rank; codes are none.
            # Torch's own: what is written into that of a gathered copy is refused.
            data = torch.Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
            is_whole = type(data) is Tensor and parameter.is_floating_point()
            if is_whole and parameter.numel() and not bool(parameter.any()):
                waves = torch.arange(parameter.numel(), device=parameter.device).cos()
                scale = 0.5 * parameter[0].numel() ** -0.5 if parameter.dim() else 0.5
                data.copy_(scale * waves.view(parameter.shape))
                self._filled.append(data)

    def clear(self, *_: Any) -> None:
        while self._filled:
            self._filled.pop().zero_()


@contextlib.contextmanager
def undisturbed(module: nn.Module, meter: CommMeter | None) -> Iterator[None]:
    """Run a block without gradients, compilation and traces: buffers and plain
    attributes of modules are restored."""
    # Bytes of a trial belong to no step.
    outside = contextlib.nullcontext() if meter is None else meter.outside_steps()
    try:
        with (
            state_restored(module),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            outside,
        ):
            yield
    finally:
        # Autocast keeps weights that it cast, here without gradients.
        torch.clear_autocast_cache()


def _accelerators() -> list[int]:
    return (
        [torch.accelerator.current_device_index()]
        if torch.accelerator.is_available()
        else []
    )


class _WithoutRandomness(TorchFunctionMode):
    """Drops nothing, and draws constants: tensors of other sizes would get other
    numbers.

    Args:
        drawn: is given the shapes of what is drawn.
    """

    def __init__(self, drawn: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._drawn = drawn

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        result = func(*args, **kwargs)
        # Blocks over tensor ranks are tried inside, with numbers that have to differ.
        if isinstance(kwargs.get("generator"), TrialGenerator):
            return result
        if name in _GENERATORS and isinstance(result, Tensor):
            self._drawn.append(tuple(result.shape))
            result.fill_(0.5 if result.is_floating_point() else 0)
        return result


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in what a call returned."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield f"output {name}".strip() if name else "its output", output
        return
    # Transformers' outputs are mappings as well as dataclasses.
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Mapping):
        items: Any = output.items()
    else:
        items = enumerate(output) if isinstance(output, (tuple, list)) else ()
    for key, value in items:
        yield from tensors_of(value, f"{name}.{key}" if name else str(key))


def _by_token(tensor: Tensor, tokens: int) -> Tensor | None:
    """Return [tokens, 2], the mean and deviation over all other dims; None: no dim is
    the tokens."""
    shape = tensor.shape
    dim = next(
        (
            dim
            for dim in (1, 0, *range(2, len(shape)))
            if dim < len(shape) and shape[dim] == tokens
        ),
        None,
    )
    # Tokens of all rows may be flattened into one dimension.
    if dim is None and shape and shape[0] and shape[0] % tokens == 0:
        tensor, dim = tensor.unflatten(0, (-1, tokens)), 1
    if dim is None or not tensor.numel():
        return None
    # Two numbers for a token are enough to find the first module that differs.
    by_token = tensor.movedim(dim, 0).reshape(tokens, -1).double()
    return torch.stack([by_token.mean(1), by_token.square().mean(1).sqrt()], 1)
