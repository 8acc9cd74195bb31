"""Saving behind training: the values of the moment of the call, errors that surface,
nothing removed too early."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_core.checkpoint.folders.storage as storage
from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    async_save,
    is_checkpoint,
    read_manifest,
    read_rest,
    read_tensors,
)
from smp_core.cluster import collective_timeout
from tests.core.checkpoint.states import differences, gathered, sharded_state
from tests.harness import ROOT, run_ranks, run_script

# Seconds for what surely comes.
LONG = 240.0


def zero(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        state.zero_()
    else:
        for value in (
            state.values()
            if isinstance(state, dict)
            else state
            if isinstance(state, list)
            else ()
        ):
            zero(value)


def save_while_training_goes_on(path: str) -> Any:
    saver = AsyncCheckpointer()
    expected = []
    for seed in (1, 2):
        state = sharded_state(2, seed=seed)
        expected.append(gathered(state))
        saver.save(f"{path}/{seed}", state, per_rank=dist.get_rank())
        zero(state)  # at once: the thread must not see it
        state["rest"]["epoch"] = state["best"]["kept"] = "changed"
        # Training's own collectives, while the thread uses its group.
        dist.all_reduce(torch.ones(1))
    saver.close()
    return expected


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    expected = run_ranks(save_while_training_goes_on, 4, str(tmp_path))[0]
    for seed in (1, 2):
        assert (
            differences(
                read_rest(tmp_path / str(seed), tensors=["*"]), expected[seed - 1]
            )
            == []
        )


class Gate:
    """Lets a test hold the writing thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        original: Callable[..., Any] = storage.Sink.write

        def write(sink: storage.Sink, data: Any) -> None:
            assert self.open.wait(LONG)
            original(sink, data)

        monkeypatch.setattr(storage.Sink, "write", write)


def test_metadata_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, saver = Gate(monkeypatch), AsyncCheckpointer()
    metadata = {"step": 1, "place": {"sample": 7}}
    saver.save(tmp_path / "a", {"w": torch.ones(2)}, metadata=metadata)
    metadata["place"]["sample"] = 8  # type: ignore[index]
    gate.open.set()
    saver.close()
    found = read_manifest(tmp_path / "a").metadata
    assert found == {"step": 1, "place": {"sample": 7}}


def test_a_removal_waits_for_the_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncCheckpointer()
    saver.save(tmp_path / "old", {"w": torch.ones(3)})
    saver.wait()
    gate = Gate(monkeypatch)
    saver.save(tmp_path / "new", {"w": torch.ones(3)})
    assert saver.in_flight
    saver.remove(tmp_path / "old")
    assert is_checkpoint(tmp_path / "old") and not is_checkpoint(tmp_path / "new")
    gate.open.set()
    saver.wait()
    assert not (tmp_path / "old").exists() and is_checkpoint(tmp_path / "new")
    saver.remove(tmp_path / "new")
    assert not (tmp_path / "new").exists(), (
        "with nothing in flight a removal is immediate"
    )


def test_a_failed_save_raises_at_the_next_call_and_keeps_what_was_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AsyncCheckpointer()
    saver.save(tmp_path / "old", {"w": torch.ones(3)})
    saver.wait()

    def fail(sink: storage.Sink, data: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(storage.Sink, "write", fail)
        saver.save(tmp_path / "new", {"w": torch.ones(3)})
        saver.remove(tmp_path / "old")
        deadline = time.monotonic() + LONG
        while saver.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        saver.check()
    assert (
        is_checkpoint(tmp_path / "old")
        and f"removal of {tmp_path / 'old'}" in caplog.text
    )
    saver.check()  # once is enough
    saver.save(tmp_path / "new", {"w": torch.ones(3)})
    saver.close()
    assert is_checkpoint(tmp_path / "new")


def test_at_most_one_save_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncCheckpointer()
    gate = Gate(monkeypatch)
    saver.save(tmp_path / "1", {"w": torch.full((3,), 1.0)})
    threading.Timer(0.1, gate.open.set).start()
    saver.save(tmp_path / "2", {"w": torch.full((3,), 2.0)})
    assert is_checkpoint(tmp_path / "1"), (
        "the second waits for the first, whose buffers it takes"
    )
    saver.close()
    for number in (1, 2):
        assert torch.equal(
            read_tensors(tmp_path / str(number))["w"], torch.full((3,), float(number))
        )


def test_a_value_that_cannot_be_saved_surfaces_too(tmp_path: Path) -> None:
    saver = AsyncCheckpointer()
    saver.save(tmp_path / "a", {"hyper_parameters": {"x": object()}})
    with pytest.raises(CheckpointError, match=r"hyper_parameters\.x"):
        saver.wait()


def test_the_end_of_the_program_waits_for_the_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from smp_core.checkpoint import AsyncCheckpointer\n"
        "saver = AsyncCheckpointer()\n"
        f"saver.save({str(tmp_path / 'a')!r}, {{'w': torch.ones(1 << 22)}})\n"
    )
    done = run_script([script], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert torch.equal(read_tensors(tmp_path / "a")["w"], torch.ones(1 << 22))


def limits_and_threads(folder: str) -> tuple[list[Any], list[bool]]:
    """The limits of the default group and of the saver's own, and whether its threads
    are daemons."""
    threads = []

    class Seen(threading.Thread):
        def start(self) -> None:
            threads.append(self.daemon)
            super().start()

    saver = AsyncCheckpointer()
    with mock.patch("smp_core.checkpoint.async_save.threading.Thread", Seen):
        saver.save(os.path.join(folder, "saved"), {"weight": torch.ones(3)})
        saver.close()
    groups = [None, saver._group, saver._status_group]
    return [collective_timeout(group) for group in groups], threads


def test_a_lost_rank_is_noticed_as_soon_as_in_training_and_keeps_no_process_alive(
    tmp_path: Path,
) -> None:
    for limits, threads in run_ranks(limits_and_threads, 2, str(tmp_path)):
        assert limits[0] is not None and limits == [limits[0]] * 3
        assert threads == [True]


def test_what_a_save_keeps_training_waiting_for_is_told_by_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the three causes move."""
    now = [0.0]

    def takes(seconds: float, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(async_save.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(async_save, "stage", takes(2.0, async_save.stage))
    monkeypatch.setattr(
        async_save.dist, "all_reduce", takes(0.25, lambda ended, **_: ended.zero_())
    )
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(async_save, "note", lambda kind, **fields: noted.append(fields))
    saver = AsyncCheckpointer()
    monkeypatch.setattr(saver, "wait", takes(5.0, saver.wait))
    monkeypatch.setattr(saver, "_status_group", object())
    for number in (1, 2, 3):
        saver.save(tmp_path / str(number), {"value": torch.ones(1)})
        for _ in range(2 if number == 1 else 0):
            saver.settle()  # goes on elsewhere
    causes = ("seconds_save_before", "seconds_copying", "seconds_agreeing")
    told = [tuple(fields[cause] for cause in causes) for fields in noted]
    assert told == [(5.0, 2.0, 0.0), (5.0, 2.0, 0.5), (5.0, 2.0, 0.0)]
    assert [fields["stall_seconds"] for fields in noted] == [7.0, 7.5, 7.0]
    saver.close()


def test_a_relative_path_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its working directory while a save is in flight."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    gate, saver = Gate(monkeypatch), AsyncCheckpointer()
    saver.save("a", {"w": torch.ones(2)})
    saver.remove("old")
    monkeypatch.chdir(tmp_path / "there")
    os.makedirs("old")
    (tmp_path / "there" / "old" / "manifest.json").write_text("{}")
    gate.open.set()
    saver.close()
    assert [entry.name for entry in (tmp_path / "here").iterdir()] == ["a"]
    assert [entry.name for entry in (tmp_path / "there").iterdir()] == ["old"]
