"""The knobs that would send fewer bytes between nodes, and the share of them that each would leave."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from smp_core.cluster import PARTITION
from smp_core.codecs import CodeName
from smp_core.plan.plan import Plan
from smp_core.plan.routes import compression


@dataclass(frozen=True)
class Saving:
    """A knob that compresses what crosses nodes.

    Attributes:
        knob: as it is typed.
        kinds: the collectives whose bytes between nodes become fewer, by the names of the meter.
        share: what is left of those bytes, by the codec's own size for the median unit.
    """

    knob: str
    kinds: tuple[str, ...]
    share: float


def savings(plan: Plan) -> list[Saving]:
    """List the knobs that would send fewer bytes between nodes than the plan does; none on one node."""
    topology, knobs = plan.cluster.topology, plan.knobs
    if topology.num_nodes == 1 or not plan.shapes.unit_elements:
        return []
    elements = int(statistics.median(plan.shapes.unit_elements))
    first = plan.shapes.parameters[0]
    spans = plan.layout.size(*PARTITION) * plan.layout.tensor > topology.ranks_per_node
    found = []

    def add(field: str, code: CodeName, kinds: tuple[str, ...], reduced: bool) -> None:
        dtype = plan.dtypes.of_reduced(first) if reduced else plan.dtypes.of_gathered(first)
        share = compression(code, dtype, elements)
        if share < 1:
            word = "bf16" if code == "bfloat16" else code
            found.append(Saving(f'compression={{"{field}": "{word}"}}', kinds, share))

    if knobs.compression.gather is None and spans:
        add("gather", "int8", ("all_gather",), reduced=False)
    if knobs.compression.reduce is None:
        add("reduce", "bfloat16", ("all_reduce",), reduced=True)
        add("reduce", "int8", ("reduce_scatter", "all_reduce") if spans else ("all_reduce",), reduced=True)
    return found
