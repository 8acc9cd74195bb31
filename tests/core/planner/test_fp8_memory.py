"""Bytes and memory of plans in FP8 are those of a run on two ranks, whose storages are
followed as a dry run's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.dry_run.step import _Rank, _watched
from smp_core.dry_run.without_values import noted
from smp_core.engine.decide import decide
from smp_core.entry import parallelize
from smp_core.planner.dry_run import RUN_KINDS, DryRun, Question
from smp_core.planner.fp8_figures import state_bytes
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_source import build
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.trace import trace_model
from tests.harness import run_ranks

SAMPLES, COUNT, TOKENS = 4, 2, 64
MACHINES = Hardware.parse("1x2:h100-80g")
FIELDS: dict[str, Any] = {
    **{
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
CASES: list[dict[str, Any]] = [
    {"fp8": True},
    {"fp8": {"fp8_all_gather": False, "amax_history_len": 16}},
]
MORE_CASES: list[dict[str, Any]] = [
    {"fp8": {"reduce_amax": False}, "keep_between_micro_batches": "parameters"},
    {"fp8": True, "keep_between_micro_batches": "gradients"},
    {"fp8": True, "shard_degree": 1},
]


def knobs_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"shard_degree": 2, "param_dtype": "bfloat16", **case}


def followed(cases: list[dict[str, Any]]) -> list[tuple[DryRun, int]]:
    """Return what a rank takes and sends, and the bytes of its scales."""
    found = []
    for case in cases:
        allocated: dict[int, str] = {}
        with noted(allocated):
            source = build("a Llama", TOKENS, FIELDS)
            parallel = parallelize(source.model, SmpConfig(**knobs_of(case)))
            optimizer = torch.optim.AdamW(parallel.module.parameters())
            parallel.prepare_optimizer(optimizer)
            question = Question(
                "a Llama", MACHINES, knobs_of(case), TOKENS, SAMPLES, COUNT
            )
            seen = _watched(_Rank(source, parallel, optimizer, question, allocated), 2)
        assert parallel.fp8 is not None
        scales = parallel.fp8.state
        tensors = (scales.history, scales.current, scales.scale, scales.inverse)
        found.append((seen, sum(each.untyped_storage().nbytes() for each in tensors)))
    return found


@pytest.fixture(scope="module")
def traced() -> ModelTrace:
    return trace_model("small", TOKENS, FIELDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [CASES, MORE_CASES],
    ids=["some", "more"],
)
def test_planned_bytes_and_memory_are_those_of_a_run(
    traced: ModelTrace, cases: list[dict[str, Any]]
) -> None:
    """Bytes to the last one. Memory within 0.5 %: scales of the step are among what a
    run has at its peak. Blocks are not computed again: emulated products take a layer's
    values in float32, at which the peak would be then."""
    for case, (seen, scales) in zip(
        cases, run_ranks(followed, 2, cases)[0], strict=True
    ):
        asked = SmpConfig(**knobs_of(case))
        plan = decide(
            traced.of_precision(str(asked.activations.checkpoint), "mixed"),
            asked,
            MACHINES.cluster(),
        )
        assert sent_bytes(plan, traced, SAMPLES, COUNT, TOKENS) == seen.sent, case
        peak = peak_memory(plan, traced, SAMPLES, COUNT, TOKENS)
        assert state_bytes(plan) == scales
        planned = {kind: getattr(peak, kind) for kind in RUN_KINDS}
        planned["other"] -= scales
        assert planned == pytest.approx(dict(seen.memory), rel=0.005), case
