"""Runs: the user's training in child processes, as one process or as ranks on this
machine, and how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_core.outside import long_wait
from smp_core.topology import RANKS_PER_NODE_VARIABLE
from smp_core.verify.recorder import REFUSED
from smp_core.verify.request import Request

SERVER = "smp_core.verify.server"
# Variables of launchers around `smp verify`, which the processes that it starts must
# not take for their own.
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PREFIXES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "SM_")
_TAIL = 25
# What a run does, for the line about one that takes long.
_WORK = {
    "look": "looking at the script",
    "ranks": "training on {ranks} ranks",
    "one process": "training in one process",
}
# Seconds that ranks get to end by themselves when one has failed: they say where they
# were.
_GRACE = 10.0
_IMPORTS = {
    "lightning": re.compile(rb"^\s*(import|from)\s+lightning", re.MULTILINE),
    "accelerate": re.compile(
        rb"^\s*(import|from)\s+(accelerate|transformers|trl)", re.MULTILINE
    ),
    "accelerate_smp.trainer": re.compile(
        rb"^\s*(import|from)\s+(transformers|trl)", re.MULTILINE
    ),
}

_FACES = {"lightning": b"lightning_smp", "accelerate": b"accelerate_smp"}


class RunFailed(ValueError):
    """The error of a run whose processes did not end well, with the end of what they
    wrote."""


class Server:
    """The process that child processes are forked from (:mod:`smp_core.verify.server`).

    Args:
        modules: that it imports before it forks (:func:`modules_for`).
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        # One process imports torch and the trainer; runs are forked from it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env={
                **_inherited(),
                "PYTHONHASHSEED": "0",
                "TOKENIZERS_PARALLELISM": "false",
            },
            text=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        # It ends when its input does.
        self._process.wait()
        self._output.close()

    def start(
        self,
        environment: Mapping[str, str],
        command: Sequence[str],
        log: Path,
        threads: int,
    ) -> int:
        """Fork a process that trains. Returns its process id."""
        start = {
            "environment": environment,
            "command": command,
            "log": str(log),
            "threads": threads,
        }
        return int(self._order({"start": start}))

    def ended(self) -> dict[int, int]:
        """Return the exit statuses of processes that have ended, by process id."""
        return {
            int(child): status for child, status in self._order({"poll": True}).items()
        }

    def _order(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        # A server that has ended answers nothing; its own output says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").strip().splitlines()
            raise RunFailed(
                "the process that starts trainings ended:\n" + "\n".join(lines[-_TAIL:])
            )
        return json.loads(answer)


@dataclass(frozen=True)
class Runs:
    """The runs of one verification.

    Attributes:
        server: forks their processes.
        command: the script with its arguments, or ``--call FILE``.
        limit: seconds that a run may take.
    """

    server: Server
    command: Sequence[str]
    limit: float

    def run(self, request: Request, ranks_per_node: int | None = None) -> None:
        """Run the training once and wait for it.

        Args:
            request: says how many processes, and where they write.
            ranks_per_node: ranks that pose as one node; None: all are on one.

        Raises:
            RunFailed: a process ended with an error, or ran past the limit.
        """
        request.folder.mkdir(parents=True, exist_ok=True)
        size = request.ranks if request.role == "ranks" else 1
        logs = [request.folder / f"output{rank}.txt" for rank in range(size)]
        # All ranks of a run meet at one port.
        port = _free_port()
        children = []
        for rank, log in enumerate(logs):
            environment = _environment(request, rank, size, port, ranks_per_node)
            # Ranks share the cores of this machine.
            threads = max(1, (os.cpu_count() or 1) // size)
            children.append(self.server.start(environment, self.command, log, threads))
        try:
            with long_wait(_WORK[request.role].format(ranks=size)):
                self._wait(children)
        finally:
            # After an error or the limit some are still running.
            running = [child for child in children if child not in self.server.ended()]
            for child in running:  # with the data workers in its session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            # A process that is killed takes a moment to end, and its log with it.
            while running and not set(running) <= self.server.ended().keys():
                time.sleep(0.02)
        ended = self.server.ended()
        statuses = [ended[child] for child in children]
        if any(statuses):
            raise RunFailed(_how_it_failed(request, statuses, logs, self.limit))

    def _wait(self, children: Sequence[int]) -> None:
        """Wait until all have ended, one has failed, or the time is over."""
        deadline = time.monotonic() + self.limit
        failed = False  # the first failure shortens the wait, later ones do not
        while time.monotonic() < deadline:
            statuses = [self.server.ended().get(child) for child in children]
            if None not in statuses:
                return
            if any(statuses) and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE)
            time.sleep(0.05)


def modules_for(command: Sequence[str]) -> list[str]:
    """Return what a server imports for a script or a pickled call, by its text.

    Raises:
        RunFailed: there is no such script.
    """
    if command[0] == "--call":
        # What the call needs is told by the modules in its pickle.
        call = Path(command[1]).read_bytes()
        return [name for name, face in _FACES.items() if face in call]
    try:
        text = Path(command[0]).read_bytes()
    except OSError as error:
        raise RunFailed(
            f"{command[0]}: {error.strerror}; write the script, and its arguments behind --"
        ) from None
    return [name for name, pattern in _IMPORTS.items() if pattern.search(text)]


def _how_it_failed(
    request: Request, statuses: Sequence[int], logs: Sequence[Path], limit: float
) -> str:
    # A rank that was killed here waited for one that had failed by itself.
    own = [rank for rank, status in enumerate(statuses) if status > 0]
    first = (
        own[0] if own else next(rank for rank, status in enumerate(statuses) if status)
    )
    lines = logs[first].read_text(errors="replace").strip().splitlines()
    # A refusal is one line, meant for the user as it is.
    refused = [line for line in lines if line.startswith(REFUSED)]
    if refused:
        return refused[-1].removeprefix(REFUSED)
    who = (
        "the one process"
        if request.role != "ranks"
        else f"rank {first} of {len(statuses)}"
    )
    how = (
        f"was ended after {limit:g} s"
        if statuses[first] < 0
        else f"ended with status {statuses[first]}"
    )
    return f"{who} {how}:\n" + "\n".join(lines[-_TAIL:])


def _inherited() -> dict[str, str]:
    """Return this process's environment without what a launcher has set."""
    items = os.environ.items()
    return {
        name: value
        for name, value in items
        if name not in _LAUNCHERS and not name.startswith(_PREFIXES)
    }


def _environment(
    request: Request, rank: int, size: int, port: int, ranks_per_node: int | None
) -> dict[str, str]:
    environment = {
        # The user's variables, then the request, over them.
        "TOKENIZERS_PARALLELISM": "false",
        **_inherited(),
        **request.to_environment(),
    }
    if request.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["ACCELERATE_USE_CPU"] = "true"
    # Ranks are started as torchrun would.
    if request.role == "ranks":
        environment.update(_launched(rank, size, port))
    if ranks_per_node is not None:
        environment[RANKS_PER_NODE_VARIABLE] = str(ranks_per_node)
    return environment


def _launched(rank: int, size: int, port: int) -> Mapping[str, str]:
    """Return what torchrun sets in a process on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"verify-{secrets.token_hex(4)}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
