"""The copies of shards that no rank of another node holds: each rank's file of tensors is sent to the next node.

A copy shares the link with training's own messages, which training waits for. So it is sent in small pieces with rests
between them, as a background transfer that yields to others ("less than best effort", RFC 6297): a message of training
waits for one piece at most, and finds the link free most of the time. The first copy of a process has no rests, because
training waits for the first state; it tells how fast the link is.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from smp_core.checkpoint.memory_folder import NodeMemory
from smp_core.checkpoint.memory_records import Record
from smp_core.checkpoint.memory_slots import Slot, slot_name
from smp_core.checkpoint.ranks import Ranks
from smp_core.compat import collective_timeout

PIECE_BYTES = 64 << 20  # of one message where nothing else is on the link
_LEAST_PIECE_BYTES = 256 << 10  # a smaller message costs more processor time than it spares others waiting
_PIECE_SECONDS = 0.004  # that a message of training waits for a piece on the link before it
_SHARE_OF_INTERVAL = 0.5  # of the time between two saves: the next one may come sooner than the last one did
_MOST_STRETCH = 10  # times a copy's seconds without rests: a lost node has no use for a state that has not arrived
_SHARE_OF_LIMIT = 0.25  # of the time that a rank with less to send, or nothing, waits for the others at the commit
_LONGEST_REST = 1.0  # seconds: the neighbour waits meanwhile, and the limit of its collectives is far longer


def pieces(memory: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> list[torch.Tensor]:
    """Cut the bytes of a file into messages."""
    return [memory[begin : begin + piece_bytes] for begin in range(0, len(memory), piece_bytes)]


class Pace:
    """The size of the pieces of a copy, and the rests between them.

    Args:
        limit: seconds for which the ranks wait for one another before they give up; may be infinite.
        clock: returns seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._limit = limit
        self._save_began: float | None = None
        self._interval = 0.0
        self._bytes_per_second = 0.0  # until a copy was sent without rests: not known
        self._hurries = threading.Event()

    def begin_save(self) -> None:
        """Note that a save begins; the time since the one before is taken for the time until the next one."""
        now = self.clock()
        self._interval = 0.0 if self._save_began is None else now - self._save_began
        self._save_began = now
        self._hurries.clear()

    def hurry(self) -> None:
        """Leave out what remains of the rests, from any thread: somebody waits for the save."""
        self._hurries.set()

    def learn(self, n_bytes: int, seconds: float) -> None:
        """Take the speed of the link from a copy that was sent without rests."""
        if not self._bytes_per_second and n_bytes:
            self._bytes_per_second = n_bytes / max(seconds, 1e-9)

    @property
    def piece_bytes(self) -> int:
        """The bytes of a piece."""
        if not self._bytes_per_second:
            return PIECE_BYTES
        return int(min(max(self._bytes_per_second * _PIECE_SECONDS, _LEAST_PIECE_BYTES), PIECE_BYTES))

    def duration(self, n_bytes: int) -> float:
        """Return the seconds over which a copy is spread; 0: it is sent without rests."""
        if not self._bytes_per_second:
            return 0.0
        without_rests = n_bytes / self._bytes_per_second
        return min(_SHARE_OF_INTERVAL * self._interval, _MOST_STRETCH * without_rests, _SHARE_OF_LIMIT * self._limit)

    def rest(self, due: float) -> None:
        """Rest until an instant of the clock, unless somebody waits for the save."""
        seconds = min(due - self.clock(), _LONGEST_REST)
        if seconds > 0:
            self._hurries.wait(seconds)


def exchange_copies(
    sent: Sequence[torch.Tensor],
    to: int,
    taken: Sequence[torch.Tensor],
    source: int,
    group: dist.ProcessGroup | None,
    pace: Pace,
) -> None:
    """Send the pieces of one copy and receive those of another, spread over the time that the longer one may take.

    Args:
        sent, taken: uint8, of any two numbers and sizes; the other side has the same of the same messages.
        to, source: ranks of the world.

    Raises:
        RuntimeError: the other side is gone, or has sent nothing within the group's timeout.
    """
    n_bytes = max(sum(map(len, sent)), sum(map(len, taken)))
    steps = max(len(sent), len(taken))
    duration, began = pace.duration(n_bytes), pace.clock()
    for step in range(steps):
        pace.rest(began + duration * step / steps)
        works = []
        if step < len(sent):
            works.append(dist.isend(sent[step], to, group=group))
        if step < len(taken):
            works.append(dist.irecv(taken[step], source, group=group))
        for work in works:
            assert work is not None
            work.wait()
    if not duration:
        pace.learn(n_bytes, pace.clock() - began)


class NeighbourCopies:
    """The copies between the nodes of a run: this rank's on the next node, and on this node that of the one before.

    Args:
        folder: the node's folder.
        ranks: all ranks.
        nodes: ranks of each node.

    Attributes:
        pace: at which copies are sent.
    """

    def __init__(self, folder: NodeMemory, ranks: Ranks, nodes: Sequence[Sequence[int]]) -> None:
        limit = collective_timeout(ranks.group) if ranks.size > 1 else None
        self.pace = Pace(math.inf if limit is None else limit.total_seconds())
        self._folder, self._ranks, self._nodes = folder, ranks, nodes
        self._slots: dict[int, Slot] = {}

    def are_needed(self, layouts: Sequence[str]) -> bool:
        """Tell whether any rank holds tensors that no rank of another node does, by the digests of all layouts."""
        return any(self._only_on_its_node(layouts))

    def exchange(
        self, what: str, record: Record, layout: bytes, memory: torch.Tensor, number: int
    ) -> list[tuple[Record, bytes]]:
        """Send this rank's part to the next node, and take that of the node before. Collective.

        Args:
            what: the beginning of the error message.
            record, layout, memory: of this rank's part.
            number: of the file, 0 or 1.

        Returns:
            the record and the layout of the copy that has come, if any.

        Raises:
            CheckpointError: there is no room for a copy; on all ranks.
        """
        is_sent = self._only_on_its_node(record.layouts)[record.rank]
        sent = pieces(memory, self.pace.piece_bytes) if is_sent else []
        head = (record, layout, self.pace.piece_bytes) if is_sent else None
        to, source = self._neighbour(1), self._neighbour(-1)
        coming = self._ranks.gather(head)[source]  # small beside the tensors

        def room() -> Slot | None:
            return None if coming is None else self._room(source, number, coming[0].size)

        copy, _ = self._ranks.together(what, room)
        taken = [] if copy is None or coming is None else pieces(copy.memory, coming[2])
        exchange_copies(sent, to, taken, source, self._ranks.group, self.pace)
        if copy is None or coming is None:
            return []
        return [(dataclasses.replace(coming[0], file=copy.name), coming[1])]

    def _only_on_its_node(self, layouts: Sequence[str]) -> list[bool]:
        """Tell of each rank whether no rank of another node has the same tensors; none where there is one node."""
        if len(self._nodes) == 1:
            return [False] * len(layouts)
        node_of = {rank: number for number, node in enumerate(self._nodes) for rank in node}
        nodes: dict[str, set[int]] = {}
        for rank, layout in enumerate(layouts):
            nodes.setdefault(layout, set()).add(node_of[rank])
        return [len(nodes[layout]) == 1 for layout in layouts]

    def _neighbour(self, distance: int) -> int:
        """Return the rank at this rank's place in another node."""
        mine = next(number for number, node in enumerate(self._nodes) if self._ranks.rank in node)
        place = self._nodes[mine].index(self._ranks.rank)
        return self._nodes[(mine + distance) % len(self._nodes)][place]

    def _room(self, source: int, number: int, size: int) -> Slot:
        slot = self._slots.get(number)
        if slot is None or len(slot.memory) != size:
            name = slot_name(source, number)
            slot = self._slots[number] = Slot(name, self._folder.allocate(name, size))
        return slot
