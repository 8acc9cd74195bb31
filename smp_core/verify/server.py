"""A process that has imported what trainings import, and forks one child for each
process of a run.

    python -m smp_core.verify.server MODULE ...

Importing torch and a trainer takes longer than a few steps of a small model. The server
does it once and starts no threads. It reads one JSON line for each order and answers
with one: {"start": {...}} gives the child's process id, {"poll": true} the exit
statuses of children that have ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

import torch

from smp_core.verify.child import FACES, prepare, train


def main() -> None:
    """Import what the command line names, serve until the input ends, and end the
    process by ``os._exit``."""
    # Before any fork, so children share these pages.
    for name in sys.argv[1:]:
        importlib.import_module(name)
        importlib.import_module(FACES[name][0])
    # Collecting garbage in a child would copy the pages that all share.
    gc.collect()
    gc.freeze()
    # Copies: the children's own output must not be taken for answers.
    orders, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports and children print is no answer
    started: list[int] = []
    ended: dict[int, int] = {}
    for line in orders:
        order = json.loads(line)
        if "start" in order:
            answer: Any = _start(order["start"])
            started.append(answer)
        else:
            _reap(ended)
            answer = ended
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    _reap(ended)
    for child in set(started) - ended.keys():  # the process that gave orders was killed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    # Taking torch and a trainer apart module by module takes seconds, for which the
    # user would wait at the end of a verification.
    os._exit(0)


def _start(what: dict[str, Any]) -> int:
    """Fork a child that trains, and that ends by ``os._exit``: this process's own end
    is not its. Returns its id."""
    child = os.fork()
    if child:
        return child
    # A session of its own, so that a run can be killed with all that it started.
    os.setsid()
    output = os.open(what["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # The environment of this run, and nothing of the server's.
    os.environ.clear()
    os.environ.update(what["environment"])
    torch.set_num_threads(what["threads"])
    status = 1
    try:
        prepare()
        train(what["command"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # os._exit: the forked child is not to go on as a second server.
        os._exit(status)
    raise AssertionError


def _reap(ended: dict[int, int]) -> None:
    while True:
        try:
            # Without WNOHANG this would wait for a training to end.
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        ended[child] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
