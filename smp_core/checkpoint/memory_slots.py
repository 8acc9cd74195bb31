"""The host memory of states that outlive their process: each rank's slices, staged into two shared files by turns.

A state is staged straight into its file, so that the memory tier holds two copies of a rank's shards and no third one.
Slices of parameters and optimizer states stay as they are until the optimizer's next step; they are copied beside the
next step's forward and backward pass (:meth:`SharedSlots.copy_rest`), everything else at once.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from smp_core import streams
from smp_core.checkpoint.layout import TensorRecord, digest_of
from smp_core.checkpoint.memory_folder import NodeMemory
from smp_core.checkpoint.memory_records import in_layout, layout_bytes
from smp_core.checkpoint.save_plan import StagedTensor
from smp_core.checkpoint.staging import HostBuffers, Place, Staged, copy_to_hosts

logger = logging.getLogger("smp")

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Slot:
    """A file of tensors of one rank.

    Attributes:
        name: of the file.
        memory: all its bytes, uint8.
    """

    name: str
    memory: torch.Tensor


def slot_name(rank: int, number: int) -> str:
    """Return the name of a file of a rank's tensors."""
    return f"rank-{rank:05d}-{number}.tensors"


class SharedSlots(HostBuffers):
    """The two files of a rank.

    Private names: a tensor's ``_version``, the count of its in-place changes, which nothing public tells.

    Args:
        folder: the node's.
        rank: of the run.

    Attributes:
        later: beginnings of the names of tensors that :meth:`copy_rest` copies, where they are sharded.
    """

    def __init__(self, folder: NodeMemory, rank: int) -> None:
        super().__init__()
        self.later: tuple[str, ...] = ("",)
        self._folder = folder
        self._rank = rank
        self._slots: dict[int, Slot] = {}
        self._pinned: set[Slot] = set()
        self._number = 0
        self._sharded: dict[str, torch.Tensor] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: dict[str, int] = {}
        self._staged_at: torch.Event | None = None
        self._ranges: dict[Place, tuple[int, int]] = {}
        self._views: dict[Slot, dict[Place, torch.Tensor]] = {}
        self._laid_out: tuple[Any, tuple[bytes, str]] | None = None

    @property
    def number(self) -> int:
        """The number of the newest state's file, 0 or 1."""
        return self._number

    @property
    def slot(self) -> Slot:
        """The newest state's file."""
        return self._slots[self._number]

    def turn(self) -> int:
        """Turn to the other file and return its number; its record is to be gone before anything is staged."""
        self._number = 1 - self._number
        return self._number

    def keep(self, file: str) -> None:
        """Take ``file``, which an earlier process has left, for the newest state's."""
        self._number = [slot_name(self._rank, number) for number in range(2)].index(file)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Copy what may change before the optimizer steps; :meth:`copy_rest` copies what may not."""
        waiting = {name: tensor for name, tensor in tensors.items() if name.startswith(self.later)}
        self._sharded = {name: tensor for name, tensor in waiting.items() if isinstance(tensor, DTensor)}
        return super().fill(tensors)

    def _hosts(self, sources: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        if self._hosts_of is not self.layout:
            self._hosts_of, self._ranges, self._views = self.layout, _ranges(sources), {}
        end = max((end for _, end in self._ranges.values()), default=0)
        for number in (self._number, 1 - self._number):
            slot = self._slots.get(number)
            if slot is None and number != self._number and self._folder.holds(slot_name(self._rank, number)):
                continue  # an earlier process's, which is still the newest state that is complete
            if slot is None or (number == self._number and len(slot.memory) != end):
                if slot is not None:
                    self._views.pop(slot, None)
                    self._unpin(self._slots.pop(number))
                name = slot_name(self._rank, number)
                self._slots[number] = Slot(name, self._folder.allocate(name, end))
                self._pin(self._slots[number], sources)
        if self.slot not in self._views:
            hosts, memory = {}, self.slot.memory
            for place, source in sources.items():
                begin, end = self._ranges[place]
                hosts[place] = memory[begin:end].view(source.dtype).view(source.shape)
            self._views[self.slot] = hosts
        return self._views[self.slot]

    def _pin(self, slot: Slot, sources: Mapping[Place, torch.Tensor]) -> None:
        """Register a file's memory with the driver, so that copies from a CUDA device do not pass through another."""
        if not any(streams.pins(source.device) for source in sources.values()) or not len(slot.memory):
            return
        refused = int(torch.cuda.cudart().cudaHostRegister(slot.memory.data_ptr(), len(slot.memory), 0))
        if refused:
            with contextlib.suppress(RuntimeError):  # the driver's error is told to the next kernel, whichever it is
                torch.zeros((), device=next(iter(sources.values())).device)
            logger.warning(
                "the driver did not pin %d bytes of shared memory (CUDA error %d): "
                "copies of states take longer and hold up the device",
                len(slot.memory),
                refused,
            )
        else:
            self._pinned.add(slot)

    def _unpin(self, slot: Slot) -> None:
        """Give a file's memory back, which would otherwise stay registered at an address that is used again."""
        if slot in self._pinned:
            self._pinned.remove(slot)
            torch.cuda.cudart().cudaHostUnregister(slot.memory.data_ptr())

    def close(self) -> None:
        """Give back what was registered with the driver. No copy may be in flight."""
        for slot in tuple(self._pinned):
            self._unpin(slot)

    def _copy(self, sources: Mapping[Place, torch.Tensor], hosts: Mapping[Place, torch.Tensor]) -> None:
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._later = []
        for place, source in sources.items():
            (self._later if place[0] in self._sharded else now).append((hosts[place], source))
        self._versions = {name: tensor._version for name, tensor in self._sharded.items()}
        behind = [source.device for _, source in self._later if streams.run_behind(source.device)]
        self._staged_at = None if not behind else torch.accelerator.current_stream(behind[0]).record_event()
        copy_to_hosts(now)

    def copy_rest(self) -> list[str]:
        """Copy the slices of sharded tensors, on any thread, before the optimizer steps.

        Returns:
            names of tensors that changed meanwhile: what was copied of them is of no one instant.
        """
        if self._staged_at is not None:
            beside = torch.Stream(self._later[0][1].device)
            torch.accelerator.set_stream(beside)  # of this thread: it does not wait for what training is given next
            beside.wait_event(self._staged_at)
        copy_to_hosts(self._later)
        changed = [name for name, tensor in self._sharded.items() if tensor._version != self._versions[name]]
        self._later, self._sharded = [], {}
        return changed

    def layout_of(self, staged: Staged) -> tuple[bytes, str]:
        """Return the layout of what was staged, and its digest; that of the save before where nothing has changed."""
        staged_tensors = [tensor for tensor in staged.tensors.values() if isinstance(tensor, StagedTensor)]
        items = [tensor.items for tensor in staged_tensors]  # lists that are kept for tensors laid out as before
        known = self._laid_out
        if known is not None:
            ranges, paths, items_then = known[0]
            same = len(items) == len(items_then) and all(map(operator.is_, items, items_then))
            if same and ranges == self._ranges and paths == staged.paths:
                return known[1]
        tensors = {}
        base = self.slot.memory.data_ptr()
        for name, tensor in staged.tensors.items():
            assert isinstance(tensor, StagedTensor)
            if not tensor.items:
                continue  # of another pipeline stage, whose ranks name it
            chunks = []
            for item in tensor.items:
                host = tensor.slices[item.index.offset]
                begin = host.data_ptr() - base if host.numel() else 0
                end = begin + host.numel() * host.element_size()
                chunks.append(in_layout(tuple(item.index.offset or ()), tuple(host.shape), begin, end))
            data = tensor.items[0].tensor_data
            assert data is not None
            path = staged.paths.get(name, (name,))
            tensors[name] = TensorRecord(tuple(data.size), data.properties.dtype, path, tuple(chunks))
        content = layout_bytes(tensors)
        found = content, digest_of(content, "xxh3")
        self._laid_out = (self._ranges, staged.paths, items), found
        return found


def _ranges(sources: Mapping[Place, torch.Tensor]) -> dict[Place, tuple[int, int]]:
    """Lay slices one behind the other; return where each begins and ends in the file."""
    ranges, end = {}, 0
    for place, source in sources.items():
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + source.numel() * source.element_size()
        ranges[place] = (begin, end)
    return ranges
