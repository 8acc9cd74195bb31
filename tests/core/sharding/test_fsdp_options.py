"""Depths follow measured links; FSDP2's newer options are handed over, and refused by
name where they cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from smp_core.cluster import collective_timeout
from smp_core.cluster.links import Collectives, LinkFit, Links
from smp_core.comm import rules
from smp_core.comm.rules import MOST_IN_FLIGHT, units_in_flight
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan import shapes
from smp_core.plan.shapes import Cluster, ParameterShape, Shapes
from smp_core.plan.units import PlannedUnit, WrapPlan
from smp_core.topology import Topology
from tests.core.gpt import SmallGpt
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks

DEPTHS = ("forward_prefetch", "backward_prefetch", "reduce_scatter_buffers")


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message", "expected"),
    [
        (1e-3, 25e6, 1e6, 1),  # 25 KB on their way: one message covers them
        (1e-3, 25e6, 25e3, 1),
        (1e-3, 25e6, 24e3, 2),
        (1e-4, 1e9, 40e3, 3),
        (1e-2, 1e10, 1e3, MOST_IN_FLIGHT),
        (0.0, 1e9, 1e3, 1),
    ],
)
def test_units_in_flight_cover_latency_times_bandwidth(
    latency: float, bandwidth: float, message: float, expected: int
) -> None:
    assert units_in_flight(LinkFit(latency, bandwidth), message) == expected


def three_units() -> Shapes:
    """Of 10,000, 40,000 and 1,000,000 float32 elements."""
    sizes = {"a": 10_000, "b": 40_000, "c": 1_000_000}
    parameters = tuple(
        ParameterShape(name, (size,), torch.float32, True)
        for name, size in sizes.items()
    )
    units = tuple(PlannedUnit(name, (name,), name == "c") for name in sizes)
    return Shapes("Three", parameters, WrapPlan(units, (), "as told"))


def settled(
    links: Links | None, shard_degree: int, knobs: dict[str, Any]
) -> list[tuple[Any, str]]:
    """What two nodes of two ranks decide."""
    asked = SmpConfig(shard_degree=shard_degree, **knobs)
    config = decide(
        three_units(), asked, Cluster(Topology.uniform(4, 2), links=links)
    ).knobs
    return [
        (getattr(config.collectives, knob), config.why(f"collectives.{knob}"))
        for knob in DEPTHS
    ]


def test_depths_follow_the_link_that_the_partition_group_uses() -> None:
    """40,000 float32 elements of the median unit: 40 KB from each of four ranks, 80 KB
    from each of two."""
    # 100 KB and 1 KB on their way.
    between, inside = LinkFit(1e-3, 100e6), LinkFit(1e-6, 1e9)
    inside_node, between_nodes = (
        Collectives(2, *[fit] * 3) for fit in (inside, between)
    )
    links = Links(
        2, 2, inside_node, between_nodes, Collectives(4, *[LinkFit(1e-3, 50e6)] * 3)
    )
    forward, backward, buffers = settled(
        links, 4, {"collectives": {"hierarchical": True}}
    )
    assert forward[0] == backward[0] == 3
    assert (
        "98 KiB are on their way between nodes, a unit's message has 39 KiB"
        in forward[1]
    )
    assert buffers[0] == 1 and "cpu" in buffers[1]
    forward, _, _ = settled(
        links,
        4,
        {"collectives": {"hierarchical": True}, "compression": {"gather": "int8"}},
    )
    assert forward[0] == MOST_IN_FLIGHT, "a quarter of the bytes, four times as many"
    forward, _, _ = settled(links, 4, {"collectives": {"hierarchical": False}})
    assert forward[0] == 2 and "49 KiB are on their way over all ranks" in forward[1]
    forward, _, _ = settled(links, 2, {"collectives": {"forward_prefetch": 2}})
    assert forward == (2, "as asked")
    forward, backward, _ = settled(links, 2, {})
    assert (forward[0], backward[0]) == (1, 1) and "inside a node" in forward[1]
    forward, backward, buffers = settled(None, 4, {})
    assert (forward[0], backward[0], buffers[0]) == (0, 1, 1)
    assert all(
        "no measured links of 2 x 2 ranks (SMP_LINKS)" in why
        for _, why in (forward, backward, buffers)
    )


def test_depths_that_were_asked_for_have_no_effect_on_whole_parameters() -> None:
    asked = {"forward_prefetch": 2, "backward_prefetch": 3, "reduce_scatter_buffers": 2}
    found = settled(None, 1, {"collectives": asked})
    assert [depth for depth, _ in found] == [0, 1, 1]
    assert all("shard_degree=1: nothing is gathered" in why for _, why in found)


CUDA_ONLY = [
    {"collectives": {"reduce_scatter_buffers": 2}},
    {"collectives": {"separate_reduce_scatter_group": True}},
    {"collectives": {"symmetric_memory": True}},
]


def refusals(cases: list[dict[str, Any]], old_torch: bool) -> list[str]:
    said = []
    has = shapes.fsdp_has
    shapes.fsdp_has = (lambda method: False) if old_torch else has  # type: ignore[assignment]
    try:
        for knobs in cases:
            try:
                parallel_model(SmallGpt(layers=1), shard_degree=2, **knobs)
                said.append("accepted")
            except ValueError as error:
                said.append(str(error))
    finally:
        shapes.fsdp_has = has
    return said


HAS_OPTIONS = shapes.fsdp_has("set_symm_mem_for_comm")  # torch 2.11 has none of them
HERE = "the device is cpu" if HAS_OPTIONS else "has no FSDPModule.set_"


@pytest.mark.parametrize(
    ("old_torch", "why"), [(False, HERE), (True, "has no FSDPModule.set_")]
)
def test_what_this_device_or_torch_lacks_is_refused_by_name(
    old_torch: bool, why: str
) -> None:
    for said in run_ranks(refusals, 2, CUDA_ONLY, old_torch):
        for knobs, message in zip(CUDA_ONLY, said, strict=True):
            ((field, value),) = knobs["collectives"].items()
            assert (
                message.startswith(f"collectives.{field}={value}: ") and why in message
            )
            assert f"write collectives={{'{field}': " in message


def handed_over(knobs: dict[str, Any]) -> tuple[list[str], float, list[Any]]:
    """A step on CPU with these options accepted all the same: what was called, how far
    gradients are off, what takes effect."""
    called: list[str] = []

    def symmetric(module: FSDPModule, backend: str = "NCCL") -> None:
        called.append(
            type(module._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "missing_option", lambda *_: None)
        patch.setattr(FSDPModule, "set_symm_mem_for_comm", symmetric)
        gradients = []
        for options in ({}, knobs):
            torch.manual_seed(0)
            parallel = parallel_model(SmallGpt(layers=2), shard_degree=2, **options)
            parallel.module(
                torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))
            ).backward()
            gradients.append(
                [p.grad.full_tensor() for p in parallel.module.parameters()]
            )
    group: Any = parallel.module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    ranks = dist.get_process_group_ranks(group._reduce_scatter_process_group)
    separate = group._reduce_scatter_process_group is not parallel.mesh.shard_group
    assert (
        collective_timeout(group._reduce_scatter_process_group) == collective_timeout()
    ), "not torch's own"
    off = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    return (
        called,
        off,
        [separate, ranks, group.comm_ctx.reduce_scatter_max_input_buffers],
    )


@pytest.mark.skipif(not HAS_OPTIONS, reason="torch 2.11 has no such options")
def test_options_reach_fsdp2() -> None:
    """On gloo they change nothing about the numbers; that they make a step faster is
    for a GPU to show."""
    knobs = {
        "collectives": {
            "separate_reduce_scatter_group": True,
            "reduce_scatter_buffers": 2,
        }
    }
    for called, off, (separate, ranks, buffers) in run_ranks(handed_over, 2, knobs):
        assert off == 0.0 and not called
        assert separate and ranks == [0, 1] and buffers == 2
    for called, off, (separate, _, buffers) in run_ranks(
        handed_over, 2, {"collectives": {"symmetric_memory": True}}
    ):
        assert called == ["DefaultAllGather"] * 3, (
            "torch's own objects, one for each unit"
        )
        assert off <= 1e-6 and not separate and buffers == 1


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (
            {"collectives": {"separate_reduce_scatter_group": True}},
            "hierarchical=false",
        ),
        ({"collectives": {"symmetric_memory": True}}, "hierarchical=false"),
        (
            {
                "collectives": {"symmetric_memory": True, "hierarchical": False},
                "reshard_after_forward": 2,
            },
            "reshard_after_forward=2",
        ),
        (
            {
                "collectives": {"symmetric_memory": True, "hierarchical": False},
                "compression": {"gather": "int8"},
            },
            "compression.gather",
        ),
        (
            {
                "collectives": {
                    "symmetric_memory": True,
                    "hierarchical": False,
                    "reduce_scatter_buffers": 2,
                }
            },
            "reduce_scatter_buffers",
        ),
        (
            {
                "collectives": {
                    "separate_reduce_scatter_group": True,
                    "hierarchical": False,
                },
                "compression": {"reduce": "int8"},
            },
            "compression.reduce",
        ),
    ],
)
def test_they_do_not_go_with_communication_objects_of_our_own(
    knobs: dict[str, Any], named: str
) -> None:
    """Asked on CUDA, two nodes of two ranks each in one partition group."""

    two_nodes = Cluster(Topology.uniform(4, 2), "cuda")
    with pytest.raises(ValueError, match=named):
        decide(three_units(), SmpConfig(shard_degree=4, **knobs), two_nodes)
