"""Constants of the time and memory models. `benchmarks/planner.py` fits those of time;
what they were fitted on, and how far they are off rows that they were not fitted on,
stands in `benchmarks/results/planner.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smp_core.cluster import Layout


@dataclass(frozen=True)
class Fitted:
    """The constants, as shares and seconds.

    Attributes:
        products: share of the peak that matrix products reach, by a device's name or
            its first word; "" of all others: that of Hopper.
        attention: the same of attention, in FlashAttention-2's kernels.
        moving: share of the memory's bandwidth that other operators reach; assumed.
        link: share of the data sheet's rate inside nodes; assumed, since the fit hardly
            changes with it.
        network: share of the data sheet's rate between nodes.
        falls: how the share between nodes falls with the nodes of a group, nodes **
            -falls, where adapters are of the first generation of EFA
            (:class:`smp_core.planner.devices.Machine`); elsewhere it does not.
        latency_inside, latency_between: seconds of a message; assumed.
        exposed: share of the shorter of computing and communicating that does not run
            behind the other; assumed, since the fit hardly changes with it.
        launching: the least seconds that a block's forward or backward takes, however
            little it computes.
        context_gib: of the CUDA context, on each device; a margin, not fitted.
        communicator_gib: of each group of several ranks that the device talks in;
            reports of NVIDIA/nccl#964, A100.
        fragmentation: share of what is used that the allocator loses between its
            blocks; a margin, not fitted.
    """

    products: Mapping[str, float] = field(
        default_factory=lambda: {"A100": 0.747, "": 0.664}
    )
    attention: Mapping[str, float] = field(
        default_factory=lambda: {"A100": 0.585, "": 0.324}
    )
    moving: float = 0.8
    link: float = 0.8
    network: float = 0.454
    falls: float = 0.31
    latency_inside: float = 6e-6
    latency_between: float = 15e-6
    exposed: float = 0.15
    launching: float = 2.8e-3
    context_gib: float = 0.6
    communicator_gib: float = 0.5
    fragmentation: float = 0.05

    def share_of(self, rate: str, device: str) -> float:
        """Return the share of a rate that is reached, by its field: of a "link", or of
        the peak of the device that "products" or "attention" reach."""
        share = getattr(self, rate)
        # The exact name, then its first word ("A100" of "A100 PCIE"), then what holds
        # for all others.
        if isinstance(share, Mapping):
            share = share.get(device, share.get(device.split()[0], share[""]))
        return float(share)

    def with_share(self, rate: str, device: str, share: float) -> Fitted:
        """Return the constants with another share of a rate, as :meth:`share_of` names
        it."""
        before = getattr(self, rate)
        changed: Any = (
            {**before, device: share} if isinstance(before, Mapping) else share
        )
        return replace(self, **{rate: changed})


FITTED = Fitted()


@dataclass(frozen=True)
class Band:
    """The mean error of planned step times, as a share, on the runs of a program that
    is like the asked one."""

    share: float
    program: str


BANDS: Mapping[str, Band] = {
    "sharding": Band(
        0.079, "llm-foundry, FSDP on A100 and H100, which was left out of the fit"
    ),
    "tensor": Band(
        0.088, "Kempner, FSDP2 and tensor ranks on H200, which was left out of the fit"
    ),
    "pipeline": Band(
        0.109,
        "nanotron, pipeline and tensor ranks on H100, which was left out of the fit",
    ),
    "compiled": Band(0.149, "IBM, FSDP of compiled models, which no fit has seen"),
}
"""By the axis of a layout, and for compiled blocks. No published run with context ranks
is known: they have the band of tensor ranks."""

MEMORY_BAND = Band(0.044, "Kempner, FSDP2 and tensor ranks on H200")
"""How far off planned peaks of memory are in the mean."""


FP8_BAND = Band(0.085, "how much faster FP8 made three published programs")
"""How far off planned speedups of FP8 are in the mean, beside the band of the same plan
in bfloat16. None of the tables of published runs has FP8; `benchmarks/plan_requests.py`
has the three that are known, and nothing is fitted on them."""


def band_of(layout: Layout, in_fp8: bool = False, is_compiled: bool = False) -> Band:
    """Return the band of the nearest program, the widest of a layout's axes and of
    compiled blocks; in FP8 that of speedups is added."""
    has_tokens_split = layout.tensor > 1 or layout.context > 1
    applies = {
        "sharding": True,
        "tensor": has_tokens_split,
        "pipeline": layout.pipeline > 1,
        "compiled": is_compiled,
    }
    # Errors of several are not added.
    bands = [BANDS[name] for name, does in applies.items() if does]
    found = max(bands, key=lambda band: band.share)
    if not in_fp8:
        return found
    return Band(
        found.share + FP8_BAND.share, f"{found.program}; and {FP8_BAND.program}"
    )
