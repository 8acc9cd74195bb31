"""Faults at the n-th call that a save or a load makes to the system, by number, so that
each can be repeated.

Calls are those of Python's ``os`` that the checkpoint code uses, the renames that it
makes by ctypes, and writes to its files; of an object store, the methods of its file
system. A fault is an error, once or from that call on (a disk stays full), SIGKILL
before or after the call, or something that somebody else does just then.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import smp_core.checkpoint.folders.file_system as file_system
import smp_core.checkpoint.folders.local_folder as local_folder
from smp_core.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

CALLS = (
    *(
        "open",
        "stat",
        "lstat",
        "fstat",
        "listdir",
        "scandir",
        "mkdir",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    ),
    *("fsync", "preadv"),
)
STORE_CALLS = (
    "find",
    "info",
    "cat_file",
    "pipe_file",
    "rm_file",
    "makedirs",
    "exists",
    "modified",
    "open",
    "ls",
)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE)
SEED = 16


@dataclass(frozen=True)
class Fault:
    """What happens at call ``at``, counted from 0.

    Attributes:
        kind: an errno or an error, which is raised; "before" or "after": killed then; a
            function: called before.
        stays: whether all later calls fail too.
    """

    at: int
    kind: int | str | Exception | Callable[[], object]
    stays: bool = False


class Injector:
    """Counts calls, and strikes at one of them. Calls of a dead process cannot fail:
    count in the one that dies."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls = 0
        self.struck = ""  # the call

    def strikes(self, call: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            number, fault = self.calls, self.fault
            self.calls += 1
            if fault is None or not (
                number == fault.at or (fault.stays and number > fault.at)
            ):
                return call(*arguments, **keywords)
            self.struck = name
            self._before(fault)
            result = call(*arguments, **keywords)
            if fault.kind == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    def _before(self, fault: Fault) -> None:
        if isinstance(fault.kind, int):
            raise OSError(fault.kind, os.strerror(fault.kind))
        if isinstance(fault.kind, Exception):
            raise fault.kind
        if fault.kind == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif callable(fault.kind):
            self.fault = None  # what it does itself is not struck
            fault.kind()

    @contextlib.contextmanager
    def active(self, exchange: bool = True) -> Iterator[None]:
        """Count, and strike, while the context lasts.

        Args:
            exchange: whether the file system can exchange names; NFS cannot.
        """
        writes = type(
            "Written", (io.FileIO,), {"write": self.strikes_method(io.FileIO.write)}
        )

        def opened(path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if mode == "xb":
                return writes(path, "xb")
            return builtins.open(path, mode, *arguments, **keywords)

        swap: Callable[..., Any] = file_system.rename_exchange
        if not exchange:
            swap = refuse_to_exchange
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(
                    mock.patch.object(os, name, self.strikes(getattr(os, name), name))
                )
            counted = self.strikes(swap)
            for module in (file_system, local_folder):
                stack.enter_context(
                    mock.patch.object(module, "rename_exchange", counted)
                )
            stack.enter_context(
                mock.patch.object(
                    local_folder, "rename_new", self.strikes(local_folder.rename_new)
                )
            )
            stack.enter_context(
                mock.patch.object(local_folder, "open", opened, create=True)
            )
            yield

    @contextlib.contextmanager
    def active_in_store(self, kind: type) -> Iterator[None]:
        """Count, and strike, calls to fsspec's file systems of a class."""
        with contextlib.ExitStack() as stack:
            for name in STORE_CALLS:
                stack.enter_context(
                    mock.patch.object(
                        kind, name, self.strikes(getattr(kind, name), name)
                    )
                )
            yield

    def strikes_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        struck = self.strikes(method)
        return lambda own, data: struck(own, data)


def state(step: int) -> dict[str, Any]:
    """Numbers that tell one step from another in every element; a value that needs
    rest.pt."""
    tensors = {
        f"w{number}": torch.full((64,), float(10 * step + number))
        for number in range(3)
    }
    return {
        "model": tensors,
        "step": step,
        "draws": torch.Generator().manual_seed(step).get_state(),
    }


def save(path: Path | str, step: int) -> None:
    save_checkpoint(
        path, state(step), extra_files={"config.json": f'{{"step": {step}}}'}
    )


def loads(path: Path | str) -> int | None:
    """The step that loads at default settings, exact in every value; None where a
    CheckpointError says why not."""
    target = state(0)
    try:
        load_checkpoint(path, target)
    except CheckpointError:
        return None
    step = target["step"]
    assert isinstance(step, int)
    expected = state(step)
    assert torch.equal(target["draws"], expected["draws"]), "a mixture of two saves"
    for name, value in expected["model"].items():
        assert torch.equal(target["model"][name], value), (
            f"{name} is not of step {step}"
        )
    return step


def refuse_to_exchange(first: str, second: str) -> bool:
    return False


def in_a_child(work: Callable[[], object]) -> int:
    """Run something in a forked child; return its status as of ``os.waitpid``."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


# Damages of a file: (content, the file's neighbour, a seed) -> content; None: the file
# is gone.

Damage = Callable[[bytes, bytes, random.Random], "bytes | None"]


def _flip(content: bytes, position: int, bit: int) -> bytes:
    broken = bytearray(content)
    broken[position] ^= 1 << bit
    return bytes(broken)


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(content))
    end = min(len(content), begin + 64)
    return content[:begin] + bytes(end - begin) + content[end:]


def _shuffled(content: bytes, draw: random.Random) -> bytes:
    middle = len(content) // 2
    return content[middle:] + content[:middle]


DAMAGES: dict[str, Damage] = {
    "missing": lambda content, other, draw: None,
    "empty": lambda content, other, draw: b"",
    "one byte": lambda content, other, draw: content[:1],
    "half": lambda content, other, draw: content[: len(content) // 2],
    "last byte lost": lambda content, other, draw: content[:-1],
    "first byte lost": lambda content, other, draw: content[1:],
    "a byte more": lambda content, other, draw: content + b"\0",
    "twice": lambda content, other, draw: content + content,
    "first bit": lambda content, other, draw: _flip(content, 0, draw.randrange(8)),
    "last bit": lambda content, other, draw: _flip(
        content, len(content) - 1, draw.randrange(8)
    ),
    "a bit": lambda content, other, draw: _flip(
        content, draw.randrange(len(content)), draw.randrange(8)
    ),
    "zeroed block": lambda content, other, draw: _zeroed(content, draw),
    "all zero": lambda content, other, draw: bytes(len(content)),
    "noise": lambda content, other, draw: draw.randbytes(len(content)),
    "another file": lambda content, other, draw: other,
    "another file's length": lambda content, other, draw: (
        (content * 2)[: len(other)] if other else b""
    ),
    "halves exchanged": lambda content, other, draw: _shuffled(content, draw),
}


def harm(path: Path, other: Path, kind: str, seed: int) -> bool:
    """Damage a file; return whether its bytes are others now."""
    content = path.read_bytes()
    damaged = DAMAGES[kind](content, other.read_bytes(), random.Random(seed))
    if damaged is None:
        path.unlink()
        return True
    path.write_bytes(damaged)
    return damaged != content
