"""The chunked cross entropy is the cross entropy, and holds less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smp_core.context_parallel.active import enabled
from smp_core.context_parallel.chunked_loss import chunked_cross_entropy, use_chunked_loss
from tests.core.context_parallel.model_cases import Run, build, on_ranks, whole_batch
from tests.harness import run_ranks


def saved_bytes(compute: Callable[[], torch.Tensor]) -> int:
    """Bytes of the different tensors that autograd keeps for backward."""
    storages: dict[int, int] = {}
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute()
    return sum(storages.values())


def case() -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 37, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(50, (2, 37))
    labels[0, :20] = -100
    return hidden, nn.Linear(8, 50, dtype=torch.float64), labels


@pytest.mark.parametrize("chunk", [1, 5, 74, 1000])
def test_loss_and_gradients_are_the_same(chunk: int) -> None:
    hidden, head, labels = case()
    whole = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(whole, (hidden, *head.parameters()))
    chunked = chunked_cross_entropy(hidden, head, labels, chunk)
    assert (chunked - whole).abs() <= 1e-13
    for ours, theirs in zip(torch.autograd.grad(chunked, (hidden, *head.parameters())), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-13


def test_logits_of_all_tokens_are_never_kept() -> None:
    hidden, head, labels = case()
    whole = saved_bytes(lambda: F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()))
    chunked = saved_bytes(lambda: chunked_cross_entropy(hidden, head, labels, 4))
    assert whole >= labels.numel() * 50 * 8 > chunked


def test_what_does_not_fit_is_refused() -> None:
    hidden, head, labels = case()
    with pytest.raises(ValueError, match="differ in their tokens"):
        chunked_cross_entropy(hidden, head, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(hidden, head, labels, 0)
    with pytest.raises(ValueError, match="causal language model, not Linear"):
        use_chunked_loss(head)
    capped: Any = build("gemma3")
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        use_chunked_loss(capped)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_transformers_model_has_the_loss_it_would_have(name: str) -> None:
    """float64 logits are not cast to float32 here, as Transformers' own loss does: 1e-6."""
    model = build(name)
    chunked = copy.deepcopy(model)
    use_chunked_loss(chunked, 7)
    batch = whole_batch(Run(name, 1, 1))
    for each in (model, chunked):
        each(**batch, use_cache=False).loss.backward()
    assert chunked(**batch).logits is None and chunked.eval()(**batch).logits is not None
    for one, other in zip(chunked.parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-6


def over_ranks() -> tuple[float, float]:
    """The loss of a sharded, split and chunked model, and of the same without chunks."""
    run = Run("llama", 2, 2, "packed")
    parallel, expected = on_ranks(run)
    model: Any = parallel.module
    use_chunked_loss(model, 3)
    rows = {
        key: value.chunk(parallel.mesh.data_size)[parallel.mesh.data_rank] for key, value in whole_batch(run).items()
    }
    assert parallel.context is not None
    split = parallel.context.split(rows)
    with enabled(split):
        loss = model(**split.batch, use_cache=False).loss
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), expected.item()


def test_it_goes_with_shared_sequences() -> None:
    """1e-6: the number of targets is a float32 in Transformers' way of passing it."""
    for ours, theirs in run_ranks(over_ranks, 4):
        assert abs(ours - theirs) <= 1e-6
