"""Model-state memory: every figure here is worked out by hand in the comments."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.auto_degree import decide_with_smallest_degree, missed
from smp_core.engine.decide import decide
from smp_core.optim import Adafactor, AdamW8bit, Muon
from smp_core.plan.memory import MemoryEstimate, estimate as estimate_of, plan_table
from smp_core.plan.optimizers import OPTIMIZERS as KNOWN, planned_states, states_of
from smp_core.plan.shapes import GIB, Cluster, Shapes
from smp_core.plan.units import WrapPlan
from smp_core.topology import Topology
from tests.core.plan.planning_memory_cases import (
    UNITS,
    TwoBlocks,
    auto,
    estimate,
    plan_of,
    plans,
    shapes_of,
)


def test_every_part_on_three_ranks_counts_padding_frozen_and_tied_parameters() -> None:
    # Shards: embed ceil(10/3)=4 rows x 8 = 32, first.weight 3 x 8 = 24, first.bias 3,
    # second 6 x 8 = 48, scale 1
    trainable, frozen = 32 + 24 + 3 + 1, 48
    # Gathered: root embed 3*32 = 96 elements; units first 3*(24+3) = 81 and second 3*48
    # = 144, the larger one twice
    assert estimate(3) == MemoryEstimate(
        shard_degree=3,
        parameters=4 * (trainable + frozen),
        gradients=4 * trainable,
        partial_sums=0,
        optimizer_states=2 * 4 * trainable,
        buffers=40,
        gathered=4 * (96 + 2 * 144),
    )


def test_what_is_offloaded_is_not_on_the_device() -> None:
    whole, optimizer, everything = (
        estimate(3, state_offload=offload) for offload in (None, "optimizer", "all")
    )
    assert optimizer.optimizer_states == everything.optimizer_states == 0
    assert (optimizer.parameters, optimizer.gradients) == (
        whole.parameters,
        whole.gradients,
    )
    # The 0-d parameter is not sharded, and stays; sums of gradients are on the device
    # until they are reduced.
    assert (everything.parameters, everything.gradients, everything.partial_sums) == (
        4,
        4,
        4 * (32 + 24 + 3),
    )
    assert everything.gathered == whole.gathered


def test_parameters_that_stay_gathered_are_counted_once_each() -> None:
    until_backward = estimate(3, reshard_after_forward=False)
    assert until_backward.gathered == 4 * (96 + 81 + 144)
    assert estimate(3, keep_between_micro_batches="parameters") == until_backward


def test_gradients_that_are_held_whole_are_counted() -> None:
    # embed 80, first 56 + 7; the 0-d one is whole anyhow
    held = estimate(
        3, keep_between_micro_batches="gradients", reshard_after_forward=True
    )
    assert (
        held.partial_sums == 4 * (80 + 56 + 7)
        and held.gradients == estimate(3).gradients
    )
    # In float32 too, and with it the sum of the 0-d one.
    assert (
        estimate(
            3,
            torch.bfloat16,
            keep_between_micro_batches="gradients",
            reshard_after_forward=True,
        ).partial_sums
        == held.partial_sums + 4
    )
    assert estimate(
        1, keep_between_micro_batches="gradients", reshard_after_forward=True
    ) == estimate(1)


def test_gather_dtype_halves_the_gathered_units_and_float32_sums_stay_float32() -> None:
    mixed = estimate(3, param_dtype="bfloat16")
    assert mixed.gathered == 2 * (96 + 2 * 144)
    assert (mixed.parameters, mixed.gradients, mixed.partial_sums) == (
        4 * 108,
        4 * 60,
        0,
    )


def test_half_precision_parameters_are_summed_in_float32_unless_told_otherwise() -> (
    None
):
    half = estimate(3, torch.bfloat16)
    assert (half.parameters, half.gradients, half.partial_sums) == (
        2 * 108,
        2 * 60,
        4 * 60,
    )
    assert half.optimizer_states == 2 * 2 * 60
    assert estimate(3, torch.bfloat16, reduce_dtype="bfloat16").partial_sums == 0


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adamw", 2), ("sgd-momentum", 1), ("sgd", 0)]
)
def test_optimizer_states(optimizer: str, states: int) -> None:
    model = nn.Linear(4, 4, bias=False)
    assert estimate_of(plan_of(model), KNOWN[optimizer]).optimizer_states == states * 64


OPTIMIZERS: list[tuple[Any, int, str]] = [
    (lambda p: torch.optim.SGD(p, lr=0.1), 0, "SGD, 0 states"),
    (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        1,
        "SGD with momentum, 1 state ",
    ),
    (lambda p: torch.optim.Adam(p), 2, "Adam, 2 states"),
    (lambda p: torch.optim.AdamW(p, amsgrad=True), 3, "AdamW with amsgrad, 3 states"),
    (
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        3,
        "RMSprop with momentum, centered, 3 states",
    ),
    (lambda p: torch.optim.Adagrad(p), 1, "Adagrad, 1 state "),
]


@pytest.mark.parametrize(
    ("make", "whole", "words"), OPTIMIZERS, ids=[words for *_, words in OPTIMIZERS]
)
def test_what_an_optimizer_keeps_is_what_it_makes(
    make: Any, whole: int, words: str
) -> None:
    """Counted in the states after a step, of matrices, of a cube and of a vector."""
    parameters = [
        nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (2, 3, 5), (7,))
    ]
    optimizer = make(parameters)
    kept = states_of(optimizer)
    assert kept.tensors == whole and kept.known and words in kept.describe()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in parameters:
        entry = optimizer.state[parameter]
        made = sum(
            value.numel()
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and key != "step"
        )
        assert kept.tensors * parameter.numel() == made


def test_optimizers_whose_ranks_exchange_say_what_they_keep() -> None:
    """Muon one momentum of each matrix, two of those that AdamW steps; Adafactor
    factors, which are not counted."""
    matrix, vector = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(7))
    assert (
        states_of(Muon([matrix])).describe()
        == "found Muon, 1 state for each trainable parameter"
    )
    both = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}])
    assert (states_of(both).tensors, states_of(Adafactor([matrix])).tensors) == (2, 0)


def test_moments_of_8_bits_are_planned_with_what_they_take() -> None:
    """Within 3 % of the states after a step, of rows of whole blocks."""
    parameter = nn.Parameter(torch.randn(8, 1024))
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW8bit([parameter])
    kept = states_of(optimizer)
    optimizer.step()
    made = sum(
        value.nbytes
        for key, value in optimizer.state[parameter].items()
        if key != "step"
    )
    model = nn.Linear(1024, 8, bias=False)
    for states in (kept, planned_states("adamw8bit")):
        assert estimate_of(plan_of(model), states).optimizer_states == pytest.approx(
            made, rel=0.03
        )
    assert (
        kept.describe()
        == "found AdamW8bit, 2 states for each trainable parameter, 2.03 bytes an element"
    )
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert planned_states("auto", [optimizer, sgd]).name == "SGD with momentum"


class Unheard(torch.optim.Optimizer):
    """Of a library that the planner does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def test_an_optimizer_that_is_not_known_is_assumed_to_be_like_adamw_and_the_plan_says_so() -> (
    None
):
    model = nn.Linear(4, 4, bias=False)
    kept = states_of(Unheard(model.parameters()))
    assert estimate_of(plan_of(model), kept).optimizer_states == 2 * 64
    output = io.StringIO()
    table = plan_table(plans(model, Topology.uniform(2, 2), GIB), kept)
    Console(file=output, width=200).print(table)
    assert (
        "found Unheard, which is not known here: assumed 2 states" in output.getvalue()
    )


def test_the_plan_follows_the_knob_then_the_optimizers_and_else_adamw() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    sgd, adamw = (
        torch.optim.SGD(parameters, lr=0.1),
        torch.optim.AdamW(parameters, amsgrad=True),
    )
    assert planned_states("sgd", [adamw]).tensors == 0
    assert planned_states("auto", [sgd]).tensors == 0
    assert planned_states("auto", [sgd, adamw]).tensors == 3
    assert (
        planned_states("auto").name == "adamw"
        and "assumed" in planned_states("auto").describe()
    )
    read = SmpConfig(planner={"optimizer": "sgd-momentum"}).planner.optimizer
    assert read == "sgd-momentum"
    with pytest.raises(ValueError, match=r"planner\.optimizer") as refused:
        SmpConfig(planner={"optimizer": "x"})
    assert all(repr(name) in str(refused.value) for name in KNOWN)


def test_a_plan_that_an_optimizer_of_later_does_not_fit_says_so() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    sgd, adamw = torch.optim.SGD(parameters, lr=0.1), torch.optim.AdamW(parameters)
    said = missed(auto([]), [sgd])
    assert (
        said is not None
        and "planned for adamw and gave 2" in said
        and "found SGD" in said
        and "1 would be" in said
    )
    assert missed(auto([]), [adamw]) is None
    assert missed(auto([sgd]), [adamw]) is None, "it was planned for the first one"
    assert missed(auto([], "adamw"), [sgd]) is None, "who asked for a plan knows it"
    without_memory = decide_with_smallest_degree(
        shapes_of(nn.Linear(2, 2)), SmpConfig(), Cluster(Topology.uniform(4, 4))
    )
    assert missed(without_memory, [sgd]) is None
    assert without_memory.knobs.planner.optimizer == "auto"


def test_states_over_the_world_are_divided_by_it() -> None:
    """Degree 2 of 8 ranks, bfloat16: shards of 40, 32 and 4 elements (10x8, 7x8 and 7,
    padded); a quarter of each, 10 + 8 + 1, has a master, its gradient and two states of
    4 bytes; the 0-d one has two states of 4 bytes."""
    with torch.device("meta"):
        model = TwoBlocks().bfloat16()
    seen = estimate_of(plan_of(model, 2, 8, UNITS, optimizer_shard="world"))
    assert seen.optimizer_states == (10 + 8 + 1) * 4 * 4 + 2 * 4
    alone = estimate_of(plan_of(model, 8, 8, UNITS, optimizer_shard="world"))
    plain = estimate_of(plan_of(model, 8, 8, UNITS, master_dtype="float32"))
    assert alone == plain, (
        "one replica has nothing to divide by, and masters all the same"
    )
    # Masters and states on the host: what remains is the gradient of the part.
    offloaded = estimate_of(
        plan_of(model, 2, 8, UNITS, optimizer_shard="world", state_offload="optimizer")
    )
    assert offloaded.optimizer_states == (10 + 8 + 1) * 4


def test_what_stays_whole_is_counted_whole() -> None:
    """A 10x8 matrix tied across units: on every rank 80 elements, their gradient and
    two states; so is the 0-d one."""
    with torch.device("meta"):
        model = TwoBlocks()
    shapes = shapes_of(model, UNITS)
    units = tuple(unit for unit in shapes.units.units if not unit.is_root)
    tied = dataclasses.replace(
        shapes, units=WrapPlan(units, ("embed.weight", "scale"), "as told")
    )
    plan = decide(tied, SmpConfig(shard_degree=3), Cluster(Topology.uniform(3, 3)))
    seen = estimate_of(plan)
    assert seen.parameters == 4 * (80 + 24 + 3 + 48 + 1) and seen.gradients == 4 * (
        80 + 24 + 3 + 1
    )
    assert seen.optimizer_states == 2 * seen.gradients
    assert seen.gathered == 4 * 2 * 144, "nothing gathers it"


def test_a_copy_that_is_kept_after_forward_is_counted() -> None:
    # Of the units first 4 * (2 * 8 + 2) = 72 and second 128 elements a half stays on
    # each of two ranks.
    without, kept = estimate(4), estimate(4, reshard_after_forward=2)
    assert kept.gathered == without.gathered + 4 * (72 + 128) // 2


def test_units_of_parameters_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'wieght', which Linear does not have"):
        shapes_of(nn.Linear(2, 2), [["wieght"]])


def test_whole_gradients_of_tensor_ranks_are_of_their_part_of_each_matrix() -> None:
    shapes = Shapes.of(
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)),
        SmpConfig(),
    )
    cluster = Cluster(Topology.uniform(8, 8), "cuda", GIB)
    kept = {"shard_degree": 2, "keep_between_micro_batches": "gradients"}
    one, two = (
        estimate_of(
            decide(shapes, SmpConfig(**kept, tensor_parallel_degree=degree), cluster)
        ).partial_sums
        for degree in (1, 2)
    )
    assert (one, two) == (2 * 64 * 64 * 4, 64 * 64 * 4)


def test_masters_over_the_world_do_not_hide_whole_gradients() -> None:
    shapes = Shapes.of(
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)),
        SmpConfig(),
    )
    cluster = Cluster(Topology.uniform(8, 8), "cuda", GIB)
    asked = SmpConfig(
        shard_degree=2, optimizer_shard="world", keep_between_micro_batches="gradients"
    )
    sums = estimate_of(decide(shapes, asked, cluster)).partial_sums
    # Of both layers, and this rank's part of their sum.
    assert sums == 2 * 64 * 64 * 4 + 2 * 32 * 64 * 4
