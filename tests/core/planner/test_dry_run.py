"""Dry runs: the planner's memory and bytes are those of the real sharded model on a
fake process group; slow tests in a child process, as `smp plan` does. What is picked
fits in its own dry run: test_picks_fit.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from smp_core.config import SmpConfig
from smp_core.dry_run.split_trace import run_split, trace_model
from smp_core.dry_run.step import rehearse
from smp_core.dry_run.without_values import alike
from smp_core.engine.decide import decide
from smp_core.plan import OPTIMIZERS
from smp_core.planner import Source, SplitTrace, Workload, plan, trace
from smp_core.planner.devices import Device
from smp_core.planner.dry_run import RUN_KINDS, DryRun, Question, dry_run
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.stage_part import states_of
from smp_core.planner.step_memory import peak_memory

TOKENS = 192
FIELDS = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2336,
    "tie_word_embeddings": False,
}
DEVICE = Device("small", 4.0, 1e12, 1e11, 1e10, "no data sheet", 1e13)
NODES = Hardware(4, 4, DEVICE, 100.0)

# samples, micro-batches, knobs: each way to recompute, both windows, a copy on the
# node, the optimizer over the world
Case = tuple[int, int, dict[str, Any]]
CASES: list[Case] = [
    (
        2,
        2,
        {
            "shard_degree": 16,
            "activations": "selective",
            "reshard_after_forward": "node",
        },
    ),
    (
        1,
        1,
        {
            "shard_degree": 2,
            "tensor_parallel_degree": 4,
            "activations": "full",
            "reshard_after_forward": False,
        },
    ),
]
MORE_CASES: list[Case] = [
    (1, 1, {"shard_degree": 1, "optimizer_shard": "world"}),  # FSDP2 alone, to cast
    (
        1,
        2,
        {
            "shard_degree": 2,
            "activations": "full",
            "keep_between_micro_batches": "parameters",
        },
    ),
    (4, 1, {"shard_degree": 8, "activations": {"checkpoint": "full", "offload": True}}),
    (
        2,
        1,
        {"shard_degree": 4, "context_parallel_degree": 4, "activations": "selective"},
    ),
    (
        2,
        2,
        {
            "shard_degree": 8,
            "activations": "full",
            "keep_between_micro_batches": "gradients",
        },
    ),
    (2, 1, {"shard_degree": 4, "activations": "selective", "optimizer_shard": "world"}),
    (1, 2, {"shard_degree": 1}),
    (1, 2, {"shard_degree": 2, "optimizer_shard": "world"}),
    (1, 1, {"shard_degree": 2, "tensor_parallel_degree": 4, "activations": "full"}),
    (
        2,
        1,
        {"shard_degree": 2, "tensor_parallel_degree": 4, "activations": "selective"},
    ),
    (4, 2, {"shard_degree": 4, "tensor_parallel_degree": 2, "activations": "full"}),
    (4, 2, {"shard_degree": 4, "tensor_parallel_degree": 2}),
    (1, 2, {"shard_degree": 4, "context_parallel_degree": 2}),
    (2, 1, {"shard_degree": 4, "context_parallel_degree": 4, "activations": "full"}),
    (
        4,
        2,
        {
            "shard_degree": 8,
            "context_parallel_degree": 8,
            "collectives": {"context_head_groups": 1},
        },
    ),
    (
        2,
        1,
        {"shard_degree": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
    ),
    (
        2,
        1,
        {
            "shard_degree": 4,
            "context_parallel_degree": 4,
            "tensor_parallel_degree": 4,
            "activations": "full",
        },
    ),
]
# Two stages of two blocks.
STAGE_FIELDS = {**FIELDS, "num_hidden_layers": 4}


def stages(
    schedule: str, micro_batches: int, activations: str, shard: int = 4, **knobs: Any
) -> dict[str, Any]:
    pipeline = {"microbatches": micro_batches, "schedule": schedule}
    of_stages = {
        "pipeline_parallel_degree": 2,
        "pipeline": pipeline,
        "shard_degree": shard,
    }
    return {**of_stages, "activations": activations, **knobs}


STAGE_CASES: list[Case] = [(2, 2, stages("interleaved:2", 2, "full"))]
MORE_STAGE_CASES: list[Case] = [
    (2, 8, stages("1f1b", 4, "selective")),
    (2, 4, stages("gpipe", 4, "full", keep_between_micro_batches="gradients")),
    (1, 4, stages("1f1b", 4, "none", keep_between_micro_batches="parameters")),
    (2, 4, stages("1f1b", 4, "selective", 2, tensor_parallel_degree=2)),
    (2, 4, stages("1f1b", 4, "full", context_parallel_degree=4)),
]
# Of layers over ranks; where their tokens are whole, memory is not planned from a
# trace.
WHOLE_TOKENS: Case = (
    *(2, 1),
    {
        "shard_degree": 2,
        "tensor_parallel_degree": 4,
        "tensor_parallel": {"sequence_parallel": False},
    },
)


def split_by_cases(
    source: Source, lists: list[str], heads: int, tokens: int, _: Any
) -> SplitTrace:
    """Run split layers with the recomputation that CASES have beside them; every mode
    would take four seconds more."""
    modes = ["full"]
    assert modes == [
        knobs["activations"] for *_, knobs in CASES if "tensor_parallel_degree" in knobs
    ]
    return run_split(source, lists, heads, tokens, modes)


@pytest.fixture(scope="module")
def traced() -> ModelTrace:
    with alike():
        return trace.trace_model("small", TOKENS, FIELDS, split_by_cases)


@pytest.fixture(scope="module")
def traced_blocks() -> ModelTrace:
    # Sooner than with split layers.
    return trace.trace_model("small", TOKENS, STAGE_FIELDS)


def question(case: Case) -> Question:
    samples, count, knobs = case
    fields = STAGE_FIELDS if "pipeline_parallel_degree" in knobs else FIELDS
    exact = {"param_dtype": "bfloat16", **knobs}
    return Question("small", NODES, exact, TOKENS, samples, count, fields=fields)


def ran(cases: Sequence[Case]) -> list[DryRun]:
    return dry_run(*map(question, cases))


@pytest.fixture(scope="module")
def runs() -> list[DryRun]:
    return [rehearse(question(case)) for case in CASES]


def planned(
    traced: ModelTrace, samples: int, count: int, knobs: dict[str, Any], stage: int = 0
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes of memory by kind, and bytes sent."""
    asked = SmpConfig(param_dtype="bfloat16", **knobs)
    made = decide(
        traced.of_precision(str(asked.activations.checkpoint), "mixed"),
        asked,
        NODES.cluster(),
    )
    states = [each for each in states_of(made) if each.stage == stage]
    peak = peak_memory(made, traced, samples, count, TOKENS, states)
    sent = sent_bytes(made, traced, samples, count, TOKENS, stage)
    memory = {kind: getattr(peak, kind) for kind in RUN_KINDS}
    return memory, {name: round(n_bytes) for name, n_bytes in sent.items()}


def assert_planned(traced: ModelTrace, case: Case, ran: DryRun) -> None:
    """Memory within 3 % by kind (of those that are a tenth) and 2 % in all: the trace
    has one instant for many."""
    memory, sent = planned(traced, *case)
    for kind, n_bytes in ran.memory.items():
        if max(n_bytes, memory[kind]) > ran.total / 10:
            assert memory[kind] == pytest.approx(n_bytes, rel=0.03), kind
    assert sum(memory.values()) == pytest.approx(ran.total, rel=0.02)
    assert sent == ran.sent


def assert_stages(traced: ModelTrace, case: Case, ran: DryRun) -> None:
    """Bytes to the last one. Memory from 6 % less to 25 % more in all: the plan takes
    the most of what micro-batches keep while others are on their way, together with the
    most of all else."""
    of_stages = [ran, *ran.others]
    assert [each.stage for each in of_stages] == [0, 1]
    for each in of_stages:
        memory, sent = planned(traced, *case, each.stage)
        assert sent == each.sent, each.stage
        assert 0.94 * each.total < sum(memory.values()) < 1.25 * each.total, each.stage
        for kind in ("parameters", "optimizer"):
            assert memory[kind] == pytest.approx(each.memory[kind], rel=1e-3)


@pytest.mark.slow
def test_each_stage_sends_what_is_planned_and_takes_about_that_memory(
    traced_blocks: ModelTrace,
) -> None:
    """Chunks gather and reduce what is theirs, and no forward gathers again what the
    one before it has gathered."""
    for case, found in zip(STAGE_CASES, ran(STAGE_CASES), strict=True):
        assert_stages(traced_blocks, case, found)


@pytest.mark.slow
def test_other_stages_send_what_is_planned_and_take_about_that_memory() -> None:
    traced_blocks = trace_model("small", TOKENS, STAGE_FIELDS)
    for case, found in zip(MORE_STAGE_CASES, ran(MORE_STAGE_CASES), strict=True):
        assert_stages(traced_blocks, case, found)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_planned_memory_and_bytes_are_those_of_the_real_model(
    number: int, traced: ModelTrace, runs: list[DryRun]
) -> None:
    assert_planned(traced, CASES[number], runs[number])


@pytest.mark.slow
def test_more_planned_memory_and_bytes_are_those_of_the_real_model() -> None:
    traced = trace_model("small", TOKENS, FIELDS)
    *found, of_whole_tokens = ran([*MORE_CASES, WHOLE_TOKENS])
    for case, each in zip(MORE_CASES, found, strict=True):
        assert_planned(traced, case, each)
    assert planned(traced, *WHOLE_TOKENS)[1] == of_whole_tokens.sent


@pytest.mark.slow
def test_moments_of_8_bits_take_what_is_planned() -> None:
    asked = replace(question((1, 1, {"shard_degree": 4})), optimizer="adamw8bit")
    (found,) = dry_run(asked)
    made = decide(
        trace_model("small", TOKENS, FIELDS).shapes["none"],
        SmpConfig(**asked.knobs),
        NODES.cluster(),
    )
    (states,) = states_of(made, OPTIMIZERS["adamw8bit"])
    assert states.memory.optimizer_states == pytest.approx(
        found.memory["optimizer"], rel=0.03
    )


def test_tensor_ranks_hold_what_split_layers_show(traced: ModelTrace) -> None:
    """The second block stands for later ones."""
    of_ranks = {
        n: {
            each.name: each.elements
            for each in traced.shapes["none"].over(n).parameters
        }
        for n in (1, 4)
    }
    names = (
        "self_attn.q_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
    )
    for block in ("layers.0", "layers.2"):
        parts = [
            of_ranks[4][f"model.{block}.{name}"] / of_ranks[1][f"model.{block}.{name}"]
            for name in names
        ]
        assert parts == [1 / 4, 1 / 4, 1]
    assert traced.block_elements(4) == sum(
        n for name, n in of_ranks[4].items() if ".layers.1." in name
    )


@pytest.mark.slow
def test_tensor_ranks_hold_whole_positions_and_a_padded_vocabulary() -> None:
    """Of a vocabulary that ranks do not divide; the second block stands for later
    ones."""
    fields = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 2048,
        "vocab_size": 1002,
    }
    traced = trace_model("small", 128, fields)
    shapes = traced.shapes["none"]
    of_ranks = {
        degree: {each.name: each.elements for each in shapes.over(degree).parameters}
        for degree in (1, 2, 4)
    }

    def part(name: str, degree: int) -> float:
        return (
            of_ranks[degree][f"transformer.{name}"] / of_ranks[1][f"transformer.{name}"]
        )

    assert (part("wpe.weight", 4), part("wte.weight", 2), part("wte.weight", 4)) == (
        1,
        1 / 2,
        1 / 4,
    )
    for block in ("h.0", "h.2"):
        found = [
            part(f"{block}.{name}", 4)
            for name in ("attn.c_attn.bias", "attn.c_proj.bias", "ln_1.weight")
        ]
        assert found == [1 / 4, 1, 1]
    assert {degree for degree, _ in traced.split.instants} == {2, 4}
    assert traced.block_elements(4) == sum(
        n for name, n in of_ranks[4].items() if ".h.1." in name
    )


@pytest.mark.slow
def test_degrees_that_layers_do_not_take_are_left_out_and_unlike_blocks_are_split_as_the_second() -> (
    None
):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "head_dim": 8,
    }
    heads = {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
    }
    fields = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        **sizes,
        **heads,
    }
    traced = trace_model("small", 128, fields)
    # 64 and 32 columns over 3 ranks are refused.
    assert {degree for degree, _ in traced.split.instants} == {2}
    assert (
        2 not in traced.split.unsplit and "does not divide" in traced.split.unsplit[3]
    )
    with pytest.raises(ValueError, match="tensor_parallel_degree=3 does not divide"):
        plan(
            traced,
            replace(NODES, ranks_per_node=3),
            Workload(128, 12),
            fixed={"tensor": 3},
        )
    experts = [
        each for each in traced.shapes["none"].parameters if ".experts." in each.name
    ]
    assert len(experts) == 4 and all(
        2 * each.over(2).elements == each.elements for each in experts
    )


def test_a_dry_run_says_what_it_has_not() -> None:
    with pytest.raises(
        ValueError, match="fp8: a dry run has no FP8 yet; leave --dry-run out"
    ):
        rehearse(Question("gpt2", NODES, {"fp8": True}, TOKENS, 1, 2))
    with pytest.raises(
        ValueError, match="optimizer='lion': a dry run steps optimizers of torch: adamw"
    ):
        rehearse(Question("gpt2", NODES, {}, TOKENS, 1, 2, optimizer="lion"))


@pytest.mark.slow
def test_the_child_process_says_what_a_dry_run_has_not() -> None:
    with pytest.raises(
        ValueError, match="optimizer='lion': a dry run steps optimizers of torch: adamw"
    ):
        dry_run(Question("gpt2", NODES, {}, TOKENS, 1, 2, optimizer="lion"))
