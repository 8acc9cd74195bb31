"""SmpConfig: its documentation, its ways to be built, what it remembers and shows, and
what knobs mean together."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import pickle
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st
from rich.console import Console

from smp_core.cluster.layout import DEGREES
from smp_core.config import SmpConfig
from smp_core.config.plan_recipes import AutoPlan
from smp_core.config.recipes import RECIPES, Compile, DelayedInit
from smp_core.engine.decide import decide
from smp_core.fp8 import Fp8Recipe
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.topology import Topology
from tests.core.knob_examples import FIELDS, VALUES, as_text, consistent

KNOB_FIELDS = [field for field in dataclasses.fields(SmpConfig) if field.init]


def documentation(of: type) -> dict[str, str]:
    """Knob, or field of a recipe -> its paragraph in the Args section of the
    docstring."""
    docstring = inspect.getdoc(of) or ""
    section = docstring.split("Args:\n")[1].split("Raises:")[0]
    paragraphs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            paragraphs[name] = text
        elif line.strip():
            paragraphs[name] += " " + line.strip()
    return paragraphs


def test_every_knob_is_documented_with_its_default() -> None:
    assert (
        list(documentation(SmpConfig))
        == [field.name for field in KNOB_FIELDS]
        == list(SmpConfig.knobs())
    )
    # Besides degrees.
    assert (
        len(set(SmpConfig.knobs()) - {*DEGREES.values(), "expert_parallel_degree"})
        == 27
    )
    for documented, fields in [
        (documentation(SmpConfig), KNOB_FIELDS),
        *((documentation(recipe), dataclasses.fields(recipe)) for recipe in FIELDS),
    ]:
        assert list(documented) == [field.name for field in fields]
        for field in fields:
            assert "default" in documented[field.name].lower(), field.name
            shown = "none" if field.default == () else str(field.default)
            assert shown in documented[field.name], (
                f"{field.name}: the default {shown} is not in its documentation"
            )


@settings(max_examples=25)
@given(values=st.fixed_dictionaries({}, optional=VALUES).map(consistent))
def test_every_way_to_build_gives_the_same_config(
    values: dict[str, Any], tmp_path_factory: Any
) -> None:
    assert_every_way(values, tmp_path_factory)


@pytest.mark.slow
@settings(max_examples=200)
@given(values=st.fixed_dictionaries({}, optional=VALUES).map(consistent))
def test_every_way_to_build_more_gives_the_same_config(
    values: dict[str, Any], tmp_path_factory: Any
) -> None:
    assert_every_way(values, tmp_path_factory)


def assert_every_way(values: dict[str, Any], tmp_path_factory: Any) -> None:
    config = SmpConfig(**values)
    assert {knob: getattr(config, knob) for knob in values} == values
    assert SmpConfig.from_dict(config.to_dict()) == config
    assert SmpConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (
        SmpConfig.from_env(
            {f"SMP_{knob.upper()}": as_text(value) for knob, value in values.items()}
        )
        == config
    )
    path = tmp_path_factory.mktemp("yaml") / "smp.yaml"
    path.write_text(yaml.safe_dump({"smp_config": config.to_dict()}))
    assert SmpConfig.from_yaml(path) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_property_test_covers_every_knob() -> None:
    assert list(VALUES) == list(SmpConfig.knobs())
    assert all(
        list(fields) == list(recipe.readers()) for recipe, fields in FIELDS.items()
    )
    assert set(FIELDS) == {*RECIPES.values(), DelayedInit, Compile, AutoPlan}


def test_a_resolved_knob_remembers_what_was_asked_and_why_it_changed() -> None:
    asked = SmpConfig(collectives={"hierarchical": True})
    config = asked.with_resolved("shard_degree", 4, "smallest degree that fits 80 GiB")
    config = config.with_resolved(
        "collectives.hierarchical", False, "the group stays inside one node"
    )
    again = config.with_resolved("shard_degree", 8, "grown")
    assert (config.shard_degree, config.asked("shard_degree")) == (4, "auto")
    assert (
        again.shard_degree,
        again.asked("shard_degree"),
        again.why("shard_degree"),
    ) == (8, "auto", "grown")
    assert config.effective() == {
        **asked.effective(),
        "shard_degree": 4,
        "collectives.hierarchical": False,
    }
    assert (config.asked("collectives"), config.asked("collectives.hierarchical")) == (
        asked.collectives,
        True,
    )
    assert (
        config.why("collectives.hierarchical")
        == config.why("collectives")
        == "the group stays inside one node"
    )
    assert asked.shard_degree == "auto" and asked.collectives.hierarchical is True, (
        "the original is unchanged"
    )
    assert SmpConfig.from_dict(again.to_dict()) == asked, (
        "to_dict gives what was asked for"
    )
    assert pickle.loads(pickle.dumps(config)).asked("shard_degree") == "auto"
    assert (
        SmpConfig().with_resolved("param_dtype", "float64", "64-true").param_dtype
        == "float64"
    )
    with pytest.raises(ValueError, match="did you mean 'shard_degree'"):
        asked.with_resolved("shard_degre", 4, "typo")


def test_effective_is_plain_json_for_loggers() -> None:
    effective = SmpConfig(units=["Block"], fp8=Fp8Recipe(margin=1)).effective()
    assert list(effective) == list(SmpConfig.settings())
    assert json.loads(json.dumps(effective))["units.modules"] == ["Block"]
    assert effective["fp8"] == "Fp8Recipe(margin=1)"


def test_the_table_shows_what_is_not_at_its_default_with_reasons_and_names_the_rest() -> (
    None
):
    config = SmpConfig.from_env(
        {"SMP_SHARD_DEGREE": "auto", "SMP_PLANNER": '{"optimizer": "sgd"}'}
    )
    config = config.with_resolved("shard_degree", 4, "smallest that fits")
    console = Console(width=200, file=io.StringIO())
    with console.capture() as printed:
        console.print(config.effective_table())
    lines = printed.get().splitlines()
    rows = {
        cells[0]: cells[1:]
        for line in lines
        if (cells := _cells(line)) and cells[0] in SmpConfig.settings()
    }
    caption = " ".join(line.strip() for line in lines if not _cells(line))
    assert set(rows) == {"shard_degree", "planner.optimizer"}
    assert all(
        f"{knob}=" in caption for knob in SmpConfig.settings() if knob not in rows
    )
    assert rows["shard_degree"] == [
        "auto",
        "4",
        "smallest that fits (asked by SMP_SHARD_DEGREE)",
    ]
    assert rows["planner.optimizer"] == ["sgd", "sgd", "SMP_PLANNER"]
    assert "units.modules=auto," in caption


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_the_config_is_frozen_and_hashable() -> None:
    config = SmpConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.shard_degree = 4  # type: ignore[misc]
    assert hash(config) == hash(SmpConfig())
    with pytest.raises(TypeError):
        SmpConfig(4)  # type: ignore[misc]  # knobs are keywords


# keep_between_micro_batches, reshard_after_forward -> in effect on two nodes of two
# ranks: what is kept after forward, whether parameters stay, whether gradients are
# held; None: refused.
KEPT: dict[tuple[str, Any], tuple[Any, bool, bool] | None] = {
    ("shards", "auto"): (True, False, False),
    ("shards", True): (True, False, False),
    ("shards", False): (False, False, False),
    ("shards", "node"): (2, False, False),
    ("shards", 2): (2, False, False),
    ("parameters", "auto"): (False, True, False),
    ("parameters", True): None,
    ("parameters", False): (False, True, False),
    ("parameters", "node"): None,
    ("parameters", 2): None,
    ("gradients", "auto"): (False, True, True),
    ("gradients", True): (True, False, True),
    ("gradients", False): (False, True, True),
    ("gradients", "node"): (2, False, True),
    ("gradients", 2): (2, False, True),
}


@pytest.mark.parametrize(("kept", "forward"), KEPT, ids=str)
def test_what_is_kept_between_micro_batches(kept: str, forward: Any) -> None:
    def knobs(**more: Any) -> SmpConfig:
        return SmpConfig(
            keep_between_micro_batches=kept, reshard_after_forward=forward, **more
        )

    expected = KEPT[kept, forward]
    if expected is None:
        with pytest.raises(
            ValueError, match=f"reshard_after_forward={forward!r} frees them"
        ):
            knobs()
        return
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def decided(asked: SmpConfig, ranks_per_node: int = 2) -> Any:
        return decide(
            Shapes.of(model, asked), asked, Cluster(Topology.uniform(4, ranks_per_node))
        )

    plan = decided(knobs(shard_degree=4))
    assert (
        plan.knobs.reshard_after_forward,
        plan.keeps_parameters,
        plan.keeps_gradients,
    ) == expected
    # One rank per node: a copy for the node is a whole one, which is freed between
    # micro-batches all the same.
    if forward == "node":
        alone = decided(knobs(shard_degree=4), 1)
        assert (alone.knobs.reshard_after_forward, alone.keeps_parameters) == (
            False,
            False,
        )
    # Nothing is gathered or reduced in a group of one; FSDP2 still casts where a dtype
    # is asked for.
    if forward != 2:
        plain, cast = (
            decided(knobs(shard_degree=1)),
            decided(knobs(shard_degree=1, param_dtype="bfloat16")),
        )
        assert (
            plain.keeps_parameters,
            plain.keeps_gradients,
            cast.keeps_gradients,
        ) == (False, False, False)
        assert cast.keeps_parameters == (
            kept != "shards" and forward in ("auto", False)
        )


def test_what_is_asked_anew_forgets_what_it_had_become() -> None:
    settled = SmpConfig(shard_degree="node").with_resolved("shard_degree", 4, "4 ranks")
    settled = settled.with_resolved("optimizer_shard", "shard", "one replica")
    anew = settled.with_asked(shard_degree="8")
    assert (
        anew.shard_degree,
        anew.asked("shard_degree"),
        anew.why("shard_degree"),
    ) == (8, 8, "as asked")
    assert anew.why(
        "optimizer_shard"
    ) == "one replica" and anew.unresolved == SmpConfig(shard_degree=8)
    assert settled.shard_degree == 4 and settled.unresolved == SmpConfig(
        shard_degree="node"
    )
    with pytest.raises(ValueError, match="context_parallel_degree=3 does not divide"):
        settled.with_asked(shard_degree=4, context_parallel_degree=3)
