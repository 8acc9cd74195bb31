"""The saves into shared memory: staged alongside training, committed by all ranks
together, kept on two nodes.

A rank's part is a checkpoint folder of its own slices (folder.py). Ranks do not share
the writing of replicas, as they do on disk: a replica on another node costs nothing and
survives the node. The thread of a save

1. copies what was not copied at once;
2. makes the index and digests, whose records go to all ranks;
3. takes from rank 0 what is the same for all ranks;
4. sends a copy to the next node where no rank of another node has the same slices;
5. writes manifests, which are the commit.

Only then may the state before be written over, so that at every instant one state is
complete.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.checkpoint.folders.file_system import new_save_id
from smp_core.checkpoint.folders.storage import BLOCK_BYTES
from smp_core.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    digest_of,
    new_digest,
)
from smp_core.checkpoint.memory.folder import TENSORS, NodeMemory, part_name
from smp_core.checkpoint.memory.slots import SharedSlots, Slot
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.staging import Staged, stage
from smp_core.checkpoint.tensor_file import bytes_view
from smp_core.checkpoint.tree import EncodedRest, merge_rest
from smp_core.checkpoint.untrusted import StoreError

logger = logging.getLogger("smp")

WRITER = "smp-memory-checkpoint"
"""The name of the thread of a save."""
INDEX = "index.json"
REST = "rest.json"
REST_PT = "rest.pt"
# In a manifest's metadata: the digest of each rank's index; ranks of equal ones have
# equal tensors.
LAYOUTS = "layouts"
_ALGORITHM = "xxh3"
# Parts of up to this size are written at once: a thread beside training would take
# longer.
_SMALL_BYTES = 1 << 20
# A copy to another node goes in pieces, so that a message of training waits for one at
# most.
_PIECE_BYTES = 1 << 20


def wait_for_writers() -> None:
    """Wait for saves that runs before in this process have left in flight: a run that
    failed does not wait for its last one, and a run that goes on from it finds that one
    and writes to the same files. They end within the timeout of their collectives.
    """
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


@dataclass(frozen=True)
class Prepared:
    """The facts of a rank's part that go to all: records of its index and tensors, its
    own value encoded, and names of tensors that changed while they were copied."""

    files: dict[str, FileRecord]
    own: EncodedRest
    changed: list[str]


class MemorySaver:
    """A writer of states into shared memory, at most one in flight.

    Args:
        folder: the node's folder.
        ranks: all ranks, over a gloo group that only this saver and the search use.
        nodes: ranks of each node.
        on_disk: returns the sequence number of a save now, and what there is on disk;
            asked on rank 0.
    """

    def __init__(
        self,
        folder: NodeMemory,
        ranks: Ranks,
        nodes: Sequence[Sequence[int]],
        on_disk: Callable[[], tuple[int, dict[str, Any]]],
    ) -> None:
        self.slots = SharedSlots(folder, ranks.rank)
        self._folder = folder
        self._ranks = ranks
        self._on_disk = on_disk
        # The copy goes around a ring of nodes, between ranks of the same place on them.
        self._node_of = {
            rank: number for number, node in enumerate(nodes) for rank in node
        }
        mine, self._n_nodes = self._node_of[ranks.rank], len(nodes)
        place = list(nodes[mine]).index(ranks.rank)
        self._next, self._before = (
            nodes[(mine + step) % len(nodes)][place] for step in (1, -1)
        )
        self._copies: dict[int, Slot] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._waits = True  # for the first state; and for each, where that was small

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metadata: dict[str, Any],
        per_rank: Any,
    ) -> None:
        """Stage a state and return. Collective; parameters and optimizer states may
        change after :meth:`before_update`, everything else at once.

        Raises:
            CheckpointError: on all ranks: the save before this one failed; or this one
                did, which is waited for if it is the run's first, or small.
        """
        # The files are two, so at most one save may be in flight.
        self.wait()
        waits = self._waits
        self.slots.turn()
        staged: Staged | None = None
        problem: Exception | None = None
        try:
            # A manifest must not describe bytes that are about to be written over.
            for rank in {self._ranks.rank, self._before}:
                self._folder.uncommit(part_name(rank, self.slots.number))
            staged = stage(state, per_rank, self._ranks.rank, False, self.slots)
        except Exception as error:  # told to the other ranks by the thread
            problem = error
        self._copied.clear()
        facts = (step, metadata)
        self._thread = threading.Thread(
            target=self._write, args=(staged, problem, facts), name=WRITER, daemon=True
        )
        self._thread.start()
        if waits:
            self.wait()

    def before_update(self) -> None:
        """Wait until parameters and optimizer states have been copied. Call it before
        they change."""
        if self._thread is not None:
            self._copied.wait()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(str(error)) from error

    def forget(self) -> None:
        """Make the states that are kept unreadable, when the one in flight has
        ended."""
        try:
            self.wait()
        finally:
            for rank in {self._ranks.rank, self._before}:
                for number in range(2):
                    self._folder.uncommit(part_name(rank, number))

    def close(self) -> bool:
        """Give back pinned memory, unless a copy into it is still in flight; return
        whether no save is."""
        if self._thread is None or self._copied.is_set():
            self.slots.close()
        return self._thread is None or not self._thread.is_alive()

    # In the thread

    def _write(
        self,
        staged: Staged | None,
        problem: Exception | None,
        facts: tuple[int, dict[str, Any]],
    ) -> None:
        try:
            self._write_together(staged, problem, *facts)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    def _write_together(
        self,
        staged: Staged | None,
        problem: Exception | None,
        step: int,
        metadata: dict[str, Any],
    ) -> None:
        what, rank = f"step {step} was not kept in memory", self._ranks.rank

        # This rank's tensors and index.
        # Raised here, inside the exchange, the error reaches all ranks.
        def prepare() -> tuple[bytes, Prepared]:
            if problem is not None:
                raise problem
            assert staged is not None
            changed = self.slots.copy_rest()
            self._copied.set()
            index = self.slots.index_of(staged)
            files = {
                INDEX: record_of(index),
                TENSORS: record_of(bytes_view(self.slots.memory)),
            }
            return index, Prepared(files, staged.own, changed)

        # One exchange of records also shows the other ranks that this one has all its
        # bytes.
        (index, _), parts = self._ranks.together(what, prepare, lambda it: it[1])
        changed = [
            f"{name} on rank {number}"
            for number, part in enumerate(parts)
            for name in part.changed
        ]
        # Half of an optimizer's step may be in such a copy: it is of no one instant.
        if changed:
            why = f"{len(changed)} tensors changed between two optimizer steps, e.g. {changed[0]}"
            self._give_up(
                step,
                f"{why}; change parameters before the batch's last hook, or save to disk",
            )
            return
        assert staged is not None
        # A small state is written before the next step would be; a thread beside
        # training costs more than waiting.
        self._waits = max(part.files[TENSORS].bytes for part in parts) <= _SMALL_BYTES

        # What is the same for all ranks.
        found = self._ranks.on_first(
            what, lambda: self._shared(staged, parts, step, metadata)
        )
        if isinstance(found, str):
            self._give_up(
                step, f"its place among the checkpoints on disk is not known ({found})"
            )
            return
        manifest, rest = found

        # The copy on the next node, and the commit.
        indexes = {rank: index}
        lonely = self._only_on_their_node(manifest.metadata[LAYOUTS])
        if lonely:
            indexes |= self._exchange(what, index, parts, lonely)

        def commit() -> None:
            for owner, content in indexes.items():
                part = part_name(owner, self.slots.number)
                for name, data in {INDEX: content, **rest}.items():
                    self._folder.write(part, name, data)
                own = dataclasses.replace(
                    manifest, files={**manifest.files, **parts[owner].files}
                )
                self._folder.write(part, MANIFEST, own.to_bytes())

        # All copies are in place on all ranks; only now are manifests written.
        self._ranks.together(what, commit)

    def _shared(
        self, staged: Staged, parts: list[Prepared], step: int, metadata: dict[str, Any]
    ) -> tuple[Manifest, dict[str, bytes]] | str:
        """Return the manifest without what is each rank's own, and the files of the
        rest; why not, if the disk's trouble is to blame: the next state may be numbered
        again. On rank 0."""
        try:
            # The sequence number orders this state among the checkpoints on disk.
            sequence, on_disk = self._on_disk()
        except StoreError as error:
            return str(error)
        # What is the same for all ranks: the rest of the state.
        assert staged.rest is not None
        rest = merge_rest(staged.rest, [part.own for part in parts])
        # Replicas write equal indexes, so that digests tell which ranks hold equal
        # slices.
        files = {REST: json.dumps({"format": FORMAT, "tree": rest.tree}).encode()}
        if rest.plain:
            buffer = io.BytesIO()
            torch.save(rest.plain, buffer)
            files[REST_PT] = buffer.getvalue()
        layouts = [part.files[INDEX].digest for part in parts]
        manifest = Manifest(
            id=new_save_id(),
            created="",
            step=step,
            world_size=self._ranks.size,
            meshes=staged.meshes,
            versions={},
            metadata={**metadata, **on_disk, LAYOUTS: layouts},
            algorithm=_ALGORITHM,
            files={name: record_of(content) for name, content in files.items()},
            index=INDEX,
            rest=REST,
            rest_pt=REST_PT if REST_PT in files else None,
            sequence=sequence,
        )
        return manifest, files

    def _only_on_their_node(self, layouts: Sequence[str]) -> set[int]:
        """Return the ranks whose slices no rank of another node has; none where there
        is one node."""
        # Ranks of equal layout on two nodes are each other's copy already.
        nodes: dict[str, set[int]] = {}
        for rank, layout in enumerate(layouts):
            nodes.setdefault(layout, set()).add(self._node_of[rank])
        return {
            rank
            for rank, layout in enumerate(layouts)
            if self._n_nodes > 1 and len(nodes[layout]) == 1
        }

    def _exchange(
        self, what: str, index: bytes, parts: list[Prepared], lonely: set[int]
    ) -> dict[int, bytes]:
        """Send this rank's part to the next node, and take that of the node before.
        Collective.

        Returns:
            the rank and the index of the copy that has come, if any.

        Raises:
            CheckpointError: there is no room for a copy; on all ranks.
        """
        before, number = self._before, self.slots.number
        size = parts[before].files[TENSORS].bytes

        def room() -> list[Tensor]:
            # The rank before has a replica on another node and sends nothing.
            if before not in lonely:
                return []
            slot = self._copies.get(number)
            # Rooms of copies are kept from save to save, like the slots of this rank.
            if slot is None or len(slot.memory) != size:
                slot = self._copies[number] = Slot(
                    self._folder.allocate(part_name(before, number), size)
                )
            return [
                torch.empty(parts[before].files[INDEX].bytes, dtype=torch.uint8),
                slot.memory,
            ]

        # Room on all ranks first, so that none sends to one that has failed.
        taken, _ = self._ranks.together(what, room)
        mine = self._ranks.rank in lonely
        sent = (
            [torch.frombuffer(bytearray(index), dtype=torch.uint8), self.slots.memory]
            if mine
            else []
        )
        exchange_copies(sent, self._next, taken, before, self._ranks.group)
        return {before: bytes(bytes_view(taken[0]))} if taken else {}

    def _give_up(self, step: int, why: str) -> None:
        """Keep the state before instead, with a warning. On all ranks."""
        # Back: the next save writes over this one, not over the newest that is whole.
        self.slots.turn()
        if self._ranks.rank == 0:
            logger.warning("step %d is not kept in memory: %s", step, why)


def record_of(content: bytes | memoryview) -> FileRecord:
    """Return the size and the digest of a file's content, piece by piece: other threads
    go on in between."""
    digest = new_digest(_ALGORITHM)
    for begin in range(0, len(content), BLOCK_BYTES):
        digest.update(content[begin : begin + BLOCK_BYTES])
    return FileRecord(len(content), digest.hexdigest(), 0, digest_of(b"", _ALGORITHM))


def pieces(tensors: Sequence[Tensor], piece_bytes: int = _PIECE_BYTES) -> list[Tensor]:
    """Cut bytes into messages."""
    return [
        part for tensor in tensors for part in tensor.split(piece_bytes) if len(part)
    ]


def exchange_copies(
    sent: Sequence[Tensor],
    to: int,
    taken: Sequence[Tensor],
    source: int,
    group: dist.ProcessGroup | None,
    piece_bytes: int = _PIECE_BYTES,
) -> None:
    """Send one copy in pieces and receive another, with a rest after each piece for as
    long as it took: messages of training find the link free half of the time.

    Args:
        sent, taken: uint8, of any sizes; the other side has the same.
        to, source: ranks of the world.

    Raises:
        RuntimeError: the other side is gone, or has sent nothing within the group's
            timeout.
    """
    out, coming = pieces(sent, piece_bytes), pieces(taken, piece_bytes)
    seconds = 0.0
    for step in range(max(len(out), len(coming))):
        time.sleep(seconds)
        began = time.monotonic()
        works = []
        # Both directions at once: ranks in a ring that only sent would wait for each
        # other.
        if step < len(out):
            works.append(dist.isend(out[step], to, group=group))
        if step < len(coming):
            works.append(dist.irecv(coming[step], source, group=group))
        for work in works:
            assert work is not None
            work.wait()
        seconds = time.monotonic() - began
