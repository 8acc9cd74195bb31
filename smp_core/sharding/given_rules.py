"""Rules for a pre-sharded model: knobs of its sharding are fixed, those that come too
late are refused."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from smp_core.config import DEFAULTS, Clash
from smp_core.plan import GivenSharding, ModelDraft, Shapes, came_sharded, name_of

_WHY = "as the model came"
_PINNED: dict[str, Any] = {
    "units.modules": "auto",
    "units.min_parameters": 0,
    "units.optional": (),
    "reshard_after_forward": True,
    "delayed_init": None,
}
# What has to be there before a model is sharded, and whose it is.
_TOO_LATE = {
    "fp8": "fp8",
    "activations.checkpoint": "activations",
    "collectives.symmetric_memory": "communication",
}
# On a (replicate, shard) mesh torch gathers and reduces.
_TORCHS: dict[str, Any] = {
    "keep_between_micro_batches": "shards",
    "collectives.hierarchical": False,
    "collectives.meter": False,
    "compression.gather": None,
    "compression.error_feedback": False,
    "compression.reduce": None,
    "optimizer_shard": "shard",
    "collectives.forward_prefetch": 0,
    "collectives.backward_prefetch": 1,
    "collectives.reduce_scatter_buffers": 1,
    "collectives.separate_reduce_scatter_group": False,
    "forward_methods": (),
}


def _too_late(knob: str, other: str) -> Clash[ModelDraft]:
    def found(draft: ModelDraft) -> str | None:
        # Only a knob that differs from its default was asked for.
        asked = attrgetter(knob)(draft.knobs)
        if draft.given is None or asked == attrgetter(knob)(DEFAULTS):
            return None
        return f"{knob}={asked!r} has to be applied before a model is sharded, and this one came sharded"

    instead = f"leave {knob} out, or load the model without distributed_config and let torch-smp shard it"
    return Clash(other, f"`{knob}` of models that came sharded", found, instead)


def _shares_sequences(draft: ModelDraft) -> str | None:
    degree = draft.knobs.context_parallel_degree
    return (
        None
        if degree == 1 or draft.given is None
        else f"context_parallel_degree={degree} and {came_sharded(draft)}"
    )


def apart_from_given() -> Iterator[Clash[ModelDraft]]:
    """Yield what models that came sharded do not go together with."""
    yield from (_too_late(knob, other) for knob, other in _TOO_LATE.items())
    yield Clash(
        "context parallelism",
        "models that came sharded",
        _shares_sequences,
        "load it whole, SmpAccelerator shards it",
    )


def settle_given(draft: ModelDraft) -> None:
    """Pin the knobs that a pre-sharded model has decided.

    Raises:
        ValueError: a knob that comes too late, shared sequences, or trainable plain
            parameters alongside a 2-D mesh.
    """
    knobs = draft.knobs
    given = draft.given
    assert given is not None
    # Phase 1: what comes too late, or does not go together with it.
    for clash in apart_from_given():
        what = clash.found(draft)
        if what is not None:
            raise ValueError(f"{what}; {clash.instead}")
    if knobs.state_offload == "all":
        raise ValueError(
            "state_offload='all' has to be applied when a model is sharded, and this one came sharded; allowed: none, "
            "'optimizer'; or load the model without distributed_config and let torch-smp shard it"
        )
    # Phase 2: what was decided when it was sharded. Another wish has no effect, and is
    # reported as dropped.
    draft.settle("shard_degree", given.degree, _WHY)
    if given.experts > 1:
        _settle_experts(draft, given)
    for knob, value in _PINNED.items():
        asked_for = attrgetter(knob)(knobs) not in (attrgetter(knob)(DEFAULTS), value)
        (draft.drop if asked_for else draft.settle)(knob, value, _WHY)
    if knobs.keep_between_micro_batches == "parameters":
        draft.drop("keep_between_micro_batches", "shards", _WHY)
    # Dtypes come from FSDP2's own policy.
    draft.settle("param_dtype", name_of(given.param_dtype), _WHY)
    draft.settle("reduce_dtype", name_of(given.reduce_dtype), _WHY)
    # Phase 3: torch itself gathers and reduces, so that none of our options apply.
    if given.two_dimensional:
        _leave_to_torch(draft, draft.shapes)


def _settle_experts(draft: ModelDraft, given: GivenSharding) -> None:
    degree, asked = given.experts, draft.knobs.expert_parallel_degree
    # torch divides sums of units on one rank twice, in dtypes in which it divides
    # before and after adding up.
    reduced = {
        given.reduce_dtype or given.param_dtype or each.dtype
        for each in draft.shapes.parameters
    }
    others = sorted(map(str, reduced - {torch.float32, torch.bfloat16}))
    if given.two_dimensional and given.degree == degree and others:
        raise ValueError(
            f"the experts of {draft.shapes.kind} came whole on a rank of each replica, where torch adds their "
            f"gradients up rightly in float32 and bfloat16 only, not in {others[0]}; load it without dp_replicate_size"
        )
    if isinstance(asked, int) and asked not in (1, degree):
        raise ValueError(
            f"expert_parallel_degree={asked}, but the model came with its experts dealt to {degree} ranks; leave it "
            f"out, or load the model with DistributedConfig(ep_size={asked})"
        )
    draft.settle("expert_parallel_degree", degree, _WHY)


def _leave_to_torch(draft: ModelDraft, shapes: Shapes) -> None:
    # Their gradients would have to be added up by us, across torch's own replicas.
    trainable = [
        name for name in shapes.units.replicated if shapes.of_name(name).trainable
    ]
    if trainable:
        raise ValueError(
            f"trainable parameters that every rank holds whole ({', '.join(trainable)}) beside a model sharded in two "
            "dimensions; write DistributedConfig(fsdp_size=...) without dp_replicate_size"
        )
    for knob, value in _TORCHS.items():
        draft.settle(
            knob,
            value,
            "torch gathers and reduces: the model came with its own replicas",
        )
    draft.warnings.append(
        "the model came sharded on a (replicate, shard) mesh: torch gathers and reduces, also across replicas, "
        f"and {', '.join((*_TORCHS, *_PINNED))} have no effect; load it without distributed_config, and torch-smp "
        "shards it"
    )
