"""`smp plan`: a configuration for a model on machines that need not be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from smp_core.outside import console, long_wait, matplotlibs_figure
from smp_core.planner.calibrate import calibrate
from smp_core.planner.dry_run import compared, dry_run_of
from smp_core.planner.explain import as_json, as_yaml, draw_plans, front_table, table
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.planner import (
    NothingFits,
    Recommendation,
    plan as plan_model,
    require_limits,
    within,
)
from smp_core.planner.search import read_fixed
from smp_core.planner.trace import trace
from smp_core.planner.workload import Workload
from smp_core.run_log import Run

_MOST_TOKENS = 1e12
NOTHING_FITS = 2
"""The exit status then."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="a known name or one in the hub's cache, a config.json or its folder, package.module:function; with "
            "+lora:16 behind it adapters alone train"
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="'32x8:a100-40g@400gbps', '4xp5' or a YAML file")
    ],
    seq: Annotated[int, typer.Option("--seq", min=2, help="tokens of a sample")],
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="samples of an optimizer step")
    ] = None,
    batch_tokens: Annotated[
        float | None, typer.Option(help="of an optimizer step, instead of its samples")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="a knob that stays, as shard=16; may be repeated"),
    ] = None,
    objective: Annotated[str, typer.Option(help="time, memory or cost")] = "time",
    precision: Annotated[
        str, typer.Option(help="mixed (float32 parameters) or bfloat16")
    ] = "mixed",
    optimizer: Annotated[str, typer.Option(help="adamw, lion, sgd, ...")] = "adamw",
    tokens: Annotated[
        float | None, typer.Option(help="of the whole training, for days and cost")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="of a node for an hour, in any currency")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(help="that the training may take: the fewest nodes that do"),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="that the training may cost")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(help="what `smp topology --measure --store` wrote there"),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(help="refit on the log of a run of this model (run.jsonl)"),
    ] = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(help="why not this knob, as tensor=8; may be repeated"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="run the chosen plan without values, and compare"
        ),
    ] = False,
    front: Annotated[
        bool, typer.Option("--front", help="also show step times of fewer nodes")
    ] = False,
    as_json_: Annotated[
        bool, typer.Option("--json", help="print JSON instead of the table")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="draw the plans here, as SVG or PNG")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write the configuration here, as YAML")
    ] = None,
) -> None:
    """Choose the degrees, recomputation and micro-batch of a run, and say why.

    smp plan llama-3.1-8b --cluster 4xp5 --seq 8192 --global-batch 512
    """
    if as_json_ and (front or why_not or dry_run):
        raise ValueError(
            "--json prints the plans alone; ask for --front, --why-not and --dry-run without it"
        )
    # Machines, batch, knobs: whatever is written wrongly is said before the trace.
    hardware = _hardware(cluster, links, price)
    samples = _samples(global_batch, batch_tokens, seq)
    workload = Workload(seq, samples, precision, optimizer, tokens)  # type: ignore[arg-type]  # checked there
    fixed, questions = (list(map(_pair, written or [])) for written in (fix, why_not))
    require_limits(workload, hardware, days, budget)
    _require_places(out, picture)
    planned: str | ModelTrace = model
    if from_log is not None:
        planned, hardware = _calibrated(from_log, model, hardware, workload, as_json_)
    found = _chosen(planned, hardware, workload, fixed, objective, days, budget)
    found = replace(found, model=model)
    if out is not None:
        out.write_text(as_yaml(found), encoding="utf-8")
    if picture is not None:
        draw_plans(found, picture)
    if as_json_:
        typer.echo(as_json(found), nl=False)
    else:
        _show(found, front, questions, dry_run, out)


def _chosen(
    planned: str | ModelTrace,
    hardware: Hardware,
    workload: Workload,
    fixed: list[tuple[str, str]],
    objective: Any,
    days: float | None,
    budget: float | None,
) -> Recommendation:
    """Return the plan; where nothing fits, say so and end the command."""
    try:
        with long_wait("planning"):
            found = plan_model(
                planned, hardware, workload, fixed=fixed, objective=objective
            )
        if days is not None or budget is not None:
            found = within(found, days, budget)
    except NothingFits as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(NOTHING_FITS) from None
    return found


def _hardware(cluster: str, links: Path | None, price: float | None) -> Hardware:
    """Return the machines with what was measured on them, and with their price."""
    hardware = Hardware.parse(cluster)
    if links is not None:
        hardware = hardware.with_links(links)
    return hardware if price is None else replace(hardware, price=price)


def _calibrated(
    log: Path, model: str, hardware: Hardware, workload: Workload, in_json: bool
) -> tuple[ModelTrace, Hardware]:
    """Refit the machines' constants on a run's log, and say how; return the trace too,
    which the plan needs and is not made twice."""
    Run.read(log)  # what is no log is said before the trace
    traced = trace(model, workload.sequence)
    calibration = calibrate(log, traced, hardware, workload)
    for line in calibration.lines():
        # With --json standard output is JSON alone.
        typer.echo(line, err=in_json)
    return traced, replace(hardware, fitted=calibration.fitted)


def _require_places(out: Path | None, picture: Path | None) -> None:
    """Refuse files that could not be written once all is planned."""
    for option, path in (("--out", out), ("--picture", picture)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(
                f"{option}={path}: cannot be written; write a file in a folder that is there"
            )
    if picture is None:
        return
    if picture.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(
            f"--picture={picture} is drawn by the ending of its name; allowed: .svg, .png, .pdf"
        )
    matplotlibs_figure()


def _show(
    found: Recommendation,
    front: bool,
    questions: list[tuple[str, str]],
    dry_run: bool,
    out: Path | None,
) -> None:
    """Print the table of plans, and what else was asked about them."""
    console().print(table(found))
    if front:
        console().print(front_table(found))
    for knob, value in questions:
        typer.echo(f"why not {found.why_not(**{knob: value})}")
    if dry_run:
        with long_wait("the dry run"):
            ran = dry_run_of(found)
        console().print(compared(found, ran))
    if out is not None:
        typer.echo(
            f"written to {out}: SmpConfig.from_yaml, SMP_CONFIG_FILE={out}, accelerate-smp launch"
        )


def _samples(
    global_batch: int | None, batch_tokens: float | None, sequence: int
) -> int:
    """Return the samples of a step from their number, or from that of their tokens."""
    if (global_batch is None) == (batch_tokens is None):
        raise ValueError(
            "write --global-batch with the samples of a step, or --batch-tokens with its tokens, as 4e6"
        )
    if global_batch is not None:
        return global_batch
    assert batch_tokens is not None
    if not sequence <= batch_tokens < _MOST_TOKENS:
        raise ValueError(
            f"--batch-tokens={batch_tokens:g} is not a number of tokens from {sequence}, one sample, and below "
            f"{_MOST_TOKENS:g}"
        )
    return round(batch_tokens / sequence)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r} is no knob with its value; write it as shard=16")
    read_fixed([(name, value)])  # what is no knob is said before the trace
    return name, value
