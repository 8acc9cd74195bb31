"""Training steps with something unusual about which parameters get gradients when.

A scenario is a model and, for each micro-batch and data rank, a loss. :func:`alone`
runs it in one process (each micro-batch's loss is the mean over data ranks),
:func:`together` on the ranks of a mesh. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.cluster.mesh import SmpMesh
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import build_mesh, parallelize
from smp_core.topology import Topology

WIDTH = 6

Gradients = dict[str, torch.Tensor | None]


class Cell(nn.Module):
    """A unit with two ways through it; uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, ways: str = "lr") -> torch.Tensor:
        if "l" in ways:
            x = x + torch.tanh(self.left(x))
        if "r" in ways:
            x = x + torch.sin(self.right(x))
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Another way in than forward, for ``forward_methods``."""
        return torch.sigmoid(self.right(x))


class Net(nn.Module):
    """Cells, called as ``path`` says: ``"0l 1lr 2e"`` is cell 0 by its left way, cell 1
    by both, cell 2 by encode."""

    def __init__(self, cells: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(cells))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(3, WIDTH))

    def forward(
        self, x: torch.Tensor, path: str, *, gain: bool = True, bias: bool = True
    ) -> torch.Tensor:
        x = self.enter(x)
        for step in path.split():
            cell = self.cells[int(step[0])]
            x = cell.encode(x) if step[1:] == "e" else cell(x, step[1:])
        if bias:
            x = x + self.bias.sum(0)
        return x * self.gain if gain else x


@dataclass(frozen=True)
class Scenario:
    """``loss(model, micro, rank)``; ``prepare(model, micro)`` runs before each
    micro-batch, e.g. to freeze.

    ``per_replica``: ranks 0 and 1 use other units than ranks 2 and 3, which cannot be
    one partition group then.
    """

    loss: Callable[[nn.Module, int, int], torch.Tensor]
    micro_batches: int = 2
    prepare: Callable[[nn.Module, int], None] = lambda model, micro: None
    build: Callable[[], nn.Module] = Net
    per_replica: bool = False
    forward_methods: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ("Cell",)


def samples(micro: int, rank: int, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)


def by_path(
    choose: Callable[[int, int], str], **options: bool
) -> Callable[[nn.Module, int, int], torch.Tensor]:
    """A loss whose path through the cells depends on (micro-batch, data rank)."""

    def loss(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
        return (
            model(samples(micro, rank), choose(micro, rank), **options).square().mean()
        )

    return loss


def freeze(model: nn.Module, pattern: str, trainable: bool) -> None:
    for name, parameter in model.named_parameters():
        if pattern in name:
            parameter.requires_grad_(trainable)


def optional_gain(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
    return (
        model(samples(micro, rank), "0lr 1lr 2lr", gain=rank == 1, bias=micro == 1)
        .square()
        .mean()
    )


def in_two_parts(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
    """Two forwards of the whole model before one backward."""
    first = model(samples(micro, rank), "0lr 1l").square().mean()
    return first + model(samples(micro, rank + 10), "1r 2lr").abs().mean()


class Penalized(nn.Module):
    """Its only cell returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(WIDTH, WIDTH), PenalizedCell()

    def forward(self, x: torch.Tensor, penalized: bool = True) -> torch.Tensor:
        penalty, x = self.cell(self.enter(x))
        return x.square().mean() + (penalty if penalized else 0.0)


class PenalizedCell(Cell):
    """The first output depends on no input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        penalty = self.right.weight.square().mean()
        return penalty, super().forward(x, "l")


SCENARIOS: dict[str, Scenario] = {
    "everything is used": Scenario(by_path(lambda micro, rank: "0lr 1lr 2lr")),
    "nobody uses a way": Scenario(by_path(lambda micro, rank: "0l 1r 2lr")),
    "a way only in the first micro-batch": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if m == 0 else "0l 1lr 2r")
    ),
    "a way only in the last micro-batch": Scenario(
        by_path(lambda m, r: "0l 1lr 2r" if m == 0 else "0lr 1lr 2lr")
    ),
    "other ways in each micro-batch": Scenario(
        by_path(lambda m, r: "0l 1r 2l" if m == 0 else "0r 1r 2r")
    ),
    "one rank uses a way": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if r == 1 else "0l 1lr 2r")
    ),
    "one rank uses a way in one micro-batch": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if (m, r) == (0, 2) else "0l 1lr 2r"),
        micro_batches=3,
    ),
    "every rank another way": Scenario(
        by_path(lambda m, r: "0l 1r 2l" if r % 2 else "0r 1l 2r")
    ),
    "a cell is never used": Scenario(by_path(lambda m, r: "0lr 2lr")),
    "a cell only in one micro-batch": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if m == 1 else "0lr 2lr")
    ),
    "a cell only in the first micro-batch": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if m == 0 else "0lr 2lr")
    ),
    "a cell only on one replica": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if r < 2 else "0lr 2lr"), per_replica=True
    ),
    "another cell on each replica": Scenario(
        by_path(lambda m, r: "0lr 2lr" if r < 2 else "1lr 2lr"), per_replica=True
    ),
    "other cells in each micro-batch and replica": Scenario(
        by_path(lambda m, r: "0lr 2lr" if (r < 2) == (m == 0) else "1lr 2lr"),
        micro_batches=3,
        per_replica=True,
    ),
    "a cell twice on one replica": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr 1lr" if r < 2 else "0lr 1lr 2lr"),
        per_replica=True,
    ),
    "a cell twice in one forward": Scenario(by_path(lambda m, r: "0lr 1lr 2lr 1lr")),
    "a cell twice, other ways": Scenario(by_path(lambda m, r: "0lr 1l 2lr 1r")),
    "a cell twice, other ways on each rank": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr 1lr" if r % 2 else "0lr 1 2lr 1lr"),
        # So that the last use has every gradient there is.
        prepare=lambda model, micro: freeze(model, "never", False),
    ),
    "a cell three times in a row": Scenario(
        by_path(lambda m, r: "0lr 1lr 1l 1lr 2l"), micro_batches=1
    ),
    "two forwards, one backward": Scenario(in_two_parts),
    "frozen between micro-batches": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr"),
        prepare=lambda model, micro: freeze(model, "left", micro == 0),
    ),
    "thawed between micro-batches": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr"),
        prepare=lambda model, micro: freeze(model, "left", micro > 0),
    ),
    "frozen in the middle": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr"),
        micro_batches=3,
        prepare=lambda model, micro: freeze(model, "cells.1", micro != 1),
    ),
    "a cell frozen in the last micro-batch": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr"),
        prepare=lambda model, micro: freeze(model, "cells.1", micro == 0),
    ),
    "a cell thawed while another replica uses it": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if (r < 2) == (m == 0) else "0lr 2lr"),
        prepare=lambda model, micro: freeze(model, "cells.1.left", micro == 1),
        per_replica=True,
    ),
    "a cell frozen after another replica used it": Scenario(
        by_path(lambda m, r: "0lr 1lr 2lr" if (r < 2) == (m == 0) else "0lr 2lr"),
        prepare=lambda model, micro: freeze(model, "cells.1", micro == 0),
        per_replica=True,
    ),
    "a cell only by another method": Scenario(
        by_path(lambda m, r: "0lr 1e 2lr"), forward_methods=("cells.1.encode",)
    ),
    "a cell twice by another method": Scenario(
        by_path(lambda m, r: "0lr 1e 2lr 1e" if m == 1 else "1lr"),
        forward_methods=("cells.1.encode",),
    ),
    "an output that depends on no input": Scenario(
        lambda model, micro, rank: model(samples(micro, rank)),
        build=Penalized,
        wrap=("PenalizedCell",),
    ),
    "an output that depends on no input, on one replica": Scenario(
        lambda model, micro, rank: model(samples(micro, rank), rank < 2),
        build=Penalized,
        wrap=("PenalizedCell",),
        per_replica=True,
    ),
    "replicated parameters on some ranks": Scenario(optional_gain),
}


def alone(scenario: Scenario, world: int) -> Gradients:
    """Gradients of one process after the scenario's micro-batches."""
    torch.manual_seed(0)
    model = scenario.build().double()
    for micro in range(scenario.micro_batches):
        scenario.prepare(model, micro)
        total = sum(scenario.loss(model, micro, rank) for rank in range(world)) / world
        total.backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
    return found


def differences(ours: Gradients, expected: Gradients) -> list[str]:
    """What differs by more than 1e-12, or is None on one side only."""
    assert ours.keys() == expected.keys()
    found = []
    for name, value in expected.items():
        mine = ours[name]
        if mine is None or value is None:
            if mine is not value:
                found.append(f"{name}: {mine} against {value}")
        elif (worst := (mine - value).abs().max().item()) > 1e-12:
            found.append(f"{name} is {worst} off")
    return found


# Meshes by world group (of the present case alone), degree and stages: making process
# groups takes longer than most of what is done with them here.
_meshes: dict[tuple[Any, ...], SmpMesh] = {}


def parallel_model(model: nn.Module, **knobs) -> ParallelModel:
    config = SmpConfig(**knobs)
    key = (
        dist.group.WORLD,
        config.shard_degree,
        config.collectives.hierarchical,
        config.reshard_after_forward,
    )
    if key not in _meshes:
        for old in [old for old in _meshes if old[0] is not dist.group.WORLD]:
            del _meshes[old]
        _meshes[key], _ = build_mesh(config, Topology.discover(), "cpu")
    return parallelize(model, config, mesh=_meshes[key])


def allowed(degree: int) -> list[str]:
    """Scenarios for four ranks in partition groups of ``degree``."""
    return [
        name
        for name, scenario in SCENARIOS.items()
        if degree <= 2 or not scenario.per_replica
    ]


def together(
    names: list[str], *, by_hand: bool = False, **knobs
) -> dict[str, Gradients]:
    """Gradients of the ranks, by scenario; ``by_hand``: the window is closed by a call
    instead of by its last pass."""
    found = {}
    for name in names:
        scenario = SCENARIOS[name]
        parallel = net_on_ranks(scenario, **knobs)
        try:
            run_window(parallel, scenario, by_hand=by_hand)
        except Exception as error:
            raise RuntimeError(f"scenario {name!r}") from error
        found[name] = gradients(parallel.module)
    return found


def net_on_ranks(scenario: Scenario, **knobs) -> ParallelModel:
    """Every rank draws other initial weights; rank 0's are those of :func:`alone`."""
    torch.manual_seed(0 if dist.get_rank() == 0 else 17)
    return parallel_model(
        scenario.build().double(),
        units=scenario.wrap,
        forward_methods=scenario.forward_methods,
        **knobs,
    )


def run_window(
    parallel: ParallelModel, scenario: Scenario, *, by_hand: bool = False
) -> None:
    for micro in range(scenario.micro_batches):
        scenario.prepare(parallel.module, micro)
        with parallel.window.accumulate(by_hand or micro < scenario.micro_batches - 1):
            scenario.loss(parallel.module, micro, parallel.mesh.data_rank).backward()
    if by_hand:
        parallel.window.close()
