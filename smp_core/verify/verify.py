"""verify: a user's training at layouts beside the same training in one process.

For each layout:

1.  Its ranks train for a few steps, as the script says, and write down what they see,
    and the batches they read.
2.  One process trains without torch-smp on those batches: each step's batches of all
    ranks joined into one. Where they cannot be joined (padded to different lengths), it
    takes them one after another, as micro-batches.
3.  Both records are compared.

Layouts whose ranks read the same batches share the run of one process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from smp_core.verify.causes import facts_in_words, likely_causes
from smp_core.verify.compare import Comparison, Part, Row, compare
from smp_core.verify.layouts import Trial, read_layout, shrunk
from smp_core.verify.recorder import NOT_JOINABLE, Record
from smp_core.verify.report import Report
from smp_core.verify.request import Request
from smp_core.verify.runs import RunFailed, Runs, Server, modules_for
from smp_core.verify.tolerance import tolerance_of

LIMIT = 600.0
"""Seconds that a single run may take."""

_JOINED = "the ranks' batches of each step joined"
_ONE_BY_ONE = "the ranks' batches one after another, as micro-batches"


@dataclass
class Verification:
    """A verification in progress.

    Attributes:
        runs: of the child processes.
        folder: where records are.
        alone: the runs of one process: what was read -> its record.
    """

    runs: Runs
    folder: Path
    steps: int
    float64: bool = False
    keep_dropout: bool = False
    cpu: bool = True
    say: Callable[[str], None] = lambda _: None
    alone: dict[str, Record] = field(default_factory=dict)
    _runs: int = 0

    def own_layout(self) -> Trial:
        """Return the script's own layout, shrunk."""
        # A run that only tells which degrees the script asks for.
        looking = self._request("look")
        self.say("looking at the script's layout")
        self.runs.run(looking)
        return shrunk(looking)

    def compare(self, trial: Trial) -> Comparison:
        """Run one layout and one process, and compare them."""
        # The ranks go first: what they read decides what the one process trains on.
        asked = self._request("ranks", ranks=trial.ranks, knobs=dict(trial.knobs))
        self.say(trial.words)
        try:
            self.runs.run(asked, trial.ranks_per_node)
        # A layout that does not run is a finding, with the end of its output as words.
        except RunFailed as error:
            found = Comparison(
                trial.words, tolerance_of({}, self.float64), reference="not run"
            )
            found.note(
                Row("run", "it did not come to its steps", agrees=False),
                Part(0, "run", "", str(error)),
            )
            return found
        ranks = [read_record(asked.folder, rank) for rank in range(trial.ranks)]
        # Then one process, or the record of one that trained on the same batches for an
        # earlier layout.
        alone, how = self._one_process(asked, ranks)
        found = compare(
            trial.words,
            ranks,
            alone,
            # The larger limits of the two: one side may compute in fewer bits.
            self._tolerance(ranks[0], alone),
            how == _ONE_BY_ONE,
        )
        found.reference = how
        found.causes = likely_causes(found, ranks, alone)
        # One more run can tell whether the joining of batches made the difference.
        if self._may_be_the_joining(found, ranks, how):
            self._try_one_by_one(found, asked, ranks)
        return found

    def _one_process(
        self, asked: Request, ranks: Sequence[Record]
    ) -> tuple[Record, str]:
        """Train in one process on what the ranks read, or return the record of a run
        that did."""
        # A run of one process depends on what was read, and on how BatchNorm normalised
        # it.
        # Batches are known by the hashes of their samples.
        read = str(
            [(record.data_rank, record.samples) for record in ranks if record.data_size]
        )
        read += str(ranks[0].facts.get("BatchNorm"))
        for how in (_JOINED, _ONE_BY_ONE):
            # Another layout read the same: its run of one process serves again.
            if read + how in self.alone:
                return self.alone[read + how], how
            try:
                record = self._train_alone(asked, one_by_one=how == _ONE_BY_ONE)
            except RunFailed as error:
                if how == _ONE_BY_ONE or not str(error).startswith(NOT_JOINABLE):
                    raise
                continue  # batches of different lengths: micro-batches are the next try
            self.alone[read + how] = record
            return record, how
        raise AssertionError

    def _train_alone(self, asked: Request, one_by_one: bool) -> Record:
        request = self._request(
            "one process", ranks=asked.ranks, batches=asked.out, one_by_one=one_by_one
        )
        self.say(f"one process: {_ONE_BY_ONE if one_by_one else _JOINED}")
        self.runs.run(request)
        return read_record(request.folder)

    def _may_be_the_joining(
        self, found: Comparison, ranks: Sequence[Record], how: str
    ) -> bool:
        # Only differences that the grouping of samples can make are worth another run.
        kinds = ("activations", "loss", "gradients", "buffers")
        return (
            found.part is not None
            and found.part.what in kinds
            and ranks[0].data_size > 1
            and how == _JOINED
        )

    def _try_one_by_one(
        self, found: Comparison, asked: Request, ranks: Sequence[Record]
    ) -> None:
        """Say whether one process agrees when it takes the ranks' batches one after
        another."""
        try:
            alone = self._train_alone(asked, one_by_one=True)
        except RunFailed:
            # Its error was reported when it ran the first time, or is about grouping
            # itself.
            return
        again = compare(found.words, ranks, alone, found.tolerance, one_by_one=True)
        # Buffers of BatchNorm and logged numbers are the last micro-batch's, and may
        # differ where the rest agrees.
        if again.agrees or (
            again.part is not None and again.part.what in ("buffers", "metrics")
        ):
            found.causes.insert(
                0,
                "how samples are grouped: one process that takes the same batches one after another, as micro-batches, "
                "agrees. Something is computed over the samples of a batch (see below)",
            )

    def _tolerance(self, ranks: Record, alone: Record) -> Any:
        # Ranks may compute in fewer bits than one process, or the other way round.
        return max(
            (tolerance_of(record.facts, self.float64) for record in (ranks, alone)),
            key=lambda each: each.activations,
        )

    def _request(self, role: Any, **options: Any) -> Request:
        self._runs += 1
        return Request(
            role,
            str(self.folder / f"run{self._runs}"),
            steps=self.steps,
            float64=self.float64,
            cpu=self.cpu,
            keep_dropout=self.keep_dropout,
            **options,
        )


def verify_command(
    command: Sequence[str],
    layouts: Sequence[str | Mapping[str, Any]] = (),
    *,
    steps: int = 3,
    ranks: int | None = None,
    float64: bool = False,
    keep_dropout: bool = False,
    devices: bool = False,
    limit: float = LIMIT,
    say: Callable[[str], None] = lambda _: None,
    server: Server | None = None,
) -> Report:
    """Verify a script.

    Args:
        command: the script and its arguments.
        layouts: knobs of each layout; empty: the script's own, shrunk.
        steps: optimizer steps.
        ranks: of layouts that give none.
        float64: compute in float64.
        keep_dropout: leave dropout on.
        devices: use this machine's devices, one a rank; False: CPU.
        limit: seconds for each run.
        say: called with a line before each run.
        server: forks the processes; default: one of this call.

    Raises:
        ValueError: a layout that is none; a run that did not come to its steps, with
            the end of its output.
    """
    # What is asked for is looked at before any process starts.
    if steps < 1:
        raise ValueError(f"steps={steps}: write a number from 1 up")
    if devices and not torch.cuda.is_available():
        raise ValueError(
            "--devices: this machine has none that torch can use; leave it out to verify on CPU ranks"
        )
    began = time.monotonic()
    # Layouts are read before anything starts: a mistyped knob costs no run.
    trials = [read_layout(layout, ranks) for layout in layouts]
    # Records lie in a folder that goes with this call; the server's processes have
    # imported what the script will.
    with contextlib.ExitStack() as around:
        folder = Path(
            around.enter_context(tempfile.TemporaryDirectory(prefix="smp-verify-"))
        )
        serving = server or around.enter_context(Server(modules_for(command)))
        runs = Runs(serving, list(command), limit)
        verification = Verification(
            runs, folder, steps, float64, keep_dropout, not devices, say
        )
        comparisons = [
            # Without layouts the script's own is verified.
            verification.compare(trial)
            for trial in trials or [verification.own_layout()]
        ]
    # Under the table: what a run of one process told about the script, and what was
    # compared.
    notes = [
        note
        for record in [*verification.alone.values()][:1]
        for note in facts_in_words(record.facts)
    ]
    notes.append(
        f"{steps} steps; samples, activations and gradients of every parameter in step 1, weights at the end"
    )
    return Report(comparisons, notes, time.monotonic() - began)


def verify_call(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    layouts: Sequence[str | Mapping[str, Any]],
    **options: Any,
) -> Report:
    """Verify a call: as a script, but a function of a module and its arguments, which
    are pickled.

    Raises:
        ValueError: as of :func:`verify_command`; what cannot be pickled.
    """
    try:
        call = pickle.dumps((function, arguments, {}))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"verify starts other processes and cannot send them what it was given ({error}); give a function at the "
            "top of a module that makes it"
        ) from error
    # By its name in __main__ a function would be looked up in the child's own __main__.
    if b"__main__" in call:
        raise ValueError(
            "verify starts other processes, which cannot import what is defined in __main__; move the module and its "
            "data into a file that can be imported, or write: smp verify SCRIPT"
        )
    with tempfile.TemporaryDirectory(prefix="smp-verify-") as folder:
        file = Path(folder) / "call"
        file.write_bytes(call)
        # The children import what this process can import.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            path or os.getcwd() for path in sys.path
        )
        try:
            return verify_command(["--call", str(file)], layouts, **options)
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def read_record(folder: str | Path, rank: int = 0) -> Record:
    """Return what a process of a run wrote. Our own processes wrote it."""
    return torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)
