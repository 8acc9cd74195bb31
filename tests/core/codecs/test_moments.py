"""Moments in 8 bits are as near as the module says, block by block of a row, and second
moments above 0 stay there."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from smp_core.codecs import BLOCK, MomentCodec, n_blocks
from smp_core.codecs.moments import _tables

CPU = torch.device("cpu")


def codec(signed: bool) -> MomentCodec:
    return MomentCodec(signed, CPU)


def spread_rows(row: int, signed: bool) -> torch.Tensor:
    """Magnitudes over eight decades, of another size in each row."""
    generator = torch.Generator().manual_seed(row)
    values = 10 ** (
        -8 * torch.rand(5, row, generator=generator)
    ) * 10.0 ** torch.arange(-2, 3).unsqueeze(1)
    return (
        values * torch.randn(5, row, generator=generator).sign() if signed else values
    )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("row", [1, 8, 255, 256, 257, 700, 1024])
def test_errors_are_within_what_the_module_says(row: int, signed: bool) -> None:
    rows = spread_rows(row, signed)
    codes, scales = codec(signed).encode(rows)
    assert codes.shape == rows.shape and codes.dtype == torch.uint8
    assert scales.shape == (5, n_blocks(row)) and scales.dtype == torch.float32
    seen = codec(signed).decode(codes, scales)
    largest = scales.repeat_interleave(BLOCK, dim=1)[:, :row]
    for block in range(n_blocks(row)):
        own = rows[:, block * BLOCK : (block + 1) * BLOCK].abs().amax(dim=1)
        assert torch.equal(scales[:, block], own)
    error = (seen - rows).abs()
    assert (error <= (0.0071 if signed else 0.0036) * largest).all()
    for part, bound in (
        {0.1: 0.062, 0.01: 0.11}.items()
        if signed
        else {0.1: 0.033, 0.01: 0.062}.items()
    ):
        high = rows.abs() > part * largest
        assert (error[high] <= bound * rows.abs()[high]).all()
    assert signed or (seen > 0).all()


def test_what_is_0_stays_0_and_what_is_not_finite_is_seen() -> None:
    for signed in (True, False):
        zeros = torch.zeros(2, 300)
        assert torch.equal(codec(signed).decode(*codec(signed).encode(zeros)), zeros)
        for value in (torch.inf, torch.nan):
            rows = torch.ones(2, 300)
            rows[1, 280] = value
            seen = codec(signed).decode(*codec(signed).encode(rows))
            assert seen[0].isfinite().all() and seen[1, :BLOCK].isfinite().all()
            assert not seen[1, BLOCK:].isfinite().any()


def test_rows_are_encoded_one_by_one() -> None:
    rows = spread_rows(700, signed=True)
    codes, scales = codec(True).encode(rows)
    for place in range(len(rows)):
        own_codes, own_scales = codec(True).encode(rows[place : place + 1])
        assert torch.equal(own_codes[0], codes[place]) and torch.equal(
            own_scales[0], scales[place]
        )
    assert codec(True).encode(rows[:0])[0].shape == (0, 700)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
@pytest.mark.parametrize("signed", [True, False])
def test_tables_are_bitsandbytes_and_torchaos(signed: bool) -> None:
    """To float32: theirs are computed in it."""
    from torchao.optim.quant_utils import create_dynamic_map

    values, _ = _tables(signed)
    torch.testing.assert_close(
        torch.tensor(values),
        torch.tensor(create_dynamic_map(signed)),
        atol=1e-7,
        rtol=1e-6,
    )
