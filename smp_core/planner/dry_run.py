"""DryRun: what one rank would allocate and send in a step, found by running the real
sharded model without values.

The run itself (:mod:`smp_core.dry_run.step`) needs a process group and fake tensors, so
it is a child process: the real ``parallelize_model`` on rank 0 of a fake process group
of the plan's size, on the CPU, with three optimizer steps; with pipeline stages on the
first rank of one stage after another. Here are the question, the answer, and both
beside the plan's own figures.

Not run that way: FP8, and experts that are dealt to ranks, whose numbers of rows are
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_core.outside import ask_child
from smp_core.plan import GIB, OPTIMIZERS, communicators
from smp_core.planner.expert_bytes import expert_degree
from smp_core.planner.hardware import Hardware
from smp_core.planner.sent_bytes import sent_bytes
from smp_core.planner.stage_part import states_of
from smp_core.planner.step_memory import MEMORY_KINDS, peak_memory

if TYPE_CHECKING:
    from rich.table import Table

    from smp_core.planner.planner import Recommendation

CHILD = "smp_core.dry_run.step"
"""The module that answers. It stands above this one and is named, not imported."""

RUN_KINDS = tuple(kind for kind in MEMORY_KINDS if kind != "margin")


@dataclass(frozen=True)
class Question:
    """A configuration to be run.

    Attributes:
        model: words for it (:mod:`smp_core.planner.model_source`).
        knobs: of :class:`smp_core.config.SmpConfig`, as YAML has them.
        precision, optimizer: as of :class:`smp_core.planner.workload.Workload`.
        micro_batch: samples of a micro-batch on each rank.
        count: micro-batches of a step.
        fields: of a Transformers configuration, instead of ``model``.
    """

    model: str
    hardware: Hardware
    knobs: Mapping[str, Any]
    sequence: int
    micro_batch: int
    count: int
    precision: str = "mixed"
    optimizer: str = "adamw"
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DryRun:
    """The counts of a dry run, on rank 0 or the first rank of a pipeline stage.

    Attributes:
        memory: bytes by kind when most were allocated; the kinds of ``PeakMemory`` but
            the margin.
        sent: bytes that leave the rank in a step, by "kind/link" as
            :class:`smp_core.comm.meter.CommMeter` has them.
        communicators: ranks of each group that the rank's device talks in with others.
        ranks: of the fake process group.
        seconds: of processor time, imports not included.
        resident: bytes of the child process at most.
        stage: whose first rank ran.
        others: with stages, those of which no earlier one takes as much memory; behind
            the first.
    """

    memory: Mapping[str, int]
    sent: Mapping[str, float]
    communicators: tuple[int, ...]
    ranks: int
    seconds: float
    resident: int
    stage: int = 0
    others: tuple[DryRun, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def dry_run(*questions: Question) -> list[DryRun]:
    """Run configurations without values, one after another in a child process.

    Raises:
        ValueError: a model or configuration that cannot be run; says why.
    """
    return list(
        ask_child(CHILD, questions, f"the dry run of {questions[0].model!r} ended")
    )


def dry_run_of(recommended: Recommendation) -> DryRun:
    """Run the configuration that was chosen.

    Raises:
        ValueError: as :func:`dry_run`; a recommendation for a trace, whose model is not
            known.
    """
    if recommended.model == "model":
        raise ValueError(
            "a dry run needs the model; call plan() with its name instead of a trace"
        )
    chosen = recommended.chosen
    work, experts = recommended.workload, expert_degree(chosen.plan)
    # How many rows go to which expert are values, which a dry run does not have.
    if experts > 1:
        raise ValueError(
            f"a dry run does not know how many tokens go to whom with expert_parallel_degree={experts}; fix it at 1 "
            "(--fix expert_parallel_degree=1)"
        )
    batch = (work.sequence, chosen.micro_batch, chosen.count)
    asked = Question(
        recommended.model,
        recommended.hardware,
        chosen.knobs,
        *batch,
        work.precision,
        work.optimizer,
    )
    return dry_run(asked)[0]


def compared(recommended: Recommendation, found: DryRun) -> Table:
    """Return a table of the plan's figures beside the dry run's, stage by stage where
    there are pipeline stages."""
    from rich.table import Table

    # One table for all stages that are unlike, each beside its own plan.
    seconds = sum(each.seconds for each in (found, *found.others))
    who = (
        f"of each stage's first rank of {found.ranks:,}"
        if found.others
        else f"of rank 0 of {found.ranks:,}"
    )
    table = Table(
        title=f"plan and dry run {who}", caption=f"{seconds:.0f} s of processor"
    )
    for heading in ("", "plan", "dry run", "difference"):
        table.add_column(heading, justify="right" if heading else "left")
    plan, work = recommended.chosen.plan, recommended.workload
    sizes = recommended.chosen.micro_batch, recommended.chosen.count, work.sequence
    of_stages = states_of(plan, OPTIMIZERS[work.optimizer])
    for ran, states in zip((found, *found.others), of_stages, strict=True):
        if found.others:
            table.add_section()
            table.add_row(f"stage {ran.stage}")
        memory = peak_memory(plan, recommended.trace, *sizes, [states])
        planned: dict[str, float] = {
            f"{kind}, GiB": getattr(memory, kind) / GIB for kind in RUN_KINDS
        }
        counted: dict[str, float] = {
            f"{kind}, GiB": n_bytes / GIB for kind, n_bytes in ran.memory.items()
        }
        planned["communicators"] = len(communicators(plan))
        counted["communicators"] = len(ran.communicators)
        planned["memory, GiB"] = (memory.total - memory.margin) / GIB
        counted["memory, GiB"] = ran.total / GIB
        # Kinds that only one of both has are shown too, as 0 in the other.
        sent = sent_bytes(plan, recommended.trace, *sizes, ran.stage)
        for name in sorted({*sent, *ran.sent}):
            planned[f"{name}, GB sent"] = sent.get(name, 0.0) / 1e9
            counted[f"{name}, GB sent"] = ran.sent.get(name, 0.0) / 1e9
        for name, value in planned.items():
            count = counted[name]
            off = f"{value / count - 1:+.1%}" if count else "only planned"
            off = "-" if value == count else off
            digits = 0 if name == "communicators" else 3
            table.add_row(name, f"{value:.{digits}f}", f"{count:.{digits}f}", off)
    return table
