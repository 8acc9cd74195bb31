"""The fused kernels give the eager formulas' bytes and numbers: on a CUDA device, or in
Triton's interpreter.

Compared is bit by bit: divisions, rounding and the order of sums are the same. The
interpreter has to be asked for before Triton is imported, so without a device these
tests run in a process of their own; its casts to bfloat16 cut bits off and those to FP8
do not carry, so that only a device shows these two.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch

from smp_core.codecs.codec import _LARGEST, BLOCK, Blockwise, Codec, CodeName, codec
from smp_core.torch_facts.kernels import device_multiplies_fp8
from tests.harness import run_script

TRITON = tuple(
    int(part) for part in pytest.importorskip("triton").__version__.split(".")[:2]
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter takes its time for every block.
SIZES = (
    [1, 255, 256, 257, 1025]
    if INTERPRETED
    else [1, 2, 255, 256, 257, 513, 8 * 256, 5001]
)


@pytest.mark.skipif(
    DEVICE.type == "cuda" or INTERPRETED, reason="the tests below run here"
)
def test_in_tritons_interpreter() -> None:
    done = run_script(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    if DEVICE.type == "cpu" and not INTERPRETED:
        pytest.skip("in the interpreter's own process")
    return importlib.import_module("smp_core.codecs.triton_codec")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference: eager formulas on every device."""
    monkeypatch.setattr(Codec, "_kernels", lambda self, tensor: None)


@pytest.fixture(params=["int8", "int4", "fp8"])
def coder(request: pytest.FixtureRequest, eager: None) -> Blockwise:
    needs_fp8(request.param)
    return Blockwise(request.param)


def needs_fp8(name: str) -> None:
    if name == "fp8" and DEVICE.type == "cuda" and not device_multiplies_fp8(DEVICE):
        pytest.skip("Triton has E4M3 on Ada and later only")


def numbers(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of very different sizes, zeros and ties among them."""
    generator = torch.Generator().manual_seed(seed)
    largest = 3 if dtype == torch.float16 else 30
    sizes = torch.logspace(-largest, largest, -(-n // BLOCK)).repeat_interleave(BLOCK)[
        :n
    ]
    values = torch.randn(n, generator=generator) * sizes
    values[::7] = 0.0
    # Halves of the scale.
    values[: min(n, BLOCK)] = (torch.arange(min(n, BLOCK)) - 127) / 2
    return values.to(dtype).to(DEVICE)


def needs_casts_to_fp8(coder: Blockwise) -> None:
    if INTERPRETED and coder.name == "fp8":
        pytest.skip("the interpreter's casts to FP8 do not carry")


def limit(coder: Blockwise) -> float:
    return _LARGEST[coder.name]


def used(coder: Blockwise, n: int) -> int:
    """Bytes of a payload before its padding."""
    return 4 * -(-n // BLOCK) + (-(-n // 2) if coder.name == "int4" else n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_payloads_are_the_same_bytes(
    kernels: ModuleType, coder: Blockwise, dtype: torch.dtype
) -> None:
    needs_casts_to_fp8(coder)
    for n in SIZES:
        values = numbers(n, n, dtype)
        expected, seen = (
            torch.zeros(coder.size(n), dtype=torch.uint8, device=DEVICE)
            for _ in range(2)
        )
        coder.encode(values, expected)
        given = values.clone()
        kernels.encode(coder.name, limit(coder), BLOCK, values, None, seen)
        assert torch.equal(values, given), "encode changed its input"
        assert torch.equal(seen[: used(coder, n)], expected[: used(coder, n)]), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_payloads_are_decoded_to_the_same_numbers(
    kernels: ModuleType, coder: Blockwise, dtype: torch.dtype
) -> None:
    """Also into rows that lie apart, as the columns of a two-stage gather do."""
    for n in SIZES:
        payloads = torch.zeros(3, coder.size(n), dtype=torch.uint8, device=DEVICE)
        for row in range(3):
            coder.encode(numbers(n, row), payloads[row])
        expected, apart = (
            torch.zeros(3, 2, n, dtype=dtype, device=DEVICE) for _ in range(2)
        )
        coder.decode(payloads, expected[:, 1])
        kernels.decode(coder.name, BLOCK, payloads, apart[:, 1])
        if INTERPRETED and dtype == torch.bfloat16:
            torch.testing.assert_close(apart, expected, rtol=2**-7, atol=0.0)
        else:
            assert torch.equal(apart, expected), n


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "bfloat16"])
def test_sums_over_peers_are_the_same_numbers(
    kernels: ModuleType, name: CodeName, eager: None
) -> None:
    needs_fp8(name)
    coder = codec(name)
    if INTERPRETED and TRITON < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 takes no loop over an argument")
    for n in SIZES:
        payloads = torch.zeros(4, coder.size(n), dtype=torch.uint8, device=DEVICE)
        for row in range(4):
            coder.encode(numbers(n, row), payloads[row])
        own, total = numbers(n, 9), torch.empty(n, device=DEVICE)
        for me in (0, 2):
            kernels.sum_rows(coder.name, BLOCK, payloads, own, me, total)
            assert torch.equal(total, coder.sum_rows(payloads, own, me, {})), (n, me)


def test_what_is_rounded_off_is_the_same(kernels: ModuleType, coder: Blockwise) -> None:
    needs_casts_to_fp8(coder)
    for n in SIZES:
        sent = [
            torch.zeros(coder.size(n), dtype=torch.uint8, device=DEVICE)
            for _ in range(2)
        ]
        values, rests = (
            [numbers(n, 1) for _ in range(2)],
            [numbers(n, 2) / 300 for _ in range(2)],
        )
        coder.encode(values[0], sent[0], rests[0])
        kernels.encode(coder.name, limit(coder), BLOCK, values[1], rests[1], sent[1])
        assert torch.equal(*values) and torch.equal(*rests), n
        assert torch.equal(*(each[: used(coder, n)] for each in sent)), n


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_shows_in_the_scale_of_its_block_only(
    kernels: ModuleType, coder: Blockwise, bad: float
) -> None:
    values, rest = (
        torch.ones(700, device=DEVICE),
        torch.full((700,), 0.01, device=DEVICE),
    )
    values[300] = bad
    payload = torch.zeros(coder.size(700), dtype=torch.uint8, device=DEVICE)
    kernels.encode(coder.name, limit(coder), BLOCK, values, rest, payload)
    assert not coder.finite_in(payload, 700)
    assert payload[:12].view(torch.float32).isfinite().tolist() == [True, False, True]
    decoded = torch.empty(1, 700, device=DEVICE)
    kernels.decode(coder.name, BLOCK, payload[None], decoded)
    assert decoded[0, 256:512].isnan().all(), (
        "all of its block: nobody asks the device and sends it exactly"
    )
    assert decoded[0, :256].isfinite().all() and decoded[0, 512:].isfinite().all()
    assert rest.isfinite().all() and not rest[256:512].any()
