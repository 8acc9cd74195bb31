"""Rules for expert parallelism (over how many ranks a layer's experts are dealt) and
for routers (what balances them), and what they do not go together with yet."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from smp_core.cluster import PARTITION
from smp_core.config import Clash
from smp_core.expert_parallel import deep_ep
from smp_core.plan import (
    SYMMETRIC_MEMORY,
    ModelDraft,
    Plan,
    Subject,
    asked_for,
    came_sharded,
)
from smp_core.topology import divisors, listed

KNOB, CAPACITY, AHEAD = (
    "expert_parallel_degree",
    "expert_capacity_factor",
    "collectives.backward_prefetch",
)
TRANSPORT = "collectives.expert_transport"


def _came_with_whole_experts(draft: ModelDraft) -> str | None:
    return (
        came_sharded(draft)
        if draft.given is not None and draft.given.experts == 1
        else None
    )


class ExpertParallelism(Subject):
    """Expert parallelism, as one of the subjects."""

    name = "expert parallelism"
    page = "mixture-of-experts.md"
    knobs = (KNOB,)
    optional = True
    apart = (
        Clash(
            "compilation",
            "`compile.fullgraph`: tokens are sent outside of graphs",
            asked_for("compile.fullgraph"),
            "write compile={'fullgraph': false}, or expert_parallel_degree=1",
        ),
        SYMMETRIC_MEMORY,
        Clash(
            "sharding",
            "models that came sharded with whole experts",
            _came_with_whole_experts,
            "load it with ep_size in its DistributedConfig, or without, and torch-smp deals its experts and shards it",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Resolve the degree, and see that tokens can travel as asked.

        Raises:
            ValueError: a degree that does not divide the partition group or the
                experts, with those that do; a model without experts, or with experts
                that ranks cannot divide; what it is not built together with; DeepEP
                where it cannot be used.
        """
        self._settle_degree(draft)
        degree, way = (
            draft.knobs.expert_parallel_degree,
            draft.knobs.collectives.expert_transport,
        )
        assert isinstance(degree, int)
        # Without expert ranks nothing is sent, by whichever way.
        if way == "deep_ep" and degree == 1:
            draft.drop(TRANSPORT, "all_to_all", f"{KNOB}=1")
        elif way == "deep_ep":
            problem = deep_ep.unfit(draft, degree) or deep_ep.missing()
            if problem:
                raise ValueError(f"{TRANSPORT}='deep_ep': {problem}; or leave it out")

    def _settle_degree(self, draft: ModelDraft) -> None:
        asked = draft.knobs.expert_parallel_degree
        # A degree divides the partition group and the experts of every layer.
        allowed = divisors(
            math.gcd(
                draft.layout.size(*PARTITION),
                *(site.experts for site in draft.shapes.experts),
            )
        )
        # By default tokens do not leave the node.
        inside = max(
            n for n in allowed if draft.groups.topology.ranks_per_node % n == 0
        )
        problem = _problem(draft)
        most = "the most that divide the experts, the partition group and the node"
        # "auto" falls back to 1, and says why.
        if asked == "auto":
            against = _apart(self, draft) or problem or _uneven(draft, inside)
            draft.settle(KNOB, 1 if against else inside, against or most)
            _gather_a_layer_ahead(draft)
            return
        # Asked for by value: what stands against it is an error.
        self.require_together(draft, f"{KNOB}={asked!r}")
        if problem:
            instead = (
                f"write {KNOB}=1" if draft.given is None else "load it without ep_size"
            )
            raise ValueError(
                f"{KNOB}={asked!r}: {problem}; {instead}, and they are sharded as other layers are"
            )
        if asked == "node":
            draft.settle(KNOB, inside, most)
        elif asked not in allowed:
            counts = sorted({site.experts for site in draft.shapes.experts})
            raise ValueError(
                f"{KNOB}={asked} has to divide shard_degree={draft.layout.size(*PARTITION)} and the "
                f"{' and '.join(map(str, counts))} experts of a layer; allowed: {listed(allowed)}"
            )
        degree = inside if asked == "node" else asked
        uneven = _uneven(draft, degree)
        if uneven:
            raise ValueError(
                f"{KNOB}={degree}: {uneven}; write another degree or shard_degree, or {KNOB}=1"
            )
        # It works, and each layer then waits for the links between nodes.
        if draft.groups.topology.ranks_per_node % degree:
            draft.warnings.append(
                f"{KNOB}={degree} is more than the {draft.groups.topology.ranks_per_node} ranks of a node, so that "
                "tokens travel between nodes in every layer"
            )
        _gather_a_layer_ahead(draft)

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return a line about the ranks that divide experts."""
        degree = plan.knobs.expert_parallel_degree
        if not isinstance(degree, int) or degree == 1:
            return []
        rest = plan.layout.size(*PARTITION) // degree
        sites = plan.shapes.experts
        way = (
            ", tokens by DeepEP"
            if plan.knobs.collectives.expert_transport == "deep_ep"
            else ""
        )
        return [
            f"experts of {len(sites)} layers dealt to {degree} ranks, those of a rank sharded over {rest}{way}"
        ]


EXPERT_PARALLELISM = ExpertParallelism()


class RouterBalance(Subject):
    """Router balance, as one of the subjects."""

    name = "router balance"
    page = "routers.md"
    knobs = ("router_balance", "router_bias_update_rate", CAPACITY)
    by_default: ClassVar = {"router_balance": ("global", "as in one process")}
    part = "routers"
    apart = (
        Clash(
            "tensor parallelism",
            f"`{CAPACITY}`",
            lambda draft: (
                asked_for(CAPACITY)(draft)
                and asked_for("tensor_parallel_degree", unless=1)(draft)
            ),
            f"write tensor_parallel_degree=1, or leave {CAPACITY} out",
        ),
        Clash(
            "compilation",
            f"`{CAPACITY}` with `compile.fullgraph`: tokens are counted outside of graphs",
            lambda draft: (
                asked_for(CAPACITY)(draft) and asked_for("compile.fullgraph")(draft)
            ),
            f"write compile={{'fullgraph': false}}, or leave {CAPACITY} out",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Resolve whose tokens an auxiliary loss is of.

        Raises:
            ValueError: a capacity of experts that there are not, or beside what it is
                not built together with.
        """
        factor = draft.knobs.expert_capacity_factor
        if factor is not None:
            asked = f"{CAPACITY}={factor:g}"
            self.require_together(draft, asked)
            # Marked sites without a known number of experts have no even share to take
            # a multiple of.
            unknown = [
                site.problem for site in draft.shapes.experts if not site.experts
            ]
            if unknown or not draft.shapes.experts:
                why = (
                    unknown[0]
                    if unknown
                    else f"{draft.shapes.kind} has no experts that torch-smp knows"
                )
                raise ValueError(f"{asked}: {why}; leave it out")
        if draft.knobs.router_balance == "auto":
            draft.settle("router_balance", *self.by_default["router_balance"])


ROUTER_BALANCE = RouterBalance()


def _gather_a_layer_ahead(draft: ModelDraft) -> None:
    """Let backward gather the layer before with its experts while a layer's experts
    compute, as it does where a layer is one unit. Chunks of interleaved schedules do
    not run in the order of their layers."""
    knobs = draft.knobs
    is_in_order = (
        knobs.pipeline_parallel_degree == 1
        or "interleaved" not in knobs.pipeline.schedule
    )
    is_left_to_us = (
        knobs.asked(AHEAD) == "auto" and knobs.collectives.backward_prefetch == 1
    )
    if knobs.expert_parallel_degree != 1 and is_in_order and is_left_to_us:
        draft.settle(
            AHEAD, 2, f"{KNOB}: a layer is two units, its experts and the rest"
        )


def _apart(subject: Subject, draft: ModelDraft) -> str:
    """Return the first of what was asked for that a subject does not go together with;
    "" if there is nothing."""
    found = (clash.found(draft) for clash in subject.apart)
    return next(filter(None, found), "")


def _uneven(draft: ModelDraft, degree: int) -> str:
    """Return the first parameter that cannot be cut into equal parts by the ranks that
    hold the same experts, in words; "" if there is none."""
    rest, shapes = draft.layout.size(*PARTITION) // degree, draft.shapes
    sites = {site.name for site in shapes.experts}
    # FSDP2 shards along one dimension, which has to divide equally.
    for parameter in shapes.parameters:
        if parameter.name.rpartition(".")[0] in sites:
            first, *others = parameter.shape
            if all(size % rest for size in (first // degree, *others)):
                return f"{rest} ranks of shard_degree hold the same experts and divide no dimension of {parameter.name}"
    return ""


def _problem(draft: ModelDraft) -> str:
    """Return why this model's experts cannot be dealt out; "" if they can."""
    # By the model's modules.
    shapes = draft.shapes
    if not shapes.experts:
        return (
            f"{shapes.kind} has no experts that torch-smp knows: neither Transformers' fused ones nor modules marked "
            "as smp_core.plan.ExpertSite"
        )
    for site in shapes.experts:
        if site.problem:
            return site.problem
    # By what is done to them beside.
    units = {unit.name for unit in shapes.units.units if unit.parameters}
    beside = asked_for("tensor_parallel_degree", unless=1)(draft) or asked_for("fp8")(
        draft
    )
    # Experts are sharded over other ranks than the layer around, so they have to be a
    # unit of their own.
    for site in shapes.experts:
        if site.name.rpartition(".")[2] == "base_layer" and beside:
            return f"adapters of {site.kind} (PEFT's target_parameters) are not built together with {beside}"
        if site.name not in units:
            return f"{site.name} is no unit: it is in units.optional, or shares parameters with another module"
        shared = [
            name for name in shapes.units.replicated if name.startswith(f"{site.name}.")
        ]
        if shared:
            return f"{shared[0]} is shared with another module"
    return ""
