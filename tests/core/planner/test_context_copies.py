"""Copies around attention over split sequences take the time that plans give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.config import SmpConfig
from smp_core.context_parallel import attention, key_value_exchange
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.sequence_plan import SequencePlan
from smp_core.engine.decide import decide
from smp_core.plan import Plan, Shapes
from smp_core.planner.context_bytes import copies
from smp_core.planner.hardware import Hardware
from tests.core.planner.planner_models import Plain

RANKS, TOKENS, HEADS, SIZE = 4, 512, 2, 16


@pytest.fixture(scope="module")
def planned() -> Plan:
    knobs = SmpConfig(
        shard_degree=RANKS, context_parallel_degree=RANKS, param_dtype="bfloat16"
    )
    cluster = Hardware.parse("1x4:a100-40g").cluster()
    return decide(Shapes.of(Plain(), knobs), knobs, cluster)


class _Copied(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name == "_unsafe_view":
            return made
        # `a[i] += b` ends with a copy of a view onto itself, which torch leaves out.
        if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return made
        # What is filled or overwritten is not read.
        read = list(args[1:] if name in ("copy_", "zero_", "fill_") else args)
        if name.endswith("_like") or name == "new_zeros":
            read = []
        for each in [*read, made]:
            for tensor in each if isinstance(each, list) else [each]:
                if isinstance(tensor, torch.Tensor):
                    self.bytes += tensor.numel() * tensor.element_size()
        return made


def test_copies_of_keys_values_and_their_gradients_are_those_that_are_made(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators themselves run on the last of four ranks, without kernels and
    messages."""
    group: Any = ContextGroup(object(), 1, tuple(range(RANKS)), RANKS - 1)  # type: ignore[arg-type]  # sends nothing
    layout = SequencePlan(RANKS, TOKENS)
    monkeypatch.setattr(attention, "_plan_for", lambda *_: (layout, group))
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(key_value_exchange, name, lambda *_, **__: None)
    monkeypatch.setattr(key_value_exchange, "prefers_messages", lambda *_: False)
    monkeypatch.setattr(attention.kernels, "forward", _forward)
    monkeypatch.setattr(attention.kernels, "backward", _backward)

    own = torch.empty(2, TOKENS // RANKS, HEADS, SIZE, dtype=torch.bfloat16)
    whole = 2 * RANKS * own.numel() * own.element_size()
    where = torch.empty(0)
    with _Copied() as forward:
        out, lse = attention.attend(own, own, own, where, 1.0, True)
    with _Copied() as backward:
        attention.differentiate(own, own, own, own, out, lse, where, 1.0, True)
    gather, reduce = (whole * each for each in copies(planned))
    # Beside them outputs and LSE, and the gradients of this rank's queries.
    small = whole / 2
    assert gather <= forward.bytes <= gather + small
    # The ranges of keys that its two chunks see are an eighth longer than the sequence.
    assert gather + reduce <= backward.bytes
    assert backward.bytes <= 1.06 * (gather + reduce)


def _forward(q: torch.Tensor, k: Any, v: Any, *_: Any) -> Any:
    rows, length, heads, _size = q.shape
    return torch.empty_like(q), q.new_empty(rows, heads, length, dtype=torch.float32)


def _backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: Any, *_: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
