"""`smp plan`: what a trace counts, what a step takes, which configuration is chosen,
and what is said if none fits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from smp_core.cli import app
from smp_core.cluster import Layout
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide, decide_activations
from smp_core.observe.run_record import _of_plan
from smp_core.planner import NothingFits, Workload, commands, plan, planner
from smp_core.planner.calibrate import calibrate
from smp_core.planner.candidate import Candidate
from smp_core.planner.explain import table
from smp_core.planner.fitted import BANDS, FITTED, Fitted, band_of
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.search import TIE, Found, read_fixed, search, simplest
from smp_core.planner.stage_time import step_model
from smp_core.planner.step_memory import peak_memory, recomputation
from smp_core.planner.time import StepModel, StepTime, exposed_seconds
from smp_core.planner.trace import trace, trace_model
from smp_core.run_log import write as run_log
from tests.core.planner.planner_models import WIDTH, traced_mixture
from tests.harness import ROOT

HEADS, TOKENS, WORDS = 4, 32, 96
TINY = {
    "model_type": "gpt2",
    "n_embd": WIDTH,
    "n_layer": 4,
    "n_head": HEADS,
    "vocab_size": WORDS,
    "attn_pdrop": 0.0,
}
SETTING = ("32x8:a100-40g@400gbps", Workload(2048, 1536))
SHARDED: dict[str, Any] = {"pipeline": 1, "tensor": 1}
MIB = 2**20


@pytest.fixture(scope="module")
def tiny() -> ModelTrace:
    return trace_model("tiny", TOKENS, TINY)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelTrace:
    return traced_mixture(tmp_path_factory)


@pytest.fixture(scope="module")
def large() -> ModelTrace:
    return trace_model("gpt2-30b", 2048)


@pytest.fixture(scope="module")
def planned(large: ModelTrace) -> planner.Recommendation:
    return plan(large, *SETTING, fixed=SHARDED)


@pytest.fixture(scope="module")
def example(large: ModelTrace) -> planner.Recommendation:
    """The plan of examples/plan_gpt2_30b.md, of 70,000 configurations: for slow
    tests."""
    return plan(large, *SETTING)


def test_products_and_attention_of_a_block_are_those_of_its_arithmetic(
    tiny: ModelTrace,
) -> None:
    """At a batch that was not traced. Per token 12 matrices of width^2; scores and
    values, half of them causal."""
    samples, tokens = 3, TOKENS // 4
    block = tiny.block["none"].at(samples, tokens)
    products, full = (
        2 * samples * tokens * 12 * WIDTH**2,
        4 * samples * tokens**2 * WIDTH,
    )
    assert block.forward_products == pytest.approx(
        products
    ) and block.backward_products == pytest.approx(2 * products)
    assert block.full_attention == pytest.approx(
        full
    ) and block.forward_attention == pytest.approx(full / 2)
    again = tiny.block["full"].at(samples, tokens)
    assert again.backward_attention == pytest.approx(full / 2 * 3.5)
    assert tiny.rest["none"].at(samples, tokens).forward_products == pytest.approx(
        2 * samples * tokens * WIDTH * WORDS
    )
    assert (tiny.blocks, tiny.heads) == (4, HEADS)


def saved_bytes(layers: int, samples: int, tokens: int) -> int:
    """What autograd saves of a real bfloat16 model beside its parameters, each storage
    once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": WIDTH,
        "n_layer": layers,
        "n_head": HEADS,
        "vocab_size": WORDS,
        "n_positions": TOKENS,
    }
    config = GPT2Config(
        **sizes, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa"
    )
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    parameters = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    }
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(samples, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    del loss
    return sum(found.values())


def test_kept_bytes_of_a_block_are_those_of_a_real_model(tiny: ModelTrace) -> None:
    """Of a batch that was not traced. 2 %: a block's last tensors may be kept by its
    successor."""
    real = saved_bytes(3, 3, 16) - saved_bytes(2, 3, 16)
    assert tiny.block["none"].at(3, 16).kept == pytest.approx(real, rel=0.02)
    assert tiny.block["full"].at(3, 16).kept == 3 * 16 * WIDTH * 2  # a block's input
    assert (
        tiny.block["full"].at(3, 16).kept
        < tiny.block["selective"].at(3, 16).kept
        < 0.6 * real
    )


@pytest.mark.slow
def test_peak_of_30_billion_is_the_one_that_fsdp_s_tracker_counts(
    large: ModelTrace,
) -> None:
    """torch's FSDPMemTracker on the sharded model (128 ranks, 6 x 2,048 tokens, full
    recomputation): 23,217 MiB, of which 893 are parameters, 1,787 states, 1,892 + 1,176
    gathered and 2,352 to be reduced. 2 %: of activations."""
    asked = SmpConfig(shard_degree=128, activations="full", param_dtype="bfloat16")
    made = decide(
        large.of_precision("full", "mixed"), asked, Hardware.parse(SETTING[0]).cluster()
    )
    peak = peak_memory(made, large, 6, 1, 2048)
    assert (peak.total - peak.margin) / MIB == pytest.approx(23217, rel=0.02)
    kinds = [
        each / MIB
        for each in (peak.parameters, peak.optimizer, peak.gathered, peak.other)
    ]
    assert kinds == pytest.approx([893, 1787, 1892 + 1176, 2352], rel=0.005)
    assert peak.fits


@pytest.mark.slow
def test_a_model_of_one_s_own_is_traced_in_a_child_process() -> None:
    found = trace("tests.core.planner.planner_models:plain", 16)
    assert (found.blocks, found.heads) == (3, 0)
    assert found.block["none"].at(2, 8).forward_products == 2 * 2 * 8 * 8 * WIDTH**2


def test_all_of_a_model_that_is_its_list_of_blocks_is_in_blocks() -> None:
    found = trace_model("tests.core.planner.planner_models:in_sequence", 16)
    assert (
        found.blocks == 3
        and found.block_elements() == found.parameters / 3 > 8 * WIDTH**2
    )


def model_of(large: ModelTrace, cluster: str, **knobs: Any) -> StepModel:
    hardware = Hardware.parse(cluster)
    asked = SmpConfig(param_dtype="bfloat16", activations="full", **knobs)
    made = decide(large.of_precision("full", "mixed"), asked, hardware.cluster())
    return StepModel(made, large, hardware, 2048)


def test_a_gather_in_two_stages_takes_latency_and_bytes_of_both(
    large: ModelTrace,
) -> None:
    model = model_of(large, "4x8:a100-40g@400gbps", shard_degree=32)
    block = large.block_elements() * 2
    inside = 7 * FITTED.latency_inside + 7 / 8 * block / (300e9 * FITTED.link)
    of_rank = 400e9 / 8 / 8 * FITTED.network
    between = 3 * FITTED.latency_between + 3 / 4 * block / 8 / of_rank
    assert model.gather[0] == pytest.approx(inside + between)
    # Four nodes with one replica each: every rank sums its eighth of a block in float32
    # with three others.
    hop = model_of(large, "4x8:a100-40g@400gbps", shard_degree=8).hop[0]
    assert hop == pytest.approx(
        2 * (3 * FITTED.latency_between + 3 / 4 * block * 2 / 8 / of_rank)
    )


def test_a_step_alone_computes_and_steps_and_waits_for_nobody(
    large: ModelTrace,
) -> None:
    time = model_of(large, "1x1:a100-80g", shard_degree=1).step(1, 2)
    assert (
        time.gathers == time.replicas == time.tensor == time.context == time.copies == 0
    )
    assert time.total == time.compute + time.optimizer
    assert model_of(large, "1x1:a100-80g", shard_degree=1).step(
        1, 4
    ).compute == pytest.approx(2 * time.compute)
    assert (
        exposed_seconds(3.0, 2.0, 0.1) == pytest.approx(0.2)
        and exposed_seconds(2.0, 3.0, 0.0) == 1.0
    )


def test_keeping_spares_what_it_says_it_spares(large: ModelTrace) -> None:
    """With slow nodes everything is waited for: eight micro-batches gather and reduce
    eight times, or once."""
    slow = "4x8:a100-40g@1gbps"
    waited = {
        kept: model_of(large, slow, shard_degree=32, keep_between_micro_batches=kept)
        .step(1, 8)
        .gathers
        for kept in ("shards", "parameters", "gradients")
    }
    # In times of a bfloat16 gather; sums are float32.
    gather, again, reduced = 8, 8, 8 * 2
    assert waited["parameters"] / waited["shards"] == pytest.approx(
        (1 + reduced) / (gather + again + reduced), rel=0.1
    )
    assert waited["gradients"] / waited["shards"] == pytest.approx(
        3 / (gather + again + reduced), rel=0.15
    )


def test_an_axis_or_a_wider_group_has_to_save_more_than_the_model_may_be_off(
    planned: planner.Recommendation,
) -> None:
    """Of equal plans with other seconds: within the band a group of one node wins,
    beyond it the group of two."""

    def pick(seconds: float) -> tuple[int, int]:
        ranked = [
            _with(planned.chosen, 1.0, shard=16),
            _with(planned.chosen, seconds, shard=8),
        ]
        return simplest(ranked).spread

    band = BANDS["sharding"].share
    assert pick(1.0 + 0.9 * band) == (0, 1)
    assert pick(1.0 + 1.1 * band) == (0, 2)
    assert simplest(
        [
            _with(planned.chosen, 1.0, 8, tensor=2),
            _with(planned.chosen, 1.0 + 0.9 * BANDS["tensor"].share, 8),
        ]
    ).spread == (0, 1)


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (Layout(shard=8), "sharding"),
        (Layout(context=2), "tensor"),
        (Layout(pipeline=2), "pipeline"),
        (Layout(pipeline=2, tensor=2), "pipeline"),
    ],
)
def test_a_time_is_as_unsure_as_the_nearest_programs_say(
    layout: Layout, axis: str
) -> None:
    assert band_of(layout) is BANDS[axis]


def test_plans_of_compiled_blocks_are_as_unsure_as_steps_that_no_fit_saw() -> None:
    wide = BANDS["compiled"]
    assert band_of(Layout(shard=8), is_compiled=True) is wide
    widest = max(wide, BANDS["pipeline"], key=lambda band: band.share)
    assert band_of(Layout(pipeline=2), is_compiled=True) is widest


def test_large_groups_over_the_first_efa_get_a_smaller_share_of_the_link(
    large: ModelTrace,
) -> None:
    """A gather over all devices takes nodes ** falls times as long for its bytes; over
    other links, or measured ones, it does not."""
    seconds = {}
    first = Hardware.parse("16xp4d")
    machines = {
        "first": first,
        "other": Hardware.parse("16x8:a100-40g@400gbps"),
        "measured": replace(first, measured=first.links),
    }
    for name, hardware in machines.items():
        knobs = SmpConfig(shard_degree=128, collectives={"hierarchical": False})
        made = decide(large.of_precision("none", "mixed"), knobs, hardware.cluster())
        found = StepModel(made, large, hardware, 2048)
        seconds[name] = found.gather[0] - 127 * FITTED.latency_between
    assert seconds["first"] == pytest.approx(16**FITTED.falls * seconds["other"])
    assert seconds["measured"] == pytest.approx(seconds["other"])


def _with(
    candidate: Candidate, seconds: float, shard: int, tensor: int = 1
) -> Candidate:
    """Return a candidate of the same work with these degrees, without stages, and so
    many seconds of computing."""
    hardware = Hardware.parse("4x8:a100-80g@400gbps")
    knobs = SmpConfig(shard_degree=shard, tensor_parallel_degree=tensor)
    made = decide(candidate.plan.shapes, knobs, hardware.cluster())
    time = StepTime(seconds, *[0.0] * 6)
    return replace(candidate, plan=made, time=time, band=band_of(made.layout))


def test_the_pick_fits_is_the_fastest_or_simpler_and_is_always_the_same(
    large: ModelTrace, planned: planner.Recommendation
) -> None:
    """Over clusters and batches drawn from a seed: 30 billion parameters fit all,
    barely, or only some of them."""
    drawn = random.Random(19)
    for _ in range(4):
        device = drawn.choice(["a100-40g", "a100-80g", "h200"])
        cluster = f"{drawn.choice([2, 4, 16])}x{drawn.choice([4, 8])}:{device}@{drawn.choice([100, 800])}gbps"
        work = Workload(drawn.choice([512, 2048]), drawn.choice([256, 384]))
        try:
            found = plan(large, cluster, work, fixed={"pipeline": 1})
        except NothingFits as error:
            assert all(candidate.memory.fits for _, candidate in error.changes)
            continue
        ranked = found.found.ranked
        assert all(each.memory.total <= each.memory.capacity for each in ranked)
        fastest = min(ranked, key=lambda each: each.time.total)
        near = [
            each
            for each in ranked
            if each.time.total <= fastest.time.total * (1 + fastest.band.share)
        ]
        alike = [
            each for each in near if each.spread == min(other.spread for other in near)
        ]
        assert found.chosen in alike
        tied = [
            each
            for each in alike
            if each.time.total <= min(other.time.total for other in alike) * (1 + TIE)
        ]
        assert found.chosen.complexity == min(each.complexity for each in tied)
        for each in [found.chosen, *found.alternatives]:
            ranks = each.plan.layout.replicate * each.plan.layout.shard
            assert each.micro_batch * each.count * ranks == work.global_batch
    again = plan(large, *SETTING, fixed=SHARDED).chosen
    assert again.knobs == planned.chosen.knobs and again.time == planned.chosen.time


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100-40g", "a100-80g"])
def test_eight_billion_parameters_over_slow_links_are_a_replica_for_each_node(
    device: str,
) -> None:
    """What an expert says. Others are up to 20 % faster by the model's own count, which
    is less than its error."""
    found = plan(
        trace_model("llama-3.1-8b", 4096), f"4x8:{device}@100gbps", Workload(4096, 256)
    )
    layout = found.chosen.plan.layout
    assert (layout.replicate, layout.shard, found.chosen.spread) == (4, 8, (0, 1))
    assert found.alternatives[0].time.total < found.chosen.time.total


@pytest.mark.slow
def test_the_page_of_the_example_is_what_the_command_writes(
    example: planner.Recommendation,
) -> None:
    from smp_core.planner.explain import as_yaml

    found = replace(example, model="gpt2-30b")
    assert as_yaml(found) in Path(ROOT, "examples", "plan_gpt2_30b.md").read_text(
        encoding="utf-8"
    )


def test_the_file_that_is_written_decides_the_plan_that_was_shown(
    large: ModelTrace, tmp_path: Path
) -> None:
    from smp_core.planner.explain import as_yaml

    found = plan(
        large, *SETTING, fixed={"shard": "64", "recomputation": "full", "pipeline": 1}
    )
    path = tmp_path / "plan.yaml"
    path.write_text(as_yaml(found), encoding="utf-8")
    read = SmpConfig.from_yaml(path)
    assert read == found.config and read.shard_degree == 64
    hardware = Hardware.parse(SETTING[0])
    made = decide(large.of_precision("full", "mixed"), read, hardware.cluster())
    assert (made.layout, made.activations) == (
        found.chosen.plan.layout,
        found.chosen.plan.activations,
    )


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"shard": 7}, "does not divide"),
        ({"shard": 16, "shard_degree": 8}, "fixed twice"),
        ({"shard": 4, "context": 8}, "context_parallel_degree=8 is larger than"),
        (
            {"context": 4},
            r"context_parallel_degree=4: the model drops 10% of attention's scores .*attn_pdrop",
        ),
        ({"shard_degre": 7}, "shard_degree"),
        ({"units": "Block"}, "not planned with"),
        ({"recomputation": "every:2"}, "none, selective or full"),
        ({"micro_batch": 7}, "leave it open"),
        ({"micro_batch": 0}, "at least 1"),
    ],
)
def test_contradictions_are_refused(
    large: ModelTrace, fixed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan(large, *SETTING, fixed=fixed)


def test_a_padded_vocabulary_is_said(tiny: ModelTrace) -> None:
    found = plan(
        replace(tiny, unpadded=91),
        "1x4:h100-80g",
        Workload(TOKENS, 8),
        fixed={"tensor": 2},
    )
    assert f"{WORDS} rows instead of 91" in str(table(found).caption)


def test_moments_of_8_bits_are_not_planned_over_the_world(tiny: ModelTrace) -> None:
    """Where torch's AdamW is: the step would refuse it."""
    hardware = Hardware.parse("4x8:a100-40g@400gbps")
    fixed, over_world = (
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "micro_batch": 1},
        [],
    )
    for optimizer in ("adamw", "adamw8bit"):
        found = search(tiny, hardware, Workload(4096, 512, optimizer=optimizer), fixed)
        over_world.append(
            any(each.plan.knobs.optimizer_shard == "world" for each in found.ranked)
        )
    assert over_world == [True, False]


def test_tensor_degrees_are_planned_with_everything_else(tiny: ModelTrace) -> None:
    hardware = Hardware.parse("4x8:a100-40g@400gbps")
    found = search(
        tiny,
        hardware,
        Workload(4096, 512),
        {"tensor_parallel_degree": 2, "micro_batch": 1},
    )
    plans = [each.plan for each in found.ranked]
    together = {
        "optimizer over the world": [
            plan.knobs.optimizer_shard == "world" for plan in plans
        ],
        "a copy in each node": [
            type(plan.knobs.reshard_after_forward) is int for plan in plans
        ],
        "inputs on the host": [plan.knobs.activations.offload for plan in plans],
        "loss in chunks": [
            plan.knobs.chunked_cross_entropy is not None for plan in plans
        ],
        "context": [plan.layout.context > 1 for plan in plans],
    }
    assert all(plan.layout.tensor == 2 for plan in plans)
    assert [name for name, seen in together.items() if not any(seen) or all(seen)] == []


@pytest.mark.parametrize(
    "activations", ["selective", {"checkpoint": "full", "offload": True}]
)
def test_a_plan_of_another_recomputation_is_what_is_decided_from_the_start(
    large: ModelTrace, activations: Any
) -> None:
    cluster = Hardware.parse(SETTING[0]).cluster()
    others = {
        "shard_degree": 64,
        "reshard_after_forward": "node",
        "collectives": {"forward_prefetch": 2},
    }
    asked = SmpConfig(**others, activations=activations, chunked_cross_entropy=512)
    shapes = large.of_precision(str(asked.activations.checkpoint), "mixed")
    base = decide(large.of_precision("none", "mixed"), SmpConfig(**others), cluster)
    found = decide_activations(
        base, shapes, activations=activations, chunked_cross_entropy=512
    )
    made = decide(shapes, asked, cluster)
    assert found == made and found.knobs.unresolved == asked
    assert [found.knobs.why(name) for name in SmpConfig.settings()] == [
        made.knobs.why(name) for name in SmpConfig.settings()
    ]
    with pytest.raises(
        ValueError, match=r"activations.offload=true.*checkpoint='none'"
    ):
        decide_activations(base, shapes, activations={"offload": True})


def fastest_of_each(found: Found) -> dict[Any, StepTime]:
    """Return the shortest step without stages by degrees and recomputation."""
    times: dict[Any, StepTime] = {}
    for each in found.ranked:
        if each.plan.stages is None:
            times.setdefault((each.plan.layout, recomputation(each.plan)), each.time)
    return times


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("tiny", "1x4:a100-40g", 16),
        ("tiny", "2x2:h100@10gbps", 8),
        pytest.param("large", "4x8:a100-80g@25gbps", 64, marks=pytest.mark.slow),
        pytest.param("large", "2x8:h200@1600gbps", 96, marks=pytest.mark.slow),
    ],
)
def test_what_a_search_leaves_out_by_bounds_is_not_what_it_picks(
    model: str, cluster: str, batch: int, request: pytest.FixtureRequest
) -> None:
    traced, hardware = request.getfixturevalue(model), Hardware.parse(cluster)
    work = Workload(TOKENS if model == "tiny" else 2048, batch)
    pruned, full = (
        search(traced, hardware, work, prunes=prunes) for prunes in (True, False)
    )
    assert (
        len(pruned.ranked) < len(full.ranked) and pruned.considered == full.considered
    )
    ours, theirs = pruned.ranked[0], full.ranked[0]
    assert (ours.knobs, ours.micro_batch, ours.time) == (
        theirs.knobs,
        theirs.micro_batch,
        theirs.time,
    )
    assert fastest_of_each(pruned) == fastest_of_each(full)


def drawn_request(seed: int) -> tuple[str, int, bool, dict[str, Any]]:
    """Draw machines, a global batch, whether the model is a mixture, and a number of
    stages and an expert degree that are given or open."""
    draw = random.Random(seed)
    nodes, ranks = draw.choice([1, 2, 4]), draw.choice([2, 4])
    device, rate = (
        draw.choice(["a100-40g", "h100", "rtx-4090"]),
        draw.choice([1, 10, 100, 400]),
    )
    stages = draw.choice(
        [each for each in (None, 2, 4) if each is None or each <= nodes * ranks]
    )
    batch = nodes * ranks * draw.choice([2, 4, 8])
    is_mixture, experts = draw.choice([False, True]), draw.choice([None, 2, "node"])
    experts = "node" if nodes * ranks == stages else experts  # no stage has two ranks
    fixed = {
        "pipeline": stages,
        "expert_parallel_degree": experts if is_mixture else None,
    }
    given = {knob: value for knob, value in fixed.items() if value is not None}
    return f"{nodes}x{ranks}:{device}@{rate}gbps", batch, is_mixture, given


def without_bounds(
    tiny: ModelTrace, mixture: ModelTrace, seeds: Iterable[int]
) -> list[str]:
    """Which drawn searches pick something else than the full one, or miss its
    fastest."""
    wrong = []
    for seed in seeds:
        cluster, batch, is_mixture, fixed = drawn_request(seed)
        traced = mixture if is_mixture else tiny
        hardware, work = Hardware.parse(cluster), Workload(TOKENS, batch)
        # The time of reading experts counts, not that of launching kernels.
        if is_mixture:
            hardware = replace(hardware, fitted=replace(FITTED, launching=0.0))
        knobs = read_fixed(fixed)
        pruned, full = (
            search(traced, hardware, work, fixed=knobs, prunes=prunes)
            for prunes in (True, False)
        )
        ours, theirs = pruned.ranked[0], full.ranked[0]
        picks_alike = (ours.knobs, ours.micro_batch, ours.time) == (
            theirs.knobs,
            theirs.micro_batch,
            theirs.time,
        )
        fastest = [
            min(each.time.total for each in found.ranked) for found in (pruned, full)
        ]
        if not picks_alike or fastest[0] != fastest[1]:
            wrong.append(
                f"seed {seed}: {cluster}, {batch}, {'mixture' if is_mixture else 'tiny'}, {fixed}"
            )
    return wrong


def test_drawn_searches_pick_what_full_ones_do(
    tiny: ModelTrace, mixture: ModelTrace
) -> None:
    assert without_bounds(tiny, mixture, range(4)) == []


@pytest.mark.slow
def test_many_drawn_searches_pick_what_full_ones_do(
    tiny: ModelTrace, mixture: ModelTrace
) -> None:
    assert without_bounds(tiny, mixture, range(4, 100)) == []


def test_a_batch_that_no_layout_divides_names_the_next(large: ModelTrace) -> None:
    with pytest.raises(
        ValueError,
        match=r"global_batch=7 is divided by no layout.*multiple of it, as 32",
    ):
        plan(large, SETTING[0], Workload(512, 7), fixed={"pipeline": 1})


@pytest.mark.slow
def test_why_not_says_what_it_costs_what_does_not_fit_and_what_is_refused(
    example: planner.Recommendation,
) -> None:
    found = example
    assert "step time (tensor +" in found.why_not(tensor=8)
    assert "GiB over: parameters" in found.why_not(shard=1, pipeline=1)
    assert "step time (replicas +" in found.why_not(shard=1)  # with stages it fits
    assert "does not divide" in found.why_not(shard=7)
    same = {
        "shard": found.chosen.plan.shard_degree,
        "recomputation": recomputation(found.chosen.plan),
    }
    assert "this is what was chosen" in found.why_not(**same)


def test_nothing_fits_is_status_2_with_three_changes_that_fit(
    large: ModelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "trace", lambda words, tokens: large)
    typed = [
        "plan",
        "gpt2-30b",
        "--cluster",
        "1x8:a100-40g",
        "--seq",
        "2048",
        "--global-batch",
        "1536",
    ]
    done = CliRunner().invoke(
        app, [*typed, "--fix", "shard=8", "--fix", "pipeline=1"], env={"COLUMNS": "300"}
    )
    assert (
        done.exit_code == 2
        and "nothing fits" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert (
        len([line for line in done.stderr.splitlines() if line.startswith("- ")]) == 3
    )
    with pytest.raises(NothingFits) as error:
        plan(large, "1x8:a100-40g", SETTING[1], fixed={"shard": 8, "pipeline": 1})
    assert len(error.value.changes) == 3
    assert all(each.memory.fits for _, each in error.value.changes)


def test_the_command_prints_a_table_json_and_a_file(
    large: ModelTrace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planner, "trace", lambda words, tokens: large)
    typed = [
        "plan",
        "gpt2-30b",
        "--cluster",
        SETTING[0],
        "--seq",
        "2048",
        "--global-batch",
        "1536",
    ]
    typed += ["--fix", "pipeline=1"]
    out = tmp_path / "plan.yaml"
    shown = CliRunner().invoke(
        app,
        [*typed, "--out", str(out), "--why-not", "tensor=8"],
        env={"COLUMNS": "200"},
    )
    assert shown.exit_code == 0, shown.output
    for words in (
        "replicas x shard",
        "memory, GiB",
        "MFU",
        "why not tensor=8",
        "node for each 3 billion",
    ):
        assert words in shown.output
    assert SmpConfig.from_yaml(out).shard_degree > 1
    picture = tmp_path / "plan.svg"
    assert CliRunner().invoke(app, [*typed, "--picture", str(picture)]).exit_code == 0
    assert "</svg>" in picture.read_text(encoding="utf-8")
    told = json.loads(
        CliRunner().invoke(app, [*typed, "--json", "--fix", "shard=64"]).stdout
    )
    assert (
        told["chosen"]["smp_config"]["shard_degree"] == 64
        and 1 <= len(told["alternatives"]) <= 5
    )
    memory = told["chosen"]["memory_bytes"]
    assert (
        sum(
            value for kind, value in memory.items() if kind not in ("total", "capacity")
        )
        == memory["total"]
    )
    silent = CliRunner().invoke(app, [*typed, "--json", "--dry-run"])
    assert silent.exit_code == 1 and "without it" in silent.stderr
    wrong = CliRunner().invoke(app, [*typed, "--fix", "shard"])
    assert wrong.exit_code == 1 and "write it as shard=16" in wrong.stderr


def write_log(folder: Path, large: ModelTrace, true: Fitted, **asked: Any) -> Path:
    """Write the log that a monitor would write on two nodes where the time model is
    right with ``true`` constants."""
    hardware = replace(Hardware.parse("2x8:a100-80g@400gbps"), fitted=true)
    knobs = SmpConfig(
        param_dtype="bfloat16", activations={"checkpoint": "full"}, **asked
    )
    made = decide(large.of_precision("full", "mixed"), knobs, hardware.cluster())
    links = hardware.links
    parts = 1 if made.stages is None else int(made.knobs.pipeline.microbatches)
    seconds = step_model(made, large, hardware, 2048).step(2, 4 * parts).total
    path = folder / "run.jsonl"
    run_log.append(path, "run", step=0, micro_batches=4, **_of_plan(made, [], 4))
    samples = 2 * 4 * parts * made.layout.replicate * made.layout.shard
    assert links.inter is not None and links.intra is not None
    sent = {
        **{
            "all_gather/inter_bytes": 3e9,
            "all_gather/inter_seconds": 3e9 / links.inter.all_gather.bandwidth,
        },
        **{
            "all_gather/intra_bytes": 8e9,
            "all_gather/intra_seconds": 8e9 / links.intra.all_gather.bandwidth,
        },
        **(
            {}
            if parts == 1
            else {"pipeline/inter_bytes": 1e6, "pipeline/inter_seconds": 0.5 * seconds}
        ),
    }
    for step in (5, 10, 15):
        rates = {
            "samples_per_second": samples / seconds,
            "tokens_per_second": 2048 * samples / seconds,
        }
        run_log.append(
            path,
            "step",
            step=step,
            samples=samples * step,
            **rates,
            sent=sent,
            peak_device_memory_gib=60.0,
        )
    return path


_STAGES = {"microbatches": 8, "schedule": "gpipe", "split": [12, 12, 12, 12]}


@pytest.mark.parametrize(
    "stages", [{}, {"pipeline_parallel_degree": 4, "pipeline": _STAGES}]
)
def test_constants_of_a_run_are_found_in_its_log(
    large: ModelTrace, tmp_path: Path, stages: dict[str, Any]
) -> None:
    """A run on two nodes, whose devices compute 0.7 and whose network sends 0.5 of what
    is assumed."""
    products, attention = (
        {"A100": 0.7 * own["A100"]} for own in (FITTED.products, FITTED.attention)
    )
    slower = {
        "products": {**FITTED.products, **products},
        "attention": {**FITTED.attention, **attention},
    }
    true = replace(
        FITTED, **slower, moving=0.7 * FITTED.moving, network=0.5 * FITTED.network
    )
    shard = 4 if stages else 16
    write_log(
        tmp_path,
        large,
        true,
        shard_degree=shard,
        keep_between_micro_batches="parameters",
        **stages,
    )
    hardware = Hardware.parse("32x8:a100-80g@400gbps")
    found = calibrate(tmp_path, large, hardware, SETTING[1])
    for name in ("moving", "network", "link"):
        assert getattr(found.fitted, name) == pytest.approx(
            getattr(true, name), rel=1e-3
        ), name
    assert found.fitted.share_of("products", "A100") == pytest.approx(
        true.share_of("products", "A100"), rel=1e-3
    )
    assert found.fitted.share_of("attention", "A100") == pytest.approx(
        true.share_of("attention", "A100"), rel=1e-3
    )
    assert set(found.changes) == {"products", "attention", "moving", "network"}
    step, *links, memory = found.compared
    assert (
        step.measured is not None
        and step.measured > 1.3 * step.planned
        and "measured" in step.words
    )
    assert [
        each.words.endswith(f"({off})")
        for each, off in zip(links, ("+0%", "-50%"), strict=True)
    ] == [True, True]
    assert memory.measured == 60.0
    planned = plan(
        large,
        replace(hardware, fitted=found.fitted),
        SETTING[1],
        fixed={"shard": 64, "micro_batch": 2, "pipeline": 1},
    )
    before = plan(
        large,
        hardware,
        SETTING[1],
        fixed={"shard": 64, "micro_batch": 2, "pipeline": 1},
    )
    assert planned.chosen.time.compute == pytest.approx(
        before.chosen.time.compute / 0.7, rel=2e-3
    )


def test_a_log_that_says_too_little_says_what_to_do(
    large: ModelTrace, tiny: ModelTrace, tmp_path: Path
) -> None:
    hardware, work = Hardware.parse(SETTING[0]), SETTING[1]
    path = write_log(tmp_path, large, FITTED, shard_degree=16)
    with pytest.raises(ValueError, match="is of a model with 29,"):
        calibrate(path, tiny, hardware, work)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:2]), encoding="utf-8")
    with pytest.raises(ValueError, match="let the run take some more steps"):
        calibrate(path, large, hardware, work)
    path.write_text(
        "\n".join([json.dumps({"kind": "run", "time": 0, "step": 0}), *lines[1:]]),
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match="has no plan in it"):
        calibrate(path, large, hardware, work)
    with pytest.raises(ValueError, match="cannot read"):
        calibrate(tmp_path / "nowhere", large, hardware, work)


def test_the_command_plans_with_what_a_log_says(
    large: ModelTrace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "trace", lambda words, tokens: large)
    write_log(
        tmp_path, large, replace(FITTED, network=0.1 * FITTED.network), shard_degree=16
    )
    typed = [
        "plan",
        "gpt2-30b",
        "--cluster",
        SETTING[0],
        "--seq",
        "2048",
        "--global-batch",
        "1536",
        "--json",
    ]
    typed += [
        "--fix",
        "shard=256",
        "--fix",
        "tensor=1",
        "--fix",
        "pipeline=1",
        "--fix",
        "micro_batch=2",
        "--from-log",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
    assert "links between nodes: planned" in done.stderr
    assert f"network: {FITTED.network} -> {0.1 * FITTED.network:.3g}" in done.stderr
    told = json.loads(done.stdout)
    assert told["model"] == "gpt2-30b"
    before = plan(
        large,
        SETTING[0],
        SETTING[1],
        fixed={"shard": 256, "tensor": 1, "pipeline": 1, "micro_batch": 2},
    ).chosen
    assert told["chosen"]["seconds"]["gathers"] > 2 * before.time.gathers
