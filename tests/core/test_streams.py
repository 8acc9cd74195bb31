"""What accelerators ask of the core, on streams played by the CPU (`tests.core.stream_sanitizer`): no memory is used
again while another stream still reads it, nothing is read before it was written, and no step makes the host wait.

Every mend has a case that fails when it is taken out again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from tests.core.stream_sanitizer import WITHOUT, Case
from tests.harness import run_script

OFFLOADED = {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}
CLEAN = {
    "whole parameters, states over the world": Case({"shard_degree": 1, "optimizer_shard": "world"}),
    "nodes": Case({"shard_degree": 2}),
    "nodes, thawing": Case({"shard_degree": 2}, micro_batches=3, thaws=True),
    "nodes, a bfloat16 model": Case({"shard_degree": 2}, dtype="bfloat16", micro_batches=3),
    "nodes, bfloat16 reductions": Case({"shard_degree": 2, "reduce_dtype": "bfloat16"}, micro_batches=3),
    "nodes, states over the world": Case(
        {"shard_degree": 2, "param_dtype": "bfloat16", "optimizer_shard": "world"}, micro_batches=3
    ),
    "nodes, non-finite steps skipped": Case({"shard_degree": 2, "on_nonfinite_grad_norm": "skip"}),
    "two stages": Case({"shard_degree": 4}),
    "bfloat16 between replicas": Case({"shard_degree": 2, "compression": "bf16"}),
    "8 bits both ways": Case(
        {"shard_degree": 4, "compression": {"gather": "int8", "gather_after_steps": 0, "reduce": "int8"}}
    ),
    "4 bits, with feedback, states over the world": Case(
        {"shard_degree": 2, "compression": {"reduce": "int4", "error_feedback": True}, "optimizer_shard": "world"}
    ),
    "a secondary shard": Case({"shard_degree": 4, "reshard_after_forward": 2}),
    "FP8": Case({"shard_degree": 2, "fp8": {"fp8_all_gather": True}}),
    "a unit gathered ahead and not used": Case({"shard_degree": 2, "collectives": {"forward_prefetch": 2}}, skips=True),
    "inputs on the host, none ahead": Case({"shard_degree": 2, "activations": {**OFFLOADED, "loading_horizon": 1}}),
    "inputs on the host, one ahead": Case({"shard_degree": 2, "activations": {**OFFLOADED, "loading_horizon": 2}}),
    "once a step": Case({"shard_degree": 4, "keep_between_micro_batches": "gradients"}),
}
# Where a step makes the host wait, and how often.
ASKS = {
    "nodes, non-finite steps skipped": {"settle_nonfinite": 1.0},
    "8 bits both ways": {"_look": 1.0},
    "FP8": {"close": 1.0, "step": 1.0},
    # Whether another replica used what this rank did not.
    "a unit gathered ahead and not used": {"close": 1.0},
}
LAUNCHED, TOLD, UNASKED, PINNED = WITHOUT
BROKEN = {
    "gradients of whole parameters are given up": Case(
        {"shard_degree": 1, "optimizer_shard": "world"}, without=LAUNCHED
    ),
    "what FSDP2 reduced is given up": Case({"shard_degree": 2}, without=TOLD),
    "what FSDP2 reduced is given up, cast": Case({"shard_degree": 2}, dtype="bfloat16", micro_batches=3, without=TOLD),
    "a sum that became wider is given up": Case({"shard_degree": 2}, micro_batches=3, thaws=True, without=TOLD),
}
ASKING = {
    "terms that are not finite go exactly": Case(
        {"shard_degree": 4, "compression": {"reduce": "int8"}}, without=UNASKED
    ),
    "flags from memory that is not pinned": Case({"shard_degree": 2}, without=PINNED),
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of all cases, by their names."""
    cases = CLEAN | BROKEN | ASKING
    done = run_script(["-m", "tests.core.stream_sanitizer", json.dumps([asdict(case) for case in cases.values()])])
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CLEAN)
def test_no_memory_is_used_before_other_streams_are_done_with_it(name: str, results: dict[str, Any]) -> None:
    assert results[name]["found"] == {}


@pytest.mark.parametrize("name", CLEAN)
def test_no_step_makes_the_host_wait_where_no_knob_asks_for_it(name: str, results: dict[str, Any]) -> None:
    asked: dict[str, float] = {}
    for line, count in results[name]["asked"].items():
        function = line.split(" at ")[1].split(":")[1]
        asked[function] = asked.get(function, 0.0) + count
    assert asked == ASKS.get(name, {}), results[name]["asked"]


@pytest.mark.parametrize("name", ASKING)
def test_a_question_to_the_device_is_counted(name: str, results: dict[str, Any]) -> None:
    assert results[name]["asked"] != {}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mend_that_is_taken_out_is_missed(name: str, results: dict[str, Any]) -> None:
    assert any("is used again" in text for text in results[name]["found"]), results[name]


def test_every_mend_has_a_case_that_misses_it() -> None:
    assert {case.without for case in (BROKEN | ASKING).values()} == set(WITHOUT)
