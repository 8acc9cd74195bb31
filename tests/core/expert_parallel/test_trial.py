"""Experts of one's own whose forward is no sum by expert are refused before training,
on all ranks; a choice of no expert adds nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.expert_parallel.trial import try_experts
from tests.core.blocks import OwnExperts
from tests.core.expert_parallel.models import EXPERTS, OwnModel
from tests.harness import run_ranks


class Experts(OwnExperts):
    def __init__(self) -> None:
        super().__init__(EXPERTS, 16, spread=0.25)


class ByExpert(Experts):
    """A buffer with a number for each expert, which no rank counts from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.arange(1.0, EXPERTS + 1))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        sizes = self.sizes[: self.num_experts][chosen]
        return super().forward(hidden, chosen, weights * sizes)


class Normalised(Experts):
    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        shares = weights / weights.sum(-1, keepdim=True)
        return super().forward(hidden, chosen, shares)


class WeighsInputs(Experts):
    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for place in range(chosen.shape[-1]):
            one = chosen[:, place : place + 1]
            inputs = hidden * weights[:, place : place + 1]
            total = total + super().forward(inputs, one, torch.ones_like(one).double())
        return total


class WithResidual(Experts):
    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden + super().forward(hidden, chosen, weights)


class Counting(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return super().forward(hidden, chosen, weights)


class Dropping(Experts):
    """Drops in training, which a trial leaves out, and counts its calls."""

    calls = 0

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        dropped = nn.functional.dropout(hidden, 0.5, self.training)
        return super().forward(dropped, chosen, weights)


KINDS = {
    ByExpert: "with a part of its experts",
    Normalised: "with a part of its experts",
    WeighsInputs: "with a part of its experts",
    WithResidual: "with a part of its experts",
    Counting: "writes into its buffer load",
}


@contextlib.contextmanager
def some_of(experts: Dropping, first: int, number: int) -> Iterator[None]:
    whole = experts.matrices
    experts.matrices = nn.Parameter(whole[first : first + number])
    experts.num_experts = number
    yield
    experts.matrices, experts.num_experts = whole, EXPERTS


def refusals() -> list[str]:
    found = []
    for kind in KINDS:
        model = OwnModel().double()
        model.blocks[1].experts = kind().double()
        knobs = SmpConfig(shard_degree=2, expert_parallel_degree=2)
        with pytest.raises(ValueError) as error:
            parallelize(model, knobs)
        found.append(str(error.value))
    return found


def test_experts_that_are_no_sum_by_expert_are_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, 2):
        for text, part in zip(found, KINDS.values(), strict=True):
            assert "expert_parallel_degree=2: blocks.1.experts" in text
            assert part in text, text


def test_a_trial_leaves_experts_as_they_were() -> None:
    experts, before = Dropping().double(), torch.get_rng_state()
    found = try_experts(experts, "experts", 2, partial(some_of, experts))
    assert found is None and experts.calls == 0 and experts.training
    assert torch.equal(torch.get_rng_state(), before)
    assert experts.num_experts == EXPERTS and experts.matrices.requires_grad


class Chooses(OwnModel):
    """Some tokens choose no expert at all."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.experts.register_forward_pre_hook(self._leave_out)

    @staticmethod
    def _leave_out(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
        hidden, chosen, weights = args
        return hidden, torch.where(weights > 0.3, chosen, -1), weights


def trained(together: bool) -> list[float]:
    torch.manual_seed(3)
    model: nn.Module = Chooses().double()
    rows = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(1))
    if together:
        knobs = SmpConfig(shard_degree=2, expert_parallel_degree=2)
        parallel = parallelize(model, knobs)
        model, rows = parallel.module, rows.chunk(2)[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        loss = model(rows).square().mean()
        loss.backward()
        if together:
            parallel.window.close()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if together:
            dist.all_reduce(total)
        losses.append(float(total) / (2 if together else 1))
    return losses


def test_a_choice_of_minus_one_is_no_expert() -> None:
    expected = trained(together=False)
    for losses in run_ranks(trained, 2, True):
        assert losses == pytest.approx(expected, rel=1e-12)
