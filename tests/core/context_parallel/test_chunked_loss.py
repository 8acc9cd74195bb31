"""The chunked cross entropy is the cross entropy, and holds less."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_core.context_parallel.chunked_loss import chunked_cross_entropy
from tests.core.context_parallel.measuring import saved_bytes


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
    for ours, theirs in zip(
        torch.autograd.grad(chunked, (hidden, *head.parameters())),
        expected,
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= 1e-13


def test_logits_of_all_tokens_are_never_kept() -> None:
    hidden, head, labels = case()
    whole = saved_bytes(
        lambda: F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    )
    chunked = saved_bytes(lambda: chunked_cross_entropy(hidden, head, labels, 4))
    assert whole >= labels.numel() * 50 * 8 > chunked


def test_smoothed_labels_are_torchs_own() -> None:
    hidden, head, labels = case()
    whole = F.cross_entropy(
        head(hidden).flatten(0, 1), labels.flatten(), label_smoothing=0.2
    )
    assert (
        chunked_cross_entropy(hidden, head, labels, 5, label_smoothing=0.2) - whole
    ).abs() <= 1e-13


def test_what_does_not_fit_is_refused() -> None:
    hidden, head, labels = case()
    with pytest.raises(ValueError, match="differ in their tokens"):
        chunked_cross_entropy(hidden, head, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(hidden, head, labels, 0)
