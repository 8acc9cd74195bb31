"""Random knobs, models and training procedures train like one process in float64, or
are refused by a ValueError that names a knob.

Everything that can be drawn occurs in the cases of `NORMAL` seeds, of which the normal
run has every sixth; the slow one has 2,000. A case that fails prints itself as JSON and
how to play it again and make it small (`tests.core.fuzz.replay`).
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import pytest

from smp_core.config import SmpConfig
from tests.core.fuzz.cases import KNOBS, NOT_DRAWN, Case, config_of, value_of
from tests.core.fuzz.drawing import LAYOUTS, MIXED, NORMAL, draw, features, features_of
from tests.core.fuzz.families import FAMILIES
from tests.core.fuzz.running import difference, play, play_all


def test_every_knob_is_drawn_or_left_out_for_a_reason() -> None:
    missing = [
        knob
        for knob in SmpConfig.settings()
        if knob not in KNOBS and knob not in NOT_DRAWN
    ]
    assert not missing, (
        f"add {missing} to KNOBS or, with the reason, to NOT_DRAWN in tests/core/fuzz/cases.py"
    )
    assert not (KNOBS.keys() & NOT_DRAWN.keys()), "drawn and left out"
    defaults = SmpConfig()
    for knob, kinds in KNOBS.items():
        if knob == "shard_degree":  # its default is for the faces to resolve
            continue
        value = value_of(knob, kinds[0], FAMILIES["mlp"])
        assert attrgetter(knob)(config_of({knob: value})) == attrgetter(knob)(
            defaults
        ), f"{knob}: its default comes first"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [draw(seed) for seed in (*range(NORMAL), *MIXED)]


def test_everything_occurs(cases: list[Case]) -> None:
    occurs = Counter(feature for case in cases for feature in features_of(case))
    missing = [feature for feature in features() if not occurs[feature]]
    assert not missing, (
        f"no case of the first ones has {missing}; see _Drawing in tests/core/fuzz/drawing.py"
    )


def test_a_case_survives_as_json(cases: list[Case]) -> None:
    assert [Case.from_json(case.to_json()) for case in cases] == cases


SIXTHS = [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 6))]


@pytest.mark.parametrize("first", SIXTHS)
@pytest.mark.parametrize("layout", list(LAYOUTS), ids=str)
def test_random_runs_equal_one_process(
    layout: tuple[int, int], first: int, cases: list[Case]
) -> None:
    some = [case for case in cases if case.layout == layout][first::6]
    outcomes = play(some) if some else []  # of a rare layout there are few
    failed = [
        str(outcome) for outcome in outcomes if outcome.problem or outcome.refused
    ]
    assert not failed, "\n\n".join(failed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(NORMAL, 2000, 97), ids=str)
def test_many_random_runs_equal_one_process(first: int) -> None:
    outcomes = list(
        play_all(draw(seed) for seed in range(first, min(first + 97, 2000)))
    )
    failed = [str(outcome) for outcome in outcomes if outcome.problem]
    assert not failed, "\n\n".join(failed)
    refused = [outcome for outcome in outcomes if outcome.refused]
    # The drawing knows the limits; refusals are for what only the ranks can see.
    assert len(refused) <= len(outcomes) // 20, "\n\n".join(map(str, refused))


def test_differences_are_seen() -> None:
    import torch

    one = {"a": torch.ones(3, dtype=torch.float64), "b": None}
    assert difference(one, one) is None
    assert difference({**one, "a": one["a"] + 1e-13}, one) is None
    assert difference({**one, "a": one["a"] + 1e-10}, one) is not None
    assert difference({**one, "b": torch.zeros(3)}, one) is not None
    assert difference({"a": one["a"]}, one) is not None
    assert difference(one["a"] * torch.nan, one["a"]) is not None
    assert (
        difference({0: torch.tensor(2.0)}, {0: torch.tensor(2.0), 1: torch.tensor(3.0)})
        is None
    )
