"""A case: one small JSON value that says everything about a random run, and what it may
not say.

`KNOBS` has the values that are drawn for every setting of SmpConfig; what is not drawn
is in `NOT_DRAWN` with the reason. `objection` names the documented limit that a case
breaks: it keeps the drawing and the shrinking inside of what is promised. A new limit:
a line in `_limits`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from smp_core.cluster.layout import DEGREES
from smp_core.config import SmpConfig
from smp_core.config.recipe import nested
from smp_core.plan.checkpointed import plan_checkpointing
from smp_core.plan.units import plan_units
from smp_core.topology import Topology
from tests.core.fuzz.families import FAMILIES, Family
from tests.core.fuzz.models import IN_HALF_PRECISION, WITH_SHARED_LAYERS
from tests.core.fuzz.optimizers import (
    IN_STEP_WITH_ROUNDING,
    WITH_FUSED_KERNELS,
    WITH_TENSOR_LR,
)

# Setting -> kinds of values, the default first; `value_of` makes values of them that
# depend on the model.
KNOBS: dict[str, tuple[Any, ...]] = {
    "shard_degree": (2, 1, 4, "node", "world"),
    "collectives.hierarchical": ("auto", True, False),
    "reshard_after_forward": ("auto", True, False, "node", 2),
    "keep_between_micro_batches": ("shards", "parameters", "gradients"),
    "collectives.forward_prefetch": ("auto", 0, 1, 3),
    "collectives.backward_prefetch": ("auto", 1, 2),
    "collectives.reduce_scatter_buffers": ("auto", 1, 2),
    "collectives.separate_reduce_scatter_group": (False, True),
    "collectives.symmetric_memory": (False, True),
    "units.modules": ("auto", "classes", "globs", "function"),
    "units.min_parameters": (0, 1, 40),
    "units.optional": ("none", "branches"),
    "forward_methods": ("none", "methods"),
    "delayed_init": (None, True, "seeded"),
    "param_dtype": ("auto", None, "bfloat16"),
    "reduce_dtype": ("auto", None),
    "on_nonfinite_grad_norm": ("ignore", "skip", "raise"),
    "checkpoint.verify": ("auto", "sizes", "digests"),
    "collectives.meter": (True, False),
    "activations.checkpoint": ("none", "full", "every:2", "selective", "mapping"),
    "activations.check": (False, True),
    "activations.offload": (False, True),
    "activations.loading_horizon": (2, 1, 3),
    "activations.offload_min_bytes": (65536, 0),
    "activations.offload_host_gib": (None, 0.5),
    "compression.gather": (None, "int8", "fp8"),
    "compression.gather_inside_nodes": (False, True),
    "compression.gather_after_steps": (0, 1000),
    "compression.gather_exclude": ("none", "everything"),
    "compression.error_feedback": ("auto", False),
    "optimizer_shard": ("shard", "world"),
    "state_offload": (None, "optimizer", "all"),
}

_FACES = "is read by the faces: tests/lightning, tests/accelerate"
_INEXACT = "rounds: no comparison in float64"
_AXES = "needs a model, and steps, that the axis is for: tests of its room"
_SEQUENCES = "needs a model with attention of its own: tests/core/context_parallel"
_STAGES = "needs steps in micro-batches of all stages: tests/core/pipeline, tests/lightning/test_pipeline.py"
_LAYERS = "needs models with layers to split: tests/core/tensor_parallel"

NOT_DRAWN: dict[str, str] = {
    **dict.fromkeys(DEGREES.values(), _AXES),
    "expert_parallel_degree": "needs a mixture of experts: tests/core/expert_parallel",
    "router_balance": "needs a mixture of experts: tests/core/expert_parallel",
    "router_bias_update_rate": "needs a mixture of experts: tests/core/expert_parallel",
    "expert_capacity_factor": "needs a mixture of experts: tests/core/expert_parallel",
    "collectives.context_head_groups": _SEQUENCES,
    "collectives.expert_transport": "needs DeepEP, or its stand-in: tests/core/expert_parallel/test_deep_ep.py",
    "tensor_parallel.plan": _LAYERS,
    "tensor_parallel.sequence_parallel": _LAYERS,
    "tensor_parallel.across_nodes": _LAYERS,
    "tensor_parallel.overlap": _LAYERS,
    "pipeline.microbatches": _STAGES,
    "pipeline.schedule": _STAGES,
    "pipeline.split": _STAGES,
    "compression.reduce": _INEXACT,
    "frozen_storage": "needs adapters beside a frozen base: tests/core/sharding/test_frozen_storage.py",
    "master_dtype": "is about half precision models: tests/core/sharding/test_shared_parameters.py draws it",
    "fp8": _INEXACT,
    "compile": "takes minutes: tests/accelerate/test_compiled.py",
    "chunked_cross_entropy": "needs a Transformers model: tests/core/context_parallel",
    "plan": "chooses the others: tests/core/planner/test_auto_plan.py",
    "planner.memory_headroom": _FACES,
    "planner.device_memory_gib": _FACES,
    "planner.optimizer": _FACES,
    "checkpoint.full_state_dict": _FACES,
    "checkpoint.async_save": _FACES,
    "checkpoint.allow_batch_change": _FACES,
    "checkpoint.preemption_grace_s": _FACES,
    "checkpoint.memory_every_n_steps": _FACES,
}


def linears(name: str, module: nn.Module) -> bool:
    """A rule for ``units``: every linear layer that torch's own modules do not reach
    into."""
    return type(module) is nn.Linear and not name.startswith("leave")


# JSON has no functions.
RULES: dict[str, Callable[[str, nn.Module], bool]] = {"linears": linears}


def value_of(knob: str, kind: Any, family: Family) -> Any:
    """A knob's value in JSON from its kind in `KNOBS`."""
    made = {
        "units.modules": {
            "classes": list(family.classes),
            "globs": list(family.globs),
            "function": {"function": "linears"},
        },
        "units.optional": {"none": [], "branches": list(family.branches)},
        "forward_methods": {"none": [], "methods": list(family.methods)},
        "delayed_init": {"seeded": {"seed": 3}},
        "activations.checkpoint": {"mapping": {family.globs[0]: "full"}},
        "compression.gather_exclude": {"none": [], "everything": ["*"]},
    }
    return made.get(knob, {}).get(kind, kind) if isinstance(kind, str) else kind


@dataclass(frozen=True)
class Case:
    """One random run.

    Args:
        seed: what it was drawn from.
        world, ranks_per_node: the layout.
        model: a family of `FAMILIES`.
        entry: what a step calls (`Family.entries`).
        knobs: of SmpConfig, in JSON, without those at their defaults.
        optimizers: see `tests.core.fuzz.optimizers.make_optimizer`.
        script: operations, see `tests.core.fuzz.operations`.
    """

    seed: int
    world: int
    ranks_per_node: int
    model: str
    entry: str
    knobs: dict[str, Any]
    optimizers: list[dict[str, Any]]
    script: list[dict[str, Any]]

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples; parallelisms that share samples divide
        it."""
        return self.world

    @property
    def layout(self) -> tuple[int, int]:
        return self.world, self.ranks_per_node

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


def config_of(knobs: Mapping[str, Any]) -> SmpConfig:
    """The knobs with a function in the place of its name."""
    rule = knobs.get("units.modules")
    given = (
        {**knobs, "units.modules": RULES[rule["function"]]}
        if isinstance(rule, dict)
        else knobs
    )
    return SmpConfig(**nested(given))


def every_knobs(case: Case) -> Iterator[dict[str, Any]]:
    """The knobs of each model that the case makes, one after the other."""
    yield case.knobs
    yield from (
        op["knobs"]
        for op in case.script
        if op["do"] == "load" and op["knobs"] is not None
    )


def objection(case: Case) -> str | None:
    """The first documented limit that the case breaks; None: it has to run, and to come
    out the same."""
    return next(_limits(case), None)


def _limits(case: Case) -> Iterator[str]:
    family = FAMILIES[case.model]
    for knobs in every_knobs(case):
        yield from _limits_of_knobs(case, family, knobs)
    yield from _limits_of_optimizers(case)
    yield from _limits_of_script(case, family)


def _limits_of_knobs(
    case: Case, family: Family, knobs: Mapping[str, Any]
) -> Iterator[str]:
    topology = Topology.uniform(case.world, case.ranks_per_node)
    try:
        config = config_of(knobs)
        degree = topology.resolve_shard_degree(config.shard_degree)
    except ValueError as error:
        yield f"refused: {error}"
        return
    k = case.ranks_per_node
    kept = config.reshard_after_forward
    if not isinstance(kept, bool) and isinstance(kept, int) and degree % kept:
        yield "reshard_after_forward does not divide the shard degree"
    if config.collectives.hierarchical is True and not (
        topology.has_two_stages(degree) or (degree < k and case.world > k)
    ):
        yield "collectives.hierarchical=True where there is one stage only"
    how = config.collectives
    about_streams = how.reduce_scatter_buffers == 2 or how.separate_reduce_scatter_group
    if degree > 1 and (about_streams or how.symmetric_memory):
        yield "a knob about streams and NCCL on CPU"
    exact = config.compression.gather_after_steps or config.compression.gather_exclude
    if config.compression.gather is not None and not exact:
        yield "quantized gathers round"
    relevant = (
        "units.modules",
        "units.min_parameters",
        "units.optional",
        "activations.checkpoint",
    )
    units = _units(
        case.model,
        case.entry,
        json.dumps({knob: knobs[knob] for knob in relevant if knob in knobs}),
    )
    if isinstance(units, str):
        yield f"refused: {units}"
        return
    selective = "selective" in str(config.activations.checkpoint)
    if selective and any(op.get("twice") for op in case.script):
        yield "torch's selective checkpointing takes one backward pass through a graph"
    owners = [method.rpartition(".")[0] for method in config.forward_methods]
    if any(owner not in units for owner in owners):
        yield "forward_methods of a module that is no unit"
    if config.optimizer_shard == "world" and any(
        op.get("how") == "parameters" for op in case.script
    ):
        yield "optimizer_shard='world': parameters have no gradients that could be dropped one by one"
    if config.optimizer_shard == "world" and _trains_later(case, family):
        yield "optimizer_shard='world': what was frozen when the optimizer was made cannot be trained"
    if (
        any(op["do"] == "overflow" for op in case.script)
        and config.on_nonfinite_grad_norm == "ignore"
    ):
        yield "weights become nan"
    yield from _limits_of_paths(case, family, degree, units)
    if config.param_dtype == "bfloat16":
        yield from _limits_of_half_precision(case, config)
    freezes_meanwhile = any(
        op.get("meanwhile", "nothing") != "nothing" for op in case.script
    )
    if config.activations.checkpoint != "none" and freezes_meanwhile:
        yield "torch's checkpointing recomputes with what is frozen then"


def _limits_of_half_precision(case: Case, config: SmpConfig) -> Iterator[str]:
    """What one process cannot do with the same roundings
    (`tests.core.fuzz.procedure.OneProcess`)."""
    if FAMILIES[case.model].build not in IN_HALF_PRECISION:
        yield "the model mixes dtypes in half precision"
    in_one_call = case.entry == "forward" and config.activations.checkpoint == "none"
    if FAMILIES[case.model].build in WITH_SHARED_LAYERS and not in_one_call:
        yield "each root and each recomputed block rounds what it shares with others"
    if config.reduce_dtype is None or config.compression.gather is not None:
        yield "sums in half precision round"
    if any(op.get("calls", 1) > 1 for op in case.script):
        yield "half precision adds up the calls of a pass"
    if any(spec["kind"] not in IN_STEP_WITH_ROUNDING for spec in case.optimizers):
        yield "an optimizer that makes much of a rounding error"


def _limits_of_paths(
    case: Case, family: Family, degree: int, units: set[str]
) -> Iterator[str]:
    """Inside a partition group all ranks have to use the same units; parameters of one
    unit may be used or not."""
    are_optional = all("units.optional" in knobs for knobs in every_knobs(case))
    ways_inside_units = not any(
        name.startswith("cells.") and name.count(".") > 1 for name in units
    )
    methods = {
        method
        for knobs in every_knobs(case)
        for method in knobs.get("forward_methods", ())
    }
    for op in case.script:
        paths = op.get("paths", [])
        if op["do"] == "fail" and not op["hold"] and len(set(paths)) > 1:
            yield "a window's last pass fails on all ranks: where one does not use the module, it waits for the others"
        for path in paths:
            if case.model == "cells" and any(
                f"cells.{s[0]}.encode" not in methods
                for s in path.split()
                if s[1:] == "e"
            ):
                yield "a method that forward_methods does not name"
        for first in range(0, case.data_ranks, degree):
            members = (
                {paths[rank % len(paths)] for rank in range(first, first + degree)}
                if paths
                else set()
            )
            if len(members) > 1 and op["do"] == "fail":
                yield "a pass fails on all ranks of a partition group: the others wait for those where it does"
            if len(members) <= 1 or are_optional:
                continue
            used = {tuple(step[0] for step in path.split()) for path in members}
            if case.model != "cells" or not ways_inside_units or len(used) > 1:
                yield "ranks of one partition group use different units"
            elif any(len(set(cells)) < len(cells) for cells in used):
                yield "ranks of one partition group take different ways through a unit that is used twice"


def _limits_of_optimizers(case: Case) -> Iterator[str]:
    for spec in case.optimizers:
        if spec["kernels"] == "fused" and spec["kind"] not in WITH_FUSED_KERNELS:
            yield "no fused kernel for shards"
        if spec["kernels"] == "tensor lr" and spec["kind"] not in WITH_TENSOR_LR:
            yield "the optimizer takes no tensor as its learning rate"
        if (
            spec["late"]
            and spec["kind"] == "Adagrad"
            and not adagrad_steps_late_groups()
        ):
            yield "torch's Adagrad has no states for parameters that are added later"


@cache
def adagrad_steps_late_groups() -> bool:
    """Return whether it does in one process: from torch 2.13 on."""
    early, late = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.Adagrad([early])
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _limits_of_script(case: Case, family: Family) -> Iterator[str]:
    saved: dict[str, bool] = {}
    has_late_group = False
    for op in case.script:
        if op["do"] == "add_group":
            has_late_group = True
        if op["do"] == "save":
            saved[op["name"]] = has_late_group
        if op["do"] == "load":
            if op["name"] not in saved:
                yield "nothing was saved yet"
            elif saved[op["name"]] != has_late_group:
                yield "the optimizer was saved with other parameter groups"
        if (
            case.entry == "apart"
            and op["do"] == "clip"
            and op["of"] is None
            and op["how"] != "value"
        ):
            yield "models that are parallelized apart have norms of their own"
        if case.entry == "apart" and op["do"] == "overflow":
            yield "models that are parallelized apart have norms of their own"


def _trains_later(case: Case, family: Family) -> bool:
    frozen = family.frozen_to_begin_with()
    thaws = (
        op
        for op in case.script
        if op.get("trainable") or op.get("meanwhile", "").startswith("thaw")
    )
    patterns = [op["what"] for op in thaws]
    return any(pattern in name for pattern in patterns for name in frozen)


@cache
def _units(model: str, entry: str, knobs: str) -> set[str] | str:
    """The names of the units that are planned, or why there is no plan."""
    built: nn.Module = FAMILIES[model].on_meta()
    config = config_of(json.loads(knobs))
    units: set[str] = set()
    try:
        for part, module in (
            built.named_children() if entry == "apart" else [("", built)]
        ):
            plan = plan_units(
                module, config, entry="forward" if entry == "apart" else entry
            )  # type: ignore[arg-type]
            plan_checkpointing(module, plan.blocks, config.activations.checkpoint)
            units |= {f"{part}.{unit.name}".strip(".") for unit in plan.units}
    except ValueError as error:
        return str(error)
    return units
