"""Random trainings of mixtures of experts, drawn from a seed: a family with something
unusual, a layout with expert ranks, knobs, an optimizer, uneven batches, events between
steps. Each trains as one process does, or is refused on all ranks before training."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from smp_core.cluster import DEGREES
from smp_core.engine.averaging import ShardedAverage
from smp_core.optim import Muon, muon_groups
from tests.core.expert_parallel.cases import BIAS, RATE
from tests.core.expert_parallel.models import DRAWN, WITH_BIASES, featured, features_of
from tests.core.fuzz import layouts
from tests.core.fuzz.layouts import Layout
from tests.core.pipeline.cases import of_all_stages
from tests.core.tensor_parallel.model_cases import Training, full, loss_of
from tests.core.tensor_parallel.models import MODELS, TOKENS

STEPS = 3
KNOBS: dict[str, tuple[Any, ...]] = {
    "activations": ("full", "selective", "every:2", {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}),
    "chunked_cross_entropy": (7,),
    "collectives": ({"hierarchical": False}, {"meter": False}, {"forward_prefetch": 2}),
    "compression": (
        {"gather": "int8", "gather_exclude": ["*"]},
        {"gather": "int8", "gather_after_steps": 1000, "gather_inside_nodes": True},
    ),
    "delayed_init": (True,),
    "fp8": (False,),
    "keep_between_micro_batches": ("parameters", "gradients"),
    "on_nonfinite_grad_norm": ("skip", "raise"),
    "optimizer_shard": ("world",),
    "reshard_after_forward": (False, 2, "node"),
    "state_offload": ("optimizer", "optimizer", "all"),
    "units": ({"min_parameters": 3000},),
}  # fmt: skip
# Slow, or refused with most of the others.
RARE: dict[str, tuple[Any, ...]] = {
    "activations": ({"offload": True},),
    "collectives": ({"hierarchical": True}, {"symmetric_memory": True}),
    "compile": ({"backend": "eager"},),
    "expert_parallel_degree": (1, 3, 8),
    "router_balance": ("global",),
    "units": ({"optional": ["*.experts"]},),
}
OPTIMIZERS = ("adamw", "adamw", "adamw", "sgd", "sgd", "muon")
CLIPPED = ("norm", "norm", "sum", "largest", "experts", "nothing")
BATCHES = ("even", "even", "ragged", "idle rank")


@dataclass(frozen=True)
class Drawn(layouts.Run):
    """One training. ``kind``: a family and its features; ``batches``: "ragged" ones
    have another length on each rank, "idle rank" counts the last rank's loss
    nothing."""

    optimizer: str = "adamw"
    clipped: str = "norm"
    averages: bool = False
    batches: str = "even"

    @property
    def data_size(self) -> int:
        layout = self.layout
        return self.world // (layout.stages * layout.tensor * layout.context)


def draw(seed: int) -> Drawn:
    """Draw a training; what it asks for may be refused."""
    seeded = random.Random(seed)
    # The model.
    family = seeded.choice(DRAWN)
    features = seeded.sample(
        features_of(family), min(seeded.choice((0, 1, 1, 2)), len(features_of(family)))
    )
    if "frozen others" in features:
        # Something has to train.
        features = [each for each in features if each != "frozen experts"]
    optimizer = seeded.choice(OPTIMIZERS)
    # Layouts, of before and after a checkpoint; routers' biases are updated in both, as
    # they are one training.
    world = seeded.choice((2, 2, 4, 4, 4, 4, 4, 4, 8))
    rate = (
        {"router_bias_update_rate": RATE}
        if family in WITH_BIASES and seeded.random() < 0.5
        else {}
    )
    # Which is of one layout's micro-batches.
    count = 1 if "auxiliary" in features else seeded.choice((1, 1, 1, 1, 2))
    both = [
        _layout(seeded, world, family, features, rate, optimizer) for _ in range(count)
    ]
    if any(each.schedule.startswith("interleaved") for each in both):
        features.append("4 layers")
    tensor = max(each.tensor for each in both)
    per_node = seeded.choice(
        [size for size in (1, 2, 2, 4, 8) if tensor <= size <= world]
    )
    # Batches.
    some = (2, 4) if "4 layers" in features else (1, 2, 4)
    if some[0] * _data_size(world, both) > layouts.SAMPLES:
        both = both[:1]
    data = _data_size(world, both)
    parts = seeded.choice([size for size in some if size * data <= layouts.SAMPLES])
    is_one_pass = "auxiliary" in features or both[0].context > 1 or len(both) > 1
    batches = "even" if is_one_pass else seeded.choice(BATCHES)
    if batches == "ragged" and tensor > 1:  # which divide the tokens of a sequence
        batches = "even"
    # Steps. An evaluation's auxiliary loss is that of a rank's tokens.
    is_frozen = any("frozen" in each or "adapted" in each for each in features)
    left_out = ["freeze", "thaw"] if is_frozen or optimizer == "muon" else []
    left_out += ["evaluate"] if "auxiliary" in features else []
    drawn = [seeded.choice(("", "", *layouts.EVENTS)) for _ in range(STEPS)]
    events = tuple("" if each in left_out else each for each in drawn)
    averages = len(both) == 1 and seeded.random() < 0.2
    return Drawn(
        ", ".join((family, *features)), world, per_node, both[0], parts, seeded.choice((1, 1, 2)), events,
        both[1] if len(both) > 1 else None, optimizer, seeded.choice(CLIPPED), averages, batches,
    )  # fmt: skip


def _data_size(world: int, both: Sequence[Layout]) -> int:
    return max(world // (each.stages * each.tensor * each.context) for each in both)


def _layout(
    seeded: random.Random,
    world: int,
    family: str,
    features: Sequence[str],
    knobs: Mapping[str, Any],
    optimizer: str,
) -> Layout:
    """Degrees whose product divides the world, most of them with expert ranks, and two
    to four knobs more."""
    sizes = [size for size in (2, 4, 8) if size <= world]
    while True:
        stages, tensor, context = (seeded.choice((1, 1, 1, 2)) for _ in range(3))
        shard = seeded.choice(sizes)
        fits = world % (stages * tensor * shard) == 0 and shard % context == 0
        if fits and (tensor == 1 or family != "own experts"):  # which no plan splits
            break
    inside = [size for size in (2, 2, 4, 4) if shard % size == 0]
    names = seeded.sample(sorted(KNOBS), seeded.choice((2, 2, 3, 4)))
    more = {name: seeded.choice(KNOBS[name]) for name in names}
    degree = {"expert_parallel_degree": seeded.choice([*inside, "node", "auto"])}
    asked: dict[str, Any] = {**degree, **knobs, **more}
    if seeded.random() < 0.1:
        name = seeded.choice(sorted(RARE))
        asked[name] = seeded.choice(RARE[name])
    if optimizer == "muon":  # refused of others' parts, and of the host's
        asked = {
            name: value
            for name, value in asked.items()
            if name not in ("optimizer_shard", "state_offload")
        }
    if asked.get("optimizer_shard") == "world" and asked.get("state_offload") == "all":
        asked["state_offload"] = "optimizer"
    has_hooks = any(each.startswith("to ") for each in features)  # which see all tokens
    if tensor > 1 and (has_hooks or seeded.random() < 0.3):
        asked["tensor_parallel"] = {"sequence_parallel": False}
    schedule = (
        seeded.choice(("1f1b", "gpipe", "interleaved:2")) if stages == 2 else "1f1b"
    )
    return Layout(stages, tensor, context, shard, schedule, tuple(asked.items()))


def optimizer_of(run: Drawn, model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: gradients of key biases are zero but for rounding errors.
    if run.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
        )
    if run.optimizer == "muon":
        groups = muon_groups(model, adamw={"lr": 1e-2, "eps": 1e-4})
        return Muon(groups, lr=0.01, ns_dtype=torch.float64)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def part_of(run: Drawn, tokens: torch.Tensor, rank: int) -> tuple[torch.Tensor, float]:
    """What a rank trains of its micro-batch, and the factor of its loss."""
    is_last = rank == run.data_size - 1
    if run.batches == "ragged":
        return tokens[:, : TOKENS - 3 * (rank % 3)].contiguous(), 1.0
    return tokens, 0.0 if run.batches == "idle rank" and is_last else 1.0


def clipping(run: Drawn, model: nn.Module) -> dict[str, Any]:
    """How gradients are clipped: the arguments of both sides' functions."""
    most = math.inf if run.clipped == "nothing" else 0.5
    kinds = {"sum": 1.0, "largest": math.inf}
    of_experts = [
        p
        for name, p in model.named_parameters()
        if "experts" in name and p.requires_grad
    ]
    only = {"parameters": of_experts} if run.clipped == "experts" and of_experts else {}
    return {"max_norm": most, "norm_type": kinds.get(run.clipped, 2.0), **only}


class Together(layouts.Trainer):
    """A drawn training over the ranks of the default group."""

    run: Drawn
    average: ShardedAverage | None = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        return optimizer_of(self.run, self.model)

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        own, factor = part_of(self.run, tokens, self.parallel.mesh.data_rank)
        return loss_of(model, own) * factor

    def clip(self) -> float:
        return float(self.parallel.clip_grad_norm_(**clipping(self.run, self.model)))

    def step(self) -> float:
        if self.run.averages and self.average is None:
            self.average = ShardedAverage(self.parallel)
        norm = super().step()
        if self.average is not None:
            self.average.update_parameters()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        found = super().weights()
        biases = [name for name, _ in self.model.named_buffers() if name.endswith(BIAS)]
        if biases:  # averages have those of all stages
            of_all = ShardedAverage(self.parallel).weights()
            found |= {name: of_all[name] for name in biases}
        if self.average is not None:
            named = dict(self.model.named_parameters())
            averages = {
                name: each
                for name, each in self.average.weights().items()
                if name in named
            }
            whole = (
                of_all_stages(self.parallel, averages)
                if self.parallel.pipeline
                else averages
            )
            found |= {f"average of {name}": full(each) for name, each in whole.items()}
        return found


class Alone(layouts.Alone):
    """The same in one process, with the micro-batches of all ranks where a loss is not
    the mean of their parts'."""

    run: Drawn
    average: AveragedModel | None = None

    def __init__(self, run: Drawn) -> None:
        super().__init__(run)
        self.optimizer = optimizer_of(run, self.model)
        if run.averages:
            self.average = AveragedModel(self.model)
        self.chosen: dict[Any, list[torch.Tensor]] = {}
        if "router_bias_update_rate" in dict(run.layout.knobs):
            blocks: list[Any] = list(self.model.modules())
            for block in blocks:
                if hasattr(getattr(block, "gate", None), BIAS):
                    block.experts.register_forward_pre_hook(
                        functools.partial(self._note, block.gate)
                    )

    def _note(self, gate: Any, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self.chosen.setdefault(gate, []).append(args[1])

    def backward(self, tokens: torch.Tensor) -> float:
        run, total = self.run, 0.0
        of_ranks = [own.chunk(run.parts) for own in tokens.chunk(run.data_size)]
        for micro_batch in zip(*of_ranks, strict=True):
            # All ranks' tokens in one pass, or each rank's in its own.
            passes = [(torch.cat(micro_batch), 1.0)]
            if run.batches != "even":
                passes = [
                    part_of(run, own, rank) for rank, own in enumerate(micro_batch)
                ]
            for own, factor in passes:
                loss = loss_of(self.model, own) * factor / len(passes) / run.parts
                (loss / run.windows).backward()
                total += loss.item()
        return total

    def step(self) -> float:
        arguments = clipping(self.run, self.model)
        given = arguments.pop("parameters", list(self.model.parameters()))
        norm = torch.nn.utils.clip_grad_norm_(given, **arguments).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        for gate, chosen in self.chosen.items():
            bias = getattr(gate, BIAS)
            counts = (
                torch.cat([each.flatten() for each in chosen])
                .bincount(minlength=bias.numel())
                .double()
            )
            bias.add_(RATE * (counts.mean() - counts).sign().view(bias.shape))
            chosen.clear()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        found = super().weights()
        found |= {
            name: each
            for name, each in self.model.named_buffers()
            if name.endswith(BIAS)
        }
        if self.average is not None:
            averages = dict(self.average.module.named_parameters())
            found |= {
                f"average of {name}": each.detach() for name, each in averages.items()
            }
        return found


def outcome(run: Drawn, folder: Path) -> str:
    """What a training came to on this rank: "exact", "refused: ..." or what is wrong;
    run by each rank."""
    MODELS.setdefault(run.kind, functools.partial(featured, run.kind))
    try:
        trainer = Together(run, run.layout)
        if run.goes_on_as is not None:
            Together(run, run.goes_on_as)
    except ValueError as error:
        said = str(error)
        asked = [
            name
            for each in (run.layout, run.goes_on_as)
            if each is not None
            for name, _ in each.knobs
        ]
        names = any(
            name in said
            for name in (
                *asked,
                "shard_degree",
                "tensor_parallel",
                "pipeline",
                *DEGREES.values(),
            )
        )
        return f"refused: {said}" if names else f"refused without a knob: {said}"
    seen = layouts.train(trainer, run, folder)
    expected: list[Training | None] = [
        layouts.train(Alone(run), run) if dist.get_rank() == 0 else None
    ]
    dist.broadcast_object_list(expected)
    assert expected[0] is not None
    wrong = list(layouts.problems(seen, expected[0]))
    return f"wrong: {'; '.join(wrong[:5])}" if wrong else "exact"
