"""Rules for activations: what is recomputed, what waits in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from smp_core.planning.checkpointed import CheckpointedModule
from smp_core.planning.cluster import GIB, Cluster
from smp_core.planning.draft import Draft
from smp_core.planning.shapes import Shapes


@dataclass(frozen=True)
class ActivationPlan:
    """What is done about activation memory.

    Attributes:
        checkpointed: modules that are computed again in backward.
        check: the outputs of recomputations are compared.
        offloaded_bytes: host memory of this rank that inputs of these modules may take; None: none are offloaded.
        horizon: how many modules' inputs may be on the device at once.
        min_bytes: smaller inputs stay on the device.
    """

    checkpointed: tuple[CheckpointedModule, ...] = ()
    check: bool = False
    offloaded_bytes: int | None = None
    horizon: int = 2
    min_bytes: int = 0


def settle_activations(draft: Draft, shapes: Shapes, cluster: Cluster) -> ActivationPlan:
    """Settle recomputation, its check, and offloading.

    Raises:
        ValueError: the model checkpoints itself and its inputs were to be offloaded.
    """
    knobs = draft.knobs
    if shapes.checkpoints_itself:
        # Computing everything twice more saves nothing.
        why = "the model's own gradient checkpointing is on"
        if knobs.activation_offloading:
            raise ValueError(
                f"activation_offloading=true: {why}, and its inputs cannot be offloaded; switch it off "
                "(model.gradient_checkpointing_disable(), TrainingArguments(gradient_checkpointing=False)) so that "
                f"activation_checkpointing={knobs.activation_checkpointing!r} takes its place"
            )
        draft.drop("activation_checkpointing", "none", why)
    if knobs.activation_checkpointing_check and not shapes.checkpointed:
        draft.drop("activation_checkpointing_check", False, "nothing is recomputed")
    return ActivationPlan(
        shapes.checkpointed,
        draft.knobs.activation_checkpointing_check,
        _settle_offloading(draft, len(shapes.checkpointed), cluster),
        knobs.activation_loading_horizon,
        knobs.activation_offloading_min_bytes,
    )


def _settle_offloading(draft: Draft, checkpointed: int, cluster: Cluster) -> int | None:
    knobs, horizon = draft.knobs, draft.knobs.activation_loading_horizon
    if not knobs.activation_offloading:
        if horizon != 2:
            draft.settle("activation_loading_horizon", horizon, "no effect: nothing is offloaded")
        return None
    if horizon >= checkpointed:
        why = f"activation_loading_horizon={horizon}, so the inputs of all {checkpointed} checkpointed modules may stay"
        draft.drop("activation_offloading", False, f"{why} on the device")
        return None
    if knobs.activation_offloading_host_gib is not None:
        return int(knobs.activation_offloading_host_gib * GIB)
    limit = int(0.8 * cluster.host_memory / cluster.topology.ranks_per_node)
    why = "four fifths of what was available, divided by the node's ranks"
    draft.settle("activation_offloading_host_gib", round(limit / GIB, 3), why)
    return limit
