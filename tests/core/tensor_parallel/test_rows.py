"""Rows of a weight that travel between tensor ranks: their indices are made once."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_core.tensor_parallel.operators import RowsInUse

# Gate and up of four rows in one weight, used by halves.
ROWS = ((0, 1, 4, 5), (2, 3, 6, 7))


def test_indices_of_rows_are_made_once_and_never_from_a_trace() -> None:
    rows = RowsInUse(ROWS, 8)
    with FakeTensorMode():
        traced = rows.exchange(0, 2, torch.empty(4, 3))
    first = rows.exchange(0, 2, torch.empty(4, 3))
    again = rows.exchange(0, 2, torch.empty(4, 3))
    other = rows.exchange(1, 2, torch.empty(4, 3))

    assert type(traced.places) is not torch.Tensor
    assert first is again
    assert (first.n_sent, first.places.tolist()) == ([2, 2], [0, 1, 2, 3])
    assert (other.n_received, other.order.tolist()) == ([2, 2], [0, 1, 2, 3])
