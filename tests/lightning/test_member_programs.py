"""Programs of Lightning, by what their models are made of and what their steps do with
them, give what they give in one process, to 1e-9 in float64, or are refused in words;
what has no effect is named."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from smp_core.sharding.gradients import RanksDiverged
from tests.harness import run_ranks
from tests.lightning.differences import differences
from tests.lightning.member_programs import (
    PLACES,
    draw_members,
    each_part,
    member_program,
    module_of_members,
)
from tests.lightning.programs import Program, run
from tests.logged import warnings_said

LIMIT = 240  # seconds, besides 30 for each program
# Errors of ours name what was written, and what to type.
REFUSALS = (ValueError, RanksDiverged, MisconfigurationException, NotImplementedError)
WAYS_OUT = ("write ", "make it from", "register it", "torch-smp: ", "leave ")


def on_ranks(programs: list[tuple[Program, str]]) -> list[dict[str, Any] | str]:
    """What each of them shows, with what is said of it; or its error, which is the same
    on all ranks."""
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str] = []
    for program, folder in programs:
        try:
            with warnings_said() as said:
                shown = run(program, folder, make=module_of_members)
            found.append({**shown, "said": said})
        except Exception as error:
            notes = "".join(traceback.format_exception(error))
            refused = isinstance(error, REFUSALS) or "torch-smp: " in notes
            words = any(each in notes for each in WAYS_OUT)
            found.append(f"refused: {error}" if refused and words else notes)
    return found


def _is_named(line: str) -> bool:
    return "has no effect" in line or "not those of one process" in line


def problem(
    ours: list[dict[str, Any] | str], theirs: dict[str, Any] | str
) -> str | None:
    """What is wrong with what the ranks show; None: nothing, "refused" or "named"."""
    if isinstance(theirs, str):
        return f"fails in one process: {theirs[-600:]}"
    errors = [each for each in ours if isinstance(each, str)]
    if errors:
        is_refused = all(each.startswith("refused") for each in errors)
        alike = len(errors) == len(ours)
        return "refused" if is_refused and alike else errors[0][-1500:]
    first = dict(ours[0])  # type: ignore[arg-type]
    said = [line for line in first.pop("said") if _is_named(line)]
    lines = differences(first, {key: theirs[key] for key in theirs if key != "said"})
    if lines and said:
        return "named"
    return "\n".join(lines[:6]) or None


def outcomes(programs: list[Program], folder: Path) -> list[str | None]:
    """The :func:`problem` of each."""
    programs = [{**each, "number": n} for n, each in enumerate(programs)]
    placed = [(each, str(folder / f"ranks-{each['number']}")) for each in programs]
    expected = on_ranks(
        [(each, str(folder / f"alone-{each['number']}")) for each in programs]
    )
    found: list[str | None] = [None] * len(programs)
    for ranks in (2, 4):
        mine = [each for each in placed if each[0]["ranks"] == ranks]
        if not mine:
            continue
        limit = LIMIT + 30 * len(mine)
        shown = run_ranks(on_ranks, ranks, mine, ranks_per_node=2, timeout=limit)
        for place, (program, _) in enumerate(mine):
            number = program["number"]
            of_all = [each[place] for each in shown]
            found[number] = problem(of_all, expected[number])
    return found


def wrong(programs: list[Program], folder: Path) -> list[tuple[Program, str]]:
    """Programs that are not as in one process, nor refused or named."""
    found = zip(programs, outcomes(programs, folder), strict=True)
    fine = (None, "refused", "named")
    return [(each, what) for each, what in found if what not in fine]


CHANGED = ["batch norm", "counted", "branching"]
# What was wrong once, and is right now.
WRONG_ONCE: list[Program] = [
    # BatchNorm over the world: ranks of one batch counted its elements once each in the
    # unbiased variance, and layers of other stages waited for each other. A trial, and
    # a rehearsal, left what forwards put into buffers and attributes.
    member_program("tensor 2", members=CHANGED),
    member_program("pipeline 2, one micro-batch", members=CHANGED),
    # Hooks of the user's kept what a trial computed.
    member_program("context 2", ways=["probes"]),
    # The learning rate finder looked at the losses of rank 0's samples.
    member_program("context 2", ways=["finds rates"]),
    # An optimizer that the Trainer was given while it trained stepped nothing.
    member_program("world", ways=["new optimizer"]),
]


def test_what_was_wrong_once_is_as_in_one_process(tmp_path: Path) -> None:
    assert outcomes(WRONG_ONCE, tmp_path) == [None] * len(WRONG_ONCE)


def test_what_looks_for_gradients_that_masters_have_is_named_or_refused(
    tmp_path: Path,
) -> None:
    ways = ["sharpness", "clips in place of Lightning", "optimizer of its own"]
    programs = [member_program("world", ways=[way]) for way in ways]
    assert outcomes(programs, tmp_path) == ["named", "named", "refused"]


def test_what_embeddings_compute_from_own_samples_is_refused_or_named(
    tmp_path: Path,
) -> None:
    places = ("replicas", "shard 2")
    words = ("bounded", "sparse", "by frequency")
    programs = [member_program(each, words=name) for name in words for each in places]
    expected = ["refused", "refused", "refused", "refused", "named", "named"]
    assert outcomes(programs, tmp_path) == expected


def test_what_forward_changes_for_each_micro_batch_is_named(tmp_path: Path) -> None:
    program = member_program("pipeline 2", members=["batch norm", "spectral norm"])
    assert outcomes([program], tmp_path) == ["named"]


def test_drawn_members_are_as_in_one_process(tmp_path: Path) -> None:
    assert wrong([draw_members(seed) for seed in range(2)], tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_many_drawn_members_are_as_in_one_process(first: int, tmp_path: Path) -> None:
    programs = [draw_members(seed) for seed in range(first, first + 20)]
    assert wrong(programs, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", PLACES)
def test_each_way_is_as_in_one_process(place: str, tmp_path: Path) -> None:
    assert wrong(each_part(place), tmp_path) == []
