"""Random programs of Lightning give what they give in one process, to 1e-9 in float64,
or are refused in words."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.lightning.axis_programs import draw_over_axes, module_over_axes
from tests.lightning.differences import differences
from tests.lightning.program_lives import draw_lives, live, rest_of
from tests.lightning.programs import Program, draw, module_of, run
from tests.logged import warnings_said

LIMIT = 240  # seconds, besides 30 for each program


def on_ranks(programs: list[tuple[Program, str]]) -> list[dict[str, Any] | str]:
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str] = []
    for program, folder in programs:
        try:
            found.append(
                run(
                    program,
                    folder,
                    make=module_over_axes if "axes" in program else module_of,
                )
            )
        except Exception as error:  # the same on all ranks
            found.append("".join(traceback.format_exception(error)))
    return found


def problems(
    programs: list[Program], folder: Path, ranks: int = 2
) -> list[tuple[Program, str]]:
    programs = [
        {**program, "train": program["train"] // ranks * ranks} for program in programs
    ]
    expected = on_ranks(
        [(program, str(folder / f"alone-{program['seed']}")) for program in programs]
    )
    placed = [
        (program, str(folder / f"ranks-{program['seed']}")) for program in programs
    ]
    of_ranks = run_ranks(
        on_ranks, ranks, placed, ranks_per_node=2, timeout=LIMIT + 30 * len(programs)
    )
    found = []
    for program, ours, theirs in zip(programs, of_ranks[0], expected, strict=True):
        if isinstance(theirs, str):
            found.append((program, f"fails in one process: {theirs[-600:]}"))
        elif isinstance(ours, str):
            found.append((program, ours[-1500:]))
        elif lines := differences(ours, theirs):
            found.append((program, "\n".join(lines[:6])))
    return found


def on_lives(
    lives: list[tuple[Program, str, int | None]],
) -> list[dict[str, Any] | str | None]:
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str | None] = []
    for program, folder, number in lives:
        try:
            found.append(live(program, folder, number))
        except Exception as error:  # the same on all ranks
            found.append("".join(traceback.format_exception(error)))
    return found


def problems_of_lives(
    programs: list[Program], folder: Path
) -> list[tuple[Program, str]]:
    """As `problems`, of runs that are interrupted and go on at other layouts."""
    expected = on_lives(
        [
            (program, str(folder / f"alone-{program['seed']}"), None)
            for program in programs
        ]
    )
    last: dict[int, Any] = {}
    for number in range(3):
        for ranks in (4, 2, 1):
            alive = [
                each
                for each in programs
                if number < len(each["lives"]) and each["lives"][number][0] == ranks
            ]
            alive = [
                each for each in alive if not isinstance(last.get(each["seed"]), str)
            ]
            lives = [
                (each, str(folder / f"ranks-{each['seed']}"), number) for each in alive
            ]
            if not lives:
                continue
            limit = LIMIT + 30 * len(lives)
            shown = run_ranks(
                on_lives, ranks, lives, ranks_per_node=min(2, ranks), timeout=limit
            )[0]
            last |= {each["seed"]: one for each, one in zip(alive, shown, strict=True)}
    found = []
    for program, whole in zip(programs, expected, strict=True):
        ours = last[program["seed"]]
        if isinstance(whole, str):
            found.append((program, f"fails in one process: {whole[-600:]}"))
        elif isinstance(ours, str):
            found.append((program, ours[-1500:]))
        elif (
            whole is not None
            and ours is not None
            and (lines := differences(*reversed(rest_of(whole, ours))))
        ):
            found.append((program, "\n".join(lines[:6])))
    return found


BASE: Program = {
    "optimization": "automatic", "optimizer": "AdamW", "schedule": "none", "train": 12, "val": 6, "loaders": "one",
    "val_loaders": 1, "overrides": [], "callbacks": [], "output": "tensor", "after": [],
    "flags": {"max_epochs": 2, "log_every_n_steps": 1}, "knobs": {"shard_degree": 1},
}  # fmt: skip
IN_STAGES: Program = {
    **BASE, "axes": "pipeline 2", "judged": False, "layers": 2, "tokens": 8, "uneven": False, "experts": False,
    "all gather": False, "train": 16, "knobs": {"shard_degree": 1, "pipeline_parallel_degree": 2},
}  # fmt: skip
# What was wrong once.
WRONG_ONCE: dict[str, Program] = {
    "an average outlives its fit": {"callbacks": ["ema"], "after": ["validate best", "test", "predict"]},
    "anomalies in gradients of experts": {
        **IN_STAGES, "axes": "experts 2", "judged": True, "experts": True,
        "knobs": {"shard_degree": 2, "expert_parallel_degree": 2},
        "flags": {**BASE["flags"], "max_epochs": 1, "detect_anomaly": True},
    },
}  # fmt: skip

# And in runs that go on in the middle of an epoch.
WRONG_WHEN_GOING_ON: dict[str, Program] = {
    # Behind the end of the shorter of two loaders; behind a validation that a schedule
    # looks at.
    "windows by epoch": {
        "callbacks": ["accumulation"], "schedule": "plateau", "loaders": "list, all", "train": 20,
        "optimizer": "Adagrad", "place": (1, 0.9),
    },
    "averaged, in a window": {
        "callbacks": ["swa"], "schedule": "step", "train": 16, "place": (0, 0.0),
        "flags": {**BASE["flags"], "accumulate_grad_batches": 2},
    },
    "a number is trained on one stage": {**IN_STAGES, "place": (1, 0.0)},
}  # fmt: skip


def test_what_was_wrong_once_is_as_in_one_process(tmp_path: Path) -> None:
    programs = [
        {**BASE, **each, "seed": number}
        for number, each in enumerate(WRONG_ONCE.values())
    ]
    assert problems(programs, tmp_path) == []


def test_what_was_wrong_when_runs_went_on_is_as_in_one_process(tmp_path: Path) -> None:
    programs = []
    for number, each in enumerate(WRONG_WHEN_GOING_ON.values()):
        program = {**BASE, **each, "seed": number}
        program["flags"] = {**program["flags"], "max_epochs": 3}
        lives = [
            (2, program["knobs"], *program["place"]),
            (2, program["knobs"], -1, 0.0),
        ]
        programs.append({**program, "lives": lives})
    assert problems_of_lives(programs, tmp_path) == []


def test_a_drawn_program_is_as_in_one_process(tmp_path: Path) -> None:
    assert problems([draw(seed) for seed in range(2)], tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_drawn_programs_are_as_in_one_process(
    first: int, ranks: int, tmp_path: Path
) -> None:
    assert (
        problems([draw(seed) for seed in range(first, first + 50)], tmp_path, ranks)
        == []
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_many_drawn_programs_over_axes_are_as_in_one_process(
    first: int, tmp_path: Path
) -> None:
    assert (
        problems(
            [draw_over_axes(seed) for seed in range(first, first + 20)], tmp_path, 4
        )
        == []
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_many_drawn_programs_go_on_at_other_layouts(first: int, tmp_path: Path) -> None:
    assert (
        problems_of_lives(
            [draw_lives(seed) for seed in range(first, first + 20)], tmp_path
        )
        == []
    )


def said_of_gradients(programs: list[tuple[Program, str]]) -> list[list[str]]:
    """What is said on this rank of gradients, in each of the programs."""
    found: list[list[str]] = []
    for program, folder in programs:
        make = module_over_axes if "axes" in program else module_of
        with warnings_said() as said:
            run(program, folder, make=make)
        found.append([line for line in said if "gradients" in line])
    return found


def test_hooks_that_look_for_gradients_where_there_are_none_are_named(
    tmp_path: Path,
) -> None:
    hooks = {
        "overrides": ["on_before_optimizer_step", "on_after_backward"],
        "callbacks": ["edits gradients", "stop"],
    }
    world = {
        **BASE,
        **hooks,
        "knobs": {"shard_degree": 1, "optimizer_shard": "world"},
        "seed": 0,
    }
    stages = {**IN_STAGES, **hooks, "seed": 1}
    first, other = run_ranks(
        said_of_gradients,
        2,
        [(world, str(tmp_path / "0")), (stages, str(tmp_path / "1"))],
        ranks_per_node=2,
    )
    assert [len(said) for said in first] == [1, 1] and other == [[], []]
    for (said,), why in zip(
        first,
        ("no gradients on parameters", "gradients of its own stage's"),
        strict=True,
    ):
        assert (
            why in said
            and "what on_before_optimizer_step and Edits.on_before_optimizer_step"
            in said
        )
