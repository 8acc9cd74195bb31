"""Tiny models over tensor ranks and in one process: losses, norms, gradients and
weights in float64.

Transformers computes its loss, its norms and its softmax in float32, also of float64
models; :class:`Wide` leaves these casts out, on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint.optimizers import named_optimizer_state
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.sharding.weights.delayed_init import materialize
from smp_core.tensor_parallel.roles import transformers_model
from tests.core.tensor_parallel.models import (
    MODELS,
    PLANS,
    SAMPLES,
    STEPS,
    TOKENS,
    VOCABULARY,
    Pixels,
)
from tests.harness import run_ranks

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class Wide(TorchFunctionMode):
    """Casts of float64 tensors to float32 are left out. For forward and backward
    passes: every look at a tensor's attribute is slower under it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        # Most calls are looks at an attribute.
        if len(args) == 1 and not kwargs:
            is_cast = func is torch.Tensor.float and first.dtype == torch.float64
            return first if is_cast else func(first)
        kwargs = dict(kwargs or {})
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        if func in _PRODUCTS and {arg.dtype for arg in args} == {
            torch.float32,
            torch.float64,
        }:
            # A float32 cast of integers: positions times frequencies.
            args = tuple(arg.double() for arg in args)
        return func(*args, **kwargs)


def wide_when_computed_again(model: nn.Module) -> nn.Module:
    """Let blocks, and attention, perceptrons and norms in them, leave casts out by
    themselves: backward passes begin outside of the mode around them, and Transformers
    recomputes inside of a block."""

    def wide(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Wide():
            return forward(*args, **kwargs)

    for module in model.modules():
        for block in list(module) if isinstance(module, nn.ModuleList) else ():
            for part in (block, *block.children()):
                if any(True for _ in part.children()) or type(
                    part
                ).__module__.startswith("transformers."):
                    part.forward = functools.partial(wide, part.forward)
    return model


def build(kind: str, seed: int = 0, delayed: bool = False) -> nn.Module:
    """``delayed``: on the meta device."""
    torch.manual_seed(seed)
    if delayed:
        with torch.device("meta"):
            return MODELS[kind]().double()
    model = MODELS[kind]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batches(micro_batches: int, steps: int = STEPS) -> torch.Tensor:
    """[steps, micro-batches, samples, tokens]"""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(
        0, VOCABULARY, (steps, micro_batches, SAMPLES, TOKENS), generator=generator
    )


def own_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int = VOCABULARY, **_: Any
) -> torch.Tensor:
    """Transformers' causal loss, written out."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Pixels):
        return F.cross_entropy(model(tokens), tokens[:, 0])
    if transformers_model(model) is not None:
        return model(input_ids=tokens, labels=tokens).loss
    return own_loss(model(tokens), tokens)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )


@dataclass
class Training:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    shows_gradients: bool = True
    """False: parameters have none, but masters over the world do."""

    def take(self, model: nn.Module, loss: float, norm: float, step: int) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        if self.shows_gradients:
            found = {
                name: p.grad
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            self.gradients |= {
                f"{step} {name}": full(gradient) for name, gradient in found.items()
            }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients of key biases are zero but for rounding errors; a small eps would make
    # steps of these.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


@functools.cache
def alone(
    kind: str,
    micro_batches: int,
    steps: int = STEPS,
    max_norm: float = 0.5,
    delayed: bool = False,
) -> Training:
    """The same training in one process; ``delayed``: from the values of delayed
    initialisation."""
    seen = Training()
    model: Any = build(kind, delayed=delayed)
    if delayed:
        materialize(model, torch.device("cpu"), seed=0)
    known = transformers_model(model)
    if known is not None and "Causal" in known.loss_function.__name__:
        known.loss_function = own_loss
    optimizer = optimizer_of(model)
    for step, micro in enumerate(batches(micro_batches, steps)):
        total = 0.0
        for tokens in micro:
            with Wide():
                loss = loss_of(model, tokens) / micro_batches
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        seen.take(model, total, norm.item(), step)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


@dataclass(frozen=True)
class Case:
    """What one training over ranks is like; the world is tensor x shard x replicas."""

    kind: str
    tensor: int = 2
    shard: int = 1
    sequence: bool = True
    micro_batches: int = 1
    knobs: tuple[tuple[str, Any], ...] = ()
    mutation: str = ""
    steps: int = STEPS

    def parallel(
        self, device: torch.device | None = None, **more: Any
    ) -> ParallelModel:
        model = build(self.kind, seed=dist.get_rank()).to(device)
        if "activations" in dict(self.knobs) and "compile" not in dict(self.knobs):
            model = wide_when_computed_again(model)
        recipe = {
            "plan": PLANS.get(self.kind, "auto"),
            "sequence_parallel": self.sequence,
        }
        knobs = {
            "shard_degree": self.shard,
            "tensor_parallel_degree": self.tensor,
            "tensor_parallel": recipe,
        }
        return parallelize(
            model,
            SmpConfig(**{**knobs, **dict(self.knobs), **more}),
            device=device or "cpu",
        )


def together(
    case: Case, max_norm: float = 0.5, device: torch.device | None = None
) -> Training:
    """The training over the ranks of the default group."""
    seen = Training(shows_gradients=dict(case.knobs).get("optimizer_shard") != "world")
    parallel = case.parallel(device)
    model, mesh = parallel.module, parallel.mesh
    optimizer = optimizer_of(model)
    parallel.prepare_optimizer(optimizer)
    for step, micro in enumerate(batches(case.micro_batches, case.steps)):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for number, tokens in enumerate(micro.to(device)):
            own = tokens.chunk(mesh.data_size)[mesh.data_rank]
            with parallel.window.accumulate(number < case.micro_batches - 1), Wide():
                loss = loss_of(model, own) / case.micro_batches
                loss.backward()
            total += loss.detach()
        norm = parallel.clip_grad_norm_(max_norm)
        dist.all_reduce(total)
        seen.take(model, total.item() / dist.get_world_size(), norm.item(), step)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


def trained(case: Case, steps: int = 2) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """A model and its optimizer after some steps of one micro-batch, for
    checkpoints."""
    parallel = case.parallel()
    optimizer = optimizer_of(parallel.module)
    parallel.prepare_optimizer(optimizer)
    for micro in batches(1, steps):
        own = micro[0].chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
        loss_of(parallel.module, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parallel, optimizer


def everything(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    states = named_optimizer_state(parallel.module, optimizer)["state"]
    found = {name: full(value) for name, value in parallel.model_state().items()}
    for name, entry in states.items():
        found |= {
            f"{name} {key}": full(value)
            for key, value in entry.items()
            if torch.is_tensor(value)
        }
    return found


def differences(
    seen: Training, expected: Training, tolerance: float = 1e-12
) -> list[str]:
    """What is further off than ``tolerance`` from the training of one process;
    gradients where ``seen`` has any."""
    found = []
    for what in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(
            zip(getattr(seen, what), getattr(expected, what), strict=True)
        ):
            if not abs(ours - theirs) <= tolerance:
                found.append(f"{what} of step {step}: {ours} against {theirs}")
    for what in ("gradients", "weights") if seen.gradients else ("weights",):
        ours, theirs = getattr(seen, what), getattr(expected, what)
        if ours.keys() != theirs.keys():
            found.append(
                f"{what} of {sorted(ours.keys() ^ theirs.keys())} on one side only"
            )
        for name in ours.keys() & theirs.keys():
            worst = (ours[name] - theirs[name]).abs().max().item()
            if not worst <= tolerance:
                found.append(f"{what} of {name} is {worst:.3g} off")
    return found


def several(cases: list[Case]) -> list[Training]:
    return [together(case) for case in cases]


def assert_like_one_process(
    cases: list[Case], world: int, ranks_per_node: int | None = None
) -> None:
    for rank, trained in enumerate(
        run_ranks(several, world, cases, ranks_per_node=ranks_per_node, timeout=1200)
    ):
        for case, seen in zip(cases, trained, strict=True):
            assert (
                differences(seen, alone(case.kind, case.micro_batches, case.steps))
                == []
            ), f"{case} on rank {rank}"
