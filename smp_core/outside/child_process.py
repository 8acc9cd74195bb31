"""A child process that answers one question, which is pickled, as its answer is:
another module, run as a program."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ask_child(module: str, question: Any, failed: str) -> Any:
    """Return what ``module`` answers in a process of its own.

    Args:
        module: its name; as a program it calls :func:`answer_parent`.
        failed: said before the child's last line, where it ends without an answer.

    Raises:
        ValueError: the child ended without an answer, or its answer was this error.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "question", Path(folder) / "answer"
        asked.write_bytes(pickle.dumps(question))
        # Warnings of imports are not the child's answer.
        command = [sys.executable, "-W", "ignore", "-m", module, str(asked), str(out)]
        # It can import what its parent can, from wherever that was started.
        paths = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
        # No answer: the child's last line on stderr is its error.
        if not out.exists():
            last = done.stderr.strip().splitlines()[-1:] or [
                f"status {done.returncode}"
            ]
            raise ValueError(f"{failed}: {last[0]}")
        found = pickle.loads(out.read_bytes())  # our own child's
    if isinstance(found, ValueError):
        raise found
    return found


def answer_parent(answer: Callable[[Any], Any]) -> None:
    """Answer the question of :func:`ask_child`, in the child; a ValueError or
    NotImplementedError is an answer, too."""
    asked, out = map(Path, sys.argv[1:])
    try:
        found = answer(pickle.loads(asked.read_bytes()))
    except (ValueError, NotImplementedError) as error:
        found = ValueError(str(error))
    out.write_bytes(pickle.dumps(found))
