"""Rules for activations: what is recomputed, what waits in host memory."""

from __future__ import annotations

from smp_core.plan import GIB, ActivationPlan, Cluster, ModelDraft, Subject


class Activations(Subject):
    """Activation memory, as one of the subjects."""

    name = "activations"
    page = "memory.md"
    knobs = ("activations", "chunked_cross_entropy")
    optional = True
    part = "activations"

    def settle(self, draft: ModelDraft) -> None:
        """Resolve recomputation, its check, and offloading.

        Raises:
            ValueError: the model checkpoints itself and its inputs were to be
                offloaded.
        """
        draft.activations = _settle_activations(draft)


ACTIVATIONS = Activations()


def _settle_activations(draft: ModelDraft) -> ActivationPlan:
    asked, shapes = draft.knobs.activations, draft.shapes
    # Recomputing what the model recomputes itself would save nothing.
    if shapes.checkpoints_itself:
        # Computing everything twice more saves nothing.
        why = "the model's own gradient checkpointing is on"
        if asked.offload:
            raise ValueError(
                f"activations.offload=true: {why}, and its inputs cannot be offloaded; switch it off "
                "(model.gradient_checkpointing_disable(), TrainingArguments(gradient_checkpointing=False)) so that "
                f"activations.checkpoint={asked.checkpoint!r} takes its place"
            )
        draft.drop("activations.checkpoint", "none", why)
    if asked.check and not shapes.checkpointed:
        draft.drop("activations.check", False, "nothing is recomputed")
    return ActivationPlan(
        shapes.checkpointed,
        draft.knobs.activations.check,
        _settle_offloading(draft, len(shapes.checkpointed), draft.stage),
        asked.loading_horizon,
        asked.offload_min_bytes,
    )


def _settle_offloading(
    draft: ModelDraft, checkpointed: int, cluster: Cluster
) -> int | None:
    asked = draft.knobs.activations
    horizon = draft.knobs.activations.loading_horizon
    # A horizon that was asked for is reported as without effect.
    if not asked.offload:
        if horizon != 2:
            draft.settle(
                "activations.loading_horizon",
                horizon,
                "no effect: nothing is offloaded",
            )
        return None
    # Nothing would ever leave the device.
    if horizon >= checkpointed:
        why = f"loading_horizon={horizon}, so the inputs of all {checkpointed} checkpointed modules may stay"
        draft.drop("activations.offload", False, f"{why} on the device")
        return None
    if asked.offload_host_gib is not None:
        return int(asked.offload_host_gib * GIB)
    # Ranks of a node share its memory; a fifth is left to everything else.
    limit = int(0.8 * cluster.host_memory / cluster.topology.ranks_per_node)
    why = "four fifths of what was available, divided by the node's ranks"
    draft.settle("activations.offload_host_gib", round(limit / GIB, 3), why)
    return limit
