"""Boards with the signs of life of all ranks, which nobody waits for.

A board is a table of values in the process of one rank, its keeper, apart from the
stores of process groups. Rank 0 keeps one and the last rank, which is on another node
where there are several, keeps the other: where one of them is stopped, killed or cut
off, the other board still answers.

Every rank has one connection to each keeper, made at the start: the keeper listens on
the interface that leads to the other ranks, hands its address and a secret to them
through the process group, admits who answers its challenge with the secret, and stops
listening once all are there. From then on there is no port that a stranger could reach.

Requests are lines of JSON, ``[method, argument, ...]``, answered in their order by a
line each. Both ends run in the event loop of one thread; a request waits for that
thread with a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, TimeoutError as NoAnswer
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from smp_core.cluster import of_all_ranks

logger = logging.getLogger("smp")
T = TypeVar("T")
Sign = dict[str, Any]

# Seconds that a keeper has to answer: far more than a busy machine takes.
PATIENCE = 10.0
# Seconds for all ranks to reach a board.
_START = 60.0
# Bytes of the longest line: the signs of all ranks.
_LONGEST = 2**28
# Connections beyond one for each rank that may wait to be admitted; the oldest goes
# where there are more.
_STRANGERS = 64
_WELCOME = b"welcome\n"
NO_SIGN: Sign = {
    **dict.fromkeys(("beats", "step", "forwards", "windows", "batches"), 0),
    "between": False,
}
"""Of a rank that has given none yet."""


class BoardSilent(ConnectionError):
    """The keeper of a board does not answer; it may answer later."""


class Invitation(NamedTuple):
    """The address and the secret that a rank needs to reach a board."""

    address: str
    port: int
    secret: str

    def answer_to(self, challenge: bytes) -> bytes:
        # The answer to a challenge shows that a rank has the secret, without sending
        # it.
        return (
            hmac.digest(self.secret.encode(), challenge, "sha256").hex().encode()
            + b"\n"
        )


class Table:
    """The values of a board, as JSON. Its methods are the requests."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def set(self, key: str, value: Any, wanted: Sequence[str] = ()) -> list[Any]:
        """Set a value. Returns those of the keys that are ``wanted`` in return."""
        self._values[key] = value
        return self.values(wanted)

    def get(self, key: str) -> Any:
        """Return a value; None where there is none."""
        return self._values.get(key)

    def values(self, keys: Sequence[str]) -> list[Any]:
        """Return several values; None where there is none."""
        return [self._values.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a count, which begins at 0, and return it."""
        self._values[key] = self._values.get(key, 0) + amount
        return int(self._values[key])

    def claim(self, key: str, value: Any) -> Any:
        """Set the value of ``key`` if it has none. Returns the one it has."""
        return self._values.setdefault(key, value)

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._values.pop(key, None)


class Keeper:
    """The keeper's end of a board: admits ranks, and answers them.

    Args:
        world_size: the ranks that will come, the keeper itself among them.
    """

    def __init__(self, world_size: int) -> None:
        self.invitation: Invitation | None = None
        self._table = Table()
        self._most_waiting = world_size + _STRANGERS
        self._waiting: deque[StreamWriter] = deque()
        self._admitted: list[StreamWriter] = []
        self._turned_away = False
        self._server: asyncio.Server | None = None

    async def listen(self, address: str) -> None:
        """Begin to admit ranks.

        Raises:
            OSError: there is no such interface here.
        """
        options: dict[str, Any] = {"limit": _LONGEST, "backlog": self._most_waiting}
        # Port 0: the system chooses a free one.
        self._server = await asyncio.start_server(self._serve, address, 0, **options)
        port = self._server.sockets[0].getsockname()[1]
        self.invitation = Invitation(address, port, secrets.token_hex(32))

    async def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        # A connection that has not answered the challenge by then is no rank's.
        for stranger in self._waiting:
            stranger.transport.abort()
        self._waiting.clear()

    def close(self) -> None:
        """End all connections."""
        for writer in self._admitted:
            writer.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            if not await self._admit(reader, writer):
                return
            # One request after another, so answers come in order.
            while line := await reader.readline():
                method, *arguments = json.loads(line)
                answer = getattr(self._table, method)(*arguments)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except OSError:
            pass  # that rank has ended
        except Exception:
            logger.exception(
                "a board of signs of life cannot read a request, and closes the connection"
            )
        finally:
            writer.close()

    async def _admit(self, reader: StreamReader, writer: StreamWriter) -> bool:
        """Return whether the other end has the secret. A silent one keeps no other
        waiting."""
        assert self.invitation is not None and self._server is not None
        if not self._server.is_serving():
            return False
        # A crowd of strangers pushes out the oldest of them, not the ranks to come.
        self._waiting.append(writer)
        if len(self._waiting) > self._most_waiting:
            self._waiting.popleft().transport.abort()
        challenge = secrets.token_hex(32).encode()
        writer.write(challenge + b"\n")
        expected = self.invitation.answer_to(challenge)
        try:
            answer = await reader.readexactly(len(expected))
        except asyncio.IncompleteReadError:
            answer = b""
        # It was pushed out meanwhile.
        if writer not in self._waiting:
            return False
        self._waiting.remove(writer)
        # compare_digest takes equally long for every wrong answer.
        if not hmac.compare_digest(answer, expected):
            self._name_once(writer)
            return False
        self._admitted.append(writer)
        writer.write(_WELCOME)
        return True

    def _name_once(self, stranger: StreamWriter) -> None:
        if not self._turned_away:
            self._turned_away = True
            logger.warning(
                "turned away at the port for signs of life: %s",
                stranger.get_extra_info("peername"),
            )


class Board:
    """A rank's end of a board, asked with a limit.

    Args:
        keeper: the rank in whose process the table is.
        reader, writer: the connection to it.
        kept: in the keeper's process, the other end.

    Attributes:
        closed: whether this rank is done with it.

    Every request raises ConnectionError where the keeper has ended or cannot be reached
    any more, and BoardSilent where it does not answer within :data:`PATIENCE` seconds;
    at once where it has not answered a request before this one.
    """

    def __init__(
        self,
        keeper: int,
        reader: StreamReader,
        writer: StreamWriter,
        kept: Keeper | None = None,
    ) -> None:
        self.keeper = keeper
        self.closed = False
        self._reader = reader
        self._writer = writer
        self._kept = kept
        self._turn = asyncio.Lock()
        self._unanswered: Future[Any] | None = None
        self._posted: dict[str, Future[Any]] = {}

    async def _request(self, method: str, arguments: tuple[Any, ...]) -> Any:
        # The lock keeps a request and its answer together; other requests of this rank
        # wait.
        async with self._turn:
            try:
                self._writer.write(json.dumps([method, *arguments]).encode() + b"\n")
                answer = await self._reader.readline()
            except OSError as error:
                raise ConnectionError(
                    f"the board of rank {self.keeper}: {error}"
                ) from error
        # A connection that was closed ends without the line's end.
        if not answer.endswith(b"\n"):
            raise ConnectionError(f"rank {self.keeper} has closed its board")
        return json.loads(answer)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have the keeper call a method of its :class:`Table`; return the answer."""
        if self.closed:
            raise ConnectionError(
                f"this rank is done with the board of rank {self.keeper}"
            )
        # One request without an answer is waited for at most; a second one would only
        # be delayed too.
        if self._unanswered is not None and not self._unanswered.done():
            raise BoardSilent(f"rank {self.keeper} does not answer")
        asked = _start(self._request(method, arguments))
        try:
            return asked.result(PATIENCE)
        # The limit is on the caller's side: the loop goes on, and the answer may come
        # later.
        except NoAnswer:
            self._unanswered = asked
            raise BoardSilent(f"rank {self.keeper} does not answer") from None

    def post(self, method: str, *arguments: Any) -> Any:
        """Ask without waiting, if the last such request was answered: to a silent
        keeper they would pile up.

        Returns:
            the answer to the last one; None if there is none.
        """
        last = self._posted.get(method)
        # The former request is still under way.
        if last is not None and not last.done():
            return None
        self._posted[method] = _start(self._request(method, arguments))
        return None if last is None else last.result()

    def signs_of(self, ranks: Iterable[int]) -> list[Sign]:
        """Return the last sign of life of each of ``ranks``, as it was set for the key
        ``beat/RANK``."""
        keys = [f"beat/{rank}" for rank in ranks]
        return [sign or NO_SIGN for sign in self.ask("values", keys)]

    def close(self) -> None:
        """Make no further requests; on the keeper, end the board. Does not wait."""
        if not self.closed:
            self.closed = True
            # The connection belongs to the loop's thread.
            _loop_of(os.getpid()).call_soon_threadsafe(
                (self._kept or self._writer).close
            )


def open_boards(host: str) -> list[Board]:
    """Make the boards, and let every rank reach them. Collective over the world.

    Args:
        host: the name of rank 0's machine.

    Returns:
        rank 0's and the last rank's, without those that some rank cannot reach.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # The outermost ranks: where there are several nodes, they are on two of them.
    keepers = sorted({0, world - 1})
    own = _own_address(host)
    addresses = of_all_ranks(own)
    kept = Keeper(world) if rank in keepers else None
    if kept is not None:
        # Seen from its own machine, a host may have the name of the loopback interface.
        elsewhere = [
            address
            for address in addresses
            if not ipaddress.ip_address(address).is_loopback
        ]
        with contextlib.suppress(OSError):
            _await(kept.listen(_own_address(elsewhere[0]) if elsewhere else own))
    invitations = of_all_ranks(kept.invitation if kept is not None else None)
    boards: list[Board] = []
    # Every rank tries every board, and all keep those that all have reached.
    for keeper in keepers:
        invitation = invitations[keeper]
        connection: tuple[StreamReader, StreamWriter] | None = None
        if invitation is not None:
            with contextlib.suppress(OSError):
                connection = _await(_connect(invitation))
        if connection is not None:
            boards.append(Board(keeper, *connection, kept if keeper == rank else None))
    reached = of_all_ranks([board.keeper for board in boards])
    if kept is not None:
        # From here on the ports are closed.
        _await(kept.stop_listening())
    for board in boards:
        if not all(board.keeper in each for each in reached):
            board.close()
    return [board for board in boards if not board.closed]


async def _connect(invitation: Invitation) -> tuple[StreamReader, StreamWriter]:
    """Connect to a keeper, and again where it turns this rank away: strangers may crowd
    its port."""
    while True:
        reader, writer = await asyncio.open_connection(
            invitation.address, invitation.port, limit=_LONGEST
        )
        # The keeper may turn this rank away because strangers have taken its place;
        # another try finds one.
        with contextlib.suppress(OSError):
            challenge = await reader.readline()
            writer.write(invitation.answer_to(challenge.strip()))
            if await reader.readline() == _WELCOME:
                return reader, writer
        writer.close()
        await asyncio.sleep(0.05)


def _own_address(host: str) -> str:
    """Return the address of this machine on the network that leads to ``host``."""
    with contextlib.suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # a datagram socket: this only chooses the interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop_of(os.getpid()))


def _await(coroutine: Coroutine[Any, Any, T]) -> T:
    """Raises TimeoutError, an OSError, after :data:`_START` seconds."""
    started = _start(coroutine)
    try:
        return started.result(_START)
    except NoAnswer:
        started.cancel()
        raise TimeoutError(f"nothing came in {_START:g} s") from None


@functools.lru_cache(maxsize=1)
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of all boards in this process; a fork begins with one of
    its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="smp-boards", daemon=True).start()
    return loop


def attempt(action: Callable[..., T], *arguments: Any) -> T | None:
    """Ask a board, which may be out of reach; that is an answer, not an error: None."""
    try:
        return action(*arguments)
    except ConnectionError:
        return None
