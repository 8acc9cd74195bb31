"""Rules for sharding: what is gathered, how often gradients are reduced, where optimizer states live. Dtypes have rules
of their own (dtype_rules), and so have models that came sharded (given_rules)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smp_core.cluster import INNER, PARTITION, Axis
from smp_core.plan import Finding, ModelDraft, Plan, Subject, keeps_parameters
from smp_core.sharding.dtype_rules import settle_masters, settle_reduce_dtype, settle_stored_dtype
from smp_core.sharding.given_rules import apart_from_given


class Sharding(Subject):
    """Sharding, as one of the subjects."""

    name = "sharding"
    page = "sharding.md"
    knobs = (
        "shard_degree",
        "reshard_after_forward",
        "keep_between_micro_batches",
        "units",
        "forward_methods",
        "delayed_init",
        "param_dtype",
        "reduce_dtype",
        "master_dtype",
        "on_nonfinite_grad_norm",
        "optimizer_shard",
        "state_offload",
    )
    apart = tuple(apart_from_given())

    def settle(self, draft: ModelDraft) -> None:
        """Resolve what is stored, gathered and reduced, and in which dtypes.

        Raises:
            ValueError: dtypes that lose gradients, or that a pre-sharded model cannot have.
        """
        draft.masters = settle_masters(draft)
        draft.gathers = _settle_gathering(draft)
        settle_reduce_dtype(draft)
        _settle_optimizer_shard(draft)
        _settle_by_model(draft)
        draft.stored_as_gathered = settle_stored_dtype(draft)

    def machine(self) -> Iterator[Finding]:
        """Look whether the device computes in bfloat16."""
        if torch.cuda.is_available():
            capable = torch.cuda.get_device_capability() >= (8, 0)
            instead = "" if capable else "write param_dtype='float16'"
            yield Finding("bfloat16", "ok" if capable else "note", "yes" if capable else "needs 8.0", instead)

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return lines about the nodes, the layout, the units, and what is replicated."""
        layout, degree = plan.layout, plan.shard_degree
        replicas = "1 replica" if layout.replicate == 1 else f"{layout.replicate} replicas"
        in_stages = "in each stage " if layout.pipeline > 1 else ""
        hierarchical = ", collectives in two stages" if plan.hierarchical else ""
        lines = [
            plan.cluster.topology.describe(),
            f"{in_stages}{layout.replicate} x {degree}: {replicas} of the model states, "
            f"each over {degree * layout.size(*INNER)} ranks{hierarchical}",
            f"{plan.shapes.elements:,} parameters, units: {len(plan.units)} ({plan.shapes.units.why})",
        ]
        if plan.replicated:
            lines.append(f"whole on every rank: {', '.join(plan.replicated)}")
        return lines


SHARDING = Sharding()


def _settle_gathering(draft: ModelDraft) -> bool:
    """Resolve what is gathered and how often gradients are reduced.

    Returns:
        whether units are sharded by FSDP2. A partition group of one has nothing to gather, and FSDP2 would copy every
        parameter for each use; it is still needed where it casts or decodes parameters, where it brings them from the
        host, and where it shows split parameters to their layers.
    """
    layout, knobs = draft.layout, draft.knobs
    is_cut = layout.size(*INNER, Axis.PIPELINE) > 1
    if draft.given is not None or is_cut or layout.size(*PARTITION) > 1:
        return True
    casts = knobs.param_dtype is not None and draft.precision.cast_forward_inputs
    kept = "parameters" if keeps_parameters(knobs) else "shards"
    if knobs.keep_between_micro_batches == "gradients":
        why = "shard_degree=1: nothing is reduced inside a partition group"
        draft.settle("keep_between_micro_batches", kept, why)
    if casts or draft.masters or knobs.state_offload == "all" or knobs.frozen_storage is not None:
        return True
    why = "shard_degree=1: parameters are whole, nothing is gathered"
    draft.settle("param_dtype", None, why)
    draft.settle("reshard_after_forward", False, why)
    if draft.knobs.keep_between_micro_batches != "shards":
        draft.settle("keep_between_micro_batches", "shards", why)
    return False


def _settle_optimizer_shard(draft: ModelDraft) -> None:
    """Resolve ``optimizer_shard="world"`` where there is one replica."""
    if draft.knobs.optimizer_shard == "world" and draft.layout.replicate == 1:
        why = "there is one replica: optimizer states are sharded over all ranks already"
        draft.settle("optimizer_shard", "shard", why)


def _settle_by_model(draft: ModelDraft) -> None:
    """Settle what the model alone decides: which modules ranks may leave out, and whether anything is to be
    initialised."""
    shapes = draft.shapes
    if draft.knobs.units.optional == "auto":
        names = shapes.units.optional
        inside = tuple(f"{name}." for name in names)
        elements = sum(each.elements for each in shapes.parameters if each.name.startswith(inside))
        why = f"no token goes through them: {elements:,} parameters, gathered with the unit around them"
        draft.settle("units.optional", names, why)
    if draft.knobs.delayed_init and not shapes.on_meta:
        why = "nothing was on the meta device; in Lightning, build the model in configure_model()"
        draft.drop("delayed_init", None, why)
