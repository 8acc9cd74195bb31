"""Attributes with another value for a block are what they were behind it."""

from __future__ import annotations

import pytest
from torch import nn

from smp_core.outside import changed


class Counter:
    size = 1

    def __init__(self) -> None:
        self.own = "own"


def test_own_attributes_and_those_of_the_class_are_back_behind_the_block() -> None:
    counter = Counter()
    with pytest.raises(ZeroDivisionError), changed(counter, own="other", size=2):
        assert (counter.own, counter.size, Counter.size) == ("other", 2, 1)
        counter.size /= 0
    # What hid the class's is gone: it would hide later values of that.
    assert vars(counter) == {"own": "own"} and counter.size == 1


def test_a_module_computes_by_its_class_again() -> None:
    layer = nn.ReLU()
    before = set(vars(layer))
    with changed(layer, forward=lambda hidden: -hidden):
        assert layer(2) == -2
    assert set(vars(layer)) == before
