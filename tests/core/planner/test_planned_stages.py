"""Pipeline stages in plans: the time of a schedule, what a stage holds, and when stages
are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan.plan import Plan
from smp_core.plan.schedules import blocks_kept, chunks_of
from smp_core.planner import Workload, plan, stage_time
from smp_core.planner.devices import Device
from smp_core.planner.explain import as_yaml
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.search import read_fixed
from smp_core.planner.stage_part import StagePart, states_of
from smp_core.planner.stage_time import played, step_model
from smp_core.planner.step_memory import PeakMemory, peak_memory
from smp_core.planner.trace import trace_model

TOKENS = 32
TINY = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 8,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 32,
}
DEVICE = Device("small", 4.0, 1e12, 1e11, 1e10, "no data sheet", 1e13)


@pytest.fixture(scope="module")
def tiny() -> ModelTrace:
    return trace_model("tiny", TOKENS, TINY)


def hardware(gbit: float) -> Hardware:
    return Hardware(4, 2, DEVICE, gbit)


def staged(tiny: ModelTrace, **knobs: Any) -> Plan:
    asked = SmpConfig(
        pipeline_parallel_degree=4, shard_degree=2, param_dtype="bfloat16", **knobs
    )
    return decide(tiny.of_precision("none", "mixed"), asked, hardware(1.0).cluster())


def ends(
    schedule: str,
    stages: int,
    micro_batches: int,
    wire: float = 0.0,
    latency: float = 0.0,
) -> list[float]:
    """Play a schedule whose stages take 1 forward and 2 backward for each
    micro-batch."""
    chunks = stages * chunks_of(schedule)
    seconds = [
        way / chunks_of(schedule)
        for way in (1.0, 2.0)
        for _ in range(chunks)
        for _ in range(4)
    ]
    wires, latencies = [wire + latency] * stages**2, [latency] * stages**2
    return played(schedule, stages, micro_batches, seconds, wires, latencies)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2"])
def test_a_schedule_takes_what_the_papers_say(schedule: str) -> None:
    """Without messages; also where only the first of many rounds are played."""
    for stages, micro_batches in ((2, 4), (4, 8), (4, 40)):
        whole = 3 * (micro_batches + (stages - 1) / chunks_of(schedule))
        assert max(ends(schedule, stages, micro_batches)) == pytest.approx(whole)


def test_messages_are_waited_for_as_the_schedule_waits() -> None:
    """Two stages. All forwards first: only the way there and back. 1F1B: each round
    trip of the last stage's."""
    assert max(ends("gpipe", 2, 8, latency=0.5)) == pytest.approx(3 * 9 + 2 * 0.5)
    assert (
        max(ends("1f1b", 2, 8, latency=0.5)) > max(ends("gpipe", 2, 8, latency=0.5)) + 1
    )
    # A link that takes longer than a forward sends one after the other.
    assert max(ends("gpipe", 2, 8, wire=4.0)) == pytest.approx(
        1 + 8 * 4 + 8 * 2 + 1 + 4 + 2, abs=16
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2"])
def test_many_rounds_take_as_long_as_if_all_were_played(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ends(schedule, 4, 32, wire=0.4, latency=0.1)
    monkeypatch.setattr(stage_time, "_ROUNDS", 8)
    assert ends(schedule, 4, 32, wire=0.4, latency=0.1) == pytest.approx(
        short, rel=0.01
    )


def test_a_stage_holds_its_blocks_and_what_is_around_them(tiny: ModelTrace) -> None:
    made = staged(tiny)
    assert made.stages is not None
    parts = [StagePart.of(made, tiny, stage) for stage in range(4)]
    assert sum(part.blocks for part in parts) == 8
    tied = 96 * 64
    assert sum(part.elements for part in parts) == tiny.parameters + tied
    assert [part.root > 0 for part in parts] == [True, False, False, True]
    # 1F1B keeps a micro-batch for each stage behind, GPipe all.
    assert [blocks_kept("1f1b", 4, stage, 8, (2,)) for stage in range(4)] == [
        8,
        6,
        4,
        2,
    ]
    assert blocks_kept("gpipe", 4, 2, 8, (2,)) == 16


def test_memory_is_that_of_the_stage_that_takes_most(tiny: ModelTrace) -> None:
    def peak(schedule: str, count: int) -> Any:
        made = staged(tiny, pipeline={"schedule": schedule, "microbatches": count})
        return peak_memory(made, tiny, 4, count, TOKENS, states_of(made)[:1])

    block = tiny.block["none"].at(4, TOKENS).kept
    more = peak("gpipe", 16).activations - peak("gpipe", 8).activations
    # Of eight more micro-batches, and what they sent.
    assert more == pytest.approx(8 * 2 * block, rel=0.05)
    assert peak("1f1b", 16).activations == peak("1f1b", 8).activations
    assert peak("1f1b", 16).stage == 0


@pytest.mark.slow
def test_ends_of_a_model_take_what_they_hold_of_a_tied_embedding_and_of_an_untied_head() -> (
    None
):
    """Embedding and head of one size, on two stages: neither holds the other's
    gradients, or the sum of both."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    fields = {"model_type": "llama", "vocab_size": 2336, **sizes}
    # Logits of few tokens at a time: backward, where gradients are, is the highest
    # point of the last stage.
    stages: dict[str, Any] = {
        "pipeline_parallel_degree": 2,
        "pipeline": {"microbatches": 4},
    }
    asked = SmpConfig(
        shard_degree=2, param_dtype="bfloat16", chunked_cross_entropy=4, **stages
    )

    def peaks(tied: bool) -> list[PeakMemory]:
        traced = trace_model("llama", TOKENS, {**fields, "tie_word_embeddings": tied})
        made = decide(
            traced.of_precision("none", "mixed"), asked, hardware(1.0).cluster()
        )
        return [
            peak_memory(made, traced, 2, 4, TOKENS, [each]) for each in states_of(made)
        ]

    assert peaks(True) == peaks(False)


def test_a_step_through_stages_is_computing_and_what_is_waited_for(
    tiny: ModelTrace,
) -> None:
    made, machines = staged(tiny, pipeline={"microbatches": 8}), hardware(1.0)
    time = step_model(made, tiny, machines, TOKENS).step(4, 8)
    alone = decide(
        tiny.of_precision("none", "mixed"),
        SmpConfig(shard_degree=2),
        machines.cluster(),
    )
    whole = step_model(alone, tiny, machines, TOKENS).step(4, 8)
    # That of the last stage, which has the head, and is busy longer than the mean one.
    # 5 %: of what it waits for.
    assert time.stage == 3 and time.over_mean > 0.2
    assert time.compute == pytest.approx(
        (1 + time.over_mean) * whole.compute / 4, rel=0.05
    )
    # The first forward and the last backward of three stages without a head, and
    # messages.
    assert time.pipeline > 3 / 8 * (whole.compute - time.compute) / 3
    assert whole.pipeline == 0


def test_stages_are_chosen_where_links_are_slow_and_nowhere_else(
    tiny: ModelTrace,
) -> None:
    work = Workload(TOKENS, 64)
    slow = plan(tiny, hardware(0.02), work)
    assert slow.chosen.plan.stages is not None and slow.chosen.time.pipeline > 0
    assert slow.config.pipeline.microbatches == slow.chosen.count
    assert "goes through the stages in" in as_yaml(slow)
    again = decide(
        tiny.of_precision("none", "mixed"), slow.config, hardware(0.02).cluster()
    )
    assert again.stages == slow.chosen.plan.stages
    assert plan(tiny, Hardware(1, 8, DEVICE, 0.0), work).chosen.plan.stages is None
    fixed = plan(tiny, hardware(0.02), work, fixed={"pipeline": 2, "micro_batch": 2})
    assert fixed.chosen.plan.layout.pipeline == 2 and "step time" in slow.why_not(
        pipeline=1
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "slower"), [(0.35, False), (0.45, True)])
def test_what_would_flip_the_choice_does_so_when_all_is_planned_again(
    tiny: ModelTrace, rate: float, slower: bool
) -> None:
    """On both sides of the link at which stages begin to save more than the model may be
    off: faster ones ask for the optimizer's states with each replica, slower ones for
    stages."""
    found = plan(tiny, hardware(rate), Workload(TOKENS, 64))
    assert (found.chosen.plan.stages is None) is slower
    (flip,) = found.flips()
    assert flip.rate == "network" and (flip.share < flip.now) is slower
    fitted = FITTED.with_share("network", DEVICE.name, flip.share)
    again = plan(tiny, replace(found.hardware, fitted=fitted), found.workload)
    assert again.chosen.kind == flip.pick.kind != found.chosen.kind


def test_given_schedules_and_micro_batches_stay(tiny: ModelTrace) -> None:
    given = {
        "pipeline_parallel_degree": 2,
        "pipeline": {"schedule": "interleaved:2", "microbatches": 4},
    }
    found = plan(tiny, hardware(0.2), Workload(TOKENS, 64), fixed=given)
    assert {each.asked.pipeline.schedule for each in found.found.ranked} == {
        "interleaved:2"
    }
    assert {each.asked.pipeline.microbatches for each in found.found.ranked} == {4}
    assert found.chosen.count % 4 == 0
    for open_schedule in ({}, {"pipeline": {"microbatches": 4}}):
        found = plan(
            tiny,
            hardware(0.2),
            Workload(TOKENS, 64),
            fixed={"pipeline_parallel_degree": 2, **open_schedule},
        )
        assert {each.asked.pipeline.schedule for each in found.found.ranked} > {"1f1b"}


def test_a_model_without_a_chain_is_planned_without_stages(tiny: ModelTrace) -> None:
    uncut = replace(tiny, uncut="pipeline_parallel_degree: its blocks are no chain")
    assert plan(uncut, hardware(0.2), Workload(TOKENS, 64)).chosen.plan.stages is None
    with pytest.raises(ValueError, match="its blocks are no chain"):
        plan(uncut, hardware(0.2), Workload(TOKENS, 64), fixed={"pipeline": 2})


def test_a_given_split_decides_what_stages_take(tiny: ModelTrace) -> None:
    given = {
        "pipeline_parallel_degree": 2,
        "pipeline": {"split": [1, 7], "microbatches": 4},
        "micro_batch": 4,
    }
    found = plan(tiny, hardware(0.2), Workload(TOKENS, 64), fixed=given).chosen
    whole = peak_memory(
        found.plan, tiny, found.micro_batch, found.count, TOKENS, in_stages=4
    )
    assert found.plan.stages is not None and found.plan.stages.sizes == (1, 7)
    assert (found.memory.parameters, found.memory.total) == (
        whole.parameters,
        whole.total,
    )


def test_micro_batches_of_stages_say_nothing_without_stages(tiny: ModelTrace) -> None:
    given = {"pipeline_parallel_degree": 1, "pipeline": {"microbatches": 3}}
    assert (
        plan(tiny, hardware(0.2), Workload(TOKENS, 64), fixed=given).chosen.plan.stages
        is None
    )


def test_a_degree_may_be_fixed_beside_a_schedule_and_nothing_twice() -> None:
    both = read_fixed([("pipeline", "2"), ("pipeline", "1f1b")])
    assert (
        both["pipeline_parallel_degree"] == 2 and both["pipeline"]["schedule"] == "1f1b"
    )
    with pytest.raises(ValueError, match="shard_degree is fixed twice: 2 and 4"):
        read_fixed([("shard", "2"), ("shard", "4")])
