"""Dry runs: the planner's memory and bytes are those of the real sharded model on a fake process group, and what it
picks fits in a dry run. One child process for all cases: it imports torch once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from smp_core.config import SmpConfig
from smp_core.planning import NothingFits, Workload, plan
from smp_core.planning.decide import decide
from smp_core.planning.devices import Device
from smp_core.planning.dry_run import RUN_KINDS, DryRun, Question, dry_run
from smp_core.planning.hardware import Hardware
from smp_core.planning.model_trace import ModelTrace
from smp_core.planning.search import Candidate
from smp_core.planning.sent_bytes import sent_bytes
from smp_core.planning.step_memory import peak_memory
from smp_core.planning.trace import trace_model

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

# samples, micro-batches, knobs: each way to recompute, both windows, a copy on the node, the optimizer over the world
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {"shard_degree": 16, "activations": "selective", "reshard_after_forward": "node"}),
    (2, 2, {"shard_degree": 8, "activations": "full", "keep_between_micro_batches": "gradients"}),
    (1, 2, {"shard_degree": 2, "activations": "full", "keep_between_micro_batches": "parameters"}),
    (2, 1, {"shard_degree": 4, "activations": "selective", "optimizer_shard": "world"}),
    (4, 1, {"shard_degree": 8, "activations": {"checkpoint": "full", "offload": True}}),
]
# Layers over ranks, whose tokens are split or whole.
WHOLE_TOKENS = {"tensor_parallel": {"sequence_parallel": False}}
TENSOR_CASES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 2, {"shard_degree": 4, "tensor_parallel_degree": 2, "activations": "full"}),
    (2, 1, {"shard_degree": 2, "tensor_parallel_degree": 4, "activations": "selective"}),
    (2, 1, {"shard_degree": 2, "tensor_parallel_degree": 4, **WHOLE_TOKENS}),
]


@pytest.fixture(scope="module")
def traced() -> ModelTrace:
    return trace_model("small", TOKENS, FIELDS)


def drawn_picks(traced: ModelTrace) -> list[Candidate]:
    """Plan for clusters and batches drawn from a seed, with so little memory that it decides."""
    seeded, found = random.Random(7), []
    while not found:
        memory = seeded.uniform(1.6, 2.2)  # 1.5 GiB are the margin
        small = Device("small", memory, 1e12, 1e11, 1e10, "no data sheet", 1e13)
        hardware = Hardware(seeded.choice([1, 2, 4]), 4, small, 100.0)
        batch = hardware.devices * seeded.choice([4, 16, 64])
        try:
            found.append(plan(traced, hardware, Workload(TOKENS, batch)).chosen)
        except NothingFits:
            continue
    return found


@pytest.fixture(scope="module")
def runs(traced: ModelTrace) -> tuple[list[DryRun], list[tuple[Candidate, DryRun]]]:
    cases = [*CASES, *TENSOR_CASES]
    asked = [
        Question("small", NODES, {"param_dtype": "bfloat16", **knobs}, TOKENS, samples, count, fields=FIELDS)
        for samples, count, knobs in cases
    ]
    picks = drawn_picks(traced)
    for each in picks:
        hardware = Hardware(each.plan.cluster.topology.num_nodes, 4, DEVICE, 100.0)
        asked.append(Question("small", hardware, each.knobs, TOKENS, each.micro_batch, each.count, fields=FIELDS))
    found = dry_run(*asked)
    return found[: len(cases)], list(zip(picks, found[len(cases) :], strict=True))


def planned(
    traced: ModelTrace, samples: int, count: int, knobs: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes of memory by kind, and bytes sent."""
    asked = SmpConfig(param_dtype="bfloat16", **knobs)
    made = decide(traced.of_precision(str(asked.activations.checkpoint), "mixed"), asked, NODES.cluster())
    peak = peak_memory(made, traced, samples, count, TOKENS)
    sent = sent_bytes(made, traced, samples, count, TOKENS)
    memory = {kind: getattr(peak, kind) for kind in RUN_KINDS}
    return memory, {name: round(n_bytes) for name, n_bytes in sent.items()}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_planned_memory_and_bytes_are_those_of_the_real_model(
    number: int, traced: ModelTrace, runs: tuple[list[DryRun], Any]
) -> None:
    """Memory within 3 % by kind (of those that are a tenth) and 2 % in all: the trace has one instant for many."""
    ran = runs[0][number]
    memory, sent = planned(traced, *CASES[number])
    for kind, n_bytes in ran.memory.items():
        if max(n_bytes, memory[kind]) > ran.total / 10:
            assert memory[kind] == pytest.approx(n_bytes, rel=0.03), kind
    assert sum(memory.values()) == pytest.approx(ran.total, rel=0.02)
    assert sent == ran.sent


@pytest.mark.parametrize("number", range(len(TENSOR_CASES)))
def test_planned_bytes_of_tensor_ranks_are_those_of_the_real_model_and_memory_is_near(
    number: int, traced: ModelTrace, runs: tuple[list[DryRun], Any]
) -> None:
    """Memory within 8 % in all where tokens are split: the loss of split logits is not the one that was traced. What
    whole tokens keep more is not planned."""
    ran, case = runs[0][len(CASES) + number], TENSOR_CASES[number]
    memory, sent = planned(traced, *case)
    assert sent == ran.sent
    if "tensor_parallel" not in case[2]:
        assert sum(memory.values()) == pytest.approx(ran.total, rel=0.08)


def test_what_is_picked_fits_in_its_own_dry_run(runs: tuple[Any, list[tuple[Candidate, DryRun]]]) -> None:
    for candidate, ran in runs[1]:
        assert ran.total <= candidate.memory.capacity, candidate.knobs
        # Also without the margin, but for what a trace of two blocks rounds.
        assert ran.total <= 1.02 * (candidate.memory.total - candidate.memory.margin)


def test_a_dry_run_says_what_it_has_not() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_degree"):
        dry_run(Question("gpt2", NODES, {"pipeline_parallel_degree": 2}, TOKENS, 1, 2))
    with pytest.raises(ValueError, match="optimizer='lion': a dry run steps optimizers of torch: adamw"):
        dry_run(Question("gpt2", NODES, {}, TOKENS, 1, 2, optimizer="lion"))
