"""Constants of the time and memory models. `benchmarks/planner.py` fits those of time; what they were fitted on, and
how far they are off rows that they were not fitted on, stands in `benchmarks/results/planner.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


FITTED = Fitted()
