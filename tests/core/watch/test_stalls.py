"""The line about ranks that wait: who, in what, for how long, where the others are, and
where they went apart.

Bounds are shortened; whole programs with those of every run are in
tests/test_stalling.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_core.watch.signs as signs
import smp_core.watch.whereabouts as whereabouts_module
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.watch.rank_watch import RankWatch
from smp_core.watch.signs import open_boards
from smp_core.watch.whereabouts import (
    HINT,
    WaitWatch,
    Whereabouts,
    here,
    line_about,
    ranks_in_words,
)
from tests.core.branching import Branching, batch_of, loss_of
from tests.core.pipeline.cases import Case
from tests.harness import run_ranks

LONG = 150.0  # seconds for what surely comes


class Line(io.StringIO):
    """What a rank writes to stderr; the others go on once a line has ``text``. (On a
    busy machine a rank may stand still on its way there, which is told as well.)"""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def write(self, text: str) -> int:
        if self.text in text:
            store().set("said", "1")
        return super().write(text)


def store() -> dist.Store:
    # Apart from the watch's, and without a collective.
    return dist.distributed_c10d._get_default_store()


def until_said() -> None:
    deadline = time.monotonic() + LONG
    while not store().check(["said"]) and time.monotonic() < deadline:
        time.sleep(0.02)


def in_user_code() -> None:
    until_said()


def in_data_loading() -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            until_said()
            return index

    next(iter(torch.utils.data.DataLoader(Slow())))


def in_another_collective() -> None:
    until_said()
    dist.barrier()


STALLS = {"user code": in_user_code, "data loading": in_data_loading}
# Where rank 1 is, and what is said about it.
CASES = {
    "user code": (
        in_user_code,
        "elsewhere: rank 1: test_stalls.py:{line} in until_said, step 1, micro-batch 2",
    ),
    "data loading": (
        in_data_loading,
        "elsewhere: rank 1: data loading (test_stalls.py:{line} in until_said), step 1, m",
    ),
}


def stalled(kind: str) -> str:
    """Rank 1 is elsewhere while rank 0 runs a micro-batch; what rank 0 says."""
    watch = RankWatch.start(interval=0.05)
    assert watch is not None
    go_there, expected = CASES[kind]
    expected = expected.format(line=until_said.__code__.co_firstlineno + 3)
    try:
        torch.manual_seed(0)
        parallel = parallelize(Branching(), SmpConfig(units=["Block"], shard_degree=2))
        with (
            contextlib.redirect_stderr(Line(expected)) as written,
            parallel.window.accumulate(),
        ):
            loss_of(parallel.module, batch_of(0, 0, 0), "lr").backward()
            here.least = 0.4
            if dist.get_rank() == 1:
                go_there()
            loss_of(parallel.module, batch_of(0, 1, 0), "lr").backward()
        return written.getvalue()
    finally:
        here.least = 5.0
        dist.barrier()
        watch.stop()


@pytest.mark.parametrize(
    "kind", ["user code", pytest.param("data loading", marks=pytest.mark.slow)]
)
def test_who_waits_is_told_with_the_unit_and_where_the_other_is(kind: str) -> None:
    said, silent = run_ranks(stalled, 2, kind)
    assert silent == ""
    line = said.splitlines()[-1]
    assert "waiting: rank 0 " in line, said
    assert (
        "s in all_gather of the root in forward, step 1, micro-batch 2 | elsewhere: rank 1: "
        in line
    ), said
    assert "went apart" not in said, said


def clipped_on_rank_1() -> tuple[str, str]:
    """The last stage alone clips, and the first begins a batch; what is written, and
    the error of each."""
    watch = RankWatch.start(interval=0.05)
    assert watch is not None
    try:
        parallel = Case("plain", micro_batches=1).parallel()
        pipeline = parallel.pipeline
        assert pipeline is not None
        pipeline.group.set_timeout(timedelta(seconds=8))
        tokens = torch.zeros(2, 6, dtype=torch.long)
        here.least = 0.4
        with (
            contextlib.redirect_stderr(io.StringIO()) as written,
            pytest.raises(RuntimeError) as error,
        ):
            if dist.get_rank() == 1:
                parallel.clip_grad_norm_(1.0)
            else:
                pipeline.evaluate(lambda: parallel.module(tokens), tokens)
        return written.getvalue(), str(error.value)
    finally:
        here.least = 5.0
        watch.stop()


# In the normal run: calls that begin a batch, in tests/core/pipeline/test_bad_input.py.
@pytest.mark.slow
def test_a_call_that_one_pipeline_stage_leaves_out_is_named_and_ends_with_the_timeout() -> (
    None
):
    (said, first), (_, last) = run_ranks(clipped_on_rank_1, 2)
    assert re.search(
        "rank 0 . s in the other pipeline stages to begin a batch, step 1", said
    ), said
    assert re.search("rank 1 . s in the gradient norm, step 1", said), said
    assert all(
        "Timed out" in error or "Connection closed by peer" in error
        for error in (first, last)
    ), (first, last)


def at(place: str, waits: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "for": 42.4,
        "after": 5.0,
        "waits": waits,
        "place": place,
        "micro_batch": 1,
        **more,
    }


def test_a_line_groups_ranks_and_says_where_they_went_apart() -> None:
    def shown(*recent: int) -> dict[str, Any]:
        return {"recent": list(recent), "peers": [0, 1, 2, 3]}

    given: dict[int, dict[str, Any]] = {
        rank: {"beats": 9, "step": 2} for rank in range(8)
    }
    for rank in (0, 1, 2):
        given[rank]["at"] = at("all_gather of 'b'", **shown(1, 0, 5))
    given[3]["at"] = at("all_gather of 'c'", **shown(1, 0, 7, 9))
    given[4]["at"] = at("train.py:3 in f", waits=False)
    given[6]["left"] = True
    assert line_about(given, {5}, lambda number: f"number {number}") == (
        "waiting: ranks 0-2 42 s in all_gather of 'b', step 3, micro-batch 1; "
        "rank 3 42 s in all_gather of 'c', step 3, micro-batch 1"
        " | elsewhere: rank 4: train.py:3 in f, step 3, micro-batch 1; "
        "rank 5: no sign of life: stopped, swapped out or lost; rank 6: ended in good order; rank 7: goes on, step 3"
        f" | went apart: in micro-batch 2, ranks 0-2: number 5; rank 3: number 7 ({HINT})"
    )
    # Ranks that have ended give no sign of life either.
    given[5]["failed"] = "ValueError: bad row (train.py:3 in f)"
    ended = "rank 5: failed: ValueError: bad row (train.py:3 in f); rank 6: ended in"
    assert ended in line_about(given, {5, 6}, str)
    # One that is only behind has not gone apart.
    given[3]["at"] = at("train.py:3 in f", waits=False, **shown(1, 0))
    assert "went apart" not in line_about(given, set(), str)


class OfMemory:
    """A board and its reader."""

    def __init__(self, signs: dict[int, dict[str, Any]]) -> None:
        self.signs, self.marks, self.lost = signs, 0, 0

    def post(self, name: str, *arguments: Any) -> None:
        self.lost -= 1
        if self.lost < 0:
            getattr(self, name)(*arguments)

    def add(self, key: str, amount: int) -> int:
        self.marks += amount
        return self.marks

    def ask(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def read(self, _: Any) -> dict[int, dict[str, Any]]:
        return self.signs


def test_it_is_repeated_with_back_off_and_names_a_rank_that_gives_no_sign() -> None:
    said: list[str] = []
    watching = WaitWatch(0, 2, 0.5, Whereabouts(), said.append)
    board = OfMemory(
        {0: {"beats": 0, "step": 0, "at": at("barrier")}, 1: {"beats": 7, "step": 0}}
    )
    for look in range(1, 100):
        board.marks += 1
        board.signs[0] = {
            "beats": look,
            "step": 0,
            "at": {**at("barrier"), "for": float(look)},
        }
        watching.look(board, board.read)  # type: ignore[arg-type]
    assert [line.split(" s ")[0] for line in said] == [
        f"waiting: rank 0 {seconds}" for seconds in (9, 18, 36, 72)
    ]
    assert all("rank 1: no sign of life" in line for line in said)
    said.clear()
    for _ in range(20):  # nobody adds to the count any more
        watching.look(board, board.read)  # type: ignore[arg-type]
    assert said == []


def test_a_mark_that_is_lost_is_made_up_for() -> None:
    said: list[str] = []
    here_it_waits: Any = mock.Mock(events=0, **{"look.return_value": at("barrier")})
    watching, board = (
        WaitWatch(0, 2, 0.5, here_it_waits, said.append),
        OfMemory({0: {"beats": 0, "step": 0}}),
    )
    board.lost = 1
    for look in range(3):
        board.signs[0] = {"beats": look, "step": 0, "at": watching.shown([board])}  # type: ignore[list-item]
        watching.look(board, board.read)  # type: ignore[arg-type]
    assert len(said) == 1 and "waiting: rank 0 42 s in barrier" in said[0]


def test_patience_follows_the_slowest_of_the_last_windows() -> None:
    whereabouts = Whereabouts()
    assert whereabouts.patience() == 5.0
    with mock.patch("time.monotonic", side_effect=[10.0, 12.0, 20.0, 21.0, 30.0]):
        whereabouts.in_window()
        whereabouts.end_window(measured=True)  # 2 seconds
        whereabouts.in_window()
        whereabouts.end_window(measured=True)
        whereabouts.in_window()
        whereabouts.end_window(measured=False)
    assert whereabouts.patience() == 20.0


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([9, 0, 1, 2, 4, 5]) == "ranks 0-2, 4-5, 9"


def posts_to_a_stopped_keeper() -> tuple[list[bool], list[Any], Any]:
    """What rank 1 is given when it posts to rank 0, which does not answer; what rank 0
    then has; the last answer."""
    first, _ = open_boards("127.0.0.1")
    event_loop, answers = signs._loop_of(os.getpid()), threading.Event()
    dist.barrier()
    if dist.get_rank() == 0:
        event_loop.call_soon_threadsafe(answers.wait, LONG)
    dist.barrier()
    at_once: list[bool] = []
    if dist.get_rank() == 1:
        at_once = [first.post("set", "beat", beat, ["beat"]) is None for beat in (1, 2)]
        at_once.append(first.post("add", "mark", 1) is None)  # of another kind
    dist.barrier()
    answers.set()
    dist.barrier()
    values: list[Any] = []
    answer: Any = None
    if dist.get_rank() == 1:
        values = [
            first.ask("get", "beat"),
            first.ask("get", "mark"),
        ]  # wait for all before them
        answer = first.post("set", "beat", 4, [])
    dist.barrier()
    first.close()
    return at_once, values, answer


def test_a_keeper_that_does_not_answer_is_waited_for_by_nobody_who_posts() -> None:
    assert run_ranks(posts_to_a_stopped_keeper, 2)[1] == ([True] * 3, [1, 1], [1])


def test_work_before_a_wait_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that prepared its data for ten minutes, and then waits for the others,
    waits from then on."""
    whereabouts, clock = Whereabouts(), iter([0.0, 600.0, 601.0, 603.0])
    monkeypatch.setattr(whereabouts_module.time, "monotonic", lambda: next(clock))
    stack = [traceback.FrameSummary("train.py", 3, "tokenize")]
    monkeypatch.setattr(whereabouts_module, "_main_stack", lambda: stack)
    assert whereabouts.look() is None  # at 0 s
    working = whereabouts.look()
    assert working is not None and not working["waits"]
    stack.append(traceback.FrameSummary(dist.distributed_c10d.__file__, 7, "barrier"))
    seconds = [
        (at["waits"], at["for"])
        for at in (whereabouts.look(), whereabouts.look())
        if at is not None
    ]
    assert seconds == [(True, 0.0), (True, 2.0)]


def seen_while_it_meets() -> list[tuple[bool, str]]:
    """What rank 0 shows of itself each time it asks the board, while rank 1 stays
    away."""
    watch = RankWatch.start(interval=0.05)
    assert watch is not None
    shown: list[tuple[bool, str]] = []
    try:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        ask = signs.Board.ask

        def look(board: signs.Board, method: str, *arguments: Any) -> Any:
            if method == "get":
                at = here.look() or here.look()
                assert at is not None
                shown.append((at["waits"], at["place"]))
            return ask(board, method, *arguments)

        with mock.patch.object(signs.Board, "ask", look):
            watch.meetings.meet("trainer.save_model(...)")
        return shown
    finally:
        dist.barrier()
        watch.stop()


def test_a_rank_that_asks_whether_the_others_have_come_waits_for_them() -> None:
    """It asks the board again and again: each time it would be elsewhere, and its wait
    begin anew."""
    shown, _ = run_ranks(seen_while_it_meets, 2)
    assert len(shown) > 1 and set(shown) == {(True, "trainer.save_model(...)")}
