"""A process that has imported what ranks need, and becomes a rank by forking: seconds
of work that is done once.

`ForkServer` is pytest's end of the pipe and `main` the other one. The server runs
nothing but imports, in one thread, and has no process group, so that a forked rank
begins where a fresh one would be after its imports. It keeps ranks that have ended
until it is told to reap them: their ids stay their own.

Forked ranks have the server's seed for the hashes of strings, and with it one order of
sets; ranks of a real launch have not, and must not rely on it. So there are two
servers, and neighbouring ranks come from different ones.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from tests.rank_worker import (
    die_with_parent,
    explain_asserts,
    remember_shapes,
    serve,
)

ROOT = Path(__file__).resolve().parent.parent

# Nothing that starts a thread: transformers.trainer, for one, does (pyarrow).
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "lightning_smp",
    "accelerate_smp.accelerator",
    "transformers.models.gpt2.modeling_gpt2",
)
SERVERS = 2
# Seconds. Importing all of that on a loaded machine is slow, and is no fault of the
# case that happens to come first.
START_LIMIT = 300.0


class ForkServer:
    """A server; it ends with this process.

    Args:
        environ: its environment, which is there while modules are imported.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._pipe, theirs = Pipe()
        # Not by this file's path: that would put tests/ first on sys.path, where
        # `lightning` is ours.
        program = f"import sys; sys.path[:] = {_path()!r}; from tests.fork_server import main; main({theirs.fileno()})"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            # Where there is a GPU: who asks for it while being imported must not start
            # CUDA, which a fork cannot use.
            env={
                **environ,
                "PYTHONUNBUFFERED": "1",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
            cwd=ROOT,
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        conn: Connection,
        stack_file: Path,
        output_file: Path,
        environ: Mapping[str, str],
    ) -> int:
        """Start a rank (see `tests.rank_worker.serve`) in a session of its own.

        Args:
            conn: the rank's end of its pipe.
            stack_file: where it writes its stacks.
            output_file: where it writes what it prints.
            environ: its environment.

        Returns:
            its process id.

        Raises:
            RuntimeError: the server does not answer; the message has what it printed.
        """
        with suppress(OSError, EOFError):
            self._pipe.send(
                ("fork", (str(stack_file), str(output_file), _path(), dict(environ)))
            )
            send_handle(self._pipe, conn.fileno(), self.pid)
            if self._pipe.poll(START_LIMIT):
                return int(self._pipe.recv())
        self._process.kill()
        self._process.wait()
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace")
        raise RuntimeError(
            f"the server that forks ranks did not answer; it had printed:\n{printed}"
        )

    def exit_status(self, pid: int) -> str | None:
        """How a rank ended, None while it runs. Leaves it unreaped, so that its id
        stays its own until `reap`."""
        try:
            info = self._ask("look", pid)
        except (OSError, EOFError):
            return "ended with the server that forked it"
        if info is None:
            return None
        how, status = info
        if how == os.CLD_EXITED:
            return f"exited with status {status}"
        return f"was killed by {signal.Signals(status).name}"

    def reap(self, pid: int) -> None:
        """Wait until a rank that was killed has ended."""
        # Then the server has ended, and its ranks with it.
        with suppress(OSError, EOFError):
            self._ask("reap", pid)

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()
        self._output.close()

    def _ask(self, verb: str, pid: int) -> Any:
        self._pipe.send((verb, pid))
        return self._pipe.recv()


_servers: dict[int, ForkServer] = {}


def fork_server(rank: int, environ: Mapping[str, str]) -> ForkServer:
    """The server for the ranks of this number, started with ``environ`` if it does not
    run."""
    number = rank % SERVERS
    if number not in _servers or not _servers[number].alive:
        _servers[number] = ForkServer(environ)
    return _servers[number]


def close_servers() -> None:
    """End all servers, which ends their ranks."""
    while _servers:
        _servers.popitem()[1].close()


def _path() -> list[str]:
    return [str(ROOT), *filter(None, sys.path)]


def main(descriptor: int) -> None:
    """Import, and fork ranks as the pipe says, until it closes.

    Args:
        descriptor: file descriptor of the server's end of the pipe.
    """
    die_with_parent()
    pipe = Connection(descriptor)
    gc.disable()  # imports leave next to no garbage, which is looked for all the same
    for name in PRELOADED:
        importlib.import_module(name)
    explain_asserts()
    remember_shapes()
    gc.enable()
    gc.collect()
    gc.freeze()  # else collecting garbage in a rank would copy the pages that all share
    while True:
        try:
            verb, argument = pipe.recv()
        except EOFError:
            return
        if verb == "fork":
            conn = recv_handle(pipe)
            pid = os.fork()
            if pid == 0:
                pipe.close()
                _become_rank(conn, *argument)
            os.close(conn)
            pipe.send(pid)
        elif verb == "look":
            info = os.waitid(os.P_PID, argument, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            pipe.send(None if info is None else (info.si_code, info.si_status))
        elif verb == "reap":
            pipe.send(os.waitpid(argument, 0))


def _become_rank(
    conn: int,
    stack_file: str,
    output_file: str,
    path: list[str],
    environ: dict[str, str],
) -> None:
    """Serve in place of the server's own loop; does not return."""
    status = 1
    try:
        os.setsid()
        output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environ)
        serve(conn, stack_file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
