"""However a run under Accelerate or Trainer ends, all its ranks end, and somebody says
which rank it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT, going_on, run_script

SCRIPT = ROOT / "tests" / "accelerate" / "scripts" / "ending.py"


def end(kind: str, ranks: int, event: str, rank: int, folder: Path) -> str:
    """Run the script, which must not come to its own end nor leave a rank behind; what
    it wrote to stderr."""
    pids = folder / "pids"
    pids.mkdir()
    done = run_script(
        [SCRIPT, kind, event, str(rank), pids],
        nproc=ranks,
        env={
            "SMP_SHARD_DEGREE": "2",
            "SMP_RANKS_PER_NODE": "2",
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.returncode != 0 and "the run came to its end" not in done.stdout
    assert sorted(path.name for path in pids.iterdir()) == [
        str(number) for number in range(ranks)
    ], done.stderr
    alive = going_on([int(path.read_text()) for path in pids.iterdir()], str(pids))
    assert not alive, f"ranks with process ids {alive} go on; stderr:\n{done.stderr}"
    return done.stderr


CASES = [("loop", 2, 1), ("trainer", 4, 2), ("loop", 4, 2), ("loop", 2, 0)]


@pytest.mark.slow  # in the normal run: tests/lightning/test_endings.py
@pytest.mark.parametrize(("kind", "ranks", "rank"), CASES)
def test_a_killed_rank_ends_the_run_and_is_named(
    kind: str, ranks: int, rank: int, tmp_path: Path
) -> None:
    stderr = end(kind, ranks, "kill", rank, tmp_path)
    assert re.search(
        rf"torch-smp, rank (?!{rank}:)\d: .*rank {rank} was lost", stderr
    ), stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "rank"), [*CASES, ("trainer", 2, 1)])
def test_an_exception_in_user_code_ends_all_ranks(
    kind: str, ranks: int, rank: int, tmp_path: Path
) -> None:
    assert "ArithmeticError: the user's own mistake" in end(
        kind, ranks, "raise", rank, tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("loop", 0), ("trainer", 1)])
def test_a_rank_that_is_stopped_ends_the_run_when_the_timeout_is_over(
    kind: str, rank: int, tmp_path: Path
) -> None:
    stderr = end(kind, 2, "stop", rank, tmp_path)
    assert re.search(rf"torch-smp, rank {1 - rank}: .*rank {rank} was lost", stderr), (
        stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_rank_that_leaves_the_others_is_named(kind: str, tmp_path: Path) -> None:
    assert re.search(
        r"the run ended on rank 1 \(after optimizer step 2\)",
        end(kind, 2, "exit", 1, tmp_path),
    )


# In the normal run: a group that one rank adds, in tests/accelerate/test_attached.py.
@pytest.mark.slow
def test_a_hook_that_only_one_rank_registers_ends_the_run_and_is_named(
    tmp_path: Path,
) -> None:
    """In a window of two micro-batches: the ranks would wait in different
    collectives."""
    stderr = end("loop", 2, "hook", 1, tmp_path)
    expected = r"rank 1 is at layer\.weight\.register_hook\(\.\.\.\) and rank 0 at the model's next forward pass"
    assert re.search(expected, stderr), stderr
