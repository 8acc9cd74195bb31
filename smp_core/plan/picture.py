"""A picture of ranks, nodes and groups: for terminals and as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

from smp_core.cluster import PARTITION, Axis, Collectives, Layout, Links
from smp_core.topology import Topology

_COLOURS = (
    "#2a6f97",
    "#e07a5f",
    "#81b29a",
    "#f2cc8f",
    "#6d597a",
    "#3d405b",
    "#b56576",
    "#8ab17d",
)
_SHOWN = 16


def text_picture(topology: Topology, shard_degree: int) -> str:
    """Return one line per node, its ranks marked with their partition group; then the
    groups."""
    layout = Layout.of_world(topology.world_size, shard_degree)
    partitions = layout.groups(*PARTITION)
    replications = layout.groups(Axis.REPLICATE)
    width = len(str(topology.world_size - 1))
    lines = [
        f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks, shard_degree={shard_degree}: "
        f"{len(partitions)} partition groups, {len(replications)} replication groups"
    ]
    # A line for each node, up to a screenful.
    for number, (name, ranks) in enumerate(
        zip(topology.node_names, topology.nodes, strict=True)
    ):
        if number == _SHOWN:
            lines.append(f"  ... {topology.num_nodes - _SHOWN} more nodes")
            break
        cells = " ".join(
            f"{rank:>{width}}{_letter(layout.coordinate(rank, Axis.REPLICATE))}"
            for rank in ranks
        )
        lines.append(f"  {name}  [ {cells} ]")
    lines.append(
        "letters: partition groups, which hold one copy of the model states together"
    )
    example = list(replications[0])
    shown = ", ".join(map(str, example[:8])) + (", ..." if len(example) > 8 else "")
    lines.append(f"replication groups take one rank of each: {shown}")
    return "\n".join(lines)


def svg_picture(topology: Topology, layout: Layout, links: Links | None = None) -> str:
    """Return nodes as boxes, ranks as discs in their partition group's colour,
    replication groups as lines. Of many nodes the first are shown."""
    nodes = topology.nodes[:_SHOWN]
    k = topology.ranks_per_node
    step = 54
    margin = 20
    width = max(margin * 2 + k * step + 120, 600)
    height = margin * 2 + len(nodes) * 84 + 40
    # Ranks stand side by side in their node's box, nodes one below the other.
    place = {
        rank: (margin + 110 + local * step + step // 2, margin + node * 84 + 36)
        for node, ranks in enumerate(nodes)
        for local, rank in enumerate(ranks)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
    ]
    # Nodes.
    for node, name in enumerate(topology.node_names[:_SHOWN]):
        y = margin + node * 84
        parts.append(
            f'<rect x="{margin + 104}" y="{y}" width="{k * step + 12}" height="72" rx="8" fill="none" '
            'stroke="#999999"/>'
        )
        parts.append(f'<text x="{margin}" y="{y + 40}">{escape(name)}</text>')
    # Replicas of a shard, joined by lines.
    for ranks in layout.groups(Axis.REPLICATE):
        points = " ".join(
            f"{place[rank][0]},{place[rank][1]}" for rank in ranks if rank in place
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="#999999" stroke-dasharray="3 3"/>'
        )
    # Ranks, in the colours of their partition groups.
    for rank, (x, y) in place.items():
        colour = _COLOURS[
            layout.coordinate(rank, Axis.PIPELINE, Axis.REPLICATE) % len(_COLOURS)
        ]
        parts.append(f'<circle cx="{x}" cy="{y}" r="16" fill="{colour}"/>')
        parts.append(
            f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="#ffffff">{rank}</text>'
        )
    # The legend.
    degree = layout.size(*PARTITION)
    legend = f"shard_degree={degree}: one colour per partition group, dashed lines join replicas of a shard"
    if len(nodes) < topology.num_nodes:
        legend += f"; {topology.num_nodes - len(nodes)} more nodes"
    parts.append(f'<text x="{margin}" y="{height - 32}">{legend}</text>')
    if links is not None:
        said = f"{_link_line('inside a node', links.intra)}; {_link_line('between nodes', links.inter)}"
        parts.append(f'<text x="{margin}" y="{height - 14}">{escape(said)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _letter(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (
        letters[number % 26]
        if number < 26
        else letters[number // 26 % 26 - 1] + letters[number % 26]
    )


def _link_line(where: str, found: Collectives | None) -> str:
    if found is None:
        return f"{where}: no link"
    fit = found.all_gather
    return (
        f"{where}: {fit.latency * 1e6:,.0f} us, {fit.bandwidth / 1e9:.3g} GB/s per rank"
    )
