"""docs/plan-requests.md is what `benchmarks/plan_requests.py` was answered, and no pick
risks more than it has to."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location(
        "plan_requests", Path(ROOT, "benchmarks", "plan_requests.py")
    )
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["plan_requests"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_requests_is_that_of_the_result(bench: Any) -> None:
    result = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    text = bench.PAGE.read_text(encoding="utf-8")
    assert list(result["requests"]) and set(result["requests"]) == set(bench.REQUESTS)
    shown = text.split(bench.BEGIN, 1)[1].split(bench.END, 1)[0]
    assert shown.strip() == bench.table(result["requests"]).strip(), (
        "run benchmarks/plan_requests.py --page"
    )
    shown = text.split(bench.BEGIN_PUBLISHED, 1)[1].split(bench.END_PUBLISHED, 1)[0]
    assert shown.strip() == bench.published_table(result["published"]).strip()


def test_the_result_is_of_this_planner(bench: Any) -> None:
    """A small request is answered as when the result was made. Seconds within 1 %:
    another torch may trace other operators."""
    kept, found = (
        json.loads(bench.RESULTS.read_text(encoding="utf-8"))["watched"],
        bench.watched(),
    )
    again = "run benchmarks/plan_requests.py, and then with --page"
    for name in ("layout", "micro_batch", "recomputation", "band"):
        assert found["pick"][name] == kept["pick"][name], again
    assert (found["flips"], found["configurations"]) == (
        kept["flips"],
        kept["configurations"],
    ), again
    for (*spread, seconds), (*before, measured) in zip(
        found["spreads"], kept["spreads"], strict=True
    ):
        assert spread == before and seconds == pytest.approx(measured, rel=0.01), again


def test_picks_of_the_requests_have_no_axis_that_their_error_does_not_justify(
    bench: Any,
) -> None:
    """Nothing with fewer axes, or as many and fewer nodes in a partition group, is
    within the error of the fastest."""
    for answer in json.loads(bench.RESULTS.read_text(encoding="utf-8"))[
        "requests"
    ].values():
        limit = answer["fastest"]["seconds"] * (1 + answer["fastest"]["band"])
        near = [
            (axes, nodes)
            for axes, nodes, seconds in answer["spreads"]
            if seconds <= limit
        ]
        assert (answer["pick"]["axes"], answer["pick"]["nodes_of_a_group"]) == min(near)
