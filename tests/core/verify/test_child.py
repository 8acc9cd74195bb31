"""Under --float64 code that asks for float32 computes in float64."""

from __future__ import annotations

import pytest
import torch

from smp_core.verify import child

FUNCTIONS = ("sum", "mean", "prod", "cumsum", "softmax", "log_softmax")


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of `smp verify --float64` changes, undone behind the test."""
    for place in (torch, torch.Tensor, torch.nn.functional):
        for name in (*FUNCTIONS, "float", "to"):
            if name in vars(place) or (place is torch.Tensor):
                monkeypatch.setattr(place, name, getattr(place, name))
    child._stay_in_float64()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_stays_where_float32_is_asked_for(in_float64: None, name: str) -> None:
    """As in eager attention and label smoothing of Transformers, where float32 hid the
    last digits of the loss."""
    x = torch.tensor([[0.1, 0.7, 0.2]], dtype=torch.float64)
    plain = getattr(x, name)(1)
    for asked in (
        getattr(x, name)(1, dtype=torch.float32),
        getattr(torch, name)(x, 1, dtype=torch.float32),
    ):
        assert asked.dtype == torch.float64 and torch.equal(asked, plain)
    assert getattr(x.half(), name)(1, dtype=torch.float32).dtype == torch.float32
    if name.endswith("softmax"):
        found = getattr(torch.nn.functional, name)(x, dim=1, dtype=torch.float32)
        assert found.dtype == torch.float64 and torch.equal(found, plain)
