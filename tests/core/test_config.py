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
from smp_core.knob_rules import NOT_BUILT, READERS, contradictions

PACKAGES = ("smp_core", "lightning_smp", "accelerate_smp")
KNOB_FIELDS = [field for field in dataclasses.fields(SmpConfig) if field.init]


def documentation() -> dict[str, str]:
    """Knob -> its paragraph in the Args section of SmpConfig's docstring."""
    docstring = inspect.getdoc(SmpConfig) or ""
    section = docstring.split("Args:\n")[1].split("Raises:")[0]
    paragraphs: dict[str, str] = {}
    knob = ""
    for line in section.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            knob, _, text = line.strip().partition(": ")
            paragraphs[knob] = text
        elif line.strip():
            paragraphs[knob] += " " + line.strip()
    return paragraphs


def test_every_knob_is_documented_with_its_default() -> None:
    documented = documentation()
    assert list(documented) == [field.name for field in KNOB_FIELDS] == list(READERS) == list(SmpConfig.knobs())
    for field in KNOB_FIELDS:
        assert "default" in documented[field.name].lower(), field.name
        shown = "none" if field.default == () else str(field.default)
        assert shown in documented[field.name], f"{field.name}: the default {shown} is not in its documentation"


VALUES: dict[str, Any] = {
    "shard_degree": st.integers(1, 64).map(lambda n: n * 6) | st.sampled_from(["node", "world", "auto"]),
    "context_parallel_degree": st.sampled_from([1, 2, 3, 6]),
    "context_head_groups": st.one_of(st.just("auto"), st.integers(1, 8)),
    "tensor_parallel_degree": st.integers(1, 9),
    "pipeline_parallel_degree": st.integers(1, 9),
    "hierarchical": st.booleans() | st.just("auto"),
    "reshard_after_forward": st.booleans() | st.sampled_from([2, 3, 6, "node"]),
    "reshard_after_backward": st.booleans(),
    "reduce_every_micro_batch": st.booleans(),
    "forward_prefetch": st.integers(0, 4) | st.just("auto"),
    "backward_prefetch": st.integers(1, 4) | st.just("auto"),
    "reduce_scatter_buffers": st.integers(1, 4) | st.just("auto"),
    "separate_reduce_scatter_group": st.booleans(),
    "symmetric_memory": st.booleans(),
    "wrap": st.just("auto") | st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.*]{0,8}", fullmatch=True)).map(tuple),
    "wrap_min_parameters": st.integers(0, 10**12),
    "forward_methods": st.lists(st.sampled_from(["generate", "model.encode"]), unique=True).map(tuple),
    "delayed_init": st.booleans(),
    "init_seed": st.integers(0, 2**40),
    "param_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "reduce_dtype": st.sampled_from(["auto", None, "float32", "bfloat16", "float16"]),
    "replica_reduce_dtype": st.sampled_from([None, "bf16"]),
    "on_nonfinite_grad_norm": st.sampled_from(["ignore", "skip", "raise"]),
    "memory_headroom": st.floats(0, 1, exclude_max=True),
    "device_memory_gib": st.none() | st.floats(0.01, 1e4),
    "planned_optimizer": st.sampled_from(["auto", "adamw", "sgd-momentum"]),
    "save_full_state_dict": st.booleans(),
    "async_save": st.booleans(),
    "verify_checkpoint": st.sampled_from(["auto", "sizes", "digests"]),
    "allow_batch_change": st.booleans(),
    "comm_meter": st.booleans(),
    # Weights that travel in FP8 exclude values of two other knobs (tests/core/test_fp8_recipe.py).
    "fp8": st.sampled_from([None, Fp8Recipe(fp8_all_gather=False), Fp8Recipe(fp8_all_gather=False, margin=1)]),
    "chunked_cross_entropy": st.none() | st.integers(1, 10**6),
    "activation_checkpointing": st.sampled_from(["none", "full", "selective", "every:3", {"*.mlp": "full"}]),
    "activation_checkpointing_check": st.booleans(),
    "activation_offloading": st.booleans(),
    "activation_loading_horizon": st.integers(1, 9),
    "activation_offloading_min_bytes": st.integers(0, 10**9),
    "activation_offloading_host_gib": st.none() | st.floats(0.1, 1e4),
    "quantized_all_gather": st.sampled_from([None, "int8", "fp8"]),
    "quantize_inside_nodes": st.booleans(),
    "quantize_after_steps": st.integers(0, 1000),
    "quantize_exclude": st.lists(st.sampled_from(["*norm*", "*.bias"]), unique=True).map(tuple),
    "quantized_reduce": st.sampled_from([None, "int8", "int4"]),
    "error_feedback": st.sampled_from([True, False, "auto"]),
    "optimizer_shard": st.sampled_from(["shard", "world"]),
    "state_offload": st.sampled_from([None, "optimizer", "all"]),
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
    if isinstance(value, Fp8Recipe):
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
    with pytest.raises(ValueError, match="async_save=True has no effect with save_full_state_dict=True"):
        SmpConfig(async_save=True, save_full_state_dict=True)


def test_the_property_test_covers_every_knob() -> None:
    assert list(VALUES) == list(SmpConfig.knobs())


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
        ("hierarchical", "maybe", "true, false, 'auto'"),
        ("reshard_after_forward", 1, "true, false, an integer of at least 2, 'node'"),
        ("wrap", "Block,Head", "JSON list"),
        ("wrap", ["Block", 3], "a list of class names or globs"),
        ("wrap", '["Block"', "a list of class names or globs"),
        ("wrap", torch.nn.Linear, "a list of class names or globs"),
        ("wrap_min_parameters", -1, "an integer of at least 0"),
        ("forward_methods", [""], "none of them empty"),
        ("delayed_init", 1, "true, false"),
        ("delayed_init", "ja", "true, false"),
        ("param_dtype", "bf16", "'bfloat16'"),
        ("param_dtype", torch.int8, "'bfloat16'"),
        ("on_nonfinite_grad_norm", "skp", "did you mean 'skip'"),
        ("memory_headroom", 1.0, "a number in [0, 1)"),
        ("memory_headroom", float("nan"), "a number in [0, 1)"),
        ("device_memory_gib", 0, "a number above 0, none"),
        ("activation_checkpointing", "every:0", "'every:N'"),
        ("init_seed", "", "an integer of at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_knob_value_and_what_is_allowed(knob: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        SmpConfig(**{knob: value})
    complaint = str(caught.value)
    assert complaint.startswith(f"{knob}={value!r} is not allowed; allowed: ")
    assert says in complaint


def test_text_and_torch_objects_are_read_where_they_mean_one_thing() -> None:
    config = SmpConfig(
        shard_degree="4",  # type: ignore[arg-type]
        delayed_init="TRUE",  # type: ignore[arg-type]
        wrap='["GPT2Block", "head"]',  # type: ignore[arg-type]
        forward_methods="generate",  # type: ignore[arg-type]
        param_dtype=torch.bfloat16,  # type: ignore[arg-type]
        reduce_dtype="none",  # type: ignore[arg-type]
        memory_headroom="2.5e-1",  # type: ignore[arg-type]
    )
    assert (config.shard_degree, config.delayed_init, config.wrap) == (4, True, ("GPT2Block", "head"))
    assert (config.forward_methods, config.param_dtype, config.reduce_dtype) == (("generate",), "bfloat16", None)
    assert config.memory_headroom == 0.25


def test_wrap_takes_a_function() -> None:
    def rule(name: str, module: torch.nn.Module) -> bool:
        return name.endswith("block")

    config = SmpConfig(wrap=rule)
    assert config.wrap is rule
    assert str(config.effective()["wrap"]).endswith("rule")


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
        with pytest.raises(ValueError, match=r"reshard_after_backward=false .*write reshard_after_forward=false too"):
            SmpConfig(reshard_after_forward=forward, reshard_after_backward=False, shard_degree=4)
    assert SmpConfig(reshard_after_forward=False, reshard_after_backward=False)


def test_a_misspelt_knob_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown knob 'shard_degre'; did you mean 'shard_degree'"):
        SmpConfig.from_dict({"shard_degre": 2})
    with pytest.raises(ValueError, match="did you mean 'wrap_min_parameters'"):
        SmpConfig.from_dict({"wrap-min-params": 2})
    with pytest.raises(ValueError, match=r"unknown knob 'qqq'; none is like it; docs/configuration.md lists them"):
        SmpConfig.from_dict({"qqq": 2})


def test_an_option_of_smp_among_the_knobs_is_sent_to_its_reader() -> None:
    with pytest.raises(ValueError, match=r"'hybrid_shard_degree' is an option of SageMaker SMP.*from_smp_parameters"):
        SmpConfig.from_dict({"hybrid_shard_degree": 8})


def test_yaml_section_stands_beside_other_sections(tmp_path: Path) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\nsmp_config:\n  shard_degree: node\n  memory_headroom: 3e-1\n")
    config = SmpConfig.from_yaml(path)
    assert (config.shard_degree, config.memory_headroom) == ("node", 0.3)
    path.write_text("shard_degree: 2\nwrap: [Block]\n")
    assert SmpConfig.from_yaml(str(path)).wrap == ("Block",)


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
    path.write_text("smp_config: {shard_degree: 2, init_seed: 7, context_parallel_degree: 4}\n")
    environ = {"SMP_CONFIG_FILE": str(path), "SMP_SHARD_DEGREE": "8", "SMP_RANKS_PER_NODE": "2", "HOME": "/nowhere"}
    config = SmpConfig.from_env(environ)
    assert (config.shard_degree, config.init_seed, config.context_parallel_degree) == (8, 7, 4)
    assert (config.why("shard_degree"), config.why("init_seed")) == ("SMP_SHARD_DEGREE", "smp.yaml")


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
    asked = SmpConfig(hierarchical=True)
    config = asked.with_resolved("shard_degree", 4, "smallest degree that fits 80 GiB")
    config = config.with_resolved("hierarchical", False, "the group stays inside one node")
    again = config.with_resolved("shard_degree", 8, "grown")
    assert (config.shard_degree, config.asked("shard_degree")) == (4, "auto")
    assert (again.shard_degree, again.asked("shard_degree"), again.why("shard_degree")) == (8, "auto", "grown")
    assert config.effective() == {**asked.effective(), "shard_degree": 4, "hierarchical": False}
    assert asked.shard_degree == "auto", "the original is unchanged"
    assert SmpConfig.from_dict(again.to_dict()) == asked, "to_dict gives what was asked for"
    assert pickle.loads(pickle.dumps(config)).asked("shard_degree") == "auto"
    assert SmpConfig().with_resolved("param_dtype", "float64", "64-true").param_dtype == "float64"
    with pytest.raises(ValueError, match="did you mean 'shard_degree'"):
        asked.with_resolved("shard_degre", 4, "typo")


def test_effective_is_plain_json_for_loggers() -> None:
    effective = SmpConfig(wrap=("Block",), fp8=Fp8Recipe(margin=1)).effective()
    assert list(effective) == list(SmpConfig.knobs())
    assert json.loads(json.dumps(effective))["wrap"] == ["Block"]
    assert effective["fp8"] == "Fp8Recipe(margin=1)"


def test_the_table_shows_what_is_not_at_its_default_with_reasons_and_names_the_rest() -> None:
    config = SmpConfig.from_env({"SMP_SHARD_DEGREE": "auto", "SMP_INIT_SEED": "3"})
    config = config.with_resolved("shard_degree", 4, "smallest that fits")
    console = Console(width=200, file=io.StringIO())
    with console.capture() as printed:
        console.print(config.effective_table())
    lines = printed.get().splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := _cells(line)) and cells[0] in SmpConfig.knobs()}
    caption = " ".join(line.strip() for line in lines if not _cells(line))
    assert set(rows) == {"shard_degree", "init_seed"}
    assert all(f"{knob}=" in caption for knob in SmpConfig.knobs() if knob not in rows)
    assert rows["shard_degree"] == ["auto", "4", "smallest that fits (asked by SMP_SHARD_DEGREE)"]
    assert rows["init_seed"] == ["3", "3", "SMP_INIT_SEED"]
    assert "wrap=auto," in caption


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


NOT_YET: list[tuple[str, Any]] = [
    ("context_parallel_degree", 2),
    ("tensor_parallel_degree", 2),
    ("pipeline_parallel_degree", 2),
    ("reshard_after_forward", 2),
    ("reshard_after_forward", "node"),
    ("quantized_all_gather", "int8"),
    ("quantized_reduce", "int4"),
    ("optimizer_shard", "world"),
]


@pytest.mark.parametrize(("knob", "value"), [(knob, value) for knob, value in NOT_YET if knob in NOT_BUILT])
def test_a_knob_whose_feature_is_missing_is_refused_before_training(knob: str, value: Any) -> None:
    config = SmpConfig(**{knob: value})
    with pytest.raises(ValueError, match=rf"{knob}=.* not built yet; .*(leave|write)"):
        config.require_built()


def test_features_that_are_there_are_not_refused() -> None:
    assert {knob for knob, _ in NOT_YET} >= set(NOT_BUILT)
    SmpConfig().require_built()
    SmpConfig(reshard_after_forward=False, shard_degree=4, delayed_init=True, save_full_state_dict=True).require_built()
    both = SmpConfig(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_degree=2: (?s:.*)pipeline_parallel_degree=2: "):
        both.require_built()


def test_the_config_is_frozen_and_hashable() -> None:
    config = SmpConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.shard_degree = 4  # type: ignore[misc]
    assert hash(config) == hash(SmpConfig())
    with pytest.raises(TypeError):
        SmpConfig(4)  # type: ignore[misc]  # knobs are keywords
