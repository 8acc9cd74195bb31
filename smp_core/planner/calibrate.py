"""Calibration: constants of the time model refitted on the log of a short run, and what
was off by how much.

The run is planned as it was (its degrees and knobs are in the log), and compared with
what its monitor measured:

    rates of links    bytes by seconds of collectives between nodes and inside them; seconds in which a rank waited for
                      another are in them, so that a link is no slower than what comes out. Messages between pipeline
                      stages are left out, which are waited for while another stage computes
    efficiency        the one factor on the speed of products, attention and other operators with which the planned step
                      takes as long as the measured one, by these links

No share becomes larger than 1. A single step's time cannot tell more constants apart.
"""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smp_core.cluster import DEGREES, PARTITION, Axis
from smp_core.config import Fp8Recipe, SmpConfig, nested
from smp_core.engine.decide import decide
from smp_core.outside import number, numbers
from smp_core.plan import GIB, Plan
from smp_core.planner.fitted import Fitted
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.stage_part import states_of
from smp_core.planner.stage_time import step_model
from smp_core.planner.step_memory import peak_memory
from smp_core.planner.workload import Workload
from smp_core.run_log import Run, objects

# Settings of the run that planned time and memory depend on; degrees come from its
# layout.
_SETTINGS = (
    "keep_between_micro_batches",
    "reshard_after_forward",
    "optimizer_shard",
    "state_offload",
    "param_dtype",
    "expert_parallel_degree",
    "activations.checkpoint",
    "activations.offload",
    "chunked_cross_entropy",
    "pipeline.schedule",
    "pipeline.microbatches",
)
_LARGEST_FACTOR = 20.0
_FEWEST_REPORTS = 2


@dataclass(frozen=True)
class Comparison:
    """A figure as it was planned and as it was measured; None: the log does not have
    it."""

    name: str
    unit: str
    planned: float
    measured: float | None

    @property
    def words(self) -> str:
        """A line for people, like "step: planned 1.2 s, measured 1.5 s (+25%)"."""
        if self.measured is None:
            return (
                f"{self.name}: planned {self.planned:.3g} {self.unit}, not in the log"
            )
        off = f" ({self.measured / self.planned - 1:+.0%})" if self.planned else ""
        return f"{self.name}: planned {self.planned:.3g} {self.unit}, measured {self.measured:.3g} {self.unit}{off}"


@dataclass(frozen=True)
class Calibration:
    """The outcome of a calibration.

    Attributes:
        fitted: the constants, refitted.
        compared: figures of the run, as planned with the constants before.
        changes: constants, before and after.
    """

    fitted: Fitted
    compared: tuple[Comparison, ...]
    changes: Mapping[str, tuple[float, float]]

    def lines(self) -> list[str]:
        """Return what was off, and what was made of it, for people."""
        changed = [
            f"{name}: {before:.3g} -> {after:.3g}"
            for name, (before, after) in self.changes.items()
        ]
        return [
            *(each.words for each in self.compared),
            f"refitted: {', '.join(changed) or 'nothing'}",
        ]


@dataclass(frozen=True)
class _Measured:
    """The figures of a run: samples of a step over all ranks, tokens of each, seconds,
    and others by name."""

    samples: int
    sequence: int
    seconds: float
    sent: Mapping[str, float]
    peak_gib: float | None


def calibrate(
    path: Path, trace: ModelTrace, hardware: Hardware, workload: Workload
) -> Calibration:
    """Compare the log of a run with its plan, and refit.

    Args:
        path: the log, or its folder.
        trace: of the run's model.
        hardware: the devices and rates that the run had; its numbers of nodes and ranks
            are in the log.
        workload: precision and optimizer; the batch is in the log.

    Raises:
        ValueError: a log that lacks what is needed, stages of a model that is not
            planned in stages, or a model of another size; says what to do.
    """
    # What the run was, and how it was decided: batch, machines, degrees and knobs come
    # from its log.
    run = Run.read(path)
    measured = _measured(run, path)
    machines = _machines(run, hardware, path)
    plan = _plan_of(run, trace, machines, workload, path)
    # A trace of another model would be fitted to times that are not its own.
    parameters = number(run.asked.get("parameters"))
    if parameters is not None and abs(parameters / trace.parameters - 1) > 0.01:
        raise ValueError(
            f"{path} is of a model with {parameters:,.0f} parameters, and the one to plan for has "
            f"{trace.parameters:,}; give the log of a run of the same model"
        )
    count = int(number(run.asked.get("micro_batches")) or 1)
    if plan.stages is not None:  # each of them went through the stages in parts
        count *= int(plan.knobs.pipeline.microbatches)
    # Samples of a step, over ranks that read different ones and over micro-batches.
    data = plan.layout.replicate * plan.layout.shard
    micro_batch = max(round(measured.samples / data / count), 1)

    def seconds(fitted: Fitted) -> float:
        model = step_model(
            plan, trace, replace(machines, fitted=fitted), measured.sequence
        )
        return model.step(micro_batch, count).total

    # Links first, by their own measurement; what is then left of the time is a matter
    # of computing.
    before = hardware.fitted
    links = {} if hardware.measured is not None else _rates(measured.sent, machines)
    shares: Any = {}
    for name, (rate, planned) in links.items():
        shares[name] = min(getattr(before, name) * rate / planned, 1.0)
    if "network" in shares:
        shares["falls"] = 0.0  # what its groups lose is in the run's rates
    with_links = replace(before, **shares)
    fitted = _with_efficiency(
        with_links, machines.device.name, measured.seconds, seconds
    )
    # Memory is compared and not refitted: its constants are margins.
    peak = peak_memory(
        plan,
        trace,
        micro_batch,
        count,
        measured.sequence,
        states_of(plan, workload.states),
    )
    compared = [Comparison("step", "s", seconds(before), measured.seconds)]
    for name, (rate, planned) in links.items():
        compared.append(Comparison(_LINKS[name][1], "GB/s", planned / 1e9, rate / 1e9))
    compared.append(
        Comparison("peak memory", "GiB", peak.total / GIB, measured.peak_gib)
    )
    return Calibration(
        fitted, tuple(compared), _changes(before, fitted, machines.device.name)
    )


def _measured(run: Run, path: Path) -> _Measured:
    """Read the run's figures: medians of its reports, the first of which has the
    warm-up in it."""
    figures = run.figures
    samples = figures.get("samples", [])
    rates = [value for _, value in figures.get("samples_per_second", [])]
    tokens = [value for _, value in figures.get("tokens_per_second", [])]
    if len(samples) < _FEWEST_REPORTS or not rates or not tokens:
        raise ValueError(
            f"{path} has too few reports with samples, samples_per_second and tokens_per_second; let the run take some "
            "more steps, with SmpMonitor or SmpMonitorCallback"
        )
    # Samples are a running sum; their slope by steps is the batch.
    (first, before), (last, after) = samples[0], samples[-1]
    of_step = (after - before) / (last - first)
    rate = statistics.median(rates)
    peaks = [value for _, value in figures.get("peak_device_memory_gib", [])]
    sequence = round(statistics.median(tokens) / rate)
    return _Measured(
        round(of_step),
        sequence,
        of_step / rate,
        numbers(run.last("sent")),
        max(peaks, default=None),
    )


def _machines(run: Run, hardware: Hardware, path: Path) -> Hardware:
    nodes, ranks = run.asked.get("nodes"), number(run.asked.get("ranks_per_node"))
    if not isinstance(nodes, list) or ranks is None:
        raise ValueError(
            f"{path} has no plan in it; the run was not sharded, or its log was made in another way"
        )
    return replace(hardware, nodes=max(len(nodes), 1), ranks_per_node=int(ranks))


def _plan_of(
    run: Run, trace: ModelTrace, machines: Hardware, workload: Workload, path: Path
) -> Plan:
    """Decide again what the run had decided."""
    layout = numbers(run.asked.get("layout"))
    if layout.get(Axis.PIPELINE, 1) > 1 and trace.uncut:
        raise ValueError(f"{path} is of a run with pipeline stages: {trace.uncut}")
    # Degrees, then the other knobs as the report shows them.
    asked: dict[str, Any] = {
        knob: int(layout.get(axis, 1)) for axis, knob in DEGREES.items()
    }
    # A partition group has the ranks of both of its axes.
    asked["shard_degree"] = int(math.prod(layout.get(axis, 1) for axis in PARTITION))
    # The report shows knobs as they took effect, by their names with fields.
    for row in objects(run.asked.get("knobs")):
        if row.get("knob") in _SETTINGS:
            asked[str(row["knob"])] = row.get("value")
        if row.get("knob") == "pipeline.split" and row.get("asked") != "auto":
            asked["pipeline.split"] = f"[{row.get('value')}]"
        if row.get("knob") == "fp8":
            asked["fp8"] = _recipe(str(row.get("value")), path)
    config = SmpConfig.from_dict(nested(asked))
    mode, dealt = str(config.activations.checkpoint), config.expert_parallel_degree != 1
    return decide(
        trace.of_precision(mode, workload.precision, dealt), config, machines.cluster()
    )


def _recipe(shown: str, path: Path) -> Fp8Recipe | None:
    """Return the FP8 recipe of a run, which the log shows as the call that makes it."""
    if shown == "none":
        return None
    try:
        # The log is a file that may come from anywhere: read as literals, never run.
        call = ast.parse(shown, mode="eval").body
        recipe = Fp8Recipe.read(
            {
                each.arg: ast.literal_eval(each.value)
                for each in getattr(call, "keywords", ())
            }
        )
    except (ValueError, SyntaxError):
        raise ValueError(
            f"{path} is of a run with fp8={shown}, which is not understood"
        ) from None
    if recipe is not None and recipe.backend != "native":
        raise ValueError(
            f"{path} is of a run with fp8.backend={recipe.backend!r}, which is not planned with"
        )
    return recipe


_LINKS = {
    "link": ("intra", "links inside nodes"),
    "network": ("inter", "links between nodes"),
}
"""Constant -> class of links, and its words."""


def _rates(
    sent: Mapping[str, float], machines: Hardware
) -> dict[str, tuple[float, float]]:
    """Return constant -> bytes per second of a rank over the links that the run used
    for long enough to tell, as measured and as planned."""
    found = {}
    for constant, (link, _) in _LINKS.items():
        # Stages wait for messages, so that their seconds are no measure of a link.
        collectives = {
            name: value
            for name, value in sent.items()
            if not name.startswith("pipeline/")
        }
        seconds = sum(
            value
            for name, value in collectives.items()
            if name.endswith(f"/{link}_seconds")
        )
        n_bytes = sum(
            value
            for name, value in collectives.items()
            if name.endswith(f"/{link}_bytes")
        )
        planned = getattr(machines.links, link)
        if seconds <= 0 or n_bytes <= 0 or planned is None:
            continue
        found[constant] = n_bytes / seconds, planned.all_gather.bandwidth
    return found


def _with_efficiency(
    fitted: Fitted, device: str, measured: float, seconds: Any
) -> Fitted:
    """Return the constants with the factor on the speed of computing that makes a step
    as long as it was."""
    # Halving in logarithms: a step is the shorter the larger the factor.
    low, high = 1 / _LARGEST_FACTOR, _LARGEST_FACTOR
    for _ in range(60):
        factor = (low * high) ** 0.5
        if seconds(_faster(fitted, device, factor)) > measured:
            low = factor
        else:
            high = factor
    return _faster(fitted, device, factor)


def _faster(fitted: Fitted, device: str, factor: float) -> Fitted:
    for rate in ("products", "attention", "moving"):
        fitted = fitted.with_share(
            rate, device, min(fitted.share_of(rate, device) * factor, 1.0)
        )
    return fitted


def _changes(
    before: Fitted, after: Fitted, device: str
) -> dict[str, tuple[float, float]]:
    found = {}
    for rate in ("products", "attention", "moving", "link", "network"):
        then, now = before.share_of(rate, device), after.share_of(rate, device)
        if abs(now / then - 1) > 1e-3:
            found[rate] = (then, now)
    return found
