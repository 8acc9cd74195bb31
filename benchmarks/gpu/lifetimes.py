"""Part 1: memory that a stream still reads is not used again. Each case is run with its
mend taken out as well, which has to give wrong numbers: otherwise the case shows
nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.items import Rows
from benchmarks.gpu.training import Trained, train
from smp_core.comm import background
from smp_core.comm.background import Background, Pending
from smp_core.torch_facts import streams

ELEMENTS = 2**22


def rows(on: Device) -> Rows:
    yield (
        "what was launched behind keeps its tensors",
        partial(_launched, on, mended=True),
    )
    yield "the same without the mend has to break", partial(_launched, on, mended=False)
    with on.one_rank():
        yield "FSDP2's sums, read late", partial(_sums, on, mended=True)
        yield "the same without the mend has to break", partial(_sums, on, mended=False)


def _launched(on: Device, *, mended: bool) -> dict[str, Any]:
    if not mended:
        on.needs()
    elements = 16 if on.rehearsal else ELEMENTS
    behind, out = Background(on.device), torch.zeros(elements, device=on.device)
    # Kernels are loaded when they are first used, and the device may wait for that: a
    # case would show nothing.
    _submit(on, behind, out).wait()
    int((out != 1).sum())
    out.zero_()

    def holds_nothing(self: Any, event: Any, run: Any) -> None:
        self.event, self.run = event, None

    taken_out = (
        nullcontext()
        if mended
        else mock.patch.object(background._Recorded, "__init__", holds_nothing)
    )
    with taken_out:
        pending = _submit(on, behind, out)
    later = [torch.full((elements,), torch.nan, device=on.device) for _ in range(2)]
    pending.wait()
    wrong = int((out != 1).sum())
    return {
        "ok": (wrong == 0) is mended,
        "wrong numbers": wrong,
        "taken later": len(later),
    }


def _submit(on: Device, behind: Background, out: torch.Tensor) -> Pending:
    """Submit work that alone holds its source once this returns."""
    source = torch.ones_like(out)

    def run() -> None:
        on.sleep(200)
        out.copy_(source)

    return behind.submit(run)


def _sums(on: Device, *, mended: bool) -> dict[str, Any]:
    """Train a model stored in bfloat16, reduced in float32, while the stream that adds
    micro-batches up sleeps before it reads."""
    if not mended:
        on.needs()
    knobs = {"shard_degree": 1, "param_dtype": "bfloat16"}
    told: Callable[[torch.Tensor], None] = streams.used_here

    def late(tensor: torch.Tensor) -> None:
        if mended:
            told(tensor)
        on.sleep(20)

    def trained() -> Trained:
        return train(knobs, on.device, dtype=torch.bfloat16)

    expected = trained()
    with mock.patch.object(streams, "used_here", late):
        seen = trained()
    wrong = sum(
        int((seen.parameters[name] != value).sum())
        for name, value in expected.parameters.items()
    )
    return {"ok": (wrong == 0) is mended, "wrong numbers": wrong}
