"""Pools of rank processes: start them, run a case on all of them, tell what went wrong,
kill them.

A pool serves one world size. The first failure of any kind (a rank raised, hung or
died) closes it for good; what the message says about each rank is the point of this
file. `tests.harness` is what tests call; the other end of the pipes is
`tests/rank_worker.py`; where ranks come from is `tests/fork_server.py`.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from tests.fork_server import START_LIMIT, ForkServer, fork_server
from tests.rank_worker import CONNECT_LIMIT, STACK_SIGNAL, STORE_HOST, Case

# Seconds. Importing on a loaded machine is slow, and is no fault of the case that
# happens to come first.
LOAD_LIMIT = 300.0
CLEAN_LIMIT = 120.0
# After the first failure: how long the others may still report by themselves, and how
# long failed ranks keep their connections open so that the others' own errors come
# before "connection closed by peer".
GRACE = 30.0
HOLD = 1.0
# How long a hung rank may take to write its stack.
STACK_LIMIT = 20.0
# How a complete stack ends: with the main thread's outermost frame, or where
# faulthandler cuts a deep one.
_STACK_ENDS = (" in <module>\n", "  ...\n")

OUTPUT_TAIL = 4000
MAX_THREADS = 300

# What a launcher or a user's shell may have set and no case may see by accident.
_LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
)
_LAUNCH_PREFIXES = (
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SM_",
    "SMP_",
)


class RanksFailed(AssertionError):
    """A case failed on at least one rank; the message has every rank's traceback, stack
    or exit status."""


@dataclass
class _Rank:
    server: ForkServer
    pid: int
    conn: Connection
    stack_file: Path
    output_file: Path
    output_start: int = 0

    def output(self) -> str:
        """What the rank has printed since its case began."""
        with self.output_file.open("rb") as file:
            file.seek(self.output_start)
            return file.read().decode(errors="replace")

    def exit_status(self) -> str | None:
        """How the process ended, None while it runs. Leaves it unreaped, so that its id
        stays its own until `kill`."""
        return self.server.exit_status(self.pid)

    def stack(self) -> str:
        """Every thread's Python stack, asked for by signal."""
        os.kill(self.pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_LIMIT
        while (
            not (text := self.stack_file.read_text()).endswith(_STACK_ENDS)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return text or "(no answer to the request for its stack)\n"

    def kill(self) -> None:
        """End the process and whatever it started (it leads a session of its own)."""
        self.conn.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        self.server.reap(self.pid)


class RankPool:
    """`world_size` rank processes that run one case after another.

    Args:
        world_size: number of ranks.

    Raises:
        RanksFailed: a rank did not come up.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.alive = True
        self._directory = tempfile.TemporaryDirectory(prefix="smp-ranks-")
        self._ranks: list[_Rank] = []
        try:
            servers = [fork_server(rank, base_environ()) for rank in range(world_size)]
            for rank, server in enumerate(servers):
                self._ranks.append(self._start(rank, server))
            self._await("ready", START_LIMIT, "starting a rank")
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, server: ForkServer) -> _Rank:
        ours, theirs = Pipe()
        stack_file = Path(self._directory.name, f"rank{rank}.stack")
        output_file = Path(self._directory.name, f"rank{rank}.out")
        output_file.touch()
        pid = server.fork(theirs, stack_file, output_file, base_environ())
        theirs.close()
        return _Rank(server, pid, ours, stack_file, output_file)

    def run(
        self, call: bytes, name: str, timeout: float, environs: list[dict[str, str]]
    ) -> list[Any]:
        """Run one case; the pool is closed if it fails in any way.

        Args:
            call: pickled ``(fn, args, kwargs)``.
            name: what to call the case in messages.
            timeout: seconds for the function, once all ranks are connected.
            environs: the whole environment of each rank.

        Returns:
            What the function returned on each rank, in rank order.

        Raises:
            RanksFailed: a rank raised, hung or died.
        """
        store = dist.TCPStore(STORE_HOST, 0, None, True, wait_for_workers=False)
        # A collective whose peer never comes should end as an error with a traceback,
        # before the case's own limit.
        collective_timeout = 0.75 * timeout
        try:
            for rank, environ in zip(self._ranks, environs, strict=True):
                rank.output_start = rank.output_file.stat().st_size
                with suppress(OSError):
                    rank.conn.send(
                        (
                            "case",
                            Case(
                                call,
                                environ,
                                os.getcwd(),
                                store.port,
                                collective_timeout,
                            ),
                        )
                    )
            self._await("loaded", LOAD_LIMIT, f"importing {name}")
            self._tell("go")
            self._await("connected", CONNECT_LIMIT, f"connecting the ranks for {name}")
            self._tell("run")
            results = self._await("returned", timeout, name)
            self._tell("clean")
            self._await("ready", CLEAN_LIMIT, f"cleaning up after {name}")
        except BaseException:
            self.close()
            raise
        for number, rank in enumerate(self._ranks):
            for line in rank.output().splitlines():
                print(f"[rank {number}] {line}")
        return [pickle.loads(result) for result in results]

    def is_worn_out(self) -> bool:
        """Whether its ranks should make room for fresh ones, which cost seconds to
        start.

        Process groups that a case has left somewhere keep two threads each. These sleep
        (a hundred of them take 0.2 % of a core), but something would be wrong with a
        case that leaves hundreds.
        """
        return any(
            psutil.Process(rank.pid).num_threads() > MAX_THREADS for rank in self._ranks
        )

    def close(self) -> None:
        """Kill and reap every rank."""
        self.alive = False
        while self._ranks:
            self._ranks.pop().kill()
        self._directory.cleanup()

    def _tell(self, word: str) -> None:
        for rank in self._ranks:
            # A dead rank is noticed, and reported, where its answer is awaited.
            with suppress(OSError):
                rank.conn.send((word, None))

    def _await(self, wanted: str, limit: float, name: str) -> list[Any]:
        """Wait until every rank has reported `wanted`; return what came with it, in
        rank order."""
        start = time.monotonic()
        deadline, told, first_failure = start + limit, False, None
        reports: dict[int, tuple[str, Any]] = {}
        hung_up: set[int] = set()
        while len(reports) < self.world_size and (now := time.monotonic()) < deadline:
            silent = {
                rank.conn: number
                for number, rank in enumerate(self._ranks)
                if number not in reports
            }
            for conn in wait(list(silent), timeout=min(0.2, deadline - now)):
                assert isinstance(conn, Connection)
                try:
                    reports[silent[conn]] = conn.recv()
                except (EOFError, OSError):
                    hung_up.add(silent[conn])
            for number, rank in enumerate(self._ranks):
                # A child of a dead rank may hold its pipe open: end of file is not the
                # only sign.
                if number not in reports and (
                    number in hung_up or not rank.conn.poll()
                ):
                    if status := rank.exit_status():
                        reports[number] = ("died", status)
            if first_failure is None and any(
                word != wanted for word, _ in reports.values()
            ):
                first_failure = time.monotonic()
                deadline = min(deadline, first_failure + GRACE)
            if (
                first_failure is not None
                and not told
                and time.monotonic() > first_failure + HOLD
            ):
                told = True
                for number, (word, _) in reports.items():
                    if word == "raised":
                        with suppress(OSError):
                            self._ranks[number].conn.send(("leave", None))
        if len(reports) == self.world_size and first_failure is None:
            return [reports[number][1] for number in range(self.world_size)]
        self._fail(wanted, limit, name, time.monotonic() - start, reports)

    def _fail(
        self,
        wanted: str,
        limit: float,
        name: str,
        seconds: float,
        reports: dict[int, tuple[str, Any]],
    ) -> NoReturn:
        hung = [number for number in range(self.world_size) if number not in reports]
        failed = [number for number, (word, _) in reports.items() if word != wanted]
        cause = (
            f"ranks {sorted(failed)} failed"
            if failed
            else f"ranks {hung} did not finish within {limit:g} s"
        )
        parts = [f"{name} on {self.world_size} ranks: {cause}"]
        for number, rank in enumerate(self._ranks):
            word, detail = reports.get(number, ("hung", None))
            if word == "hung":
                parts.append(
                    f"--- rank {number}: still running after {seconds:.1f} s, killed; its stack:"
                )
                parts.append(rank.stack())
            elif word == "died":
                parts.append(f"--- rank {number}: {detail} without a word")
            elif word == "raised":
                parts.append(f"--- rank {number}: raised")
                parts.append(detail)
            else:
                parts.append(f"--- rank {number}: {word}")
            if output := rank.output().strip():
                parts.append(
                    f"... rank {number} had printed:\n{output[-OUTPUT_TAIL:]}\n"
                )
        raise RanksFailed("\n".join(parts))


def base_environ() -> dict[str, str]:
    """This process's environment without what a launcher would have set, one thread per
    rank."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }
    environ["OMP_NUM_THREADS"] = "1"
    environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform.startswith("linux"):
        # Otherwise gloo resolves the host's name, which on some machines leads nowhere.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ
