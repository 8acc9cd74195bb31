"""Step time by the alpha-beta model: FSDP2/ZeRO-3, HSDP, MiCS and ours, on 8 to 1,024
devices.

    python benchmarks/scaling_model.py [--links links.json] [--check
    benchmarks/results/cluster.json]

A message of n bytes over a link takes latency + n / bandwidth; a node's ranks share its
link. A scheme is a list of collectives per optimizer step:

    ring over p ranks        p - 1 rounds of 1 / p of the tensor; one sender per node
    two stages               the M nodes' ranks of equal place exchange directly, then the K ranks of a node
    all-reduce               twice a reduce-scatter

Communication that can hide behind compute is taken to do so up to the compute time
(``--overlap``, 0 to 1). Without --links the cluster is 8 devices per node, 450 GB/s
inside and 50 GB/s (400 Gbit/s) per node between, 5 and 20 us. --check predicts the
lab's rows from its link rate, what was measured inside its nodes (bandwidth, copies,
codes) and what its steps take without communication, and compares with what was
measured there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMES = (
    "fsdp2",
    "hsdp",
    "mics",
    "ours-world",
    "ours-world-int8",
    "ours-node",
    "ours-node-bf16",
)
CODE = 1 + 4 / 256  # bytes of an element in int8, with its block's scale


@dataclass(frozen=True)
class Cluster:
    """Latencies in seconds; ``inside``: bytes/s of one rank's messages in a node;
    ``between``: of a node's link; ``copying``, ``coding``: bytes/s of tensors that a
    rank copies, or gathers in int8; None: not counted."""

    ranks_per_node: int
    latency_inside: float
    inside: float
    latency_between: float
    between: float
    copying: float | None = None
    coding: float | None = None


@dataclass(frozen=True)
class Work:
    """One optimizer step: bytes of the parameters as gathered, of the root (gathered
    once), of float32 gradients, units, micro-batches, and seconds of compute per
    micro-batch."""

    gathered: float
    root: float
    gradients: float
    units: int
    micro_batches: int
    compute: float


def ring(cluster: Cluster, p: int, n_bytes: float, groups_per_node: int = 1) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``n_bytes`` over p
    consecutive ranks; groups side by side share a node's link."""
    if p == 1:
        return 0.0
    k = cluster.ranks_per_node
    if p <= k:
        return (p - 1) * (cluster.latency_inside + n_bytes / p / cluster.inside)
    return (p - 1) * (
        cluster.latency_between + groups_per_node * n_bytes / p / cluster.between
    )


def staged(cluster: Cluster, p: int, n_bytes: float, code: float = 1.0) -> float:
    """Return the seconds of the same in two stages; ``code``: bytes between nodes by
    bytes."""
    k = cluster.ranks_per_node
    if p <= k:
        return ring(cluster, p, n_bytes)
    m, shard = p // k, n_bytes / p
    between = cluster.latency_between + k * (m - 1) * shard * code / cluster.between
    return between + cluster.latency_inside + (k - 1) * m * shard / cluster.inside


def across(
    cluster: Cluster, world: int, p: int, n_bytes: float, code: float = 1.0
) -> float:
    """Return the seconds of an all-reduce over replicas of the shards of ``n_bytes``:
    every rank of a node has a ring of its own."""
    replicas, k = world // p, cluster.ranks_per_node
    if replicas == 1:
        return 0.0
    nodes = max(world // k, 1)
    latency = 2 * cluster.latency_between
    return (
        latency
        + 2 * (nodes - 1) / nodes * n_bytes * min(k, p) / p * code / cluster.between
    )


def step_seconds(
    scheme: str,
    cluster: Cluster,
    world: int,
    degree: int,
    work: Work,
    overlap: float = 0.0,
    reduce_scatter_times: float = 1.0,
) -> float:
    """Return the seconds of one optimizer step. ``degree``: the partition group's ranks
    for MiCS and ours-node; FSDP2 and ours-world shard over the world.
    ``reduce_scatter_times``: what the backend's own reduce-scatter sends, by that of a
    ring (gloo's is an all-reduce: 2); ours does not use it.

    Besides what is sent, a gathered tensor is copied once, into parameters, and a
    reduced one twice: into a buffer, and by its additions (so often as the backend's
    reduce-scatter sends it).
    """
    blocks, units, once = (
        work.gathered - work.root,
        work.units,
        scheme.endswith("-once"),
    )
    # How often all of it is gathered and reduced inside the partition group.
    s = 1 if once else work.micro_batches
    times = reduce_scatter_times if scheme in ("hsdp", "mics") else 1.0
    gathers = [work.root] + [blocks / (units - 1)] * ((1 if once else 2) * (units - 1))
    sums = [work.gradients / units] * units

    def all_units(move: Any, sizes: list[float]) -> float:
        return sum(move(size) for size in sizes)

    if scheme == "fsdp2":
        each = all_units(lambda n: ring(cluster, world, n), gathers + sums)
        exposed, hop = s * each, 0.0
    elif scheme.startswith("ours-world"):
        code = CODE * work.gradients / 4 / work.gathered if "int8" in scheme else 1.0
        each = all_units(
            lambda n: staged(cluster, world, n, code), gathers
        ) + all_units(lambda n: staged(cluster, world, n), sums)
        exposed, hop = s * each, 0.0
    else:
        move = (
            (lambda n: staged(cluster, degree, n))
            if scheme.startswith("ours")
            else (lambda n: ring(cluster, degree, n))
        )
        exposed = s * (all_units(move, gathers) + times * all_units(move, sums))
        code = 0.5 if "bf16" in scheme else 1.0
        hop = all_units(lambda n: across(cluster, world, degree, n, code), sums) * (
            s if scheme == "hsdp" else 1
        )
    if cluster.copying is not None:
        exposed += s * (sum(gathers) + 2 * times * sum(sums)) / cluster.copying
    if cluster.coding is not None and "int8" in scheme:
        exposed += s * sum(gathers) / cluster.coding
    compute = work.micro_batches * work.compute
    hidden = min(overlap * compute, exposed + hop)
    return compute + exposed + hop - hidden


def lab_prediction(row: dict[str, Any]) -> dict[str, float]:
    """Predict the seconds of a lab row's schemes that the model has."""
    nodes, k = map(int, row["layout"].split("x"))
    rate = {"200mbit": 25e6, "1gbit": 125e6}[row["rate"]]
    m, root = 92_438_528.0, 92_438_528.0 - 6 * 4 * 3_152_384.0
    alone = row["schemes"]["alone"]
    compute = statistics.median(alone["seconds"]) / row["micro"]
    cluster = Cluster(
        k, 50e-6, alone["inside"], 1.2e-3, rate, alone["copying"], alone["coding"]
    )
    half = 0.5 if row["dtype"] == "bfloat16" else 1.0
    work = Work(m * half, root * half, m, 7, row["micro"], compute)
    named = {
        "fsdp-ring": "fsdp2",
        "hsdp": "hsdp",
        "hsdp-two-hop": "mics",
        "ours-world": "ours-world",
        "ours-world-int8": "ours-world-int8",
        "ours-world-once": "ours-world-once",
        "ours-node": "ours-node",
        "ours-node-once": "ours-node-once",
        "ours-node-bf16": "ours-node-bf16",
    }
    found = {}
    for name, model in named.items():
        if name in row["schemes"]:
            times = 2.0 if model in ("hsdp", "mics") else 1.0
            found[name] = step_seconds(
                model, cluster, nodes * k, k, work, reduce_scatter_times=times
            )
    return found


def check(path: Path) -> list[tuple[str, str, float, float]]:
    """List (row, scheme, measured, predicted) of a lab's results."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        predicted = lab_prediction(row)
        where = f"{row['layout']}, {row['rate']}, {row['micro']}, {row['dtype']}"
        for name, seconds in predicted.items():
            found.append(
                (
                    where,
                    name,
                    statistics.median(row["schemes"][name]["seconds"]),
                    seconds,
                )
            )
    return found


def draw(worlds: list[int], seconds: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, values in seconds.items():
        axis.plot(worlds, values, marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("devices")
    axis.set_ylabel("seconds per optimizer step (model)")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links", type=Path, help="what `smp topology --measure --store` wrote"
    )
    parser.add_argument("--parameters", type=float, default=30e9)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--compute", type=float, default=1.0, help="seconds of compute per micro-batch"
    )
    parser.add_argument(
        "--degree",
        type=int,
        default=16,
        help="ranks of a partition group of MiCS and ours-node",
    )
    parser.add_argument("--overlap", type=float, default=0.8)
    parser.add_argument(
        "--check", type=Path, help="a result of benchmarks/cluster/bench.py"
    )
    parser.add_argument(
        "--out", type=Path, help="write the table as JSON here, and a picture beside it"
    )
    asked = parser.parse_args()
    if asked.check:
        for where, name, measured, predicted in check(asked.check):
            off = predicted / measured - 1
            print(
                f"{where:32} {name:18} measured {measured:6.2f} predicted {predicted:6.2f} {off:+.0%}"
            )
        return
    cluster = Cluster(8, 5e-6, 450e9, 20e-6, 50e9)
    if asked.links:
        found = json.loads(asked.links.read_text())
        intra, inter, k = (
            found["intra"]["all_gather"],
            found["inter"]["all_gather"],
            found["ranks_per_node"],
        )
        cluster = Cluster(
            k,
            intra["latency"],
            intra["bandwidth"],
            inter["latency"],
            inter["bandwidth"] * k,
        )
    half, n = 2 * asked.parameters, asked.parameters
    work = Work(
        half,
        half / asked.layers,
        4 * n,
        asked.layers + 1,
        asked.micro_batches,
        asked.compute,
    )
    worlds = [
        world
        for world in (8, 16, 32, 64, 128, 256, 512, 1024)
        if world >= cluster.ranks_per_node
    ]
    seconds: dict[str, list[float]] = {}
    for name in SCHEMES:
        for world in worlds:
            found = step_seconds(
                name, cluster, world, min(asked.degree, world), work, asked.overlap
            )
            seconds.setdefault(name, []).append(found)
    print("devices   " + "".join(f"{name:>18}" for name in SCHEMES))
    for place, world in enumerate(worlds):
        print(
            f"{world:<10}"
            + "".join(f"{seconds[name][place]:18.2f}" for name in SCHEMES)
        )
    if asked.out:
        assumed = {
            "cluster": asdict(cluster),
            "work": asdict(work),
            "degree": asked.degree,
            "overlap": asked.overlap,
        }
        asked.out.write_text(
            json.dumps(
                {"model": assumed, "devices": worlds, "seconds": seconds}, indent=1
            )
            + "\n"
        )
        draw(worlds, seconds, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
