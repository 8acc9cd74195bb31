"""The search for the newest state that the memories of all nodes hold, and its way back
to the ranks that lost theirs.

All ranks see the same lists of what each node holds, and so draw the same conclusion:
for each rank, which part has its tensors. That is its own where its node is still
there, otherwise one of a rank with the same slices (a replica), or the copy on the next
node. Digests are compared before ranks agree; what does not fit is as if it were not
there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smp_core.checkpoint.coverage import check_index
from smp_core.checkpoint.folders.local_folder import LocalFolder
from smp_core.checkpoint.layout import (
    MANIFEST,
    CheckpointError,
    Chunk,
    Index,
    Manifest,
    TensorRecord,
)
from smp_core.checkpoint.memory.folder import TENSORS, NodeMemory, part_name
from smp_core.checkpoint.memory.save import INDEX, LAYOUTS, pieces, record_of
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.tensor_file import bytes_view
from smp_core.checkpoint.untrusted import only_checkpoint_errors, read_json
from smp_core.checkpoint.verify import check_files

logger = logging.getLogger("smp")

Place = tuple[str, str]
"""The key of a node's folder, and the name of a part in it."""


@dataclass(frozen=True)
class Found:
    """A state that all ranks can be given.

    Attributes:
        places: of each rank's part.
        readers: the rank that reads each one: the rank itself where the part is on its
            node, or one that sends it.
        manifests: of each rank's part.
        keys: key of each rank's folder.
    """

    places: list[Place]
    readers: list[int]
    manifests: list[Manifest]
    keys: list[str]

    @property
    def manifest(self) -> Manifest:
        """The manifest of one part; facts about the save are the same in all."""
        return self.manifests[0]

    @property
    def step(self) -> int:
        """The optimizer step of the state."""
        return self.manifest.step or 0

    @property
    def sent(self) -> list[int]:
        """Ranks whose tensors come from another rank."""
        return [rank for rank, reader in enumerate(self.readers) if reader != rank]


def find(folder: NodeMemory, ranks: Ranks) -> Found | None:
    """Find the newest state that is complete over all nodes and undamaged. Collective;
    the same on all ranks."""
    # What each node has: one rank of it lists its folder for all the others.
    keys = ranks.gather(folder.key)
    leads = keys.index(folder.key) == ranks.rank
    what = "states in memory were not looked at"
    _, lists = ranks.together(
        what, lambda: _manifests(folder) if leads else {}, lambda it: it
    )
    held = {
        (key, name): each
        for key, names in zip(keys, lists, strict=True)
        for name, each in names.items()
    }
    whole: set[str] = set()
    # The newest of which every rank's part is on some node; again without parts that
    # turn out damaged.
    while True:
        # Saves of another world size do not fit these ranks.
        of_world = [each for each in held.values() if each.world_size == ranks.size]
        ages = sorted(
            {(each.sequence, each.step or 0, each.id) for each in of_world},
            reverse=True,
        )
        # A generator: older saves are only planned if the newer ones have gaps.
        plans = (_plan(save, keys, held, ranks.size) for _, _, save in ages)
        found = next((plan for plan in plans if plan is not None), None)
        if found is None:
            return None
        # Each part is read by one rank, which checks its digests: a GiB is hashed once.
        mine = {
            found.places[rank][1]
            for rank, reader in enumerate(found.readers)
            if reader == ranks.rank
        }
        whole |= {name for name in mine - whole if _is_whole(folder, name)}
        damaged = ranks.gather([(folder.key, name) for name in mine - whole])
        bad = list(itertools.chain.from_iterable(damaged))
        if not bad:
            return found
        # Every rank removes the same parts, so that all try the same save next.
        for place in bad:
            held.pop(place, None)


def _manifests(folder: NodeMemory) -> dict[str, Manifest]:
    found = {}
    for name in filter(folder.is_committed, folder.parts()):
        try:
            # Whatever a file contains, a problem with it excludes that part alone.
            manifest = open_checkpoint(folder.at(name)).manifest
            layouts = manifest.metadata.get(LAYOUTS)
            if (
                not isinstance(layouts, list)
                or len(layouts) != manifest.world_size
                or TENSORS not in manifest.files
            ):
                raise CheckpointError(
                    f"{folder.at(name)} is a checkpoint, but no part of a state in memory"
                )
            found[name] = manifest
        except CheckpointError as error:
            logger.warning("not used: %s", error)
    return found


def _is_whole(folder: NodeMemory, name: str) -> bool:
    try:
        check_files(open_checkpoint(folder.at(name)), "digests")
    except CheckpointError as error:
        logger.warning("not used: %s", error)
        return False
    return True


def _plan(
    save: str, keys: list[str], held: Mapping[Place, Manifest], world: int
) -> Found | None:
    """Find a place for each rank's part of a save; None where one has none."""
    of_save = {
        place: manifest for place, manifest in held.items() if manifest.id == save
    }
    layouts = next(iter(of_save.values())).metadata[LAYOUTS]
    places: list[Place] = []
    readers: list[int] = []
    for rank in range(world):
        fitting = [
            # Equal digests of the index mean equal slices.
            place
            for place, each in of_save.items()
            if each.files[each.index].digest == layouts[rank]
        ]
        if not fitting:
            return None
        # Its own on its own node, then any on its own node, then its own elsewhere (a
        # copy), then any.
        own = {part_name(rank, number) for number in range(2)}
        place = min(fitting, key=lambda it: (it[0] != keys[rank], it[1] not in own, it))
        there = [other for other in range(world) if keys[other] == place[0]]
        places.append(place)
        readers.append(rank if place[0] == keys[rank] else there[rank % len(there)])
    return Found(places, readers, [of_save[place] for place in places], keys)


def bring_back(
    found: Found, folder: NodeMemory, ranks: Ranks
) -> tuple[MemoryCheckpoint, int]:
    """Give each rank its part in its own node's memory, and remove all other states
    there. Collective.

    Returns:
        the state, to be read like a checkpoint, and the number of its parts.

    Raises:
        CheckpointError: there is no room for a part; on all ranks.
    """
    what = f"step {found.step} was not read from memory"
    rank, leads = ranks.rank, found.keys.index(folder.key) == ranks.rank
    number = int(found.places[0][1][-1])  # of all parts of a save
    own = part_name(rank, number)
    manifest = found.manifests[rank]
    is_there = found.places[rank] == (folder.key, own)

    # Only one rank of a node removes; the others would find files gone.
    def tidy(kept: set[str]) -> None:
        if leads:
            folder.remove([name for name in folder.parts() if name not in kept])

    # Room first: what is of no use goes before parts of other ranks come.
    ranks.together(
        what, lambda: tidy({name for key, name in found.places if key == folder.key})
    )

    # The small files of each distinct part, to all ranks.
    layouts = manifest.metadata[LAYOUTS]
    _, parts = ranks.together(
        what, lambda: _small_files(found, folder, layouts, rank), lambda it: it
    )
    files = {place: content for part in parts for place, content in part.items()}

    # Tensors, from rank to rank or from part to part.
    def make_room() -> torch.Tensor | None:
        return None if is_there else folder.allocate(own, manifest.files[TENSORS].bytes)

    room, _ = ranks.together(what, make_room)
    _send_parts(found, folder, ranks, room)

    def commit() -> None:
        if room is None:
            return
        if found.readers[rank] == rank:
            room.copy_(folder.map(found.places[rank][1]))
        # Compared once more: the bytes came over the network or from another part.
        if record_of(bytes_view(room)) != manifest.files[TENSORS]:
            raise CheckpointError(f"the part of rank {rank} was damaged on its way")
        for (digest, name), content in files.items():
            if digest in ("", layouts[rank]):
                folder.write(own, name, content)
        folder.write(own, MANIFEST, manifest.to_bytes())

    ranks.together(what, commit)
    here = {
        each: part_name(each, number)
        for each, key in enumerate(found.keys)
        if key == folder.key
    }
    # Parts that were only read for others go now.
    ranks.together(what, lambda: tidy(set(here.values())))

    # One index of all parts: this rank's own first, then one on this node where there
    # is one.
    owners = [rank, *here, *range(ranks.size)]
    distinct = {layouts[owner]: owner for owner in reversed(owners)}
    indexes = {}
    for digest, owner in sorted(distinct.items(), key=lambda it: owners.index(it[1])):
        name = here.get(owner) or f"{part_name(owner, number)}-on-another-node"
        indexes[name] = found.manifests[owner], files[digest, INDEX]
    return MemoryCheckpoint(folder.path, indexes), number


def _small_files(
    found: Found, folder: NodeMemory, layouts: list[str], rank: int
) -> dict[tuple[str, str], bytes]:
    """Return the small files that this rank reads for all: the indexes of layouts, and
    of rank 0's part the rest of the state; by digest of the layout ("" for the rest)
    and name."""
    files: dict[tuple[str, str], bytes] = {}
    # Of each layout the first part that has it.
    for digest in dict.fromkeys(layouts):
        owner = layouts.index(digest)
        if found.readers[owner] != rank:
            continue
        opened = open_checkpoint(folder.at(found.places[owner][1]))
        names = set(opened.manifest.files) - {TENSORS} if owner == 0 else {INDEX}
        for name in names:
            of_layout = digest if name == INDEX else ""
            files[of_layout, name] = opened.checked(name)
    return files


def _send_parts(
    found: Found, folder: NodeMemory, ranks: Ranks, room: torch.Tensor | None
) -> None:
    """Send the tensors of parts to the ranks on whose nodes they are not;
    ``room``: for those that this rank receives. Collective."""
    # The same order on all ranks, and one transfer at a time: no two ranks wait for
    # each other.
    for receiver in found.sent:
        reader = found.readers[receiver]
        if reader == ranks.rank:
            for piece in pieces([folder.map(found.places[receiver][1])]):
                dist.send(piece, receiver, group=ranks.group)
        elif receiver == ranks.rank:
            assert room is not None
            for piece in pieces([room]):
                dist.recv(piece, reader, group=ranks.group)


class MemoryCheckpoint(OpenCheckpoint):
    """A state in the memory of this node and others, to be read like a checkpoint on
    disk.

    Slices in other nodes' memory have a place in the index, but cannot be read here: no
    rank needs those of others. Digests were compared when ranks agreed on the state.

    Args:
        path: this node's folder.
        parts: name -> manifest and index, one for each distinct index; where slices are
            in several, the first counts.
    """

    def __init__(self, path: str, parts: dict[str, tuple[Manifest, bytes]]) -> None:
        own, (manifest, _) = next(iter(parts.items()))
        # Names in the index have the part's folder before them.
        files = {f"{own}/{name}": record for name, record in manifest.files.items()}
        for name, (each, _) in parts.items():
            files[f"{name}/{TENSORS}"] = each.files[TENSORS]
        rest_pt = None if manifest.rest_pt is None else f"{own}/{manifest.rest_pt}"
        index, rest = f"{own}/{INDEX}", f"{own}/{manifest.rest}"
        merged = dataclasses.replace(
            manifest, files=files, index=index, rest=rest, rest_pt=rest_pt
        )
        super().__init__(LocalFolder(path), merged, check_bytes=False, agreed=True)
        with only_checkpoint_errors(self.address):
            self.index = _merged(
                {name: content for name, (_, content) in parts.items()}, self.address
            )
            check_index(self.index, merged, self.address)

    @property
    def address(self) -> str:
        return f"{self.folder.address} (step {self.manifest.step} in memory)"

    def same_save(self) -> None:
        """Do nothing: a state that ranks agreed on is not written over while it is
        read."""


def _merged(parts: Mapping[str, bytes], where: str) -> Index:
    """Make one index of those of several parts; names over the same bytes become
    aliases."""
    tensors: dict[str, TensorRecord] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for part, content in parts.items():
        # The first part that has a slice gives it: this rank's own, then one on this
        # node.
        for name, tensor in Index.from_json(
            read_json(content, where), where
        ).tensors.items():
            tensors.setdefault(name, tensor)
            for chunk in tensor.chunks:
                # Empty slices say nothing, unless the tensor itself is empty.
                if math.prod(chunk.shape) or not tensor.numel:
                    place = chunks.setdefault(name, {})
                    place.setdefault(
                        chunk.offset,
                        dataclasses.replace(chunk, file=f"{part}/{TENSORS}"),
                    )

    # Names over the same bytes: the first is the tensor, others are aliases.
    first: dict[Any, str] = {}
    index = Index({})
    for name, tensor in tensors.items():
        held = tuple(
            sorted(chunks.get(name, {}).values(), key=lambda chunk: chunk.offset)
        )
        key = (tensor.shape, tensor.dtype, held) if tensor.numel else name
        target = first.setdefault(key, name)
        if target == name:
            index.tensors[name] = dataclasses.replace(tensor, chunks=held)
        else:
            index.aliases[name], index.alias_paths[name] = target, tensor.path
    return index
