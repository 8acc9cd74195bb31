"""However a run ends, all its ranks end, the exit status says so, and somebody says
which rank it was."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from smp_core.checkpoint import is_checkpoint
from tests.harness import free_port, going_on, run_script
from tests.lightning.ending_script import TIMEOUT

# Lightning's launcher looks every 5 s for dead ranks and kills the others then, perhaps
# before they have had the 2 s that the watch takes; its own line names the rank too.
BY_LIGHTNING = r"|\[rank: {rank}\] Child process with PID \d+ terminated with code -9"


def end(
    launcher: str,
    ranks: int,
    event: str,
    rank: int,
    folder: Path,
    timeout: float | None = None,
    stages: int = 1,
) -> subprocess.CompletedProcess[str]:
    """Run the script; it must not come to its own end on all ranks, nor leave one
    behind."""
    arguments = [
        str(ranks),
        event,
        str(rank),
        str(folder),
        *([] if timeout is None else [str(timeout)]),
    ]
    if stages > 1:
        arguments = [*arguments[:4], str(timeout or TIMEOUT), str(stages)]
    done = run_script(
        ["-m", "tests.lightning.ending_script", *arguments],
        nproc=ranks if launcher == "torchrun" else None,
        env={"MASTER_PORT": str(free_port())} if launcher == "lightning" else None,
    )
    assert done.returncode != 0, done.stderr
    assert done.stdout.count("the run came to its end") == (event == "short")
    assert sorted(path.name for path in folder.iterdir()) == [
        str(number) for number in range(ranks)
    ], done.stderr
    pids = [int(path.read_text()) for path in folder.iterdir()]
    alive = going_on(pids, str(folder))
    assert not alive, f"ranks with process ids {alive} go on; stderr:\n{done.stderr}"
    return done


def assert_lost(launcher: str, rank: int, stderr: str) -> None:
    said = rf"torch-smp, rank (?!{rank}:)\d: rank {rank} was lost"
    if launcher == "lightning":
        said += BY_LIGHTNING.format(rank=rank)
    assert re.search(said, stderr), stderr


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Under torchrun, which ends the survivors if they take too long to find out."""
    assert_lost("torchrun", 1, end("torchrun", 2, "kill", 1, tmp_path).stderr)


IN_STAGES = [(2, 0), (2, 1), (4, 0), (4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), IN_STAGES)
def test_a_killed_rank_ends_the_other_pipeline_stage(
    ranks: int, rank: int, tmp_path: Path
) -> None:
    """By itself: torchrun has to kill nobody, which it does after 30 s."""
    stderr = end("torchrun", ranks, "kill", rank, tmp_path, stages=2).stderr
    assert_lost("torchrun", rank, stderr)
    assert "forcefully exiting" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), IN_STAGES)
def test_an_exception_in_one_pipeline_stage_ends_the_other(
    ranks: int, rank: int, tmp_path: Path
) -> None:
    stderr = end("torchrun", ranks, "raise", rank, tmp_path, stages=2).stderr
    assert "ArithmeticError: the user's own mistake" in stderr


@pytest.mark.slow
def test_an_exception_in_user_code_ends_all_ranks(tmp_path: Path) -> None:
    """Under Lightning's own launcher; the traceback is there and a surviving rank says
    whose it is."""
    stderr = end("lightning", 2, "raise", 1, tmp_path).stderr
    assert "ArithmeticError: the user's own mistake" in stderr
    assert re.search(
        r"torch-smp, rank 0: rank 1 failed: ArithmeticError|\[rank: 1\] Child process",
        stderr,
    ), stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, ranks, rank",
    [("lightning", 2, 1), ("lightning", 4, 2), ("torchrun", 4, 2)],
)
def test_a_killed_rank_is_named_under_every_launcher(
    launcher: str, ranks: int, rank: int, tmp_path: Path
) -> None:
    assert_lost(launcher, rank, end(launcher, ranks, "kill", rank, tmp_path).stderr)


@pytest.mark.slow
def test_the_loss_of_rank_0_is_named(tmp_path: Path) -> None:
    """It keeps the signs of life; that they are gone is the sign."""
    assert_lost("torchrun", 0, end("torchrun", 2, "kill", 0, tmp_path).stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, rank", [("lightning", 0), ("torchrun", 0), ("torchrun", 1)]
)
def test_an_exception_ends_all_ranks_under_every_launcher(
    launcher: str, rank: int, tmp_path: Path
) -> None:
    assert (
        "ArithmeticError: the user's own mistake"
        in end(launcher, 2, "raise", rank, tmp_path).stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("event", ["interrupt", "interrupt-all"])
def test_ctrl_c_ends_all_ranks(event: str, tmp_path: Path) -> None:
    done = end("lightning", 2, event, 1, tmp_path)
    assert "Detected KeyboardInterrupt" in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "rank", "ranks"),
    [("stop", 0, 2), ("stop", 1, 3), ("stop-in-behind", 1, 2)],
)
def test_a_rank_that_is_stopped_ends_the_run_when_the_timeout_is_over(
    event: str, rank: int, ranks: int, tmp_path: Path
) -> None:
    """Its connections stay open; also rank 0, which keeps signs of life, and while a
    save is in flight."""
    (tmp_path / "pids").mkdir()
    assert_lost(
        "torchrun",
        rank,
        end("torchrun", ranks, event, rank, tmp_path / "pids", 20.0).stderr,
    )


STRUCK = [
    (f"{what}-in-{place}", rank)
    for what in ("kill", "stop", "cut")
    for place, rank in (("save", 1), ("load", 0))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "rank"),
    [*STRUCK, ("kill-in-behind", 0), ("cut-in-behind", 1), ("cut", 1), ("cut", 0)],
)
def test_a_rank_that_is_lost_in_a_save_or_a_load_ends_the_run(
    event: str, rank: int, tmp_path: Path
) -> None:
    """A rank that is cut off is lost to the others, as they are to it."""
    (tmp_path / "pids").mkdir()
    stderr = end(
        "torchrun", 2, event, rank, tmp_path / "pids", 20.0 if "stop" in event else None
    ).stderr
    if "cut" in event:
        assert re.search(r"torch-smp, rank \d: ", stderr), stderr
    else:
        assert_lost("torchrun", rank, stderr)


@pytest.mark.slow
def test_a_loss_is_told_when_the_rank_that_looks_first_is_lost_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "pids").mkdir()
    stderr = end("torchrun", 3, "stop-in-report", 1, tmp_path / "pids", 20.0).stderr
    assert re.search(r"torch-smp, rank 2: .*rank[s]? .*1.* lost", stderr), stderr


@pytest.mark.slow
def test_a_rank_that_fails_alone_does_not_wait_for_others_to_save_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "pids").mkdir()
    stderr = end("torchrun", 2, "raise-saving", 1, tmp_path / "pids").stderr
    assert "OnExceptionCheckpoint saves no checkpoint" in stderr
    assert "ArithmeticError: the user's own mistake" in stderr
    assert not (tmp_path / "on_exception.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            "exit",
            r"rank 1 failed: SystemExit: enough \(ending_script.py:\d+ in strike\)",
        ),
        ("short", r"the run ended on rank 1 \(after optimizer step 2\)"),
    ],
)
def test_a_rank_that_leaves_the_others_is_named_with_the_place(
    event: str, said: str, tmp_path: Path
) -> None:
    assert re.search(said, end("torchrun", 2, event, 1, tmp_path).stderr)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_a_launcher_that_is_told_to_end_leaves_a_checkpoint(
    launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "pids").mkdir()
    done = end(launcher, 2, "launcher", 1, tmp_path / "pids")
    assert is_checkpoint(tmp_path / "hpc_ckpt_1.ckpt"), done.stderr
    assert launcher == "torchrun" or done.returncode == 143
