"""Constants of the time and memory models. Written by `benchmarks/planner.py`, which fits them; what they were fitted
on and how far they are off rows that they were not fitted on stands in `benchmarks/results/planner.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """The constants, as shares and seconds.

    Attributes:
        product_efficiency: share of the peak that matrix products reach.
        attention_efficiency: the same of attention.
        memory_efficiency: share of the memory's bandwidth that other operators reach.
        link_efficiency, network_efficiency: share of the data sheet's rate inside nodes and between them.
        latency_inside, latency_between: seconds of a message.
        exposed: share of the shorter of computing and communicating that does not run behind the other.
        context_gib: of the CUDA context and the communicators, on each device.
        fragmentation: share of what is used that the allocator loses between its blocks.
    """

    product_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.75
    network_efficiency: float = 0.85
    latency_inside: float = 6e-6
    latency_between: float = 15e-6
    exposed: float = 0.1
    context_gib: float = 1.5
    fragmentation: float = 0.05


FITTED = Fitted()
