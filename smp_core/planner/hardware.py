"""Hardware: a cluster that need not exist yet, from a string, a YAML file or a kind of
node.

32x8:a100-40g@400gbps     32 nodes of 8 devices, 400 Gbit/s between nodes, of each node
4xp5                      4 nodes of a kind that :mod:`smp_core.planner.devices` knows
cluster.yaml              what is not in the tables, and a price
(with links.json)         times measured on the cluster itself, which win over all the above
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from smp_core.cluster import Collectives, LinkFit, Links
from smp_core.outside import read_yaml
from smp_core.plan import GIB, Cluster
from smp_core.planner.devices import ETHERNET_GBIT, Device, device_of, machine_of
from smp_core.planner.fitted import FITTED, Fitted
from smp_core.topology import Topology

EXAMPLES = "'32x8:a100-40g@400gbps', '4xp5' or a YAML file"

_DEVICES = re.compile(r"(\d+)x(\d+):([a-z0-9-]+)(?:@(.+))?", re.IGNORECASE)
_MACHINES = re.compile(r"(\d+)x([a-z][a-z0-9-]*)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gbps|gbit|gbit/s|gbe)", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """The machines to plan for.

    Attributes:
        gbit: what a node sends to the others in Gbit/s.
        price: of a node for an hour, in any currency; None: not known.
        measured: links measured on these machines; None: those of the data sheets, at
            the efficiency that was fitted.
        host_gib: host memory of a node.
        fitted: constants of the time model on these machines.
        first_efa: as :class:`smp_core.planner.devices.Machine` has it.
    """

    nodes: int
    ranks_per_node: int
    device: Device
    gbit: float
    price: float | None = None
    measured: Links | None = None
    host_gib: float = 1024.0
    fitted: Fitted = FITTED
    first_efa: bool = False

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> Hardware:
        """Read a cluster from its string or its YAML file.

        Raises:
            ValueError: neither; says how one is written.
        """
        # A file, devices with a rate, or a kind of node; each form excludes the others.
        word = os.fspath(text).strip()
        if word.endswith((".yaml", ".yml")):
            return _of_fields(Path(word), read_yaml(Path(word)))
        if found := _DEVICES.fullmatch(word):
            nodes, ranks, device, rate = found.groups()
            # A rate has no default: it decides about more than any other figure.
            if rate is None and int(nodes) > 1:
                raise ValueError(
                    f"cluster {word!r}: how fast are the nodes connected? Write {word + '@400gbps'!r}"
                )
            return cls(
                int(nodes), int(ranks), device_of(device), _gbit(rate) if rate else 0.0
            )
        if found := _MACHINES.fullmatch(word):
            machine = machine_of(found[2])
            device = device_of(machine.device)
            return cls(
                int(found[1]),
                machine.devices,
                device,
                machine.gbit,
                first_efa=machine.first_efa,
            )
        raise ValueError(
            f"cluster {word!r} is not understood; write NODESxDEVICES:DEVICE@RATE, as {EXAMPLES}"
        )

    def __post_init__(self) -> None:
        nodes, ranks, price = self.nodes, self.ranks_per_node, self.price
        if nodes < 1 or ranks < 1 or nodes * ranks > _MOST_DEVICES:
            raise ValueError(
                f"{nodes} nodes of {ranks} devices are no cluster; both are at least 1, and at most {_MOST_DEVICES:,} "
                "devices are planned for"
            )
        if price is not None and not 0 < price < _LARGEST:
            raise ValueError(
                f"price={price:g} of a node for an hour is not a number above 0 and below {_LARGEST:g}"
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.ranks_per_node

    def describe(self) -> str:
        """Return a line like "32 nodes x 8 A100 (39.4 GiB), 400 Gbit/s between
        nodes"."""
        between = f", {self.gbit:g} Gbit/s between nodes" if self.nodes > 1 else ""
        measured = ", measured links" if self.measured else ""
        devices = f"{self.nodes} x {self.ranks_per_node} {self.device.name} ({self.device.memory_gib:g} GiB)"
        return f"{devices}{between}{measured}"

    def cluster(self) -> Cluster:
        """Return the facts that decisions use. Measured links only: data sheets are no
        reason to leave a default."""
        topology = Topology.uniform(self.devices, self.ranks_per_node)
        memory = int(self.device.memory_gib * GIB)
        host_memory = int(self.host_gib * GIB)
        return Cluster(topology, "cuda", memory, host_memory, self.measured)

    @cached_property
    def links(self) -> Links:
        """Latency and bandwidth of all collectives: as measured, or by data sheets and
        fitted efficiencies."""
        if self.measured is not None:
            return self.measured
        # From data sheets: one latency and bandwidth for each class of links, the same
        # for all kinds of collectives.
        fitted, k, m = self.fitted, self.ranks_per_node, self.nodes
        inside = _alike(k, fitted.latency_inside, self.device.link * fitted.link)
        node_bytes = max(self.gbit, 1e-3) * 1e9 / 8
        # All ranks of a node share its adapters when they talk between nodes at once.
        of_node = node_bytes * fitted.network
        of_rank = of_node / k
        between = _alike(m, fitted.latency_between, of_rank)
        # One ring over all ranks of a node crosses its border once: the whole adapter
        # is that rank's.
        in_ring = min(of_node, self.device.link * fitted.link)
        flat = _alike(k * m, fitted.latency_between, in_ring)
        return Links(
            nodes=m,
            ranks_per_node=k,
            intra=inside if k > 1 else None,
            inter=between if m > 1 else None,
            flat=flat if k > 1 and m > 1 else None,
            measured_with="data sheets",
        )

    def slowed(self, nodes: int) -> float:
        """Return how many times longer the bytes of a collective over so many nodes
        take than at the share of the rate that other links reach.

        Measured links are taken as they are.
        """
        if not self.first_efa or self.measured is not None:
            return 1.0
        return float(nodes**self.fitted.falls)

    def with_links(self, path: str | os.PathLike[str]) -> Hardware:
        """Return the same with links that `smp topology --measure --store` wrote.

        Raises:
            ValueError: they are of another number of nodes or ranks.
        """
        links = Links.load(path, "--links")
        if (links.nodes, links.ranks_per_node) != (self.nodes, self.ranks_per_node):
            raise ValueError(
                f"--links={os.fspath(path)} was measured on {links.nodes} x {links.ranks_per_node} ranks, and the "
                f"cluster has {self.nodes} x {self.ranks_per_node}; leave it out, or plan for "
                f"{links.nodes}x{links.ranks_per_node}"
            )
        return replace(self, measured=links)


_MOST_DEVICES = 1_000_000
_LARGEST = 1e12
_OF_DEVICE = ("name", "memory_gib", "bf16_tflops", "hbm_gb_per_s", "link_gb_per_s")
_OF_CLUSTER = ("nodes", "devices_per_node", "gbit_per_s", "device")
_OF_BOTH = ("price_per_node_hour", "host_gib")


def _of_fields(path: Path, values: Any) -> Hardware:
    """Read `cluster: STRING` or all fields, with price and host memory in both."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{path} describes no cluster; write `cluster: 4x8:h100-80g@3200gbps`, or its fields"
        )
    allowed = (
        ("cluster", *_OF_BOTH) if "cluster" in values else (*_OF_CLUSTER, *_OF_BOTH)
    )
    # A misspelt field would be left out in silence.
    unknown = [name for name in values if name not in allowed]
    if unknown:
        raise ValueError(
            f"{path}: unknown field {unknown[0]!r}; allowed: {', '.join(allowed)}"
        )
    if "cluster" in values:
        hardware = Hardware.parse(str(values["cluster"]))
    else:
        for name in _OF_CLUSTER:
            if name not in values:
                raise ValueError(
                    f"{path}: the field {name!r} is missing; a cluster has {', '.join(_OF_CLUSTER)}"
                )
        device = _device(path, values["device"])
        nodes, ranks = (
            int(_number(path, values, name)) for name in ("nodes", "devices_per_node")
        )
        hardware = Hardware(nodes, ranks, device, _number(path, values, "gbit_per_s"))
    given = {name: _number(path, values, name) for name in _OF_BOTH if name in values}
    price = given.get("price_per_node_hour", hardware.price)
    host = given.get("host_gib", hardware.host_gib)
    return replace(hardware, price=price, host_gib=host)


def _device(path: Path, values: Any) -> Device:
    if isinstance(values, str):
        return device_of(values)
    if not isinstance(values, Mapping) or any(
        name not in values for name in _OF_DEVICE
    ):
        raise ValueError(
            f"{path}: device is a name, or a mapping of {', '.join(_OF_DEVICE)}"
        )
    memory, tflops, hbm, link = (_number(path, values, name) for name in _OF_DEVICE[1:])
    host = _number(path, values, "host_gb_per_s") if "host_gb_per_s" in values else 32.0
    fp8 = _number(path, values, "fp8_tflops") * 1e12 if "fp8_tflops" in values else None
    return Device(
        str(values["name"]),
        memory,
        hbm * 1e9,
        link * 1e9,
        host * 1e9,
        str(path),
        tflops * 1e12,
        fp8,
    )


def _number(path: Path, values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < _LARGEST
    ):
        raise ValueError(
            f"{path}: {name}={value!r} is not a number above 0 and below {_LARGEST:g}"
        )
    return float(value)


def _gbit(rate: str) -> float:
    if rate.lower() == "ethernet":
        return ETHERNET_GBIT
    found = _RATE.fullmatch(rate.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"rate {rate!r} between nodes is not understood; write Gbit/s of a node, as '400gbps'"
        )
    return float(found[1])


def _alike(ranks: int, latency: float, bandwidth: float) -> Collectives:
    fit = LinkFit(latency, bandwidth, by="data sheet")
    return Collectives(ranks, fit, fit, fit)
