"""DryRun: what one rank would allocate and send in a step, found by running the real sharded model without values.

The run itself (:mod:`smp_core.dry_run`) needs a process group and fake tensors, so it is a child process: the real
``parallelize_model`` on rank 0 of a fake process group of the plan's size, on the CPU, with three optimizer steps.
Here are the question, the answer, and both beside the plan's own figures.

Not run that way: FP8, context and pipeline degrees.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_core.planning.candidate import Candidate
from smp_core.planning.cluster import GIB
from smp_core.planning.hardware import Hardware
from smp_core.planning.sent_bytes import sent_bytes
from smp_core.planning.step_memory import MEMORY_KINDS

if TYPE_CHECKING:
    from rich.table import Table

    from smp_core.planning.planner import Recommendation

CHILD = "smp_core.dry_run"
"""The module that answers. It stands above this one and is named, not imported."""

RUN_KINDS = tuple(kind for kind in MEMORY_KINDS if kind != "margin")


@dataclass(frozen=True)
class Question:
    """A configuration to be run.

    Attributes:
        model: words for it (:mod:`smp_core.planning.model_source`).
        knobs: of :class:`smp_core.config.SmpConfig`, as YAML has them.
        precision, optimizer: as of :class:`smp_core.planning.workload.Workload`.
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
    """The counts of a dry run, on rank 0.

    Attributes:
        memory: bytes by kind when most were allocated; the kinds of ``PeakMemory`` but the margin.
        sent: bytes that leave the rank in a step, by "kind/link" as :class:`smp_core.comm.meter.CommMeter` has them.
        calls: collectives of c10d in a step, as "kind over ranks of the group" -> (calls, bytes of the full tensors).
        ranks: of the fake process group.
        seconds: of processor time, imports not included.
        resident: bytes of the child process at most.
    """

    memory: Mapping[str, int]
    sent: Mapping[str, float]
    calls: Mapping[str, tuple[int, int]]
    ranks: int
    seconds: float
    resident: int

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def dry_run(*questions: Question) -> list[DryRun]:
    """Run configurations without values, one after another in a child process.

    Raises:
        ValueError: a model or configuration that cannot be run; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "question", Path(folder) / "answer"
        asked.write_bytes(pickle.dumps(questions))
        command = [sys.executable, "-W", "ignore", "-m", CHILD, str(asked), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise ValueError(f"the dry run of {questions[0].model!r} ended: {last[0]}")
        found = pickle.loads(out.read_bytes())  # our own child's
    for each in found:
        if isinstance(each, ValueError):
            raise each
    return list(found)


def dry_run_of(recommended: Recommendation, candidate: Candidate | None = None) -> DryRun:
    """Run the configuration that was chosen, or another one of the ranking.

    Raises:
        ValueError: as :func:`dry_run`; a recommendation for a trace, whose model is not known.
    """
    chosen = candidate or recommended.chosen
    if recommended.model == "model":
        raise ValueError("a dry run needs the model; call plan() with its name instead of a trace")
    work = recommended.workload
    found = dry_run(
        Question(
            recommended.model,
            recommended.hardware,
            chosen.knobs,
            work.sequence,
            chosen.micro_batch,
            chosen.count,
            work.precision,
            work.optimizer,
        )
    )
    return found[0]


def compared(recommended: Recommendation, found: DryRun) -> Table:
    """Return a table of the plan's figures beside the dry run's."""
    from rich.table import Table

    chosen = recommended.chosen
    table = Table(title=f"plan and dry run of rank 0 of {found.ranks:,}", caption=f"{found.seconds:.0f} s of processor")
    for heading in ("", "plan", "dry run", "difference"):
        table.add_column(heading, justify="right" if heading else "left")

    def add(name: str, planned: float, ran: float, unit: float) -> None:
        off = "-" if planned == ran else f"{planned / ran - 1:+.1%}" if ran else "only planned"
        table.add_row(name, f"{planned / unit:.3f}", f"{ran / unit:.3f}", off)

    for kind in RUN_KINDS:
        add(f"{kind}, GiB", getattr(chosen.memory, kind), found.memory[kind], GIB)
    add("memory, GiB", chosen.memory.total - chosen.memory.margin, found.total, GIB)
    table.add_section()
    sequence = recommended.workload.sequence
    planned = sent_bytes(chosen.plan, recommended.trace, chosen.micro_batch, chosen.count, sequence)
    for name in sorted({*planned, *found.sent}):
        add(f"{name}, GB sent", planned.get(name, 0.0), found.sent.get(name, 0.0), 1e9)
    return table
