"""Devices and machines as data: peaks, memory, bandwidths, and the machines that one
can rent. Every row names its source: a page of the device's maker, of AWS (EC2), Azure
(ND), Google Cloud (a2 to a4) or NVIDIA (DGX).

Bandwidths are of one direction. Where NVIDIA prints figures with 2:4 sparsity, half of
that stands here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from smp_core.config import did_you_mean

_Row = TypeVar("_Row")

# Dense bfloat16 tensor-core peaks in TFLOPS, by the words of
# `torch.cuda.get_device_name()`; the first row whose words are all there counts.
_PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("GB10", 125.0),
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
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A6000", 154.8),
    ("RTX 4090", 165.2),
    ("RTX 5090", 209.5),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("RTX 6000 ADA", 364.3),
    ("MI355X", 2516.6),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    # One of the two dies of a card, which is what torch calls a device.
    ("MI250X", 191.5),
)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, None if it is not known (or
    has none: CPU, V100, T4).

    Sources: the vendors' data sheets (NVIDIA A100, A10, A10G, A30, A40, L4, L40S, H100,
    H200, HGX B200 and B300, GB200, RTX A6000, RTX 6000 Ada; DGX Spark, whose bfloat16
    is taken to be an eighth of its sparse FP4; AMD Instinct MI250X, MI300X, MI325X,
    MI355X) and the architecture papers of RTX 4090 and 5090 (sums in float32). NVIDIA
    prints Hopper's, Ada's and Blackwell's figures with 2:4 sparsity; half of that is
    the dense peak. MIG slices, laptop parts and the "D" of the 4090 and 5090 are not
    known.
    """
    # Names differ by what stands between their words ("NVIDIA H100 80GB HBM3",
    # "H100-SXM"), so that whole words are compared.
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    # A slice, a laptop part or an export model has another peak under the same name.
    if words & {"MIG", "LAPTOP", "D"}:
        return None
    return next(
        (
            tflops * 1e12
            for key, tflops in _PEAK_BF16_TFLOPS
            if words.issuperset(key.split())
        ),
        None,
    )


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
        given_flops, given_fp8_flops: of a device that is in no table.
    """

    name: str
    memory_gib: float
    hbm: float
    link: float
    host_link: float
    source: str
    given_flops: float | None = None
    given_fp8_flops: float | None = None

    @cached_property
    def fp8_flops(self) -> float | None:
        """Peak of dense FP8 matrix products in FLOP/s, None without tensor cores for
        them. The data sheets of all other devices here have twice the bfloat16 peak."""
        if (
            self.given_flops is not None
            or self.name.split()[0] in _WITHOUT_FP8
            or "A6000" in self.name
        ):
            return self.given_fp8_flops
        return 2 * self.flops

    @cached_property
    def flops(self) -> float:
        """Peak of dense bfloat16 matrix products in FLOP/s."""
        found = self.given_flops or peak_flops(self.name)
        assert found is not None, self.name
        return found


# Ampere, by the first words of names; CDNA 2.
_WITHOUT_FP8 = ("A100", "A800", "A30", "A40", "A10", "A10G", "MI250X")

_PCIE3, _PCIE4, _PCIE5, _PCIE6 = 16e9, 32e9, 64e9, 128e9

# Between cards without NVLink, and to the host. Programs find a little less memory than
# is printed on the card.
DEVICES: dict[str, Device] = {
    # of float16
    "v100-16g": Device(
        "V100", 15.8, 900e9, 150e9, _PCIE3, "data sheet: SXM2 16 GB, NVLink", 125e12
    ),
    "v100-32g": Device(
        "V100", 31.7, 900e9, 150e9, _PCIE3, "data sheet: SXM2 32 GB, NVLink", 125e12
    ),
    "a100-40g": Device(
        "A100", 39.4, 1555e9, 300e9, _PCIE4, "data sheet: SXM 40 GB, NVLink 600 GB/s"
    ),
    "a100-80g": Device(
        "A100", 79.2, 2039e9, 300e9, _PCIE4, "data sheet: SXM 80 GB, NVLink 600 GB/s"
    ),
    "a100-pcie-40g": Device(
        "A100 PCIE", 39.4, 1555e9, _PCIE4, _PCIE4, "data sheet: PCIe 40 GB"
    ),
    "a100-pcie-80g": Device(
        "A100 PCIE", 79.2, 1935e9, _PCIE4, _PCIE4, "data sheet: PCIe 80 GB"
    ),
    "h100-80g": Device(
        "H100", 79.2, 3350e9, 450e9, _PCIE5, "data sheet: SXM, NVLink 900 GB/s"
    ),
    "h100-pcie": Device("H100 PCIE", 79.2, 2000e9, _PCIE5, _PCIE5, "data sheet: PCIe"),
    "h200": Device(
        "H200", 139.8, 4800e9, 450e9, _PCIE5, "data sheet: SXM 141 GB, NVLink 900 GB/s"
    ),
    "gh200": Device(
        "GH200",
        94.5,
        4000e9,
        450e9,
        450e9,
        "data sheet: 96 GB HBM3, NVLink-C2C 900 GB/s",
    ),
    "b200": Device(
        "B200",
        178.0,
        8000e9,
        900e9,
        _PCIE5,
        "data sheet: 1,440 GB in 8, NVLink 1.8 TB/s",
    ),
    "gb200": Device(
        "GB200", 184.0, 8000e9, 900e9, 225e9, "data sheet: 186 GB, half a CPU's C2C"
    ),
    "b300": Device(
        "B300", 267.0, 8000e9, 900e9, _PCIE6, "data sheet: 288 GB each, NVLink 1.8 TB/s"
    ),
    "dgx-spark": Device(
        "GB10", 119.0, 273e9, 25e9, 273e9, "data sheet: 128 GB, 200 Gb/s"
    ),
    "a10g": Device("A10G", 22.1, 600e9, _PCIE4, _PCIE4, "data sheet: 24 GB, PCIe Gen4"),
    "a40": Device(
        "A40", 44.4, 696e9, _PCIE4, _PCIE4, "data sheet: 48 GB with ECC, PCIe Gen4"
    ),
    "l4": Device("L4", 22.0, 300e9, _PCIE4, _PCIE4, "data sheet: 24 GB, PCIe Gen4"),
    "l40s": Device("L40S", 44.5, 864e9, _PCIE4, _PCIE4, "data sheet: 48 GB, PCIe Gen4"),
    "rtx-a6000": Device(
        "RTX A6000", 47.4, 768e9, _PCIE4, _PCIE4, "data sheet: 48 GB, PCIe Gen4"
    ),
    "rtx-6000-ada": Device(
        "RTX 6000 Ada", 47.4, 960e9, _PCIE4, _PCIE4, "data sheet: 48 GB"
    ),
    "rtx-4090": Device(
        "RTX 4090",
        23.5,
        1008e9,
        _PCIE4,
        _PCIE4,
        "Ada architecture paper: 24 GB, PCIe Gen4",
    ),
    "rtx-5090": Device(
        "RTX 5090",
        31.3,
        1792e9,
        _PCIE5,
        _PCIE5,
        "NVIDIA RTX Blackwell architecture paper: 32 GB",
    ),
    "mi300x": Device(
        "MI300X", 191.5, 5300e9, 448e9, _PCIE5, "data sheet: 192 GB, 7 x 64 GB/s"
    ),
    "mi325x": Device(
        "MI325X", 255.5, 6000e9, 448e9, _PCIE5, "data sheet: 256 GB, 7 x 64 GB/s"
    ),
    "mi355x": Device(
        "MI355X", 287.5, 8000e9, 537.6e9, _PCIE5, "data sheet: 288 GB, 7 x 76.8 GB/s"
    ),
}

_ALSO = {
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a6000": "rtx-a6000",
}
"""Other names of devices."""


@dataclass(frozen=True)
class Machine:
    """A kind of node: devices, and what its network adapters send together in Gbit/s.

    Attributes:
        first_efa: the adapters are EFA of the first generation, which reach less of
            their rate in larger groups.
    """

    device: str
    devices: int
    gbit: float
    source: str
    first_efa: bool = False


# `plan="auto"` knows a device only, and takes the network of its first row here.
MACHINES: dict[str, Machine] = {
    "p3dn": Machine(
        "v100-32g", 8, 100, "EC2 P3 page: p3dn.24xlarge, 100 Gbps", first_efa=True
    ),
    "p4d": Machine(
        "a100-40g", 8, 400, "EC2 P4 page: p4d.24xlarge, EFA 400 Gbps", first_efa=True
    ),
    "p4de": Machine(
        "a100-80g", 8, 400, "EC2 P4 page: p4de.24xlarge, EFA 400 Gbps", first_efa=True
    ),
    "p5": Machine("h100-80g", 8, 3200, "EC2 P5 page: p5.48xlarge, EFA 3,200 Gbps"),
    "p5e": Machine("h200", 8, 3200, "EC2 P5 page: p5e.48xlarge, EFA 3,200 Gbps"),
    "p5en": Machine("h200", 8, 3200, "EC2 P5 page: p5en.48xlarge, EFA 3,200 Gbps"),
    "p6-b200": Machine("b200", 8, 3200, "EC2 P6 page: p6-b200.48xlarge, EFA 3.2 Tbps"),
    "p6-b300": Machine("b300", 8, 6400, "EC2 P6 page: p6-b300.48xlarge, EFA 6.4 Tbps"),
    "g5": Machine("a10g", 8, 100, "EC2 G5 page: g5.48xlarge, 100 Gbps"),
    "g6": Machine("l4", 8, 100, "EC2 G6 page: g6.48xlarge, 100 Gbps"),
    "g6e": Machine("l40s", 8, 400, "EC2 G6e page: g6e.48xlarge, 400 Gbps"),
    "nd-a100-v4": Machine(
        "a100-40g", 8, 1600, "ND A100 v4 page: ND96asr_v4, 8 x 200 Gb/s InfiniBand"
    ),
    "ndm-a100-v4": Machine(
        "a100-80g",
        8,
        1600,
        "NDm A100 v4 page: ND96amsr_A100_v4, 8 x 200 Gb/s InfiniBand",
    ),
    "nd-h100-v5": Machine(
        "h100-80g", 8, 3200, "ND H100 v5 page: ND96isr_H100_v5, 8 x 400 Gb/s InfiniBand"
    ),
    "nd-h200-v5": Machine(
        "h200", 8, 3200, "ND H200 v5 page: ND96isr_H200_v5, 8 x 400 Gb/s InfiniBand"
    ),
    "nd-mi300x-v5": Machine(
        "mi300x",
        8,
        3200,
        "ND MI300X v5 page: ND96isr_MI300X_v5, 8 x 400 Gb/s InfiniBand",
    ),
    "a2-highgpu-8g": Machine("a100-40g", 8, 100, "GPU machine types page: 100 Gbps"),
    "a2-ultragpu-8g": Machine("a100-80g", 8, 100, "GPU machine types page: 100 Gbps"),
    "a3-highgpu-8g": Machine(
        "h100-80g", 8, 800, "GPU machine types page: 4 x 200 Gbps of GPUs"
    ),
    "a3-megagpu-8g": Machine(
        "h100-80g", 8, 1600, "GPU machine types page: 8 x 200 Gbps of GPUs"
    ),
    "a3-ultragpu-8g": Machine(
        "h200", 8, 3200, "GPU machine types page: 8 x 400 Gbps of GPUs"
    ),
    "a4-highgpu-8g": Machine(
        "b200", 8, 3200, "GPU machine types page: 8 x 400 Gbps of GPUs"
    ),
    "dgx-a100": Machine(
        "a100-80g", 8, 1600, "DGX A100 data sheet: 8 x 200 Gb/s InfiniBand"
    ),
    "dgx-h100": Machine(
        "h100-80g", 8, 3200, "DGX H100 data sheet: 8 x 400 Gb/s InfiniBand"
    ),
    "dgx-h200": Machine(
        "h200", 8, 3200, "DGX H200 data sheet: 8 x 400 Gb/s InfiniBand"
    ),
    "dgx-b200": Machine(
        "b200", 8, 3200, "DGX B200 data sheet: 8 x 400 Gb/s InfiniBand"
    ),
    "dgx-b300": Machine(
        "b300", 8, 6400, "DGX B300 data sheet: 8 x 800 Gb/s InfiniBand"
    ),
    "gb200-nvl72": Machine(
        "gb200", 72, 28800, "DGX GB200 data sheet: 72 x 400 Gb/s InfiniBand"
    ),
}

ETHERNET_GBIT = 10.0
"""What `@ethernet` means: IEEE 802.3ae."""


def device_of(name: str) -> Device:
    """Return the device of this name.

    Raises:
        ValueError: it is not in the table; names the nearest one, all others, and how
            to describe one's own.
    """
    known = _ALSO.get(name.lower(), name.lower())
    return _of_table(
        known,
        name,
        DEVICES,
        "device",
        ". Describe another one in a YAML file (docs/planning.md)",
    )


def machine_of(name: str) -> Machine:
    """Return the kind of node of this name.

    Raises:
        ValueError: it is not in the table.
    """
    return _of_table(name.lower(), name, MACHINES, "kind of node")


def _of_table(
    key: str, name: str, table: Mapping[str, _Row], what: str, or_else: str = ""
) -> _Row:
    if key not in table:
        raise ValueError(
            f"unknown {what} {name!r}{did_you_mean(name.lower(), table) or '.'} Known: {', '.join(table)}{or_else}"
        )
    return table[key]
