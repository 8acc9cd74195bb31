"""The memory tier of checkpoints: the newest state of a run in the shared memory of its nodes.

A face makes one :class:`MemoryTier` for a run, asks it at the start for the newest state of memory and disk, gives it
the state every so many steps, and closes it. What it is made of: memory_folder.py (files), memory_slots.py (the copy),
memory_save.py (the commit), memory_copies.py (copies on the next node), memory_search.py (the way back), progress.py
(what a failure has cost).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.memory_folder import NodeMemory, left_by_others, run_name
from smp_core.checkpoint.memory_records import MemoryCheckpoint, record_name
from smp_core.checkpoint.memory_save import MemorySaver, wait_for_writers
from smp_core.checkpoint.memory_search import Found, bring_back, find
from smp_core.checkpoint.opening import is_checkpoint, open_checkpoint
from smp_core.checkpoint.progress import Progress, last_of, pasts, report_of
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.root import find_checkpoints, join
from smp_core.checkpoint.sequence import manifests_in, next_sequence
from smp_core.checkpoint.untrusted import NoSuchFolder
from smp_core.compat import collective_timeout

logger = logging.getLogger("smp")

_LAYOUT, _SEEN = "ranks", "on_disk"  # in a record's metadata
P = TypeVar("P")  # a path, or what is open there


class MemoryTier:
    """The states of one run in shared memory. Its construction is collective over the world.

    Args:
        every: optimizer steps between two states.
        saves_to: the folder on disk that names the run; states in memory and checkpoints in it are compared by age.
        nodes: ranks of each node.
        posed: whether ranks of one machine pose as several nodes, which then have a folder each.
        layout: what decides which rank holds what (degrees, as they were asked for); states of another one are not
            used.
        by: what trains: ``"lightning"``, ``"trainer"`` or ``"loop"``. It is part of the run's name, because none can go
            on from what another one keeps.
        inside: the name of the checkpoint in each folder of ``saves_to``, as in
            :func:`smp_core.checkpoint.find_checkpoints`.

    Attributes:
        folder: the node's.
        is_begun: whether it is decided where the run begins.

    Raises:
        CheckpointError: the folder in memory cannot be made, or is somebody else's; on all ranks.
    """

    def __init__(
        self,
        every: int,
        saves_to: str,
        nodes: Sequence[Sequence[int]],
        posed: bool,
        layout: str,
        by: str = "",
        inside: str = "",
    ) -> None:
        wait_for_writers()
        self.every = every
        group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=collective_timeout(), group_desc="smp memory tier")
        self._ranks = Ranks(group)
        self._layout = f"{layout}; {len(nodes)} nodes"
        node = next(number for number, ranks in enumerate(nodes) if self._ranks.rank in ranks)
        name = self._ranks.on_first("memory tier", lambda: run_name(saves_to, by)) + (f"-node{node}" if posed else "")
        self.folder, _ = self._ranks.together("checkpoint.memory_every_n_steps", lambda: NodeMemory(name))
        self._saves_to, self._inside = saves_to, inside
        self.is_begun = False
        self._saver = MemorySaver(self.folder, self._ranks, nodes, self._on_disk)
        self._progress = Progress(self.folder, self._ranks.rank)
        self._past = last_of(past for part in self._ranks.gather(pasts(self.folder)) for past in part)
        self._source = ""
        self._resumed_at: int | None = None
        self._saved_step = -1
        if self._saver.leads:
            for path, size in left_by_others(self.folder.path):
                logger.warning(
                    "%s holds %.1f MiB of memory for a run that has ended: go on with it, or free it by rm -r %s",
                    path,
                    size / 2**20,
                    path,
                )

    # The start

    def find(self) -> Found | None:
        """Find the newest state that is complete over all nodes. Collective; the same on all ranks."""
        found = find(self.folder, self._ranks)
        if found is None:
            return None
        saved_with = found.sources[0].record.metadata.get(_LAYOUT)
        if saved_with != self._layout:
            if self._ranks.rank == 0:
                logger.warning(
                    "the state of step %d in memory is not used: it was kept with %s, here are %s",
                    found.step,
                    saved_with,
                    self._layout,
                )
            return None
        return found

    def _on_disk(self) -> tuple[int, dict[str, Any]]:
        return next_sequence(self._at("memory")), {_SEEN: manifests_in(self._saves_to, self._inside)}

    def _at(self, name: str) -> str:
        folder = join(self._saves_to, name)
        return join(folder, self._inside) if self._inside else folder

    def newest(self, on_disk: Callable[[], P | None], in_folder: bool = True) -> MemoryCheckpoint | P | None:
        """Begin with the newest of the states in memory and the checkpoints on disk. Collective.

        No file on disk is opened where every checkpoint there was there already when the state was kept.

        Args:
            on_disk: returns the newest undamaged checkpoint, with ``inside`` the folder around it; or None. Collective;
                not called where memory is newer.
            in_folder: whether that is one of ``saves_to``. Sequence numbers are of one folder; elsewhere the step
                decides, and the disk where it is the same.

        Returns:
            the state in memory, what ``on_disk`` returned, or None: there is neither.
        """
        found = self.find()
        what = "the newest checkpoint was not found"
        if found is not None and in_folder and self._ranks.on_first(what, lambda: self._is_newest(found)):
            return self.take(found)
        path: Any
        try:
            path = on_disk()
        except CheckpointError:
            if found is None:
                raise
            path = None  # all on disk are broken, which has been said
        around = path is not None and self._inside
        there = join(path, self._inside) if around else path
        if found is not None and self._ranks.on_first(what, lambda: _is_newer(found, there, in_folder)):
            return self.take(found)
        self.leave("" if path is None else os.fspath(path))
        return cast("P | None", path)

    def _is_newest(self, found: Found) -> bool:
        """Tell whether no checkpoint on disk is newer than a state; on rank 0."""
        seen = found.sources[0].record.metadata.get(_SEEN)
        there = manifests_in(self._saves_to, self._inside)
        if there is not None and isinstance(seen, dict) and all(seen.get(name) == it for name, it in there.items()):
            return True
        try:
            names = find_checkpoints(self._saves_to, inside=self._inside)
        except NoSuchFolder:
            return True
        return _is_newer(found, self._at(names[-1]) if names else None, in_folder=True)

    def take(self, found: Found) -> MemoryCheckpoint:
        """Return a state for reading, once every rank has its part in its own node's memory. Collective.

        Raises:
            CheckpointError: it cannot be brought there; on all ranks.
        """
        self.is_begun = True
        checkpoint, part = bring_back(found, self.folder, self._ranks)
        record = part.record
        names = [record_name(record, record.to_bytes()), *(record.rest if self._saver.leads else ())]
        self._saver.go_on_from(record.file, names)
        sent = len(found.sent)
        self._source = f"memory ({self._ranks.size - sent} ranks from their own node, {sent} from another)"
        return checkpoint

    def leave(self, source: str) -> None:
        """Begin without a state from memory, and free what is there. Collective.

        Args:
            source: where the run begins instead: a path, or nothing.
        """
        self.is_begun = True
        self._source = source
        keys = self._ranks.gather(self.folder.key)

        def free() -> None:
            names = self.folder.names() if keys.index(self.folder.key) == self._ranks.rank else []
            if any(name.endswith(".record") for name in names) and self._ranks.rank == 0:
                logger.warning(
                    "states in memory (%s) are older than this run's beginning and are removed", self.folder.path
                )
            self.folder.remove(names)

        self._ranks.together("states in memory were not removed", free)

    def begin(self, step: int) -> None:
        """Note that training begins behind an optimizer step; what was kept of later ones, by an attempt that this one
        takes the place of, is removed. On all ranks."""
        if self._saved_step > step:
            self.set_back(step)
        past = self._past if self._source else None
        self._past, self._resumed_at = past, step if past is not None else None
        self._progress.begin(step, past)
        self._saved_step = step

    # Steps

    def is_due(self, step: int) -> bool:
        """Tell whether a state is to be kept after an optimizer step."""
        return step // self.every > self._saved_step // self.every

    def set_back(self, step: int) -> None:
        """Remove what was kept: training goes on from another state, behind ``step``. On all ranks."""
        try:
            self._saver.forget()
        except CheckpointError as error:
            logger.warning("%s", error)
        self._saved_step = step

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metadata: Mapping[str, Any],
        per_rank: Any,
        later: Sequence[str] = ("state_dict.", "optimizer_states."),
    ) -> None:
        """Keep a state. Collective; returns when what may change before the next optimizer step has been copied.

        Args:
            later: beginnings of the names of tensors that only optimizers change, where they are sharded.

        Raises:
            CheckpointError: it, or the one before, could not be kept; on all ranks.
        """
        self._saved_step = step
        self._saver.slots.later = tuple(later)
        self._saver.save(state, step, {**metadata, _LAYOUT: self._layout}, per_rank)

    def before_update(self) -> None:
        """Wait for the copy in progress. Call it before parameters or optimizer states change."""
        self._saver.before_update()

    def after_step(self, step: int) -> None:
        """Note the end of an optimizer step; report once what a failure has cost."""
        self._progress.step(step)
        if self._resumed_at is not None and self._past is not None:
            if self._ranks.rank == 0:
                logger.warning("%s", report_of(self._past, self._resumed_at, self._source, time.time()))
            self._resumed_at = None

    # The end

    def close(self, ended_well: bool) -> None:
        """Remove the folder if the run ended well; otherwise say that it stays. Collective if it ended well."""
        if not ended_well:
            self._saver.close()
            if self._saver.leads:
                logger.warning(
                    "the newest state stays in memory (%s, %.1f MiB) for the run that goes on; to free it: rm -r %s",
                    self.folder.path,
                    self.folder.size() / 2**20,
                    self.folder.path,
                )
            return
        try:
            self._saver.wait()
        except CheckpointError as error:
            logger.warning("%s", error)
        self._saver.close()
        self._ranks.gather(None)
        if self._saver.leads:
            self.folder.remove_all()


def _is_newer(found: Found, path: str | os.PathLike[str] | None, in_folder: bool) -> bool:
    """Tell whether a state in memory is newer than the checkpoint at a path, or the same. What is no folder of ours (a
    single file, another program's) counts as newer: nothing is known of its save."""
    if path is None:
        return True
    if not is_checkpoint(path):
        return False
    manifest = open_checkpoint(path).manifest
    return found.age >= manifest.age[:2] if in_folder else found.step > (manifest.step or 0)
