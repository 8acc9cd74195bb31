"""Cases on ranks, many in one call, and what they show beside one process.

The tolerance: float64 sums in another order differ by a few 1e-16 of their largest
term, and some ten steps of smooth functions with eps 1e-3 make at most 1e-13 of that;
1e-11 of the largest value leaves room. A wrong divisor, a lost micro-batch or a stale
weight is off by 1e-4 or more.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp_core.config import SmpConfig
from tests.core.fuzz.cases import Case, every_knobs
from tests.core.fuzz.operations import OPERATIONS
from tests.core.fuzz.procedure import OneProcess, OnRanks, Record, Run
from tests.harness import RanksFailed, run_ranks

TOLERANCE = 1e-11
# Sums of gradients in half precision are taken in float32.
TOLERANCE_OF_HALF = 1e-5

# Seconds: the end of a hang, for a call of many cases and for one.
LIMIT, LIMIT_OF_ONE = 240.0, 60.0


@dataclass(frozen=True)
class Outcome:
    """``problem``: what differs, or how it failed; ``refused``: the ValueError of ours
    that all ranks gave."""

    case: Case
    problem: str | None = None
    refused: str | None = None

    def __str__(self) -> str:
        again = f"python -m tests.core.fuzz.replay '{self.case.to_json()}'"
        found = f"seed {self.case.seed}: {self.problem or self.refused}"
        return f"{found}\nplay it again, --shrink makes it small:\n{again}"


def go_through(run: Run) -> list[Record]:
    for number, op in enumerate(run.case.script):
        try:
            OPERATIONS[op["do"]].run(run, op)
        except ValueError:
            raise
        except Exception as error:
            raise RuntimeError(f"operation {number}, {op}") from error
        # Where it was recorded is part of what is compared.
        run.records = [
            (label if ":" in label else f"{number} {op['do']}: {label}", v)
            for label, v in run.records
        ]
    return run.finish()


@dataclass(frozen=True)
class Failure:
    """How a case ended on a rank, if not with its records; ``refused``: by a
    ValueError."""

    text: str
    refused: bool


def on_ranks(cases: Sequence[str], folder: str) -> list[list[Record] | Failure]:
    """What each case recorded on this rank, up to the first that fails on any rank."""
    found: list[list[Record] | Failure] = []
    meshes: dict[Any, Any] = {}
    status = dist.new_group()  # what a failed case leaves in its groups is not met here
    for number, text in enumerate(cases):
        case = Case.from_json(text)
        print(f"case {number}: seed {case.seed}", flush=True)
        try:
            found.append(go_through(OnRanks(case, Path(folder, str(number)), meshes)))
        except Exception as error:
            found.append(Failure(traceback.format_exc(), isinstance(error, ValueError)))
        failed = torch.tensor(int(isinstance(found[-1], Failure)))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=status)
        if failed:
            break
    return found


def play(cases: Sequence[Case], limit: float = LIMIT) -> list[Outcome]:
    """Run cases of one layout together; after one that fails on all ranks the others go
    on in new process groups.

    Raises:
        RanksFailed: a rank hung or died; its output says in which case.
    """
    world, per_node = cases[0].layout
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        left = cases[len(outcomes) :]
        with tempfile.TemporaryDirectory(prefix="smp-fuzz-") as folder:
            texts = [case.to_json() for case in left]
            # What ranks print is in the error, where there is one.
            with contextlib.redirect_stdout(None):
                ranks = run_ranks(
                    on_ranks,
                    world,
                    texts,
                    folder,
                    ranks_per_node=per_node,
                    timeout=limit,
                )
        outcomes += [
            _judge(case, seen) for case, *seen in zip(left, *ranks, strict=False)
        ]
    return outcomes


def play_all(cases: Iterable[Case], at_once: int = 20) -> Iterator[Outcome]:
    """Run all, and go on after one that fails: a call that fails is made again in two
    halves."""
    by_layout: dict[tuple[int, int], list[Case]] = defaultdict(list)
    for case in cases:
        by_layout[case.layout].append(case)
    for members in by_layout.values():
        for first in range(0, len(members), at_once):
            yield from _play_halves(members[first : first + at_once])


def _play_halves(cases: Sequence[Case]) -> Iterator[Outcome]:
    if len(cases) == 1:
        yield play_alone(cases[0])
        return
    try:
        outcomes = play(cases)
    except RanksFailed:
        middle = len(cases) // 2
        yield from _play_halves(cases[:middle])
        yield from _play_halves(cases[middle:])
    else:
        yield from outcomes


def play_alone(case: Case) -> Outcome:
    """Run one case; a hang or a death is its outcome too."""
    try:
        return play([case], LIMIT_OF_ONE)[0]
    except RanksFailed as error:
        return Outcome(case, str(error))


def _judge(case: Case, ranks: Sequence[list[Record] | Failure]) -> Outcome:
    failures = [seen for seen in ranks if isinstance(seen, Failure)]
    if failures:
        text = max(
            (failure.text for failure in failures),
            key=lambda text: "Timed out" not in text,
        )
        if len(failures) < len(ranks) or not all(
            failure.refused for failure in failures
        ):
            return Outcome(
                case, f"{len(failures)} of {len(ranks)} ranks failed:\n{text}"
            )
        if not any(knob in text.splitlines()[-1] for knob in SmpConfig.knobs()):
            return Outcome(case, f"refused by a message that names no knob:\n{text}")
        return Outcome(case, refused=text)
    expected = go_through(OneProcess(case))
    in_half = any(knobs.get("param_dtype") == "bfloat16" for knobs in every_knobs(case))
    tolerance = TOLERANCE_OF_HALF if in_half else TOLERANCE
    for rank, seen in enumerate(ranks):
        assert not isinstance(seen, Failure)
        labels, wanted = [label for label, _ in seen], [label for label, _ in expected]
        if labels != wanted:
            return Outcome(case, f"rank {rank} recorded {labels}, one process {wanted}")
        for (label, mine), (_, theirs) in zip(seen, expected, strict=True):
            problem = difference(mine, theirs, tolerance)
            if problem is not None:
                return Outcome(case, f"rank {rank}, operation {label}: {problem}")
    return Outcome(case)


def difference(mine: Any, theirs: Any, tolerance: float = TOLERANCE) -> str | None:
    """How what ranks recorded differs from what one process did; losses are those of a
    rank's own batches."""
    if isinstance(theirs, dict):
        of_ranks = theirs and all(isinstance(key, int) for key in theirs)
        if mine.keys() != theirs.keys() and not of_ranks:
            return f"only on ranks: {sorted(mine.keys() - theirs)}, only in one process: {sorted(theirs.keys() - mine)}"
        parts = ((key, difference(mine[key], theirs[key], tolerance)) for key in mine)
        return next(
            (f"{key} {problem}" for key, problem in parts if problem is not None), None
        )
    if mine is None or theirs is None or isinstance(theirs, (str, bool)):
        return (
            None
            if mine is theirs or mine == theirs
            else f"is {_brief(mine)} instead of {_brief(theirs)}"
        )
    mine, theirs = (
        torch.as_tensor(mine, dtype=torch.float64),
        torch.as_tensor(theirs, dtype=torch.float64),
    )
    if mine.shape != theirs.shape:
        return f"has shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}"
    if not theirs.numel() or torch.equal(mine, theirs):
        return None
    scale = max(1.0, theirs.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    # What grows from step to step (``maximize``) makes its rounding errors grow as
    # well.
    if scale > 1e6:
        tolerance *= 1e3
    if torch.allclose(mine, theirs, rtol=0.0, atol=tolerance * scale, equal_nan=True):
        return None
    off = (mine - theirs).abs().max().item()
    return f"is {off:.3g} off (largest value {scale if not math.isnan(scale) else 'nan':.3g})"


def _brief(value: Any) -> str:
    return (
        f"a tensor with norm {value.norm().item():.3g}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
