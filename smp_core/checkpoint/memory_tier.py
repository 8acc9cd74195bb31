"""The memory tier of checkpoints: the newest state of a run in the shared memory of its nodes.

A face makes one :class:`MemoryTier` for a run, asks it at the start whether there is something to go on from, gives it
the state every so many steps, and closes it. What it is made of: memory_folder.py (files), memory_slots.py (the copy),
memory_save.py (the commit), memory_search.py (the way back), progress.py (what a failure has cost).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.memory_folder import NodeMemory, left_by_others, run_name
from smp_core.checkpoint.memory_records import MemoryCheckpoint, record_name
from smp_core.checkpoint.memory_save import MemorySaver
from smp_core.checkpoint.memory_search import Found, bring_back, find
from smp_core.checkpoint.progress import Progress, last_of, pasts, report_of
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.sequence import manifests_in, next_sequence
from smp_core.compat import collective_timeout

logger = logging.getLogger("smp")

_LAYOUT, _SEEN = "ranks", "on_disk"  # in a record's metadata


class MemoryTier:
    """The states of one run in shared memory. Its construction is collective over the world.

    Args:
        every: optimizer steps between two states.
        saves_to: the folder on disk that names the run; states in memory and checkpoints in it are compared by age.
        nodes: ranks of each node.
        posed: whether ranks of one machine pose as several nodes, which then have a folder each.
        layout: what decides which rank holds what (degrees, as they were asked for); states of another one are not
            used.

    Raises:
        CheckpointError: the folder in memory cannot be made, or is somebody else's; on all ranks.
    """

    def __init__(self, every: int, saves_to: str, nodes: Sequence[Sequence[int]], posed: bool, layout: str) -> None:
        self.every = every
        group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=collective_timeout(), group_desc="smp memory tier")
        self._ranks = Ranks(group)
        self._layout = f"{layout}; {len(nodes)} nodes"
        node = next(number for number, ranks in enumerate(nodes) if self._ranks.rank in ranks)
        name = self._ranks.on_first("memory tier", lambda: run_name(saves_to)) + (f"-node{node}" if posed else "")
        self.folder, _ = self._ranks.together("checkpoint.memory_every_n_steps", lambda: NodeMemory(name))
        self._saves_to = saves_to
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
        return next_sequence(f"{self._saves_to}/memory"), {_SEEN: manifests_in(self._saves_to)}

    def saw_all_on_disk(self, found: Found) -> bool:
        """Tell whether every checkpoint that is on disk was there when a state was kept, and so is older. No file is
        opened for that; on rank 0.
        """
        seen = found.sources[0].record.metadata.get(_SEEN)
        there = manifests_in(self._saves_to)
        return there is not None and isinstance(seen, dict) and all(seen.get(name) == it for name, it in there.items())

    def take(self, found: Found) -> MemoryCheckpoint:
        """Return a state for reading, once every rank has its part in its own node's memory. Collective.

        Raises:
            CheckpointError: it cannot be brought there; on all ranks.
        """
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
        """Note that training begins behind an optimizer step."""
        past = self._past if self._source else None
        self._past, self._resumed_at = past, step if past is not None else None
        self._progress.begin(step, past)
        self._saved_step = step

    # Steps

    def is_due(self, step: int) -> bool:
        """Tell whether a state is to be kept after an optimizer step."""
        return step != self._saved_step and step % self.every == 0

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
        self._ranks.gather(None)
        if self._saver.leads:
            self.folder.remove_all()
