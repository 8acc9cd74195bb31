"""What tests call: `run_ranks` for functions on gloo ranks, `run_script` for whole
programs.

`run_ranks(fn, 4)` calls a module-level function on four rank processes that stay alive
from case to case (one pool per world size, forked from processes that have imported
torch), each case in a process group of its own. A rank that raises, hangs or dies fails
the case with every rank's traceback or stack, and takes its pool with it: the next case
starts a fresh one. `run_script` runs a program as a user would, for end-to-end tests.
"""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.fork_server import ROOT, close_servers
from tests.rank_pool import RankPool, RanksFailed, base_environ
from tests.rank_worker import STORE_HOST

__all__ = [
    "ROOT",
    "RanksFailed",
    "ScriptTimedOut",
    "close_pools",
    "free_port",
    "going_on",
    "restarts",
    "run_ranks",
    "run_script",
]

T = TypeVar("T")

# More ranks than this are not kept alive by one pytest process from case to case: each
# takes a few hundred MB.
MAX_IDLE_RANKS = 8

SCRIPT_OUTPUT_TAIL = 20000
QUICK = "QUICK_TESTS"
# Seconds that the processes of a script past its limit have, together, to write their
# stacks.
STACK_LIMIT = 30.0


class ScriptTimedOut(AssertionError):
    """A script ran past its limit and was killed; the message has its output and its
    Python stacks."""


_pools: dict[int, RankPool] = {}


def _pool(world_size: int) -> RankPool:
    pool = _pools.pop(world_size, None)
    if pool is None or not pool.alive:
        pool = RankPool(world_size)
    _pools[world_size] = pool
    return pool


def _make_room() -> None:
    """Close what is too many. Nearly all cases have two or four ranks, which cost
    seconds to start: others go first."""
    for size, pool in list(_pools.items()):
        if not pool.alive or pool.is_worn_out():
            _pools.pop(size).close()
    while sum(_pools) > MAX_IDLE_RANKS:
        _pools.pop(max(_pools, key=lambda size: (size not in (2, 4), size))).close()


@atexit.register
def close_pools() -> None:
    """Kill and reap the ranks of all pools, and the servers that forked them."""
    while _pools:
        _pools.popitem()[1].close()
    close_servers()


def free_port() -> int:
    """A TCP port that is free, and that no program is given which asks the system for
    any port.

    One of those could be another program's by the time it is used: every group of gloo
    takes some.
    """
    lowest, highest = 10_000, 32_768
    with suppress(OSError, ValueError):
        highest = min(
            highest,
            int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]),
        )
    for _ in range(100):
        port = lowest + secrets.randbelow(highest - lowest) if highest > lowest else 0
        with socket.socket() as sock, suppress(OSError):
            sock.bind((STORE_HOST, port))
            return int(sock.getsockname()[1])
    raise OSError(f"no free TCP port on {STORE_HOST}")


def _skip_if_quick() -> None:
    """`make quick` is for the desk: what starts processes is skipped."""
    if os.environ.get(QUICK):
        pytest.skip("starts processes, which `make quick` leaves out")


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    timeout: float = 240.0,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on every rank of a gloo process group and return the
    results in rank order.

    The default process group is initialised; RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them on one
    machine. All ranks begin with seed 0. The environment is this process's own at the
    time of the call, without what a launcher would set (RANK, SLURM_*, SMP_*, ...).

    Args:
        fn: a module-level function; it, its arguments and its results travel by pickle
            (no DTensors, no modules with hooks). It is imported on the ranks under the
            name it has here.
        world_size: number of ranks.
        *args: positional arguments of `fn`.
        ranks_per_node: pose as nodes of this many ranks: sets SMP_RANKS_PER_NODE.
        timeout: seconds the case may take once its module is imported and all ranks are
            connected. Collectives give up after three quarters. No estimate of its
            work, which a busy machine makes many times longer, but the end of a hang.
        env: environment variables of the case; None removes one.
        **kwargs: keyword arguments of `fn`.

    Returns:
        One result per rank.

    Raises:
        RanksFailed: a rank raised, hung or died; the message has all tracebacks, stacks
            and output.
        TypeError: `fn` or an argument cannot be pickled.
    """
    __tracebackhide__ = True
    _skip_if_quick()
    name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
    try:
        call = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} or one of its arguments does not pickle; use a function at module level: {error}"
        ) from error
    port = str(free_port())
    environs = []
    for rank in range(world_size):
        environ: dict[str, str | None] = {
            **base_environ(),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": STORE_HOST,
            "MASTER_PORT": port,
            "SMP_RANKS_PER_NODE": None
            if ranks_per_node is None
            else str(ranks_per_node),
            **(env or {}),
        }
        environs.append(
            {key: value for key, value in environ.items() if value is not None}
        )
    try:
        return _pool(world_size).run(call, name, timeout, environs)
    finally:
        _make_room()


def run_script(
    args: Sequence[str | os.PathLike[str]],
    nproc: int | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 600.0,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script (``["script.py", "--flag"]``) or module (``["-m",
    "module"]``) to its end.

    Args:
        args: what follows ``python`` on the command line.
        nproc: run it under torchrun with this many processes; None runs it directly.
        env: environment variables on top of this process's own (without what a launcher
            would set); None removes one.
        timeout: seconds, after which the program and everything it started are killed.
            The end of a hang, and no estimate of the work: that takes many times longer
            on a busy machine.
        cwd: working directory; the repository's root if None.

    Returns:
        The finished process with its exit status, `stdout` and `stderr`; no status is
        an error here.

    Raises:
        ScriptTimedOut: it ran past `timeout`; the message has its output and the Python
            stacks of its processes.
    """
    __tracebackhide__ = True
    _skip_if_quick()
    command = [sys.executable, *(os.fspath(arg) for arg in args)]
    if nproc is not None:
        # torchrun takes a module as `-m module`, the same as python does.
        command[1:1] = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={nproc}",
        ]
    wishes: dict[str, str | None] = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **(env or {}),
    }
    environ = {
        key: value
        for key, value in {**base_environ(), **wishes}.items()
        if value is not None
    }
    # Into files: a pipe would stay open, and its reader wait, for as long as any
    # grandchild lives.
    with tempfile.TemporaryDirectory(prefix="smp-script-") as directory:
        streams = [Path(directory, name) for name in ("stdout", "stderr")]
        with streams[0].open("wb") as out, streams[1].open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                cwd=cwd or ROOT,
                start_new_session=True,
            )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.returncode is None:
                _kill_tree(process)
        stdout, stderr = (stream.read_text(errors="replace") for stream in streams)
    if timed_out:
        raise ScriptTimedOut(
            f"{' '.join(command)}\ndid not end within {timeout:g} s\n"
            f"--- stdout:\n{stdout[-SCRIPT_OUTPUT_TAIL:]}\n--- stderr:\n{stderr[-SCRIPT_OUTPUT_TAIL:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def restarts(times: int) -> dict[str, str]:
    """The environment in which torchrun starts its processes anew so many times, with
    another store each time."""
    return {"PET_MAX_RESTARTS": str(times), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def going_on(pids: Iterable[int], argument: str, limit: float = 60.0) -> list[int]:
    """Which of these processes still run when they have had ``limit`` seconds to end.

    Args:
        pids: process ids, some of which may be another process's by now.
        argument: stands in the command line of those that are meant, and in no other
            one.
        limit: seconds; the wait is over as soon as all have ended.
    """
    deadline = time.monotonic() + limit
    while (
        left := [pid for pid in pids if _has_argument(pid, argument)]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _has_argument(pid: int, argument: str) -> bool:
    try:
        # Empty for one that has ended and was not reaped.
        return argument in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, after they have written their Python stacks
    to stderr.

    torchrun puts its workers into sessions of their own, so that killing the process
    group would miss them.
    """
    root = psutil.Process(process.pid)
    family = [*root.children(recursive=True), root]
    # One after the other, while the rest stand still: they share stderr, where stacks
    # written at once are shuffled, and torchrun ends its other workers when one dies.
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    deadline = time.monotonic() + STACK_LIMIT
    for member in family:
        with suppress(psutil.NoSuchProcess):
            # PYTHONFAULTHANDLER answers it with the stacks.
            member.send_signal(signal.SIGABRT)
            member.resume()
            while (
                member.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline
            ):
                time.sleep(0.02)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
