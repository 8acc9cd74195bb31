"""Attention: flash against plain products (part 1), the operator against the fastest of
torch (part 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_work import count_attention_work
from benchmarks.gpu.device import Device, NotHere
from benchmarks.gpu.items import Rows
from smp_core.context_parallel import kernels
from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.fastest import Kernel, Masks
from smp_core.context_parallel.key_value_exchange import register_group
from smp_core.context_parallel.sequence_plan import SequencePlan

GOAL = 0.9

# name -> query and key heads, head sizes of keys and values, documents (queries, keys),
# causal, window
CASES: dict[
    str, tuple[int, int, int, int, tuple[tuple[int, int], ...], bool, int | None]
] = {
    **{
        f"causal, heads of {d}": (4, 4, d, d, ((192, 192),), True, None)
        for d in (64, 128, 192, 256)
    },
    "bidirectional": (4, 4, 64, 64, ((192, 192),), False, None),
    "grouped heads": (8, 2, 128, 128, ((192, 192),), True, None),
    "more keys than queries": (4, 2, 64, 64, ((64, 192),), True, None),
    "a window": (4, 2, 128, 128, ((192, 192),), True, 50),
    "a window, more keys": (4, 2, 64, 64, ((64, 192),), True, 50),
    "documents": (4, 2, 128, 128, ((70, 70), (58, 122), (64, 64)), True, None),
    "documents in a window": (4, 4, 64, 64, ((70, 70), (58, 122), (64, 64)), True, 30),
    "keys of 192, values of 128": (4, 4, 192, 128, ((192, 192),), True, None),
    "heads of 36": (4, 4, 36, 36, ((70, 70), (122, 122)), True, None),
}


def correctness(on: Device) -> Rows:
    """Yield every case with every kernel that may be chosen for it."""
    names = ("cpu",) if on.rehearsal else ("flash", "cuDNN", "FA3")
    for kernel in names:
        for dtype in (
            (torch.bfloat16,) if on.rehearsal else (torch.bfloat16, torch.float16)
        ):
            for name in CASES:
                yield (
                    f"{name}, {dtype}, {kernel}",
                    partial(_against_plain, on, name, dtype, kernel),
                )


def _against_plain(
    on: Device, name: str, dtype: torch.dtype, kernel: str
) -> dict[str, Any]:
    """Compare output, LSE and gradients with plain products of the same numbers in
    float64: no further than four times the dtype's own rounding of the largest value
    (gradients pass twice as many)."""
    heads, groups, d, e, segments, causal, window = CASES[name]
    torch.manual_seed(0)
    queries, keys = (sum(each) for each in zip(*segments, strict=True))
    shapes = (
        (2, queries, heads, d),
        (2, keys, groups, d),
        (2, keys, groups, e),
        (2, queries, heads, e),
    )
    q, k, v, grad = (
        torch.randn(shape, device=on.device, dtype=dtype) for shape in shapes
    )
    masks = Masks(segments, d**-0.5, causal, window)
    taken = {each.name: each for each in kernels.kernels_for(q, k, v, masks)}
    if kernel not in taken:
        raise NotHere(f"{kernel} does not take it")

    def both_ways(kernel: Kernel, *tensors: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, grad = tensors
        with mock.patch.object(kernels, "kernels_for", lambda *_: (kernel,)):
            out, lse = kernels.forward(q, k, v, masks)
            return [out, lse, *kernels.backward(grad, q, k, v, out, lse, masks)]

    results = both_ways(taken[kernel], q, k, v, grad)
    expected = both_ways(
        kernels.PRODUCTS, *(tensor.double() for tensor in (q, k, v, grad))
    )
    found: dict[str, Any] = {"ok": True}
    names = ("output", "LSE", "queries", "keys", "values")
    for name, seen, right in zip(names, results, expected, strict=True):
        worst = ((seen.double() - right).abs().max() / right.abs().max()).item()
        rounding = torch.finfo(dtype).eps
        limit = {"LSE": 1e-3, "output": 4 * rounding}.get(name, 8 * rounding)
        found["ok"] &= worst <= limit and tuple(seen.shape) == tuple(right.shape)
        found[name] = worst
    return found


def speed(on: Device) -> Rows:
    lengths = (128,) if on.rehearsal else (8192, 16384, 32768, 65536, 131072)
    with on.one_rank():  # torch's context parallelism wants a mesh
        for length in lengths:
            yield f"{length} tokens", partial(_operator, on, length)


def _operator(on: Device, length: int) -> dict[str, Any]:
    """Measure forward and backward of one layer of Llama 3.1 8B's attention in
    bfloat16, in TFLOPS: ours as a rank runs it (two chunks, one rank) against torch's
    kernels of the unsplit sequence."""
    heads, groups, d = (4, 2, 32) if on.rehearsal else (32, 8, 128)
    shapes = ((1, length, each, d) for each in (heads, groups, groups))
    q, k, v = (
        torch.randn(s, device=on.device, dtype=torch.bfloat16, requires_grad=True)
        for s in shapes
    )
    grad = torch.randn(1, length, heads, d, device=on.device, dtype=torch.bfloat16)
    group = register_group(None)
    plan = SequencePlan(1, length, group=group.number).encode()

    def ours() -> None:
        torch.autograd.grad(attention(q, k, v, plan), (q, k, v), grad)

    def torchs(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, enable_gqa=True
            )
        torch.autograd.grad(out.transpose(1, 2), (q, k, v), grad)

    runs: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "flash": partial(torchs, SDPBackend.FLASH_ATTENTION),
    }
    if not on.rehearsal:
        runs |= {
            "cuDNN": partial(torchs, SDPBackend.CUDNN_ATTENTION),
            "FA3": partial(_flash_3, partial(torchs, SDPBackend.FLASH_ATTENTION)),
            "ours on FA3": partial(_flash_3, ours),
            "torch's context parallelism": partial(
                _context_parallel, on, q, k, v, grad
            ),
        }
    # Causal: half of the pairs; two products forward, five backward.
    flop = 7 * 2 * heads * d * length * (length + 1) / 2
    found: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            found[name] = round(flop / on.milliseconds(run, 5, 2) / 1e9, 3)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    with count_attention_work() as work:
        ours()
    found["taken"] = sorted(work.calls)
    others = [
        rate
        for name, rate in found.items()
        if not name.startswith("ours") and isinstance(rate, float)
    ]
    if isinstance(found["ours"], float) and others:
        ratio = found["ours"] / max(others)
        found |= {
            "of the fastest": ratio,
            "goal": f">= {GOAL} of the fastest",
            "met": ratio >= GOAL,
        }
    return found


def _flash_3(run: Callable[[], None]) -> None:
    from torch.nn.attention import (
        activate_flash_attention_impl,
        restore_flash_attention_impl,
    )

    activate_flash_attention_impl("FA3")
    try:
        run()
    finally:
        restore_flash_attention_impl()


def _context_parallel(
    on: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> None:
    """Run torch.distributed.tensor.experimental.context_parallel on a mesh of one rank;
    it shards its buffers in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(on.device.type, (1,), mesh_dim_names=("cp",))
    repeats = q.shape[2] // k.shape[2]
    wide = [q, *(tensor.repeat_interleave(repeats, 2) for tensor in (k, v))]
    wide = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in wide]
    with context_parallel(mesh), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*wide, is_causal=True)
        torch.autograd.grad(out, wide, grad.transpose(1, 2))
