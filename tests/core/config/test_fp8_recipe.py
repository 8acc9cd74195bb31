"""Fp8Recipe: what people may write, and what they are told when it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from smp_core.config import SmpConfig
from smp_core.fp8 import Fp8Recipe


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (None, None),
        (False, None),
        ("none", None),
        (True, Fp8Recipe()),
        ("true", Fp8Recipe()),
        ("hybrid", Fp8Recipe()),
        ("e4m3", Fp8Recipe(fp8_format="e4m3")),
        ("dynamic", Fp8Recipe(scaling="dynamic")),
        (
            {"margin": 1, "include": ["blocks.*"]},
            Fp8Recipe(margin=1, include=("blocks.*",)),
        ),
        (
            '{"amax_history_len": 16, "reduce_amax": false}',
            Fp8Recipe(amax_history_len=16, reduce_amax=False),
        ),
        (Fp8Recipe(margin=2), Fp8Recipe(margin=2)),
    ],
)
def test_what_the_knob_accepts(written: Any, meant: Fp8Recipe | None) -> None:
    config = SmpConfig(fp8=written)
    assert config.fp8 == meant
    assert SmpConfig.from_dict(config.to_dict()) == config
    assert SmpConfig.from_env({"SMP_FP8": "dynamic"}).fp8 == Fp8Recipe(
        scaling="dynamic"
    )


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"amax_histroy_len": 4}, "did you mean 'amax_history_len'"),
        (
            {"scaling": "static"},
            "scaling='static' is not allowed; allowed: 'delayed', 'dynamic'",
        ),
        (
            {"amax_history_len": 0},
            "amax_history_len=0 is not allowed; allowed: an integer of at least 1",
        ),
        ({"margin": True}, "margin=True"),
        ({"reduce_amax": 3}, "reduce_amax=3 is not allowed; allowed: true, false"),
        ({"exclude": [""]}, "a list of names"),
        ({"backend": "te"}, "'native', 'torchao', 'transformer_engine'"),
        ("{margin", "no JSON"),
        ("fast", "allowed: none, true"),
        (7, "fp8=7 is not allowed"),
    ],
)
def test_what_it_refuses(written: Any, words: str) -> None:
    with pytest.raises(ValueError, match="fp8") as refused:
        SmpConfig(fp8=written)
    assert words in str(refused.value)


def test_weights_travel_in_one_form() -> None:
    with pytest.raises(ValueError, match=r"compression.gather='int8'.*fp8_all_gather"):
        SmpConfig(fp8=True, compression={"gather": "int8"})
    assert SmpConfig(fp8=True, reshard_after_forward=2, shard_degree=4).fp8 is not None
