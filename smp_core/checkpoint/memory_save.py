"""The saves into shared memory: staged beside training, committed by all ranks together, kept on two nodes.

In the thread of a save: (1) copy what was not copied at once; (2) digests, and the layout of each rank to all; (3) the
rest and all ranks' own parts, merged by rank 0, to a file on each node; (4) where no rank of another node has the same
layout, that is the same tensors, a copy of the tensors goes to the next node (memory_copies.py); (5) records, which are
the commit. Only then may the state before be written over, so that at every instant one state is complete on all ranks.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smp_core.checkpoint.file_system import new_save_id
from smp_core.checkpoint.layout import FORMAT, CheckpointError, digest_of
from smp_core.checkpoint.memory_copies import NeighbourCopies
from smp_core.checkpoint.memory_folder import NodeMemory
from smp_core.checkpoint.memory_records import Record, digests_of_blocks, layout_name, record_name
from smp_core.checkpoint.memory_slots import SharedSlots
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.staging import Staged, stage
from smp_core.checkpoint.tree import EncodedRest, merge_rest
from smp_core.checkpoint.untrusted import StoreError

logger = logging.getLogger("smp")

WRITER = "smp-memory-checkpoint"
"""The name of the thread of a save."""


def wait_for_writers() -> None:
    """Wait for saves that runs before in this process have left in flight: a run that failed does not wait for its
    last one, and whoever goes on from it finds that one and writes to the same files. They end within the timeout of
    their collectives.
    """
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


@dataclass(frozen=True)
class Prepared:
    """The part of a save that is this rank's, in its file but without a record.

    Attributes:
        layout, layout_digest: names and places of the slices.
        blocks: digests of the file's blocks.
        changed: tensors that changed while they were copied.
    """

    own: EncodedRest
    layout: bytes
    layout_digest: str
    blocks: str
    changed: list[str]


class MemorySaver:
    """A writer of states into shared memory, at most one in flight.

    Args:
        folder: the node's folder.
        ranks: all ranks, over a gloo group that only this saver and the search use.
        nodes: ranks of each node.
        beside: returns the sequence number of a save now, and what there is on disk; asked on rank 0.

    Attributes:
        leads: whether this rank writes what its node has once.
        stall_seconds: the time for which training has waited for saves, in all.
    """

    def __init__(
        self,
        folder: NodeMemory,
        ranks: Ranks,
        nodes: Sequence[Sequence[int]],
        beside: Callable[[], tuple[int, dict[str, Any]]],
    ) -> None:
        self.folder = folder
        self.slots = SharedSlots(folder, ranks.rank)
        self.stall_seconds = 0.0
        self._ranks = ranks
        self.leads = any(ranks.rank == node[0] for node in nodes)
        self._beside = beside
        self._of_slot: dict[int, list[str]] = {}
        self._copies = NeighbourCopies(folder, ranks, nodes)
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._is_first = True

    def go_on_from(self, file: str, names: list[str]) -> None:
        """Keep the state that a resumed run was read from until the next but one save.

        Args:
            file: this rank's file of tensors.
            names: files to be removed when that file is written anew.
        """
        self.slots.keep(file)
        self._of_slot[self.slots.number] = names

    def save(self, state: Mapping[str, Any], step: int, metadata: dict[str, Any], per_rank: Any) -> None:
        """Stage a state and return. Collective; parameters and optimizer states may change after
        :meth:`before_update`, everything else at once.

        Raises:
            CheckpointError: on all ranks: the save before this one failed; or the first one did, which is waited for.
        """
        begin = time.perf_counter()
        self.wait()
        self._copies.pace.begin_save()
        self.folder.remove(self._of_slot.pop(self.slots.turn(), []))
        staged: Staged | None = None
        problem: Exception | None = None
        try:
            staged = stage(state, per_rank, self._ranks.rank, False, self.slots)
        except Exception as error:  # told to the other ranks by the thread
            problem = error
        self._copied.clear()
        facts = (step, metadata)
        self._thread = threading.Thread(target=self._write, args=(staged, problem, facts), name=WRITER, daemon=True)
        self._thread.start()
        if self._is_first:
            self._is_first = False
            self.wait()
        self.stall_seconds += time.perf_counter() - begin

    def before_update(self) -> None:
        """Wait until parameters and optimizer states have been copied. Call it before they change."""
        if self._thread is not None and not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.stall_seconds += time.perf_counter() - begin

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        if self._thread is not None:
            self._copies.pace.hurry()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(str(error)) from error

    def forget(self) -> None:
        """Remove the states that are kept, when the one in flight has ended."""
        self.wait()
        for names in self._of_slot.values():
            self.folder.remove(names)
        self._of_slot.clear()

    def close(self) -> None:
        """Give back pinned memory, unless a copy into it is still in flight."""
        if self._thread is None or self._copied.is_set():
            self.slots.close()

    # In the thread

    def _write(self, staged: Staged | None, problem: Exception | None, facts: tuple[int, dict[str, Any]]) -> None:
        try:
            self._write_together(staged, problem, *facts)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    def _write_together(
        self, staged: Staged | None, problem: Exception | None, step: int, metadata: dict[str, Any]
    ) -> None:
        what = f"step {step} was not kept in memory"

        def prepare() -> Prepared:
            if problem is not None:
                raise problem
            assert staged is not None
            changed = self.slots.copy_rest()
            self._copied.set()
            layout, digest = self.slots.layout_of(staged)
            blocks = digests_of_blocks(self.slots.slot.memory)
            return Prepared(staged.own, layout, digest, blocks, changed)

        part, shared = self._ranks.together(what, prepare, lambda it: (it.layout_digest, it.changed, it.own))
        changed = [f"{name} on rank {rank}" for rank, (_, names, _) in enumerate(shared) for name in names]
        if changed:
            why = f"{len(changed)} tensors changed between two optimizer steps, e.g. {changed[0]}"
            self._give_up(step, f"{why}; change parameters before the batch's last hook, or save to disk")
            return

        def rest_of_all() -> tuple[str, tuple[int, dict[str, Any]] | str, dict[str, bytes]]:
            assert staged is not None and staged.rest is not None
            save = new_save_id()
            rest = _rest_files(save, merge_rest(staged.rest, [own for _, _, own in shared]))
            try:
                return save, self._beside(), rest
            except StoreError as error:  # the disk's trouble: the next state may be numbered again
                return save, str(error), rest

        assert staged is not None
        save, beside, rest = self._ranks.on_first(what, rest_of_all)
        if isinstance(beside, str):
            self._give_up(step, f"its place among the checkpoints on disk is not known ({beside})")
            return
        sequence, on_disk = beside
        slot = self.slots.slot
        record = Record(
            save=save,
            step=step,
            sequence=sequence,
            rank=self._ranks.rank,
            world=self._ranks.size,
            metadata={**metadata, **on_disk},
            meshes=staged.meshes,
            layouts=[digest for digest, _, _ in shared],
            file=slot.name,
            size=len(slot.memory),
            blocks=part.blocks,
            rest={name: (len(content), digest_of(content, "xxh3")) for name, content in rest.items()},
        )
        records = [(record, part.layout)]
        if self._copies.are_needed(record.layouts):
            records += self._copies.exchange(what, record, part.layout, slot.memory, self.slots.number)
        names, _ = self._ranks.together(what, lambda: self._commit(records, rest))
        self._of_slot[self.slots.number] = names

    def _commit(self, records: list[tuple[Record, bytes]], rest: dict[str, bytes]) -> list[str]:
        """Write what belongs to the save, records last; return the names of the files to remove with it."""
        names = []
        if self.leads:
            for name, content in rest.items():
                self.folder.write(name, content)
                names.append(name)
        for record, layout in records:
            name = layout_name(record.layout)
            if not self.folder.holds(name):
                self.folder.write(name, layout)
        for record, _ in records:
            content = record.to_bytes()
            self.folder.write(record_name(record, content), content)
            names.insert(0, record_name(record, content))
        return names

    def _give_up(self, step: int, why: str) -> None:
        """Keep the state before instead, and say so. On all ranks."""
        self.slots.turn()  # back: the next save writes over this one, not over the newest that is whole
        if self._ranks.rank == 0:
            logger.warning("step %d is not kept in memory: %s", step, why)


def _rest_files(save: str, rest: EncodedRest) -> dict[str, bytes]:
    files = {f"rest-{save}.json": json.dumps({"format": FORMAT, "tree": rest.tree}).encode()}
    if rest.plain:
        buffer = io.BytesIO()
        torch.save(rest.plain, buffer)
        files[f"rest-{save}.pt"] = buffer.getvalue()
    return files
