"""Models with something unusual around their blocks: each trains in stages as in one
process (float64), or is refused on all ranks before training. What fails in a first
forward all the same ends it on all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core import entry
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.pipeline.drawn import (
    Drawn,
    Model,
    built,
    draw,
    loss_of,
    outcomes,
    trained,
)
from tests.harness import run_ranks

EXACT = [
    Drawn(places="number"),
    Drawn(places="numbered", units="named"),
    Drawn(places="keyword", units="small"),
    Drawn(enters="recurrent", units="small", schedule="interleaved:2"),
    Drawn(enters="convolved", units="named", schedule="interleaved:2"),
    Drawn(gives="named", heads="unused after"),
    Drawn(gives="list", heads="teacher"),
    Drawn(gives="text", heads="unused before"),
    Drawn(gives="unused head", outputs="dict"),
    Drawn(keeps="detached"),
    Drawn(heads="tied", outputs="dataclass"),
    Drawn(keeps="size of logits"),
]
REFUSED = {
    Drawn(
        beside="layer condition"
    ): "conditions.1.weight works in its forward, and another stage holds it (drawn.py:",
    Drawn(beside="middle skip"): "its output is another in stages",
    Drawn(
        gives="number", reads="adds"
    ): "the one tensor that they hand on: RuntimeError",
    Drawn(gives="named", reads="checks"): "its output is another in stages",
    Drawn(heads="detached tie"): "words.weight works in its forward",
    Drawn(outputs="all hidden"): "its output 2.0 is another",
    Drawn(places="bare"): "a module of its own",
    Drawn(keeps="loss"): "keeps a tensor with a gradient in blocks.0.kept",
    Drawn(keeps="list"): "keeps a tensor with a gradient in blocks.0.kept",
    Drawn(keeps="sum of hidden"): "its output kept is another in stages",
}


def require(cases: Sequence[Drawn], ranks: int) -> list[str]:
    """What the cases came to, which is the same on all ranks and exact or refused."""
    found = []
    for case, told in zip(
        cases, zip(*run_ranks(outcomes, ranks, list(cases)), strict=True), strict=True
    ):
        assert set(told) == {told[0]} and told[0].startswith(("exact", "refused")), (
            f"{case}: {set(told)}"
        )
        found.append(told[0])
    return found


@pytest.mark.parametrize(
    "cases",
    [EXACT[::2], pytest.param(EXACT[1::2], marks=pytest.mark.slow)],
    ids=["half", "rest"],
)
def test_what_stages_can_do_without_is_left_out(cases: list[Drawn]) -> None:
    assert require(cases, 2) == ["exact"] * len(cases)


def test_what_a_stage_would_lack_is_refused_before_training() -> None:
    for case, told in zip(REFUSED, require(list(REFUSED), 2), strict=True):
        assert told.startswith(
            "refused: pipeline_parallel_degree: Model cannot be cut into stages: "
        )
        assert REFUSED[case] in told, told


class Counts(Model):
    """Counts its calls, and keeps the longest sequence that it has seen."""

    calls, longest = 0, 0

    def forward(self, tokens: torch.Tensor) -> Any:
        self.calls += 1
        self.longest = max(self.longest, tokens.shape[1])
        return super().forward(tokens)


def said_of_counts() -> list[str]:
    said: list[str] = []
    knobs = SmpConfig(shard_degree=1, pipeline_parallel_degree=2)
    with mock.patch.object(
        entry.logger, "warning", lambda text, *args: said.append(text % args)
    ):
        parallelize(Counts(Drawn()).double(), knobs)
    return said


def test_numbers_that_each_forward_changes_are_named() -> None:
    said, _ = run_ranks(said_of_counts, 2)
    assert any(
        "forward changes what modules keep (calls), here" in text for text in said
    )


def test_drawn_models_are_exact_or_refused() -> None:
    told = require([draw(seed, 4) for seed in range(10)], 4)
    assert {each.partition(":")[0] for each in told} == {"exact", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("first", range(100, 200, 25))
def test_many_drawn_models_are_exact_or_refused(ranks: int, first: int) -> None:
    require([draw(seed, ranks) for seed in range(first, first + 25)], ranks)


def failing(schedule: str) -> list[str]:
    """What a step ends in that fails on one stage, for each place; then the losses of
    one that does not fail."""
    pipeline = {"microbatches": 2, "schedule": schedule}
    knobs = SmpConfig(shard_degree=1, pipeline_parallel_degree=2, pipeline=pipeline)
    model = built(Drawn())
    parallel = parallelize(model, knobs)
    assert parallel.pipeline is not None
    tokens = torch.zeros(4, 6, dtype=torch.long)
    found = []

    class Fails(torch.nn.Module):
        def forward(self, *_: Any) -> Any:
            raise RuntimeError("out of memory")

    def refusing() -> Any:
        loss_of(model, tokens)
        raise ValueError("no such target")

    def detached() -> torch.Tensor:
        return loss_of(model, tokens).detach()

    def attempt(call: Any) -> str:
        try:
            parallel.pipeline.train([call] * 2, lambda loss: loss, 0.5, tokens)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found.append(attempt(refusing))
    found.append(attempt(detached))
    for number in (0, 3):
        up = model.blocks[number].up
        model.blocks[number].up = Fails()
        found.append(attempt(lambda: loss_of(model, tokens)))
        model.blocks[number].up = up
    parallel.window.abandon()
    found += map(str, trained(parallel))
    with torch.no_grad():
        shared = parallel.pipeline.share_made(lambda: dist.get_rank())
    return [*found, str(shared)]


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("interleaved:2", marks=pytest.mark.slow)]
)
def test_a_first_forward_that_fails_on_one_stage_ends_on_all(schedule: str) -> None:
    """And the next step takes none of its messages."""
    first, last = run_ranks(failing, 2, schedule, timeout=60.0)
    for found in (first, last):
        assert found[0].startswith("ValueError: ") and "no such target" in found[0]
        assert "no gradient comes from the loss" in found[1]
        assert found[2].startswith("RuntimeError: ") and "out of memory" in found[2]
        assert found[3].startswith("RuntimeError: ") and "out of memory" in found[3]
    assert first[4:] == last[4:] and last[-1] == "1"
