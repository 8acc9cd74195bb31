"""What a user lists, sets, edits or drops between calls of a sharded model is what is
trained.

Every case is one procedure, written once and run on a plain model in one process and on
a sharded one, whose ranks all have the same samples: losses, norms and weights are
equal to 1e-12 in float64, which leaves room for another order of additions only.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from smp_core.engine.parallel_model import ParallelModel
from tests.core.fuzz.hooks import Cell
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks


class Net(nn.Module):
    """Two cells, which are units of their own, between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.cells = nn.ModuleList([Cell(), Cell()])
        self.leave = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for cell in self.cells:
            x = cell(x)
        return self.leave(x)

    def frozen_inside(self, x: torch.Tensor) -> torch.Tensor:
        """A method that freezes a layer of the root while it is gathered, and uses the
        model's forward."""
        self.enter.weight.requires_grad_(False)
        return self(x)


class Side:
    """A model and what trains it: plain, or sharded."""

    def __init__(self, parallel: ParallelModel | None, model: Net) -> None:
        self.parallel, self.model = parallel, model
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        if parallel is not None:
            parallel.prepare_optimizer(self.optimizer)
        self.seen: list[torch.Tensor] = []

    def micro_batch(self, number: int) -> torch.Tensor:
        return torch.sin(torch.arange(12.0, dtype=torch.float64) + number).view(2, 6)

    def loss(self, number: int) -> torch.Tensor:
        loss = self.model(self.micro_batch(number)).square().mean()
        self.seen.append(loss.detach())
        return loss

    def look(self) -> None:
        """At a prediction."""
        with torch.no_grad():
            self.loss(7)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        with (
            contextlib.nullcontext()
            if self.parallel is None
            else self.parallel.window.accumulate()
        ):
            yield

    def clip(self) -> None:
        if self.parallel is None:
            self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05))
        else:
            self.seen.append(self.parallel.clip_grad_norm_(0.05))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> list[torch.Tensor]:
        weights = (p.detach() for p in self.model.parameters())
        return [
            *self.seen,
            *(p.full_tensor() if isinstance(p, DTensor) else p for p in weights),
        ]


def freezes_after_a_forward(side: Side) -> None:
    for frozen in (True, False, True):
        side.look()
        for module in (side.model.enter, side.model.cells[0]):
            module.requires_grad_(not frozen)
        side.loss(0).backward()
        side.step()


def freezes_between_forward_and_backward(side: Side) -> None:
    loss = side.loss(0)
    side.model.enter.requires_grad_(False)
    side.model.cells[1].requires_grad_(False)
    loss.backward()
    side.step()


def freezes_inside_a_method(side: Side) -> None:
    run = side.model.frozen_inside
    x = side.micro_batch(0)
    out = run(x) if side.parallel is None else side.parallel.run_as_forward(run, x)
    out.square().mean().backward()
    side.step()
    side.loss(1).backward()
    side.step()


def edits_after_a_forward(side: Side) -> None:
    def by_foreach(parameters: list[torch.Tensor]) -> None:
        torch._foreach_mul_(parameters, 0.5)

    def by_data(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.data.mul_(0.5)

    def in_place(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.copy_(parameter * 0.5)

    for edit in (by_foreach, by_data, in_place):
        side.look()
        with torch.no_grad():
            edit(list(side.model.parameters()))
        side.look()
        side.loss(0)  # its graph is dropped
        with torch.no_grad():
            edit([side.model.enter.weight, side.model.cells[0].layer.weight])
        side.loss(1).backward()
        side.step()


def edits_in_a_window(side: Side) -> None:
    with side.accumulate():
        side.loss(0).backward()
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(0.5)
    side.loss(1).backward()
    side.step()


def clips_after_a_forward(side: Side) -> None:
    side.loss(0).backward()
    side.look()
    side.clip()
    side.step()


def hooks_on_parameters(side: Side) -> None:
    side.look()
    handles = [
        p.register_hook(lambda gradient: gradient * 0.5)
        for p in side.model.parameters()
    ]
    side.loss(0).backward()
    side.step()
    for handle in handles:
        handle.remove()
    side.loss(1).backward()
    side.step()


def penalizes_weights(side: Side) -> None:
    """A term of the loss that is made of the parameters themselves, before the model's
    own and after it."""

    def penalty() -> torch.Tensor:
        terms = [p.square().sum() for p in side.model.parameters()]
        return 0.1 * sum(
            term.full_tensor() if isinstance(term, DTensor) else term for term in terms
        )

    for number in range(2):
        with side.accumulate():
            (penalty() + side.loss(number)).backward()
        loss = side.loss(number + 2)
        (loss + penalty()).backward()
        side.clip()
        side.step()


def zeroes_modules(side: Side) -> None:
    for set_to_none in (True, False):
        for zeroed in (
            side.model,
            side.model.cells[0],
            side.model.cells,
            side.model.leave,
        ):
            with side.accumulate():
                side.loss(0).backward()
                zeroed.zero_grad(set_to_none)
                side.loss(1).backward()
                zeroed.zero_grad(set_to_none)
            side.look()
            side.loss(2).backward()
            side.optimizer.step()
            side.model.zero_grad()


def zeroes_at_the_end(side: Side) -> None:
    """What was dropped, to None or to zero, is stepped as without a window."""
    for set_to_none in (False, True):
        with side.accumulate():
            side.loss(0).backward()
            side.model.cells[0].zero_grad(set_to_none)
        if side.parallel is not None:
            side.parallel.window.close()
        side.step()


PROCEDURES: list[Callable[[Side], None]] = [
    freezes_after_a_forward,
    freezes_between_forward_and_backward,
    freezes_inside_a_method,
    edits_after_a_forward,
    edits_in_a_window,
    clips_after_a_forward,
    hooks_on_parameters,
    penalizes_weights,
    zeroes_modules,
    zeroes_at_the_end,
]

WORLD = {"optimizer_shard": "world"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {"shard_degree": 2},
    "unsharded after forward": {"shard_degree": 2, "reshard_after_forward": False},
    "kept through windows": {
        "shard_degree": 2,
        "keep_between_micro_batches": "parameters",
    },
    "whole gradients held": {
        "shard_degree": 2,
        "keep_between_micro_batches": "gradients",
        "reshard_after_forward": True,
    },
    "a copy in the node": {"shard_degree": 4, "reshard_after_forward": "node"},
    "world": {"shard_degree": 2, **WORLD},
    "replicas": {"shard_degree": 1},
    "replicas, world": {"shard_degree": 1, **WORLD},
}


def sharded(**knobs: Any) -> ParallelModel:
    torch.manual_seed(0)
    return parallel_model(Net().double(), units=("Cell",), **knobs)


def on_ranks(name: str) -> dict[str, list[torch.Tensor]]:
    found = {}
    for procedure in PROCEDURES:
        if name.endswith("world") and procedure in (freezes_after_a_forward,):
            continue  # thawed parameters have no masters, which is refused
        parallel = sharded(**LAYOUTS[name])
        side = Side(parallel, parallel.module)
        procedure(side)
        if parallel.units:
            assert all(isinstance(p, DTensor) for p in parallel.module.parameters()), (
                procedure.__name__
            )
        found[procedure.__name__] = side.end()
    return found


@pytest.mark.parametrize(
    "name",
    [
        name if name == "default" else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_what_is_done_between_calls_is_as_in_one_process(name: str) -> None:
    [ours, *_] = run_ranks(on_ranks, 4, name, ranks_per_node=2)
    for procedure in PROCEDURES:
        if procedure.__name__ not in ours:
            continue
        torch.manual_seed(0)
        side = Side(None, Net().double())
        procedure(side)
        expected = side.end()
        for place, (mine, theirs) in enumerate(
            zip(ours[procedure.__name__], expected, strict=True)
        ):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-12), (
                procedure.__name__,
                place,
            )


def refusals() -> dict[str, str]:
    """What would have no effect, or be lost, ends in an error."""

    def assigned_data(model: Net) -> None:
        model.enter.weight.data = model.enter.weight.data * 2

    def replaced(model: Net) -> None:
        model.cells[0].layer.weight = nn.Parameter(
            torch.zeros(6, 6, dtype=torch.float64)
        )

    def changed_inside(model: Net) -> None:
        def change(module: nn.Module, _: Any) -> None:
            with torch.no_grad():
                module.weight.mul_(2)

        model.enter.register_forward_pre_hook(change)

    def data_written_inside(model: Net) -> None:
        def change(module: nn.Module, _: Any) -> None:
            module.weight.data.clamp_(-0.01, 0.01)

        model.cells[0].layer.register_forward_pre_hook(change)

    def data_of_row_written_inside(model: Net) -> None:
        def change(module: nn.Module, _: Any) -> None:
            module.weight[1].data.zero_()
            module.weight.view(-1).data[:2] = 1.0

        model.cells[0].layer.register_forward_pre_hook(change)

    def data_assigned_inside(model: Net) -> None:
        def change(module: nn.Module, _: Any) -> None:
            module.weight.data = torch.renorm(module.weight.data, 2, 0, 0.1)

        model.cells[0].layer.register_forward_pre_hook(change)

    def data_read(model: Net) -> None:
        def read(module: nn.Module, _: Any) -> None:
            assert module.weight.data.isfinite().all()

        model.cells[0].layer.register_forward_pre_hook(read)
        model.enter.weight.data *= 2

    found = {}
    deeds = (
        assigned_data, replaced, changed_inside, data_written_inside,
        data_assigned_inside, data_of_row_written_inside, data_read,
    )  # fmt: skip
    for degree in (1, 2):
        for deed in deeds:
            parallel = sharded(shard_degree=degree)
            parallel.module(torch.ones(2, 6, dtype=torch.float64))
            try:
                deed(parallel.module)
                parallel.module(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
                found[f"{deed.__name__} {degree}"] = ""
            except ValueError as error:
                found[f"{deed.__name__} {degree}"] = str(error)
    try:
        parallel.call(nn.Linear(6, 6), torch.ones(2, 6))
    except ValueError as error:
        found["no module of the model"] = str(error)
    return found


def test_what_would_be_lost_is_refused() -> None:
    for found in run_ranks(refusals, 2, ranks_per_node=2):
        assert "enter.weight.data was assigned to" in found["assigned_data 2"]
        assert "parameter.copy_(value)" in found["assigned_data 2"]
        assert "was replaced after the model was sharded" in found["replaced 2"]
        for inside in (
            "changed",
            "data_written",
            "data_of_row_written",
            "data_assigned",
        ):
            assert "changed in place inside a forward" in found[f"{inside}_inside 2"]
        assert found["data_read 2"] == ""
        said = found["no module of the model"]
        assert "parallel.call(Linear): it is no module of the sharded Net" in said
        # Plain parameters.
        assert found["assigned_data 1"] == found["changed_inside 1"] == ""


WRITES_TO_A_ROW: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda weight: weight[1].detach().zero_(),
    "mul_": lambda weight: weight.data[1:3].detach()[0].mul_(2.0),
    "add_": lambda weight: weight[1].data.view(-1)[2:].add_(1.0),
    "neg_": lambda weight: weight[1].neg_(),
    "_foreach_zero_": lambda weight: torch._foreach_zero_([weight[1]]),
    "add": lambda weight: torch.add(weight[1], 1.0, out=weight[1]),
    "normal_": lambda weight: nn.init.normal_(weight[1]),
}


def write_by_index(weight: Any, rows: torch.Tensor) -> None:
    """Where no shard is in the way, as torch computes it."""
    everywhere = weight.redistribute(placements=[Replicate()] * weight.ndim).clone()
    everywhere[everywhere > 0] = 0.0
    assert torch.equal(everywhere.to_local(), weight.full_tensor().clamp(max=0.0))
    with implicit_replication():
        everywhere[rows[:2]] = 1.0
    assert everywhere.to_local()[rows[:2]].eq(1.0).all()


def written_between_calls() -> tuple[str, torch.Tensor]:
    """Shards that are assigned to, as prune.remove, vector_to_parameters and merged
    adapters do: weights may be saved, and no call follow that could find it. And a row
    into which a tensor is written that is split along columns, as torch's results of
    rows are. And rows that are copied to places of the whole weight."""
    model: Any = sharded(shard_degree=2).module
    weight: Any = model.enter.weight
    said = ""
    rows, whole = torch.arange(len(weight)).flip(0), weight.full_tensor()
    with torch.no_grad():
        assert torch.equal(weight.index_copy(0, rows, whole), whole.flip(0))
        column = weight[:, 0]
        for some in (rows, rows[:1]):
            with pytest.raises(RuntimeError, match="index_copy_"):
                column.index_copy_(0, some, whole[some, 0])
        assert torch.equal(column.full_tensor(), whole[:, 0])
        # A row is a copy here, a column is this rank's part of the weight itself.
        refused = "into a row or slice of enter.weight"
        with pytest.raises(ValueError, match=f"zero_ {refused}"):
            weight[1].zero_()
        with pytest.raises(ValueError, match=f"copy_ {refused}"):
            weight[1] = whole[0]
        with pytest.raises(ValueError, match=f"add_ {refused}"):
            weight[1:3][0] += 1.0
        with pytest.raises(ValueError, match="into a row or slice of a tensor"):
            torch.zeros_like(weight).split(1)[0].fill_(1.0)
        with pytest.raises(ValueError, match=f"zero_ {refused}"):
            weight.view(-1)[1:3].zero_()
        # Nor by another way to the row, another operation, or inside of a call.
        for kind, write in WRITES_TO_A_ROW.items():
            with pytest.raises(ValueError, match=f"{kind} into a row or slice of "):
                write(weight)
        inner = model.cells[0].layer.weight
        handle = model.enter.register_forward_pre_hook(
            lambda *_: inner.detach()[1].detach().neg_()
        )
        with pytest.raises(ValueError, match=r"into a row or slice of cells\.0\.layer"):
            model(torch.ones(2, 6, dtype=torch.float64))
        handle.remove()
        # torch 2.11 computes neither of a sharded tensor.
        if torch.__version__ >= (2, 12):
            weight[:1].squeeze_()  # nothing is written
            write_by_index(weight, rows)
        with torch.enable_grad():
            recorded = weight * 1.0
            with pytest.raises(ValueError, match="into a row or slice of a tensor"):
                recorded[1] *= 2.0
        assert torch.equal(weight.full_tensor(), whole)
        column.mul_(2.0)
        assert torch.equal(weight.full_tensor()[:, 0], 2 * whole[:, 0])
    try:
        weight.data = weight.data * 2
    except ValueError as error:
        said = str(error)
    row = distribute_tensor(torch.ones(1, 6), weight.device_mesh, [Shard(0)])
    row.addcmul_(row, row.redistribute(placements=[Shard(1)]), value=2)
    row += row.redistribute(placements=[Shard(1)])
    return said, row.full_tensor()


def test_shards_are_written_into_and_not_assigned_to() -> None:
    for said, row in run_ranks(written_between_calls, 2, ranks_per_node=2):
        assert "enter.weight.data was assigned to" in said
        assert torch.equal(row, torch.full((1, 6), 6.0))


def cast_over_and_over() -> str:
    model = sharded(shard_degree=2).module
    try:
        for _ in range(30):
            model.float()
            model.double()
            model.float()
            model.double()
            model(torch.ones(2, 6, dtype=torch.float64))
    except ValueError as error:
        return str(error)
    return ""


def test_a_cast_is_no_assignment_of_data() -> None:
    # The id of a tensor that is gone may be that of the one in its place.
    assert run_ranks(cast_over_and_over, 2) == ["", ""]


def copies_zero_their_own() -> tuple[bool, bool]:
    model = sharded(shard_degree=1).module
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in [model, *again]:
        each(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    for each in again:
        each.zero_grad()
    return (
        all(p.grad is None for each in again for p in each.parameters()),
        all(p.grad is not None for p in model.parameters()),
    )


def test_zero_grad_of_a_copy_is_the_copys_own() -> None:
    assert run_ranks(copies_zero_their_own, 1) == [(True, True)]


class Scaled(nn.Linear):
    """Reads in its forward what is noted on its weight."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight.gain = 3.0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.gain


def read_in_forwards() -> bool:
    model = nn.Sequential(Scaled(), Scaled()).double()
    x = torch.ones(2, 6, dtype=torch.float64)
    expected = model(x)
    module = parallel_model(model, shard_degree=2).module
    return all(torch.allclose(module(x), expected, atol=1e-12) for _ in range(2))


def test_what_is_noted_on_a_parameter_is_there_in_forwards() -> None:
    assert run_ranks(read_in_forwards, 2) == [True, True]
