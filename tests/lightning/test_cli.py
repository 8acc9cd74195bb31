"""LightningCLI knows every knob: by init_args, by shorthand and in one config. A fit
through it: docs/lightning.md."""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest.mock import patch

import pytest
from lightning.fabric import Fabric
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_smp
from lightning_smp import SmpShardedStrategy
from smp_core.config import SmpConfig
from tests.core.documented import as_word
from tests.harness import ROOT
from tests.lightning.modules import LanguageModule

NAME = "lightning_smp.SmpShardedStrategy"
SAID = "--trainer.strategy"


def config_of(*arguments: str) -> SmpConfig:
    """Of the strategy that a command line makes."""
    fixed = [
        "--trainer.accelerator",
        "cpu",
        "--trainer.devices",
        "1",
        "--trainer.logger",
        "false",
    ]
    # Or Lightning warns that pytest's are not read.
    with patch.object(sys, "argv", ["script.py"]):
        cli = LightningCLI(
            LanguageModule,
            run=False,
            seed_everything_default=False,
            args=[*fixed, *arguments],
        )
    assert isinstance(cli.trainer.strategy, SmpShardedStrategy)
    return cli.trainer.strategy.config


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            [f"{SAID}.class_path", NAME, f"{SAID}.init_args.shard_degree", "2"],
            {"shard_degree": 2},
        ),
        (
            [SAID, NAME, f"{SAID}.optimizer_shard", "world"],
            {"optimizer_shard": "world"},
        ),
        (
            [SAID, NAME, f"{SAID}.units", '["Block"]', f"{SAID}.fp8", "true"],
            {"units": ["Block"], "fp8": True},
        ),
        (
            [SAID, NAME, f"{SAID}.activations", '{"checkpoint": {"*.mlp": "full"}}'],
            {"activations": {"checkpoint": {"*.mlp": "full"}}},
        ),
        ([SAID, NAME, f"{SAID}.config.shard_degree", "node"], {"shard_degree": "node"}),
        pytest.param(
            [SAID, NAME, f"{SAID}.config.compression", "int8"],
            {"compression": "int8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [SAID, NAME, f"{SAID}.config.activations.checkpoint", "full"],
            {"activations": "full"},
            marks=pytest.mark.slow,
        ),
        (
            [SAID, NAME, f"{SAID}.activations.checkpoint", "full"],
            {"activations": "full"},
        ),
        (["--trainer.strategy", "smp_sharded_node"], {"shard_degree": "node"}),
    ],
    ids=lambda value: (
        " ".join(value).replace(SAID, "") if isinstance(value, list) else ""
    ),
)
def test_a_command_line_sets_knobs(
    arguments: list[str], expected: dict[str, Any]
) -> None:
    assert config_of(*arguments) == SmpConfig.from_dict(expected)


def test_every_knob_is_an_option_and_nothing_else_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults = {
        knob: value
        for knob, value in SmpConfig().to_dict().items()
        if value is not None
    }
    texts = {
        knob: value if isinstance(value, str) else json.dumps(value)
        for knob, value in defaults.items()
    }
    options = [
        part for knob, text in texts.items() for part in (f"{SAID}.{knob}", text)
    ]
    assert len(defaults) > 15 and config_of(SAID, NAME, *options) == SmpConfig()
    with pytest.raises(SystemExit):
        config_of(SAID, NAME, f"{SAID}.shard_degre", "2")
    assert "'shard_degre' is not accepted" in capsys.readouterr().err


def test_the_page_counts_and_lists_the_strategies_that_are_registered() -> None:
    page = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
    registered = {name for name in StrategyRegistry if name.startswith("smp_")}
    assert len(registered) > 3
    for text in (page, lightning_smp.__doc__ or ""):
        listed = set(re.findall(r'^(?:\| `"|    )(smp_\w+)', text, re.MULTILINE))
        assert listed == registered
    (count,) = re.findall(r"registers (\w+) strategies", page)
    assert count == as_word(len(registered))


def test_fabric_is_refused_by_name() -> None:
    for strategy in ("smp_sharded_node", SmpShardedStrategy()):
        with pytest.raises(
            ValueError, match=r"Fabric is not supported.*SmpAccelerator"
        ):
            Fabric(accelerator="cpu", devices=1, strategy=strategy)


def test_variables_set_what_no_argument_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, by class and by LightningCLI, which gives every knob; what is written
    comes first, and that is said."""
    monkeypatch.setenv("SMP_SHARD_DEGREE", "2")
    monkeypatch.setenv("SMP_ACTIVATIONS", '{"checkpoint": "full", "offload": true}')
    both = SmpConfig.from_dict(
        {"shard_degree": 2, "activations": {"checkpoint": "full", "offload": True}}
    )
    assert StrategyRegistry.get("smp_sharded").config == both
    assert (
        SmpShardedStrategy().config == both
        and config_of(SAID, NAME, f"{SAID}.optimizer_shard", "shard") == both
    )
    assert SmpShardedStrategy().config.why("shard_degree") == "SMP_SHARD_DEGREE"
    assert not [record for record in caplog.records if record.name == "smp"]
    written = (
        StrategyRegistry.get("smp_sharded_node").config,
        SmpShardedStrategy(shard_degree="node").config,
        config_of(SAID, NAME, f"{SAID}.shard_degree", "node"),
    )
    for config in written:
        assert (config.shard_degree, config.activations) == ("node", both.activations)
    assert [
        record.getMessage() for record in caplog.records if record.name == "smp"
    ] == 3 * ["SMP_SHARD_DEGREE has no effect: shard_degree is settled in code"]
    caplog.clear()
    assert SmpShardedStrategy(config={"shard_degree": 2}).config == SmpConfig(
        shard_degree=2
    )
    assert [record.getMessage()[:15] for record in caplog.records] == [
        "SMP_ACTIVATIONS"
    ]
    monkeypatch.setenv("SMP_SHARD_DEGRE", "4")
    with pytest.raises(ValueError, match="did you mean SMP_SHARD_DEGREE"):
        SmpShardedStrategy()
    assert SmpShardedStrategy(config=both).config == both, (
        "nothing of the environment counts there"
    )


def test_a_config_may_be_a_mapping_and_nothing_else_is_taken_for_one() -> None:
    """Beside it every knob may be at its default, as LightningCLI gives them."""
    given = {"shard_degree": 2, "units": ["Block"]}
    assert SmpShardedStrategy(config=given).config == SmpConfig.from_dict(given)
    assert SmpShardedStrategy(
        given, shard_degree="auto", fp8=None
    ).config == SmpConfig.from_dict(given)
    with pytest.raises(
        ValueError, match=r"config= and also delayed_init; write dataclasses.replace"
    ):
        SmpShardedStrategy(given, shard_degree="auto", delayed_init={"seed": 3})
    with pytest.raises(ValueError, match=r"shard_degre.*shard_degree"):
        SmpShardedStrategy(config={"shard_degre": 2})
    with pytest.raises(
        ValueError, match=r"config='smp.yaml'\): allowed.*SmpConfig.from_yaml"
    ):
        SmpShardedStrategy(config="smp.yaml")  # type: ignore[arg-type]
