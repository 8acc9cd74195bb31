"""Ten requests that people make of `smp plan`, and published steps in bfloat16 and FP8,
with what is planned.

    python benchmarks/plan_requests.py [--only NAME ...]     plan, and write benchmarks/results/plan_requests.json
    python benchmarks/plan_requests.py --seconds             time `smp plan` of the largest search, and keep it there
    python benchmarks/plan_requests.py --page                write the tables of docs/plan-requests.md again

Nothing but these seconds is measured here: the planner is asked, and its answers are
kept, so that a change of its constants or of its search shows in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_core.plan import GIB
from smp_core.planner import Workload, plan
from smp_core.planner.candidate import Candidate
from smp_core.planner.explain import waits_of
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.planner import layout_words
from smp_core.planner.trace import trace, trace_model

RESULTS = Path(__file__).parent / "results" / "plan_requests.json"
PAGE = Path(__file__).parents[1] / "docs" / "plan-requests.md"
BEGIN, END = "<!-- generated: requests -->", "<!-- end of requests -->"
BEGIN_PUBLISHED, END_PUBLISHED = (
    "<!-- generated: published -->",
    "<!-- end of published -->",
)


@dataclass(frozen=True)
class Request:
    """A question: a model, machines and the batch of a step."""

    words: str
    model: str
    cluster: str
    sequence: int
    global_batch: int


REQUESTS = {
    "8b-slow": Request(
        "8B on 4 x 8 A100 at 100 Gbit/s",
        "llama-3.1-8b",
        "4x8:a100-80g@100gbps",
        4096,
        256,
    ),
    "70b-p5": Request("70B on 8 p5", "llama-3.1-70b", "8xp5", 8192, 128),
    "70b-b200": Request("70B on 4 DGX B200", "llama-3.1-70b", "4xdgx-b200", 8192, 128),
    "30b-16": Request("30B on 16 p4d", "gpt2-30b", "16xp4d", 2048, 768),
    "30b-32": Request("30B on 32 p4d", "gpt2-30b", "32xp4d", 2048, 1536),
    "8b-1024": Request("8B on 1,024 H100", "llama-3.1-8b", "128xdgx-h100", 8192, 1024),
    "8b-4090": Request(
        "8B on eight RTX 4090", "llama-3.1-8b", "1x8:rtx-4090", 2048, 64
    ),
    "7b-lora": Request(
        "7B with LoRA on one card of 24 GB",
        "llama-2-7b+lora:16",
        "1x1:rtx-4090",
        2048,
        16,
    ),
    "128k": Request(
        "8B, sequences of 128K tokens, on 8 H100", "llama-3.1-8b", "1xp5", 131072, 8
    ),
    "mixtral": Request(
        "Mixtral 8x7B on 64 H100", "mixtral-8x7b", "8xdgx-h100", 4096, 256
    ),
}

WATCHED: dict[str, Any] = {
    **{
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
    },
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000},
}
"""The model of one more request, which a test plans again: where its answer is another
one, all are out of date."""

LARGEST, RUNS = "8b-1024", 2
MOST_FLIPS = 1  # of a request, on the page

PUBLISHED = {"bf16": 2.03, "fp8": 3.05}
"""Samples per second of Llama 3.1 8B on one p5.48xlarge: context 8, sequences of 16,384
tokens, four of them in a step."""
GOALS = {"bf16": 0.10, "fp8": 0.15}


@dataclass(frozen=True)
class Speedup:
    """A published step in FP8 by one in bfloat16, and the request that is like both."""

    request: Request
    fixed: dict[str, Any]
    recipe: Any
    published: float


_ONE_P5 = Request(
    "Llama 3.1 8B, context 8, p5.48xlarge (SMP)", "llama-3.1-8b", "1xp5", 16384, 4
)
_TORCHAO = Request(
    "Llama 3 8B, FSDP2, 8 H100 (torchao)", "llama-3.1-8b", "1x8:h100-80g", 8192, 8
)
_BLOG = Request(
    "Llama 3 70B, FSDP2, 128 H100 (PyTorch blog)", "llama-3.1-70b", "16xp5", 8192, 128
)
_ALONE = {"micro_batch": 1}
SPEEDUPS = (
    Speedup(
        _ONE_P5,
        {"shard": 8, "context": 8, "activations": "full"},
        True,
        3.05 / 2.03,
    ),
    Speedup(
        _TORCHAO,
        {"shard": 8, "activations": "selective", **_ALONE},
        {"scaling": "dynamic"},
        7689.5 / 6150,
    ),
    Speedup(
        _BLOG,
        {"shard": 128, "activations": "full", **_ALONE},
        {"scaling": "dynamic"},
        1.5,
    ),
)
"""Batches and recomputation of the last one are not published: one sample and all of it
are assumed. Recomputation of the first is that of SMP's walk-through with context ranks
(smp-train-llama-fsdp-tp-cp.ipynb, "activation_checkpointing": 1)."""


def answered(request: Request, traced: ModelTrace | None = None) -> dict[str, Any]:
    """Plan a request; return the pick, what is faster, and what would change it.

    Args:
        traced: the request's model; None: it is traced here.
    """
    work = Workload(request.sequence, request.global_batch)
    found = plan(traced or request.model, request.cluster, work)
    fastest = min(found.found.ranked, key=lambda each: each.time.total)
    of_spreads: dict[tuple[int, int], Candidate] = {}
    for each in found.found.ranked:
        best = of_spreads.setdefault(each.spread, each)
        if each.time.total < best.time.total:
            of_spreads[each.spread] = each
    return {
        "pick": _described(found.chosen),
        "fastest": _described(fastest),
        "spreads": [
            [*spread, each.time.total] for spread, each in sorted(of_spreads.items())
        ],
        "waits": waits_of(found.chosen),
        "flips": [flip.words for flip in found.flips()],
        "configurations": found.found.considered,
    }


def watched() -> dict[str, Any]:
    """Plan the small request; layers are not split over ranks while it is traced."""
    traced = trace_model("a small model", 1024, WATCHED)
    return answered(
        Request("a small model on 4 RTX 4090", "", "1x4:rtx-4090", 1024, 16), traced
    )


def _described(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": layout_words(candidate),
        "axes": candidate.spread[0],
        "nodes_of_a_group": candidate.spread[1],
        "micro_batch": candidate.micro_batch,
        "micro_batches": candidate.count,
        "recomputation": candidate.plan.knobs.activations.checkpoint,
        "offloads": candidate.plan.activations.offloaded_bytes is not None,
        "knobs": candidate.knobs,
        "seconds": candidate.time.total,
        "band": candidate.band.share,
        "program": candidate.band.program,
        "tokens_per_second": candidate.tokens_per_second,
        "memory_gib": candidate.memory.total / GIB,
        "capacity_gib": candidate.memory.capacity / GIB,
    }


def published() -> dict[str, Any]:
    """Plan the published steps, in bfloat16 and in FP8."""
    found: dict[str, Any] = {"speedups": []}
    for each in SPEEDUPS:
        request = each.request
        traced, work = (
            trace(request.model, request.sequence),
            Workload(request.sequence, request.global_batch),
        )
        picks = {}
        for name, recipe in (("bf16", None), ("fp8", each.recipe)):
            fixed = each.fixed if recipe is None else {**each.fixed, "fp8": recipe}
            pick = plan(traced, request.cluster, work, fixed=fixed).chosen
            rate = request.global_batch / pick.time.total
            picks[name] = {"samples_per_second": rate, "pick": _described(pick)}
        planned = (
            picks["fp8"]["samples_per_second"] / picks["bf16"]["samples_per_second"]
        )
        found["speedups"].append({"planned": planned, **picks})
    return {**found, **{name: found["speedups"][0][name] for name in PUBLISHED}}


def seconds_of_command(name: str) -> dict[str, Any]:
    """Run `smp plan` of a request as a command; return its processor seconds, and those
    of the child that traces."""
    from machine import about  # beside this file, which only a command has on its path

    request = REQUESTS[name]
    command = [
        sys.executable,
        "-m",
        "smp_core.cli",
        "plan",
        request.model,
        "--cluster",
        request.cluster,
    ]
    command += [
        "--seq",
        str(request.sequence),
        "--global-batch",
        str(request.global_batch),
    ]
    runs = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        runs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        **about("plan_requests"),
        "request": name,
        "processor_seconds": min(runs),
        "load": os.getloadavg()[0],
    }


def table(answers: dict[str, Any]) -> str:
    """Return the requests and their answers as Markdown."""
    lines = [
        "| asked | picked | micro-batches | recomputation | step, s | tokens/s | memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, request in REQUESTS.items():
        if name not in answers:
            continue
        pick = answers[name]["pick"]
        cells = [
            f"[{request.words}](#{_anchor(request.words)})",
            pick["layout"],
            f"{pick['micro_batches']} of {pick['micro_batch']}",
            pick["recomputation"] + (", offloaded" if pick["offloads"] else ""),
            f"{pick['seconds']:.3g} ± {pick['band']:.0%}",
            f"{pick['tokens_per_second']:,.0f} ± {pick['band']:.0%}",
            f"{pick['memory_gib']:.1f} of {pick['capacity_gib']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_details(answers)])


def _anchor(heading: str) -> str:
    """Return what a page's link calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _details(answers: dict[str, Any]) -> list[str]:
    """Return a section for each request: the command, why this, what it waits for, and
    what would change it."""
    lines = []
    for name, request in REQUESTS.items():
        if name not in answers:
            continue
        answer = answers[name]
        pick, fastest = answer["pick"], answer["fastest"]
        asked = f"--seq {request.sequence} --global-batch {request.global_batch}"
        lines += [f"### {request.words}", ""]
        lines += [
            "```sh",
            f"smp plan {request.model} --cluster {request.cluster} {asked}",
            "```",
            "",
        ]
        if pick["seconds"] <= fastest["seconds"]:
            why = f"{pick['layout']}: the fastest of all, and nothing simpler is within {pick['band']:.0%} of it."
        else:
            saved = 1 - fastest["seconds"] / pick["seconds"]
            why = (
                f"{pick['layout']}: the simplest within {fastest['band']:.0%} of the fastest, {fastest['layout']}, "
                f"which would save {saved:.1%} of a step by the model's own count."
            )
        flips = answer["flips"][:MOST_FLIPS]
        changes = (
            "; ".join(flips)
            if flips
            else "no share of a rate changes the axes, or the nodes of a partition group"
        )
        lines += [
            f"{why} {answer['waits'].partition(' Stages are uneven')[0]}",
            "",
            f"**What would flip it:** {changes}.",
            "",
        ]
    return lines[:-1]


def published_table(found: dict[str, Any]) -> str:
    """Return the published steps beside the planned one as Markdown."""
    lines = [
        "| | published, samples/s | planned, samples/s | off | wanted within | |",
        "|---|---|---|---|---|---|",
    ]
    for name, rate in PUBLISHED.items():
        goal = f"{GOALS[name]:.0%}"
        planned = found[name]["samples_per_second"]
        off = planned / rate - 1
        verdict = "met" if abs(off) <= GOALS[name] else "missed"
        lines.append(
            f"| {name} | {rate:.2f} | {planned:.2f} | {off:+.1%} | {goal} | {verdict} |"
        )
    lines += [
        "",
        "| FP8 by bfloat16 | published | planned | off |",
        "|---|---|---|---|",
    ]
    for each, own in zip(SPEEDUPS, found["speedups"], strict=True):
        off = own["planned"] / each.published - 1
        lines.append(
            f"| {each.request.words} | {each.published:.3f} | {own['planned']:.3f} | {off:+.1%} |"
        )
    return "\n".join(lines)


def write_page(result: dict[str, Any]) -> None:
    """Write the page's tables again."""
    text = PAGE.read_text(encoding="utf-8")
    parts = (
        (BEGIN, END, table(result["requests"])),
        (BEGIN_PUBLISHED, END_PUBLISHED, published_table(result["published"])),
    )
    for begin, end, made in parts:
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*REQUESTS, "published", "watched"]
    parser.add_argument(
        "--only", nargs="*", choices=names, help="the others stay as they are"
    )
    parser.add_argument(
        "--seconds", action="store_true", help="time the command of the largest search"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write docs/plan-requests.md from the result",
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {"requests": {}, "published": {}}
    if RESULTS.exists():
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
    if asked.page:
        write_page(result)
        return
    if asked.seconds:
        result["command"] = seconds_of_command(LARGEST)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    for name in asked.only or names:
        print(name, flush=True)
        if name == "published":
            result["published"] = published()
        elif name == "watched":
            result["watched"] = watched()
        else:
            result["requests"][name] = answered(REQUESTS[name])
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
