"""Random layouts: pipeline stages, tensor and context ranks, partition groups and
replicas with random knobs, trained with random events between their steps, beside the
same training in one process."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.checkpoint.optimizers import load_named_optimizer_state
from smp_core.checkpoint.reader import load_checkpoint
from smp_core.checkpoint.writer import save_checkpoint
from smp_core.config import SmpConfig
from smp_core.context_parallel.replaced_attention import enabled, part_of_mean
from smp_core.entry import parallelize
from smp_core.pipeline.batches import split_batch
from smp_core.sharding.weights.delayed_init import materialize
from smp_core.tensor_parallel.roles import transformers_model
from tests.core.pipeline.cases import example_of, next_tokens, of_all_stages, pair_loss
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    batches,
    build,
    full,
    loss_of,
    optimizer_of,
    own_loss,
    wide_when_computed_again,
)
from tests.core.tensor_parallel.models import PLANS, SAMPLES

KINDS = (
    "gpt2_deep", "llama_deep", "llama", "opt", "plain", "bloom", "qwen3", "gpt_neox", "bert", "mixtral", "gemma2",
    "phi3", "falcon", "olmo2", "llama_lora", "glm", "strange",
)  # fmt: skip
# Their blocks cast to float32, which compiled and recomputed ones do out of the reach
# of `Wide`.
WITHOUT_CASTS = ("gpt2_deep", "opt", "plain", "bert", "strange")
STEPS = 4
# Each with its default first.
KNOBS: dict[str, tuple[Any, ...]] = {
    "activations": (
        "none",
        "full",
        "selective",
        "every:2",
        {"checkpoint": "full", "offload": True},
    ),
    "reshard_after_forward": (True, False, "node"),
    "keep_between_micro_batches": ("shards", "parameters", "gradients"),
    "optimizer_shard": ("partition", "world"),
    "state_offload": ("none", "optimizer"),
    "chunked_cross_entropy": (0, 7),
    "delayed_init": (False, True),
    "compile": (None, {"backend": "eager"}),
    "collectives": ({}, {"hierarchical": False}),
}
EVENTS = ("evaluate", "freeze", "thaw", "abandon")


@dataclass(frozen=True)
class Layout:
    """Degrees; the world's other ranks are replicas."""

    stages: int = 1
    tensor: int = 1
    context: int = 1
    shard: int = 1
    schedule: str = "1f1b"
    knobs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Run:
    """One training; ``parts``: micro-batches of each of a step's ``windows``
    batches."""

    kind: str
    world: int
    ranks_per_node: int
    layout: Layout
    parts: int
    windows: int
    events: tuple[str, ...]
    goes_on_as: Layout | None = None
    """Loads what was saved in mid-run."""


def draw(seed: int) -> Run:
    """Draw a run; what it asks for may be refused."""
    seeded = random.Random(seed)
    kind, world = seeded.choice(KINDS), seeded.choice((2, 2, 4, 4, 4, 8))
    layout = _layout(seeded, world, kind)
    other = _layout(seeded, world, kind) if seeded.random() < 0.3 else None
    both = (layout, other or layout)
    data = max(world // (each.stages * each.tensor * each.context) for each in both)
    together = max(each.tensor for each in both)
    per_node = seeded.choice(
        [size for size in (1, 2, 4, 8) if together <= size <= world]
    )
    parts = seeded.choice([size for size in (1, 2, 4) if size * data <= SAMPLES])
    events = tuple(seeded.choice(("", "", *EVENTS)) for _ in range(STEPS))
    return Run(
        kind, world, per_node, layout, parts, seeded.choice((1, 1, 2)), events, other
    )


def _layout(seeded: random.Random, world: int, kind: str) -> Layout:
    while True:
        sizes = [seeded.choice((1, 1, 2, 2, 4)) for _ in range(4)]
        stages, tensor, context, shard = sizes
        # Context ranks of a model with a Transformers loss are tested with the
        # trainers.
        fits = world % math.prod(sizes) == 0 and stages <= (4 if "deep" in kind else 2)
        if fits and (context == 1 or kind == "plain") and stages * tensor * context > 1:
            break
    changed = {
        name: seeded.choice(values[1:])
        for name, values in KNOBS.items()
        if seeded.random() < 0.2
    }
    if kind not in WITHOUT_CASTS and "activations" in changed:
        changed.pop("compile", None)
        changed.pop("delayed_init", None)
    if kind in ("plain", "bert", "strange"):
        changed.pop("chunked_cross_entropy", None)
    if kind == "strange":  # one of its modules has no initialiser
        changed.pop("delayed_init", None)
    if tensor > 1 and seeded.random() < 0.3:
        changed["tensor_parallel"] = {"sequence_parallel": False}
    schedules = (
        ("1f1b", "gpipe", "interleaved:2")
        if "deep" in kind and stages == 2
        else ("1f1b", "gpipe")
    )
    return Layout(
        stages, tensor, context, shard, seeded.choice(schedules), tuple(changed.items())
    )


def config_of(run: Run, layout: Layout) -> SmpConfig:
    """Return the knobs; those that are not drawn are their defaults."""
    knobs: dict[str, Any] = {
        "shard_degree": layout.shard,
        "context_parallel_degree": layout.context,
        "pipeline_parallel_degree": layout.stages,
        **dict(layout.knobs),
    }
    if layout.stages > 1:
        knobs["pipeline"] = {"microbatches": run.parts, "schedule": layout.schedule}
    if layout.tensor > 1:
        recipe = {
            "plan": PLANS.get(run.kind, "auto"),
            **dict(layout.knobs).get("tensor_parallel", {}),
        }
        knobs |= {"tensor_parallel_degree": layout.tensor, "tensor_parallel": recipe}
    return SmpConfig(**knobs)


class Trainer:
    """The model over ranks with its optimizer, and what both sides do with them."""

    def __init__(self, run: Run, layout: Layout) -> None:
        self.run, knobs = run, dict(layout.knobs)
        model = build(
            run.kind, seed=dist.get_rank(), delayed=bool(knobs.get("delayed_init"))
        )
        if "activations" in knobs and "compile" not in knobs:
            model = wide_when_computed_again(model)
        keeps_loss = "chunked_cross_entropy" in knobs or layout.tensor > 1
        example_of(transformers_model(model) or model, keeps_loss)
        self.parallel = parallelize(model, config_of(run, layout))
        self.model = self.parallel.module
        self.optimizer = self.make_optimizer()
        self.parallel.prepare_optimizer(self.optimizer)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(model, tokens)

    def backward(self, tokens: torch.Tensor) -> float:
        """Take one batch forward and backward; the window stays open."""
        own, parallel, parts = self._own(tokens), self.parallel, self.run.parts
        scale, made = (
            1 / parts / self.run.windows,
            list(split_batch(self._own(tokens), parts)),
        )
        if parallel.context is not None:
            splits = [
                parallel.context.split((part, next_tokens(part))) for part in made
            ]
            calls = [
                lambda split=split: parallel.run_as_forward(
                    pair_loss, self.model, split
                )
                for split in splits
            ]
        else:
            calls = [
                lambda part=part: parallel.run_as_forward(self.loss, self.model, part)
                for part in made
            ]

        def within(number: int) -> Any:
            return (
                nullcontext() if parallel.context is None else enabled(splits[number])
            )

        with parallel.window.accumulate():
            if parallel.pipeline is not None:
                losses = parallel.pipeline.train(
                    calls, part_of_mean, scale, own, within
                )
            else:
                losses = []
                for number, call in enumerate(calls):
                    with within(number):
                        loss = call()
                        (part_of_mean(loss) * scale).backward()
                    losses.append(loss)
        if parallel.context is not None:
            pairs = zip(losses, splits, strict=False)
            losses = [
                loss if split.weighted else loss * split.weight for loss, split in pairs
            ]
        return self._mean(
            torch.stack([loss.detach() for loss in losses]).mean() if losses else None
        )

    def evaluate(self, tokens: torch.Tensor) -> float:
        parallel, own = self.parallel, self._own(tokens)

        def call() -> torch.Tensor:
            return parallel.run_as_forward(loss_of, self.model, own)

        with torch.no_grad():
            found = (
                call()
                if parallel.pipeline is None
                else parallel.pipeline.evaluate(call, own)
            )
        return self._mean(found)

    def _own(self, tokens: torch.Tensor) -> torch.Tensor:
        mesh = self.parallel.mesh
        return tokens.chunk(mesh.data_size)[mesh.data_rank]

    def _mean(self, loss: torch.Tensor | None) -> float:
        if self.parallel.pipeline is not None:
            loss = self.parallel.pipeline.share(loss)
        assert loss is not None
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def step(self) -> float:
        self.parallel.window.close()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self) -> float:
        return float(self.parallel.clip_grad_norm_(0.5))

    def abandon(self) -> None:
        self.parallel.window.abandon()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        return (
            of_all_stages(self.parallel, named)
            if self.parallel.pipeline
            else {n: full(p) for n, p in named.items()}
        )

    def save(self, folder: Path) -> None:
        state = {
            "state_dict": self.parallel.model_state(),
            "optimizer": self.parallel.optimizer_state(self.optimizer),
        }
        save_checkpoint(folder, state, metadata={"module_prefix": ""})

    def load(self, folder: Path) -> None:
        state: dict[str, Any] = {"state_dict": self.parallel.model_state()}
        load_checkpoint(folder, state)
        self.parallel.take_model_state(state["state_dict"])
        load_named_optimizer_state(folder, ("optimizer",), self.model, self.optimizer)
        self.parallel.reshard()


class Alone:
    """The same in one process."""

    def __init__(self, run: Run) -> None:
        delayed = "delayed_init" in dict(run.layout.knobs)
        self.run, self.model = run, build(run.kind, delayed=delayed)
        if delayed:
            materialize(self.model, torch.device("cpu"), seed=0)
        known = transformers_model(self.model)
        if known is not None and "Causal" in known.loss_function.__name__:
            known.loss_function = own_loss
        self.optimizer = optimizer_of(self.model)

    def backward(self, tokens: torch.Tensor) -> float:
        loss = loss_of(self.model, tokens)
        (loss / self.run.windows).backward()
        return loss.item()

    def evaluate(self, tokens: torch.Tensor) -> float:
        with torch.no_grad():
            return loss_of(self.model, tokens).item()

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def abandon(self) -> None:
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: full(p) for name, p in self.model.named_parameters()}


def freeze(model: nn.Module, trainable: bool) -> None:
    """The second block's parameters; of a model with adapters these alone."""
    has_adapters = any("lora" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if ".1." in name and ("lora" in name or not has_adapters):
            parameter.requires_grad_(trainable)


def train(trainer: Any, run: Run, folder: Path | None = None) -> Training:
    seen = Training()
    steps = len(run.events)
    for number, micro in enumerate(batches(run.windows, steps)):
        event = run.events[number]
        if event in ("freeze", "thaw"):
            freeze(trainer.model, event == "thaw")
        with Wide():
            if event == "evaluate" and run.layout.context == 1:
                # Of odd and even lengths.
                seen.losses.append(
                    trainer.evaluate(micro[0, :, : 11 - number].contiguous())
                )
            if event == "abandon":
                trainer.backward(micro[-1])
                trainer.abandon()
            seen.losses += [trainer.backward(tokens) for tokens in micro]
        seen.norms.append(trainer.step())
        if (
            folder is not None
            and run.goes_on_as is not None
            and number == steps // 2 - 1
        ):
            trainer.save(folder)
            frozen = {
                name
                for name, p in trainer.model.named_parameters()
                if not p.requires_grad
            }
            trainer = type(trainer)(run, run.goes_on_as)
            trainer.load(folder)
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_(name not in frozen)
    seen.weights = trainer.weights()
    return seen


def together(run: Run, folder: Path) -> Training | str:
    """Return the training over the ranks of the default group, or why it was
    refused."""
    try:
        trainer = Trainer(run, run.layout)
        if run.goes_on_as is not None:
            Trainer(run, run.goes_on_as)
    except ValueError:
        return traceback.format_exc(limit=-3)
    return train(trainer, run, folder)


def problems(
    seen: Training, expected: Training, tolerance: float = 1e-12
) -> Iterator[str]:
    """Yield what differs from one process."""
    for what in ("losses", "norms"):
        for number, (ours, theirs) in enumerate(
            zip(getattr(seen, what), getattr(expected, what), strict=True)
        ):
            if not abs(ours - theirs) <= tolerance:
                yield f"{what} {number}: {ours} against {theirs}"
    for name, ours in seen.weights.items():
        worst = (ours - expected.weights[name]).abs().max().item()
        if not worst <= tolerance:
            yield f"{name} is {worst:.3g} off"
    missing = expected.weights.keys() - seen.weights.keys()
    if missing:
        yield f"missing: {sorted(missing)}"


def alone(run: Run) -> Training:
    return train(Alone(run), replace(run, goes_on_as=None))
