"""The meter's bytes are the bytes that are sent.

A whole training step of a small GPT on four ranks that pose as two nodes is counted
twice: by the meter, and by a recorder that sits on torch's process groups and works
from the calls' arguments alone (`tests.core.recording`). Bytes are whole numbers or
fractions of them that float64 holds, so figures have to agree to 1e-9 of a byte per
byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_core.comm.meter as meter_module
from smp_core.comm import flat, quantized_gather
from smp_core.comm.meter import CommMeter
from smp_core.topology import Topology
from tests.core.comm.metered import (
    LAYERS,
    MICRO_BATCHES,
    Step,
    gathered_and_reduced,
    per_node,
    train_one_step,
    unit_bytes,
)
from tests.core.recording import Call, CallRecorder, bytes_by_link
from tests.harness import run_ranks


def is_bookkeeping(call: Call, n_parameters: int, world: int) -> bool:
    """What the meter leaves out, by size and type: a flag or two per parameter and
    window, one norm per step."""
    flags = (
        call.dtype == "int32"
        and call.n_bytes <= 8 * n_parameters
        and len(call.ranks) == world
    )
    norm = call.dtype == "float64" and call.n_bytes == 8
    return call.kind == "all_reduce" and (flags or norm)


def compare(steps: list[Step], ranks_per_node: int) -> list[dict[str, float]]:
    """Meter against record, per rank and per node; returns the recorded bytes per
    node."""
    world = len(steps)
    for step in steps:
        left_out = [
            call
            for call in step.calls
            if is_bookkeeping(call, step.n_parameters, world)
        ]
        assert len(left_out) <= 2, "one set of flags and one norm per step"
    kept = [
        [
            call
            for call in step.calls
            if not is_bookkeeping(call, step.n_parameters, world)
        ]
        for step in steps
    ]
    recorded = bytes_by_link(kept, ranks_per_node)
    for node, counted in enumerate(recorded):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        for link in ("inter", "intra"):
            metered = sum(steps[rank].meter[f"{link}_bytes"] for rank in ranks)
            assert metered == pytest.approx(counted[link], rel=1e-9, abs=1e-9), (
                f"node {node}, {link}"
            )
    for rank, calls in enumerate(kept):
        alone = bytes_by_link(
            [calls if other == rank else [] for other in range(world)], 1
        )[rank]
        metered = steps[rank].meter["inter_bytes"] + steps[rank].meter["intra_bytes"]
        assert metered == pytest.approx(
            alone["inter"] + alone["intra"], rel=1e-9, abs=1e-9
        ), f"rank {rank}"
    return recorded


def test_two_stages_send_p_minus_k_of_p_between_nodes() -> None:
    """Shard degree p = 4 over 2 nodes of k = 2 ranks: (p - k) / p x M per all-gather
    and per reduce-scatter."""
    steps = run_ranks(
        train_one_step, 4, MICRO_BATCHES, ranks_per_node=2, shard_degree=4
    )
    recorded = compare(steps, 2)
    gathered, reduced = gathered_and_reduced(4, MICRO_BATCHES)
    assert per_node(steps, "all_gather/inter_bytes") == [gathered / 2] * 2
    assert per_node(steps, "reduce_scatter/inter_bytes") == [reduced / 2] * 2
    assert [node["inter"] for node in recorded] == [(gathered + reduced) / 2] * 2
    for step in steps:
        assert step.meter["all_gather/calls"] == MICRO_BATCHES * (1 + 2 * LAYERS)
        assert step.meter["reduce_scatter/calls"] == MICRO_BATCHES * (1 + LAYERS)
        assert "all_reduce/calls" not in step.meter


def test_each_two_stage_gather_sends_one_shard_per_rank_between_nodes() -> None:
    """The same, call by call: a unit of M bytes is M / p from each of a node's k ranks,
    k M / p = (p - k) / p x M."""
    steps = run_ranks(train_one_step, 4, 1, ranks_per_node=2, shard_degree=4)
    root, *blocks = unit_bytes(4)
    shards = sorted(unit // 4 for unit in [root, *blocks, *blocks, root, *blocks])
    for rank, step in enumerate(steps):
        between = [
            c
            for c in step.calls
            if c.kind == "send" and c.to is not None and c.to // 2 != rank // 2
        ]
        assert sorted(call.n_bytes for call in between) == shards


def test_flat_collectives_are_counted_as_they_are_sent() -> None:
    """One stage over both nodes: the gather is a ring, (p - 1) / p x M over the one
    link that leaves a node; the reduce-scatter, made of messages on gloo, sends k (p -
    k) shards of M / p: M."""
    steps = run_ranks(
        train_one_step,
        4,
        MICRO_BATCHES,
        ranks_per_node=2,
        shard_degree=4,
        collectives={"hierarchical": False},
    )
    compare(steps, 2)
    gathered, reduced = gathered_and_reduced(4, MICRO_BATCHES)
    assert per_node(steps, "all_gather/inter_bytes") == [gathered * 3 / 4] * 2
    assert per_node(steps, "reduce_scatter/inter_bytes") == [reduced] * 2


def test_partition_groups_inside_nodes_send_only_the_replica_hop_between_them() -> None:
    """Shard degree 2: each rank's half of the gradients crosses once per step, whatever
    the number of micro-batches."""
    steps = run_ranks(
        train_one_step, 4, MICRO_BATCHES, ranks_per_node=2, shard_degree=2
    )
    recorded = compare(steps, 2)
    model = sum(unit_bytes(2))
    assert [node["inter"] for node in recorded] == [model] * 2
    assert per_node(steps, "all_reduce/inter_bytes") == [model] * 2
    assert (
        per_node(steps, "all_gather/inter_bytes")
        == per_node(steps, "reduce_scatter/inter_bytes")
        == [0.0] * 2
    )
    for step in steps:
        assert step.meter["all_reduce/calls"] == 1 + LAYERS


def test_replicas_send_the_whole_gradient_once() -> None:
    """Shard degree 1: the hop in two stages sends 2 (M - 1) / M of the gradients over
    the link of each of M = 2 nodes (a unit's elements padded to a multiple of the 4
    ranks); one stage is a ring over 4 ranks, 2 x 3 / 4."""
    steps = run_ranks(
        train_one_step, 4, MICRO_BATCHES, ranks_per_node=2, shard_degree=1
    )
    compare(steps, 2)
    assert (
        per_node(steps, "inter_bytes")
        == [sum(-(-unit // 16) * 16 for unit in unit_bytes(1))] * 2
    )
    for step in steps:
        assert step.meter["all_reduce/calls"] == 1 + LAYERS
    steps = run_ranks(
        train_one_step,
        4,
        1,
        ranks_per_node=2,
        shard_degree=1,
        collectives={"hierarchical": False},
    )
    compare(steps, 2)
    assert per_node(steps, "inter_bytes") == [1.5 * sum(unit_bytes(1))] * 2


def test_half_precision_replicas_are_half_the_bytes() -> None:
    steps = run_ranks(
        train_one_step, 4, 1, ranks_per_node=2, shard_degree=2, compression="bf16"
    )
    compare(steps, 2)
    assert (
        per_node(steps, "inter_bytes")
        == [sum(-(-unit // 16) * 16 for unit in unit_bytes(2)) / 2] * 2
    )


def test_bfloat16_gathers_are_half_the_bytes() -> None:
    steps = run_ranks(
        train_one_step, 4, 1, "bfloat16", ranks_per_node=2, shard_degree=4
    )
    compare(steps, 2)
    root, *blocks = unit_bytes(4, element_size=2)
    assert (
        per_node(steps, "all_gather/inter_bytes") == [(root + 2 * sum(blocks)) / 2] * 2
    )
    assert (
        per_node(steps, "reduce_scatter/inter_bytes")
        == [gathered_and_reduced(4, 1)[1] / 2] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("hierarchical", ["auto", False])
def test_meter_equals_record_on_eight_ranks(
    ranks_per_node: int, degree: int, hierarchical: bool | str
) -> None:
    steps = run_ranks(
        train_one_step,
        8,
        2,
        ranks_per_node=ranks_per_node,
        shard_degree=degree,
        collectives={"hierarchical": hierarchical},
    )
    compare(steps, ranks_per_node)


def train_without_meter() -> dict[str, float]:
    return train_one_step(1, shard_degree=4, collectives={"meter": False}).meter


def test_a_meter_that_is_off_shows_nothing() -> None:
    for figures in run_ranks(train_without_meter, 4, ranks_per_node=2):
        assert sum(figures.values()) == 0


def seconds_of_one_step() -> dict[str, float]:
    return train_one_step(1, shard_degree=4).meter


def test_seconds_are_kept_per_link_class() -> None:
    """No bound on how long: only that both stages of both collectives took some
    time."""
    for figures in run_ranks(seconds_of_one_step, 4, ranks_per_node=2):
        for kind in ("all_gather", "reduce_scatter"):
            for link in ("intra", "inter"):
                assert figures[f"{kind}/{link}_seconds"] > 0


def test_steps_are_kept_apart_and_totals_add_up() -> None:
    meter = CommMeter(Topology.uniform(4, 2), rank=1)
    for n_bytes in (400, 800):
        with meter.ring("all_gather", [0, 1, 2, 3], n_bytes):
            pass
        # In the middle of the step.
        with meter.outside_steps(), meter.ring("all_gather", [0, 1, 2, 3], 40):
            pass
        meter.close_step()
        assert meter.per_step() == {
            "inter_bytes": n_bytes * 3 / 4,
            "intra_bytes": 0.0,
            "all_gather/calls": 1.0,
            "all_gather/inter_bytes": n_bytes * 3 / 4,
            "all_gather/inter_seconds": pytest.approx(0, abs=60),
        }
    assert meter.totals() == {"all_gather/inter_bytes": 900.0}
    assert meter.totals_by_link() == {"intra": 0.0, "inter": 900.0}
    assert meter.outside()["inter_bytes"] == 2 * 40 * 3 / 4
    assert meter.outside()["all_gather/calls"] == 2
    assert meter.steps == 2


def test_a_ring_belongs_to_the_link_of_its_right_neighbour() -> None:
    sent = {}
    for rank in range(4):
        meter = CommMeter(Topology.uniform(4, 2), rank)
        with meter.ring("all_reduce", [0, 1, 2, 3], 1000):
            pass
        meter.close_step()
        sent[rank] = (meter.per_step()["intra_bytes"], meter.per_step()["inter_bytes"])
    assert sent == {
        0: (1500.0, 0.0),
        1: (0.0, 1500.0),
        2: (1500.0, 0.0),
        3: (0.0, 1500.0),
    }


def record_a_lie() -> tuple[list[Call], float]:
    """A meter told half of what is sent: the comparison has to notice."""
    topology = Topology.discover()
    meter, rank = CommMeter(topology, dist.get_rank()), dist.get_rank()
    tensor = torch.zeros(10)
    with CallRecorder() as recorder:
        with meter.ring("all_reduce", [0, 1], 20):
            dist.all_reduce(tensor)
    meter.close_step()
    assert recorder.calls[0].sent(rank) == [(1 - rank, 40.0)]
    return recorder.calls, meter.per_step()["inter_bytes"]


def test_the_record_does_not_take_the_meters_word() -> None:
    results = run_ranks(record_a_lie, 2, ranks_per_node=1)
    nodes = bytes_by_link([calls for calls, _ in results], 1)
    assert [node["inter"] for node in nodes] == [40.0, 40.0]
    assert [metered for _, metered in results] == [20.0, 20.0]


class SlowWork:
    """A collective whose wait takes a second of the meter's clock, and whose start
    takes none."""

    def __init__(self, work: dist.Work, clock: list[float]) -> None:
        self._work, self._clock = work, clock

    def wait(self) -> bool:
        self._clock[0] += 1.0
        return self._work.wait()


def seconds_by_a_clock_that_only_waiting_moves(
    cases: list[dict[str, Any]],
) -> list[dict[str, float]]:
    clock, found = [0.0], []

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            return SlowWork(work, clock) if kwargs.get("async_op") else work

        return started

    with (
        mock.patch.object(meter_module.time, "perf_counter", lambda: clock[0]),
        mock.patch.object(dist, "all_reduce", slow(dist.all_reduce)),
        mock.patch.object(flat, "all_gather_single", slow(flat.all_gather_single)),
        mock.patch.object(
            quantized_gather,
            "all_gather_single",
            slow(quantized_gather.all_gather_single),
        ),
    ):
        for knobs in cases:
            figures = train_one_step(1, **knobs).meter
            found.append(
                {
                    name: figure
                    for name, figure in figures.items()
                    if name.endswith("/inter_seconds")
                }
            )
    return found


def test_seconds_of_collectives_that_are_started_and_waited_for_apart_are_those_of_the_wait() -> (
    None
):
    cases = [
        {"shard_degree": 1},
        {"shard_degree": 2},
        {"shard_degree": 2, "compression": {"gather": "int8", "gather_after_steps": 0}},
    ]
    for whole, ring, coded in run_ranks(
        seconds_by_a_clock_that_only_waiting_moves, 2, cases, ranks_per_node=1
    ):
        assert whole == {"all_reduce/inter_seconds": 1.0 + LAYERS}
        gathers = 1.0 + 2 * LAYERS
        assert (
            ring["all_gather/inter_seconds"]
            == coded["all_gather/inter_seconds"]
            == gathers
        )


class PlayedEvent:
    """An accelerator's event, over as soon as it was recorded."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        PlayedEvent.made += 1

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: PlayedEvent) -> float:
        return 1000.0


def test_events_are_used_again_and_do_not_pile_up_in_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "Event", PlayedEvent)
    monkeypatch.setattr(PlayedEvent, "made", 0)
    meter = CommMeter(Topology.uniform(2, 1), 0, "cuda")
    with meter.outside_steps():
        for _ in range(5000):
            with meter.ring("all_gather", [0, 1], 8):
                pass
    assert PlayedEvent.made <= 2 * 1024
    assert meter.outside()["all_gather/inter_seconds"] == 5000
    PlayedEvent.made, meter = 0, CommMeter(Topology.uniform(2, 1), 0, "cuda")
    for _ in range(5):  # nobody asks for the seconds of the first four
        with meter.ring("all_gather", [0, 1], 8):
            pass
        meter.close_step()
    assert (
        meter.per_step()["all_gather/inter_seconds"] == 1 and PlayedEvent.made == 2 * 2
    )
