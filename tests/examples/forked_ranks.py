"""Runs a script as ``python SCRIPT ...`` would, except that the ranks which Lightning
starts are forked from the first one, which has imported what they need.

    python -m tests.examples.forked_ranks SCRIPT [ARGUMENT ...]

A rank runs the script from its beginning, in the environment that Lightning gives it.
Interpreters of their own, with another order of sets each, are for the slow runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only


class ForkedRank:
    """What Lightning's launcher needs of a ``subprocess.Popen``."""

    def __init__(self, _: Any, env: Mapping[str, str], cwd: str | None) -> None:
        assert cwd is None
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # Else collecting garbage in a rank would copy the pages that all share.
        gc.freeze()
        self.pid = os.fork()
        if self.pid:
            gc.unfreeze()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            os._exit(_run())

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run() -> int:
    """Run the script as a rank that has just been forked. Returns its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Lightning reads it where it is imported, which here was in the first rank.
    rank_zero_only.rank = int(os.environ["LOCAL_RANK"])  # type: ignore[attr-defined]
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    # os._exit would leave them out, and rank 0 wait for this rank's goodbye. Python has
    # no public name for it.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main() -> None:
    # Imports leave next to no garbage, and looking for it costs a tenth.
    gc.set_threshold(200_000)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    subprocess_script.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedRank, TimeoutExpired=subprocess.TimeoutExpired
    )
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
