"""Mixtures of experts in a plan: what their products compute, what they hold, and what
is said about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.entry import parallelize
from smp_core.plan import TRAINERS_OWN, Cluster, Shapes, estimate
from smp_core.planner import RunningStep, Workload, plan, plan_run
from smp_core.planner.dry_run import dry_run_of
from smp_core.planner.explain import as_dict, as_yaml, table
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.known_models import KNOWN_MODELS
from smp_core.planner.model_source import build
from smp_core.planner.model_trace import Figures, ModelTrace
from smp_core.planner.planner import layout_words
from smp_core.planner.search import search
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.stage_time import StagedModel, step_model
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.time import computed_seconds, computing_seconds, model_flops
from smp_core.planner.trace import _keep_commonest, measured, scores_kept, trace_model
from smp_core.topology import Topology
from tests.core.planner.planner_models import MIXTURE, traced_mixture
from tests.harness import run_ranks

TOKENS, EXPERTS = 64, 8
EXPERTS_KNOB = "expert_parallel_degree"
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
SIZES = {"moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
SHARED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
    "granitemoe": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 4},
    "flex_olmo": {"num_experts": 8, "num_key_value_heads": 4},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 32, **SIZES},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, **SIZES},
    "deepseek_v2": {
        **SHARED,
        **SIZES,
        **LATENT,
        "topk_method": "greedy",
        "num_key_value_heads": 4,
    },
    "deepseek_v3": {**SHARED, **SIZES, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": {**SHARED, **SIZES, "head_dim": 16},
    "dots1": {**SHARED, **SIZES, "head_dim": 16},
}


def fields_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **COMMON, **MIXTURES[kind]}


FULL = (
    *(
        "mixtral-8x7b",
        "mixtral-8x22b",
        "phi-3.5-moe",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "olmoe-1b-7b",
    ),
    *(
        "qwen1.5-moe-a2.7b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "glm-4.5-air",
    ),
)
"""Mixtures of twelve sizes."""
REST = [name for name in FULL if name != "gpt-oss-20b"]


def flops_of_arithmetic(fields: Mapping[str, Any], tokens: int) -> float:
    """FLOPs of a sequence: 6 for each parameter that a token meets, of experts those of
    its own; and attention, scores and values of all pairs of tokens."""
    with FakeTensorMode():
        model = build("a mixture", tokens, fields).model
    counts = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next(fields[name] for name in counts if name in fields)
    met = 0.0
    for name, parameter in model.named_parameters():
        is_experts = "experts" in name and "shared" not in name
        share = fields["num_experts_per_tok"] / count if is_experts else 1.0
        met += 0.0 if "embed_tokens" in name else share * parameter.numel()
    width = fields.get(
        "head_dim", fields["hidden_size"] // fields["num_attention_heads"]
    )
    of_keys, of_values = width, width
    if "kv_lora_rank" in fields:
        of_keys, of_values = (
            fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
            fields["v_head_dim"],
        )
    pairs = fields["num_hidden_layers"] * fields["num_attention_heads"] * tokens**2
    return 6 * met * tokens + 6 * pairs * (of_keys + of_values)


@pytest.fixture(autouse=True)
def in_bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_step_of_a_mixture_computes_what_the_parameters_take_that_a_token_meets(
    kind: str,
) -> None:
    """2 %: norms and biases are parameters and no products."""
    with FakeTensorMode(allow_non_fake_inputs=True), scores_kept():
        source = build(kind, TOKENS, fields_of(kind))
        found = measured(source, ["model.layers"], "none", 1, TOKENS).finish()
    experts = found.forward_experts + found.backward_experts
    products = found.forward_products + found.backward_products
    assert experts > 0
    expected = flops_of_arithmetic(fields_of(kind), TOKENS)
    assert products + experts + 3 * found.full_attention == pytest.approx(
        expected, rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss-20b", *REST])
def test_a_planned_step_of_a_mixture_of_full_size_computes_as_much(name: str) -> None:
    """2 %, as above; blocks before a mixture's, which are dense, are planned as if they
    were like the others."""
    traced, samples = trace_model(name, 4096), 3
    expected = samples * flops_of_arithmetic(KNOWN_MODELS[name], 4096)
    assert model_flops(traced, samples, 4096) == pytest.approx(expected, rel=0.02)


@pytest.fixture(scope="module")
def gpt_oss() -> ModelTrace:
    return trace_model("gpt_oss", TOKENS, fields_of("gpt_oss"))


def test_a_plan_of_a_mixture_names_what_its_experts_hold_gather_and_send(
    gpt_oss: ModelTrace,
) -> None:
    """Of three blocks of 8 experts with three matrices of 64 x 96, two experts for a
    token."""
    matrices = 3 * EXPERTS * 3 * 64 * 96
    found = plan(
        gpt_oss,
        "1x4:h100-80g",
        Workload(TOKENS, 8),
        fixed={"shard": 4, "expert_parallel_degree": 1},
    )
    experts = as_dict(found)["chosen"]["experts"]
    assert experts["parameters"] == matrices
    assert experts["active_parameters"] == gpt_oss.parameters - matrices * (
        1 - 2 / EXPERTS
    )
    assert experts["gathered_bytes"] == 2 * matrices / 3
    # Gathered forward and backward in bfloat16, and reduced in float32, by a ring of
    # four; the root is gathered once.
    assert experts["sent_bytes"] == pytest.approx(
        matrices * (2 + 2 + 4) * 3 / 4, rel=0.02
    )
    assert experts["state_bytes"] == pytest.approx(matrices * 16 / 4, rel=0.02)
    assert "expert_parallel_degree=1" in str(table(found).caption)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelTrace:
    return traced_mixture(tmp_path_factory)


def test_expert_degrees_are_searched_and_written(mixture: ModelTrace) -> None:
    """On nodes of four, of four experts; with pipeline stages and without."""
    hardware, alone = (
        Hardware.parse("2x4:h100-80g@100gbps"),
        {"tensor_parallel_degree": 1},
    )
    found = search(mixture, hardware, Workload(TOKENS, 64), alone, prunes=False).ranked
    seen = {
        (each.plan.knobs.expert_parallel_degree, each.plan.layout.pipeline > 1)
        for each in found
    }
    assert seen == {
        (degree, staged) for degree in (1, 2, 4) for staged in (False, True)
    }
    given = plan(
        mixture,
        "2x4:h100-80g@100gbps",
        Workload(TOKENS, 64),
        fixed={"shard": 8, EXPERTS_KNOB: "node"},
    )
    assert (
        given.chosen.plan.knobs.expert_parallel_degree == 4
        and given.chosen.time.experts > 0
    )
    assert f"{EXPERTS_KNOB}: node" in as_yaml(given) and "experts 4" in layout_words(
        given.chosen
    )
    with pytest.raises(ValueError, match="expert_parallel_degree=4; fix it at 1"):
        dry_run_of(replace(given, model="mixtral-8x7b"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "is_planned"),
    [("auto", True), (2, False)],
)
def test_an_open_expert_degree_is_planned_when_a_run_starts(
    asked: Any, is_planned: bool
) -> None:
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**MIXTURE)
    ).bfloat16()
    batch = {"sequence": 32, "micro_batch": 2, "cluster": "2x4:h100-80g@100gbps"}
    cluster = Cluster(Topology.uniform(8, 4), "cpu", host_memory=2**36)
    step = RunningStep(torch.device("cpu"), "forward", TRAINERS_OWN, 1)
    found = plan_run(
        model, SmpConfig(plan=batch, expert_parallel_degree=asked), cluster, step
    )
    assert (EXPERTS_KNOB in found.knobs) == is_planned and found.knobs[
        "shard_degree"
    ] % (1 if is_planned else 2) == 0


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        (
            {EXPERTS_KNOB: 3},
            "does not divide the 4 experts of a layer and the 8 devices.*write 1, 2, 4, 'node' or",
        ),
        (
            {EXPERTS_KNOB: 4, "shard": 2},
            "has to divide shard_degree=2 and the 4 experts of a layer; allowed: 1, 2",
        ),
        (
            {EXPERTS_KNOB: 4, "tensor": 4},
            "has to divide shard_degree=2 and the 4 experts of a layer; allowed: 1, 2",
        ),
    ],
)
def test_wrong_expert_degrees_are_refused(
    mixture: ModelTrace, fixed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan(
            mixture,
            "2x4:h100-80g@100gbps",
            Workload(TOKENS, 64),
            fixed={**fixed, "pipeline": 1},
        )


def test_units_of_dealt_experts_are_those_of_a_run(mixture: ModelTrace) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE))
    real = Shapes.of(model, SmpConfig(expert_parallel_degree=2)).units
    assert mixture.of_precision("none", "mixed", dealt=True).units.units == real.units


def test_experts_on_several_ranks_gather_their_part_and_recomputation_keeps_rows(
    mixture: ModelTrace,
) -> None:
    """A rank holds as much in all. Gathers of two blocks are smaller by what other
    ranks have of the experts."""
    # Elements of a block's.
    cluster, experts = Hardware.parse("1x4:h100-80g").cluster(), 4 * 3 * 64 * 96
    others = {"activations": "full"}
    whole, dealt = (
        decide(
            mixture.of_precision("full", "mixed", n > 1),
            knobs_of(4, n, others),
            cluster,
        )
        for n in (1, 4)
    )
    both = [peak_memory(each, mixture, 8, 2, TOKENS) for each in (whole, dealt)]
    assert (
        both[0].parameters == both[1].parameters
        and both[0].optimizer == both[1].optimizer
    )
    assert (
        estimate(whole).gathered - estimate(dealt).gathered == 2 * experts * 3 / 4 * 2
    )
    rows = 2 * 8 * TOKENS * 64 * 2  # two for each token, in bfloat16
    assert both[1].activations - both[0].activations == pytest.approx(
        4 * 2 * rows, abs=8
    )


def test_bounds_of_a_search_are_of_the_experts_that_a_rank_reads(
    mixture: ModelTrace,
) -> None:
    """What plans share, and what blocks compute at least, are of each expert degree;
    launching takes no time."""
    hardware = replace(
        Hardware.parse("1x8:h100-80g"), fitted=replace(FITTED, launching=0.0)
    )
    shared: dict[Any, Any] = {}
    for experts in (1, 4):
        made = [
            decide(
                mixture.of_precision("none", "mixed", experts > 1),
                knobs_of(4, experts, others),
                hardware.cluster(),
            )
            for others in ({}, {"pipeline_parallel_degree": 2})
        ]
        machines = (mixture, hardware, TOKENS)
        whole, staged, again = (
            step_model(made[0], *machines),
            step_model(made[1], *machines, shared),
            step_model(made[1], *machines, {}),
        )
        of_block, of_rest = computed_seconds(
            mixture, hardware, "none", 1, 1, 1, TOKENS, experts
        )
        assert whole.step(1, 1).compute == pytest.approx(
            mixture.blocks * of_block + of_rest
        )
        assert isinstance(staged, StagedModel) and isinstance(again, StagedModel)
        assert staged.step(1, 4, 4) == again.step(1, 4, 4)
        assert staged.least(1, 4, 4) <= staged.step(1, 4, 4).total


def test_a_recomputation_that_a_model_does_not_train_with_is_left_out_and_says_why(
    gpt_oss: ModelTrace,
) -> None:
    """GPT-OSS adds biases of experts into the products' outputs, which selective
    recomputation keeps."""
    found = plan(gpt_oss, "1x4:h100-80g", Workload(TOKENS, 8))
    modes = {each.plan.knobs.activations.checkpoint for each in found.found.ranked}
    assert modes == {"none", "full"}
    assert "does not train with it" in found.why_not(activations="selective")


def test_blocks_are_those_of_the_most_common_kind() -> None:
    blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 3)])
    _keep_commonest(blocks)
    assert [block.weight.shape for block in blocks] == [(3, 2), (3, 2)]


def test_products_of_few_tokens_take_the_reading_of_all_experts() -> None:
    """A matrix of 1 GiB for one row: not by its FLOPs, but by the memory's
    bandwidth."""
    hardware = Hardware.parse("1x8:h100-80g")
    figures = Figures(forward_experts=2**30, forward_weights=2**30)
    seconds = computing_seconds(figures, "forward", 1, hardware)
    assert seconds == pytest.approx(2**30 / (hardware.device.hbm * FITTED.moving))


DEGREES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 2, {"activations": "full", "reshard_after_forward": 2}),
    (4, 4, {}),
]
"""Shard and expert degrees on 2 nodes of 2 ranks, and other knobs."""
MORE_DEGREES = [
    (4, 1, {}),
    (4, 2, {}),
    (2, 2, {}),
    (4, 4, {"collectives": {"hierarchical": False}}),
]
SAMPLES, COUNT = 2, 2


def knobs_of(shard: int, experts: int, others: dict[str, Any]) -> SmpConfig:
    degrees = {"shard_degree": shard, "expert_parallel_degree": experts}
    return SmpConfig(**degrees, param_dtype="bfloat16", **others)


def sent_with_even_choices(
    cases: list[tuple[int, int, dict[str, Any]]],
) -> list[dict[str, float]]:
    """The bytes of a step of each case, by a router that gives all choices of experts
    as many tokens."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE))
        parallel = parallelize(model, knobs_of(*case))
        for site in parallel.plan.shapes.experts:
            model.get_submodule(site.name).register_forward_pre_hook(_evenly)
        ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
        for number in range(COUNT):
            with parallel.window.accumulate(number < COUNT - 1):
                model(input_ids=ids, labels=ids).loss.backward()
        parallel.window.close()
        parallel.meter.close_step()
        found.append(parallel.meter.per_step())
    return found


def _evenly(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    hidden, chosen, weights = args
    choices = torch.combinations(torch.arange(module.num_experts), chosen.shape[1])
    return hidden, choices[torch.arange(len(chosen)) % len(choices)], weights


@pytest.mark.parametrize(
    "cases",
    [DEGREES, pytest.param(MORE_DEGREES, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_planned_bytes_of_dealt_experts_are_those_of_a_run(
    mixture: ModelTrace, cases: list[tuple[int, int, dict[str, Any]]]
) -> None:
    """5 %: what else is sent beside units and tokens is of a few numbers."""
    ran = run_ranks(sent_with_even_choices, 4, cases, ranks_per_node=2)[0]
    cluster = Hardware.parse("2x2:h100-80g@100gbps").cluster()
    for case, seen in zip(cases, ran, strict=True):
        asked = knobs_of(*case)
        shapes = mixture.of_precision(
            str(asked.activations.checkpoint), "mixed", case[1] > 1
        )
        planned = sent_bytes(
            decide(shapes, asked, cluster), mixture, SAMPLES, COUNT, TOKENS
        )
        kinds = ["expert_dispatch", "expert_combine"]
        # Sums in one stage over nodes are not planned as gloo makes them.
        if "collectives" not in case[2]:
            kinds += ["all_gather", "reduce_scatter", "all_reduce"]
        for name in (f"{kind}/{link}" for kind in kinds for link in ("intra", "inter")):
            assert planned.get(name, 0.0) == pytest.approx(
                seen.get(f"{name}_bytes", 0.0), rel=0.05
            ), (case, name)


def test_tokens_between_nodes_cross_once_where_they_take_two_hops(
    mixture: ModelTrace,
) -> None:
    """Two of four experts, all choices as often: a token has experts on 2 (1 - 1 / 6)
    of two nodes. Its experts and weights cross beside it. What is kept of both hops is
    exact but for rounding."""
    hardware, others = Hardware.parse("2x2:h100-80g@10gbps"), {"activations": "full"}
    shapes = mixture.of_precision("full", "mixed", True)
    flat = {**others, "collectives": {"hierarchical": False}}
    one, two = (
        decide(shapes, knobs_of(4, 4, knobs), hardware.cluster())
        for knobs in (flat, others)
    )
    rows = 2 * 8 * TOKENS * 64 * 2  # two for each token, in bfloat16
    kept = [peak_memory(each, mixture, 8, 2, TOKENS).activations for each in (one, two)]
    assert kept[1] - kept[0] == pytest.approx(4 * 2 * rows * 5 / 6, abs=8)
    machines = (mixture, hardware, TOKENS)
    hops = [step_model(each, *machines).step(64, 1).experts for each in (one, two)]
    assert hops[1] / hops[0] == pytest.approx(5 / 6 + 12 / 256, rel=0.05)
