"""The accumulation window: what is sent when, and what becomes of gradients when a step
is not plain sailing.

Everything is compared with one process in float64 to 1e-12, a few hundred rounding
errors of sums in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.core.equivalence import BOTH, HELD, KEPT
from tests.core.scenarios import (
    SCENARIOS,
    WIDTH,
    Gradients,
    Net,
    allowed,
    alone,
    by_path,
    differences,
    freeze,
    gradients,
    net_on_ranks,
    parallel_model,
    run_window,
    samples,
    together,
)
from tests.harness import run_ranks

PLAIN = SCENARIOS["everything is used"]


def check_scenarios(names: list[str], degree: int, **options: Any) -> None:
    expected = {name: alone(SCENARIOS[name], 4) for name in names}
    knobs = {"shard_degree": degree, **options}
    for rank, seen in enumerate(
        run_ranks(together, 4, names, ranks_per_node=2, timeout=600, **knobs)
    ):
        wrong = {
            name: found
            for name in names
            if (found := differences(seen[name], expected[name]))
        }
        assert not wrong, f"rank {rank}"


@pytest.mark.parametrize(
    "degree", [2, *(pytest.param(degree, marks=pytest.mark.slow) for degree in (1, 4))]
)
def test_conditional_frozen_and_repeated_parameters_train_like_one_process(
    degree: int,
) -> None:
    """Also None where one process has None: weight decay must leave those alone."""
    check_scenarios(allowed(degree), degree)


@pytest.mark.parametrize(
    "hierarchical", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_replicas_of_whole_units_that_use_different_ones_train_like_one_process(
    hierarchical: bool,
) -> None:
    """With one rank in a partition group there are units where parameters come from the
    host; then all ranks are one replication group, and sums are sent before or after
    other things that all ranks do."""
    names = [name for name in allowed(1) if SCENARIOS[name].per_replica]
    check_scenarios(
        names, 1, state_offload="all", collectives={"hierarchical": hierarchical}
    )


def test_frozen_and_repeated_parameters_that_stay_gathered_train_like_one_process() -> (
    None
):
    names = [
        name
        for name in allowed(2)
        if any(word in name for word in ("frozen", "thawed", "twice", "two forwards"))
    ]
    check_scenarios(names[::2], 2, **KEPT)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_all_of_them_do_when_they_stay_gathered(degree: int) -> None:
    check_scenarios(allowed(degree), degree, **KEPT)


@pytest.mark.parametrize(
    "options",
    [
        {"degree": 2, "every": 5},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"degree": 2},
                {"degree": 4, "by_hand": True, **BOTH},
                {"degree": 1},
                {"degree": 4},
                {"degree": 2, "by_hand": True},
                {"degree": 2, **BOTH},
            )
        ),
    ],
    ids=str,
)
def test_all_of_them_do_when_whole_gradients_are_held(options: dict[str, Any]) -> None:
    """``every``: a sample of the scenarios, which all are trained without this knob in
    the same run."""
    knobs = {**HELD, **options}
    names = allowed(options["degree"])[:: knobs.pop("every", 1)]
    check_scenarios(names, **knobs)


# In the normal run: windows with whole gradients, which are closed by hand too.
@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_window_closed_by_hand_is_the_same(degree: int) -> None:
    check_scenarios(allowed(degree), degree, by_hand=True)


def closed_inside_accumulate(**knobs) -> Gradients:
    parallel = net_on_ranks(PLAIN, **knobs)
    with parallel.window.accumulate():
        for micro in range(PLAIN.micro_batches):
            PLAIN.prepare(parallel.module, micro)
            PLAIN.loss(parallel.module, micro, parallel.mesh.data_rank).backward()
        parallel.window.close()
    return gradients(parallel.module)


@pytest.mark.parametrize(
    "held", [{}, pytest.param(HELD, marks=pytest.mark.slow)], ids=str
)
def test_a_window_may_be_closed_while_it_accumulates(held: dict[str, Any]) -> None:
    """What is held is reduced then, though backward passes still hold gradients."""
    expected = alone(PLAIN, 4)
    for seen in run_ranks(
        closed_inside_accumulate, 4, shard_degree=2, ranks_per_node=2, **held
    ):
        assert differences(seen, expected) == []


def frozen_before_backward(**knobs) -> list[Gradients]:
    """Frozen when forward is over; and a unit that is trained only from the second
    window on, in mixed precision, beside one that always was."""
    found = []
    parallel = net_on_ranks(PLAIN, **knobs)
    rank = parallel.mesh.data_rank
    with parallel.window.accumulate():
        loss = PLAIN.loss(parallel.module, 0, rank)
        freeze(parallel.module, "left", False)
        loss.backward()
    PLAIN.loss(parallel.module, 1, rank).backward()
    found.append(gradients(parallel.module))
    for thawed in (False, True):
        torch.manual_seed(0)
        parallel = parallel_model(
            Net(), units=("Cell",), param_dtype="bfloat16", **knobs
        )
        for number, trainable in enumerate((not thawed, True)):
            freeze(parallel.module, "cells.1", trainable)
            for micro in range(2):
                with parallel.window.accumulate(micro < 1):
                    parallel.module(
                        samples(micro, rank).float(), "0lr 1l 2lr"
                    ).square().mean().backward()
            if number == 0:
                parallel.window.abandon()
        found.append(gradients(parallel.module))
    return found


@pytest.mark.parametrize(
    "held", [{}, pytest.param(HELD, marks=pytest.mark.slow)], ids=str
)
def test_parameters_frozen_before_backward_or_thawed_later(
    held: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model = Net().double()
    for micro in range(2):
        loss = sum(PLAIN.loss(model, micro, rank) for rank in range(4)) / 4
        if micro == 0:
            freeze(model, "left", False)
        loss.backward()
    for frozen, never, later in run_ranks(
        frozen_before_backward, 4, ranks_per_node=2, shard_degree=2, **held
    ):
        assert differences(frozen, gradients(model)) == []
        for name, value in never.items():
            assert (later[name] is None) == (value is None), name
            if value is not None:
                assert value.dtype == torch.float32 and torch.equal(
                    later[name], value
                ), name


def several_closed_passes(**knobs) -> Gradients:
    """Manual optimization: two losses, two backward passes, one step; and a window
    before them, closed as well."""
    parallel = net_on_ranks(PLAIN, **knobs)
    rank = parallel.mesh.data_rank
    PLAIN.loss(parallel.module, 0, rank).backward()
    assert not parallel.window.is_open
    optional = by_path(lambda micro, r: "0l 2r", gain=False)
    optional(parallel.module, 1, rank).backward()
    with parallel.window.accumulate():
        PLAIN.loss(parallel.module, 2, rank).backward()
    PLAIN.loss(parallel.module, 3, rank).backward()
    return gradients(parallel.module)


@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_closed_backward_passes_before_a_step_add_up(degree: int) -> None:
    torch.manual_seed(0)
    model = Net().double()
    for rank in range(4):
        for micro in range(4):
            optional = (
                by_path(lambda m, r: "0l 2r", gain=False) if micro == 1 else PLAIN.loss
            )
            (optional(model, micro, rank) / 4).backward()
    expected = gradients(model)
    for seen in run_ranks(
        several_closed_passes, 4, shard_degree=degree, ranks_per_node=2
    ):
        assert differences(seen, expected) == []


def decay_unused(**knobs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights before and after two AdamW steps with heavy weight decay, of parameters
    that nobody uses."""
    scenario = SCENARIOS["nobody uses a way"]
    parallel = net_on_ranks(scenario, **knobs)
    optimizer = torch.optim.AdamW(
        parallel.module.parameters(), lr=0.1, weight_decay=0.5
    )

    def weights() -> dict[str, torch.Tensor]:
        named = parallel.module.named_parameters()
        return {
            n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for n, p in named
        }

    before = weights()
    for _ in range(2):
        run_window(parallel, scenario)
        parallel.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    after = weights()
    return {name: (before[name], after[name]) for name in before}


@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_weight_decay_leaves_unused_parameters_alone(degree: int) -> None:
    unused = ("never", "cells.0.right", "cells.1.left")
    for seen in run_ranks(decay_unused, 4, shard_degree=degree, ranks_per_node=2):
        for name, (before, after) in seen.items():
            changed = not torch.equal(before, after)
            assert changed == (not any(part in name for part in unused)), name


class OnlyRoot(nn.Module):
    """One unit whose inputs want no gradient: FSDP2 reduces it at the very end of the
    pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def train_only_root(**knobs) -> Gradients:
    torch.manual_seed(dist.get_rank())
    parallel = parallel_model(OnlyRoot().double(), **knobs)
    for micro in range(3):
        with parallel.window.accumulate(micro < 2):
            parallel.module(samples(micro, dist.get_rank())).backward()
    return gradients(parallel.module)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_model_of_one_unit(degree: int) -> None:
    torch.manual_seed(0)
    model = OnlyRoot().double()
    for micro in range(3):
        (sum(model(samples(micro, rank)) for rank in range(2)) / 2).backward()
    for seen in run_ranks(train_only_root, 2, shard_degree=degree):
        assert differences(seen, gradients(model)) == []


def evaluate_in_the_middle(**knobs) -> Gradients:
    parallel = net_on_ranks(PLAIN, **knobs)
    rank = parallel.mesh.data_rank
    # The first gathers of all: what they made is trained with.
    with torch.inference_mode():
        SCENARIOS["a cell twice in one forward"].loss(parallel.module, 4, rank)
    with parallel.window.accumulate():
        PLAIN.loss(parallel.module, 0, rank).backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            first = PLAIN.loss(parallel.module, 3, 0)
    parallel.reshard()
    with torch.no_grad():
        assert torch.equal(first, PLAIN.loss(parallel.module, 3, 0))
    PLAIN.loss(parallel.module, 1, rank).backward()
    return gradients(parallel.module)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"shard_degree": 2}, marks=pytest.mark.slow),
        {"shard_degree": 4, "reshard_after_forward": 2},
        *(
            pytest.param({"shard_degree": degree}, marks=pytest.mark.slow)
            for degree in (1, 4)
        ),
    ],
    ids=str,
)
def test_evaluation_before_and_inside_a_window_changes_nothing(
    knobs: dict[str, Any],
) -> None:
    expected = alone(PLAIN, 4)
    for seen in run_ranks(evaluate_in_the_middle, 4, ranks_per_node=2, **knobs):
        assert differences(seen, expected) == []
