"""Which of the lab's schemes the planner would pick, and how far its seconds are off
the measured ones.

    python benchmarks/planner_lab.py [--out benchmarks/results/planner_lab.json]

For each row of float32 of the emulated cluster (`benchmarks/cluster`, committed
results; nothing is run here) the planner's time model predicts a step of every exact
scheme of this project. It is given what a row says about its machines: the rate of the
link and 1 ms, the speed of messages and copies inside a node, and what a micro-batch
takes without communication. Nothing is fitted. Picked is the fastest; within 1 % the
simplest.

A pick is judged by its measured step against the fastest measured exact scheme of the
row, peers included, that needs no more memory by the planner's figures. A pick that the
row did not measure is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from smp_core.cluster.links import Collectives, LinkFit, Links
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan.optimizers import OPTIMIZERS
from smp_core.plan.plan import Plan
from smp_core.planner.candidate import changed_knobs, complexity_of
from smp_core.planner.devices import Device
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Curve, ModelTrace
from smp_core.planner.search import TIE
from smp_core.planner.stage_part import states_of
from smp_core.planner.stage_time import step_model
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.time import StepTime
from smp_core.planner.trace import trace_built

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
from lab_model import LENGTH, Model
from schemes import EXACT, OURS, PIPELINE

HERE = Path(__file__).resolve().parent
FILES = ("cluster", "cluster-tensor", "cluster-pipeline")
BYTES_PER_SECOND = {"200mbit": 25e6, "1gbit": 125e6}
LATENCY_INSIDE, LATENCY_BETWEEN = 50e-6, 1.2e-3  # the lab's delay is 1 ms
PEERS_AS: dict[str, dict[str, Any]] = {
    "ddp": {"shard_degree": 1},
    **{name: {"shard_degree": "world"} for name in ("fsdp", "fsdp-ring", "ds3")},
    **{name: {"shard_degree": "node"} for name in ("hsdp", "hsdp-two-hop", "mics")},
}
_FLOPS = 1e11  # of which each row's machine reaches a share

Row = dict[str, Any]


@cache
def traced() -> ModelTrace:
    """Trace the lab's model. What other operators than products move is left out: a
    row's time without communication has it."""
    found = trace_built(Model(), SmpConfig(), LENGTH + 1, None, "forward")
    none = {"forward_moved": 0.0, "backward_moved": 0.0}

    def without(curve: Curve) -> Curve:
        return Curve(
            curve.tokens,
            *(replace(each, **none) for each in (curve.one, curve.two, curve.half)),
        )

    block, rest = (
        {mode: without(curve) for mode, curve in each.items()}
        for each in (found.block, found.rest)
    )
    assert found.early is not None
    return replace(found, block=block, rest=rest, early=without(found.early))


def machines(row: Row) -> Hardware:
    """Return the row's machines: what its steps take without communication is the speed
    of computing, and copies of gathered and reduced tensors are part of collectives
    inside nodes."""
    nodes, k = map(int, row["layout"].split("x"))
    alone = row["schemes"]["alone"]
    inside, copying, rate = (
        alone["inside"],
        alone["copying"],
        BYTES_PER_SECOND[row["rate"]],
    )

    def within(copies: int) -> LinkFit:
        return LinkFit(
            LATENCY_INSIDE, 1 / (1 / inside + copies * k / (k - 1) / copying)
        )

    between = LinkFit(LATENCY_BETWEEN, rate / k)
    flat = LinkFit(LATENCY_BETWEEN, rate)
    links = Links(
        nodes,
        k,
        Collectives(k, within(1), within(2), within(3)),
        Collectives(nodes, between, between, between),
        Collectives(nodes * k, flat, flat, flat),
    )
    # SGD reads parameters and gradients, and writes parameters: 12 bytes where AdamW
    # moves 28.
    device = Device("lab", 16.0, copying * 28 / 12, inside, copying, "measured", _FLOPS)
    found = Hardware(nodes, k, device, rate * 8 / 1e9, measured=links)
    fitted = replace(
        FITTED,
        products={"": 1.0},
        attention={"": 1.0},
        moving=1.0,
        exposed=1.0,
        launching=0.0,
    )
    # A step without communication is computing, which is taken for products alone, and
    # the optimizer's.
    plain = {"shard_degree": nodes * k, "keep_between_micro_batches": "gradients"}
    found = replace(found, fitted=fitted)
    computed, stepped = (
        step_of(row, found, plain).compute,
        step_of(row, found, plain).optimizer * nodes * k,
    )
    share = computed / max(
        statistics.median(alone["seconds"]) - stepped, 0.1 * alone["seconds"][0]
    )
    return replace(
        found, fitted=replace(fitted, products={"": share}, attention={"": share})
    )


def knobs_of(scheme: str, row: Row) -> dict[str, Any]:
    knobs = dict(OURS[scheme]) if scheme in OURS else dict(PEERS_AS[scheme])
    if scheme.startswith(PIPELINE):
        stages = int(row["layout"].partition("x")[0])
        knobs |= {
            "pipeline_parallel_degree": stages,
            "pipeline": {"microbatches": row["micro"]},
        }
    return knobs


def decided(row: Row, hardware: Hardware, knobs: dict[str, Any]) -> tuple[Plan, int]:
    """Return the plan of a scheme, and the samples of its micro-batches: ranks that
    hold parts of one model read those of all of them."""
    plan = decide(
        traced().of_precision("none", "trainer"), SmpConfig(**knobs), hardware.cluster()
    )
    return plan, plan.layout.pipeline * plan.layout.tensor


def step_of(row: Row, hardware: Hardware, knobs: dict[str, Any]) -> StepTime:
    """Return the time of a step, by part.

    All ranks share the machine's cores, which compute, and copy what collectives inside
    nodes send. With stages, those of a stage that waits work for the others. All stages
    together compute and gather as long as at the same time, and what they wait for one
    another are messages between nodes.
    """
    plan, samples = decided(row, hardware, knobs)
    if plan.stages is None:
        return _step(row, hardware, plan, samples)
    plain = step_of(
        row,
        hardware,
        {"shard_degree": "world", "keep_between_micro_batches": "gradients"},
    )
    computing_at_once = replace(
        hardware.fitted, products={"": 1e9}, attention={"": 1e9}
    )
    at_once = replace(hardware, fitted=computing_at_once)
    links = hardware.links
    instant = LinkFit(0.0, 1e18)
    inside_at_once = replace(
        links, intra=Collectives(links.ranks_per_node, instant, instant, instant)
    )
    messages = _step(
        row, replace(at_once, measured=inside_at_once), plan, samples
    ).pipeline
    return replace(
        _step(row, at_once, plan, samples), compute=plain.compute, pipeline=messages
    )


def _step(row: Row, hardware: Hardware, plan: Plan, samples: int) -> StepTime:
    model = step_model(plan, traced(), hardware, LENGTH + 1)
    return model.step(samples, row["micro"])


def predicted(row: Row, hardware: Hardware, knobs: dict[str, Any]) -> float:
    return step_of(row, hardware, knobs).total


def memory(row: Row, hardware: Hardware, knobs: dict[str, Any]) -> int:
    plan, samples = decided(row, hardware, knobs)
    states = states_of(plan, OPTIMIZERS["sgd"])
    peak = peak_memory(plan, traced(), samples, row["micro"], LENGTH + 1, states)
    return peak.total - peak.margin


def complexity(row: Row, hardware: Hardware, scheme: str) -> int:
    plan, _ = decided(row, hardware, knobs_of(scheme, row))
    return complexity_of(plan, changed_knobs(plan.knobs.unresolved))


def picked(row: Row, hardware: Hardware, times: dict[str, float]) -> str:
    least = min(times.values())
    tied = [name for name, seconds in times.items() if seconds <= least * (1 + TIE)]
    return min(tied, key=lambda name: (complexity(row, hardware, name), times[name]))


def of_row(file: str, row: Row) -> Row:
    """Return what the planner says of one row, and what was measured."""
    hardware = machines(row)
    # With one micro-batch nothing is kept between them.
    ours = [
        n
        for n in OURS
        if n in EXACT and not (row["micro"] == 1 and n.endswith(("-once", "-kept")))
    ]
    times = {name: predicted(row, hardware, knobs_of(name, row)) for name in ours}
    measured = {
        n: statistics.median(found["seconds"])
        for n, found in row["schemes"].items()
        if n in EXACT
    }
    bytes_of = {
        name: memory(row, hardware, knobs_of(name, row)) for name in {*ours, *measured}
    }
    choice = picked(row, hardware, times)
    there = picked(
        row, hardware, {name: times[name] for name in ours if name in measured}
    )
    rivals = {
        name: seconds
        for name, seconds in measured.items()
        if bytes_of[name] <= bytes_of[there]
    }
    best = min(rivals, key=lambda name: rivals[name])
    return {
        "file": file,
        **{name: row[name] for name in ("layout", "rate", "micro")},
        "pick": choice,
        "pick_is_measured": choice in measured,
        "measured_pick": there,
        "best": best,
        "slower_than_best": measured[there] / measured[best] - 1,
        "predicted": times,
        "measured": measured,
        "bytes": bytes_of,
    }


def check(folder: Path) -> dict[str, Any]:
    """Return all rows, and how far predictions are off in the mean."""
    rows = []
    for file in FILES:
        found = json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))
        rows += [
            of_row(file, row) for row in found["rows"] if row["dtype"] == "float32"
        ]

    def mape(of_file: str, prefix: str = "ours") -> float:
        errors = [
            abs(row["predicted"][name] / seconds - 1)
            for row in rows
            if row["file"] == of_file
            for name, seconds in row["measured"].items()
            if name in row["predicted"] and name.startswith(prefix)
        ]
        return statistics.fmean(errors)

    off = {file: mape(file) for file in FILES}
    return {
        "mape": off,
        "mape_of_stages": mape("cluster-pipeline", PIPELINE),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    asked = parser.parse_args()
    found = check(HERE / "results")
    for row in found["rows"]:
        where = f"{row['layout']} {row['rate']} x{row['micro']} ({row['file']})"
        told = "" if row["pick_is_measured"] else " NOT MEASURED there; of what was: "
        print(
            f"{where:42} pick {row['pick']}{told}{row['measured_pick'] if told else ''}: best {row['best']}",
            end="",
        )
        print(f", {row['slower_than_best']:+.1%}")
        for name, seconds in row["measured"].items():
            if name in row["predicted"]:
                planned = row["predicted"][name]
                print(
                    f"    {name:26} {seconds:7.2f} {planned:7.2f} {planned / seconds - 1:+.0%}"
                )
    print({name: found[name] for name in ("mape", "mape_of_stages")})
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
