"""Every test of this folder finds Accelerate as a new process has it, whatever ran
before: its state is in classes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def nothing_of_the_test_before() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def variables_as_before() -> Iterator[None]:
    """TrainingArguments of Transformers 4.57 set ACCELERATE_MIXED_PRECISION for the
    rest of the process."""
    before = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("ACCELERATE_")
    }
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)
