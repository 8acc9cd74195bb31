"""The search for the newest state that the memories of all nodes hold, and its way back to the ranks that lost theirs.

All ranks see the same lists of what each node holds, and so draw the same conclusion: for each rank, which file has its
tensors. That is its own where its node is still there, otherwise one of a rank with the same layout (a replica), or the
copy on the next node. Digests are compared before ranks agree; what does not fit is as if it were not there.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smp_core.checkpoint.layout import CheckpointError, digest_of
from smp_core.checkpoint.memory_copies import pieces
from smp_core.checkpoint.memory_folder import NodeMemory
from smp_core.checkpoint.memory_records import (
    MemoryCheckpoint,
    Part,
    Record,
    digests_of_blocks,
    layout_name,
    read_record,
    record_name,
)
from smp_core.checkpoint.memory_slots import slot_name
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.untrusted import JSON_BYTES

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Shelf:
    """The states in one node's memory.

    Attributes:
        records: name -> record, of files of tensors that are there in full size.
        small: undamaged files of layouts and rests.
    """

    records: dict[str, Record]
    small: set[str]


@dataclass(frozen=True)
class Source:
    """The place of a rank's tensors.

    Attributes:
        reader: the rank that reads them; the rank itself, or one that sends them.
        node: the key of its node's folder.
        name: of the record.
        record: what it says.
    """

    reader: int
    node: str
    name: str
    record: Record


@dataclass(frozen=True)
class Found:
    """A state that all ranks can be given.

    Attributes:
        sources: one for each rank.
        keys: key of each rank's folder.
        shelves: key -> what is there.
    """

    sources: list[Source]
    keys: list[str]
    shelves: dict[str, Shelf]

    @property
    def step(self) -> int:
        """The optimizer step of the state."""
        return self.sources[0].record.step

    @property
    def age(self) -> tuple[int, int]:
        """The order of states in memory and on disk."""
        return self.sources[0].record.sequence, self.step

    @property
    def sent(self) -> list[int]:
        """Ranks whose tensors come from another rank."""
        return [rank for rank, source in enumerate(self.sources) if source.reader != rank]


def look_at(folder: NodeMemory) -> Shelf:
    """List what a folder holds; what is damaged or foreign is left out, and named in a warning."""
    names = set(folder.names())
    reader = folder.folder()
    records: dict[str, Record] = {}
    small: set[str] = set()
    for name in sorted(names):
        try:
            if name.endswith(".record"):
                record = read_record(reader, name)
                if record.file in names and reader.size(record.file) == record.size:
                    records[name] = record
            elif name.startswith("layout-"):
                if layout_name(digest_of(reader.read(name, JSON_BYTES), "xxh3")) == name:
                    small.add(name)
            elif name.startswith("rest-"):
                small.add(name)
        except (CheckpointError, FileNotFoundError) as error:
            logger.warning("not used: %s", error)
    for record in records.values():
        for name, (_, digest) in record.rest.items():
            if name in small and digest_of(reader.read(name, JSON_BYTES), "xxh3") != digest:
                small.discard(name)
    return Shelf(records, small)


def find(folder: NodeMemory, ranks: Ranks) -> Found | None:
    """Find the newest state that is complete over all nodes and undamaged. Collective; the same on all ranks."""
    keys = ranks.gather(folder.key)
    is_first = keys.index(folder.key) == ranks.rank
    what = "states in memory were not looked at"
    _, lists = ranks.together(what, lambda: look_at(folder) if is_first else None, lambda shelf: shelf)
    shelves = {key: shelf for key, shelf in zip(keys, lists, strict=True) if shelf is not None}
    checked: dict[str, bool] = {}
    while True:
        records = [record for shelf in shelves.values() for record in shelf.records.values()]
        ages = sorted({record.age for record in records if record.world == ranks.size}, reverse=True)
        plans = (_sources(age[2], keys, shelves, ranks.size) for age in ages)
        sources = next((plan for plan in plans if plan is not None), None)
        if sources is None:
            return None
        mine = {source.name: source.record for source in sources if source.reader == ranks.rank}
        bad = []
        for name, record in mine.items():
            if name not in checked:
                checked[name] = _is_whole(folder, record)
            if not checked[name]:
                bad.append((folder.key, name))
        found_bad = [place for places in ranks.gather(bad) for place in places]
        if not found_bad:
            return Found(sources, keys, shelves)
        for key, name in found_bad:
            shelves[key].records.pop(name, None)


def _sources(save: str, keys: list[str], shelves: Mapping[str, Shelf], world: int) -> list[Source] | None:
    """Find a source for each rank's part of a save; None where one has none."""
    held = [
        (key, name, record)
        for key, shelf in shelves.items()
        for name, record in sorted(shelf.records.items())
        if record.save == save
    ]
    layouts = held[0][2].layouts
    rest = set(held[0][2].rest)
    small = [shelf.small for shelf in shelves.values()]
    if not any(rest <= names for names in small):
        return None
    if not all(any(layout_name(digest) in names for names in small) for digest in layouts):
        return None
    sources = []
    for rank in range(world):
        fitting = [entry for entry in held if entry[2].layout == layouts[rank]]
        if not fitting:
            return None
        # Its own on its own node, then any on its own node, then its own elsewhere (a copy), then any.
        key, name, record = min(fitting, key=lambda it: (it[0] != keys[rank], it[2].rank != rank))
        there = [other for other in range(world) if keys[other] == key]
        own = key == keys[rank] and record.rank == rank
        sources.append(Source(rank if own else there[rank % len(there)], key, name, record))
    return sources


def _is_whole(folder: NodeMemory, record: Record) -> bool:
    try:
        whole = digests_of_blocks(folder.map(record.file)) == record.blocks
    except (CheckpointError, OSError):
        whole = False
    if not whole:
        logger.warning("not used: %s/%s, whose bytes do not fit their digests", folder.path, record.file)
    return whole


def bring_back(found: Found, folder: NodeMemory, ranks: Ranks) -> tuple[MemoryCheckpoint, Part]:
    """Give each rank its part in its own node's memory, and remove all other states there. Collective.

    Returns:
        the state, to be read like a checkpoint, and this rank's part of it.

    Raises:
        CheckpointError: there is no room for a part; on all ranks.
    """
    what = f"step {found.step} was not read from memory"
    record = found.sources[0].record
    sources = {(source.node, source.name) for source in found.sources}
    ranks.together(what, lambda: _tidy(found, folder, ranks, sources))  # on all before anything is written

    # Layouts, and what is no tensor, where they are missing.
    layouts = _shared(found, ranks, folder, [layout_name(digest) for digest in record.layouts])
    rest = _shared(found, ranks, folder, list(record.rest)) if _lacks(found, set(record.rest)) else {}
    leads = found.keys.index(folder.key) == ranks.rank

    def small_files() -> None:
        for name, content in {**layouts, **rest}.items():
            if leads and not folder.holds(name):
                folder.write(name, content)

    ranks.together(what, small_files)

    # Tensors, from rank to rank.
    mine = found.sources[ranks.rank].record

    received, _ = ranks.together(what, lambda: _room(found, folder, ranks.rank), lambda _: None)
    for rank in found.sent:
        source = found.sources[rank]
        if source.reader == ranks.rank:
            for piece in pieces(folder.map(source.record.file)):
                dist.send(piece, rank, group=ranks.group)
        elif rank == ranks.rank:
            for piece in pieces(received[0]):
                dist.recv(piece, source.reader, group=ranks.group)

    def record_of_received() -> Record:
        if not received:
            return mine
        if digests_of_blocks(received[0]) != mine.blocks:
            raise CheckpointError(f"the part of rank {ranks.rank} was damaged on its way")
        kept = dataclasses.replace(mine, rank=ranks.rank, file=slot_name(ranks.rank, 0))
        content = kept.to_bytes()
        folder.write(record_name(kept, content), content)
        return kept

    kept, records = ranks.together(what, record_of_received, lambda it: it)
    own = {(found.keys[rank], record_name(each, each.to_bytes())) for rank, each in enumerate(records)}
    ranks.together(what, lambda: _tidy(found, folder, ranks, own))
    contents = {name.removeprefix("layout-").removesuffix(".json"): content for name, content in layouts.items()}
    parts = _parts(kept, records, found.keys, contents)
    return MemoryCheckpoint(folder.folder(), parts), parts[0]


def _room(found: Found, folder: NodeMemory, rank: int) -> list[torch.Tensor]:
    """Make room for this rank's part if it is not there as its own: for one that will be sent, or, copied at once, for
    what is another rank's on this node (a replica's, or nodes have changed places)."""
    mine, is_sent = found.sources[rank].record, rank in found.sent
    if not is_sent and mine.rank == rank:
        return []
    room = folder.allocate(slot_name(rank, 0), mine.size)
    if not is_sent:
        room.copy_(folder.map(mine.file))
    return [room]


def _lacks(found: Found, names: set[str]) -> bool:
    return not all(names <= shelf.small for shelf in found.shelves.values())


def _shared(found: Found, ranks: Ranks, folder: NodeMemory, names: list[str]) -> dict[str, bytes]:
    """Return the content of small files, each read by the first rank whose node has it. Collective."""
    reader = {}
    for name in dict.fromkeys(names):
        reader[name] = next(rank for rank, key in enumerate(found.keys) if name in found.shelves[key].small)
    files = folder.folder()

    def read() -> dict[str, bytes]:
        return {name: files.read(name, JSON_BYTES) for name, rank in reader.items() if rank == ranks.rank}

    _, parts = ranks.together("states in memory were not read", read, lambda mine: mine)
    return {name: content for part in parts for name, content in part.items()}


def _tidy(found: Found, folder: NodeMemory, ranks: Ranks, records: set[tuple[str, str]]) -> None:
    """Remove from this node what does not belong to the records that stay (node, name)."""
    if found.keys.index(folder.key) != ranks.rank:
        return
    keep: set[str] = set()
    for name in folder.names():
        if (folder.key, name) in records:
            record = read_record(folder.folder(), name)
            keep |= {name, record.file, *record.rest, *map(layout_name, record.layouts)}
    folder.remove(name for name in folder.names() if name not in keep)


def _parts(own: Record, records: list[Record], keys: list[str], layouts: dict[str, bytes]) -> list[Part]:
    """List one part for each layout: this rank's own first; of others one in this node's memory, if there is one."""
    parts = {own.layout: Part(layouts[own.layout], own.file, own)}
    here = [record for rank, record in enumerate(records) if keys[rank] == keys[own.rank]]
    for record in here:
        parts.setdefault(record.layout, Part(layouts[record.layout], record.file, record))
    for record in records:
        elsewhere = f"{record.file}-on-another-node"
        parts.setdefault(record.layout, Part(layouts[record.layout], elsewhere, record))
    return list(parts.values())
