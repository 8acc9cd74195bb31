"""Products of split layers in pieces, behind their messages: numbers, messages and
their order, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.tensor_parallel.fused import PIECES, gather_products, product_scatter
from smp_core.torch_facts.compat import symmetric_memory_operators
from tests.core.tensor_parallel.model_cases import (
    Case,
    Training,
    alone,
    batches,
    differences,
    loss_of,
    together,
)
from tests.core.tensor_parallel.models import GLOBS, MODELS, PlainBlock, PlainModel
from tests.core.tensor_parallel.symmetric_memory_stand_in import symmetric_memory_on_cpu
from tests.harness import run_ranks

RECOMPUTED = ("activations", "full")
OVERLAPS = ("sums", "pieces", "fused")


def overlapping(
    kind: str,
    overlap: str,
    *knobs: tuple[str, Any],
    plan: Any = "auto",
    micro_batches: int = 1,
) -> Case:
    recipe = ("tensor_parallel", {"plan": plan, "overlap": overlap})
    return Case(kind, micro_batches=micro_batches, knobs=(recipe, *knobs))


def played(overlap: str) -> contextlib.AbstractContextManager[None]:
    return symmetric_memory_on_cpu() if overlap == "fused" else contextlib.nullcontext()


# Conv1D with biases, alongside a packed weight that is exchanged; frozen weights, whose
# adapters read the same tokens.
CASES = [
    overlapping("gpt2", "pieces", ("activations", "selective"), micro_batches=2),
    overlapping("llama_lora", "pieces"),
    overlapping("llama", "fused", RECOMPUTED),
]


def trained(case: Case) -> Training:
    with played(dict(case.knobs)["tensor_parallel"]["overlap"]):
        return together(case)


def bytes_of_a_step(overlap: str) -> dict[str, float]:
    with played(overlap):
        parallel = overlapping("llama", overlap, RECOMPUTED).parallel()
        for _ in range(2):
            loss_of(parallel.module, batches(1)[0, 0]).backward()
            parallel.meter.close_step()
    return {
        name: value
        for name, value in parallel.meter.per_step().items()
        if "bytes" in name and "tensor_" in name
    }


Shapes = list[tuple[torch.Size, tuple[int, ...]]]


def shapes_of_operators(device: str) -> Shapes:
    """What the operators return: shapes and strides."""
    operators, group = symmetric_memory_operators(), dist.group.WORLD
    assert group is not None
    part, factor = (
        torch.ones(3, 4, 6, device=device),
        torch.ones(10, 6, device=device).t(),
    )
    gathered, (product,) = operators.fused_all_gather_matmul(
        part, [factor], 1, group.group_name
    )
    total = operators.fused_matmul_reduce_scatter(
        product.contiguous(), factor.t(), "sum", 1, group.group_name
    )
    return [(each.shape, each.stride()) for each in (gathered, product, total)]


def seen_on_ranks() -> Any:
    with symmetric_memory_on_cpu():
        shapes = shapes_of_operators("cpu"), shapes_of_operators("meta")
    bytes_sent = [bytes_of_a_step(overlap) for overlap in OVERLAPS]
    return list(map(trained, CASES)), bytes_sent, shapes


@pytest.mark.slow
def test_pieces_train_like_one_process_and_send_the_same_bytes() -> None:
    """float64, 1e-12: see test_equivalence. Also where blocks are recomputed: a row
    layer's product is made only once if nothing wants it twice, and what is sent is
    that of the other overlap."""
    for trainings, bytes_sent, (shapes, on_meta) in run_ranks(seen_on_ranks, 2):
        for case, seen in zip(CASES, trainings, strict=True):
            assert differences(seen, alone(case.kind, case.micro_batches)) == [], case
        assert (
            bytes_sent[0] == bytes_sent[1] == bytes_sent[2]
            and sum(bytes_sent[0].values()) > 0
        )
        assert shapes == on_meta


class Noted(TorchDispatchMode):
    """Products between the messages of a stand-in for the axis, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.axis: Any = SimpleNamespace(
            degree=2,
            overlap="pieces",
            start_gather=self._begin(self._twice),
            start_reduce_scatter=self._begin(self._half),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.events.append("product")
        return func(*args, **(kwargs or {}))

    def _begin(
        self, result: Callable[..., torch.Tensor]
    ) -> Callable[..., Callable[[], torch.Tensor]]:
        def start(*args: Any) -> Callable[[], torch.Tensor]:
            self.events.append("start")
            return lambda: self.events.append("end") or result(*args)  # type: ignore[func-returns-value]

        return start

    @staticmethod
    def _twice(part: torch.Tensor) -> torch.Tensor:
        return torch.stack([part, part])

    @staticmethod
    def _half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(2, dim)[0]


def test_messages_are_on_their_way_while_pieces_are_multiplied() -> None:
    with Noted() as gathering:
        gather_products(torch.ones(2, 8, 4), [torch.ones(4, 3)], gathering.axis)
    assert gathering.events == ["start"] * PIECES + ["end", "product"] * PIECES
    with Noted() as adding:
        product_scatter(torch.ones(2, 16, 4), torch.ones(4, 3), adding.axis)
    assert adding.events == ["product", "start"] * PIECES + ["end"] * PIECES


class GatedBlock(PlainBlock):
    """Two column layers of one module that read different tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before(x))
        return x + self.down(self.gate(x).tanh() * self.up(self.between(x)))


def gated() -> nn.Module:
    model = PlainModel()
    model.blocks[1] = GatedBlock()
    return model


REFUSED = {
    "fused": (
        overlapping("llama", "fused"),
        "for CUDA, and the device is cpu; write tensor_parallel={'overlap': 'pie",
    ),
    "whole": (
        Case(
            "llama",
            knobs=(
                ("tensor_parallel", {"overlap": "pieces", "sequence_parallel": False}),
            ),
        ),
        "only tokens are gathered in pieces, and they stay whole",
    ),
    "fp8": (
        overlapping("llama", "pieces", ("fp8", True)),
        "FP8 layers are not multiplied in pieces; leave fp8 out",
    ),
    "nothing": (
        overlapping("plain", "pieces", plan={"head": "column_gather"}),
        "has no effect: no split layer among",
    ),
    "other inputs": (
        overlapping("gated", "pieces", plan={**GLOBS, "*.gate": "column"}),
        "their common input is gathered, and blocks.1.up did not read it; write tensor_parallel={'overlap': 'sums'}",
    ),
}


def refusals() -> dict[str, str]:
    found = {}
    MODELS["gated"] = gated
    for name, (case, _) in REFUSED.items():
        with pytest.raises(ValueError) as caught:
            loss_of(case.parallel().module, batches(1)[0, 0])
        found[name] = str(caught.value)
    del MODELS["gated"]
    return found


def test_overlaps_that_cannot_be_are_refused() -> None:
    for found in run_ranks(refusals, 2):
        for name, (_, said) in REFUSED.items():
            assert said in found[name]
