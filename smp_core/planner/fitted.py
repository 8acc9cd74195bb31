"""Constants of the time and memory models. `benchmarks/planner.py` fits those of time; what they were fitted on, and
how far they are off rows that they were not fitted on, stands in `benchmarks/results/planner.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from smp_core.cluster import Layout


@dataclass(frozen=True)
class Fitted:
    """The constants, as shares and seconds.

    Attributes:
        products: share of the peak that matrix products reach, by a device's name or its first word; "" of all others:
            that of the H100.
        attention: the same of attention.
        moving: share of the memory's bandwidth that other operators reach; assumed, since all that was published has
            fused kernels.
        link, network: share of the data sheet's rate inside nodes and between them.
        latency_inside, latency_between: seconds of a message; assumed.
        exposed: share of the shorter of computing and communicating that does not run behind the other.
        launching: the least seconds that a block's forward or backward takes, however little it computes; assumed.
        context_gib: of the CUDA context and the communicators, on each device; a margin, not fitted.
        fragmentation: share of what is used that the allocator loses between its blocks; a margin, not fitted.
    """

    products: Mapping[str, float] = field(default_factory=lambda: {"A100": 0.699, "": 0.542})
    attention: Mapping[str, float] = field(default_factory=lambda: {"A100": 0.31, "": 0.187})
    moving: float = 0.8
    link: float = 0.421
    network: float = 0.4
    latency_inside: float = 6e-6
    latency_between: float = 15e-6
    exposed: float = 0.193
    launching: float = 1e-3
    context_gib: float = 1.5
    fragmentation: float = 0.05

    def products_of(self, device: str) -> float:
        """Return the share of a device's peak that matrix products reach."""
        return self.products.get(device, self.products.get(device.split()[0], self.products[""]))

    def attention_of(self, device: str) -> float:
        """Return the share of a device's peak that attention reaches."""
        return self.attention.get(device, self.attention.get(device.split()[0], self.attention[""]))

    def share_of(self, rate: str, device: str) -> float:
        """Return the share of a "link", of the "network", or of the peak that "products" reach."""
        share: float = self.products_of(device) if rate == "products" else getattr(self, rate)
        return share

    def with_share(self, rate: str, device: str, share: float) -> Fitted:
        """Return the constants with another share of a rate, as :meth:`share_of` names it."""
        if rate == "products":
            return replace(self, products={**self.products, device: share})
        return replace(self, **{rate: share})  # type: ignore[arg-type]  # the others are floats


FITTED = Fitted()


@dataclass(frozen=True)
class Band:
    """The mean error of planned step times, as a share, on the runs of a program that is like the asked one."""

    share: float
    program: str


BANDS: Mapping[str, Band] = {
    "sharding": Band(0.036, "llm-foundry, FSDP on A100 and H100, sizes that were not fitted"),
    "pipeline": Band(0.105, "vTrain, Megatron's pipeline and tensor ranks on A100, sizes that were not fitted"),
    "tensor": Band(0.115, "Kempner, FSDP2 and tensor ranks on H200, sizes that were not fitted"),
    "slow links": Band(0.23, "IBM's FSDP on A100 and H100 over slow links, none of which was fitted"),
}
"""By the axis of a layout. No published run with context ranks is known: they have the band of tensor ranks."""

MEMORY_BAND = Band(0.044, "Kempner, FSDP2 and tensor ranks on H200")
"""How far off planned peaks of memory are in the mean."""

SLOW_GBIT = 200.0
"""Gbit/s of each device's share of the links between nodes, below which no fitted program's were."""


def band_of(layout: Layout, gbit_of_device: float | None) -> Band:
    """Return the band of the nearest programs, the widest of a layout's axes.

    Args:
        gbit_of_device: a device's share of what is sent between nodes; None: nothing is.
    """
    found = [BANDS["sharding"]]
    if layout.pipeline > 1:
        found.append(BANDS["pipeline"])
    if layout.tensor > 1 or layout.context > 1:
        found.append(BANDS["tensor"])
    if gbit_of_device is not None and gbit_of_device < SLOW_GBIT:
        found.append(BANDS["slow links"])
    return max(found, key=lambda band: band.share)
