"""Every test of this folder finds Accelerate as a new process has it, whatever ran before: its state is in classes."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def nothing_of_the_test_before() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
