"""Experts on several ranks train as one process does: losses, gradients, norms and weights in float64."""

from __future__ import annotations

import pytest

from tests.core.expert_parallel.cases import Case, assert_like_one_process
from tests.core.expert_parallel.models import FAMILIES, OWN

LAYOUTS = ({"shard": 4, "expert": 2}, {"shard": 2, "expert": 2}, {"shard": 4, "expert": 4})


def test_experts_on_several_ranks_train_like_one_process() -> None:
    """1e-12: sums in another order, of losses of about 4 and gradients of up to 0.1 in float64."""
    assert_like_one_process([Case(kind, **layout) for kind in ("Mixtral", "Qwen3Moe") for layout in LAYOUTS])
