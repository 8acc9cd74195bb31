"""Compares the planner's memory and bytes with dry runs of the real sharded model.

    python benchmarks/planner_dry_run.py [--out benchmarks/results/planner_dry_run.json]
    [--cases gpt2-30b-full ...]

A case is a model, a cluster, a batch and knobs. Planned are bytes by kind at the peak
of a step (`peak_memory`, without its margin) and bytes that leave rank 0 by collective
and class of link (`sent_bytes`), both from the trace of a block. Counted is what
`parallelize_model` on rank 0 of a fake process group of that size allocates and sends
in a step (`smp_core.dry_run.step`). Off is planned / counted - 1; of kinds below 1 % of
the peak only the total is judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smp_core.config import SmpConfig
from smp_core.dry_run.split_trace import trace_model
from smp_core.engine.decide import decide
from smp_core.planner.dry_run import RUN_KINDS, Question, dry_run
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.step_memory import peak_memory

A100, H100 = "32x8:a100-40g@400gbps", "16x8:h100-80g@3200gbps"
BF16: Mapping[str, Any] = {"param_dtype": "bfloat16"}
OFFLOADED = {"checkpoint": "full", "offload": True}


@dataclass(frozen=True)
class Case:
    """A configuration: samples of a micro-batch, micro-batches of a step, and knobs."""

    model: str
    cluster: str
    tokens: int
    micro_batch: int
    count: int
    knobs: Mapping[str, Any]


CASES: Mapping[str, Case] = {
    "gpt2-30b, full": Case(
        "gpt2-30b",
        A100,
        2048,
        6,
        1,
        {**BF16, "shard_degree": 128, "activations": "full"},
    ),
    "gpt2-30b, selective, copy on the node": Case(
        "gpt2-30b",
        A100,
        2048,
        2,
        1,
        {
            **BF16,
            "shard_degree": 256,
            "activations": "selective",
            "reshard_after_forward": "node",
        },
    ),
    "gpt2-30b, offloaded": Case(
        "gpt2-30b",
        A100,
        2048,
        6,
        2,
        {**BF16, "shard_degree": 64, "activations": OFFLOADED},
    ),
    "gpt2-30b, optimizer over the world": Case(
        "gpt2-30b",
        A100,
        2048,
        4,
        2,
        {**BF16, "shard_degree": 32, "activations": "full", "optimizer_shard": "world"},
    ),
    "llama-3.1-8b, none": Case(
        "llama-3.1-8b", "1x8:h100-80g", 4096, 1, 1, {**BF16, "shard_degree": 8}
    ),
    "llama-3.1-8b, selective, window of gradients": Case(
        "llama-3.1-8b",
        "4x8:h100-80g@3200gbps",
        8192,
        1,
        4,
        {
            **BF16,
            "shard_degree": 8,
            "activations": "selective",
            "keep_between_micro_batches": "gradients",
        },
    ),
    "llama-3.1-8b, full, window of parameters": Case(
        "llama-3.1-8b",
        "4x8:h100-80g@3200gbps",
        8192,
        2,
        4,
        {
            **BF16,
            "shard_degree": 16,
            "activations": "full",
            "keep_between_micro_batches": "parameters",
        },
    ),
    "llama-3.1-8b, chunked loss": Case(
        "llama-3.1-8b",
        "1x8:h100-80g",
        16384,
        1,
        2,
        {
            **BF16,
            "shard_degree": 8,
            "activations": "full",
            "chunked_cross_entropy": 1024,
        },
    ),
    "llama-3-70b, full": Case(
        "llama-3-70b",
        H100,
        8192,
        1,
        2,
        {**BF16, "shard_degree": 64, "activations": "full"},
    ),
    "llama-3-70b, selective, optimizer over the world": Case(
        "llama-3-70b",
        H100,
        4096,
        1,
        1,
        {
            **BF16,
            "shard_degree": 32,
            "activations": "selective",
            "optimizer_shard": "world",
        },
    ),
    "llama-3.1-8b, tensor 2, none": Case(
        "llama-3.1-8b",
        "1x8:h100-80g",
        4096,
        1,
        2,
        {**BF16, "shard_degree": 4, "tensor_parallel_degree": 2},
    ),
    "llama-3.1-8b, context 8, full": Case(
        "llama-3.1-8b",
        "1x8:h100-80g",
        32768,
        1,
        2,
        {
            **BF16,
            "shard_degree": 8,
            "context_parallel_degree": 8,
            "activations": "full",
        },
    ),
    "llama-3-70b, context 4, tensor 8, selective": Case(
        "llama-3-70b",
        H100,
        32768,
        1,
        1,
        {
            **BF16,
            "shard_degree": 16,
            "context_parallel_degree": 4,
            "tensor_parallel_degree": 8,
            "activations": "selective",
        },
    ),
    "llama-3-70b, tensor 8, full": Case(
        "llama-3-70b",
        H100,
        8192,
        1,
        2,
        {
            **BF16,
            "shard_degree": 16,
            "tensor_parallel_degree": 8,
            "activations": "full",
        },
    ),
    "llama-3.1-8b, tensor 4, selective, whole tokens": Case(
        "llama-3.1-8b",
        "4x8:h100-80g@3200gbps",
        8192,
        1,
        2,
        {
            **BF16,
            "shard_degree": 8,
            "tensor_parallel_degree": 4,
            "tensor_parallel": {"sequence_parallel": False},
            "activations": "selective",
        },
    ),
}


@cache
def traced(model: str, tokens: int) -> ModelTrace:
    return trace_model(model, tokens)


def compared(case: Case) -> dict[str, Any]:
    """Return planned and counted bytes of a case, and how far they are off."""
    asked = SmpConfig(**case.knobs)
    hardware, trace = Hardware.parse(case.cluster), traced(case.model, case.tokens)
    mode = str(asked.activations.checkpoint)
    plan = decide(trace.of_precision(mode, "mixed"), asked, hardware.cluster())
    peak = peak_memory(plan, trace, case.micro_batch, case.count, case.tokens)
    planned = {kind: getattr(peak, kind) for kind in RUN_KINDS}
    sent = sent_bytes(plan, trace, case.micro_batch, case.count, case.tokens)
    (ran,) = dry_run(
        Question(
            case.model, hardware, case.knobs, case.tokens, case.micro_batch, case.count
        )
    )
    one_percent = ran.total / 100
    large = []
    for kind in RUN_KINDS:
        if max(planned[kind], ran.memory[kind]) > one_percent:
            large.append(kind)
    return {
        "cluster": case.cluster,
        "ranks": ran.ranks,
        "batch": [case.micro_batch, case.count, case.tokens],
        "knobs": dict(case.knobs),
        "planned": planned,
        "counted": dict(ran.memory),
        "off": {
            kind: planned[kind] / ran.memory[kind] - 1 if ran.memory[kind] else None
            for kind in large
        },
        "off_in_all": sum(planned.values()) / ran.total - 1,
        "planned_sent": sent,
        "counted_sent": dict(ran.sent),
        "sent_is_equal": {k: round(v) for k, v in sent.items()}
        == {k: round(v) for k, v in ran.sent.items()},
        "processor_seconds": round(ran.seconds, 1),
        "resident_mib": round(ran.resident / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument(
        "--cases", nargs="*", help="only those whose name begins so; others stay in OUT"
    )
    asked = parser.parse_args()
    keeps = asked.cases and asked.out and asked.out.exists()
    found = json.loads(asked.out.read_text(encoding="utf-8")) if keeps else {}
    for name, case in CASES.items():
        if asked.cases and not name.startswith(tuple(asked.cases)):
            continue
        found[name] = result = compared(case)
        off = {
            kind: None if each is None else round(each, 3)
            for kind, each in result["off"].items()
        }
        print(
            name,
            round(result["off_in_all"], 4),
            off,
            result["sent_is_equal"],
            flush=True,
        )
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
