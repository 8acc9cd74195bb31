"""Activation checkpointing, selective checkpointing and torch.compile: the same
numbers, and no gather too many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from smp_core.activations.selective import selective_contexts
from smp_core.context_parallel import key_value_exchange
from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.sequence_plan import SequencePlan
from tests.core.context_parallel.attention_cases import group_of
from tests.harness import run_ranks

LENGTH, LAYERS, WIDTH = 16, 2, 8


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.sinks = torch.nn.Parameter(torch.tensor([-1.0, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(x).chunk(3, -1))
        return x + attention(q, k, v, plan, window=9, sinks=self.sinks).flatten(2)


def gradients(way: str, degree: int) -> tuple[list[torch.Tensor], int]:
    """Gradients summed over ranks, and how many gathers there were."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    weight = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    group = group_of(1) if degree > 1 else key_value_exchange.register_group(None)
    plan = SequencePlan(degree, LENGTH, ((0, 5), (0,)), group=group.number)
    x, weight = (tensor[:, plan.positions(group.rank)] for tensor in (x, weight))
    calls, start = 0, key_value_exchange._start_gather

    def counted(*args):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return start(*args)

    key_value_exchange._start_gather = counted
    encoded = plan.encode()

    def forward(x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            if way == "full":
                x = checkpoint(layer, x, encoded, use_reentrant=False)
            elif way == "selective":
                x = checkpoint(
                    layer,
                    x,
                    encoded,
                    use_reentrant=False,
                    context_fn=selective_contexts,
                )
            else:
                x = layer(x, encoded)
        return x

    if way in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        forward = torch.compile(forward, backend=way, fullgraph=True)
    try:
        (forward(x, encoded) * weight).sum().backward()
    finally:
        key_value_exchange._start_gather = start
    found = [parameter.grad for layer in layers for parameter in layer.parameters()]
    if degree > 1:
        for gradient in found:
            dist.all_reduce(gradient)
    return found, calls


def errors_and_gathers(ways: list[str]) -> dict[str, tuple[float, int]]:
    expected, _ = gradients("plain", 1)
    seen = {}
    for way in ways:
        found, calls = gradients(way, 2)
        seen[way] = (
            max(
                (a - b).abs().max().item() for a, b in zip(found, expected, strict=True)
            ),
            calls,
        )
    return seen


def test_checkpointing_and_compile_keep_the_numbers_and_gather_as_often_as_they_must() -> (
    None
):
    """A gather per layer forward and one backward; full checkpointing gathers once
    more, selective does not."""
    for seen in run_ranks(errors_and_gathers, 2, ["plain", "full", "selective"]):
        assert {way: calls for way, (_, calls) in seen.items()} == {
            "plain": 4,
            "full": 6,
            "selective": 4,
        }
        for way, (error, _) in seen.items():
            assert error <= 1e-12, f"{way}: {error}"


@pytest.mark.filterwarnings("ignore")
# In the normal run: tests/core/context_parallel/test_models.py compiles layers.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_whole_graph_compiles(backend: str) -> None:
    for seen in run_ranks(errors_and_gathers, 2, [backend], timeout=600):
        error, calls = seen[backend]
        assert error <= 1e-12 and calls == 2 * LAYERS


def saved_lengths() -> tuple[set[int], int]:
    """The sequence lengths of the 4-d tensors that autograd keeps."""
    group = group_of(1)
    plan = SequencePlan(group.degree, 64, group=group.number)
    q, k, v = (
        torch.randn(1, plan.local_length, 2, 8, requires_grad=True) for _ in range(3)
    )
    lengths: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 4:
            lengths.add(tensor.shape[1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attention(q, k, v, plan.encode())
    return lengths, plan.local_length


def test_nothing_of_the_whole_sequence_is_kept_for_backward() -> None:
    for lengths, local in run_ranks(saved_lengths, 4):
        assert lengths == {local}
