"""Training under the Trainer equals one process: every sharding, windows, clipping, learning-rate schedules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lightning.modules import LanguageModule
from tests.lightning.running import assert_same, fit, together

DEGREES = [1, 2, 4]


@pytest.mark.parametrize("degree", DEGREES)
def test_two_epochs_of_fit_equal_one_process(degree: int) -> None:
    flags: dict[str, Any] = {"precision": "64-true", "max_epochs": 2, "gradient_clip_val": 0.1}
    expected = fit(LanguageModule, **flags)
    assert_same(together(fit, LanguageModule, knobs={"shard_degree": degree}, **flags), expected)
