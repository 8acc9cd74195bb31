"""The list of subjects is whole, docs/combinations.md shows what they say of one
another, and `decide` does it.

`python -m tests.core.engine.test_subjects` writes the tables anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import Clash, SmpConfig
from smp_core.engine.decide import decide, lines_of_subjects
from smp_core.engine.subjects import SUBJECTS
from smp_core.fp8.rules import FP8
from smp_core.plan.plan import GivenSharding, Plan, Subject
from smp_core.plan.shapes import GIB, Cluster, Shapes
from smp_core.topology import Topology
from smp_core.torch_facts import kernels
from tests.harness import ROOT

PAGE = ROOT / "docs" / "combinations.md"
BEGIN, END = "<!-- generated: subjects -->\n", "<!-- end of subjects -->"
# Knobs about the run and no subject of it.
OF_THE_RUN = {"plan", "planner", "checkpoint"}


def clashes() -> Iterator[tuple[Subject, Clash[Any]]]:
    return ((subject, clash) for subject in SUBJECTS for clash in subject.apart)


def tables() -> str:
    lines = ["| subject | knobs |", "|---|---|"]
    for subject in SUBJECTS:
        lines.append(
            f"| [{subject.name}]({subject.page}) | {', '.join(f'`{knob}`' for knob in subject.knobs)} |"
        )
    lines += ["", "| | | not together yet |", "|---|---|---|"]
    for one, other in itertools.combinations(SUBJECTS, 2):
        if words := one.beside(other):
            lines.append(f"| {one.name} | {other.name} | {'; '.join(words)} |")
    return "\n".join([*lines, ""])


def written_anew(page: str) -> str:
    before, rest = page.split(BEGIN, 1)
    return before + BEGIN + tables() + END + rest.split(END, 1)[1]


def test_the_page_shows_what_subjects_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written_anew(page), "run: python -m tests.core.engine.test_subjects"


def test_every_knob_is_of_one_subject() -> None:
    owned = [knob for subject in SUBJECTS for knob in subject.knobs]
    assert sorted(owned) == sorted(set(SmpConfig.knobs()) - OF_THE_RUN)


def test_clashes_name_other_subjects() -> None:
    names = {subject.name for subject in SUBJECTS}
    assert len(names) == len(SUBJECTS)
    assert [
        clash.words
        for subject, clash in clashes()
        if clash.other not in names - {subject.name}
    ] == []


def test_a_clash_is_shown_from_both_sides() -> None:
    for one, other in itertools.combinations(SUBJECTS, 2):
        assert sorted(one.beside(other)) == sorted(other.beside(one))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Experts(nn.Module):
    smp_experts, num_experts = True, 4

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.zeros(4, 8, 8))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def plan_of(
    knobs: dict[str, Any],
    device: str = "cuda",
    given: bool = False,
    checkpoints_itself: bool = False,
) -> Plan:
    model = Tower()
    model.gradient_checkpointing = checkpoints_itself  # type: ignore[assignment]
    asked = SmpConfig(**{"shard_degree": 2, **knobs})
    machines = Cluster(Topology.uniform(8, 4), device, host_memory=10 * GIB)
    came = GivenSharding((0, 1), False) if given else None
    return decide(
        Shapes.of(model, SmpConfig() if given else asked), asked, machines, given=came
    )


EXPERT, FROZEN = {"expert_parallel_degree": 2}, {"frozen_storage": "int8"}
TENSOR, PIPELINE = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
OTHER_FP8 = {
    "fp8": {"backend": "torchao", "scaling": "dynamic", "fp8_all_gather": False}
}
ENGINE_FP8 = {
    "fp8": {
        "backend": "transformer_engine",
        "fp8_all_gather": False,
        "amax_history_len": 16,
    }
}
FUSED = {**TENSOR, "tensor_parallel": {"overlap": "fused"}}
# What is asked for in each row of the table: knobs, and what is said of the model.
ASKED: dict[tuple[str, str], dict[str, Any]] = {
    ("sharding", "`fp8` of models that came sharded"): {
        "knobs": {"fp8": True},
        "given": True,
    },
    ("sharding", "`activations.checkpoint` of models that came sharded"): {
        "knobs": {"activations": "full"},
        "given": True,
    },
    ("sharding", "`collectives.symmetric_memory` of models that came sharded"): {
        "knobs": {"collectives": {"symmetric_memory": True}},
        "given": True,
    },
    ("sharding", "models that came sharded"): {
        "knobs": {"context_parallel_degree": 2},
        "given": True,
    },
    ("pipeline parallelism", "FP8 layers of other libraries (`fp8.backend`)"): {
        "knobs": {**PIPELINE, **OTHER_FP8}
    },
    ("pipeline parallelism", "units that some ranks leave out (`units.optional`)"): {
        "knobs": {**PIPELINE, "units": {"optional": ["*"]}}
    },
    ("pipeline parallelism", "`collectives.symmetric_memory`"): {
        "knobs": {**PIPELINE, "collectives": {"symmetric_memory": True}}
    },
    ("pipeline parallelism", "`forward_methods`"): {
        "knobs": {**PIPELINE, "forward_methods": ["score"]}
    },
    ("pipeline parallelism", "models that came sharded"): {
        "knobs": PIPELINE,
        "given": True,
    },
    (
        "pipeline parallelism",
        "`activations.checkpoint` of models that checkpoint themselves",
    ): {
        "knobs": {**PIPELINE, "activations": "full"},
        "checkpoints_itself": True,
    },
    ("tensor parallelism", "`compile.fullgraph`: split layers are not compiled"): {
        "knobs": {**TENSOR, "compile": {"fullgraph": True}}
    },
    ("tensor parallelism", "FP8 layers of other libraries (`fp8.backend`)"): {
        "knobs": {**TENSOR, **OTHER_FP8}
    },
    ("tensor parallelism", "`tensor_parallel.plan='infer'`"): {
        "knobs": {**TENSOR, "tensor_parallel": {"plan": "infer"}, "fp8": True}
    },
    ("tensor parallelism", "products in pieces (`tensor_parallel.overlap`)"): {
        "knobs": {**TENSOR, "tensor_parallel": {"overlap": "pieces"}, "fp8": True}
    },
    (
        "tensor parallelism",
        "`'selective'` recomputation of fused products (`tensor_parallel.overlap='fused'`)",
    ): {"knobs": {**FUSED, "activations": "selective"}},
    ("tensor parallelism", "`collectives.symmetric_memory`"): {
        "knobs": {**TENSOR, "collectives": {"symmetric_memory": True}}
    },
    ("tensor parallelism", "models that came sharded"): {
        "knobs": TENSOR,
        "given": True,
    },
    ("expert parallelism", "`compile.fullgraph`: tokens are sent outside of graphs"): {
        "knobs": {**EXPERT, "compile": {"fullgraph": True}}
    },
    ("expert parallelism", "`collectives.symmetric_memory`"): {
        "knobs": {**EXPERT, "collectives": {"symmetric_memory": True}}
    },
    ("expert parallelism", "models that came sharded with whole experts"): {
        "knobs": EXPERT,
        "given": True,
    },
    ("router balance", "`expert_capacity_factor`"): {
        "knobs": {**TENSOR, "expert_capacity_factor": 1.25}
    },
    (
        "router balance",
        "`expert_capacity_factor` with `compile.fullgraph`: tokens are counted outside of graphs",
    ): {"knobs": {"compile": {"fullgraph": True}, "expert_capacity_factor": 1.25}},
    ("frozen storage", "`fp8`: weights travel in FP8 then"): {
        "knobs": {**FROZEN, "fp8": True}
    },
    (
        "frozen storage",
        "`compression.gather`, where frozen weights travel as codes already",
    ): {"knobs": {**FROZEN, "shard_degree": 8, "compression": {"gather": "int8"}}},
    ("frozen storage", "`collectives.symmetric_memory`"): {
        "knobs": {**FROZEN, "collectives": {"symmetric_memory": True}}
    },
    ("frozen storage", "layers over tensor ranks"): {"knobs": {**FROZEN, **TENSOR}},
    ("frozen storage", "pipeline stages"): {"knobs": {**FROZEN, **PIPELINE}},
    ("frozen storage", "experts that ranks divide"): {"knobs": {**FROZEN, **EXPERT}},
    ("frozen storage", "models that came sharded"): {"knobs": FROZEN, "given": True},
    (
        "compilation",
        "models that came sharded: they are not compiled, with a warning",
    ): {
        "knobs": {"compile": True},
        "given": True,
    },
    (
        "compilation",
        "recomputed blocks (`activations`): they are not compiled, with a warning",
    ): {"knobs": {**TENSOR, "compile": True, "activations": "full"}},
    (
        "compilation",
        "recomputed blocks (`activations`) with experts on several ranks: they are not compiled, with a warning",
    ): {"knobs": {**EXPERT, "compile": True, "activations": "full"}},
    (
        "fp8",
        "recomputation in Transformer Engine's layers (`fp8.backend`), whose scales are others the second time",
    ): {"knobs": {**ENGINE_FP8, "activations": "full"}},
    (
        "fp8",
        "`compression.gather`, where weights travel in FP8 already (`fp8.fp8_all_gather`)",
    ): {"knobs": {"fp8": True, "compression": {"gather": "int8"}}},
}


def test_every_row_is_tried() -> None:
    assert ASKED.keys() == {(subject.name, clash.words) for subject, clash in clashes()}


@pytest.mark.parametrize(
    ("subject", "words"), ASKED, ids=[" ".join(row) for row in ASKED]
)
def test_what_does_not_go_together_is_refused_or_taken_back_with_what_to_write(
    subject: str, words: str
) -> None:
    (clash,) = {
        c.words: c for s, c in clashes() if s.name == subject and c.words == words
    }.values()
    try:
        warned = plan_of(**ASKED[subject, words]).warnings
    except ValueError as error:
        assert clash.instead in str(error) and "with a warning" not in words
    else:
        assert any(
            clash.instead in line and "has no effect" in line for line in warned
        ), warned


def test_what_is_not_in_the_table_is_not_refused() -> None:
    """All subjects at once, as far as the table lets them."""
    together = {
        **TENSOR,
        "context_parallel_degree": 2,
        "activations": "full",
        "fp8": {"fp8_all_gather": False},
        "compression": {"reduce": "int8"},
        "optimizer_shard": "world",
    }
    plan = plan_of(together)
    assert {axis: attrgetter(axis)(plan.layout) for axis in ("tensor", "context")} == {
        "tensor": 2,
        "context": 2,
    }
    assert plan.activations.checkpointed and plan.knobs.fp8 is not None


def test_a_subject_that_is_off_is_asked_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for subject in SUBJECTS:
        if subject.optional:
            monkeypatch.setattr(
                type(subject), "settle", lambda self, draft: asked.append(self.name)
            )
            monkeypatch.setattr(
                type(subject),
                "describe",
                lambda self, plan, made: asked.append(self.name) or [],
            )
    lines_of_subjects(plan_of({}))
    assert asked == []
    lines_of_subjects(plan_of(TENSOR))
    assert asked == ["tensor parallelism"] * 2


def test_what_is_known_of_a_subject_by_default_is_settled_without_asking_it() -> None:
    by_default = plan_of({}).knobs
    assert by_default.router_balance == "global"
    assert by_default.why("router_balance") == "as in one process"
    # With another of its knobs the subject itself comes to the same.
    asked = plan_of({"router_bias_update_rate": 0.1}).knobs
    assert asked.router_balance == "global"
    assert plan_of({"router_balance": "rank"}).knobs.router_balance == "rank"


@pytest.mark.parametrize(
    "knobs", [EXPERT, {"expert_capacity_factor": 1.0}, {"router_bias_update_rate": 0.1}]
)
def test_experts_are_looked_for_where_a_knob_is_about_them(
    knobs: dict[str, Any],
) -> None:
    found = Shapes.of(Tower(), SmpConfig(**knobs)).experts
    assert [(each.name, each.experts) for each in found] == [("experts", 4)]
    assert Shapes.of(Tower(), SmpConfig()).experts == ()


@pytest.mark.parametrize(("capability", "state"), [((9, 0), "ok"), ((8, 0), "note")])
def test_a_subject_looks_at_the_machine(
    capability: tuple[int, int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(kernels, "_CAPABLE", {})
    (found,) = FP8.machine()
    assert (found.topic, found.state) == ("FP8", state) and bool(found.fix) == (
        state == "note"
    )


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
