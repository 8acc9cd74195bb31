"""Fits the constants of the planner's time model on published runs, and says how far it
is off rows held out.

    python benchmarks/planner.py --data FOLDER [--out benchmarks/results/planner.json]

FOLDER holds four tables of other people's measurements: `llm_foundry_fsdp.csv`
(MosaicML llm-foundry, Apache-2.0: MPT under FSDP), `kempner_h200.csv` (KempnerForge:
Llama under FSDP2 and tensor parallelism), `vtrain_a100.csv` (vTrain, MIT: GPT under
Megatron) and `published_2.csv` (IBM's FSDP over slow links, nanotron's ten layouts).
Models are traced, never tabulated: Transformers' GPT-2 and Llama of the same sizes, and
a layer with Megatron's kernels.

The planner's constants are one set for all programs, by generation of device
(`together`); each program is judged by constants that were fitted without it. Beside
them, constants are fitted for each of the three programs alone, held out one model size
at a time: their kernels are fused to different degrees (`moving` is over 1 where an
operator's bytes are not moved at all), and their links differ. No row is dropped;
`memory` is the planned peak as a share of the device (of HF's code, which keeps more
than the fused kernels that were measured).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan.shapes import GIB
from smp_core.planner.devices import DEVICES
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.trace import trace_model

sys.path.insert(0, str(Path(__file__).parent))
import kempner_model
import scaling_model
from planner_fit import EMPTYING, Case, Constants, Row, held_out, mape, without_each
from planner_megatron import START, megatron
from planner_rows import of_their_kernels, published, ratios, read, stepped, traced

TRITON_ATTENTION = 1.8
"""How many times as long llm-foundry's attention takes as FlashAttention-2: it is the
older one, in Triton (its benchmarking/submit_benchmarks.py; arXiv 2307.08691: 1.3 to
2.5 times as long, forward and backward, of which this is the geometric mean)."""

PAIR_LINK = 150e9
"""Bytes per second between two of a node's four GPUs: six of 18 NVLinks each, without a
switch (NVIDIA/nccl#1617)."""

TENSOR_COLLECTIVES = 20 / 12
"""KempnerForge's collectives of tensor ranks in a block by ours: queries, keys, values,
gate and up are gathered for one by one (its benchmarks/profiling: 9,679 gathers and
6,420 sums in 800 passes, 12 and 8 of a block; ours are six of each)."""

COMPILED = (4550, 9600, 2150, 4850, 820, 1830, 410, 890)
"""Tokens per second of a GPU in the rows of IBM's program when its model was compiled
(fms-fsdp's README.md since 2024-05-09; by its FLOPs all of 34B and 70B was still
computed again). No fit has seen them."""


def mpt(width: int, layers: int, heads: int, vocabulary: int) -> ModelTrace:
    """Return a GPT-2 as MPT is: without dropout, and with a GELU that is one kernel."""
    fields = {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
    }
    no_dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return traced(json.dumps({**fields, **no_dropout, "activation_function": "gelu"}))


def llama_fields(row: Row) -> Row:
    """Return the fields of a row's Llama as a Transformers configuration has them."""
    names = {
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn",
        "vocab_size": "vocab",
    }
    fields = {name: int(row[column]) for name, column in names.items()}
    return {"model_type": "llama", **fields, "tie_word_embeddings": False}


def compiled(trace: ModelTrace) -> ModelTrace:
    """Return the trace of a model that is compiled as a whole, with its loss."""
    block = {mode: curve.compiled() for mode, curve in trace.block.items()}
    rest = {mode: curve.compiled() for mode, curve in trace.rest.items()}
    return replace(trace, block=block, rest=rest)


@cache
def with_their_loss(words: str) -> ModelTrace:
    """Trace a Llama with KempnerForge's loss. Their tensor ranks hold all logits, and
    all of the embedding."""
    kempner_model.FIELDS.clear()
    kempner_model.FIELDS.update(json.loads(words))
    return replace(trace_model("kempner_model:build", 8192), vocabulary=1)


def foundry(path: Path) -> list[Case]:
    """Read the runs of FSDP over all devices; parameters and sums in bfloat16."""
    cases = []
    for row in read(path):
        hardware, sequence = foundry_hardware(row), int(row["sequence"])
        gpus, is_pure = hardware.devices, row["mp_mode"] == "PURE"
        trace = of_their_kernels(
            mpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), 50368),
            attention=TRITON_ATTENTION,
        )
        mode = "full" if row["checkpointing"] == "True" else "none"
        asked = SmpConfig(
            shard_degree=gpus,
            param_dtype=None if is_pure else "bfloat16",
            reduce_dtype="bfloat16",
            activations=mode,
        )
        traced_so = trace.of_precision(mode, "bfloat16" if is_pure else "mixed")
        plan = decide(traced_so, asked, hardware.cluster())
        counts = int(row["micro_batch"]), int(row["grad_accum"])
        tokens = int(row["global_batch"]) * sequence
        measured = tokens / (gpus * float(row["tokens_per_s_per_gpu"]))
        predict = stepped(plan, trace, hardware, sequence, counts)
        case = Case(row, row["model"], measured, predict)
        case.group = (
            f"{hardware.device.name}, {'several nodes' if gpus > 8 else 'one node'}"
        )
        case.kind = foundry_kind(row)
        used = peak_memory(plan, trace, *counts, sequence)
        case.used = used.total / used.capacity
        cases.append(case)
    return cases


def foundry_hardware(row: Row) -> Hardware:
    """Return the machines of a row, of eight GPUs each."""
    device = row["gpu"].replace("_", "-").replace("80gb", "80g")
    gpus, gbit = int(row["gpus"]), 3200 if "h100" in device else 1600
    return Hardware(max(gpus // 8, 1), min(gpus, 8), DEVICES[device], gbit)


def foundry_kind(row: Row) -> str:
    """Return the device and whether sequences are short or long; "": they are
    neither."""
    sequence = int(row["sequence"])
    length = "short" if sequence <= 2048 else "long" if sequence >= 32768 else ""
    return f"{row['gpu']}, {length} sequences" if length else ""


def kempner(path: Path, with_memory: bool = False) -> list[Case]:
    """Read the runs of FSDP2 with tensor parallelism, recomputing all; parameters and
    states in bfloat16, float32 gradients that are unsharded between micro-batches."""
    cases = []
    for row in read(path):
        gpus, tensor, shard = (int(row[name]) for name in ("gpus", "tensor", "shard"))
        hardware = kempner_hardware(gpus, tensor)
        trace = traced(json.dumps(llama_fields(row)))
        if row["compile"] == "true":
            trace = compiled(trace)
        kept: dict[str, Any] = {}
        if shard > 1:
            kept = {
                "keep_between_micro_batches": "gradients",
                "reshard_after_forward": True,
            }
        asked = SmpConfig(
            shard_degree=shard,
            tensor_parallel_degree=tensor,
            activations="full",
            # One GPU alone has no FSDP2 there: gradients are what autograd leaves.
            reduce_dtype="float32" if gpus > 1 else "bfloat16",
            **kept,
        )
        plan = decide(trace.of_precision("full", "bfloat16"), asked, hardware.cluster())
        counts = kempner_batch(row)
        case = Case(
            row,
            row["model"],
            float(row["step_s"]),
            stepped(
                plan, trace, hardware, int(row["sequence"]), counts, TENSOR_COLLECTIVES
            ),
        )
        if with_memory:
            case.used = _kempner_memory(row, asked, hardware, counts)
        case.group, case.kind = f"tensor={tensor}", kempner_kind(row)
        cases.append(case)
    return cases


def kempner_hardware(gpus: int, tensor: int) -> Hardware:
    """Return the machines of a row: a group uses the links between its own GPUs."""
    neighbours = max((tensor if tensor > 1 else min(gpus, 4)) - 1, 1)
    device = replace(DEVICES["h200"], link=neighbours * PAIR_LINK)
    return Hardware(max(gpus // 4, 1), min(gpus, 4), device, 1600)


def kempner_kind(row: Row) -> str:
    """Return whether layers are split over ranks."""
    return "tensor ranks" if int(row["tensor"]) > 1 else "no tensor ranks"


def kempner_batch(row: Row) -> tuple[int, int]:
    """Return samples of a micro-batch, and micro-batches. Their script
    (benchmarks/mfu_scaling/mfu_bench.sh) has half as many samples as their table for
    one GPU, and for two without tensor ranks."""
    samples, count = int(row["micro_batch"]), int(row["grad_accum"])
    if int(row["gpus"]) <= 2 and row["tensor"] == "1":
        return samples // 2, count * 2
    return samples, count


def _kempner_memory(
    row: Row, asked: SmpConfig, hardware: Hardware, counts: tuple[int, int]
) -> float:
    """Return how far the planned peak is off. What their program does otherwise is as
    in its sources: loss and loop (scripts/train.py), tensor ranks
    (distributed/tensor_parallel.py), and GB of 2^30 bytes (metrics/memory.py)."""
    trace = with_their_loss(json.dumps(llama_fields(row)))
    plan = decide(trace.of_precision("full", "bfloat16"), asked, hardware.cluster())
    peak = peak_memory(plan, trace, *counts, int(row["sequence"]))
    planned = float(peak.total - peak.margin)
    if int(row["gpus"]) == 1:
        # The model is compiled as a whole: its backward returns all gradients at once,
        # which are then added to those of earlier micro-batches. Beside both there are
        # parameters and two states, all in bfloat16.
        planned = max(planned, 5 * 2 * trace.parameters)
    # Each tensor rank has the whole embedding: parameters, gradients and two states in
    # bfloat16; gathered, and gradients in float32, where it is sharded.
    tensor, shard = int(row["tensor"]), int(row["shard"])
    others = int(row["vocab"]) * int(row["hidden"]) * (1 - 1 / tensor)
    embedding = others * (8 / shard + (6 if shard > 1 else 0))
    return (planned + embedding) / GIB / float(row["peak_gb"]) - 1


def start_of(devices: list[str]) -> Constants:
    """Return the constants that a fit starts with, in the order in which it changes
    them."""
    products = {f"products_{device}": 0.6 for device in devices}
    attention = {f"attention_{device}": 0.4 for device in devices}
    others = {
        "moving": FITTED.moving,
        "link": 0.6,
        "network": 0.6,
        "exposed": 0.1,
        "launching": 1e-3,
    }
    return {**products, **attention, **others}


TOGETHER: Constants = {
    "products_Ampere": 0.65,
    "products_Hopper": 0.6,
    "attention_Ampere": 0.6,
    "attention_Hopper": 0.35,
    "network": 0.6,
    "falls": 0.37,
    "launching": 1.5e-3,
    EMPTYING: 0.03,
}
"""Where the fit of one set of constants starts: attention with the shares that are
published of FlashAttention-2 (arXiv 2307.08691: 50 to 73 % of an A100's peak; arXiv
2407.08608: 35 % of an H100's). The others are stated in
:mod:`smp_core.planner.fitted`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder with the four tables"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(PARTS),
        help="of the result, the others stay as they are",
    )
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    if asked.only and asked.out and asked.out.exists():
        found = json.loads(asked.out.read_text(encoding="utf-8"))
    for name in asked.only or PARTS:
        found[name] = each = PARTS[name](asked.data)
        print(
            name,
            {
                key: value
                for key, value in each.items()
                if key != "rows" and not isinstance(value, list)
            },
        )
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kempner_memory(data: Path) -> dict[str, Any]:
    """Peaks as planned against those measured; nothing is fitted."""
    cases = kempner(data / "kempner_h200.csv", with_memory=True)
    errors = [case.used for case in cases if case.used is not None]
    rows = [{**case.row, "error": case.used} for case in cases]
    return {
        "mape": mape(errors),
        "worst": max(errors, key=abs),
        "errors": errors,
        "rows": rows,
    }


def together(data: Path) -> dict[str, Any]:
    """One set of constants, by generation of device, for all programs and the seeds'
    ratios."""
    second = data / "published_2.csv"
    programs = {
        "llm_foundry": foundry(data / "llm_foundry_fsdp.csv"),
        "vtrain": megatron(read(data / "vtrain_a100.csv")),
        "kempner": kempner(data / "kempner_h200.csv"),
        "fms_fsdp": published(second, "fms-fsdp"),
        "nanotron": published(second, "nanotron"),
        "seeds": ratios(),
    }
    found = without_each(programs, TOGETHER)
    found["ratios"] = [
        {
            "name": case.size,
            "measured": case.measured,
            "planned": case.predict(found["fitted_on_all"]),
        }
        for case in programs["seeds"]
    ]
    found["ibm_compiled"] = ibm_compiled(second, found["fitted_on_all"])
    return found


def ibm_compiled(path: Path, constants: Constants) -> dict[str, Any]:
    """IBM's later steps, of compiled models, which are in no fit."""
    errors = []
    cases = published(path, "fms-fsdp", compiled)
    for case, rate in zip(cases, COMPILED, strict=True):
        tokens = int(case.row["micro_batch"]) * int(case.row["seq"])
        errors.append(case.predict(constants) * rate / tokens - 1)
    return {"rows": len(errors), "mape": mape(errors), "errors": errors}


def lab(data: Path) -> dict[str, Any]:
    """Our emulated nodes, by their own model."""
    checked = scaling_model.check(Path(__file__).parent / "results" / "cluster.json")
    errors = [predicted / measured - 1 for _, _, measured, predicted in checked]
    return {"rows": len(errors), "mape": mape(errors), "worst": max(errors, key=abs)}


PARTS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "llm_foundry": lambda data: held_out(
        foundry(data / "llm_foundry_fsdp.csv"), start_of(["A100", "H100"])
    ),
    "vtrain": lambda data: held_out(megatron(read(data / "vtrain_a100.csv")), START),
    "kempner": lambda data: held_out(
        kempner(data / "kempner_h200.csv"), start_of(["H200"])
    ),
    "kempner_memory": kempner_memory,
    "together": together,
    "lab_by_scaling_model": lab,
}


if __name__ == "__main__":
    main()
