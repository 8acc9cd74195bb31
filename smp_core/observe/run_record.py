"""RunRecord: what a monitor writes into the log of its run: what was asked and chosen,
steps, and the end.

The format is that of :mod:`smp_core.run_log.write`; `smp report` makes a page of it.
Only rank 0 writes, and nothing here communicates. Where nodes are several, it lists the
knobs that would send fewer bytes between them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from smp_core.cluster import KINDS, PARTITION, Collectives, Links
from smp_core.codecs import CodeName
from smp_core.config import DEFAULT, shown
from smp_core.engine import ParallelModel, lines_of_subjects
from smp_core.plan import Plan, compression, estimate, planned_states
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.run_log import write as run_log

logger = logging.getLogger("smp")


class RunRecord:
    """The log of one training run.

    Args:
        parallel: the parallelized model; None: nothing is sharded, and the log has no
            plan.
        optimizers: for the memory plan.
        path: the file.
        step: optimizer steps taken before; a log of a run that is resumed goes on.
        micro_batches: of an optimizer step, for the formulas of bytes.
    """

    def __init__(
        self,
        parallel: ParallelModel | None,
        optimizers: Sequence[Optimizer],
        path: Path,
        step: int,
        micro_batches: int,
    ) -> None:
        self._parallel = parallel
        # Appended to a log that may be there already.
        self._log = run_log.start(path, step)
        fields = (
            {}
            if parallel is None
            else _as_far_as_known(parallel.plan, optimizers, micro_batches)
        )
        self._log.append(
            "run", micro_batches=micro_batches, torch=torch.__version__, **fields
        )

    def write_step(
        self, step: int, figures: Mapping[str, float], details: Mapping[str, Any]
    ) -> None:
        """Append a report.

        Args:
            step: optimizer steps taken.
            figures: numbers by name.
            details: :attr:`smp_core.observe.job_figures.JobFigures.details`.
        """
        # What the model sent in the step before this report.
        more = dict(details)
        if self._parallel is not None and self._parallel.meter.enabled:
            more["sent"] = self._parallel.meter.per_step()
        self._log.append("step", **dict(figures), **more, step=step)
        self._log.step = step

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append what the user's code has logged: numbers by name; nothing where there
        are none."""
        if values:
            self._log.append("metrics", step=step, values=dict(values))

    def end(self, step: int, error: BaseException | None = None) -> None:
        """Append the end of the run, once, and close the log."""
        # The end is one line; a log that has none tells that the run was killed.
        how = (
            "completed" if error is None else f"{type(error).__name__}: {error}"[:2000]
        )
        self._log.append("end", step=step, how=how)
        run_log.close(self._log)


def _as_far_as_known(
    plan: Plan, optimizers: Sequence[Optimizer], micro_batches: int
) -> dict[str, Any]:
    """Return what :func:`_of_plan` does; no error of it ends a run, on one rank
    alone."""
    # A log is not worth a run: what cannot be said is left out.
    try:
        return _of_plan(plan, optimizers, micro_batches)
    except Exception as error:
        logger.warning(
            "run.jsonl does not say what was decided: %s: %s",
            type(error).__name__,
            error,
        )
        return {}


def _of_plan(
    plan: Plan, optimizers: Sequence[Optimizer], micro_batches: int
) -> dict[str, Any]:
    """Return what was asked for, what was decided and what is expected of it."""
    knobs = plan.knobs
    topology = plan.cluster.topology
    layout = plan.layout
    # What was asked for, and what it became.
    rows = []
    for knob in knobs.settings():
        # Only knobs that are not at their defaults: the others would hide them.
        if (why := knobs.why(knob)) != DEFAULT:
            value = shown(attrgetter(knob)(knobs))
            rows.append(
                {
                    "knob": knob,
                    "asked": shown(knobs.asked(knob)),
                    "value": value,
                    "why": why,
                }
            )
    # The plan in words, and what a picture of it needs.
    fields: dict[str, Any] = {
        "knobs": rows,
        "plan": lines_of_subjects(plan),
        "nodes": list(topology.node_names),
        "ranks_per_node": topology.ranks_per_node,
        "layout": dict(vars(layout)),
        "parameters": plan.shapes.elements,
        "savings": [vars(each) for each in savings(plan)],
        "links": None if plan.cluster.links is None else _of_links(plan.cluster.links),
    }
    # What is expected, where it can be told from shapes.
    # With stages or tensor ranks the formulas do not hold, and given shards have their
    # own.
    if plan.given is None and layout.pipeline == layout.tensor == 1:
        optimizer = planned_states(knobs.planner.optimizer, optimizers)
        planned = estimate(plan, optimizer)
        fields["planned_memory"] = {
            "parameters": planned.parameters + planned.buffers,
            "gathered": planned.gathered,
            "gradients": planned.gradients + planned.partial_sums,
            "optimizer": planned.optimizer_states,
        }
        fields["planned_optimizer"] = optimizer.describe()
        fields["planned_sent"] = sent_bytes(plan, None, 1, micro_batches, 1)
    return fields


def _of_links(links: Links) -> dict[str, Any]:
    def of_place(found: Collectives | None) -> dict[str, Any] | None:
        if found is None:
            return None
        fits = {kind: getattr(found, kind) for kind in KINDS}
        return {
            kind: {"latency": fit.latency, "bandwidth": fit.bandwidth}
            for kind, fit in fits.items()
        }

    return {
        "measured_with": links.measured_with,
        "inter": of_place(links.inter),
        "intra": of_place(links.intra),
    }


@dataclass(frozen=True)
class Saving:
    """A knob that compresses what crosses nodes.

    Attributes:
        knob: as it is typed.
        kinds: the collectives whose bytes between nodes become fewer, by the names of
            the meter.
        share: what is left of those bytes, by the codec's own size for the median unit.
    """

    knob: str
    kinds: tuple[str, ...]
    share: float


def savings(plan: Plan) -> list[Saving]:
    """List the knobs that would send fewer bytes between nodes than the plan does; none
    on one node."""
    topology, knobs = plan.cluster.topology, plan.knobs
    if topology.num_nodes == 1 or not plan.shapes.unit_elements:
        return []
    # The median unit: blocks are alike, and one unit stands for them.
    elements = int(statistics.median(plan.shapes.unit_elements))
    first = plan.shapes.parameters[0]
    # Whether a gather leaves its node at all.
    spans = plan.layout.size(*PARTITION) * plan.layout.tensor > topology.ranks_per_node
    found = []

    def add(field: str, code: CodeName, kinds: tuple[str, ...], reduced: bool) -> None:
        dtype = (
            plan.dtypes.of_reduced(first) if reduced else plan.dtypes.of_gathered(first)
        )
        share = compression(code, dtype, elements)
        if share < 1:
            word = "bf16" if code == "bfloat16" else code
            found.append(Saving(f'compression={{"{field}": "{word}"}}', kinds, share))

    if knobs.compression.gather is None and spans:
        add("gather", "int8", ("all_gather",), reduced=False)
    if knobs.compression.reduce is None:
        add("reduce", "bfloat16", ("all_reduce",), reduced=True)
        add(
            "reduce",
            "int8",
            ("reduce_scatter", "all_reduce") if spans else ("all_reduce",),
            reduced=True,
        )
    return found
