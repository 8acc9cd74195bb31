"""Rows of `published_2.csv`, and the seeds' ratios, as cases for the fit of the
planner's constants.

IBM's fms-fsdp (FSDP over slow links) and nanotron (ten layouts of one model and one
batch) are published steps. What SageMaker's sharded data parallelism measured on p4d
(AWS Machine Learning Blog, 2022-10-31) is a ratio: how much faster a model trains with
partition groups than with all devices in one group, by DeepSpeed's ZeRO-3 or PyTorch's
FSDP.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from planner_fit import (
    EMPTYING,
    Case,
    Constants,
    Row,
    fitted_of,
    refilled,
    remembered,
)

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan import communicators
from smp_core.plan.plan import Plan
from smp_core.plan.shapes import GIB
from smp_core.planner.devices import DEVICES
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Curve, ModelTrace
from smp_core.planner.stage_part import StagePart, states_of
from smp_core.planner.stage_time import step_model
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.trace import trace_model

Predict = Callable[[Constants], float]

ODD_HEAD = 5.0
"""How many times as long a product takes if a size of it is odd, so that Hopper's
tensor cores cannot read it: 3.53 where four divides the size (m87-labs/kestrel#143),
and up to twice that where kernels load single elements; the geometric mean. So is
nanotron's vocabulary on each tensor rank."""

THEIR_CUT = {2: (14, 10), 4: (7, 7, 6, 4), 8: (4, 3, 3, 4, 3, 3, 3, 1)}
"""Blocks of nanotron's stages (its models/base.py, build_model: the block with which
costs pass a stage's share is its last; a head costs as much as 2.45 blocks). Of eight
stages the last has the head alone, which plans do not allow: one block is there, too.
"""

IN_NODES = "IBM 7B"
"""IBM's rows that are sharded inside nodes (README.md of fms-fsdp: HSDP); their table
has them over all devices."""


def read(path: Path) -> list[Row]:
    """Read a table with a header."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def traced(words: str) -> ModelTrace:
    """Trace a model that is given by its fields as JSON."""
    fields = json.loads(words)
    print(f"tracing {words}", flush=True)
    return trace_model("a published model", 8192, fields)


def stepped(
    plan: Plan,
    trace: ModelTrace,
    hardware: Hardware,
    sequence: int,
    counts: tuple[int, int],
    tensor: float = 1.0,
    again: float = 0.0,
) -> Predict:
    """Return the function that predicts the seconds of a plan's step from constants.

    Args:
        tensor: how many times as many collectives of tensor ranks the program has.
        again: GiB of a step that its allocator frees and takes again.
    """

    def predict(constants: Constants) -> float:
        fitted = fitted_of(constants, hardware.device.name)
        model = step_model(plan, trace, replace(hardware, fitted=fitted), sequence)
        step = model.step(*counts)
        return step.total + (tensor - 1) * step.tensor

    seconds = remembered(predict, hardware)
    return lambda constants: seconds(constants) + again * constants.get(EMPTYING, 0.0)


def of_their_kernels(
    trace: ModelTrace, attention: float = 1.0, head: float = 1.0
) -> ModelTrace:
    """Return the trace of a program whose attention, or whose head's products, take so
    many times as long as ours."""
    slower = {"attention": (trace.block, attention), "products": (trace.rest, head)}
    found: dict[str, dict[str, Curve]] = {}
    for what, (curves, factor) in slower.items():
        names = [f"{way}_{what}" for way in ("forward", "backward")]
        found[what] = {}
        for mode, curve in curves.items():
            figures = []
            for each in (curve.one, curve.two, curve.half):
                longer = {name: factor * getattr(each, name) for name in names}
                figures.append(replace(each, **longer))
            found[what][mode] = Curve(curve.tokens, *figures)
    return replace(trace, block=found["attention"], rest=found["products"])


def _as_run(row: Row) -> str:
    """Return the model of a row: nanotron's head is the embedding (bench_cluster's
    template/base_config.py), other than the table says."""
    fields = json.loads(row["model"])
    if row["program"] == "nanotron":
        fields["tie_word_embeddings"] = True
    return json.dumps(fields)


def published(
    path: Path,
    program: str,
    change: Callable[[ModelTrace], ModelTrace] = lambda trace: trace,
) -> list[Case]:
    """Read the rows of one program; gradients are reduced in bfloat16 by IBM's, and in
    float32 by nanotron.

    Args:
        change: of each model's trace.
    """
    cases = []
    for row in read(path):
        if row["program"] != program:
            continue
        trace, hardware = change(traced(_as_run(row))), _machines(row)
        if program == "nanotron":
            trace = of_their_kernels(trace, head=ODD_HEAD)
        asked = _asked(row)
        traced_so = trace.of_precision(row["recompute"], row["precision"])
        plan = decide(traced_so, asked, hardware.cluster())
        counts, tokens = _counts(row), int(row["seq"])
        planned, again = _planned_bytes(row, plan, trace), 0.0
        if program == "nanotron":
            # What its sums read is marked; what it gathered is kept anyway.
            read_by_sums = 2 * trace.block["full"].at(counts[0], tokens).kept
            held = read_by_sums * StagePart.of(plan, trace).blocks
            groups = len(communicators(plan))
            one = refilled(held, planned, groups, hardware.device)
            # Forward and backward; nothing is computed again.
            again = 2 * counts[1] * one if plan.layout.tensor > 1 else 0.0
        predict = stepped(plan, trace, hardware, tokens, counts, again=again)
        case = Case(row, row["id"].split()[1], float(row["step_s"]), predict)
        if row["memory_gib"]:
            case.used = planned / GIB / float(row["memory_gib"]) - 1
        cases.append(case)
    return cases


def _machines(row: Row) -> Hardware:
    nodes, ranks = int(row["nodes"]), int(row["gpus_per_node"])
    return Hardware(nodes, ranks, DEVICES[row["device"]], float(row["gbit"]))


def _counts(row: Row) -> tuple[int, int]:
    """Return samples of a micro-batch, and micro-batches."""
    return int(row["micro_batch"]), int(row["micro_batches"])


def _asked(row: Row) -> SmpConfig:
    """Return a row's configuration."""
    knobs: dict[str, Any] = json.loads(row["knobs"] or "{}")
    stages = int(row["pipeline"])
    if stages > 1:
        knobs["pipeline"] = {
            "schedule": row["schedule"],
            "microbatches": int(row["micro_batches"]),
            "split": THEIR_CUT[stages],
        }
    is_in_nodes = row["id"].startswith(IN_NODES)
    return SmpConfig(
        shard_degree=int(row["gpus_per_node" if is_in_nodes else "shard"]),
        tensor_parallel_degree=int(row["tensor"]),
        pipeline_parallel_degree=stages,
        param_dtype="bfloat16",
        reduce_dtype="bfloat16" if row["program"] == "fms-fsdp" else "float32",
        activations=row["recompute"],
        **knobs,
    )


def _planned_bytes(row: Row, plan: Plan, trace: ModelTrace) -> float:
    """Return the planned peak of rank 0, which was noted and is of the first stage.
    What nanotron does otherwise than our plan of it is added."""
    counts, tokens, first = _counts(row), int(row["seq"]), states_of(plan)[:1]
    peak = peak_memory(plan, trace, *counts, tokens, states=first, in_stages=counts[1])
    part, tensor = StagePart.of(plan, trace), plan.layout.tensor
    kept, inputs = (
        trace.block[mode].at(counts[0], tokens).kept for mode in ("none", "full")
    )
    ours = kept / tensor + 2 * inputs * (1 - 1 / tensor)
    blocks = part.kept(plan, counts[1])
    planned = peak.total - peak.margin + blocks * (kept_there(row) - ours)
    if plan.layout.replicate == 1:
        # Parameters in bfloat16 stay beside their masters (its gradient_accumulator.py).
        planned += 2 * part.elements - peak.gathered
    return planned


def kept_there(row: Row) -> float:
    """Return the bytes that a block of nanotron keeps for backward, by its
    models/llama.py (branch bench_cluster, 2024-07) and flash-attn 2.5.9.

    The inputs of two products are gathered whole. Of all else a tensor rank has its
    part: what two norms in Triton read; queries, keys and values, all three of them,
    since queries are rotated in their place; a copy of keys and values; what attention
    puts out, and of several samples a transposed copy of it; gate and up, and what SiLU
    and their product put out.
    """
    fields, samples = json.loads(row["model"]), int(row["micro_batch"])
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    split = (2 + 3 + 2 + 1 + (samples > 1)) * width + 4 * inner
    elements = 2 * width + split / int(row["tensor"])
    return 2.0 * elements * samples * int(row["seq"])


@dataclass(frozen=True)
class Ratio:
    """A measured gain of partition groups over one group of all devices.

    Attributes:
        group: devices of a partition group.
        rates: samples per second with groups, and with all devices in one group.
        samples: of a micro-batch. Published for sequences of 2,048 tokens; for 512 as
            many tokens are assumed.
    """

    name: str
    model: str
    nodes: int
    sequence: int
    samples: int
    group: int
    rates: tuple[float, float]


_TEN = json.dumps(
    {
        "model_type": "gpt2",
        "n_embd": 4096,
        "n_layer": 48,
        "n_head": 32,
        "vocab_size": 50257,
    }
)
_THIRTY = json.dumps(
    {
        "model_type": "gpt2",
        "n_embd": 7168,
        "n_layer": 48,
        "n_head": 56,
        "vocab_size": 50257,
    }
)

RATIOS = (
    Ratio(
        "30B on 16 p4d, groups of 64 against ZeRO-3",
        _THIRTY,
        16,
        512,
        24,
        64,
        (181.05, 142.0),
    ),
    Ratio(
        "30B on 32 p4d, groups of 64 against ZeRO-3",
        _THIRTY,
        32,
        2048,
        6,
        64,
        (73.52, 52.6),
    ),
    Ratio(
        "10B on 16 p4d, groups of 16 against FSDP",
        _TEN,
        16,
        512,
        32,
        16,
        (564.0, 495.0),
    ),
)


def _of_group(ratio: Ratio, group: int) -> Predict:
    hardware = Hardware.parse(f"{ratio.nodes}xp4d")
    words = json.loads(ratio.model)
    trace = traced(
        json.dumps(
            {**words, **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)}
        )
    )
    asked = SmpConfig(
        shard_degree=group,
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        activations="full",
        # ZeRO-3 and FSDP gather in one ring.
        collectives={"hierarchical": group < hardware.devices},
    )
    plan = decide(trace.of_precision("full", "mixed"), asked, hardware.cluster())
    return stepped(plan, trace, hardware, ratio.sequence, (ratio.samples, 1))


def ratios() -> list[Case]:
    """Return the seeds' ratios; their predictions are ratios, too."""
    cases = []
    for ratio in RATIOS:
        grouped, whole = (
            _of_group(ratio, ratio.group),
            _of_group(ratio, ratio.nodes * 8),
        )
        measured = ratio.rates[0] / ratio.rates[1]
        cases.append(
            Case(
                {"name": ratio.name},
                ratio.name,
                measured,
                lambda c, a=grouped, b=whole: b(c) / a(c),
            )
        )
    return cases
