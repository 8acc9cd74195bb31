"""Cases of adapters attached to a model, drawn from seeds: each is trained on ranks and
in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import (
    load_checkpoint,
    load_named_optimizer_state,
    save_checkpoint,
)
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.optim import Adafactor
from smp_core.sharding.gradients import RanksDiverged
from smp_core.topology import Topology
from tests.core.sharding.frozen_runs import with_decoded_base

WORLD, WIDTH, STEPS = 4, 16, 5
# Before which step adapters come that are attached last, and after which step a run is
# saved and another goes on.
LATER, SAVED = 2, 3

LAYOUTS: list[dict[str, Any]] = [
    {"shard_degree": 1},
    {"shard_degree": 2},
    {"shard_degree": 4},
    {"shard_degree": 2, "keep_between_micro_batches": "gradients"},
    {"shard_degree": 4, "keep_between_micro_batches": "parameters"},
    {"shard_degree": 2, "reshard_after_forward": False},
    {"shard_degree": 1, "optimizer_shard": "world"},
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 2, "state_offload": "optimizer"},
    {"shard_degree": 1, "optimizer_shard": "world", "state_offload": "optimizer"},
    {"shard_degree": 2, "state_offload": "all"},
    {"shard_degree": 2, "frozen_storage": "int8"},
    {"shard_degree": 4, "frozen_storage": "int4", "reshard_after_forward": False},
    {"shard_degree": 2, "activations": "full"},
]
OPTIMIZERS: dict[
    str,
    tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]],
] = {
    "adamw": (torch.optim.AdamW, torch.optim.AdamW),
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adafactor": (Adafactor, torch.optim.Adafactor),
}


@dataclass(frozen=True)
class Case:
    """A training with adapters.

    Attributes:
        knobs: the layout.
        moments: when the adapters "adapter" and "other" come: "before" the model is
            prepared, "after" that, "later": between two steps.
        later_by: how the optimizer gets what comes later: a "group" of it, or a "new
            optimizer".
        swapped: odd ranks attach in another order, and list parameters in another one.
        alone: the rank that alone attaches the second adapter; None: all do.
        places: the modules that get adapters: "blocks", "first block", "root".
        shared: the adapters of all blocks are one module.
        trained: "adapters", "some": a part of them, "base": the base's vectors too.
        dtype: of adapters; the base's is float64.
        optimizer: of :data:`OPTIMIZERS`.
        micro_batches: of a step.
        clips: the norm is clipped.
        resumed: the layout of a second run that goes on from a checkpoint; None: there
            is none.
        attached_again: when the second run's adapters come.
    """

    knobs: dict[str, Any]
    moments: tuple[str, str]
    later_by: str
    swapped: bool
    alone: int | None
    places: str
    shared: bool
    trained: str
    dtype: torch.dtype
    optimizer: str
    micro_batches: int
    clips: bool
    resumed: dict[str, Any] | None
    attached_again: str

    @property
    def tolerance(self) -> float:
        """Sums in another order, in the dtype of adapters, through five steps."""
        return 1e-12 if self.dtype == torch.float64 else 1e-6

    def __str__(self) -> str:
        return ", ".join(
            f"{each.name}={getattr(self, each.name)}" for each in fields(self)
        )


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    pick = rng.choice
    dtype, alone = (
        pick([torch.float64] * 4 + [torch.float32]),
        pick([None] * 5 + [0, 3]),
    )
    # All ranks make an optimizer where one has an adapter of its own.
    first = "before" if alone is not None else pick(["before", "after", "later"])
    knobs = pick(LAYOUTS)
    # A frozen part of an adapter that comes before the model is prepared would be
    # codes, too.
    trained = pick(
        ["adapters", "some", "base"]
        if "frozen_storage" not in knobs
        else ["adapters", "base"]
    )
    return Case(
        knobs=knobs,
        moments=(first, pick(["before", "after", "later"])),
        later_by=pick(["group", "new optimizer"]),
        swapped=pick([False, True]),
        alone=alone,
        places=pick(["blocks", "blocks", "first block", "root"]),
        shared=pick([False, False, True]),
        trained=trained,
        dtype=dtype,
        # Others divide by square roots of gradients, whose rounding float32 shows where
        # they are near zero.
        optimizer=pick(["adamw", "sgd", "adafactor", "adafactor"])
        if dtype == torch.float64
        else "sgd",
        micro_batches=pick([1, 2]),
        clips=pick([False, True]),
        resumed=pick([None, None, *LAYOUTS[:4], *LAYOUTS[6:9]]),
        attached_again=pick(["before", "after"]),
    )


class LowRank(nn.Module):
    """An adapter with a matrix of fewer rows than ranks, a vector, and a 0-d scale,
    which computes in its own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Linear(WIDTH, 3, bias=False, dtype=dtype),
            nn.Linear(3, WIDTH, dtype=dtype),
        )
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x.to(self.scale.dtype)).tanh()) * self.scale
        return y.to(x.dtype)


class Adaptable(nn.Module):
    """A frozen layer and the adapters that it has, whose order means nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.adapters = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name, sign in (("adapter", 1), ("other", -2)):
            if name in self.adapters:
                y = y + sign * self.adapters[name](x)
        return self.norm(y + x).tanh()


class Block(Adaptable):
    pass


class Net(Adaptable):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x).square().mean()


class Training:
    """A case on this rank, or in one process.

    Args:
        knobs: of this run.
        seed: of the adapters' values, the same on no two ranks.
        moments: when adapters come in this run.
    """

    def __init__(
        self,
        case: Case,
        knobs: dict[str, Any] | None,
        seed: int,
        moments: Sequence[str],
    ) -> None:
        self.case, self._seed = case, seed
        self.rank = dist.get_rank() if knobs is not None else 0
        torch.manual_seed(0)
        self.model = Net().double().requires_grad_(False)
        if case.trained == "base":
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))
        names = dict(zip(("adapter", "other"), moments, strict=True))
        self._later = [name for name, moment in names.items() if moment == "later"]
        self.parallel: ParallelModel | None = None
        if knobs is None and "frozen_storage" in case.knobs:
            with_decoded_base(self.model, case.knobs["frozen_storage"])
        self._attach([name for name, moment in names.items() if moment == "before"])
        if knobs is not None:
            self.parallel = parallelize(
                self.model,
                SmpConfig(units=["Block"], **knobs),
                topology=Topology.discover(),
            )
        self._attach([name for name, moment in names.items() if moment == "after"])
        self.optimizers: list[torch.optim.Optimizer] = []
        if trained := self._trained():
            self._step_with(trained)

    def train(self, begin: int, end: int, ranks: Sequence[int]) -> None:
        """Train steps, with the batches of these ranks."""
        case, window = (
            self.case,
            None if self.parallel is None else self.parallel.window,
        )
        for step in range(begin, end):
            if step == LATER and self._later:
                self._attach(self._later)
                self._take_in(
                    [
                        p
                        for name, p in self._named()
                        if any(f".{each}." in name for each in self._later)
                    ]
                )
            if not self.optimizers:
                continue  # nothing is trained yet
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for micro in range(case.micro_batches):
                last = micro == case.micro_batches - 1
                with nullcontext() if window is None else window.accumulate(not last):
                    for rank in ranks:
                        x = _batch(step, micro, rank)
                        (self.model(x) / (len(ranks) * case.micro_batches)).backward()
            if case.clips and self.parallel is not None:
                self.parallel.clip_grad_norm_(0.01)
            elif case.clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            for optimizer in self.optimizers:
                optimizer.step()

    def whole(self) -> dict[str, torch.Tensor]:
        """Return all weights, gathered."""
        named = self.model.named_parameters()
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in named
        }

    def save(self, folder: Path) -> None:
        assert self.parallel is not None
        states = {
            str(n): self.parallel.optimizer_state(each)
            for n, each in enumerate(self.optimizers)
        }
        save_checkpoint(
            folder, {"model": self.parallel.model_state(), "optimizers": states}
        )

    def load(self, folder: Path) -> None:
        assert self.parallel is not None
        state = self.parallel.model_state()
        load_checkpoint(folder, {"model": state})
        self.parallel.take_model_state(state)
        for number, optimizer in enumerate(self.optimizers):
            load_named_optimizer_state(
                folder, ("optimizers", str(number)), self.parallel.module, optimizer
            )

    def _attach(self, names: Sequence[str]) -> None:
        """Attach adapters, of this rank's values; odd ranks the last one first."""
        case = self.case
        swapped = case.swapped and self.rank % 2 == 1
        for name in reversed(names) if swapped else names:
            if name == "other" and case.alone not in (None, self.rank):
                continue
            torch.manual_seed(self._seed + 100 * (name == "other"))
            shared = LowRank(case.dtype)
            blocks = [self.model] if case.places == "root" else list(self.model.blocks)
            for block in blocks[:1] if case.places == "first block" else blocks:
                block.adapters[name] = shared if case.shared else LowRank(case.dtype)
                if case.trained == "some":
                    block.adapters[name].a.requires_grad_(name == "other")

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.model.named_parameters())
        return named[::-1] if self.case.swapped and self.rank % 2 == 1 else named

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named() if parameter.requires_grad]

    def _take_in(self, late: list[nn.Parameter]) -> None:
        late = [parameter for parameter in late if parameter.requires_grad]
        if self.case.later_by == "group" and self.optimizers:
            self.optimizers[0].add_param_group({"params": late, "lr": 0.02})
        else:
            self._step_with(late or self._trained()[:1])

    def _step_with(self, parameters: Sequence[nn.Parameter]) -> None:
        kind = OPTIMIZERS[self.case.optimizer][self.parallel is None]
        self.optimizers.append(kind(parameters, lr=0.05))
        if self.parallel is not None:
            self.parallel.prepare_optimizer(self.optimizers[-1])


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def on_ranks(case: Case, folder: Path) -> dict[str, torch.Tensor] | str:
    """Return this rank's view of all weights, or what is said of the case."""
    try:
        training = Training(case, case.knobs, dist.get_rank(), case.moments)
        end = STEPS if case.resumed is None else SAVED
        training.train(0, end, [training.rank])
        if case.resumed is not None:
            training.save(folder)
            again = tuple(
                "before" if moment == "before" else case.attached_again
                for moment in case.moments
            )
            training = resumed(case, training, again)
            training.load(folder)
            training.train(SAVED, STEPS, [training.rank])
    except (ValueError, RanksDiverged) as error:
        return str(error)
    return training.whole()


def resumed(case: Case, before: Training, moments: Sequence[str]) -> Training:
    """Return the second run, whose optimizers have the groups of the first one's."""
    names = {id(p): name for name, p in before.model.named_parameters()}
    groups = [
        [[names[id(p)] for p in g["params"]] for g in each.param_groups]
        for each in before.optimizers
    ]
    assert case.resumed is not None
    after = Training(case, {**case.resumed, **_codes(case)}, 50 + before.rank, moments)
    assert after.parallel is not None
    by_name = dict(after.model.named_parameters())
    after.optimizers = []
    for of_optimizer in groups:
        kind = OPTIMIZERS[case.optimizer][0]
        made = kind(
            [
                {"params": [by_name[name] for name in group], "lr": 0.1}
                for group in of_optimizer
            ]
        )
        after.parallel.prepare_optimizer(made)
        after.optimizers.append(made)
    return after


def _codes(case: Case) -> dict[str, Any]:
    return (
        {"frozen_storage": case.knobs["frozen_storage"]}
        if "frozen_storage" in case.knobs
        else {}
    )


def in_one_process(case: Case) -> dict[str, torch.Tensor]:
    training = Training(case, None, 0, case.moments)
    training.train(0, STEPS, list(range(WORLD)))
    return training.whole()
