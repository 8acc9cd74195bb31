"""The memory tier of checkpoints: the newest state of a run in the shared memory of its
nodes.

What it promises:

1. The newest state outlives the processes that trained, on every node that is still
   there.
2. The part of a lost node comes from a replica on another node or, where there is none,
   from the copy on the next node.
3. A run that goes on has the bits of one that was never interrupted.
4. A state that is half, damaged, of other ranks or degrees, of another job or user is
   never taken.
5. Memory is bounded: two states of each rank's part and of one neighbour's; a run that
   ends well frees it, and a second job of the same name is refused before it trains.

A face makes one :class:`MemoryTier` for a run, asks it at the start for the newest
state of memory and disk, gives it the state every so many steps, and closes it. Its
parts are folder.py (the folder and its owner), slots.py (the copy to host memory),
save.py (the commit, the copy on the next node) and search.py (the way back).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from smp_core.checkpoint.folders.addresses import lasting
from smp_core.checkpoint.folders.file_system import remove_tree
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.memory.folder import (
    NodeMemory,
    left_by_ended_jobs,
    run_name,
    size_of,
)
from smp_core.checkpoint.memory.save import MemorySaver, wait_for_writers
from smp_core.checkpoint.memory.search import Found, MemoryCheckpoint, bring_back, find
from smp_core.checkpoint.opening import is_checkpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.root import find_checkpoints, join
from smp_core.checkpoint.sequence import manifests_in, next_sequence
from smp_core.checkpoint.untrusted import NoSuchFolder
from smp_core.cluster import collective_timeout

logger = logging.getLogger("smp")

_DEGREES, _SEEN = "degrees", "on_disk"  # in a manifest's metadata
_ANOTHER = {
    "lightning": "give ModelCheckpoint(dirpath=...), or Trainer(default_root_dir=...), another folder",
    "trainer": "give TrainingArguments(output_dir=...) another folder",
    "loop": "call accelerator.load_newest_state(...) with another folder",
}
# Seconds for which what is left of an ended job is waited for: its ranks notice the
# end, and go.
_PATIENCE = 60.0
P = TypeVar("P")  # a path, or what is open there


class MemoryTier:
    """The states of one run in shared memory. Its construction is collective over the
    world.

    Args:
        every: optimizer steps between two states.
        saves_to: the folder on disk that names the run; states in memory and
            checkpoints in it are compared by age.
        nodes: ranks of each node.
        posed: whether ranks of one machine pose as several nodes, which then have a
            folder each.
        layout: what decides which rank holds what (degrees, as they were asked for);
            states of another one are not used.
        by: what trains: ``"lightning"``, ``"trainer"`` or ``"loop"``. It is part of the
            run's name, because none can go on from what another one keeps.
        inside: the name of the checkpoint in each folder of ``saves_to``, as in
            :func:`smp_core.checkpoint.find_checkpoints`.

    Attributes:
        folder: the node's.
        is_begun: whether it is decided where the run begins.

    Raises:
        CheckpointError: the folder in memory cannot be made, is another user's, or
            another job that runs has it; on all ranks.
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
        # A run before this one in the same process may still write to the same files.
        wait_for_writers()
        self.every = every
        group: dist.ProcessGroup | None = None
        patience = _PATIENCE
        if dist.is_initialized() and dist.get_world_size() > 1:
            limit = collective_timeout()
            # Waiting for longer than the ranks' own timeout would end in that.
            patience = (
                _PATIENCE
                if limit is None
                else min(_PATIENCE, 0.5 * limit.total_seconds())
            )
            # A group of its own: its collectives run in a thread, alongside those of
            # training.
            group = dist.new_group(
                backend="gloo", timeout=limit, group_desc="smp memory tier"
            )
        self._ranks = Ranks(group)
        self._degrees = f"{layout}; {len(nodes)} nodes"
        self._saves_to, self._inside = lasting(saves_to), inside
        self.is_begun = False
        self._saved_step = -1

        # The node's folder: the first rank takes it, the others share it.
        what = "checkpoint.memory_every_n_steps"
        node = next(
            number for number, ranks in enumerate(nodes) if self._ranks.rank in ranks
        )
        self._leads = self._ranks.rank == nodes[node][0]
        name = self._ranks.on_first(what, lambda: run_name(saves_to, by)) + (
            f"-node{node}" if posed else ""
        )
        self.folder, _ = self._ranks.together(what, lambda: NodeMemory(name))
        advice = (
            _ANOTHER.get(by, "save to another folder")
            + ", or leave memory_every_n_steps out"
        )
        # The first rank of each node takes the folder alone before any other joins it,
        # so a job that is refused leaves no lock behind.
        try:
            self._ranks.together(
                what,
                lambda: (
                    self.folder.take(True, advice, patience) if self._leads else None
                ),
            )
            self._ranks.together(
                what,
                lambda: (
                    None if self._leads else self.folder.take(False, advice, patience)
                ),
            )
        except CheckpointError:
            self.folder.give_back()
            raise
        # What ended jobs keep costs memory, so each start names it.
        self._saver = MemorySaver(self.folder, self._ranks, nodes, self._on_disk)
        for path, size in left_by_ended_jobs() if self._leads else ():
            advice = f"start that again to go on with it, or rm -r {path}; it is removed where its memory is needed"
            logger.warning(
                "%s holds %s of memory for a job that has ended: %s", path, size, advice
            )

    # The start

    def find(self) -> Found | None:
        """Find the newest state that is complete over all nodes. Collective; the same
        on all ranks."""
        found = find(self.folder, self._ranks)
        kept_with = None if found is None else found.manifest.metadata.get(_DEGREES)
        # Degrees decide which slices a rank has; after a change the parts fit no rank.
        if found is None or kept_with == self._degrees:
            return found
        if self._ranks.rank == 0:
            what = f"the state of step {found.step} in memory"
            logger.warning(
                "%s is not used: it was kept with %s, here are %s",
                what,
                kept_with,
                self._degrees,
            )
        return None

    def _on_disk(self) -> tuple[int, dict[str, Any]]:
        # A number above all on disk, and what lay there: see `newest`.
        return next_sequence(self._at("memory")), {
            _SEEN: manifests_in(self._saves_to, self._inside)
        }

    def _at(self, name: str) -> str:
        folder = join(self._saves_to, name)
        return join(folder, self._inside) if self._inside else folder

    def newest(
        self, on_disk: Callable[[], P | None], in_folder: bool = True
    ) -> MemoryCheckpoint | P | None:
        """Begin with the newest of the states in memory and the checkpoints on disk.
        Collective.

        No file on disk is opened where every checkpoint there was there already when
        the state was kept.

        Args:
            on_disk: returns the newest undamaged checkpoint, with ``inside`` the folder
                around it; or None. Collective; not called where memory is newer.
            in_folder: whether that is one of ``saves_to``. Sequence numbers are of one
                folder; elsewhere the step decides, and the disk where it is the same.

        Returns:
            the state in memory, what ``on_disk`` returned, or None: there is neither.
        """
        found = self.find()
        what = "the newest checkpoint was not found"
        # Most restarts end here: listing the disk's manifests is enough, and nothing is
        # read from it.
        if (
            found is not None
            and in_folder
            and self._ranks.on_first(what, lambda: self._is_newest(found))
        ):
            return self.take(found)
        path: Any
        try:
            path = on_disk()
        except CheckpointError:
            if found is None:
                raise
            path = None  # all on disk are broken, which has been said
        there = join(path, self._inside) if path is not None and self._inside else path
        if found is not None and self._ranks.on_first(
            what, lambda: _is_newer(found, there, in_folder)
        ):
            return self.take(found)
        self.leave()
        return cast("P | None", path)

    def _is_newest(self, found: Found) -> bool:
        """Return whether no checkpoint on disk is newer than a state; on rank 0."""
        seen = found.manifest.metadata.get(_SEEN)
        there = manifests_in(self._saves_to, self._inside)
        # Nothing new is on disk since the state was kept, so the state is newer.
        if (
            there is not None
            and isinstance(seen, dict)
            and all(seen.get(name) == it for name, it in there.items())
        ):
            return True
        # The disk has something else; ages decide.
        try:
            names = find_checkpoints(self._saves_to, inside=self._inside)
        except NoSuchFolder:
            return True
        return _is_newer(found, self._at(names[-1]) if names else None, in_folder=True)

    def take(self, found: Found) -> MemoryCheckpoint:
        """Return a state for reading, once every rank has its part in its own node's
        memory. Collective.

        Raises:
            CheckpointError: it cannot be brought there; on all ranks.
        """
        # From here on ranks may save: none of them may find another beginning.
        self.is_begun = True
        checkpoint, self._saver.slots.number = bring_back(
            found, self.folder, self._ranks
        )
        if self._ranks.rank == 0:
            sent = len(found.sent)
            parts = f"{self._ranks.size - sent} ranks have their part on their own node, {sent} get it from another"
            logger.warning("GOING ON from step %d in memory: %s", found.step, parts)
        return checkpoint

    def leave(self) -> None:
        """Begin without a state from memory, and free what is there. Collective."""
        self.is_begun = True

        def free() -> None:
            # The first rank of each node clears that node's folder.
            parts = self.folder.parts() if self._leads else []
            if any(map(self.folder.is_committed, parts)) and self._ranks.rank == 0:
                logger.warning(
                    "states in memory (%s) are older than this run's beginning: removed",
                    self.folder.path,
                )
            self.folder.remove(parts)

        self._ranks.together("states in memory were not removed", free)

    def begin(self, step: int) -> None:
        """Note that training begins behind an optimizer step; what was kept of later
        ones, by an attempt that this one takes the place of, is removed. On all
        ranks."""
        if self._saved_step > step:
            self.set_back(step)
        self._saved_step = step

    # Steps

    def is_due(self, step: int) -> bool:
        """Return whether a state is to be kept after an optimizer step."""
        # Steps may be skipped (a set-back, a step counted elsewhere), so multiples are
        # compared instead of a remainder.
        return step // self.every > self._saved_step // self.every

    def set_back(self, step: int) -> None:
        """Remove what was kept: training goes on from another state, behind ``step``.
        On all ranks."""
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
        """Keep a state. Collective; returns when what may change before the next
        optimizer step has been copied.

        Args:
            later: beginnings of the names of tensors that only optimizers change, where
                they are sharded.

        Raises:
            CheckpointError: it, or the one before, could not be kept; on all ranks.
        """
        # Noted before the save, so that one that fails is not tried again at once.
        self._saved_step = step
        self._saver.slots.later = tuple(later)
        self._saver.save(state, step, {**metadata, _DEGREES: self._degrees}, per_rank)

    def before_update(self) -> None:
        """Wait for the copy in progress. Call it before parameters or optimizer states
        change."""
        self._saver.before_update()

    # The end

    def close(self, ended_well: bool) -> None:
        """Remove the folder if the run ended well; otherwise warn that it stays.
        Collective if it ended well."""
        if ended_well:
            try:
                self._saver.wait()
            except CheckpointError as error:
                logger.warning("%s", error)
            # All ranks are through with their saves before any folder is removed.
            self._ranks.gather(None)
        is_idle = self._saver.close()
        if self._leads and ended_well:
            remove_tree(self.folder.path)
        elif self._leads:
            path = self.folder.path
            where = f"{path}, {size_of(path)}"
            logger.warning(
                "the newest state stays in memory (%s) for the run that goes on; free it: rm -r %s",
                where,
                path,
            )
        # Otherwise the lock goes with the process, or with its next run of the name.
        if is_idle:
            self.folder.give_back()


def _is_newer(
    found: Found, path: str | os.PathLike[str] | None, in_folder: bool
) -> bool:
    """Return whether a state in memory is newer than the checkpoint at a path, or the
    same. What is no folder of ours (a single file, another program's) counts as newer:
    nothing is known of its save."""
    if path is None:
        return True
    # No promise about a foreign file can be read, so it is preferred.
    if not is_checkpoint(path):
        return False
    manifest = open_checkpoint(path).manifest
    age = found.manifest.age
    # Sequence numbers, then steps; equal ages are the same state, and memory is faster.
    return (
        age[:2] >= manifest.age[:2] if in_folder else found.step > (manifest.step or 0)
    )
