"""Work that takes long is named while it goes on, by a clock of the test's own;
commands and calls name theirs."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from smp_core import entry
from smp_core.checkpoint import (
    commands,
    full_state,
    full_state_dict,
    live_state,
    load_checkpoint,
    reader,
    save_checkpoint,
    save_full_state,
    writer,
)
from smp_core.cli import app
from smp_core.outside import long_wait
from smp_core.planner import commands as planner_commands
from smp_core.planner.planner import NothingFits
from smp_core.verify import runs
from smp_core.verify.request import Request
from tests.core.equivalence import build
from tests.harness import run_ranks


class Clock:
    """A clock that goes on by what is waited, until the work ends at ``end``; the work
    waits for it."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 100.0, 100.0 + end
        self.reached = threading.Event()

    def __call__(self) -> float:
        return self.now

    def pause(self, ended: threading.Event, seconds: float) -> bool:
        assert seconds > 0
        if self.now + seconds > self.end:
            self.now = self.end
            self.reached.set()
            return True
        self.now += seconds
        return False


def looking() -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name == "smp-long-wait"
    ]


def lines_of(seconds: float, **options: Any) -> list[str]:
    clock, said = Clock(seconds), io.StringIO()
    with contextlib.redirect_stderr(said):
        with long_wait("planning", clock=clock, pause=clock.pause, **options):
            assert options or clock.reached.wait(60)
    return said.getvalue().splitlines()


def test_work_that_is_done_soon_is_not_named() -> None:
    assert lines_of(9.9) == []


def test_long_work_is_named_at_growing_intervals_and_once_it_is_done() -> None:
    assert lines_of(85.0) == [
        "torch-smp: planning: 10 s so far",
        "torch-smp: planning: 20 s so far",
        "torch-smp: planning: 40 s so far",
        "torch-smp: planning: 80 s so far",
        "torch-smp: planning: 85 s in all",
    ]


def test_another_process_writes_nothing_and_starts_no_thread() -> None:
    with long_wait("planning", here=False):
        assert not looking()


def test_an_error_of_the_work_is_its_own_and_ends_the_thread() -> None:
    with pytest.raises(ValueError, match="no"), long_wait("planning"):
        assert looking()
        raise ValueError("no")
    assert not looking()


def test_a_late_look_says_one_line_for_the_times_it_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process that was stopped for a minute goes on with the next time."""
    times = iter([70.0, 5.0])
    clock = Clock(1000.0)

    def late(ended: threading.Event, seconds: float) -> bool:
        clock.now += next(times, 0.0)
        if clock.now > 170.0:
            clock.reached.set()
            return ended.wait(60)
        return False

    with long_wait("loading", clock=clock, pause=late):
        assert clock.reached.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "torch-smp: loading: 70 s so far",
        "torch-smp: loading: 75 s in all",
    ]


# What names its work: on ranks, and in commands.


class Noted:
    """What was named, in the place of ``long_wait``: the work, and whether this process
    would write."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def __call__(self, what: str, *, here: bool = True) -> Iterator[None]:
        self.seen.append((what, here))
        yield


def name_on_ranks(folder: str) -> list[tuple[str, bool]]:
    noted = Noted()
    with pytest.MonkeyPatch.context() as patch:
        for module in (entry, live_state, reader, writer):
            patch.setattr(module, "long_wait", noted)
        module = build(torch.float32, shard_degree=2).module
        state = {"state_dict": module.state_dict()}
        save_checkpoint(f"{folder}/sharded", state)
        load_checkpoint(f"{folder}/sharded", state)
        save_full_state(f"{folder}/full.ckpt", state)
        full_state_dict(module)
    assert {here for _, here in noted.seen} == {dist.get_rank() == 0}
    return noted.seen


def test_start_up_saves_and_loads_are_named_on_rank_0(tmp_path: Path) -> None:
    works = [
        "sharding the model",
        f"saving {tmp_path}/sharded",
        f"loading {tmp_path}/sharded",
        f"writing {tmp_path}/full.ckpt",
        "gathering unsharded weights",
    ]
    for seen in run_ranks(name_on_ranks, 2, str(tmp_path)):
        assert [what for what, _ in seen] == works


def test_commands_name_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    for module in (commands, full_state, planner_commands, runs):
        monkeypatch.setattr(module, "long_wait", noted)
    source, out = tmp_path / "sharded", tmp_path / "out"
    save_checkpoint(source, {"state_dict": {"weight": torch.ones(2)}})
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")

    def command(*arguments: object) -> int:
        return (
            CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code
        )

    assert command("checkpoint", "verify", source) == 0
    assert (
        command("checkpoint", "import", tmp_path / "other.pt", tmp_path / "imported")
        == 0
    )
    assert (
        command(
            "checkpoint", "export", source, tmp_path / "exported", "--format", "dcp"
        )
        == 0
    )
    assert command("checkpoint", "consolidate", source, out) == 0
    works = [
        f"checking {source}",
        f"importing {tmp_path / 'other.pt'}",
        f"exporting {source}",
    ]
    assert [what for what, _ in noted.seen] == [*works, f"checking {source}", "writing"]

    def nothing(*_: Any, **__: Any) -> None:
        raise NothingFits("nothing", [])

    monkeypatch.setattr(planner_commands, "plan_model", nothing)
    assert (
        command(
            "plan",
            "gpt2-30b",
            "--cluster",
            "2xp4d",
            "--seq",
            2048,
            "--global-batch",
            64,
        )
        == 2
    )
    assert noted.seen[-1] == ("planning", True)


def test_runs_of_smp_verify_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    monkeypatch.setattr(runs, "long_wait", noted)

    class Ended:
        """A server whose processes have ended at once."""

        def start(self, *_: Any) -> int:
            return 1

        def ended(self) -> dict[int, int]:
            return {1: 0}

    every: Any = runs.Runs(Ended(), ["train.py"], 1.0)  # type: ignore[arg-type]
    for number, role in enumerate(("look", "ranks", "one process")):
        every.run(Request(role, str(tmp_path / str(number)), steps=1, ranks=2))  # type: ignore[arg-type]
    assert [what for what, _ in noted.seen] == [
        "looking at the script",
        "training on 2 ranks",
        "training in one process",
    ]
