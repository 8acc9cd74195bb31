"""decide() without processes: what it settles, what it refuses, and that its plans tile
the world."""

from __future__ import annotations

import dataclasses
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from smp_core.cluster.layout import DATA, GRADIENTS, PARTITION, Axis
from smp_core.cluster.links import Collectives, LinkFit, Links
from smp_core.config import SmpConfig
from smp_core.config.recipe import nested
from smp_core.engine import knobs_of_next_run
from smp_core.engine.auto_degree import decide_with_smallest_degree
from smp_core.engine.conversions import compile_blocks
from smp_core.engine.decide import decide
from smp_core.plan.plan import GivenSharding, Plan, Precision
from smp_core.plan.shapes import GIB, Cluster, Shapes
from smp_core.topology import Topology

ROOT = Path(__file__).resolve().parents[3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)


class Tower(nn.Module):
    """Four blocks and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def plan_of(
    model: nn.Module | None = None, links: Links | None = None, **knobs: Any
) -> Plan:
    """On two nodes of four ranks, by default sharded within them."""
    asked = SmpConfig(**{"shard_degree": 4, **knobs})
    machines = Cluster(Topology.uniform(8, 4), host_memory=10 * GIB, links=links)
    return decide(Shapes.of(model or Tower(), asked), asked, machines)


# Knobs, and what becomes of which one and why: on two nodes of four ranks.
SETTLED: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"shard_degree": "node"}, "shard_degree", 4, "'node' of 2 x 4 ranks"),
    ({"shard_degree": "world"}, "shard_degree", 8, "'world' of 2 x 4 ranks"),
    (
        {"shard_degree": 8},
        "collectives.hierarchical",
        True,
        "the partition group spans 2 nodes with 4 ranks each",
    ),
    (
        {"shard_degree": 2},
        "collectives.hierarchical",
        True,
        "the replication group spans 2 nodes with 2 ranks each",
    ),
    ({"shard_degree": 4}, "collectives.hierarchical", False, "lies inside one node"),
    (
        {"shard_degree": 8, "collectives": {"hierarchical": False}},
        "collectives.hierarchical",
        False,
        "as asked",
    ),
    (
        {"shard_degree": 8, "reshard_after_forward": "node"},
        "reshard_after_forward",
        4,
        "over the 4 ranks of each node",
    ),
    (
        {"shard_degree": 4, "reshard_after_forward": "node"},
        "reshard_after_forward",
        True,
        "inside one node already",
    ),
    (
        {"shard_degree": 4, "reshard_after_forward": 4},
        "reshard_after_forward",
        True,
        "as many ranks as the partition",
    ),
    ({"shard_degree": 1}, "reshard_after_forward", False, "nothing is gathered"),
    (
        {
            "shard_degree": 1,
            "keep_between_micro_batches": "gradients",
            "reshard_after_forward": True,
        },
        "keep_between_micro_batches",
        "shards",
        "nothing is reduced",
    ),
    ({"shard_degree": 4}, "reduce_dtype", None, "the gradients' own dtype"),
    ({"param_dtype": "bfloat16"}, "reduce_dtype", "float32", "half precision"),
    (
        {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        "reduce_dtype",
        "bfloat16",
        "as asked",
    ),
    (
        {"shard_degree": 1, "compression": {"gather": "int8"}},
        "compression.gather",
        None,
        "nothing is gathered",
    ),
    (
        {"shard_degree": 4, "compression": {"gather": "int8"}},
        "compression.gather",
        None,
        "lies inside one node",
    ),
    (
        {"shard_degree": 8, "compression": {"gather": "int8"}},
        "compression.gather",
        "int8",
        "as asked",
    ),
    (
        {"shard_degree": 8, "compression": "bf16"},
        "compression.reduce",
        None,
        "there is one replica",
    ),
    (
        {"shard_degree": 4, "compression": "bf16"},
        "compression.reduce",
        "bf16",
        "as asked",
    ),
    (
        {"shard_degree": 4, "compression": {"reduce": "int8"}},
        "compression.error_feedback",
        True,
        "gradients travel in codes",
    ),
    (
        {"shard_degree": 4},
        "compression.error_feedback",
        False,
        "no gradients travel in codes",
    ),
    (
        {"shard_degree": 8, "optimizer_shard": "world"},
        "optimizer_shard",
        "shard",
        "there is one replica",
    ),
    (
        {"optimizer_shard": "world", "param_dtype": "bfloat16"},
        "optimizer_shard",
        "world",
        "stored in bfloat16",
    ),
    ({}, "collectives.context_head_groups", 1, "context_parallel_degree=1"),
    (
        {"context_parallel_degree": 2},
        "collectives.context_head_groups",
        1,
        "on CPU nothing runs behind",
    ),
    ({"activations": "full"}, "activations.checkpoint", "full", "as asked"),
    (
        {"activations": {"check": True}},
        "activations.check",
        False,
        "nothing is recomputed",
    ),
    (
        {"activations": {"loading_horizon": 3}},
        "activations.loading_horizon",
        3,
        "nothing is offloaded",
    ),
    (
        {"activations": {"checkpoint": "full", "offload": True, "loading_horizon": 4}},
        *(
            "activations.offload",
            False,
            "the inputs of all 4 checkpointed modules may stay",
        ),
    ),
    (
        {"activations": {"checkpoint": "full", "offload": True}},
        *("activations.offload_host_gib", 2.0, "four fifths"),
    ),
    ({"delayed_init": True}, "delayed_init", None, "nothing was on the meta device"),
    ({}, "collectives.forward_prefetch", 0, "no measured links"),
    (
        {"shard_degree": 1, "collectives": {"reduce_scatter_buffers": 2}},
        "collectives.reduce_scatter_buffers",
        1,
        "shard_degree=1",
    ),
]


@pytest.mark.parametrize(
    ("knobs", "knob", "value", "why"),
    SETTLED,
    ids=[f"{knob} of {knobs}" for knobs, knob, *_ in SETTLED],
)
def test_a_knob_becomes_what_takes_effect_and_says_why(
    knobs: dict[str, Any], knob: str, value: Any, why: str
) -> None:
    plan = plan_of(**knobs)
    found = attrgetter(knob)(plan.knobs)
    assert found == value and type(found) is type(value)
    assert why in plan.knobs.why(knob)


ASKED_OF = [
    (knobs, knob, value) for knobs, knob, value, _ in SETTLED if value in (None, False)
]
DROPPED = [
    (knobs, knob)
    for knobs, knob, value in ASKED_OF
    if attrgetter(knob)(SmpConfig(**knobs))
    not in (value, "auto", attrgetter(knob)(SmpConfig()))
]


@pytest.mark.parametrize(
    ("knobs", "knob"), DROPPED, ids=[f"{knob} of {knobs}" for knobs, knob in DROPPED]
)
def test_what_has_no_effect_is_a_warning(knobs: dict[str, Any], knob: str) -> None:
    [said] = [line for line in plan_of(**knobs).warnings if line.startswith(f"{knob}=")]
    assert "has no effect" in said


@pytest.mark.parametrize(
    ("knob", "asked"),
    [
        ("tensor_parallel", {"sequence_parallel": False}),
        ("pipeline", {"schedule": "gpipe"}),
        ("collectives", {"context_head_groups": 3}),
    ],
)
def test_settings_of_an_axis_that_is_not_there_are_a_warning(
    knob: str, asked: dict[str, Any]
) -> None:
    plan = plan_of(**{knob: asked})
    [said] = [line for line in plan.warnings if line.startswith(knob)]
    assert "has no effect" in said and "_parallel_degree=1" in said
    [(field, value)] = asked.items()
    assert attrgetter(f"{knob}.{field}")(plan.knobs) != value


def test_what_is_recomputed_around_split_layers_is_not_compiled_and_that_is_said() -> (
    None
):
    knobs: dict[str, Any] = {"tensor_parallel_degree": 2, "compile": True}
    assert plan_of(**knobs).knobs.compile is not None
    plan = plan_of(**knobs, activations="full")
    assert (
        plan.knobs.compile is None
        and "leave activations or compile out" in plan.knobs.why("compile")
    )
    assert any(line.startswith("compile=") for line in plan.warnings)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("maybe", "maybe"),
        ({"backend": "inducter"}, "inducter"),
        ({"options": {"epilog_fusion": True}}, "epilog_fusion"),
    ],
)
def test_what_torch_compile_does_not_know_is_refused_with_the_knob(
    asked: Any, named: str
) -> None:
    model = Tower()
    with pytest.raises(ValueError, match=f"compile: .*{named}"):
        compile_blocks(model, plan_of(model, compile=asked))


def test_an_excluded_parameter_has_to_be_there() -> None:
    form = {"gather": "int8", "gather_exclude": ["*.upp", "*bias*"]}
    plan = plan_of(shard_degree=8, compression=form)
    [said] = [line for line in plan.warnings if "gather_exclude" in line]
    assert "'*.upp', which matches no parameter" in said
    # Where nothing is sent in codes, one line says that.
    plan = plan_of(shard_degree=4, compression=form)
    assert not [line for line in plan.warnings if "gather_exclude" in line]


def test_there_has_to_be_something_to_compile() -> None:
    plan = plan_of(compile=True, units=lambda name, module: False)
    assert plan.knobs.compile is None and "there are no blocks" in plan.knobs.why(
        "compile"
    )
    assert any(
        line.startswith("compile=") and "has no effect" in line
        for line in plan.warnings
    )


# (nodes, ranks of a node, ranks of a partition group), whatever divides what.
CLUSTERS = [
    (nodes, per_node, degree)
    for nodes, per_node in ((1, 1), (1, 8), (2, 1), (2, 4), (3, 2), (4, 8), (16, 8))
    for degree in sorted({1, 2, 3, 4, per_node, 2 * per_node, nodes * per_node})
]


@pytest.mark.parametrize(
    ("nodes", "per_node", "degree"),
    CLUSTERS,
    ids=[f"{n}x{k}, {d}" for n, k, d in CLUSTERS],
)
@pytest.mark.parametrize("context", [1, 2])
def test_a_layout_is_what_its_ranks_say(
    nodes: int, per_node: int, degree: int, context: int
) -> None:
    """Against a list of the ranks of every group, counted one by one."""
    world = nodes * per_node
    groups = [range(first, first + degree) for first in range(0, world, degree)]
    on_nodes = [{rank // per_node for rank in group} for group in groups]
    fits = world % degree == 0 and (
        degree % per_node == 0 or all(len(nodes_of) == 1 for nodes_of in on_nodes)
    )
    try:
        asked = SmpConfig(shard_degree=degree, context_parallel_degree=context)
        plan = decide(
            Shapes.of(Tower(), asked),
            asked,
            Cluster(Topology.uniform(world, per_node), host_memory=GIB),
        )
    except ValueError as error:
        assert not fits or degree % context
        assert (
            "context_parallel_degree" if degree % context else "shard_degree"
        ) in str(error)
        return
    assert fits and degree % context == 0
    assert [list(group) for group in plan.layout.groups(*PARTITION)] == [
        list(group) for group in groups
    ]
    assert (
        plan.layout.size(*GRADIENTS) == world
        and plan.layout.size(*DATA) == world // context
    )
    assert plan.gathers == (degree > 1)
    assert plan.hierarchical == (
        per_node > 1 and any(len(nodes_of) > 1 for nodes_of in on_nodes)
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"shard_degree": 3},
        r"shard_degree=3 does not divide the world of 8 ranks; allowed: 1, 2, 4, 8",
    ),
    ({"shard_degree": 16}, r"shard_degree=16.*allowed: 1, 2, 4, 8"),
    ({"shard_degree": "auto"}, r"shard_degree.*'auto'.*allowed here"),
    (
        {"shard_degree": 4, "collectives": {"hierarchical": True}},
        r"hierarchical=True needs.*write collectives={'hierarchical': 'auto'}",
    ),
    (
        {"shard_degree": 8, "reshard_after_forward": 3},
        r"reshard_after_forward=3 does not divide shard_degree=8",
    ),
    (
        {"shard_degree": "node", "reshard_after_forward": 3},
        r"reshard_after_forward=3 does not divide shard_degree=4",
    ),
    (
        {"shard_degree": "node", "context_parallel_degree": 3},
        r"context_parallel_degree=3 does not divide",
    ),
    (
        {"shard_degree": 2, "context_parallel_degree": 4},
        r"context_parallel_degree=4.*shard_degree=2",
    ),
    (
        {"reduce_dtype": "float16"},
        r"reduce_dtype='float16'.*allowed: 'auto', 'float32', 'bfloat16'",
    ),
    (
        {"tensor_parallel_degree": 3},
        r"tensor_parallel_degree=3 does not divide the 4 ranks of a node.*allowed: 1, 2, 4",
    ),
    (
        {"tensor_parallel_degree": 2, "compile": {"fullgraph": True}},
        r"tensor_parallel_degree=2 is not built yet together with\n-",
    ),
    (
        {"tensor_parallel_degree": 2, "shard_degree": 8},
        r"shard_degree=8 does not divide.*count as one",
    ),
    (
        {
            "shard_degree": 1,
            "pipeline_parallel_degree": 2,
            "forward_methods": ["score"],
            "units": {"optional": ["*"]},
        },
        r"pipeline_parallel_degree=2 is not built yet together with\n- units.optional.*\n- forward_methods",
    ),
    (
        {"collectives": {"symmetric_memory": True}},
        r"symmetric_memory=True.*write collectives={'symmetric_memory': false}",
    ),
    (
        {"collectives": {"reduce_scatter_buffers": 2}},
        r"reduce_scatter_buffers=2.*write collectives={'reduce_scatter_buffers': 1}",
    ),
    (
        {"collectives": {"separate_reduce_scatter_group": True}},
        r"separate_reduce_scatter_group=True.*device is cpu",
    ),
    (
        {"optimizer_shard": "world", "state_offload": "all"},
        r"optimizer_shard='world'.*state_offload='optimizer'",
    ),
    (
        {"keep_between_micro_batches": "parameters", "reshard_after_forward": True},
        r"keep_between_micro_batches='parameters'.*write reshard_after_forward='auto'",
    ),
    (
        {"compression": {"error_feedback": True}},
        r"error_feedback=true.*write compression={'reduce'",
    ),
    (
        {"compression": {"gather_after_steps": 2}},
        r"compression.gather_after_steps says how compression.gather works",
    ),
    ({"units": ["Blok"]}, r"Blok"),
    (
        {"activations": {"checkpoint": {"Blok": "full"}}},
        r"activations.checkpoint\['Blok'\] matches no",
    ),
    ({"activations": {"offload": True}}, r"activations.offload=true"),
]


@pytest.mark.parametrize(
    ("knobs", "said"), REFUSED, ids=[str(knobs) for knobs, _ in REFUSED]
)
def test_what_cannot_be_is_refused_with_what_to_write(
    knobs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(**knobs)


def test_a_model_that_checkpoints_itself_keeps_doing_so_but_is_not_offloaded() -> None:
    model = Tower()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    plan = plan_of(model=model, activations="full")
    assert (
        plan.knobs.activations.checkpoint == "none"
        and not plan.activations.checkpointed
        and plan.warnings
    )
    with pytest.raises(ValueError, match=r"activations.offload=true: the model's own"):
        plan_of(model=model, activations={"checkpoint": "full", "offload": True})


GIVEN: list[tuple[dict[str, Any], bool, str]] = [
    ({"fp8": True}, False, r"fp8=.*before a model is sharded"),
    (
        {"activations": "full"},
        False,
        r"activations.checkpoint='full'.*before a model is sharded",
    ),
    (
        {"collectives": {"symmetric_memory": True}},
        False,
        r"symmetric_memory=True has to be applied before",
    ),
    (
        {"state_offload": "all"},
        False,
        r"state_offload='all'.*allowed: none, 'optimizer'",
    ),
    (
        {"context_parallel_degree": 2},
        False,
        r"context_parallel_degree=2 and a model that came sharded",
    ),
    ({}, True, r"trainable parameters that every rank holds whole \(scale\)"),
]


@pytest.mark.parametrize(("knobs", "two_dimensional", "said"), GIVEN)
def test_what_comes_too_late_for_a_model_that_came_sharded_is_refused(
    knobs: dict[str, Any], two_dimensional: bool, said: str
) -> None:
    asked = SmpConfig(**knobs)
    came = GivenSharding((0, 1), two_dimensional)
    with pytest.raises(ValueError, match=said):
        decide(
            Shapes.of(Tower(), SmpConfig()),
            asked,
            Cluster(Topology.uniform(4, 2)),
            given=came,
        )


def test_what_a_model_came_with_is_pinned() -> None:
    came = GivenSharding((0, 1), False, torch.bfloat16, torch.float32)
    asked = SmpConfig(units=["Block"], delayed_init=True)
    plan = decide(
        Shapes.of(Tower(), asked), asked, Cluster(Topology.uniform(4, 2)), given=came
    )
    assert (
        plan.shard_degree == 2
        and plan.dtypes.gathered == torch.bfloat16
        and plan.dtypes.reduced == torch.float32
    )
    assert (
        plan.knobs.why("units.modules")
        == plan.knobs.why("shard_degree")
        == "as the model came"
    )
    assert plan.gathers and plan.knobs.delayed_init is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_trainers_precision_is_what_auto_means(dtype: torch.dtype | None) -> None:
    asked = SmpConfig(shard_degree=4, on_nonfinite_grad_norm="raise")
    precision = Precision(dtype, "precision='x'", skips_steps=True)
    plan = decide(
        Shapes.of(Tower(), asked),
        asked,
        Cluster(Topology.uniform(8, 4)),
        precision=precision,
    )
    assert (
        plan.dtypes.gathered == dtype
        and plan.knobs.why("param_dtype") == "precision='x'"
    )
    assert plan.knobs.on_nonfinite_grad_norm == "ignore"


def measured(two_stages_pay: bool) -> Links:
    fast, slow = LinkFit(1e-6, 100e9), LinkFit(1e-4, 1e9)
    inside, between = (fast, slow) if two_stages_pay else (slow, fast)
    return Links(
        2,
        4,
        Collectives(4, *[inside] * 3),
        Collectives(2, *[between] * 3),
        Collectives(8, *[between] * 3),
    )


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("degree", [8, 2])
def test_measured_links_say_whether_two_stages_pay(pays: bool, degree: int) -> None:
    plan = plan_of(shard_degree=degree, links=measured(pays))
    assert (
        plan.knobs.collectives.hierarchical is pays
        and "SMP_LINKS" in plan.knobs.why("collectives.hierarchical")
    )
    forced = plan_of(
        shard_degree=degree, collectives={"hierarchical": True}, links=measured(pays)
    )
    assert forced.knobs.collectives.hierarchical is True


KNOBS: dict[str, Any] = {
    "shard_degree": st.sampled_from([1, 2, 3, 4, 6, 8, 16, "node", "world", "auto"]),
    "context_parallel_degree": st.sampled_from([1, 1, 2, 4]),
    "tensor_parallel_degree": st.sampled_from([1, 1, 2, 4]),
    "collectives.hierarchical": st.sampled_from([True, False, "auto"]),
    "reshard_after_forward": st.sampled_from(["auto", True, False, "node", 2, 4]),
    "keep_between_micro_batches": st.sampled_from(
        ["shards", "parameters", "gradients"]
    ),
    "collectives.reduce_scatter_buffers": st.sampled_from(["auto", 1, 2]),
    "collectives.symmetric_memory": st.booleans(),
    "param_dtype": st.sampled_from(["auto", None, "bfloat16", "float32"]),
    "reduce_dtype": st.sampled_from(["auto", None, "bfloat16"]),
    "compression.gather": st.sampled_from([None, "int8", "fp8"]),
    "compression.reduce": st.sampled_from([None, "int8", "int4", "bf16"]),
    "compression.error_feedback": st.sampled_from(["auto", True, False]),
    "optimizer_shard": st.sampled_from(["shard", "world"]),
    "state_offload": st.sampled_from([None, "optimizer", "all"]),
    "activations.checkpoint": st.sampled_from(["none", "full", "every:2"]),
    "activations.offload": st.booleans(),
    "fp8": st.sampled_from([None, True]),
    "delayed_init": st.booleans(),
}
# Some at a time: nearly all combinations of many are refused.
SOME = st.sets(st.sampled_from(sorted(KNOBS)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: KNOBS[name] for name in sorted(names)})
)


@settings(max_examples=150)
@given(
    nodes=st.sampled_from([1, 2, 3, 16]),
    ranks_per_node=st.sampled_from([1, 2, 4, 8]),
    device=st.sampled_from(["cpu", "cuda"]),
    device_memory=st.sampled_from([None, 20_000, 80 * GIB]),
    knobs=SOME,
)
def test_a_plan_tiles_the_world_or_the_error_names_a_knob(
    nodes: int,
    ranks_per_node: int,
    device: str,
    device_memory: int | None,
    knobs: dict[str, Any],
) -> None:
    cluster = Cluster(
        Topology.uniform(nodes * ranks_per_node, ranks_per_node),
        device,
        device_memory,
        10 * GIB,
    )
    try:
        asked = SmpConfig(**nested(knobs))
        shapes = Shapes.of(Tower(), asked)
        choose = decide_with_smallest_degree if asked.shard_degree == "auto" else decide
        plan = choose(shapes, asked, cluster)
    except ValueError as error:
        assert any(knob in str(error) for knob in SmpConfig.knobs()), error
        return
    for axes in (PARTITION, DATA, GRADIENTS, *((axis,) for axis in Axis)):
        ranks = [rank for group in plan.layout.groups(*axes) for rank in group]
        assert sorted(ranks) == list(range(cluster.topology.world_size))
    # What is in effect is all settled, decides the same again, and nothing of the model
    # is held on to.
    left = {
        knob: value for knob, value in plan.knobs.effective().items() if value == "auto"
    }
    settled_later = {
        "units.modules",
        "checkpoint.verify",
        "planner.optimizer",
        "tensor_parallel.plan",
    }
    assert set(left) <= settled_later | {
        "pipeline.microbatches",
        "pipeline.schedule",
        "pipeline.split",
    }
    again = decide(shapes, plan.knobs, cluster)
    assert dataclasses.replace(again, warnings=()) == dataclasses.replace(
        plan, warnings=(), optimizer=None
    )
    assert again.knobs.effective() == plan.knobs.effective()


def test_a_further_run_sets_its_own_knobs_anew() -> None:
    plan = plan_of(checkpoint={"full_state_dict": True, "verify": "digests"})
    config = knobs_of_next_run(plan, SmpConfig(checkpoint="async"))
    assert (
        config.checkpoint.full_state_dict,
        config.checkpoint.async_save,
        config.checkpoint.verify,
    ) == (
        False,
        True,
        "auto",
    )
    with pytest.raises(
        ValueError,
        match=r"shard_degree=2: this model was sharded before with shard_degree=4",
    ):
        knobs_of_next_run(plan, SmpConfig(shard_degree=2))


def test_what_was_asked_of_a_model_that_came_otherwise_is_a_warning() -> None:
    asked = SmpConfig(reshard_after_forward=False)
    plan = decide(
        Shapes.of(Tower(), asked),
        asked,
        Cluster(Topology.uniform(4, 2)),
        given=GivenSharding((0, 1), False),
    )
    assert [
        line
        for line in plan.warnings
        if line.startswith("reshard_after_forward=False has no effect")
    ]


def test_a_reason_is_of_what_takes_effect() -> None:
    """One rank holds everything: under autocast nothing is gathered in half precision,
    and gradients are float32."""
    asked = SmpConfig(shard_degree=1)
    precision = Precision(torch.bfloat16, "autocast", cast_forward_inputs=False)
    plan = decide(
        Shapes.of(Tower(), asked),
        asked,
        Cluster(Topology.uniform(2, 2)),
        precision=precision,
    )
    assert (
        plan.knobs.reduce_dtype is None
        and plan.knobs.why("reduce_dtype") == "the gradients' own dtype"
    )


def test_nothing_is_settled_outside_of_planning() -> None:
    """`with_resolved` is called by rules, by who knows the layout of a model before,
    and by a face before it asks."""
    allowed = (
        "smp_core/plan/plan.py",
        "smp_core/engine/auto_degree.py",
        "smp_core/engine/decide.py",
        "smp_core/config/config.py",
        "smp_core/entry.py",
        "accelerate_smp/",
    )
    calling = [
        str(path.relative_to(ROOT))
        for package in ("smp_core", "lightning_smp", "accelerate_smp")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"\.with_resolved\(", path.read_text(encoding="utf-8"))
    ]
    assert calling and [path for path in calling if not path.startswith(allowed)] == []


def test_deciding_imports_nothing_that_talks() -> None:
    core = ROOT / "smp_core"
    rules = [path for path in core.rglob("*rules.py") if path.parent.name != "config"]
    deciding = [core / "engine" / "decide.py", core / "engine" / "auto_degree.py"]
    for path in [
        *(core / "plan").rglob("*.py"),
        *(core / "planner").glob("*.py"),
        *rules,
        *deciding,
    ]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"torch\.distributed|smp_core\.cluster\.mesh|device_mesh", text
        ), path.name
