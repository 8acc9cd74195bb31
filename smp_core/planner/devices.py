"""Devices and machines as data: peaks, memory, bandwidths, and the machines that one
can rent. Every row names its source: a page of the device's maker, of AWS (EC2), Azure
(ND), Google Cloud (a2 to a4) or NVIDIA (DGX). The rows are in devices.json.

Bandwidths are of one direction. Where NVIDIA prints figures with 2:4 sparsity, half of
that stands here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from smp_core.config import did_you_mean
from smp_core.outside import read_json

_Row = TypeVar("_Row")

_TABLES = read_json(Path(__file__).with_suffix(".json"))

# Dense bfloat16 tensor-core peaks in TFLOPS, by the words of
# `torch.cuda.get_device_name()`; the first row whose words are all there counts. That of
# MI250X is of one of the two dies of a card, which is what torch calls a device.
_PEAK_BF16_TFLOPS: dict[str, float] = _TABLES["peak_bf16_tflops"]


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
            for key, tflops in _PEAK_BF16_TFLOPS.items()
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

# V100's peak is of float16. Between cards without NVLink, and to the host, rates are
# those of PCIe. Programs find a little less memory than is printed on the card.
DEVICES = {name: Device(**row) for name, row in _TABLES["devices"].items()}

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
MACHINES = {name: Machine(**row) for name, row in _TABLES["machines"].items()}

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
