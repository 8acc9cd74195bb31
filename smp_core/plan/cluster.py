"""Cluster: the facts about the machines that decisions use: nodes, devices, memory,
links, what this torch can do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FSDPModule

from smp_core.cluster import LINKS_VARIABLE, Links, of_all_ranks
from smp_core.topology import Topology
from smp_core.torch_facts import FSDP_METHODS

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """The machines of one run, the same on every rank but for `host_memory`.

    Attributes:
        topology: nodes and their ranks.
        device: type of the devices: "cpu", "cuda".
        device_memory: bytes of the smallest device; None: there is none to plan for.
        host_memory: bytes that this rank's node has available now.
        links: measured on a cluster of this shape.
        fsdp_methods: those named in `smp_core.torch_facts.compat.FSDP_METHODS` that
            this torch has.
    """

    topology: Topology
    device: str = "cpu"
    device_memory: int | None = None
    host_memory: int = 0
    links: Links | None = None
    fsdp_methods: frozenset[str] = frozenset(FSDP_METHODS.values())

    def of_stage(self, stages: int) -> Cluster:
        """Return the machines of one pipeline stage, as decisions about its ranks see
        them. Links were measured with all nodes at work, and are left out where a stage
        has some of them."""
        if stages == 1:
            return self
        return replace(self, topology=self.topology.of_stage(stages), links=None)

    def of_groups(self, degree: int) -> Cluster:
        """Return the machines with every ``degree`` neighbours for one rank, as
        decisions about partition groups see them. Links were measured between ranks,
        and are left out where several count as one."""
        if degree == 1:
            return self
        return replace(self, topology=self.topology.of_groups(degree), links=None)

    @classmethod
    def observer(
        cls, topology: Topology, device: torch.device
    ) -> Callable[[], Cluster]:
        """Ask all ranks for the memory of their devices: collective. The function that
        comes back reads local files only, and may raise `ValueError` (a file of links
        that is none)."""
        # Asked once, when all ranks are here; decisions then need no collective.
        own: int | None = None
        if device.type == "cuda":
            own = torch.cuda.get_device_properties(device).total_memory
        sizes = of_all_ranks(own)
        smallest = min((size for size in sizes if size is not None), default=None)

        def observe() -> Cluster:
            return cls(
                topology,
                device.type,
                smallest,
                available_host_bytes(),
                Links.stored(topology) if LINKS_VARIABLE in os.environ else None,
                frozenset(
                    each for each in FSDP_METHODS.values() if hasattr(FSDPModule, each)
                ),
            )

        return observe


def available_host_bytes() -> int:
    """Return what the machine could give to new allocations now (Linux: MemAvailable;
    elsewhere all memory there is)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
