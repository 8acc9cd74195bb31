"""Devices and machines as data: peaks, memory, bandwidths, and the machines that one can rent. Every row names its
source.

Bandwidths are of one direction. Where NVIDIA prints figures with 2:4 sparsity, half of that stands here.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

# Dense bfloat16 tensor-core peaks in TFLOPS, by the words of `torch.cuda.get_device_name()`; the first row whose words
# are all there counts.
_PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIE", 756.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("A6000", 154.8),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("RTX 6000 ADA", 364.3),
    ("MI355X", 2516.6),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 191.5),  # one of the two dies of a card, which is what torch calls a device
)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, None if it is not known (or has none: CPU, V100, T4).

    Sources: the vendors' data sheets (NVIDIA A100, A10, A30, A40, L4, L40S, H100, H200, HGX B200 and B300, GB200, RTX
    A6000; AMD Instinct MI250X, MI300X, MI325X, MI355X). NVIDIA prints Hopper's, Ada's and Blackwell's figures with 2:4
    sparsity; half of that is the dense peak. MIG slices and laptop parts are not known.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & {"MIG", "LAPTOP"}:
        return None
    return next((tflops * 1e12 for key, tflops in _PEAK_BF16_TFLOPS if words.issuperset(key.split())), None)


@dataclass(frozen=True)
class Device:
    """A device as its vendor describes it.

    Attributes:
        name: as the vendor writes it; :func:`peak_flops` knows its matrix products.
        memory_gib: what a program finds on it.
        hbm: bytes per second of its memory.
        link: bytes per second that one device sends to the others of its node.
        host_link: bytes per second between the device and host memory.
        source: where the figures come from.
        given_flops: of a device that is in no table.
    """

    name: str
    memory_gib: float
    hbm: float
    link: float
    host_link: float
    source: str
    given_flops: float | None = None

    @property
    def flops(self) -> float:
        """Peak of dense bfloat16 matrix products in FLOP/s."""
        found = self.given_flops or peak_flops(self.name)
        assert found is not None, self.name
        return found


_PCIE4, _PCIE5 = 32e9, 64e9

DEVICES: dict[str, Device] = {
    "a100-40g": Device("A100", 39.4, 1555e9, 300e9, _PCIE4, "NVIDIA A100 data sheet: SXM 40 GB, NVLink 600 GB/s"),
    "a100-80g": Device("A100", 79.2, 2039e9, 300e9, _PCIE4, "NVIDIA A100 data sheet: SXM 80 GB, NVLink 600 GB/s"),
    "h100-80g": Device("H100", 79.2, 3350e9, 450e9, _PCIE5, "NVIDIA H100 data sheet: SXM, NVLink 900 GB/s"),
    "h100-pcie": Device("H100 PCIE", 79.2, 2000e9, _PCIE5, _PCIE5, "NVIDIA H100 data sheet: PCIe"),
    "h200": Device("H200", 139.8, 4800e9, 450e9, _PCIE5, "NVIDIA H200 data sheet: SXM 141 GB, NVLink 900 GB/s"),
    "b200": Device("B200", 178.0, 8000e9, 900e9, _PCIE5, "NVIDIA DGX B200 data sheet: 1,440 GB in 8, NVLink 1.8 TB/s"),
    "a10g": Device("A10", 22.1, 600e9, _PCIE4, _PCIE4, "NVIDIA A10 data sheet: 24 GB, PCIe Gen4"),
    "l4": Device("L4", 22.0, 300e9, _PCIE4, _PCIE4, "NVIDIA L4 data sheet: 24 GB, PCIe Gen4"),
    "l40s": Device("L40S", 44.5, 864e9, _PCIE4, _PCIE4, "NVIDIA L40S data sheet: 48 GB, PCIe Gen4"),
    "mi300x": Device("MI300X", 191.5, 5300e9, 448e9, _PCIE5, "AMD Instinct MI300X data sheet: 192 GB, 7 x 64 GB/s"),
}


@dataclass(frozen=True)
class Machine:
    """A kind of node: devices, and what its network adapters send together in Gbit/s."""

    device: str
    devices: int
    gbit: float
    source: str


MACHINES: dict[str, Machine] = {
    "p4d": Machine("a100-40g", 8, 400, "AWS EC2 P4 page: p4d.24xlarge, EFA 400 Gbps"),
    "p4de": Machine("a100-80g", 8, 400, "AWS EC2 P4 page: p4de.24xlarge, EFA 400 Gbps"),
    "p5": Machine("h100-80g", 8, 3200, "AWS EC2 P5 page: p5.48xlarge, EFA 3,200 Gbps"),
    "p5en": Machine("h200", 8, 3200, "AWS EC2 P5 page: p5en.48xlarge, EFA 3,200 Gbps"),
    "g5": Machine("a10g", 8, 100, "AWS EC2 G5 page: g5.48xlarge, 100 Gbps"),
    "dgx-a100": Machine("a100-80g", 8, 1600, "NVIDIA DGX A100 data sheet: 8 x 200 Gb/s InfiniBand"),
    "dgx-h100": Machine("h100-80g", 8, 3200, "NVIDIA DGX H100 data sheet: 8 x 400 Gb/s InfiniBand"),
    "dgx-h200": Machine("h200", 8, 3200, "NVIDIA DGX H200 data sheet: 8 x 400 Gb/s InfiniBand"),
    "dgx-b200": Machine("b200", 8, 3200, "NVIDIA DGX B200 data sheet: 8 x 400 Gb/s InfiniBand"),
}

ETHERNET_GBIT = 10.0
"""What `@ethernet` means: IEEE 802.3ae."""


def device_of(name: str) -> Device:
    """Return the device of this name.

    Raises:
        ValueError: it is not in the table; names the nearest one, all others, and how to describe one's own.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ValueError(
            f"unknown device {name!r}{_meant(name, DEVICES)}. Known: {', '.join(DEVICES)}. Describe another one in a "
            "YAML file (docs/planning.md)"
        )
    return found


def machine_of(name: str) -> Machine:
    """Return the kind of node of this name.

    Raises:
        ValueError: it is not in the table.
    """
    found = MACHINES.get(name.lower())
    if found is None:
        raise ValueError(f"unknown kind of node {name!r}{_meant(name, MACHINES)}. Known: {', '.join(MACHINES)}")
    return found


def _meant(name: str, known: dict[str, Device] | dict[str, Machine]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
