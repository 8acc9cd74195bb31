"""Faults at the n-th call that a save or a load makes to the system, by number, so that each can be repeated.

Calls are those of Python's ``os`` that the checkpoint code uses, the renames that it makes by ctypes, and writes to its
files. A fault is an errno, once or from that call on (a disk stays full), or SIGKILL before or after the call.
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

import smp_core.checkpoint.file_system as file_system
import smp_core.checkpoint.local_folder as local_folder

CALLS = (
    *("open", "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "rename", "replace", "unlink", "rmdir"),
    *("fsync", "preadv"),
)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE)


@dataclass(frozen=True)
class Fault:
    """What happens at call ``at``, counted from 0.

    Attributes:
        kind: an errno, or "before" or "after": killed then.
        stays: whether all later calls fail too.
    """

    at: int
    kind: int | str
    stays: bool = False


class Injector:
    """Counts calls, and strikes at one of them. Calls of a dead process cannot fail: count in the one that dies."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls = 0

    def strikes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            number, fault = self.calls, self.fault
            self.calls += 1
            hit = fault is not None and (number == fault.at or (fault.stays and number > fault.at))
            if hit and fault is not None and isinstance(fault.kind, int):
                raise OSError(fault.kind, os.strerror(fault.kind))
            if hit and fault is not None and fault.kind == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **keywords)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    @contextlib.contextmanager
    def active(self, exchange: bool = True) -> Iterator[None]:
        """Count, and strike, while the context lasts.

        Args:
            exchange: whether the file system can exchange names; NFS cannot.
        """
        writes = type("Written", (io.FileIO,), {"write": self.strikes_method(io.FileIO.write)})

        def opened(path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if mode == "xb":
                return writes(path, "xb")
            return builtins.open(path, mode, *arguments, **keywords)

        swap: Callable[..., Any] = file_system.rename_exchange
        if not exchange:
            swap = refuse_to_exchange
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self.strikes(getattr(os, name))))
            counted = self.strikes(swap)
            for module in (file_system, local_folder):
                stack.enter_context(mock.patch.object(module, "rename_exchange", counted))
            stack.enter_context(mock.patch.object(local_folder, "rename_new", self.strikes(local_folder.rename_new)))
            stack.enter_context(mock.patch.object(local_folder, "open", opened, create=True))
            yield

    def strikes_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        struck = self.strikes(method)
        return lambda own, data: struck(own, data)


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


# Damages of a file: (content, the file's neighbour, a seed) -> content; None: the file is gone.

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
    "last bit": lambda content, other, draw: _flip(content, len(content) - 1, draw.randrange(8)),
    "a bit": lambda content, other, draw: _flip(content, draw.randrange(len(content)), draw.randrange(8)),
    "zeroed block": lambda content, other, draw: _zeroed(content, draw),
    "all zero": lambda content, other, draw: bytes(len(content)),
    "noise": lambda content, other, draw: draw.randbytes(len(content)),
    "another file": lambda content, other, draw: other,
    "another file's length": lambda content, other, draw: (content * 2)[: len(other)] if other else b"",
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
