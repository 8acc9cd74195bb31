"""What forwards before training leave of a model's state: nothing."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from smp_core.plan.chain import state_restored


class Tally:
    """An object of the model's own code."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, [0]


class Keeps(nn.Module):
    """A module that counts, caches and draws in all that an attribute can be."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.recent: collections.deque[int] = collections.deque([1], maxlen=4)
        self.named = {"calls": 0}
        self.kinds: collections.Counter[str] = collections.Counter(a=1)
        self.lengths = {3}
        self.usage = np.zeros(2)
        self.tally = Tally()
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(1)
        self.numpys = np.random.default_rng(1)
        self.numpys_old = np.random.RandomState(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(x.mean())
        self.recent.append(2)
        self.named["calls"] += 1
        self.kinds["a"] += 1
        self.lengths.add(len(x))
        self.usage += 1
        self.tally.calls += 1
        self.tally.seen.append(1)
        return x

    def state(self) -> list[Any]:
        containers = [
            len(self.losses), list(self.recent), dict(self.named), dict(self.kinds),
            set(self.lengths), self.usage.tolist(), self.tally.calls,
            list(self.tally.seen),
        ]  # fmt: skip
        return containers

    def drawn(self) -> list[float]:
        """The next number of each generator; it is drawn."""
        return [
            torch.rand((), generator=self.torchs).item(), self.pythons.random(),
            self.numpys.random(), self.numpys_old.rand(), random.random(),
            np.random.rand(),
        ]  # fmt: skip


def test_containers_objects_and_generators_of_modules_are_put_back() -> None:
    model = nn.Sequential(Keeps(), nn.Linear(2, 2))
    keeps = model[0]
    before = keeps.state()
    with state_restored(model):
        drawn = keeps.drawn()
        model(torch.ones(5, 2))
        assert keeps.state() != before
    assert keeps.state() == before
    assert keeps.drawn() == drawn


def test_they_are_put_back_where_a_forward_fails() -> None:
    model = nn.Sequential(Keeps(), nn.Linear(3, 2))
    before = model[0].state()
    with pytest.raises(RuntimeError), state_restored(model):
        model(torch.ones(5, 2))
    assert model[0].state() == before
