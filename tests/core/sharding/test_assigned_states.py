"""``load_state_dict(assign=True)`` of a sharded model copies: its units, masters and
optimizers go on with the parameters that they know."""

from __future__ import annotations

import pytest
import torch

from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    WORLD,
    difference,
    net,
    own_batch,
    sharded,
    train,
    weights,
)
from tests.harness import run_ranks
from tests.logged import warnings_said


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assigned() -> tuple[list[str], int]:
    """Trained, assigned to, and trained on with another optimizer."""
    loaded = net(seed=1).state_dict()
    model = net()
    model.load_state_dict(loaded)
    train(model, sgd(model), range(WORLD))
    expected, wrong = weights(model), []
    with warnings_said() as said:
        for knobs in LAYOUTS:
            parallel = sharded(knobs)
            model = parallel.module
            first, second = sgd(model), sgd(model)
            parallel.prepare_optimizer(first)
            train(model, first, own_batch(parallel), begin=4)
            model.load_state_dict(loaded, assign=True)
            parallel.prepare_optimizer(second)
            train(model, second, own_batch(parallel))
            apart = difference(weights(model), expected)
            if not apart <= 1e-12:
                wrong.append(f"{knobs}: {apart}")
            with pytest.raises(ValueError, match=r"assign=True\): .* is torch.float32"):
                model.load_state_dict(net().float().state_dict(), assign=True)
    copied = [text for text in said if "assign=True" in text]
    return wrong, len(copied)


def test_what_is_assigned_is_trained_by_the_next_optimizer() -> None:
    wrong, said = zip(*run_ranks(assigned, WORLD), strict=True)
    assert wrong == ([],) * WORLD
    assert said == (1,) + (0,) * (WORLD - 1)
