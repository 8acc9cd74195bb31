"""The host memory of states that outlive their process: each rank's slices, staged
alternately into two shared files.

A state is staged straight into its file, so that the memory tier holds two copies of a
rank's shards and no third one. Measured on one core, 256 MiB: 0.05 s of processor time
a save; the writer of checkpoints over the same file system, from host buffers into new
files, takes 0.20 s and a third copy. Slices of parameters and optimizer states stay as
they are until the optimizer's next step; they are copied alongside the next step's
forward and backward pass (:meth:`SharedSlots.copy_rest`), everything else at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.layout import Chunk, Index, TensorRecord
from smp_core.checkpoint.memory.folder import TENSORS, NodeMemory, part_name
from smp_core.checkpoint.save_plan import StagedTensor
from smp_core.checkpoint.staging import HostBuffers, Place, Staged, copy_to_hosts
from smp_core.torch_facts import streams

logger = logging.getLogger("smp")

_ALIGNMENT = 64


class Slot:
    """A file of tensors of one rank.

    Attributes:
        memory: all its bytes, uint8.
        views: of the slices in it; empty until they are asked for.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.views: dict[Place, Tensor] = {}
        self.is_pinned = False

    def pin(self, device: torch.device) -> None:
        """Register the memory with the driver, so that copies from a CUDA device do not
        pass through another."""
        if not len(self.memory):
            return
        refused = int(
            torch.cuda.cudart().cudaHostRegister(
                self.memory.data_ptr(), len(self.memory), 0
            )
        )
        # The call answers with an error's number instead of raising it.
        self.is_pinned = not refused
        if refused:
            # The driver reports its error with the next kernel, whichever that is.
            with contextlib.suppress(RuntimeError):
                torch.zeros((), device=device)
            why = f"CUDA error {refused}): copies of states take longer and hold up the device"
            logger.warning(
                "the driver did not pin %d bytes of shared memory (%s",
                len(self.memory),
                why,
            )

    def unpin(self) -> None:
        """Give the memory back, which would otherwise stay registered at an address
        that is used again."""
        if self.is_pinned:
            self.is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


class SharedSlots(HostBuffers):
    """The two files of a rank.

    Private names: a tensor's ``_version``, the count of its in-place changes, which
    nothing public tells.

    Args:
        folder: the node's.
        rank: of the run.

    Attributes:
        later: beginnings of the names of tensors that :meth:`copy_rest` copies, where
            they are sharded.
        number: of the newest state's file, 0 or 1; the same on all ranks.
    """

    def __init__(self, folder: NodeMemory, rank: int) -> None:
        super().__init__()
        # Every name begins with "": all tensors may wait, until a face says which.
        self.later: tuple[str, ...] = ("",)
        self.number = 0
        self._folder = folder
        self._rank = rank
        self._slots: dict[int, Slot] = {}
        self._sharded: dict[str, Tensor] = {}
        self._later: list[tuple[Tensor, Tensor]] = []
        self._versions: dict[str, int] = {}
        self._staged_at: torch.Event | None = None
        self._ranges: dict[Place, tuple[int, int]] = {}
        self._indexed: tuple[Any, Any, bytes] | None = None

    @property
    def memory(self) -> Tensor:
        """The newest state's file."""
        return self._slots[self.number].memory

    @property
    def part(self) -> str:
        """The name of the newest state's part."""
        return part_name(self._rank, self.number)

    def turn(self) -> None:
        """Turn to the other file; its manifest is to be gone before anything is
        staged."""
        self.number = 1 - self.number

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy what may change before the optimizer steps; :meth:`copy_rest` copies
        what may not."""
        # Replicated tensors are small and copied at once: code outside the optimizer
        # may change them.
        waiting = {
            name: tensor
            for name, tensor in tensors.items()
            if name.startswith(self.later)
        }
        self._sharded = {
            name: tensor
            for name, tensor in waiting.items()
            if isinstance(tensor, DTensor)
        }
        return super().fill(tensors)

    def _hosts(self, sources: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        # Another layout: the ranges change, and views of the old ones with them.
        if self._hosts_of is not self.layout:
            self._hosts_of, self._ranges = self.layout, _ranges(sources)
            for slot in self._slots.values():
                slot.views = {}
        size = max((end for _, end in self._ranges.values()), default=0)
        self._make_room(self.number, size, sources)
        # The room of the next state too, unless an earlier process's state is there,
        # the newest that is complete.
        other = 1 - self.number
        if other not in self._slots and not self._folder.is_committed(
            part_name(self._rank, other)
        ):
            self._make_room(other, size, sources)
        # Views are made once for each file, not at each save.
        slot = self._slots[self.number]
        if not slot.views:
            for place, source in sources.items():
                begin, end = self._ranges[place]
                slot.views[place] = (
                    slot.memory[begin:end].view(source.dtype).view(source.shape)
                )
        return slot.views

    def _make_room(
        self, number: int, size: int, sources: Mapping[Place, Tensor]
    ) -> None:
        slot = self._slots.get(number)
        if slot is not None and len(slot.memory) == size:
            return
        # A registered address must not be given back to the system.
        if slot is not None:
            self._slots.pop(number).unpin()
        self._slots[number] = Slot(
            self._folder.allocate(part_name(self._rank, number), size)
        )
        device = next(
            (
                source.device
                for source in sources.values()
                if streams.pins(source.device)
            ),
            None,
        )
        if device is not None:
            self._slots[number].pin(device)

    def close(self) -> None:
        """Give back what was registered with the driver. No copy may be in flight."""
        for slot in self._slots.values():
            slot.unpin()

    def _copy(
        self, sources: Mapping[Place, Tensor], hosts: Mapping[Place, Tensor]
    ) -> None:
        now: list[tuple[Tensor, Tensor]] = []
        self._later = []
        # Slices of sharded tensors wait for copy_rest, all others are copied before
        # training goes on.
        for place, source in sources.items():
            (self._later if place[0] in self._sharded else now).append(
                (hosts[place], source)
            )
        # The counts tell later whether a tensor changed between now and copy_rest.
        self._versions = {
            name: tensor._version for name, tensor in self._sharded.items()
        }
        # On an accelerator, copy_rest has to come behind what training has issued so
        # far, which this event marks.
        behind = [
            source.device
            for _, source in self._later
            if streams.run_behind(source.device)
        ]
        self._staged_at = (
            None
            if not behind
            else torch.accelerator.current_stream(behind[0]).record_event()
        )
        copy_to_hosts(now)

    def copy_rest(self) -> list[str]:
        """Copy the slices of sharded tensors, on any thread, before the optimizer
        steps.

        Returns:
            names of tensors that changed meanwhile: what was copied of them is of no
                one instant.
        """
        if self._staged_at is not None:
            beside = torch.Stream(self._later[0][1].device)
            # The stream is this thread's own: it does not wait for what training issues
            # next.
            torch.accelerator.set_stream(beside)
            beside.wait_event(self._staged_at)
        copy_to_hosts(self._later)
        # A change after the copy of its tensor counts as well: copies have no exact
        # end.
        changed = [
            name
            for name, tensor in self._sharded.items()
            if tensor._version != self._versions[name]
        ]
        self._later, self._sharded = [], {}
        return changed

    def index_of(self, staged: Staged) -> bytes:
        """Return the index (docs/checkpoint-format.md) of what was staged; that of the
        save before where nothing has changed. It is the same for both files, and on
        ranks that hold the same slices."""
        # Names and layouts rarely change; the index of a large model takes long to
        # make.
        if (
            self._indexed is not None
            and self._indexed[0] is self.layout
            and self._indexed[1] is staged.paths
        ):
            return self._indexed[2]
        base = self.memory.data_ptr()
        tensors = {}
        for name, tensor in staged.tensors.items():
            assert isinstance(tensor, StagedTensor)
            if not tensor.items:
                continue  # of another pipeline stage, whose ranks name it
            chunks = []
            for item in tensor.items:
                host = tensor.slices[item.index.offset]
                # Places in the shared file, as the manifest's readers see them.
                begin = host.data_ptr() - base if host.numel() else 0
                place = tuple(item.index.offset or ()), tuple(host.shape)
                chunks.append(
                    Chunk(
                        TENSORS,
                        TENSORS,
                        *place,
                        begin,
                        begin + host.numel() * host.element_size(),
                    )
                )
            data = tensor.items[0].tensor_data
            assert data is not None
            path = staged.paths.get(name, (name,))
            tensors[name] = TensorRecord(
                tuple(data.size), data.properties.dtype, path, tuple(chunks)
            )
        content = json.dumps(Index(tensors).to_json()).encode()
        self._indexed = self.layout, staged.paths, content
        return content


def _ranges(sources: Mapping[Place, Tensor]) -> dict[Place, tuple[int, int]]:
    """Lay slices one behind the other; return where each begins and ends in the
    file."""
    ranges, end = {}, 0
    for place, source in sources.items():
        # Aligned, so that a slice can be viewed in its own dtype and copied fast.
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + source.numel() * source.element_size()
        ranges[place] = (begin, end)
    return ranges
