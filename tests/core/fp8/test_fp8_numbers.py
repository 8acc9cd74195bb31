"""FP8 casts and products: against torch._scaled_mm, against high precision, and where
values leave the range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from smp_core.fp8 import Fp8Recipe, convert_to_fp8
from smp_core.fp8.casting import Quantized, amax_of, cast_eager, quantize, transposed
from smp_core.fp8.monitoring import Fp8Probe
from smp_core.fp8.products import (
    forward_product,
    input_gradient,
    scaled_mm,
    weight_gradient,
)
from smp_core.fp8.scaling import (
    E4M3,
    E5M2,
    GRADIENT,
    INPUT,
    LARGEST,
    WEIGHT,
    Fp8State,
    scale_for,
)
from tests.core.fp8.fp8_runs import decibels

ROWS, INPUTS, OUTPUTS = 32, 48, 16


def ulps(expected: torch.Tensor, seen: torch.Tensor) -> float:
    """The largest difference in units of the last place of ``expected``'s dtype."""
    eps = torch.finfo(expected.dtype).eps
    _, exponent = torch.frexp(
        torch.maximum(expected.double().abs(), seen.double().abs())
    )
    unit = torch.ldexp(
        torch.full_like(exponent, eps, dtype=torch.float64), exponent - 1
    )
    return ((expected.double() - seen.double()).abs() / unit).max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_emulated_products_equal_scaled_mm(dtype: torch.dtype, fp8_format: str) -> None:
    """All three, with the layouts the device wants, within one unit in the last place:
    the only freedom is the order of sums, and the operands have 4 significant bits, so
    few of them round at all."""
    torch.manual_seed(0)
    state = Fp8State(Fp8Recipe(fp8_format=fp8_format), ["layer"])
    x = quantize(
        torch.randn(ROWS, INPUTS).to(dtype) * 3e-3, state, 0, INPUT, columns=True
    )
    w = quantize(torch.randn(OUTPUTS, INPUTS).to(dtype) * 20, state, 0, WEIGHT)
    g = quantize(
        torch.randn(ROWS, OUTPUTS).to(dtype) * 1e-5, state, 0, GRADIENT, columns=True
    )
    bias = torch.randn(OUTPUTS).to(dtype)
    rows = [Quantized(q.rows, None, q.inverse_scale) for q in (x, g)]

    device_y = scaled_mm(x.rows, w.rows.t(), x, w, dtype, fast=True)
    assert ulps(device_y, forward_product(x, w, dtype, None)) <= 1
    device_dx = scaled_mm(g.rows, transposed(w.rows).t(), g, w, dtype)
    assert ulps(device_dx, input_gradient(g, w, dtype)) <= 1
    device_dw = weight_gradient(g, x, dtype)
    assert ulps(device_dw, weight_gradient(rows[1], rows[0], dtype)) <= 1
    assert torch.equal(
        forward_product(x, w, dtype, bias), forward_product(x, w, dtype, None) + bias
    )


def test_rows_that_are_no_multiple_of_16_are_padded_for_the_weight_gradient() -> None:
    torch.manual_seed(0)
    state = Fp8State(Fp8Recipe(), ["layer"])
    x = quantize(torch.randn(21, INPUTS), state, 0, INPUT, columns=True)
    g = quantize(torch.randn(21, OUTPUTS), state, 0, GRADIENT, columns=True)
    emulated = weight_gradient(
        Quantized(g.rows, None, g.inverse_scale),
        Quantized(x.rows, None, x.inverse_scale),
        torch.bfloat16,
    )
    assert ulps(weight_gradient(g, x, torch.bfloat16), emulated) <= 1


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.zeros(16, 24), torch.zeros(16, 24), "16 divides"),
        (torch.zeros(32, 16).t(), torch.zeros(16, 32), "row-major"),
        (torch.zeros(16, 32), torch.zeros(32, 16).t(), "column-major"),
    ],
)
def test_the_rules_of_hopper_are_checked_on_every_device(
    a: torch.Tensor, b: torch.Tensor, words: str
) -> None:
    one = Quantized(None, None, torch.ones(()))
    with pytest.raises(ValueError, match=words):
        scaled_mm(a.to(E4M3), b.to(E4M3).t(), one, one, torch.bfloat16)
    with pytest.raises(ValueError, match="two E5M2"):
        scaled_mm(
            torch.zeros(16, 16).to(E5M2),
            torch.zeros(16, 16).to(E5M2).t(),
            one,
            one,
            torch.bfloat16,
        )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_saturate_and_keep_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan, 0.0])
    seen = cast_eager(x, torch.ones(()), dtype).float()
    largest = LARGEST[dtype]
    assert seen[:4].tolist() == [largest, -largest, largest, -largest]
    assert seen[4].isnan() and seen[5] == 0


@pytest.mark.parametrize("amax", [1e-38, 3e-4, 1.0, 448.0, 449.0, 1e30])
def test_scales_are_the_largest_power_of_two_that_fits(amax: float) -> None:
    scale = scale_for(torch.tensor([amax]), LARGEST[E4M3]).item()
    assert math.log2(scale) == round(math.log2(scale))
    limit = 2.0**100  # scales and their inverses stay normal numbers
    assert amax * scale <= 448.0 and (amax * scale * 2 > 448.0 or scale > limit / 4)
    assert scale_for(torch.tensor([amax]), LARGEST[E4M3], margin=2).item() == scale / 4


def test_scales_of_nothing_and_of_everything_are_one() -> None:
    assert scale_for(torch.tensor([0.0, math.inf, math.nan]), 448.0).tolist() == [
        1.0,
        1.0,
        1.0,
    ]


def test_an_amax_sees_nan_and_inf() -> None:
    assert amax_of(torch.tensor([1.0, math.nan, 2.0])).isnan()
    assert amax_of(torch.tensor([1.0, -math.inf])).isinf()
    assert amax_of(torch.empty(0, 4)) == 0


def one_step(
    net: nn.Module, plain: nn.Module, size: float
) -> tuple[float, float, float]:
    """Output, input gradient and weight gradient of one step, in dB against
    ``plain``."""
    x = (torch.randn(64, 128) * size).requires_grad_()
    x_plain = x.detach().clone().requires_grad_()
    y, y_plain = net(x), plain(x_plain)
    g = torch.randn_like(y) * size
    net.zero_grad(), plain.zero_grad()
    y.backward(g), y_plain.backward(g)
    return (
        decibels(y_plain, y),
        decibels(x_plain.grad, x.grad),
        decibels(plain.weight.grad, net.weight.grad),
    )


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("scaling", ["delayed", "dynamic"])
def test_noise_floor_at_every_size(size: float, scaling: str) -> None:
    """Output >= 25 dB and gradients >= 20 dB, in the calibrating step and after it."""
    torch.manual_seed(0)
    net, plain = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
    plain.load_state_dict(net.state_dict())
    fp8 = convert_to_fp8(net, Fp8Recipe(amax_history_len=4, scaling=scaling))
    for _ in range(4):
        output, *gradients = one_step(net, plain, size)
        assert output >= 25 and min(gradients) >= 20
        fp8.step()
    assert fp8.state.uses_history(0, INPUT) is (scaling == "delayed")


def test_a_scale_of_one_fails_the_noise_floor() -> None:
    torch.manual_seed(0)
    net, plain = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
    plain.load_state_dict(net.state_dict())
    fp8 = convert_to_fp8(net)
    one_step(net, plain, 1e-4)
    fp8.step()
    fp8.state.scale, fp8.state.inverse = torch.ones(1, 3), torch.ones(1, 3)
    assert one_step(net, plain, 1e-4)[0] < 20


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_batch_a_thousand_times_larger_leaves_no_nan_and_recovers(
    algorithm: str,
) -> None:
    torch.manual_seed(0)
    net, plain = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
    plain.load_state_dict(net.state_dict())
    fp8 = convert_to_fp8(
        net, Fp8Recipe(amax_history_len=3, amax_compute_algo=algorithm)
    )
    for _ in range(2):
        one_step(net, plain, 1.0)
        fp8.step()
    one_step(net, plain, 1e3)
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    fp8.step()
    steps = 0
    while min(one_step(net, plain, 1.0)) < 20 or fp8.state.scale[0, INPUT] < 32:
        assert net.weight.grad.isfinite().all()
        fp8.step()
        steps += 1
        assert steps <= 3
    assert steps == (3 if algorithm == "max" else 1)


def test_a_probe_counts_what_left_the_range() -> None:
    """Scale 1: E4M3 holds up to 448 and, rounding to even, down to 2^-10 exclusive."""
    net = nn.Linear(16, 16, bias=False)
    fp8 = convert_to_fp8(net)
    fp8.state.steps = 1
    fp8.state.calibrated = [[True] * 3]
    probe = Fp8Probe(fp8)
    probe.begin()
    x = torch.tensor([449.0, -1e9, 448.0, 2.0**-10, 1e-9, 0.0, 2.0**-9, 1.0]).repeat(2)[
        None
    ]
    net(x).sum().backward()
    with torch.no_grad():
        net(x)  # evaluation does not count
    figures = probe.end()["weight"]
    assert (figures["input_saturated"], figures["input_flushed"]) == (2 / 8, 2 / 8)
    assert (figures["gradient_saturated"], figures["gradient_flushed"]) == (0, 0)
    assert figures["input_scale"] == 1 and not probe.is_counting


def test_margin_leaves_room() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(64, 128), nn.Linear(128, 256)
    scales = []
    for margin in (0, 2):
        layer = nn.Linear(128, 256)
        layer.load_state_dict(net.state_dict())
        fp8 = convert_to_fp8(layer, Fp8Recipe(margin=margin))
        layer(x).sum().backward()
        fp8.step()
        scales.append(fp8.state.scale)
    assert torch.equal(scales[0], scales[1] * 4)


def test_scales_of_products_lie_where_cublas_takes_them() -> None:
    """At addresses that 16 divides, whatever the state went through: elsewhere an
    H100's products are refused."""
    state = Fp8State(Fp8Recipe(), ["a", "b", "c"])

    def addresses() -> set[int]:
        places = [
            (site, role) for site in range(3) for role in (INPUT, WEIGHT, GRADIENT)
        ]
        return {state.scales(*place)[1].data_ptr() % 16 for place in places}

    assert addresses() == {0}
    state.record(1, INPUT, torch.tensor(3.0))
    state.set_weight_scales(torch.ones(3))
    assert addresses() == {0}
    state.step(torch.ones(3), lambda _: None)
    assert addresses() == {0} and torch.equal(state.inverse, 1 / state.scale)
    state.load_state_dict(state.state_dict())
    state.to("cpu")
    assert addresses() == {0} and torch.equal(state.inverse, 1 / state.scale)


def test_optimizers_behind_one_backward_pass_count_one_step() -> None:
    """``calibration_steps`` are those of training; a step that changed weights alone
    makes their scales."""
    net = nn.Linear(128, 256)
    fp8 = convert_to_fp8(net, Fp8Recipe(calibration_steps=3))
    for step in range(3):
        net(torch.randn(64, 128)).sum().backward()
        fp8.step()
        assert fp8.state.steps == step + 1
        history, scale = fp8.state.history[:, :, INPUT].clone(), fp8.state.scale.clone()
        with torch.no_grad():
            net.weight.mul_(4.0)
        fp8.step()
        assert fp8.state.steps == step + 1
        assert torch.equal(fp8.state.history[:, :, INPUT], history)
        assert fp8.state.scale[0, 1] == scale[0, 1] / 4
