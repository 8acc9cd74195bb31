"""Random programs played by ranks and by what measures them, and how the two differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.accelerate import loops
from tests.accelerate.program_runs import play_all
from tests.accelerate.programs import Program, samples_ranks
from tests.harness import run_ranks

# float64, a few steps of an optimizer that divides by small numbers.
TOLERANCE = 1e-9
# Trainer adds up the losses that it logs in float32.
LOGGED = ("loss", "train_loss")
LOGGED_TOLERANCE = 5e-6
# Errors of ours name a knob, and what to type.
REFUSALS = (
    "write ",
    "name the classes in",
    "leave it out",
    "type: ",
    "change per_device_train_batch_size",
    "not built yet",
    "register it before training",
)

Found = dict[str, Any] | str


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place at which two findings differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: names {sorted(map(str, ours))} against {sorted(map(str, theirs))}"
        pairs = [(f"{where}/{name}", ours[name], theirs[name]) for name in theirs]
        return next(
            filter(None, (difference(a, b, place) for place, a, b in pairs)), None
        )
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return (
                f"{where}: {len(ours)} against {len(theirs)}: {ours} against {theirs}"[
                    :2000
                ]
            )
        pairs = [
            (f"{where}/{place}", a, b)
            for place, (a, b) in enumerate(zip(ours, theirs, strict=True))
        ]
        return next(
            filter(None, (difference(a, b, place) for place, a, b in pairs)), None
        )
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if ours.shape != theirs.shape:
            return f"{where}: shapes {tuple(ours.shape)} against {tuple(theirs.shape)}"
        a, b = ours.double(), theirs.double()
        if torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return None
        return f"{where}: off by {(a - b).abs().max().item()}"
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        tolerance = (
            LOGGED_TOLERANCE if where.rpartition("/")[2] in LOGGED else TOLERANCE
        )
        same = (
            ours == theirs
            or abs(ours - theirs) <= tolerance * (1 + abs(theirs))
            or (ours != ours and theirs != theirs)
        )
        return None if same else f"{where}: {ours} against {theirs}"
    return None if ours == theirs else f"{where}: {ours} against {theirs}"


def problem(program: Program, ours: Sequence[Found], theirs: Found) -> str | None:
    """What is wrong with what the ranks found; "refused" if they refused the program in
    words."""
    words = [each for each in ours if isinstance(each, str)]
    if words and (len(words) < len(ours) or not isinstance(theirs, str)):
        last = words[0].strip().splitlines()
        refusal = words[0][words[0].rfind("\n", 0, -1) :]
        said = any(each in words[0].rpartition("Error: ")[2] for each in REFUSALS)
        known = "ValueError: " in words[0] or "NotImplementedError: " in words[0]
        if len(words) == len(ours) and said and known:
            return "refused"
        return f"an error on {len(words)} of {len(ours)} ranks: {refusal} {last[-1]}\n{words[0]}"
    if isinstance(theirs, str):
        return None if words else f"no error, where there is one: {theirs}"
    for rank, each in enumerate(ours):
        assert not isinstance(each, str)
        expected = dict(theirs)
        seen = dict(each)
        if rank:
            expected["files"], seen["files"] = {}, {}
        if program["lengths"] == "ragged" and program["by"] == "one process":
            seen, expected = _without_padding(seen), _without_padding(expected)
        found = difference(seen, expected)
        if found is not None:
            return f"rank {rank}: {found}"
    return None


def _without_padding(found: Any) -> Any:
    """Trainer's count of operations counts padded tokens, of which a longer batch has
    more."""
    if isinstance(found, dict):
        return {
            name: _without_padding(value)
            for name, value in found.items()
            if name not in ("flos", "total_flos")
        }
    return (
        [_without_padding(each) for each in found] if isinstance(found, list) else found
    )


def _by_ranks(
    programs: Sequence[Program],
    ranks_of: Callable[[Program], int],
    folder: Path,
    how: str,
    resume: bool,
) -> dict[int, list[Found]]:
    """What each rank found, by seed."""
    found: dict[int, list[Found]] = {}
    for world in (2, 4):
        some = [program for program in programs if ranks_of(program) == world]
        if not some:
            continue
        limit = 120.0 + 40 * len(some)
        of_ranks = run_ranks(
            play_all, world, some, folder, how, resume, ranks_per_node=2, timeout=limit
        )
        for number, program in enumerate(some):
            found[program["seed"]] = [each[number] for each in of_ranks]
    return found


def _expected(
    programs: Sequence[Program], folder: Path, resume: bool
) -> dict[int, Found]:
    """What stock Trainer finds: in one process, or on the ranks that read different
    samples."""

    def readers(program: Program) -> int:
        if program["by"] == "one process":
            return 1
        return program["resume"]["world"] if resume else samples_ranks(program)

    found = {
        seed: each[0]
        for seed, each in _by_ranks(programs, readers, folder, "stock", resume).items()
    }
    alone = [program for program in programs if readers(program) == 1]
    found |= {
        program["seed"]: one
        for program, one in zip(
            alone, play_all(alone, folder, "alone", resume), strict=True
        )
    }
    return found


def problems(programs: Sequence[Program], folder: Path) -> dict[int, str | None]:
    """What is wrong with each program, by seed; "refused"; None."""
    theirs_in, ours_in = folder / "expected", folder / "found"
    expected = _expected(programs, theirs_in, False)
    ours = _by_ranks(programs, lambda program: program["world"], ours_in, "smp", False)
    found = {
        program["seed"]: problem(
            program, ours[program["seed"]], expected[program["seed"]]
        )
        for program in programs
    }
    # Resumptions of those that are right, on another layout.
    resumed = []
    for program in programs:
        name = f"program-{program['seed']}"
        if (
            program["resume"] is None
            or found[program["seed"]] is not None
            or isinstance(expected[program["seed"]], str)
        ):
            continue
        if not list((theirs_in / name).glob("checkpoint-*")):
            continue
        if program["resume"]["stock"]:
            shutil.rmtree(ours_in / name)
            shutil.copytree(theirs_in / name, ours_in / name)
        resumed.append(program)
    if resumed:
        expected = _expected(resumed, theirs_in, True)
        ours = _by_ranks(
            resumed, lambda program: program["resume"]["world"], ours_in, "smp", True
        )
        for program in resumed:
            wrong = problem(program, ours[program["seed"]], expected[program["seed"]])
            found[program["seed"]] = (
                wrong if wrong in (None, "refused") else f"resumed, {wrong}"
            )
    return found


def loop_problems(drawn: Sequence[loops.Loop], folder: Path) -> dict[int, str | None]:
    """What is wrong with each bare loop, by seed; "refused"; None."""
    theirs = dict(
        zip(
            (loop["seed"] for loop in drawn),
            loops.play_all(list(drawn), folder / "alone", True),
            strict=True,
        )
    )
    found: dict[int, str | None] = {}
    for loop, ours in _loops_by_ranks(drawn, lambda loop: loop["world"], folder, False):
        found[loop["seed"]] = _loop_problem(loop, ours, theirs[loop["seed"]])
    resumed = []
    for loop in drawn:
        one = theirs[loop["seed"]]
        if (
            loop["resume"] is not None
            and found[loop["seed"]] is None
            and isinstance(one, dict)
            and "saved in" in one
        ):
            resumed.append(loop)
    for loop, ours in _loops_by_ranks(
        resumed, lambda loop: loop["resume"]["world"], folder, True
    ):
        one = theirs[loop["seed"]]
        assert isinstance(one, dict)
        wrong = _loop_problem(loop, ours, _rest(one, ours[0]))
        found[loop["seed"]] = (
            wrong if wrong in (None, "refused") else f"resumed, {wrong}"
        )
    return found


def _loops_by_ranks(
    drawn: Sequence[loops.Loop],
    ranks_of: Callable[..., int],
    folder: Path,
    resume: bool,
) -> Any:
    for world in (2, 4):
        some = [loop for loop in drawn if ranks_of(loop) == world]
        if not some:
            continue
        limit = 120.0 + 20 * len(some)
        of_ranks = run_ranks(
            loops.play_all,
            world,
            some,
            folder / "ranks",
            False,
            resume,
            ranks_per_node=2,
            timeout=limit,
        )
        for number, loop in enumerate(some):
            yield loop, [each[number] for each in of_ranks]


def _loop_problem(loop: loops.Loop, ours: Sequence[Found], theirs: Found) -> str | None:
    as_program = {"lengths": "fixed", "by": ""}
    if isinstance(theirs, str):
        return problem(as_program, ours, theirs)
    for name in ("states", "files"):
        theirs.setdefault(name, [])
    same: list[Found] = []
    for rank, each in enumerate(ours):
        if isinstance(each, dict) and rank:
            each = {**each, "states": theirs["states"], "files": theirs["files"]}
        same.append(each)
    return problem(as_program, same, theirs)


def _rest(theirs: dict[str, Any], ours: Found) -> dict[str, Any]:
    """What the uninterrupted run found from the place on where the other one began."""
    if isinstance(ours, str):
        return theirs
    rest = {}
    for name, value in theirs.items():
        if name == "saved in":
            continue
        is_series = isinstance(value, list) and name not in (
            "weights",
            "states",
            "files",
        )
        if is_series and name not in ours:
            continue  # nothing was left to train
        rest[name] = (
            value[len(value) - len(ours.get(name, [])) :] if is_series else value
        )
    return rest


def report(found: dict[int, str | None], programs: Sequence[Program]) -> str:
    """The programs that are wrong, with what is wrong about them."""
    by_seed = {program["seed"]: program for program in programs}
    wrong = {
        seed: each for seed, each in found.items() if each not in (None, "refused")
    }
    return "\n\n".join(f"{each}\n{by_seed[seed]}" for seed, each in wrong.items())
