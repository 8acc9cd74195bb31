"""How the watch over ranks ends: with its launcher, alone, when told to, or with others
who still read."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import smp_core.watch.rank_watch as rank_watch
from smp_core.watch.preemption import Preemption
from smp_core.watch.rank_watch import RankWatch
from tests.core.watch.liveness_runs import INTERVAL, Report, after, silence_rank_2
from tests.harness import run_ranks


def told_to_end_while_it_looks() -> tuple[Report, list[int], bool]:
    """What rank 0 reports when each of its looks is met by SIGTERM; the signals that
    were handled, and whether the handler is there again."""
    handled: list[int] = []

    def handler(number: int, frame: object) -> None:
        handled.append(number)

    def prepare(watching: RankWatch, rank: int) -> None:
        look = watching._look

        def look_under_fire() -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return look()

        watching._look = look_under_fire  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, handler)
        silence_rank_2(watching, rank)

    reported = after(prepare, reporting=[0], alive=[0, 1, 3])
    return reported, handled, signal.getsignal(signal.SIGTERM) is handler


def test_a_launcher_that_wants_the_survivors_to_end_does_not_keep_them_from_telling() -> (
    None
):
    (found, text), handled, restored = run_ranks(told_to_end_while_it_looks, 4)[0]
    assert found is not None and "rank 2 was lost" in found and found in text
    assert handled == [] and restored


def threads_of_runs() -> list[int]:
    """This process's threads behind the first and the third of three runs."""
    counts = []
    for _ in range(3):
        Preemption(grace=30.0)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[::2]


def test_later_runs_of_a_process_leave_no_more_threads_for_notices() -> None:
    for first, third in run_ranks(threads_of_runs, 2):
        assert first == third


def begin_and_wait(begun: Any) -> None:
    begun.set()
    threading.Event().wait()


def test_what_the_users_code_forked_ends_when_it_is_told_to() -> None:
    # A child that only notes the signal would be waited for at the parent's end.
    preemption = Preemption(grace=30.0)
    preemption.install()
    try:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=begin_and_wait, args=(begun,), daemon=True)
        child.start()
        # A child that is still being forked forgets signals.
        begun.wait()
        assert child.pid is not None
        # A notice to a whole process group, of which the child is no reason to end.
        os.kill(child.pid, signal.SIGUSR1)
        child.terminate()
        child.join(60.0)
        status = child.exitcode
        child.kill()
    finally:
        preemption.restore()
    assert status == -signal.SIGTERM


def test_one_process_watches_nobody() -> None:
    assert RankWatch.start(interval=INTERVAL) is None


def stop_twice() -> None:
    # Stop waits for its thread for two intervals at most.
    watching = RankWatch.start(interval=60.0)
    assert watching is not None
    watching.stop()
    assert not watching._thread.is_alive()
    watching.stop()
    dist.barrier()


def test_stopping_is_final_and_may_be_repeated() -> None:
    run_ranks(stop_twice, 4)


def meets_the_end_of(failing: int) -> str:
    """What a rank hears that comes to a call behind the failure of another one."""
    watching = RankWatch.start(interval=INTERVAL)
    assert watching is not None
    if dist.get_rank() == failing:
        watching.report(ValueError("no such row"))
        watching.stop()
        return ""
    with pytest.raises(RuntimeError) as caught:
        watching.meetings.meet("trainer.predict(...)", limit=600.0)
    watching.stop()
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_behind_a_failure_is_told_of_it(failing: int) -> None:
    said = run_ranks(meets_the_end_of, 2, failing)[1 - failing]
    assert said.startswith(
        f"rank {1 - failing} is at trainer.predict(...) and rank {failing} at the end "
        "of its process, after it failed with ValueError: no such row: "
    )


def rank_0_ends_first() -> bool:
    watching = RankWatch.start()
    assert watching is not None
    board, rank = watching.boards[0], watching.rank
    while rank > 0 and "left" not in watching._read(board)[0] and not board.closed:
        time.sleep(INTERVAL / 4)
    watching.stop()
    return (
        rank > 0
        or "left" in watching._read(board)[1]
        or bool(board.ask("get", "done/1"))
    )


def test_the_store_stays_until_the_others_are_done_with_it() -> None:
    """It is in rank 0's process, and says why that has ended."""
    assert run_ranks(rank_0_ends_first, 2) == [True, True]


@pytest.mark.parametrize(
    ("restarts", "shared", "warned"),
    [("3", "True", True), ("3", "False", False), ("0", "True", False)],
)
def test_restarts_that_may_fail_while_connecting_are_warned_of(
    restarts: str,
    shared: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": shared,
        "RANK": "0",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    rank_watch._warn_of_shared_store()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warned


class Watching:
    """A watch of one process, whose ranks have made no call into a model."""

    meetings = SimpleNamespace(forwards=0)

    def stop(self) -> None:
        pass


def test_a_watch_at_the_address_of_an_earlier_one_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[int] = []
    monkeypatch.setattr(rank_watch, "meet", lambda *_: met.append(1))
    monkeypatch.setattr(rank_watch, "_watch", None)
    for number in range(1, 5):
        # Memory that was given back last is taken first.
        rank_watch._watch = Watching()  # type: ignore[assignment]
        rank_watch.meet_between_calls("here", [0])
        assert len(met) == number
        rank_watch.stop_watching()
