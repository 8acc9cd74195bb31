"""Part 1: torch's fused products over symmetric memory, as split layers call them, in a
group of one device.

Shows that the operators are there, take what they are given and that both passes give
the numbers of plain products. What devices send each other, and whether products hide
it, needs several.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.gpu.items import Rows
from smp_core.comm.meter import CommMeter
from smp_core.tensor_parallel.fused import column_products, row_product
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.topology import Topology

# Of the largest value: products round once, and what is added up to a gradient once
# more.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 2.0**-6}


def rows(on: Device) -> Rows:
    with on.one_rank():
        for dtype in LIMITS:
            for samples in (1, 3):
                yield (
                    f"{samples} samples in {dtype}",
                    partial(_compared, on, dtype, samples),
                )


def _compared(on: Device, dtype: torch.dtype, samples: int) -> dict[str, Any]:
    """Compare a gate, its neighbour and what adds up behind them with torch's own, and
    the gradients of all."""
    group = dist.group.WORLD
    assert group is not None
    axis = TensorAxis(
        group,
        CommMeter(Topology.uniform(1, 1), 0),
        "pieces" if on.rehearsal else "fused",
    )
    tokens, width, inner = (16, 32, 48) if on.rehearsal else (512, 1024, 2816)
    torch.manual_seed(0)
    shapes = ((samples, tokens, width), (inner, width), (inner, width), (width, inner))
    given = [
        torch.randn(shape, device=on.device, dtype=dtype) / shape[-1] ** 0.5
        for shape in shapes
    ]

    def passes(split: bool) -> list[torch.Tensor]:
        part, gate, up, down = leaves = [
            each.clone().requires_grad_() for each in given
        ]
        if split:
            _, (gated, upped) = column_products(part, axis, [gate.t(), up.t()])
            output = row_product(gated.sigmoid() * upped, down.t(), axis)
        else:
            output = ((part @ gate.t()).sigmoid() * (part @ up.t())) @ down.t()
        output.square().sum().backward()
        return [
            output.detach(),
            *(leaf.grad for leaf in leaves if leaf.grad is not None),
        ]

    seen, expected = passes(True), passes(False)
    worst = max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for a, b in zip(seen, expected, strict=True)
    )
    return {
        "ok": worst <= LIMITS[dtype],
        "of the largest value": worst,
        "limit": LIMITS[dtype],
    }
