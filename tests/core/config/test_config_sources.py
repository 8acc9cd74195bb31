"""SmpConfig from a mapping, a YAML file and the environment: what wins, and what is
refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from smp_core.config import SmpConfig
from smp_core.config.recipes import DelayedInit, Units
from smp_core.config.sources import OTHER_VARIABLES
from smp_core.engine.parallel_model import REPORT_LINES
from tests.core.documented import as_word
from tests.harness import ROOT

PACKAGES = ("smp_core", "lightning_smp", "accelerate_smp")


def test_a_misspelt_knob_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match="unknown knob 'shard_degre'; did you mean 'shard_degree'"
    ):
        SmpConfig.from_dict({"shard_degre": 2})
    with pytest.raises(ValueError, match="did you mean 'context_parallel_degree'"):
        SmpConfig.from_dict({"context-parallel-deg": 2})
    with pytest.raises(
        ValueError, match="unknown knob 'shard_degre'; did you mean 'shard_degree'"
    ):
        SmpConfig(shard_degre=2)  # type: ignore[call-arg]
    with pytest.raises(
        ValueError,
        match=r"unknown knob 'qqq'; none is like it; docs/configuration.md lists them",
    ):
        SmpConfig.from_dict({"qqq": 2})


def test_an_option_of_smp_among_the_knobs_is_sent_to_its_reader() -> None:
    with pytest.raises(
        ValueError,
        match=r"'hybrid_shard_degree' is an option of SageMaker SMP.*from_smp_parameters",
    ):
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
        (
            "compute_environment: LOCAL_MACHINE\n",
            "no `smp_config:` section.*found: compute_environment",
        ),
        ("", "no mapping of knobs"),
        ("- shard_degree\n", "no mapping of knobs"),
        ("smp_config: 4\n", "smp_config=4 is not a mapping"),
        ("smp_config: [\n", "not a valid YAML file"),
        (
            "smp_config:\n  shard_degree: 2\n  shard_degree: 4\n",
            "'shard_degree' is written twice",
        ),
        ("smp_config:\n  shard_degre: 2\n", "did you mean 'shard_degree'"),
        (
            "shard_degree: 2\nmixed_precision: bf16\n",
            "'mixed_precision' is an argument of FSDP, not a knob",
        ),
        ("smp_config:\n  shard_degree: 2.5\n", "shard_degree=2.5 is not allowed"),
        (
            "smp_config: {shard_degree: 2, context_parallel_degree: 4}\n",
            "larger than shard_degree=2",
        ),
    ],
)
def test_a_yaml_file_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        SmpConfig.from_yaml(path)
    assert str(path) in str(caught.value)


def test_knobs_beside_the_section_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "smp.yaml"
    path.write_text("smp_config: {shard_degree: 2}\ntensor_parallel_degree: 2\n")
    assert SmpConfig.from_yaml(path).tensor_parallel_degree == 1
    assert "'tensor_parallel_degree' beside `smp_config:` has no effect" in caplog.text


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        ("COMPRESSION", '{"gather": "int8", "gather": "fp8"}'),
        ("TENSOR_PARALLEL", '{"plan": {"a": "row", "a": "column"}}'),
    ],
)
def test_a_field_that_is_written_twice_is_refused(knob: str, text: str) -> None:
    with pytest.raises(ValueError, match="is written twice"):
        SmpConfig.from_env({f"SMP_{knob}": text})


def test_a_missing_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere.yaml.*No such file"):
        SmpConfig.from_yaml(tmp_path / "nowhere.yaml")


def test_environment_overrides_its_config_file(tmp_path: Path) -> None:
    path = tmp_path / "smp.yaml"
    # Each alone is sound; together with the file's own shard degree the context degree
    # would be refused.
    path.write_text(
        "smp_config: {shard_degree: 2, delayed_init: {seed: 7}, context_parallel_degree: 4}\n"
    )
    environ = {
        "SMP_CONFIG_FILE": str(path),
        "SMP_SHARD_DEGREE": "8",
        "SMP_RANKS_PER_NODE": "2",
        "HOME": "/nowhere",
    }
    config = SmpConfig.from_env(environ)
    assert (
        config.shard_degree,
        config.delayed_init,
        config.context_parallel_degree,
    ) == (8, DelayedInit(seed=7), 4)
    assert (config.why("shard_degree"), config.why("delayed_init")) == (
        "SMP_SHARD_DEGREE",
        "smp.yaml",
    )


def test_a_variable_that_some_part_reads_is_not_called_without_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every whole SMP_* name that stands as text in the packages, besides those of
    knobs."""
    root = Path(__file__).resolve().parents[3]
    sources = [
        path.read_text()
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
    ]
    read = {
        name
        for source in sources
        for name in re.findall(r'"(SMP_[A-Z_]*[A-Z])"', source)
    }
    assert {"SMP_LINKS", "SMP_RANKS_PER_NODE"} <= read
    others = {
        name: "here"
        for name in read
        if name.removeprefix("SMP_").lower() not in SmpConfig.knobs()
    }
    SmpConfig.from_env(
        {name: value for name, value in others.items() if name != "SMP_CONFIG_FILE"}
    )
    assert caplog.messages == []
    page = (root / "docs" / "configuration.md").read_text()
    assert [name for name in sorted(others) if f"`{name}" not in page] == []


def test_the_page_counts_what_the_code_has() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (count, *_), names = (
        re.findall(r"(\w+) are no knobs: (.*?)\n\n", page, re.DOTALL)[0],
        OTHER_VARIABLES,
    )
    assert count.lower() == as_word(len(names))
    for page_with_lines in ("README.md", "docs/configuration.md"):
        text = (ROOT / page_with_lines).read_text(encoding="utf-8")
        (lines,) = re.findall(r"rank 0 prints\s+at most (\w+) lines", text)
        assert lines == as_word(REPORT_LINES)


def test_code_comes_before_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"SMP_SHARD_DEGREE": "4", "SMP_FP8": "true"}
    config = SmpConfig.from_code({"shard_degree": 2}, environ)
    assert config == SmpConfig(shard_degree=2, fp8=True) and config.given == {
        "shard_degree",
        "fp8",
    }
    assert (config.why("shard_degree"), config.why("fp8")) == ("as asked", "SMP_FP8")
    assert [record.getMessage() for record in caplog.records] == [
        "SMP_SHARD_DEGREE has no effect: shard_degree is settled in code"
    ]
    caplog.clear()
    assert SmpConfig.from_code({"shard_degree": "4"}, environ) == SmpConfig.from_env(
        environ
    )
    assert not caplog.records, "both say the same"


def test_environment_is_the_process_environment_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMP_ON_NONFINITE_GRAD_NORM", "skip")
    assert SmpConfig.from_env().on_nonfinite_grad_norm == "skip"


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        ValueError, match="SMP_SHARD_DEGRE; did you mean SMP_SHARD_DEGREE"
    ):
        SmpConfig.from_env({"SMP_SHARD_DEGRE": "4"})
    with pytest.raises(
        ValueError, match="SMP_shard_degree; did you mean SMP_SHARD_DEGREE"
    ):
        SmpConfig.from_env({"SMP_shard_degree": "4"})
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert SmpConfig.from_env({"SMP_NCCL_THROTTLE_LIMIT": "3"}) == SmpConfig()
    assert "SMP_NCCL_THROTTLE_LIMIT" in caplog.text
