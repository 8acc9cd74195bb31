"""The one entry: from a model and knobs to a parallel model.

look      Shapes of the model, Cluster of the machines
decide    a Plan: pure, the same on every rank
agree     every rank was given the same knobs, links and model, and none refuses
mesh      the process groups of its layout
do        parallelize_model(), or adopt_sharded_model() for a pre-sharded one

Beside it :func:`memory_tier`, which a run with the same knobs keeps its newest state
in.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.memory import MemoryTier
from smp_core.cluster import DEGREES, PARTITION, Layout, SmpMesh, agreed, of_rank_0
from smp_core.config import SmpConfig
from smp_core.engine import (
    ParallelModel,
    adopt_sharded_model,
    decide_with_smallest_degree,
    parallelize_model,
    settle_layout,
)
from smp_core.engine.decide import decide
from smp_core.outside import long_wait
from smp_core.pipeline import rehearse
from smp_core.plan import (
    TRAINERS_OWN,
    Cluster,
    Draft,
    Entry,
    GivenSharding,
    Plan,
    Precision,
    Shapes,
    experts_of,
)
from smp_core.plan.chain import with_chain
from smp_core.planner import RunningStep, plan_run
from smp_core.sharding import given_sharding
from smp_core.sharding.fsdp import given_units, require_internals
from smp_core.topology import RANKS_PER_NODE_VARIABLE, Topology
from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")

# Degrees that decide which rank holds which shard, for states that are kept in memory.
_DECIDES_SHARDS = (
    "shard_degree",
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "optimizer_shard",
)


def parallelize(
    model: nn.Module,
    asked: SmpConfig,
    *,
    device: torch.device | str = "cpu",
    topology: Topology | None = None,
    mesh: SmpMesh | None = None,
    entry: Entry = "forward",
    precision: Precision = TRAINERS_OWN,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    init_fn: Callable[[nn.Module], None] | None = None,
    accumulated: int = 1,
) -> ParallelModel:
    """Shard a model, and everything else that the knobs ask for. In place; collective
    over the world.

    Args:
        model: on any device or on meta; or sharded by FSDP2 already, which it keeps.
        device: this rank's.
        topology: default: the ranks are asked where they sit.
        mesh: an earlier model's, to be used again; ``device`` and ``topology`` are its
            own then.
        entry: what a step calls (:func:`smp_core.plan.units.plan_units`).
        precision: what the trainer's precision means for dtypes.
        optimizers: that step this model, where they are known already;
            ``shard_degree="auto"`` plans memory for them.
        init_fn: initialises one module in place, for modules on meta that cannot do it
            themselves.
        accumulated: micro-batches of an optimizer step; ``plan="auto"`` plans for them.

    Returns:
        the handle whose ``window``, ``clip_grad_norm_`` and ``meter`` a training loop
        uses.

    Raises:
        ValueError: what :func:`smp_core.engine.decide.decide` and
            :func:`smp_core.engine.conversions.parallelize_model` refuse, ranks that
            were given different configurations or models; on all ranks.
        RuntimeError: this torch lacks something of FSDP2 that is needed
            (:func:`require_internals`).
    """
    if not isinstance(asked, SmpConfig):
        raise ValueError(
            f"parallelize(model, {asked!r}): the knobs are given as an SmpConfig; write SmpConfig(shard_degree=2), "
            "SmpConfig.from_dict(knobs) or SmpConfig.from_yaml(path)"
        )
    # Phase 1, look: which torch, machine and model this is. Names that are missing are
    # found before anything changes.
    device = torch.device(device) if mesh is None else mesh.device
    topology = topology or (Topology.discover() if mesh is None else mesh.topology)
    require_internals()
    has_shards = any(isinstance(each, DTensor) for each in model.parameters())
    given = given_sharding(model) if has_shards else None
    observe = Cluster.observer(topology, device)
    # A further model goes on with the first one's degrees; plan="auto" is for the
    # first.
    if mesh is not None and (asked.shard_degree == "auto" or asked.plan is not None):
        asked = _as_before(asked, mesh)
    elif asked.plan is not None and given is None:
        asked = _planned(
            model,
            asked,
            observe,
            RunningStep(device, entry, precision, accumulated, tuple(optimizers)),
        )

    # Phase 2, decide, on every rank by itself, and agree on what came out. What
    # observing or deciding refuses is raised on all ranks: see agreed().
    plan, changed = agreed(
        asked,
        functools.partial(
            _settled, model, asked, given, observe, entry, precision, optimizers
        ),
        lambda settled: settled[0].word,
        lambda settled: settled[0].tensors_in_words,
    )
    # Phase 3, the process groups of the layout, and Phase 4, do it.
    if mesh is None:
        mesh = SmpMesh.build(plan.knobs, plan.layout, topology, device)
    elif given is None:
        _require_layout(mesh, plan)
    if mesh.rank == 0:
        for line in plan.warnings:
            logger.warning("%s", line)
        microbatches = plan.knobs.pipeline.microbatches
        if changed and microbatches != 1:
            _warn_of_changes(microbatches, changed)
    with long_wait("sharding the model", here=mesh.rank == 0):
        if given is not None:
            return adopt_sharded_model(model, mesh, plan, given)
        return parallelize_model(model, mesh, plan, init_fn=init_fn)


def build_mesh(
    asked: SmpConfig, topology: Topology, device: torch.device | str
) -> tuple[SmpMesh, SmpConfig]:
    """Make the mesh before there is a model. Collective over the world.

    Args:
        asked: ``shard_degree`` is a number, "node" or "world".

    Returns:
        the mesh, and the knobs of the layout as they take effect.

    Raises:
        ValueError: degrees that do not fit the world, ranks that were given different
            configurations; on all ranks.
    """

    def settle() -> tuple[Draft, Layout]:
        draft = Draft(asked)
        return draft, settle_layout(draft, topology)

    draft, layout = agreed(asked, settle)
    return SmpMesh.build(draft.knobs, layout, topology, device), draft.knobs


def memory_tier(
    asked: SmpConfig, topology: Topology, saves_to: str, by: str, inside: str = ""
) -> MemoryTier:
    """Make what ``checkpoint.memory_every_n_steps`` keeps a run's newest state in.
    Collective over the world.

    Args:
        asked: the knobs as they were given: degrees that follow the launch become
            others where nodes are lost.
        saves_to, by, inside: the folder of the run's checkpoints, the trainer that
            saves there, and the name of a checkpoint inside its folder
            (:class:`smp_core.checkpoint.memory.tier.MemoryTier`).

    Raises:
        CheckpointError: the folder in memory cannot be made, or belongs to another
            user; on all ranks.
    """
    layout = ", ".join(f"{knob}={getattr(asked, knob)!r}" for knob in _DECIDES_SHARDS)
    # Ranks that only pose as nodes share one memory.
    posed = RANKS_PER_NODE_VARIABLE in os.environ
    return MemoryTier(
        asked.checkpoint.memory_every_n_steps,
        saves_to,
        topology.nodes,
        posed,
        layout,
        by,
        inside,
    )


def _settled(
    model: nn.Module,
    asked: SmpConfig,
    given: GivenSharding | None,
    observe: Callable[[], Cluster],
    entry: Entry,
    precision: Precision,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[Plan, list[str]]:
    """Decide everything about a model; return the plan, and the saved buffers and
    numbers that each forward changes."""
    # A pre-sharded model has its own units and degrees.
    if given is not None:
        shapes = Shapes.with_units(model, given_units(model), experts_of(model))
        plan = decide(shapes, asked, observe(), given=given, precision=precision)
        return plan, []
    shapes = Shapes.of(model, asked, entry)
    if asked.pipeline_parallel_degree > 1:
        shapes = with_chain(shapes, model)
    if asked.shard_degree == "auto":
        plan = decide_with_smallest_degree(
            shapes, asked, observe(), precision=precision, optimizers=optimizers
        )
    else:
        plan = decide(shapes, asked, observe(), precision=precision)
    if (
        asked.expert_parallel_degree == "auto"
        and plan.knobs.expert_parallel_degree == 1
        and plan.shapes.experts
    ):
        # Experts that stay with their layers are no units: decide once more without.
        why = plan.knobs.why("expert_parallel_degree")
        asked = asked.with_resolved("expert_parallel_degree", 1, why)
        return _settled(model, asked, given, observe, entry, precision, optimizers)
    # Stages are run once, whole against parts, before anything is left out.
    return plan, [] if plan.stages is None else rehearse(model, plan.stages)


def _warn_of_changes(microbatches: int | str, changed: list[str]) -> None:
    """Log what micro-batches change that each forward changes."""
    logger.warning(
        "pipeline.microbatches=%s: forward changes what modules keep (%s), here once for each micro-batch; numbers "
        "are not those of one process, but those of accumulated batches; write pipeline={'microbatches': 1}",
        microbatches,
        ", ".join(changed[:2]),
    )


def _planned(
    model: nn.Module,
    asked: SmpConfig,
    observe: Callable[[], Cluster],
    step: RunningStep,
) -> SmpConfig:
    """Return the knobs with those that rank 0 plans. Collective."""
    # Ranks first compare what they were given: a knob that only another rank was given
    # would be planned over.
    agreed(asked, lambda: True)
    with long_wait("planning (plan='auto')", here=is_rank_0()):
        decision = of_rank_0(lambda: plan_run(model, asked, observe(), step))
    return asked.with_asked("the plan", **decision.knobs).with_resolved(
        "plan", asked.plan, decision.why
    )


def _as_before(asked: SmpConfig, mesh: SmpMesh) -> SmpConfig:
    """Return the knobs with the degrees of an earlier model's mesh, where they were
    open. A further model is not planned."""
    before = "as the model before"
    degrees = {"shard_degree": mesh.shard_degree}
    # Of a planned run all degrees were open, not the shard degree alone.
    if asked.plan is not None:
        degrees["context_parallel_degree"] = mesh.context_degree
        degrees["tensor_parallel_degree"] = mesh.tensor_degree
        asked = asked.with_resolved(
            "plan", None, "an earlier model was planned; this one has its degrees"
        )
    for knob, degree in degrees.items():
        if knob not in asked.given or getattr(asked, knob) == "auto":
            asked = asked.with_resolved(knob, degree, before)
    return asked


def _require_layout(mesh: SmpMesh, plan: Plan) -> None:
    if mesh.layout != plan.layout:
        knobs = {
            "shard_degree": PARTITION,
            **{knob: (axis,) for axis, knob in DEGREES.items()},
        }
        asked = ", ".join(
            f"{knob}={plan.layout.size(*axes)}" for knob, axes in knobs.items()
        )
        before = ", ".join(str(mesh.layout.size(*axes)) for axes in knobs.values())
        raise ValueError(
            f"{asked}, but the mesh of the model before has {before}; write the same, or shard_degree='auto'"
        )
