"""SmpConfig: what it accepts, what it refuses and with which words, and what it remembers."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import logging
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from smp_core.config import SmpConfig
from smp_core.fp8 import Fp8Recipe
from smp_core.knob_recipe import Recipe
from smp_core.knob_rules import READERS, SETTINGS, contradictions
from smp_core.moved_knobs import MOVED
from smp_core.planning.cluster import Cluster
from smp_core.planning.decide import decide
from smp_core.planning.shapes import Shapes
from smp_core.recipes import (
    RECIPES,
    Activations,
    Checkpoint,
    Collectives,
    Compile,
    Compression,
    DelayedInit,
    Pipeline,
    Planner,
    TensorParallel,
    Units,
)
from smp_core.topology import Topology

PACKAGES = ("smp_core", "lightning_smp", "accelerate_smp")
KNOB_FIELDS = [field for field in dataclasses.fields(SmpConfig) if field.init]


def documentation(of: type) -> dict[str, str]:
    """Knob, or field of a recipe -> its paragraph in the Args section of the docstring."""
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
    assert list(documentation(SmpConfig)) == [field.name for field in KNOB_FIELDS] == list(SmpConfig.knobs())
    assert list(READERS) == list(SmpConfig.knobs()) and len(READERS) == 24
    for documented, fields in [
        (documentation(SmpConfig), KNOB_FIELDS),
        *((documentation(recipe), dataclasses.fields(recipe)) for recipe in FIELDS),
    ]:
        assert list(documented) == [field.name for field in fields]
        for field in fields:
            assert "default" in documented[field.name].lower(), field.name
            shown = "none" if field.default == () else str(field.default)
            assert shown in documented[field.name], f"{field.name}: the default {shown} is not in its documentation"


_NAMES = st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.*]{0,8}", fullmatch=True)).map(tuple)
_COUNT_OR_AUTO = st.integers(0, 4) | st.just("auto")
_ONE_OR_AUTO = st.integers(1, 4) | st.just("auto")

FIELDS: dict[type[Recipe], dict[str, Any]] = {
    TensorParallel: {
        "plan": st.sampled_from(["auto", {"*.q_proj": "column", "*.o_proj": "row"}, {"*.qkv": "column:3"}]),
        "sequence_parallel": st.booleans(),
        "across_nodes": st.booleans(),
    },
    Pipeline: {
        "microbatches": _ONE_OR_AUTO,
        "schedule": st.sampled_from(["1f1b", "gpipe"]),
        "split": st.just("auto") | st.lists(st.integers(1, 9), min_size=1).map(tuple),
    },
    Units: {"modules": st.just("auto") | _NAMES, "min_parameters": st.integers(0, 10**12), "optional": _NAMES},
    DelayedInit: {"seed": st.integers(0, 2**40)},
    Activations: {
        "checkpoint": st.sampled_from(["none", "full", "selective", "every:3", {"*.mlp": "full"}]),
        "check": st.booleans(),
        "offload": st.booleans(),
        "loading_horizon": st.integers(1, 9),
        "offload_min_bytes": st.integers(0, 10**9),
        "offload_host_gib": st.none() | st.floats(0.1, 1e4),
    },
    Compile: {
        "mode": st.sampled_from([None, "max-autotune"]),
        "backend": st.sampled_from(["inductor", "aot_eager"]),
        "fullgraph": st.booleans(),
        "dynamic": st.sampled_from([None, True, False]),
        "options": st.sampled_from([None, {"epilogue_fusion": True}]),
    },
    Compression: {
        "gather": st.sampled_from([None, "int8", "fp8"]),
        "gather_inside_nodes": st.booleans(),
        "gather_after_steps": st.integers(0, 1000),
        "gather_exclude": st.lists(st.sampled_from(["*norm*", "*.bias"]), unique=True).map(tuple),
        "reduce": st.sampled_from([None, "int8", "int4", "bf16"]),
        "error_feedback": st.sampled_from([True, False, "auto"]),
    },
    Collectives: {
        "hierarchical": st.booleans() | st.just("auto"),
        "forward_prefetch": _COUNT_OR_AUTO,
        "backward_prefetch": _ONE_OR_AUTO,
        "reduce_scatter_buffers": _ONE_OR_AUTO,
        "separate_reduce_scatter_group": st.booleans(),
        "symmetric_memory": st.booleans(),
        "context_head_groups": _ONE_OR_AUTO,
        "meter": st.booleans(),
    },
    Planner: {
        "memory_headroom": st.floats(0, 1, exclude_max=True),
        "device_memory_gib": st.none() | st.floats(0.01, 1e4),
        "optimizer": st.sampled_from(["auto", "adamw", "sgd-momentum"]),
    },
    Checkpoint: {
        "full_state_dict": st.booleans(),
        "async_save": st.booleans(),
        "verify": st.sampled_from(["auto", "sizes", "digests"]),
        "allow_batch_change": st.booleans(),
        "preemption_grace_s": st.floats(0, 1e4),
    },
}


def some(recipe: type[Recipe]) -> Any:
    """Recipes with some of their fields drawn."""
    return st.fixed_dictionaries({}, optional=FIELDS[recipe]).map(lambda fields: recipe(**fields))


VALUES: dict[str, Any] = {
    "shard_degree": st.integers(1, 64).map(lambda n: n * 6) | st.sampled_from(["node", "world", "auto"]),
    "context_parallel_degree": st.sampled_from([1, 2, 3, 6]),
    "tensor_parallel_degree": st.integers(1, 9),
    "tensor_parallel": some(TensorParallel),
    "pipeline_parallel_degree": st.integers(1, 9),
    "pipeline": some(Pipeline),
    "reshard_after_forward": st.booleans() | st.sampled_from(["auto", 2, 3, 6, "node"]),
    "keep_between_micro_batches": st.sampled_from(["shards", "parameters", "gradients"]),
    "units": some(Units),
    "forward_methods": st.lists(st.sampled_from(["generate", "model.encode"]), unique=True).map(tuple),
    "delayed_init": st.none() | some(DelayedInit),
    "param_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "reduce_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "on_nonfinite_grad_norm": st.sampled_from(["ignore", "skip", "raise"]),
    "optimizer_shard": st.sampled_from(["shard", "world"]),
    "state_offload": st.sampled_from([None, "optimizer", "all"]),
    "activations": some(Activations),
    "compile": st.none() | some(Compile),
    "compression": some(Compression),
    # Weights that travel in FP8 exclude values of two other knobs (tests/core/test_fp8_recipe.py).
    "fp8": st.sampled_from([None, Fp8Recipe(fp8_all_gather=False), Fp8Recipe(fp8_all_gather=False, margin=1)]),
    "chunked_cross_entropy": st.none() | st.integers(1, 10**6),
    "collectives": some(Collectives),
    "planner": some(Planner),
    "checkpoint": some(Checkpoint),
}


def consistent(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values, from the first knob on, that go together."""
    kept: dict[str, Any] = {}
    defaults = {knob: getattr(SmpConfig(), knob) for knob in SmpConfig.knobs()}
    for knob, value in values.items():
        if not any(contradictions(SimpleNamespace(**{**defaults, **kept, knob: value}))):
            kept[knob] = value
    return kept


def as_text(value: Any) -> str:
    """The value as a person writes it into an environment variable."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Recipe):
        return json.dumps(value.to_dict())
    return json.dumps(value) if isinstance(value, (tuple, dict)) else str(value)


@settings(max_examples=60)
@given(values=st.fixed_dictionaries({}, optional=VALUES).map(consistent))
def test_every_way_to_build_gives_the_same_config(values: dict[str, Any], tmp_path_factory: Any) -> None:
    config = SmpConfig(**values)
    assert {knob: getattr(config, knob) for knob in values} == values
    assert SmpConfig.from_dict(config.to_dict()) == config
    assert SmpConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert SmpConfig.from_env({f"SMP_{knob.upper()}": as_text(value) for knob, value in values.items()}) == config
    path = tmp_path_factory.mktemp("yaml") / "smp.yaml"
    path.write_text(yaml.safe_dump({"smp_config": config.to_dict()}))
    assert SmpConfig.from_yaml(path) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_one_file_cannot_be_written_behind_training() -> None:
    with pytest.raises(ValueError, match=r"async_save=True has no effect with checkpoint\.full_state_dict=True"):
        SmpConfig(checkpoint={"async_save": True, "full_state_dict": True})


def test_the_property_test_covers_every_knob() -> None:
    assert list(VALUES) == list(SmpConfig.knobs())
    assert all(list(fields) == list(recipe.readers()) for recipe, fields in FIELDS.items())
    assert set(FIELDS) == {*RECIPES.values(), DelayedInit, Compile}


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        ("shard_degree", 0, "'node', 'world', 'auto'"),
        ("shard_degree", True, "an integer of at least 1"),
        ("shard_degree", "4.0", "an integer of at least 1"),
        ("shard_degree", 4.0, "an integer of at least 1"),
        ("shard_degree", "wolrd", "did you mean 'world'"),
        ("shard_degree", None, "an integer of at least 1"),
        ("context_parallel_degree", "-2", "an integer of at least 1"),
        ("reshard_after_forward", 1, "true, false, an integer of at least 2, 'node', 'auto'"),
        ("units", "Block,Head", "JSON list"),
        ("units", ["Block", 3], "a list of class names or globs"),
        ("units", '["Block"', "a list of class names or globs"),
        ("units", torch.nn.Linear, "a list of class names or globs"),
        ("forward_methods", [""], "none of them empty"),
        ("delayed_init", 1, "true, false"),
        ("delayed_init", "ja", "true, false"),
        ("param_dtype", "bf16", "'bfloat16'"),
        ("param_dtype", torch.int8, "'bfloat16'"),
        ("on_nonfinite_grad_norm", "skp", "did you mean 'skip'"),
        ("activations", "every:0", "'every:N'"),
        ("activations", "ful", "did you mean 'full'"),
        ("compression", "int9", "did you mean 'int8'"),
        ("checkpoint", "asnc", "did you mean 'async'"),
        ("keep_between_micro_batches", "gradient", "did you mean 'gradients'"),
        ("planner", None, "a mapping of fields (memory_headroom, device_memory_gib, optimizer)"),
        ("collectives", "flat", "write for example collectives={'hierarchical': False"),
    ],
)
def test_a_wrong_value_is_refused_with_knob_value_and_what_is_allowed(knob: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        SmpConfig(**{knob: value})
    complaint = str(caught.value)
    assert complaint.startswith(f"{knob}={value!r} is not allowed; allowed: ")
    assert says in complaint


@pytest.mark.parametrize(
    ("knob", "field", "value", "says"),
    [
        ("collectives", "hierarchical", "maybe", "true, false, 'auto'"),
        ("collectives", "forward_prefetch", -1, "write collectives={'forward_prefetch': ...}"),
        ("units", "min_parameters", -1, "write for example units={'min_parameters': 0}"),
        ("planner", "memory_headroom", 1.0, "a number in [0, 1)"),
        ("planner", "memory_headroom", float("nan"), "a number in [0, 1)"),
        ("planner", "device_memory_gib", 0, "a number above 0, none"),
        ("activations", "checkpoint", "every:0", "'every:N'"),
        ("activations", "offload", 1, "write activations={'offload': true} or activations={'offload': false}"),
        ("delayed_init", "seed", "", "an integer of at least 0"),
        ("compression", "gather", "int4", "allowed: none, 'int8', 'fp8'"),
        ("compression", "reduce", "fp8", "write compression={'reduce': ...}"),
        ("checkpoint", "verify", "size", "did you mean 'sizes'"),
    ],
)
def test_a_wrong_value_of_a_field_is_refused_by_its_dotted_name(knob: str, field: str, value: Any, says: str) -> None:
    """Wherever it is written: in a mapping, in JSON, in the recipe itself."""
    recipe = {**RECIPES, "delayed_init": DelayedInit}[knob]
    for build in (lambda: SmpConfig(**{knob: {field: value}}), lambda: recipe(**{field: value})):
        with pytest.raises(ValueError) as caught:
            build()
        complaint = str(caught.value)
        assert complaint.startswith(f"{knob}.{field}={value!r} is not allowed; allowed: ") and says in complaint


@pytest.mark.parametrize(
    ("knob", "written", "meant"),
    [
        ("activations", "full", Activations(checkpoint="full")),
        ("activations", "every:2", Activations(checkpoint="every:2")),
        ("activations", {"offload": "true", "checkpoint": "full"}, Activations(checkpoint="full", offload=True)),
        ("activations", '{"checkpoint": {"*.mlp": "full"}}', Activations(checkpoint={"*.mlp": "full"})),
        ("compile", True, Compile()),
        ("compile", "max-autotune", Compile(mode="max-autotune")),
        ("compile", "off", None),
        ("compression", "none", Compression()),
        ("compression", None, Compression()),
        ("compression", "int8", Compression(gather="int8", reduce="int8")),
        ("compression", "fp8", Compression(gather="fp8")),
        ("compression", "int4", Compression(reduce="int4")),
        ("compression", "bf16", Compression(reduce="bf16")),
        ("units", ["Block"], Units(modules=("Block",))),
        ("units", "Block", Units(modules=("Block",))),
        ("units", '["Block", "head"]', Units(modules=("Block", "head"))),
        ("units", {"min_parameters": "7"}, Units(min_parameters=7)),
        ("delayed_init", True, DelayedInit()),
        ("delayed_init", "on", DelayedInit()),
        ("delayed_init", False, None),
        ("delayed_init", "none", None),
        ("delayed_init", {"seed": 3}, DelayedInit(seed=3)),
        ("checkpoint", "sharded", Checkpoint()),
        ("checkpoint", "full", Checkpoint(full_state_dict=True)),
        ("checkpoint", "async", Checkpoint(async_save=True)),
        ("collectives", {"hierarchical": False}, Collectives(hierarchical=False)),
        ("planner", '{"optimizer": "SGD"}', Planner(optimizer="sgd")),
    ],
    ids=lambda value: str(value),
)
def test_a_word_a_mapping_and_a_recipe_are_the_same(knob: str, written: Any, meant: Any) -> None:
    config = SmpConfig(**{knob: written})
    assert getattr(config, knob) == meant
    assert SmpConfig(**{knob: meant}) == config
    if isinstance(written, str):
        assert SmpConfig.from_env({f"SMP_{knob.upper()}": written}) == config


def test_an_unknown_field_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"unknown field 'gathr' of compression; did you mean 'gather'"):
        SmpConfig(compression={"gathr": "int8"})
    with pytest.raises(ValueError, match=r"unknown field 'chekpoint' of activations; did you mean 'checkpoint'"):
        SmpConfig(activations={"chekpoint": "full"})
    with pytest.raises(ValueError, match=r"unknown field 'qqq' of checkpoint; known: full_state_dict, async_save"):
        SmpConfig(checkpoint={"qqq": 1})
    with pytest.raises(ValueError, match=r"write activations=\{'checkpoint': \{'\*\.mlp': 'full'\}\}"):
        SmpConfig(activations={"*.mlp": "full"})
    with pytest.raises(ValueError, match=r"is no JSON .*write for example checkpoint='\{"):
        SmpConfig(checkpoint="{async")


def test_text_and_torch_objects_are_read_where_they_mean_one_thing() -> None:
    config = SmpConfig(
        shard_degree="4",  # type: ignore[arg-type]
        delayed_init="TRUE",
        units='["GPT2Block", "head"]',
        forward_methods="generate",  # type: ignore[arg-type]
        param_dtype=torch.bfloat16,  # type: ignore[arg-type]
        reduce_dtype="none",  # type: ignore[arg-type]
        planner={"memory_headroom": "2.5e-1"},
    )
    assert (config.shard_degree, config.delayed_init, config.units) == (
        4,
        DelayedInit(),
        Units(modules=("GPT2Block", "head")),
    )
    assert (config.forward_methods, config.param_dtype, config.reduce_dtype) == (("generate",), "bfloat16", None)
    assert config.planner.memory_headroom == 0.25


def test_units_take_a_function() -> None:
    def rule(name: str, module: torch.nn.Module) -> bool:
        return name.endswith("block")

    for config in (SmpConfig(units=rule), SmpConfig(units={"modules": rule})):
        assert config.units.modules is rule
        assert str(config.effective()["units.modules"]).endswith("rule")


def test_context_degree_has_to_fit_into_the_partition_group() -> None:
    with pytest.raises(ValueError, match=r"context_parallel_degree=8 is larger than shard_degree=4.*shard_degree=8"):
        SmpConfig(shard_degree=4, context_parallel_degree=8)
    with pytest.raises(ValueError, match="context_parallel_degree=4 does not divide shard_degree=6; allowed: 1, 2, 3"):
        SmpConfig(shard_degree=6, context_parallel_degree=4)
    assert SmpConfig(shard_degree=8, context_parallel_degree=8).context_parallel_degree == 8
    assert SmpConfig(shard_degree="node", context_parallel_degree=4)  # the layout says how many ranks that is


def test_reshard_degree_has_to_divide_the_partition_group() -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward=4 does not divide shard_degree=6.*2, 3, 6"):
        SmpConfig(shard_degree=6, reshard_after_forward=4)


def test_kept_parameters_are_not_freed_after_forward() -> None:
    for forward in (True, 2, "node"):
        with pytest.raises(ValueError, match=r"='parameters' keeps .*write reshard_after_forward='auto'"):
            SmpConfig(reshard_after_forward=forward, keep_between_micro_batches="parameters", shard_degree=4)
    assert SmpConfig(reshard_after_forward=False, keep_between_micro_batches="parameters")


def test_a_misspelt_knob_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown knob 'shard_degre'; did you mean 'shard_degree'"):
        SmpConfig.from_dict({"shard_degre": 2})
    with pytest.raises(ValueError, match="did you mean 'context_parallel_degree'"):
        SmpConfig.from_dict({"context-parallel-deg": 2})
    with pytest.raises(ValueError, match="unknown knob 'shard_degre'; did you mean 'shard_degree'"):
        SmpConfig(shard_degre=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"unknown knob 'qqq'; none is like it; docs/configuration.md lists them"):
        SmpConfig.from_dict({"qqq": 2})


def test_an_option_of_smp_among_the_knobs_is_sent_to_its_reader() -> None:
    with pytest.raises(ValueError, match=r"'hybrid_shard_degree' is an option of SageMaker SMP.*from_smp_parameters"):
        SmpConfig.from_dict({"hybrid_shard_degree": 8})


def test_yaml_section_stands_beside_other_sections(tmp_path: Path) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\nsmp_config:\n  shard_degree: node\n  planner:\n    memory_headroom: 3e-1\n"
    )
    config = SmpConfig.from_yaml(path)
    assert (config.shard_degree, config.planner.memory_headroom) == ("node", 0.3)
    path.write_text("shard_degree: 2\nunits: [Block]\n")
    assert SmpConfig.from_yaml(str(path)).units == Units(modules=("Block",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compute_environment: LOCAL_MACHINE\n", "no `smp_config:` section.*found: compute_environment"),
        ("", "no mapping of knobs"),
        ("- shard_degree\n", "no mapping of knobs"),
        ("smp_config: 4\n", "smp_config=4 is not a mapping"),
        ("smp_config: [\n", "not a valid YAML file"),
        ("smp_config:\n  shard_degree: 2\n  shard_degree: 4\n", "'shard_degree' is written twice"),
        ("smp_config:\n  shard_degre: 2\n", "did you mean 'shard_degree'"),
        ("shard_degree: 2\nmixed_precision: bf16\n", "'mixed_precision' is an argument of FSDP, not a knob"),
        ("smp_config:\n  shard_degree: 2.5\n", "shard_degree=2.5 is not allowed"),
        ("smp_config: {shard_degree: 2, context_parallel_degree: 4}\n", "larger than shard_degree=2"),
    ],
)
def test_a_yaml_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        SmpConfig.from_yaml(path)
    assert str(path) in str(caught.value)


def test_a_missing_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the configuration file .*nowhere.yaml.*No such file"):
        SmpConfig.from_yaml(tmp_path / "nowhere.yaml")


def test_environment_overrides_its_config_file(tmp_path: Path) -> None:
    path = tmp_path / "smp.yaml"
    # Each alone is sound; together with the file's own shard degree the context degree would be refused.
    path.write_text("smp_config: {shard_degree: 2, delayed_init: {seed: 7}, context_parallel_degree: 4}\n")
    environ = {"SMP_CONFIG_FILE": str(path), "SMP_SHARD_DEGREE": "8", "SMP_RANKS_PER_NODE": "2", "HOME": "/nowhere"}
    config = SmpConfig.from_env(environ)
    assert (config.shard_degree, config.delayed_init, config.context_parallel_degree) == (8, DelayedInit(seed=7), 4)
    assert (config.why("shard_degree"), config.why("delayed_init")) == ("SMP_SHARD_DEGREE", "smp.yaml")


def test_a_variable_that_some_part_reads_is_not_called_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Every whole SMP_* name that stands as text in the packages, besides those of knobs."""
    root = Path(__file__).resolve().parents[2]
    sources = [path.read_text() for package in PACKAGES for path in (root / package).rglob("*.py")]
    read = {name for source in sources for name in re.findall(r'"(SMP_[A-Z_]*[A-Z])"', source)}
    assert {"SMP_LINKS", "SMP_RANKS_PER_NODE"} <= read
    others = {name: "here" for name in read if name.removeprefix("SMP_").lower() not in READERS}
    SmpConfig.from_env({name: value for name, value in others.items() if name != "SMP_CONFIG_FILE"})
    assert caplog.messages == []
    page = (root / "docs" / "configuration.md").read_text()
    assert [name for name in sorted(others) if f"`{name}" not in page] == []


def test_environment_is_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_ON_NONFINITE_GRAD_NORM", "skip")
    assert SmpConfig.from_env().on_nonfinite_grad_norm == "skip"


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="SMP_SHARD_DEGRE; did you mean SMP_SHARD_DEGREE"):
        SmpConfig.from_env({"SMP_SHARD_DEGRE": "4"})
    with pytest.raises(ValueError, match="SMP_shard_degree; did you mean SMP_SHARD_DEGREE"):
        SmpConfig.from_env({"SMP_shard_degree": "4"})
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert SmpConfig.from_env({"SMP_NCCL_THROTTLE_LIMIT": "3"}) == SmpConfig()
    assert "SMP_NCCL_THROTTLE_LIMIT" in caplog.text


def test_a_resolved_knob_remembers_what_was_asked_and_why_it_changed() -> None:
    asked = SmpConfig(collectives={"hierarchical": True})
    config = asked.with_resolved("shard_degree", 4, "smallest degree that fits 80 GiB")
    config = config.with_resolved("collectives.hierarchical", False, "the group stays inside one node")
    again = config.with_resolved("shard_degree", 8, "grown")
    assert (config.shard_degree, config.asked("shard_degree")) == (4, "auto")
    assert (again.shard_degree, again.asked("shard_degree"), again.why("shard_degree")) == (8, "auto", "grown")
    assert config.effective() == {**asked.effective(), "shard_degree": 4, "collectives.hierarchical": False}
    assert (config.asked("collectives"), config.asked("collectives.hierarchical")) == (asked.collectives, True)
    assert config.why("collectives.hierarchical") == config.why("collectives") == "the group stays inside one node"
    assert asked.shard_degree == "auto" and asked.collectives.hierarchical is True, "the original is unchanged"
    assert SmpConfig.from_dict(again.to_dict()) == asked, "to_dict gives what was asked for"
    assert pickle.loads(pickle.dumps(config)).asked("shard_degree") == "auto"
    assert SmpConfig().with_resolved("param_dtype", "float64", "64-true").param_dtype == "float64"
    with pytest.raises(ValueError, match="did you mean 'shard_degree'"):
        asked.with_resolved("shard_degre", 4, "typo")


def test_effective_is_plain_json_for_loggers() -> None:
    effective = SmpConfig(units=["Block"], fp8=Fp8Recipe(margin=1)).effective()
    assert list(effective) == list(SmpConfig.settings()) == list(SETTINGS)
    assert json.loads(json.dumps(effective))["units.modules"] == ["Block"]
    assert effective["fp8"] == "Fp8Recipe(margin=1)"


def test_the_table_shows_what_is_not_at_its_default_with_reasons_and_names_the_rest() -> None:
    config = SmpConfig.from_env({"SMP_SHARD_DEGREE": "auto", "SMP_PLANNER": '{"optimizer": "sgd"}'})
    config = config.with_resolved("shard_degree", 4, "smallest that fits")
    console = Console(width=200, file=io.StringIO())
    with console.capture() as printed:
        console.print(config.effective_table())
    lines = printed.get().splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := _cells(line)) and cells[0] in SmpConfig.settings()}
    caption = " ".join(line.strip() for line in lines if not _cells(line))
    assert set(rows) == {"shard_degree", "planner.optimizer"}
    assert all(f"{knob}=" in caption for knob in SmpConfig.settings() if knob not in rows)
    assert rows["shard_degree"] == ["auto", "4", "smallest that fits (asked by SMP_SHARD_DEGREE)"]
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


# Former knob -> a value that was allowed, and how it is written now.
FORMER: dict[str, tuple[Any, str]] = {
    "context_head_groups": (2, "collectives={'context_head_groups': 2}"),
    "hierarchical": (False, "collectives={'hierarchical': False}"),
    "reshard_after_backward": (False, "keep_between_micro_batches='parameters'"),
    "reduce_every_micro_batch": (False, "keep_between_micro_batches='gradients', reshard_after_forward=True"),
    "forward_prefetch": (1, "collectives={'forward_prefetch': 1}"),
    "backward_prefetch": (2, "collectives={'backward_prefetch': 2}"),
    "reduce_scatter_buffers": (2, "collectives={'reduce_scatter_buffers': 2}"),
    "separate_reduce_scatter_group": (True, "collectives={'separate_reduce_scatter_group': True}"),
    "symmetric_memory": (True, "collectives={'symmetric_memory': True}"),
    "wrap": (["Block"], "units=['Block']"),
    "wrap_min_parameters": (1000, "units={'min_parameters': 1000}"),
    "init_seed": (3, "delayed_init={'seed': 3}"),
    "replica_reduce_dtype": ("bf16", "compression='bf16'"),
    "memory_headroom": (0.2, "planner={'memory_headroom': 0.2}"),
    "device_memory_gib": (40.0, "planner={'device_memory_gib': 40.0}"),
    "planned_optimizer": ("sgd", "planner={'optimizer': 'sgd'}"),
    "save_full_state_dict": (True, "checkpoint='full'"),
    "async_save": (True, "checkpoint='async'"),
    "verify_checkpoint": ("digests", "checkpoint={'verify': 'digests'}"),
    "allow_batch_change": (True, "checkpoint={'allow_batch_change': True}"),
    "comm_meter": (False, "collectives={'meter': False}"),
    "activation_checkpointing": ("full", "activations='full'"),
    "activation_checkpointing_check": (True, "activations={'check': True}"),
    "activation_offloading": (True, "activations={'offload': True}"),
    "activation_loading_horizon": (1, "activations={'loading_horizon': 1}"),
    "activation_offloading_min_bytes": (0, "activations={'offload_min_bytes': 0}"),
    "activation_offloading_host_gib": (2.0, "activations={'offload_host_gib': 2.0}"),
    "quantized_all_gather": ("fp8", "compression='fp8'"),
    "quantize_inside_nodes": (True, "compression={'gather_inside_nodes': True}"),
    "quantize_after_steps": (10, "compression={'gather_after_steps': 10}"),
    "quantize_exclude": (["*.bias"], "compression={'gather_exclude': ['*.bias']}"),
    "quantized_reduce": ("int8", "compression={'reduce': 'int8'}"),
    "error_feedback": (False, "compression={'error_feedback': False}"),
}


def test_every_former_knob_has_an_example_here_and_a_place_that_exists() -> None:
    assert FORMER.keys() == MOVED.keys()
    fields = {f"{recipe.KNOB}.{field}" for recipe in FIELDS for field in recipe.readers()}
    assert set(MOVED.values()) <= fields | {"keep_between_micro_batches"}
    assert not MOVED.keys() & set(READERS)


@pytest.mark.parametrize("former", FORMER)
def test_a_former_knob_is_answered_with_the_new_spelling(former: str, tmp_path: Path) -> None:
    value, now = FORMER[former]
    said = f"{former}={value!r} is now written {now}"
    path = tmp_path / "smp.yaml"
    for text in (yaml.safe_dump({"smp_config": {former: value}}), yaml.safe_dump({former: value})):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)):
            SmpConfig.from_yaml(path)
    for build in (lambda: SmpConfig(**{former: value}), lambda: SmpConfig.from_dict({former: value})):
        with pytest.raises(ValueError, match=re.escape(said)):
            build()
    # What is said can be typed, and says what was meant; the environment's spelling is read back too.
    if "offload'" not in now and "gather_" not in now:  # these two need another field beside them
        SmpConfig(**eval(f"dict({now})"))
    variable = f"SMP_{former.upper()}"
    with pytest.raises(ValueError, match=f"environment variable {variable}=.* is now written SMP_") as caught:
        SmpConfig.from_env({variable: as_text(value) if not isinstance(value, list) else json.dumps(value)})
    assert all(f"SMP_{knob.upper()}=" in str(caught.value) for knob in re.findall(r"(\w+)=", now))


def test_several_former_knobs_become_one_value() -> None:
    with pytest.raises(ValueError, match=re.escape("is now written compression='int8', activations={'checkpoint'")):
        SmpConfig(
            quantized_all_gather="int8",  # type: ignore[call-arg]
            activation_checkpointing="full",
            quantized_reduce="int8",
            activation_offloading=True,
        )
    both = {"reshard_after_forward": False, "reshard_after_backward": False, "reduce_every_micro_batch": False}
    with pytest.raises(ValueError, match=r"is now written keep_between_micro_batches='gradients'$"):
        SmpConfig.from_dict(both)


# keep_between_micro_batches, reshard_after_forward -> in effect on two nodes of two ranks: what is kept after forward,
# whether parameters stay, whether gradients are held; None: refused.
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
        return SmpConfig(keep_between_micro_batches=kept, reshard_after_forward=forward, **more)

    expected = KEPT[kept, forward]
    if expected is None:
        with pytest.raises(ValueError, match=f"reshard_after_forward={forward!r} frees them"):
            knobs()
        return
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def decided(asked: SmpConfig, ranks_per_node: int = 2) -> Any:
        return decide(Shapes.of(model, asked), asked, Cluster(Topology.uniform(4, ranks_per_node)))

    plan = decided(knobs(shard_degree=4))
    assert (plan.knobs.reshard_after_forward, plan.keeps_parameters, plan.keeps_gradients) == expected
    # One rank per node: a copy for the node is a whole one, which is freed between micro-batches all the same.
    if forward == "node":
        alone = decided(knobs(shard_degree=4), 1)
        assert (alone.knobs.reshard_after_forward, alone.keeps_parameters) == (False, False)
    # Nothing is gathered or reduced in a group of one; FSDP2 still casts where a dtype is asked for.
    if forward != 2:
        plain, cast = decided(knobs(shard_degree=1)), decided(knobs(shard_degree=1, param_dtype="bfloat16"))
        assert (plain.keeps_parameters, plain.keeps_gradients, cast.keeps_gradients) == (False, False, False)
        assert cast.keeps_parameters == (kept != "shards" and forward in ("auto", False))
