"""Fits the constants of the planner's time model on published runs, and says how far it is off rows held out.

    python benchmarks/planner.py --data FOLDER [--out benchmarks/results/planner.json]

FOLDER holds three tables of other people's measurements: `llm_foundry_fsdp.csv` (MosaicML llm-foundry, Apache-2.0: MPT
under FSDP), `kempner_h200.csv` (KempnerForge: Llama under FSDP2 and tensor parallelism) and `vtrain_a100.csv` (vTrain,
MIT: GPT under Megatron). Models are traced (Transformers' GPT-2 and Llama of the same sizes), never tabulated.

Constants are fitted for each of the three programs: their kernels are fused to different degrees (`moving` is over 1
where an operator's bytes are not moved at all), and their links differ. Held out is one model size at a time: constants
are fitted on the other sizes and judged on that one. No row is dropped; `memory` is the planned peak as a share of the
device (of HF's code, which keeps more than the fused kernels that were measured).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from smp_core.config import SmpConfig
from smp_core.planning.decide import Plan, decide
from smp_core.planning.devices import DEVICES
from smp_core.planning.fitted import FITTED, Fitted
from smp_core.planning.hardware import Hardware
from smp_core.planning.model_trace import ModelTrace
from smp_core.planning.step_memory import peak_memory
from smp_core.planning.time import StepModel, computing_seconds
from smp_core.planning.trace import trace_model

sys.path.insert(0, str(Path(__file__).parent))
import kempner_model
import scaling_model

Row = dict[str, Any]
Constants = dict[str, float]


@cache
def traced(words: str) -> ModelTrace:
    """Trace a model that is given by its fields as JSON."""
    fields = json.loads(words)
    print(f"tracing {words}", flush=True)
    return trace_model("a published model", 8192, fields)


def mpt(width: int, layers: int, heads: int, vocabulary: int) -> ModelTrace:
    """Return a GPT-2 without dropout, for MPT and Megatron's GPT: learned positions, GELU, four times the width."""
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    fields = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary}
    return traced(json.dumps({**fields, **none}))


def llama_fields(row: Row) -> Row:
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


@cache
def with_their_loss(words: str) -> ModelTrace:
    """Trace a Llama with KempnerForge's loss. Their tensor ranks hold all logits, and all of the embedding."""
    kempner_model.FIELDS.clear()
    kempner_model.FIELDS.update(json.loads(words))
    return replace(trace_model("kempner_model:build", 8192), vocabulary=1)


@dataclass
class Case:
    """A published row: what it measured, and the time that constants predict."""

    row: Row
    size: str
    measured: float
    predict: Callable[[Constants], float]
    group: str = ""
    used: float | None = None

    @property
    def work(self) -> tuple[str, ...]:
        """Return what a step did and on how many devices."""
        return tuple(self.row.get(name, "") for name in ("gpu", "gpus", "global_batch", "sequence"))


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fitted_of(constants: Mapping[str, float], device: str) -> Fitted:
    """Return the constants of one device as the planner has them."""
    shares = {name: constants[f"{name}_{device}"] for name in ("products", "attention")}
    others = {name: constants[name] for name in ("moving", "link", "network", "exposed", "launching")}
    return replace(FITTED, products={"": shares["products"]}, attention={"": shares["attention"]}, **others)


def _stepped(
    plan: Plan, trace: ModelTrace, hardware: Hardware, row: Row, counts: tuple[int, int], device: str
) -> Callable[[Constants], float]:
    def predict(constants: Constants) -> float:
        fitted = fitted_of(constants, device)
        model = StepModel(plan, trace, hardware, hardware.links(fitted), int(row["sequence"]), fitted)
        return model.step(*counts).total

    return predict


def foundry(path: Path) -> list[Case]:
    """Read the runs of FSDP over all devices; parameters and sums in bfloat16."""
    cases = []
    for row in read(path):
        device = row["gpu"].replace("_", "-").replace("80gb", "80g")
        gpus, sequence = int(row["gpus"]), int(row["sequence"])
        hardware = Hardware(max(gpus // 8, 1), min(gpus, 8), DEVICES[device], 3200 if "h100" in device else 1600)
        trace = mpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), 50368)
        mode = "full" if row["checkpointing"] == "True" else "none"
        pure = row["mp_mode"] == "PURE"
        asked = SmpConfig(
            shard_degree=gpus, param_dtype=None if pure else "bfloat16", reduce_dtype="bfloat16", activations=mode
        )
        plan = decide(trace.of_precision(mode, "bfloat16" if pure else "mixed"), asked, hardware.cluster())
        counts = int(row["micro_batch"]), int(row["grad_accum"])
        measured = int(row["global_batch"]) * sequence / (gpus * float(row["tokens_per_s_per_gpu"]))
        used = peak_memory(plan, trace, *counts, sequence)
        predict = _stepped(plan, trace, hardware, row, counts, hardware.device.name)
        group = f"{hardware.device.name}, {'several nodes' if gpus > 8 else 'one node'}"
        cases.append(Case(row, row["model"], measured, predict, group, used.total / used.capacity))
    return cases


def kempner(path: Path, with_memory: bool = False) -> list[Case]:
    """Read the runs of FSDP2 with tensor parallelism, recomputing all; parameters and states in bfloat16, float32
    gradients that are unsharded between micro-batches."""
    cases = []
    for row in read(path):
        gpus, tensor, shard = (int(row[name]) for name in ("gpus", "tensor", "shard"))
        hardware = Hardware(max(gpus // 4, 1), min(gpus, 4), DEVICES["h200"], 1600)
        trace = traced(json.dumps(llama_fields(row)))
        kept: dict[str, Any] = {"keep_between_micro_batches": "gradients", "reshard_after_forward": True}
        asked = SmpConfig(
            shard_degree=shard,
            tensor_parallel_degree=tensor,
            activations="full",
            # One GPU alone has no FSDP2 there: gradients are what autograd leaves.
            reduce_dtype="float32" if gpus > 1 else "bfloat16",
            **(kept if shard > 1 else {}),
        )
        plan = decide(trace.of_precision("full", "bfloat16"), asked, hardware.cluster())
        counts = int(row["micro_batch"]), int(row["grad_accum"])
        case = Case(row, row["model"], float(row["step_s"]), _stepped(plan, trace, hardware, row, counts, "H200"))
        if with_memory:
            case.used = _kempner_memory(row, asked, hardware, counts)
        case.group = f"tensor={tensor}"
        cases.append(case)
    return cases


def _kempner_memory(row: Row, asked: SmpConfig, hardware: Hardware, counts: tuple[int, int]) -> float:
    """Return how far the planned peak is off. Their loss and their tensor ranks are as in their sources (training/loss,
    distributed/tensor_parallel, distributed/setup)."""
    trace = with_their_loss(json.dumps(llama_fields(row)))
    plan = decide(trace.of_precision("full", "bfloat16"), asked, hardware.cluster())
    peak = peak_memory(plan, trace, *counts, int(row["sequence"]))
    # Each tensor rank has the whole embedding: parameters, gradients and two states in bfloat16; gathered, and
    # gradients in float32, where it is sharded.
    tensor, shard = int(row["tensor"]), int(row["shard"])
    others = int(row["vocab"]) * int(row["hidden"]) * (1 - 1 / tensor)
    embedding = others * (8 / shard + (6 if shard > 1 else 0))
    return (peak.total - peak.margin + embedding) / 1e9 / float(row["peak_gb"]) - 1


def megatron(path: Path) -> list[Case]:
    cases = []
    for row in read(path):
        numbers = {name: float(value) for name, value in row.items()}
        trace = mpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), 51200)
        predict = _pipelined(numbers, trace)
        cases.append(Case(row, row["parameters_billion"] + "B", numbers["step_ms"] / 1e3, predict))
    return cases


def _pipelined(row: Mapping[str, float], trace: ModelTrace) -> Callable[[Constants], float]:
    """Predict a step of 1F1B: the slowest stage (the last, which has the head) sets the pace, all stages fill and drain
    once. Sums of gradients and of tensor ranks are waited for."""
    hardware = Hardware(int(row["gpus"]) // 8, 8, DEVICES["a100-80g"], 1600)
    tensor, data, stages = (int(row[name]) for name in ("tensor", "data", "pipeline"))
    micro_batch, sequence = int(row["micro_batch"]), int(row["sequence"])
    count = row["global_batch"] / data / micro_batch
    block = trace.block["full"].at(micro_batch, sequence)
    rest = trace.rest["none"].at(micro_batch, sequence)
    inputs = block.kept

    def predict(constants: Constants) -> float:
        fitted = fitted_of(constants, "A100")
        links = hardware.links(fitted)
        inside, between = links.intra, links.inter
        assert inside is not None and between is not None

        def seconds(figures: Any) -> float:
            total = 0.0
            for phase in ("forward", "backward"):
                parts = [getattr(figures, f"{phase}_{what}") / tensor for what in ("products", "attention", "moved")]
                total += max(computing_seconds(*parts, hardware.device, fitted), fitted.launching)
            return total

        of_block = seconds(block)
        if tensor > 1:
            # Two sums in forward, two in backward, two in what is computed again.
            inner = inside.seconds("all_reduce", min(tensor, 8), inputs)
            outer = between.seconds("all_reduce", tensor // 8, inputs / 8) if tensor > 8 else 0.0
            of_block += 6 * (inner + outer)
        layers = row["layers"] / stages
        sends = 2 * between.seconds("all_gather", 2, 2 * inputs / tensor) if stages > 1 else 0.0
        stage, last = layers * of_block + sends, layers * of_block + seconds(rest) + sends
        gradients = trace.parameters / tensor / stages * 4
        inside_data = max(8 // tensor, 1)
        summed = inside.seconds("all_reduce", min(inside_data, data), gradients) if inside_data > 1 else 0.0
        if data > inside_data:
            summed += between.seconds("all_reduce", data // inside_data, gradients / inside_data)
        updated = trace.parameters / tensor / stages * 28 / (hardware.device.hbm * fitted.moving)
        return (count - 1) * last + (stages - 1) * stage + last + summed + updated

    return predict


def off(cases: list[Case], constants: Constants) -> list[float]:
    return [case.predict(constants) / case.measured - 1 for case in cases]


def mape(errors: list[float]) -> float:
    return statistics.fmean(map(abs, errors)) if errors else math.nan


RANGES = {"launching": (1e-4, 3e-3), "moving": (0.01, 50.0)}


def fit(cases: list[Case], start: Constants) -> Constants:
    """Find the constants of the least mean |log(predicted / measured)|, one at a time with steps that become smaller.
    Deterministic."""

    def loss(constants: Constants) -> float:
        return statistics.fmean(abs(math.log(case.predict(constants) / case.measured)) for case in cases)

    best, least = dict(start), loss(start)
    factor = 1.5
    while factor > 1.03:
        improved = False
        for name in start:
            for times in (factor, 1 / factor):
                value = best[name] * times
                least_value, most_value = RANGES.get(name, (0.01, 1.0))
                if not least_value <= value <= most_value:
                    continue
                tried = {**best, name: value}
                if (found := loss(tried)) < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            factor = math.sqrt(factor)
    return best


def start_of(devices: list[str]) -> Constants:
    shares = {
        f"{name}_{device}": share for name, share in (("products", 0.6), ("attention", 0.4)) for device in devices
    }
    return {**shares, "moving": 2.0, "link": 0.6, "network": 0.6, "exposed": 0.1, "launching": 1e-3}


def held_out(cases: list[Case], start: Constants) -> dict[str, Any]:
    """Fit on all sizes but one and judge that one, for each; then fit on all."""
    judged: dict[str, Any] = {}
    errors: list[tuple[Case, float]] = []
    for size in sorted({case.size for case in cases}):
        print(f"held out: {size}", flush=True)
        rest = [case for case in cases if case.size != size]
        own = [case for case in cases if case.size == size]
        constants = fit(rest, start)
        found = off(own, constants)
        errors += list(zip(own, found, strict=True))
        judged[size] = {"rows": len(own), "mape": mape(found), "worst": max(found, key=abs), "constants": constants}
        if len({case.work for case in own}) == 1:  # rows to choose among: one model, one batch, one cluster
            judged[size]["top_1_regret"] = _regret(own, constants)
    groups = sorted({case.group for case, _ in errors if case.group})
    constants = fit(cases, start)
    by_group = {}
    for group in groups:
        by_group[group] = mape([error for case, error in errors if case.group == group])
    rows = []
    for case, error in errors:
        rows.append({**case.row, "measured_s": case.measured, "held_out_error": error, "memory": case.used})
    return {
        "held_out_by_size": judged,
        "held_out_mape": mape([error for _, error in errors]),
        "held_out_mape_by_group": by_group,
        "fitted_on_all": constants,
        "fitted_on_all_mape": mape(off(cases, constants)),
        "rows": rows,
    }


def _regret(cases: list[Case], constants: Constants) -> float:
    """Return how much slower the row that the model would pick is than the fastest."""
    picked = min(cases, key=lambda case: case.predict(constants))
    return picked.measured / min(case.measured for case in cases) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the three tables")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="of the result, the others stay as they are")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    if asked.only and asked.out and asked.out.exists():
        found = json.loads(asked.out.read_text(encoding="utf-8"))
    for name in asked.only or PARTS:
        found[name] = each = PARTS[name](asked.data)
        print(name, {key: value for key, value in each.items() if key != "rows" and not isinstance(value, list)})
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kempner_memory(data: Path) -> dict[str, Any]:
    """Peaks as planned against those measured; nothing is fitted."""
    cases = kempner(data / "kempner_h200.csv", with_memory=True)
    errors = [case.used for case in cases if case.used is not None]
    rows = [{**case.row, "error": case.used} for case in cases]
    return {"mape": mape(errors), "worst": max(errors, key=abs), "errors": errors, "rows": rows}


def lab(data: Path) -> dict[str, Any]:
    """Our emulated nodes, by their own model."""
    checked = scaling_model.check(Path(__file__).parent / "results" / "cluster.json")
    errors = [predicted / measured - 1 for _, _, measured, predicted in checked]
    return {"rows": len(errors), "mape": mape(errors), "worst": max(errors, key=abs)}


PARTS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "llm_foundry": lambda data: held_out(foundry(data / "llm_foundry_fsdp.csv"), start_of(["A100", "H100"])),
    "vtrain": lambda data: held_out(megatron(data / "vtrain_a100.csv"), start_of(["A100"])),
    "kempner": lambda data: held_out(kempner(data / "kempner_h200.csv"), start_of(["H200"])),
    "kempner_memory": kempner_memory,
    "lab_by_scaling_model": lab,
}


if __name__ == "__main__":
    main()
