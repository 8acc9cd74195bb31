"""A recommendation for people and programs: table, picture, JSON, and the YAML file
that a run takes unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from smp_core.cluster import DEGREES
from smp_core.outside import matplotlibs_figure
from smp_core.plan import GIB
from smp_core.planner.candidate import Candidate
from smp_core.planner.expert_bytes import expert_degree
from smp_core.planner.fitted import MEMORY_BAND
from smp_core.planner.model_source import PADDED_TO
from smp_core.planner.planner import Recommendation, experts_words, layout_words
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.stage_part import shapes_of_stage, states_of
from smp_core.planner.step_memory import MEMORY_KINDS
from smp_core.planner.time import TIME_PARTS

if TYPE_CHECKING:
    from rich.table import Table

_UNEVEN = 0.05  # of a stage's time
_LITTLE = 0.005  # of a step's

_PARAMETERS_OF_A_NODE = 3e9
"""SageMaker SMP's rule of thumb: a partition group of one node for each three billion
parameters."""


def table(found: Recommendation) -> Table:
    """Return a table for the terminal: the chosen configuration and the next, with
    memory by kind, time by part."""
    from rich.table import Table

    shown = [found.chosen, *found.alternatives]
    made = Table(
        title=title(found),
        title_justify="left",
        caption=_caption(found),
        caption_justify="left",
    )
    made.add_column("", no_wrap=True)
    for place in range(len(shown)):
        made.add_column(
            "chosen" if place == 0 else str(place + 1), justify="right", overflow="fold"
        )
    for name, values in _rows(found, shown):
        # A row without values stands for a line between sections.
        if not values:
            made.add_section()
            continue
        made.add_row(name, *values)
    return made


def title(found: Recommendation) -> str:
    """Return a line with the model, the machines and the batch."""
    work = found.workload
    return (
        f"{found.model}: {found.trace.parameters / 1e9:.2f} billion parameters on {found.hardware.describe()}, "
        f"{work.global_batch:,} x {work.sequence:,} tokens a step"
    )


def _rows(found: Recommendation, shown: list[Candidate]) -> list[tuple[str, list[str]]]:
    def row(name: str, value: Any) -> tuple[str, list[str]]:
        return name, [value(each) for each in shown]

    def stages(candidate: Candidate) -> str:
        layout, schedule = candidate.plan.layout, candidate.plan.knobs.pipeline.schedule
        return "1" if layout.pipeline == 1 else f"{layout.pipeline}, {schedule}"

    # The configuration, then memory by kind, then time by part.
    rows = [
        row(
            "replicas x shard",
            lambda c: f"{c.plan.layout.replicate} x {c.plan.shard_degree}",
        ),
        *([row("stages", stages)] if any(each.plan.stages for each in shown) else []),
        row(
            "context x tensor",
            lambda c: f"{c.plan.layout.context} x {c.plan.layout.tensor}",
        ),
        row("micro-batch", lambda c: f"{c.micro_batch} x {c.count}"),
        row("recomputation", lambda c: c.recomputation),
        row("kept between", lambda c: c.plan.knobs.keep_between_micro_batches),
        row("other knobs", _others),
        ("", []),
    ]
    # Bound as a default: a lambda would see the loop's last kind.
    for kind in MEMORY_KINDS:
        rows.append(
            row(
                f"{kind}, GiB",
                lambda c, kind=kind: f"{getattr(c.memory, kind) / GIB:.1f}",
            )
        )
    rows += [
        row(
            "memory, GiB",
            lambda c: f"{c.memory.total / GIB:.1f} of {c.memory.capacity / GIB:.1f}",
        ),
        ("", []),
    ]
    for part in TIME_PARTS:
        # Parts of time that no configuration has would be rows of zeros.
        if any(getattr(each.time, part) for each in shown):
            rows.append(
                row(f"{part}, s", lambda c, part=part: f"{getattr(c.time, part):.3g}")
            )
    rows += [
        row("step, s", lambda c: f"{c.time.total:.3g} ± {c.band.share:.0%}"),
        row(
            "against chosen",
            lambda c: f"{c.time.total / found.chosen.time.total - 1:+.1%}",
        ),
        row("tokens/s", lambda c: f"{c.tokens_per_second:,.0f}"),
        row("MFU", lambda c: f"{c.mfu:.1%}"),
    ]
    if found.workload.tokens is not None:
        rows.append(row("days", lambda c: f"{found.days(c):.3g}"))
        if found.hardware.price is not None:
            rows.append(row("cost", lambda c: f"{found.cost(c):,.0f}"))
    return rows


# Knobs with rows of their own.
_TOLD = {
    *DEGREES.values(),
    "shard_degree",
    "pipeline",
    "activations",
    "keep_between_micro_batches",
    "param_dtype",
}


def _others(candidate: Candidate) -> str:
    return (
        "\n".join(
            f"{knob}={value}"
            for knob, value in candidate.knobs.items()
            if knob not in _TOLD
        )
        or "-"
    )


def _caption(found: Recommendation) -> str:
    parameters, hardware = found.trace.parameters, found.hardware
    # SMP's users know its rule of thumb: the pick is set beside it.
    by_rule = max(round(parameters / _PARAMETERS_OF_A_NODE), 1)
    chosen = found.chosen
    fastest = min(found.found.ranked, key=lambda each: each.time.total)
    experts = experts_of(found, chosen)
    # Rates change times alone, by which the lowest peak is not chosen.
    flips = (
        [flip.words for flip in found.flips()] if found.objective != "memory" else []
    )
    lines = [
        f"Of {found.found.considered:,} configurations bounds left {len(found.found.ranked):,} that fit to be ranked. "
        "Memory has a margin for the CUDA context and the allocator (docs/planning.md).",
        f"Chosen is the simplest within {fastest.band.share:.0%} of the fastest, {layout_words(fastest)}: the fewest "
        "axes, then the fewest nodes in a partition group.",
        f"± is the mean error on runs of the nearest program ({chosen.band.program}); of memory it is "
        f"{MEMORY_BAND.share:.0%}. No run of this program on a GPU has been compared.",
        waits_of(chosen),
        f"Another layout is chosen with {'; '.join(flips)}."
        if flips
        else "No share of a rate changes the axes.",
        f"SMP's rule, a node for each 3 billion parameters: partition groups of {by_rule} nodes, "
        f"shard_degree={by_rule * hardware.ranks_per_node}.",
    ]
    if found.trace.unpadded:
        lines.append(
            f"The vocabulary is planned with {found.trace.vocabulary:,} rows instead of {found.trace.unpadded:,}, "
            f"which tensor ranks divide: model.resize_token_embeddings(pad_to_multiple_of={PADDED_TO}). Without tensor "
            "ranks the padding can be left out."
        )
    if found.trace.quantized:
        lines.append(
            f"Weights are planned as {found.workload.precision} precision has them, and not quantized "
            f"({found.trace.quantized}) as in the configuration."
        )
    if experts is not None:
        gib = {name: f"{value / GIB:.1f} GiB" for name, value in experts.items()}
        lines.append(
            f"{experts_words(found.trace)}. In the chosen plan they are {gib['state_bytes']} of a device's parameters, "
            f"gradients and states, {gib['gathered_bytes']} of a block's gather, and {gib['sent_bytes']} of what a "
            f"device sends in a step (expert_parallel_degree={expert_degree(chosen.plan)}), beside "
            f"{gib['dispatched_bytes']} of tokens to their ranks and back, with a balanced router."
        )
    return "\n".join(lines)


_WAITS = {
    "gathers": "gathers of parameters and reductions of gradients",
    "replicas": "sums across replicas",
    "tensor": "collectives of tensor ranks",
    "context": "exchanges of keys and values",
    "optimizer": "the optimizer",
    "copies": "copies to the host",
    "experts": "tokens on their way to experts and back",
    "pipeline": "other stages and messages",
}


def waits_of(candidate: Candidate) -> str:
    """Return what a step waits for longest, in words; of unlike stages which one the
    others wait for."""
    time = candidate.time
    # Shares of a step's time, all but computing itself.
    waits = {part: getattr(time, part) / time.total for part in _WAITS}
    most = max(waits, key=lambda part: waits[part])
    line = f"A step computes {time.compute / time.total:.0%} of its time"
    line += (
        "."
        if waits[most] < _LITTLE
        else f", and waits longest for {_WAITS[most]} ({most}), {waits[most]:.0%}."
    )
    stages = candidate.plan.stages
    if stages is None or time.over_mean < _UNEVEN:
        return line
    has_head = " with the head" if time.stage == stages.count - 1 else ""
    # One number is enough where all chunks have as many blocks.
    sizes = ", ".join(map(str, stages.sizes))
    if len(set(stages.sizes)) == 1:
        sizes = f"{stages.sizes[0]} for each of {stages.n_chunks}"
    return (
        f"{line} Stages are uneven: stage {time.stage + 1} of {stages.count}{has_head} is busy {time.over_mean:.0%} "
        f"longer than the mean one, which is no bubble; blocks are cut as {sizes} (pipeline.split)."
    )


def experts_of(found: Recommendation, candidate: Candidate) -> dict[str, float] | None:
    """Return what a plan holds and sends of the experts of a mixture, on one device;
    None: the model has none."""
    trace, plan, stage = found.trace, candidate.plan, candidate.memory.stage
    if not trace.experts:
        return None
    # Their share of what the fullest stage holds.
    of_stage = next(
        each for each in states_of(plan, found.workload.states) if each.stage == stage
    )
    # Of the stage's own parameters, as one tensor rank holds them.
    shapes = (
        plan.split_shapes
        if plan.stages is None
        else shapes_of_stage(plan, stage).over(plan.layout.tensor)
    )
    blocks = trace.blocks if plan.stages is None else sum(plan.stages.blocks_of(stage))
    experts = sum(
        each.elements for each in shapes.parameters if each.name in trace.experts
    )
    share = experts / shapes.elements
    # What is sent of a model that is made of experts alone.
    apart = plan.shapes.with_experts_apart()
    own = tuple(unit for unit in apart.units.units if unit.name in apart.expert_names)
    alone = replace(
        plan,
        shapes=replace(apart, units=replace(apart.units, units=own, replicated=())),
    )
    step = candidate.micro_batch, candidate.count, found.workload.sequence, stage
    sent, of_all = sent_bytes(alone, None, *step), sent_bytes(plan, trace, *step)
    itemsize = plan.gathered_itemsize(
        next(each for each in shapes.parameters if each.name in trace.experts)
    )
    return {
        "parameters": trace.expert_elements,
        "active_parameters": trace.active_parameters,
        "state_bytes": share * of_stage.memory.model_states,
        "gathered_bytes": experts / blocks * itemsize / expert_degree(plan)
        if plan.gathers
        else 0.0,
        "sent_bytes": sum(sent.values()),
        "dispatched_bytes": sum(
            n for name, n in of_all.items() if name.startswith("expert_")
        ),
    }


def as_dict(found: Recommendation) -> dict[str, Any]:
    """Return everything in types that JSON has; the same each time for the same
    question."""
    flips = [flip.words for flip in found.flips()]
    alternatives = [_candidate(found, each) for each in found.alternatives]
    return {
        "model": found.model,
        "parameters": found.trace.parameters,
        "cluster": found.hardware.describe(),
        "sequence": found.workload.sequence,
        "global_batch": found.workload.global_batch,
        "objective": found.objective,
        "considered": found.found.considered,
        "fitting": len(found.found.ranked),
        "flips": flips,
        "chosen": _candidate(found, found.chosen),
        "alternatives": alternatives,
    }


def _candidate(found: Recommendation, candidate: Candidate) -> dict[str, Any]:
    memory = {
        kind: getattr(candidate.memory, kind)
        for kind in (*MEMORY_KINDS, "total", "capacity")
    }
    seconds = {part: getattr(candidate.time, part) for part in (*TIME_PARTS, "total")}
    return {
        "smp_config": candidate.knobs,
        "micro_batch": candidate.micro_batch,
        "micro_batches": candidate.count,
        "memory_bytes": memory,
        "seconds": seconds,
        "band": {"share": candidate.band.share, "program": candidate.band.program},
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "experts": experts_of(found, candidate),
        "days": found.days(candidate),
        "cost": found.cost(candidate),
    }


def as_json(found: Recommendation) -> str:
    """Return :func:`as_dict` as text."""
    return json.dumps(as_dict(found), indent=2) + "\n"


def as_yaml(found: Recommendation) -> str:
    """Return the file of a run: its `smp_config:` section, and in comments what the
    trainer has to be told."""
    chosen = found.chosen
    # What no knob holds, and the user has to set up: the batch of the loader, and how
    # many make a step.
    comments = [
        title(found),
        _batches(chosen),
        f"planned: {chosen.time.total:.3g} s a step, {chosen.memory.total / GIB:.1f} GiB of "
        f"{chosen.memory.capacity / GIB:.1f} on each device",
    ]
    text = "".join(f"# {line}\n" for line in comments)
    return text + yaml.safe_dump({"smp_config": chosen.knobs}, sort_keys=False)


def _batches(chosen: Candidate) -> str:
    # With stages the loader's batch is cut into micro-batches, so that it is larger
    # than one of them.
    together = chosen.plan.knobs.pipeline.microbatches
    if chosen.plan.stages is None or not isinstance(together, int):
        return (
            f"micro-batch of {chosen.micro_batch} samples on each rank, {chosen.count} micro-batches a step "
            "(accumulate_grad_batches, gradient_accumulation_steps)"
        )
    return (
        f"batch of {chosen.micro_batch * together} samples on each rank, which goes through the stages in {together} "
        f"micro-batches of {chosen.micro_batch}; {chosen.count // together} batches a step (accumulate_grad_batches, "
        "gradient_accumulation_steps)"
    )


def front_table(found: Recommendation) -> Table:
    """Return a table of step time against nodes."""
    from rich.table import Table

    made = Table(title="fewer nodes")
    for name in ("devices", "step, s", "tokens/s", "days", "cost"):
        made.add_column(name, justify="right")
    for each in found.front():
        days, cost = each.days(), each.cost()
        made.add_row(
            f"{each.hardware.devices:,}",
            f"{each.chosen.time.total:.3g}",
            f"{each.chosen.tokens_per_second:,.0f}",
            "" if days is None else f"{days:.3g}",
            "" if cost is None else f"{cost:,.0f}",
        )
    return made


def draw_plans(found: Recommendation, path: str | os.PathLike[str]) -> None:
    """Draw two stacked bars for each configuration, as SVG, PNG or what else the ending
    of ``path`` says.

    Raises:
        ValueError: matplotlib is not installed.
    """
    shown = [found.chosen, *found.alternatives]
    labels = [_label(each, place) for place, each in enumerate(shown)]
    figure = matplotlibs_figure()(
        figsize=(11.0, 1.2 + 0.75 * len(shown)), layout="constrained"
    )
    figure.suptitle(title(found), fontsize=9)
    memory, time = figure.subplots(1, 2, sharey=True)
    _bars(memory, labels, [each.memory for each in shown], MEMORY_KINDS, GIB)
    memory.axvline(found.chosen.memory.capacity / GIB, color="black", linestyle="--")
    memory.set_xlabel("GiB on each device; dashed: what it has")
    _bars(time, labels, [each.time for each in shown], TIME_PARTS, 1)
    time.set_xlabel("seconds of a step")
    figure.savefig(path)


def _bars(
    axes: Any,
    labels: Sequence[str],
    of_plans: Sequence[Any],
    parts: Sequence[str],
    unit: int,
) -> None:
    # Bars are stacked: each part begins where the one before it ended.
    places, begins = range(len(labels)), [0.0] * len(labels)
    for part in parts:
        widths = [getattr(each, part) / unit for each in of_plans]
        if any(widths):
            axes.barh(places, widths, left=begins, label=part)
            begins = [
                begin + width for begin, width in zip(begins, widths, strict=True)
            ]
    axes.set_yticks(places, labels, fontsize=7)
    # The pick on top.
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)


def _label(candidate: Candidate, place: int) -> str:
    return (
        f"{'chosen' if place == 0 else place + 1}: {layout_words(candidate)}\n"
        f"micro-batch {candidate.micro_batch} x {candidate.count}, {candidate.recomputation}"
    )
