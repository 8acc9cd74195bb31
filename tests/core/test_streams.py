"""What accelerators ask of the core, on streams played by the CPU
(`tests.core.stream_sanitizer`): no memory is used again while another stream still
reads it, nothing is read before it was written, and no step makes the host wait.

Every mend has a case that fails when it is taken out again.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch

from smp_core.comm.background import Background
from tests.core.streamed_cases import WITHOUT, Case
from tests.harness import run_script

HEADS_SHARED = {
    "shard_degree": 1,
    "tensor_parallel_degree": 4,
    "tensor_parallel": {"across_nodes": True},
}
OFFLOADED = {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}
CLEAN = {
    "whole parameters, states over the world": Case(
        {"shard_degree": 1, "optimizer_shard": "world"}
    ),
    "float16 with loss scaling": Case(
        {"shard_degree": 2, "param_dtype": "float16"}, scales=True
    ),
    "8 bits both ways": Case(
        {
            "shard_degree": 4,
            "compression": {
                "gather": "int8",
                "gather_after_steps": 0,
                "reduce": "int8",
            },
        }
    ),
    "a unit gathered ahead and not used": Case(
        {"shard_degree": 2, "collectives": {"forward_prefetch": 2}}, skips=True
    ),
    "inputs on the host, one ahead": Case(
        {"shard_degree": 2, "activations": {**OFFLOADED, "loading_horizon": 2}}
    ),
    "states on the host": Case(
        {"shard_degree": 2, "state_offload": "optimizer"}, dtype="bfloat16"
    ),
    "saves": Case({"shard_degree": 2}, saves=True),
    "a frozen base as codes": Case(
        {"shard_degree": 4, "frozen_storage": "int8"}, saves=True
    ),
    "FP8 experts": Case(
        {"shard_degree": 2, "fp8": True}, model="mixture", micro_batches=1
    ),
    "shared sequences": Case(
        {"shard_degree": 2, "context_parallel_degree": 2},
        model="sentences",
        micro_batches=1,
    ),
    "heads that ranks share": Case(HEADS_SHARED, model="llama", micro_batches=1),
    "fused experts over two ranks": Case(
        {"shard_degree": 2, "tensor_parallel_degree": 2},
        model="mixtral",
        micro_batches=1,
    ),
    "recomputed and compared": Case(
        {"shard_degree": 2, "activations": {"checkpoint": "full", "check": True}},
        micro_batches=1,
    ),
}
# Played by the slow test.
MORE = {
    "FP8": Case({"shard_degree": 2, "fp8": {"fp8_all_gather": True}}),
    "nodes, non-finite steps skipped": Case(
        {"shard_degree": 2, "on_nonfinite_grad_norm": "skip"}
    ),
    "nodes, states over the world": Case(
        {"shard_degree": 2, "param_dtype": "bfloat16", "optimizer_shard": "world"},
        micro_batches=3,
    ),
    "a secondary shard": Case({"shard_degree": 4, "reshard_after_forward": 2}),
    "once a step": Case({"shard_degree": 4, "keep_between_micro_batches": "gradients"}),
    "layers over two ranks": Case(
        {
            "shard_degree": 2,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"plan": {"blocks.*.0": "column", "blocks.*.2": "row"}},
        }
    ),
    "fused projections over two ranks": Case(
        {"shard_degree": 2, "tensor_parallel_degree": 2}, model="gpt2", micro_batches=1
    ),
    "two stages": Case({"shard_degree": 4}),
    "nodes, a bfloat16 model": Case(
        {"shard_degree": 2}, dtype="bfloat16", micro_batches=3
    ),
    "an evaluation in between": Case(
        {"shard_degree": 2, "collectives": {"forward_prefetch": 2}}, evaluates=True
    ),
    "nodes": Case({"shard_degree": 2}),
    "nodes, thawing": Case({"shard_degree": 2}, micro_batches=3, thaws=True),
    "nodes, bfloat16 reductions": Case(
        {"shard_degree": 2, "reduce_dtype": "bfloat16"}, micro_batches=3
    ),
    "bfloat16 between replicas": Case({"shard_degree": 2, "compression": "bf16"}),
    "4 bits, with feedback, states over the world": Case(
        {
            "shard_degree": 2,
            "compression": {"reduce": "int4", "error_feedback": True},
            "optimizer_shard": "world",
        }
    ),
    "inputs on the host, none ahead": Case(
        {"shard_degree": 2, "activations": {**OFFLOADED, "loading_horizon": 1}}
    ),
}
# Knobs that move memory, for cases of two of them; "dtype" is the model's.
FEATURES: dict[str, dict[str, Any]] = {
    "a bfloat16 model": {"dtype": "bfloat16"},
    "bfloat16 parameters": {"param_dtype": "bfloat16"},
    "states over the world": {"optimizer_shard": "world"},
    "bfloat16 between replicas": {"compression": {"reduce": "bf16"}},
    "8-bit sums": {"compression": {"reduce": "int8"}},
    "4-bit sums with feedback": {
        "compression": {"reduce": "int4", "error_feedback": True}
    },
    "8-bit gathers": {"compression": {"gather": "int8"}},
    "FP8 payloads in nodes too": {
        "compression": {"gather": "fp8", "gather_inside_nodes": True}
    },
    "kept until backward": {"reshard_after_forward": False},
    "once a step": {"keep_between_micro_batches": "gradients"},
    "a secondary shard": {"reshard_after_forward": 2},
    "gathered ahead": {"collectives": {"forward_prefetch": 2, "backward_prefetch": 2}},
    "inputs on the host": {"activations": {**OFFLOADED, "loading_horizon": 2}},
    "FP8": {"fp8": {"fp8_all_gather": True}},
    "states on the host": {"state_offload": "optimizer"},
    "non-finite steps skipped": {"on_nonfinite_grad_norm": "skip"},
}
# Refused when the model is known.
UNFIT = {(feature, "FP8") for feature in ("8-bit gathers", "FP8 payloads in nodes too")}


def together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Both features' knobs; None where they say two things about one of them, or about
    one field of it."""
    merged = {**one, **other}
    for knob in one.keys() & other.keys():
        if not isinstance(one[knob], dict) or one[knob].keys() & other[knob].keys():
            return None
        merged[knob] = {**one[knob], **other[knob]}
    return merged


def pairs() -> dict[str, Case]:
    """All two features that fit together and are not the same knob, by turns with
    groups of two and of four ranks, with one and three micro-batches."""
    found: dict[str, Case] = {}
    for number, names in enumerate(itertools.combinations(FEATURES, 2)):
        both = together(*(FEATURES[name] for name in names))
        if both is None or names in UNFIT:
            continue
        # They cross nodes.
        wide = number % 2 == 1 or not {"a secondary shard", "8-bit gathers"}.isdisjoint(
            names
        )
        knobs: dict[str, Any] = {"shard_degree": 4 if wide else 2, **both}
        dtype = knobs.pop("dtype", "float32")
        found[" + ".join(names)] = Case(
            knobs, dtype=dtype, micro_batches=1 + number // 2 % 2 * 2
        )
    return found


# Where a step makes the host wait, and how often.
ASKS = {
    "nodes, non-finite steps skipped": {"settle_nonfinite": 1.0},
    # Torch's scaler: whether the optimizer steps.
    "float16 with loss scaling": {"<genexpr>": 1.0},
    "8 bits both ways": {"_look": 1.0},
    "FP8": {"vetoed": 1.0, "step": 1.0},
    "states on the host": {"step": 1.0},
    "saves": {"copy_to_hosts": 1.0},
    "a frozen base as codes": {"copy_to_hosts": 1.0},
    # Each layer: its experts' rows.
    "FP8 experts": {"vetoed": 1.0, "step": 1.0, "forward": 3.0},
    # Each micro-batch: its padding, and its documents.
    "shared sequences": {"_refuse_holes": 1.0, "_plan": 1.0},
    "recomputed and compared": {"look": 3.0},  # each block
    # Transformers: whether sequences are packed.
    "fused experts over two ranks": {"forward": 1.0},
    # Whether another replica used what this rank did not.
    "a unit gathered ahead and not used": {"sums": 1.0},
}
LAUNCHED, TOLD, UNASKED, WAITED, HELD, SAVED, PINNED, INDICES = WITHOUT
BROKEN = {
    "gradients of whole parameters are given up": Case(
        {"shard_degree": 1, "optimizer_shard": "world"}, without=LAUNCHED
    ),
    "what FSDP2 reduced is given up": Case({"shard_degree": 2}, without=TOLD),
    "what FSDP2 reduced is given up, cast": Case(
        {"shard_degree": 2}, dtype="bfloat16", micro_batches=3, without=TOLD
    ),
    "a gather that nobody used is given up": Case(
        {"shard_degree": 2, "collectives": {"forward_prefetch": 2}},
        evaluates=True,
        without=WAITED,
    ),
    "an input that never left is given up": Case(
        {"shard_degree": 2, "activations": {**OFFLOADED, "loading_horizon": 1}},
        without=HELD,
    ),
    "a sum that became wider is given up": Case(
        {"shard_degree": 2}, micro_batches=3, thaws=True, without=TOLD
    ),
}
UNORDERED = {
    "a save does not wait for its copies": Case(
        {"shard_degree": 2}, saves=True, without=SAVED
    )
}
ASKING = {
    "terms that are not finite go exactly": Case(
        {"shard_degree": 4, "compression": {"reduce": "int8"}}, without=UNASKED
    ),
    "flags from memory that is not pinned": Case({"shard_degree": 2}, without=PINNED),
    "rows named anew in each call": Case(
        HEADS_SHARED, model="llama", micro_batches=1, without=INDICES
    ),
}
# By feature, where two are taken together.
ASKS_OF_FEATURES = {
    "8-bit gathers": {"_look": 1.0},
    "FP8 payloads in nodes too": {"_look": 1.0},
    "FP8": {"vetoed": 1.0, "step": 1.0},
    "states on the host": {"step": 1.0},
    "non-finite steps skipped": {"settle_nonfinite": 1.0},
}


def played(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    done = run_script(
        [
            "-m",
            "tests.core.streamed_cases",
            json.dumps([asdict(case) for case in cases.values()]),
        ],
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of all cases, by their names: two steps, the slow test makes three."""
    cases = CLEAN | BROKEN | UNORDERED | ASKING
    return played({name: replace(case, steps=2) for name, case in cases.items()})


def waits(result: dict[str, Any]) -> dict[str, float]:
    """Function -> how often a step made the host wait in it."""
    asked: dict[str, float] = {}
    for line, count in result["asked"].items():
        function = line.split(" at ")[1].split(":")[1]
        if function != "write_items":  # reads the mesh, which the host has
            asked[function] = asked.get(function, 0.0) + count
    return asked


def wrong(result: dict[str, Any]) -> dict[str, int]:
    """What was found, without a cast of FSDP2's: it reads a sum that may already be on
    its way, for a ``.grad`` that the window drops when the pass ends."""
    dropped = "aten._to_copy.default [_fsdp_common.py:_to_dtype_if_needed"
    return {
        text: count
        for text, count in result["found"].items()
        if not text.startswith(dropped)
    }


@pytest.mark.parametrize("name", CLEAN)
def test_no_memory_is_used_before_other_streams_are_done_with_it(
    name: str, results: dict[str, Any]
) -> None:
    assert wrong(results[name]) == {}


@pytest.mark.parametrize("name", CLEAN)
def test_no_step_makes_the_host_wait_where_no_knob_asks_for_it(
    name: str, results: dict[str, Any]
) -> None:
    assert waits(results[name]) == ASKS.get(name, {}), results[name]["asked"]


@pytest.mark.parametrize("name", ASKING)
def test_a_question_to_the_device_is_counted(
    name: str, results: dict[str, Any]
) -> None:
    assert results[name]["asked"] != {}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mend_that_is_taken_out_is_missed(name: str, results: dict[str, Any]) -> None:
    assert any("is used again" in text for text in results[name]["found"]), results[
        name
    ]


@pytest.mark.parametrize("name", UNORDERED)
def test_work_that_does_not_wait_is_found(name: str, results: dict[str, Any]) -> None:
    assert any(
        "on host does not wait for aten.copy_" in text
        for text in results[name]["found"]
    ), results[name]


def test_every_mend_has_a_case_that_misses_it() -> None:
    assert {case.without for case in (BROKEN | UNORDERED | ASKING).values()} == set(
        WITHOUT
    )


def test_sums_between_replicas_go_before_what_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their stream has the priority of FSDP2's own: the small kernels of a sum do not
    queue behind a backward pass."""
    device = mock.MagicMock()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    Background(torch.device("cuda")).submit(lambda: None)
    device.Stream.assert_called_once_with(torch.device("cuda"), priority=-1)


@pytest.mark.slow
def test_two_features_together_are_as_right_as_each() -> None:
    cases = pairs()
    assert len(cases) >= 90
    results = played(cases | MORE)
    for name in MORE:
        assert wrong(results[name]) == {} and waits(results[name]) == ASKS.get(
            name, {}
        ), name
    for name in cases:
        result = results[name]
        expected: dict[str, float] = {}
        for feature in name.split(" + "):
            for function, count in ASKS_OF_FEATURES.get(feature, {}).items():
                expected[function] = expected.get(function, 0.0) + count
        assert wrong(result) == {}, name
        assert waits(result) == expected, (name, result["asked"])
