"""Parts of a model are frozen, trained again or merged while replicas take different
branches: one process's numbers.

The model is `tests.core.fuzz.models.Ways`: branches ``l`` and ``r`` share a layer,
``a`` has an adapter; every linear layer is a unit. Compared as random runs are
(`tests.core.fuzz.running`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.equivalence import HELD, full_weights
from tests.core.fuzz.cases import Case, objection
from tests.core.fuzz.models import WIDTH, Ways
from tests.core.fuzz.running import play
from tests.harness import run_ranks

Op = dict[str, Any]


def micro(
    path: str,
    other: str,
    hold: bool = False,
    meanwhile: str = "nothing",
    what: str = "",
) -> Op:
    """A micro-batch: the paths of both replicas, of two ranks each."""
    paths = [path, path, other, other]
    fixed = {
        "data": 1,
        "rows": [1, 2],
        "vary": "by replica",
        "calls": 1,
        "twice": False,
        "around": "pass",
    }
    return {
        "do": "micro",
        "paths": paths,
        "hold": hold,
        "meanwhile": meanwhile,
        "what": what,
        **fixed,
    }


def freeze(what: str, trainable: bool = False) -> Op:
    return {"do": "freeze", "what": what, "trainable": trainable}


STEP: list[Op] = [
    {"do": "step", "of": None},
    {"do": "zero", "how": "optimizer", "of": None},
]
TOGETHER = [micro("l r a", "l r a"), *STEP]

SCRIPTS: dict[str, list[Op]] = {
    "biases frozen after a step": [
        *TOGETHER,
        freeze("bias"),
        micro("l r a", "l"),
        *STEP,
        micro("r", "a"),
        *STEP,
    ],
    "frozen in the middle of a window": [
        *TOGETHER,
        micro("l r a", "l", hold=True),
        freeze("own"),
        micro("a", "r l", hold=True),
        freeze("bias"),
        micro("r", ""),
        *STEP,
    ],
    "trained again in the middle of a window": [
        freeze("common"),
        freeze("left.own.bias"),
        *TOGETHER,
        micro("l", "a", hold=True),
        freeze("common", True),
        freeze("left.own.bias", True),
        micro("a", "r"),
        *STEP,
    ],
    "units frozen as a whole": [
        *TOGETHER,
        freeze("left"),
        micro("l r", "a"),
        *STEP,
        micro("a", "l"),
        *STEP,
    ],
    "between forward and backward": [
        *TOGETHER,
        micro("l r", "a", meanwhile="freeze", what="bias"),
        *STEP,
        micro("r", "l", meanwhile="thaw", what="bias"),
        *STEP,
    ],
    "beside a new parameter group": [
        freeze("adapted"),
        *TOGETHER,
        freeze("adapted", True),
        {"do": "add_group"},
        micro("l a", "r"),
        *STEP,
        micro("r", "a"),
        *STEP,
    ],
    "adapters merged and taken out again": [
        *TOGETHER,
        {"do": "merge", "enabled": True},
        freeze("adapted"),
        micro("a l", "r"),
        *STEP,
        {"do": "merge", "enabled": False},
        freeze("adapted", True),
        micro("l", "a r"),
        *STEP,
    ],
}
KNOBS: dict[str, dict[str, Any]] = {
    "shards": {},
    "parameters": {"keep_between_micro_batches": "parameters"},
    "gradients": {"keep_between_micro_batches": "gradients"},
    "half precision": {"param_dtype": "bfloat16"},
    "masters over the world": {"optimizer_shard": "world"},
}
# One of each script and of each knob.
SAMPLE = [
    (name, list(KNOBS)[number % len(KNOBS)]) for number, name in enumerate(SCRIPTS)
]


def case_of(script: str, knobs: str) -> Case:
    late = "adapted" if "group" in script else None
    optimizer = {
        "kind": "SGD, momentum",
        "kernels": "default",
        "part": "",
        "groups": [],
        "late": late,
        "frozen": True,
    }
    chosen = {"shard_degree": 2, "units.modules": ["Linear"], **KNOBS[knobs]}
    return Case(0, 4, 2, "ways", "forward", chosen, [optimizer], SCRIPTS[script])


def trains_like_one_process(named: list[tuple[str, str]]) -> None:
    cases = {name: case for name in named if objection(case := case_of(*name)) is None}
    outcomes = play(list(cases.values()))
    failed = {
        name: str(each)
        for name, each in zip(cases, outcomes, strict=True)
        if each.problem or each.refused
    }
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


def test_replicas_take_different_branches_while_parts_are_frozen() -> None:
    trains_like_one_process(SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", KNOBS)
def test_they_do_with_every_knob(knobs: str) -> None:
    trains_like_one_process([(script, knobs) for script in SCRIPTS])


# Branches that are roots of their own


def batch(number: int) -> torch.Tensor:
    return torch.sin(torch.arange(2.0 * WIDTH, dtype=torch.float64) + number).view(
        2, WIDTH
    )


def by_hand(model: Ways, optimizers: list[torch.optim.Optimizer]) -> None:
    """Manual optimization: both branches, which share a layer, are trained inside one
    step, one behind the other."""
    for number, branch in enumerate((model.right, model.left)):
        model.leave(branch(model.enter(batch(number)))).square().mean().backward()
        optimizers[number].step()
        model.zero_grad()


def two_optimizers(model: Ways) -> list[torch.optim.Optimizer]:
    groups = (
        [*model.right.parameters(), *model.leave.parameters()],
        model.left.own.parameters(),
    )
    return [torch.optim.AdamW(group, lr=0.05) for group in groups]


def trained_by_hand(every_knobs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for knobs in every_knobs:
        torch.manual_seed(0)
        parallel = parallelize(
            Ways().double(),
            SmpConfig(shard_degree=2, units=["Linear"], **knobs),
            entry="children",
        )
        optimizers = two_optimizers(parallel.module)
        for optimizer in optimizers:
            parallel.prepare_optimizer(optimizer)
        parallel.module.right(batch(5))  # by itself, before any step
        for _ in range(2):
            parallel.run_as_forward(by_hand, parallel.module, optimizers)
        found.append(full_weights(parallel.module))
    return found


def test_roots_may_share_a_unit() -> None:
    torch.manual_seed(0)
    model = Ways().double()
    optimizers = two_optimizers(model)
    for _ in range(2):
        by_hand(model, optimizers)
    expected = full_weights(model)
    every_knobs = [{}, {"reshard_after_forward": False}, HELD]
    for found in run_ranks(trained_by_hand, 2, every_knobs):
        for weights in found:
            for name, value in expected.items():
                assert torch.allclose(weights[name], value, rtol=0, atol=1e-12), name


def called_by_itself() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parallel = parallelize(Ways().double(), SmpConfig(shard_degree=2, units=["Turn"]))
    part: nn.Module = parallel.module.left
    return parallel.call(part, batch(0)).detach(), parallel.module(
        batch(1), "l r"
    ).detach()


def test_a_unit_may_be_called_by_itself_before_the_model() -> None:
    torch.manual_seed(0)
    model = Ways().double()
    for part, all_of_it in run_ranks(called_by_itself, 2):
        assert torch.allclose(part, model.left(batch(0)), rtol=0, atol=1e-12)
        assert torch.allclose(all_of_it, model(batch(1), "l r"), rtol=0, atol=1e-12)


# Inputs that want gradients on one rank alone


class Part(nn.Linear):
    """A unit."""


class Chain(nn.Module):
    """Two units between a frozen layer and a trained one, which are the root's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"bias": False, "dtype": torch.float64}
        self.enter = nn.Linear(WIDTH, WIDTH, **sizes).requires_grad_(False)
        self.parts = nn.Sequential(
            Part(WIDTH, WIDTH, **sizes), Part(WIDTH, WIDTH, **sizes)
        )
        self.leave = nn.Linear(WIDTH, WIDTH, **sizes)
        # As for saliency: what comes in gets a gradient, if it wanted one or not.
        self.parts[0].register_forward_pre_hook(
            lambda _, args: (args[0].requires_grad_(),)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.parts(self.enter(x)))


def one_rank_wants_gradients_of_inputs() -> list[float]:
    plain = Chain()
    for rank in range(2):
        (plain(batch(rank)).square().mean() / 2).backward()
    config = SmpConfig(shard_degree=2, units=["Part"])
    parallel = parallelize(Chain(), config)
    x = batch(parallel.mesh.rank).requires_grad_(parallel.mesh.rank == 0)
    parallel.module(x).square().mean().backward()
    return [
        float((own.grad.full_tensor() - of.grad).norm() / of.grad.norm())
        for own, of in zip(
            parallel.module.parameters(), plain.parameters(), strict=True
        )
        if of.grad is not None
    ]


def test_a_hook_that_lets_inputs_want_gradients_changes_no_order() -> None:
    """Ranks reduce units in one order, by what FSDP2 saw before the hook."""
    for off in run_ranks(one_rank_wants_gradients_of_inputs, 2):
        assert off == pytest.approx([0.0] * 3, abs=1e-12)
