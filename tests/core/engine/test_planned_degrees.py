"""`shard_degree='auto'`: the smallest degree whose memory fits, and what is said where
none does."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.auto_degree import decide_with_smallest_degree
from smp_core.plan.memory import MemoryEstimate, estimate as estimate_of, plan_table
from smp_core.plan.shapes import GIB, Cluster
from smp_core.topology import Topology
from tests.core.plan.planning_memory_cases import Units, auto, plans, shapes_of


def smallest(
    model: nn.Module,
    topology: Topology,
    device_memory: int | None,
    units: Units | None = None,
    **knobs: Any,
) -> tuple[int, str, MemoryEstimate]:
    cluster = Cluster(topology, "cpu", device_memory)
    plan = decide_with_smallest_degree(
        shapes_of(model, units), SmpConfig(**knobs), cluster
    )
    return plan.shard_degree, plan.knobs.why("shard_degree"), estimate_of(plan)


def test_a_smaller_degree_does_when_the_optimizer_is_offloaded() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
    degrees = {}
    for offload in (None, "optimizer"):
        # 4 MiB each of parameters, gradients and gathered ones, 8 MiB of states.
        knobs: dict[str, Any] = {
            "planner": {"memory_headroom": 0.0, "device_memory_gib": 12 / 1024},
            "state_offload": offload,
        }
        degrees[offload], why, _ = smallest(
            model, Topology.uniform(4, 4), None, **knobs
        )
        assert ("on the host" in why) == (offload is not None) and "adamw" in why
    assert degrees == {None: 2, "optimizer": 1}


def test_the_degree_is_chosen_for_the_optimizer_that_is_known() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    settled = auto([torch.optim.SGD(parameters, lr=0.1)]).knobs
    assert (settled.shard_degree, settled.planner.optimizer) == (1, "SGD")
    settled = auto([]).knobs
    assert (settled.shard_degree, settled.planner.optimizer) == (2, "adamw")
    assert auto([], "sgd").shard_degree == 1


class Gpt2Shapes(nn.Module):
    """The parameters of GPT-2 of width 7168 and 48 layers, shapes only."""

    def __init__(self, width: int = 7168, layers: int = 48) -> None:
        super().__init__()
        self.wte = nn.Embedding(50257, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)


@pytest.fixture(scope="module")
def gpt2_30b() -> tuple[nn.Module, list[list[str]]]:
    with torch.device("meta"):
        model = Gpt2Shapes()
    return model, [
        [f"h.{i}.{name}" for name, _ in block.named_parameters()]
        for i, block in enumerate(model.h)
    ]


def test_gpt2_of_30_billion_parameters_needs_four_nodes_of_eight_40_gib_devices(
    gpt2_30b: tuple[nn.Module, list[list[str]]],
) -> None:
    model, units = gpt2_30b
    # A block has 12 d^2 + 13 d = 616,655,872 parameters, the root (50257 + 1024) d + 2
    # d = 367,596,544; together 48 * 616,655,872 + 367,596,544 = 29,967,078,400.
    block, root = 616_655_872, 367_596_544
    degree, why, at32 = smallest(model, Topology.uniform(256, 8), 40 * GIB, units)
    assert degree == 32
    # All rows but the embedding's 50257 divide by 32: it is padded to 32 * 1571 =
    # 50272, 15 rows more.
    padding = 15 * 7168
    assert at32.parameters == at32.gradients == 4 * (48 * block + root + padding) // 32
    assert at32.optimizer_states == 2 * at32.parameters
    assert at32.gathered == 4 * (2 * block + root + padding)
    # 16 bytes per parameter / 32 = 13.955 GiB, gathered 5.964 GiB; allowed is 65 % of
    # 40 GiB = 26 GiB.
    assert at32.total / GIB == pytest.approx(13.955 + 5.964, abs=0.01)
    # Over 16 ranks: 27.909 + 5.964 GiB do not fit.
    assert why == (
        "needs 19.9 GiB of 26.0 GiB (planner.memory_headroom=0.35 of 40.0 GiB); degree 16 would need 33.9 GiB; assumed "
        "adamw, 2 states for each trainable parameter, on the device; activations come on top"
    )


def test_memory_knob_overrides_the_device_and_headroom_moves_the_limit(
    gpt2_30b: tuple[nn.Module, list[list[str]]],
) -> None:
    model, units = gpt2_30b
    topology = Topology.uniform(256, 8)
    # Over 8 ranks: 55.818 + 5.964 = 61.78 GiB, which is 77.2 % of 80 GiB
    for headroom, degree in [(0.22, 8), (0.23, 16)]:
        knobs = {"planner": {"device_memory_gib": 80, "memory_headroom": headroom}}
        assert smallest(model, topology, 40 * GIB, units, **knobs)[0] == degree


def test_degrees_are_parts_of_a_node_and_then_whole_nodes() -> None:
    # 3072 x 1024 in float32: 12 MiB gathered (none by one rank) and 48 / p MiB of
    # states; 24 divides the rows. 8 ranks straddle nodes.
    model = nn.Linear(1024, 3072, bias=False, device="meta")
    needs = {1: 48, 2: 36, 3: 28, 6: 20, 12: 16, 24: 14}
    larger = [*needs][1:]
    for degree, mib in needs.items():
        topology = Topology.uniform(24, 6)
        assert (
            smallest(model, topology, mib * 2**20, planner={"memory_headroom": 0.0})[0]
            == degree
        )
        if degree < 24:
            one_byte_less = smallest(
                model, topology, mib * 2**20 - 1, planner={"memory_headroom": 0.0}
            )
            assert one_byte_less[0] == larger[[*needs].index(degree)]


def test_degree_holds_whole_context_groups() -> None:
    assert (
        smallest(
            nn.Linear(2, 2), Topology.uniform(16, 8), GIB, context_parallel_degree=4
        )[0]
        == 4
    )
    with pytest.raises(
        ValueError,
        match=r"context_parallel_degree=3 fits no partition group of 2 x 8 ranks",
    ):
        smallest(
            nn.Linear(2, 2), Topology.uniform(16, 8), GIB, context_parallel_degree=3
        )


def test_cpu_takes_the_ranks_of_a_node() -> None:
    degree, why, estimate = smallest(nn.Linear(2, 2), Topology.uniform(8, 4), None)
    assert degree == estimate.shard_degree == 4
    assert "CPU" in why and estimate.budget is None


def test_model_that_fits_nowhere_is_refused_with_figures_and_a_way_out(
    gpt2_30b: tuple[nn.Module, list[list[str]]],
) -> None:
    model, units = gpt2_30b
    # Over 8 ranks 61.8 GiB. 446.5 GiB of states into the 26 - 5.96 GiB beside the
    # gathered units: 22.3 ranks, 3 nodes
    with pytest.raises(
        ValueError,
        match=r"61\.8 GiB per device even sharded over 8 ranks.*26\.0 GiB.*about 3 nodes of 8",
    ):
        smallest(model, Topology.uniform(8, 8), 40 * GIB, units)
    with pytest.raises(
        ValueError, match=r"More ranks do not help.*wrap smaller modules"
    ):
        smallest(model, Topology.uniform(8, 8), 40 * GIB)


def test_plan_table_shows_every_allowed_degree_and_marks_the_choice(
    gpt2_30b: tuple[nn.Module, list[list[str]]],
) -> None:
    model, units = gpt2_30b
    output = io.StringIO()
    table = plan_table(plans(model, Topology.uniform(256, 8), 40 * GIB, units))
    Console(file=output, width=140).print(table)
    text = output.getvalue()
    rows = [
        line.replace("│", " ").split()
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [row[0] for row in rows if "(auto)" in row] == ["32"]
    assert rows[5][:8] == ["32", "4", "8", "3.5", "3.5", "7.0", "6.0", "19.9"]
    assert "29.97 billion parameters on 32 x 8 ranks" in text
