"""`shard_degree="auto"`: the smallest partition group whose model states fit, found by
deciding for every degree.

Under Accelerate the optimizer stands beside the model in ``prepare`` and is planned
with. Lightning makes optimizers in ``configure_optimizers``, from sharded parameters.
To ask for them twice would run the user's code twice, with what it does beside
(schedulers, counters, parameter groups by name), so the plan is made with an assumption
that the knob `planner.optimizer` replaces, and a warning follows where the real one
would have led to another degree (:func:`missed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.optim import Optimizer

from smp_core.cluster import Layout, inner_degree
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide, settle_layout
from smp_core.plan import (
    GIB,
    OPTIMIZERS,
    TRAINERS_OWN,
    Cluster,
    Draft,
    Plan,
    Precision,
    Shapes,
    device_memory,
    estimate,
    fitting,
    planned_states,
)
from smp_core.tensor_parallel import require_tensor_degree
from smp_core.topology import Topology


def smallest_layout(asked: SmpConfig, topology: Topology) -> Layout:
    """Return the layout with the smallest allowed partition groups.

    Raises:
        ValueError: none is allowed with these degrees.
    """
    (smallest, *_) = _degrees(asked, topology)
    return settle_layout(
        Draft(asked.with_resolved("shard_degree", smallest, "the smallest")), topology
    )


def _degrees(asked: SmpConfig, topology: Topology) -> list[int]:
    """Return the allowed shard degrees, in order."""
    stage = topology.of_stage(asked.pipeline_parallel_degree)
    require_tensor_degree(asked, stage)
    # Tensor ranks count as one; context ranks are inside of a partition group.
    groups = stage.of_groups(inner_degree(asked))
    context = asked.context_parallel_degree
    degrees = [
        degree for degree in groups.allowed_shard_degrees() if degree % context == 0
    ]
    if not degrees:
        raise ValueError(
            f"context_parallel_degree={context} fits no partition group of {groups.num_nodes} x "
            f"{groups.ranks_per_node} ranks; it must divide one of: "
            f"{', '.join(map(str, groups.allowed_shard_degrees()))}"
        )
    return degrees


def plans_of_all_degrees(
    shapes: Shapes,
    asked: SmpConfig,
    cluster: Cluster,
    precision: Precision = TRAINERS_OWN,
) -> list[Plan]:
    """Return a plan for every allowed shard degree: parts of a node, then one or more
    nodes, of full context groups.

    Raises:
        ValueError: none is allowed with these knobs.
    """
    plans, refused = [], []
    for degree in _degrees(asked, cluster.topology):
        try:
            plans.append(
                decide(
                    shapes,
                    asked.with_resolved("shard_degree", degree, "tried"),
                    cluster,
                    precision=precision,
                )
            )
        except ValueError as error:
            # A rule refuses this degree (reshard_after_forward=4 of two ranks, say).
            refused.append(error)
    if not plans:
        raise refused[-1]
    return plans


def decide_with_smallest_degree(
    shapes: Shapes,
    asked: SmpConfig,
    cluster: Cluster,
    *,
    precision: Precision = TRAINERS_OWN,
    optimizers: Sequence[Optimizer] = (),
) -> Plan:
    """Decide with the smallest shard degree at which model states fit.

    Args:
        optimizers: of this model, where they are known already.

    Raises:
        ValueError: the model fits no number of ranks that there are; and what `decide`
            refuses.
    """
    # What the optimizer keeps: given, known, or assumed.
    states = planned_states(asked.planner.optimizer, optimizers)
    chosen, why = fitting(
        plans_of_all_degrees(shapes, asked, cluster, precision), states
    )
    settled = asked.with_resolved("shard_degree", chosen.shard_degree, why)
    # A device of unknown memory has planned nothing for an optimizer.
    if device_memory(chosen) is None:
        return decide(shapes, settled, cluster, precision=precision)
    if asked.planner.optimizer == "auto":
        settled = settled.with_resolved(
            "planner.optimizer", states.name, states.describe()
        )
    return replace(
        decide(shapes, settled, cluster, precision=precision), optimizer=states
    )


def missed(plan: Plan, optimizers: Sequence[Optimizer]) -> str | None:
    """Return a sentence for people if these optimizers, made after the plan, would have
    led to another degree."""
    # Only an assumption can have been wrong.
    planned = plan.optimizer
    if planned is None or planned.origin != "assumed" or not optimizers:
        return None
    found = planned_states("auto", optimizers)
    before = plan.shard_degree
    said = f'shard_degree="auto" was planned for {planned.name} and gave {before}; {found.describe()}: '
    # Asked again as the user did, with the optimizer that was made since.
    asked = SmpConfig.from_dict(plan.knobs.to_dict())
    try:
        chosen, _ = fitting(
            plans_of_all_degrees(plan.shapes, asked, plan.cluster, plan.precision),
            found,
        )
    except ValueError as error:
        return said + str(error)
    if chosen.shard_degree == before:
        return None
    return (
        f"{said}{chosen.shard_degree} would be chosen ({estimate(chosen, found).total / GIB:.2g} GiB on each device). "
        f"Write shard_degree={chosen.shard_degree}, or planner={{'optimizer': ...}} with one of {', '.join(OPTIMIZERS)}"
    )
