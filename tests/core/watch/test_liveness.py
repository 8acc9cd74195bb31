"""Who was lost, from the signs of life that every rank leaves beside the collectives.

A lost rank is played by one whose signs stop (or, for rank 0, whose store closes) while
its process lives on, so that it can report to the test. A look, which takes four
intervals of the clock elsewhere, ends here when every rank that lives has given new
signs: however busy the machine is, none of them is taken for lost. Real deaths, by the
clock, are in the tests of the faces."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import smp_core.watch.meeting as meeting
import smp_core.watch.rank_watch as rank_watch
import smp_core.watch.signs as signs
from smp_core.watch.rank_watch import RankWatch
from smp_core.watch.whereabouts import here
from tests.core.watch.liveness_runs import (
    INTERVAL,
    LONG,
    Report,
    after,
    fall_silent,
    leave,
    report,
    silence_rank_2,
    watch,
)
from tests.harness import run_ranks


def written(reports: list[Report]) -> str:
    """What all ranks wrote together: one line by one of them."""
    lines = [text for _, text in reports if text]
    assert len(lines) == 1, lines
    assert lines[0].count("\n") == 1
    return lines[0]


def take_board_away(watching: RankWatch) -> None:
    """As if this rank's process, which keeps one, had gone."""
    for board in watching.boards:
        if board.keeper == watching.rank:
            board.close()
            # Until the board's thread has done it.
            signs._await(asyncio.sleep(INTERVAL))


def rank_2_is_silent() -> Report:
    return after(silence_rank_2, reporting=[0, 1], alive=[0, 1, 3])


def test_a_rank_that_gives_no_sign_of_life_is_named_with_its_step() -> None:
    reports = run_ranks(rank_2_is_silent, 4)
    for found, _ in reports[:2]:
        assert (
            found
            == "rank 2 was lost: no sign of life any more; it was in optimizer step 7"
        )
    assert "rank 2 was lost" in written(reports)


def one_looks_after_the_other() -> Report:
    """Rank 0 has ended when rank 1 meets its loss, as in another pipeline stage."""
    watching, rank = watch(), dist.get_rank()
    silence_rank_2(watching, rank)
    result = report(watching, [0, 1, 3]) if rank == 0 else (None, "")
    if rank == 1:
        while not watching._heard:
            time.sleep(INTERVAL / 4)
    dist.monitored_barrier(timeout=LONG)
    if rank in (0, 3):
        take_board_away(watching)
    dist.monitored_barrier(timeout=LONG)
    if rank == 1:
        with mock.patch.object(
            watching, "_compare", side_effect=AssertionError("looked again")
        ):
            result = report(watching, [])
    dist.monitored_barrier(timeout=LONG)
    leave(watching)
    return result


def test_who_meets_a_loss_that_another_rank_has_found_out_does_not_look_again() -> None:
    reports = run_ranks(one_looks_after_the_other, 4)
    assert (
        reports[1][0]
        == reports[0][0]
        == "rank 2 was lost: no sign of life any more; it was in optimizer step 7"
    )
    written(reports)


def fail_on_rank_1(watching: RankWatch, rank: int) -> None:
    if rank == 1:
        assert report(watching, [], ValueError("the sample is broken")) == (None, "")


def rank_1_fails() -> Report:
    return after(fail_on_rank_1, reporting=[0, 2], alive=[0, 1, 2, 3])


def test_a_rank_that_fails_with_an_error_of_its_own_is_named_with_it() -> None:
    reports = run_ranks(rank_1_fails, 4)
    for rank in (0, 2):
        assert reports[rank][0] == "rank 1 failed: ValueError: the sample is broken"
    assert "rank 1 failed: ValueError: the sample is broken" in written(reports)


def read_a_database() -> None:
    raise RuntimeError("the feature store timed out: connection refused")


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> int:
        threading.Event().wait()
        return place


def fail_elsewhere_on_rank_1(watching: RankWatch, rank: int, kind: str) -> None:
    if rank != 1:
        return
    loader = DataLoader(Slow(), num_workers=1, timeout=0.1)
    try:
        next(iter(loader)) if kind == "loader" else read_a_database()
    except RuntimeError as error:
        assert report(watching, [], error) == (None, "")


def rank_1_fails_elsewhere(kind: str) -> Report:
    prepare = functools.partial(fail_elsewhere_on_rank_1, kind=kind)
    return after(prepare, reporting=[0], alive=[0, 1])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("loader", "RuntimeError: DataLoader timed out after 0.1 seconds"),
        ("database", "RuntimeError: the feature store timed out: connection refused"),
    ],
)
def test_connections_that_are_no_ranks_are_that_ranks_own_failure(
    kind: str, text: str
) -> None:
    found = run_ranks(rank_1_fails_elsewhere, 2, kind)[0][0]
    assert found is not None and found.startswith(f"rank 1 failed: {text}")


def fail_and_silence(watching: RankWatch, rank: int) -> None:
    fail_on_rank_1(watching, rank)
    silence_rank_2(watching, rank)


def rank_1_fails_and_rank_2_is_silent() -> Report:
    return after(fail_and_silence, reporting=[0], alive=[0, 1, 3])


def test_several_lost_ranks_are_all_named() -> None:
    found = run_ranks(rank_1_fails_and_rank_2_is_silent, 4)[0][0]
    assert found is not None
    assert found.startswith("rank 1 failed: ValueError")
    assert "; rank 2 was lost" in found


def end_rank_1(watching: RankWatch, rank: int) -> None:
    if rank == 1:
        watching.stop()
    silence_rank_2(watching, rank)


def rank_1_ends_and_rank_2_is_silent() -> Report:
    return after(end_rank_1, reporting=[0], alive=[0, 3])


def test_a_rank_that_ended_in_good_order_is_not_lost() -> None:
    found = run_ranks(rank_1_ends_and_rank_2_is_silent, 4)[0][0]
    assert found is not None
    assert "rank 2" in found
    assert "rank 1" not in found


def fall_behind(watching: RankWatch, rank: int) -> None:
    watching.step = 5 if rank == 1 else 6
    watching._beat()


def rank_1_is_behind() -> Report:
    return after(fall_behind, reporting=[0, 2], alive=[0, 1, 2, 3])


def test_when_all_live_the_ranks_that_are_behind_are_named() -> None:
    reports = run_ranks(rank_1_is_behind, 4)
    for rank in (0, 2):
        found = reports[rank][0]
        assert found is not None
        assert found.startswith(
            "all ranks are alive, but behind are: rank 1 (in optimizer step 5 of 6): "
        )
        assert "same number of batches" in found
    written(reports)


def end_early(watching: RankWatch, rank: int) -> None:
    watching.step = 5 if rank == 0 else 6
    if rank == 0:
        watching.stop()
    watching._beat()


def rank_0_ends_early(gone: bool) -> Report:
    """And, if ``gone``, its process with the store."""

    def prepare(watching: RankWatch, rank: int) -> None:
        end_early(watching, rank)
        if not gone:
            return
        while rank and not watching.meetings.rank_0_ended:
            time.sleep(INTERVAL / 4)
        dist.barrier()
        if rank == 0:
            take_board_away(watching)

    return after(prepare, reporting=[1, 2], alive=[1, 2, 3])


@pytest.mark.parametrize("gone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_ran_out_of_batches_is_not_lost(gone: bool) -> None:
    for found, _ in run_ranks(rank_0_ends_early, 4, gone)[1:3]:
        assert found is not None and "lost" not in found
        assert (
            "ended" in found and "rank 0" in found and "same number of batches" in found
        )


def all_are_well() -> Report:
    return after(lambda watching, rank: None, reporting=[0, 2], alive=[0, 1, 2, 3])


def test_nothing_is_said_when_nothing_is_wrong_elsewhere() -> None:
    assert run_ranks(all_are_well, 4) == [(None, "")] * 4


def lose_keepers(watching: RankWatch, lost: list[int]) -> None:
    dist.barrier()
    if watching.rank in lost:
        fall_silent(watching)
        take_board_away(watching)


def keepers_are_gone(lost: list[int]) -> Report:
    alive = [rank for rank in (1, 2, 3) if rank not in lost] if lost != [0, 3] else []
    return after(
        lambda watching, rank: lose_keepers(watching, lost),
        reporting=[1, 2],
        alive=alive,
    )


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param([0], marks=pytest.mark.slow),
        [3],
        pytest.param([0, 3], marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_who_keeps_the_signs_of_life_is_told_by_what_the_other_keeps(
    lost: list[int],
) -> None:
    for found, text in run_ranks(keepers_are_gone, 4, lost)[1:3]:
        assert found is not None and (not text or found in text)
        if lost == [0, 3]:
            assert found.startswith(
                "rank 0 and rank 3, which keep the signs of life, were lost"
            )
        else:
            assert (
                found
                == f"rank {lost[0]} was lost: no sign of life any more; it was in optimizer step 0"
            )


def rank_0_is_stopped() -> Report:
    """By SIGSTOP: its connections are open, and never answer."""
    watching, rank = watch(), dist.get_rank()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    survivors = dist.new_group([1, 2])
    result: Report = None, ""
    if rank > 0:
        if rank == 1:
            os.kill(pids[0], signal.SIGSTOP)
        dist.barrier(survivors)
        with mock.patch.object(signs, "PATIENCE", 4.0):
            watching.meetings.meet("a call of all ranks")
            result = report(watching, [1, 2])
        dist.barrier(survivors)
        if rank == 1:
            os.kill(pids[0], signal.SIGCONT)
    dist.monitored_barrier(timeout=LONG)
    leave(watching)
    return result


def test_a_stopped_rank_0_is_named_by_another_rank() -> None:
    reports = run_ranks(rank_0_is_stopped, 3)
    for found, _ in reports[1:]:
        assert found is not None and found.startswith(
            "rank 0 was lost: no sign of life any more"
        )
    written(reports)


def one_saves_what_it_has_caught() -> str:
    """Rank 0, while the others wait for it in a collective."""
    watching, said = watch(), ""
    watching.meetings.limit = LONG.total_seconds()
    if dist.get_rank() == 0:
        with mock.patch.object(meeting, "_STANDSTILL", 4 * INTERVAL):
            try:
                raise ArithmeticError("its own")
            except ArithmeticError:
                with pytest.raises(RuntimeError) as refused:
                    watching.meetings.meet("trainer.save_model(...)")
        said = str(refused.value)
    with here.waiting("a sum"):
        dist.barrier()
    leave(watching)
    return said


def test_a_rank_that_saves_alone_what_it_has_caught_does_not_wait_for_long() -> None:
    said = run_ranks(one_saves_what_it_has_caught, 3)[0]
    assert said.startswith("rank 0 is at trainer.save_model(...) and rank 1 at a sum: ")
    assert said.endswith("rank 0 came there after ArithmeticError: its own")


class Clock:
    """Time that passes when somebody sleeps; from ``busy_until`` on a rank gives a sign
    in every interval."""

    def __init__(self, watching: RankWatch, busy_until: float) -> None:
        self.watching, self.busy_until, self.now = watching, busy_until, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.watching._beats = max(
            0, int((self.now - self.busy_until) / self.watching.interval)
        )


@pytest.mark.parametrize(
    ("busy_until", "signs", "takes"),
    [(0.0, True, 4.0), (60.0, True, 63.0), (60.0, False, 4.0)],
)
def test_a_look_takes_four_intervals_and_longer_while_the_looking_rank_has_no_turn_itself(
    busy_until: float, signs: bool, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = RankWatch.__new__(RankWatch)
    watching.interval, watching._beats = 1.0, 0
    watching._thread = SimpleNamespace(is_alive=lambda: signs)  # type: ignore[assignment]  # it ends with the store
    clock = Clock(watching, busy_until)
    monkeypatch.setattr(rank_watch, "time", clock)
    watching._await_signs()
    assert clock.now == takes


def nobody_meets_an_exception(lost: int) -> tuple[str, list[int]]:
    """As under NCCL, where collectives with a lost rank only never end: what is
    written, and with what ranks end."""
    watching, rank, ended = watch(), dist.get_rank(), []
    watching.meetings.limit = 0.2
    if rank == lost:
        watching.step = 7
        dist.barrier()
        fall_silent(watching)
        watching._beat()
        if rank == 0:
            take_board_away(watching)
        dist.monitored_barrier(timeout=LONG)
        return "", ended
    dist.barrier()

    def end(status: int) -> None:
        ended.append(status)
        watching._stopped.set()

    with (
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        mock.patch.object(rank_watch.os, "_exit", end),
    ):
        watching._thread.join(LONG.total_seconds())
    dist.monitored_barrier(timeout=LONG)
    return stderr.getvalue(), ended


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_where_nothing_is_raised_a_lost_rank_is_named_all_the_same_and_the_others_end_in_time(
    lost: int,
) -> None:
    results = run_ranks(nobody_meets_an_exception, 4, lost)
    survivors = [result for rank, result in enumerate(results) if rank != lost]
    assert [ended for _, ended in survivors] == [[1]] * 3
    assert all("timeout=0.2 seconds are over" in text for text, _ in survivors)
    named = [text for text, _ in survivors if f"rank {lost} was lost" in text]
    assert named and (lost == 0 or "it was in optimizer step 7" in named[0])


def keepers_write_down() -> bool | None:
    """Whether this rank's board says who is lost, once rank 0's does; None: it keeps
    none. Nobody ends."""
    with mock.patch.object(rank_watch, "_LOOK_EVERY", 8):
        watching, rank = watch(), dist.get_rank()
        silence_rank_2(watching, rank)
        [own] = [board for board in watching.boards if board.keeper == rank] or [None]
        deadline = time.monotonic() + LONG.total_seconds()
        while (
            own is not None
            and own.ask("get", "lost") is None
            and time.monotonic() < deadline
        ):
            time.sleep(INTERVAL)
        found = None if own is None else bool(own.ask("get", "lost"))
        dist.monitored_barrier(timeout=LONG)
    leave(watching)
    return found


def test_every_keeper_writes_down_who_is_lost() -> None:
    """Where the one that says it ends first, the others do not begin to look anew."""
    assert run_ranks(keepers_write_down, 4) == [True, None, None, True]
