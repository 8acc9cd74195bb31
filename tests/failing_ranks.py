"""Ranks that a process forks and ends none of: what no launcher ends has to end by
itself. And what may happen on one of them."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from smp_core.checkpoint.folders.local_folder import LocalTransaction
from smp_core.checkpoint.folders.storage import Sink
from tests.harness import free_port

# Seconds for all ranks to end.
LIMIT = 150.0
# Places inside of a save, perhaps on a thread behind training.
OF_FILES: dict[str, tuple[Any, str]] = {
    "close": (Sink, "close"),
    "commit": (LocalTransaction, "commit"),
}


class Mistake(Exception):
    pass


def happen(what: str) -> None:
    if what == "raise":
        raise Mistake("the user's own")
    if what == "exit":
        sys.exit("enough")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "disk":
        raise OSError(errno.ENOSPC, "no space left on device")
    if what == "memory":
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 GiB")
    if what == "os_exit":
        os._exit(3)
    os.kill(
        os.getpid(),
        {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[what],
    )


class Strike:
    """What happens on this rank, at which call of which place; nothing once it has
    happened."""

    def __init__(self, trial: dict[str, Any] | None, rank: int) -> None:
        self.trial = trial if trial is not None and rank in trial["ranks"] else None
        self.calls = 0
        if self.trial is not None and self.trial["place"] in OF_FILES:
            owner, name = OF_FILES[self.trial["place"]]
            method = getattr(owner, name)

            def struck(*arguments: Any, **keywords: Any) -> Any:
                self(self.trial["place"] if self.trial else "")
                return method(*arguments, **keywords)

            setattr(owner, name, struck)

    def __call__(self, place: str) -> None:
        if self.trial is None or place != self.trial["place"]:
            return
        self.calls += 1
        if self.calls == self.trial["call"]:
            trial, self.trial = self.trial, None
            happen(trial["what"])


def fork_rank(work: Callable[[], None], environ: dict[str, str], output: Path) -> int:
    """Run ``work`` in a child that ends as an interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    atexit._clear()
    for stream in (1, 2):
        file = os.open(
            f"{output}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
        )
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(environ)
    for each in logging.getLogger("smp").handlers + logging.getLogger().handlers:
        if isinstance(each, logging.StreamHandler):
            each.setStream(sys.stderr)
    status = 0
    try:
        work()
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise AssertionError


def processes_of(sessions: set[int]) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid"]):
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in sessions:
                found.append(process.pid)
    return found


def run_world(
    train: Callable[..., None],
    trial: dict[str, Any],
    folder: Path,
    ranks: int,
    knobs: Any,
    going_on: bool,
) -> dict[str, Any]:
    """Fork the ranks, which call ``train(trial, folder, ranks, knobs, going_on)``, and
    wait until all have ended, or the limit is over."""
    port = free_port()
    pids = {}
    name = "on" if going_on else "first"
    for rank in range(ranks):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"trial-{trial['seed']}",
            "SMP_MEMORY_FOLDER": str(folder / "shm"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if trial["nodes"] and ranks == 4:
            environ["SMP_RANKS_PER_NODE"] = "2"
        pids[
            fork_rank(
                lambda: train(trial, folder, ranks, knobs, going_on),
                environ,
                folder / f"{name}-{rank}",
            )
        ] = rank
    begin = time.monotonic()
    statuses: dict[int, int] = {}
    stopped = set(trial["ranks"]) if trial["what"] == "stop" and not going_on else set()
    while set(range(ranks)) - set(statuses) - stopped:
        if time.monotonic() > begin + LIMIT:
            break
        for pid, rank in pids.items():
            if rank not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[rank] = status
        time.sleep(0.02)
    took = time.monotonic() - begin
    hung = [rank for rank in range(ranks) if rank not in statuses]
    for pid, rank in pids.items():
        if rank in hung:
            if rank not in stopped:
                os.kill(pid, signal.SIGABRT)
                time.sleep(1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    # Workers of a loader look every 5 s whether their parent lives.
    deadline = time.monotonic() + 20
    while (left := processes_of(set(pids))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return {
        "statuses": [statuses.get(rank) for rank in range(ranks)],
        "hung": sorted(set(hung) - stopped),
        "left": len(left),
        "took": round(took, 1),
    }


def play(
    draw: Callable[[int], dict[str, Any]],
    conduct: Callable[[dict[str, Any], Path], dict[str, Any]],
    judge: Callable[[dict[str, Any], dict[str, Any], Path], list[str]],
) -> None:
    """Conduct the trials that a command line names (a folder, how many, the first
    seed), and print each with what it found and what was wrong."""
    top, number, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for each in range(seed, seed + number):
        trial = draw(each)
        found: dict[str, Any] = {}
        try:
            found = conduct(trial, top)
            wrong = judge(trial, found, top)
        except Exception:
            wrong = [traceback.format_exc()]
        print(json.dumps({"wrong": wrong, **trial, **found}), flush=True)
        if not wrong:
            shutil.rmtree(top / str(each))
