"""Boards with the signs of life of all ranks, which nobody waits for.

A board is a small store in the process of one rank, its keeper, apart from the stores of process groups. Rank 0 keeps
one and the last rank, which is on another node where there are several, keeps the other: where one of them is stopped,
killed or cut off, the other board still says so. A store answers when its keeper's process has a turn, and a call to
one that has none never returns; so every board has a thread of its own here, and whoever asks waits for that thread
with a limit.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Seconds that a keeper has to answer: far more than a busy machine takes.
PATIENCE = 10.0
GONE = (dist.DistError, RuntimeError, ConnectionError)
"""What a board raises when it is out of reach: its keeper has ended, or is silent."""


class BoardSilent(ConnectionError):
    """The keeper of a board does not answer; it may answer later."""


class Call:
    """A question to a board.

    Attributes:
        ended: set when there is an answer.
        result, error: the answer; one of them.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...], is_awaited: bool) -> None:
        self.name, self.arguments, self.is_awaited = name, arguments, is_awaited
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Board:
    """One store, asked with a limit; the methods are those of ``dist.Store``.

    Attributes:
        keeper: the rank in whose process the store is.
        closed: whether this rank is done with it.

    Every method raises BoardSilent where the keeper does not answer within :data:`PATIENCE` seconds, at once where it
    has not answered a call before this one; and what torch raises where the connection is closed.
    """

    def __init__(self, keeper: int, store: dist.Store) -> None:
        self.keeper = keeper
        self.closed = False
        self._turn = threading.Lock()  # held by the caller, and given back by the thread
        self._silent = False
        self._posted: dict[str, Call] = {}
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, args=(store,), name="smp-board", daemon=True)
        self._thread.start()

    def _answer(self, store: dist.Store) -> None:
        """Run calls, in their order. The store lives as long as this does."""
        while (call := self._calls.get()) is not None:
            try:
                call.result = getattr(store, call.name)(*call.arguments)
            except BaseException as error:
                call.error = error
            self._silent = False
            call.ended.set()
            if call.is_awaited:
                self._turn.release()
            del call

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self.closed:
            raise ConnectionError(f"this rank is done with the board of rank {self.keeper}")
        if not self._turn.acquire(timeout=0 if self._silent else PATIENCE):
            raise BoardSilent(f"rank {self.keeper} does not answer")
        call = Call(name, arguments, is_awaited=True)
        self._calls.put(call)
        if not call.ended.wait(PATIENCE):
            self._silent = not call.ended.is_set()
            raise BoardSilent(f"rank {self.keeper} does not answer")
        if call.error is not None:
            raise call.error
        return call.result

    def post_again(self, name: str, *arguments: Any) -> Call | None:
        """Ask without waiting, if the last such question has been answered: to a silent keeper they would pile up.

        Returns:
            the last one, with its answer; None if there is none.
        """
        last = self._posted.get(name)
        if last is not None and not last.ended.is_set():
            return None
        self._posted[name] = Call(name, arguments, is_awaited=False)
        self._calls.put(self._posted[name])
        return last

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask("multi_get", keys)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask("compare_set", key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def close(self) -> None:
        """Make no further calls, and let go of the store when the call under way has returned. Does not wait."""
        if not self.closed:
            self.closed = True
            self._calls.put(None)


def open_boards(host: str) -> list[Board]:
    """Make the boards, and let every rank reach them. Collective over the world.

    Args:
        host: the name of rank 0's machine.

    Returns:
        rank 0's and the last rank's, without those that some rank cannot reach.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"timeout": timedelta(seconds=60), "wait_for_workers": False}
    boards: list[Board] = []
    for keeper in sorted({0, world - 1}):
        store: dist.Store | None = None
        where: list[Any] = [None]
        if rank == keeper:
            address = host if keeper == 0 else _own_address(host)
            with contextlib.suppress(*GONE):
                store = dist.TCPStore(address, 0, world, True, **options)
                where = [(address, store.port)]
        dist.broadcast_object_list(where, src=keeper)
        if store is None and where[0] is not None:
            address, port = where[0]
            with contextlib.suppress(*GONE):
                store = dist.TCPStore(address, port, world, False, **options)
        reached: list[Any] = [None] * world
        dist.all_gather_object(reached, store is not None)
        if store is not None and all(reached):
            boards.append(Board(keeper, store))
    return boards


def _own_address(host: str) -> str:
    """Return the address of this machine on the network that leads to ``host``."""
    with contextlib.suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()
