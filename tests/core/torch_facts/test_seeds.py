"""Seeding that looks at no stack."""

from __future__ import annotations

import traceback

import pytest
import torch

from smp_core.torch_facts import seed_generators


def test_numbers_are_those_of_torchs_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages seed several times in each micro-batch; torch's own formats a stack each
    time for every kind of device that is not there."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    if not torch.accelerator.is_available():
        monkeypatch.setattr(traceback, "format_stack", pytest.fail)
    seed_generators(3)
    assert torch.equal(torch.rand(4), expected)
