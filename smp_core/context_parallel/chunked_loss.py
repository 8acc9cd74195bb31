"""The cross entropy of long sequences, without the logits of all tokens at once.

The logits of a chunk of tokens are computed, used and freed, and computed again in
backward (one more product with the head's weight): memory holds chunk x vocabulary
instead of tokens x vocabulary. At 16,384 tokens and 128,256 words the float32 logits
alone would be 7.8 GiB.

Shape letters: T tokens, C tokens of a chunk, H width, V words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100


torchs_sum = functools.partial(F.cross_entropy, reduction="sum")


def chunked_cross_entropy(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    labels: Tensor,
    chunk: int = 1024,
    *,
    divisor: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    cross_entropy_sum: Callable[..., Tensor] = torchs_sum,
) -> Tensor:
    """Compute the cross entropy of ``lm_head(hidden)`` against ``labels``.

    Args:
        hidden: [..., T, H], the head's input.
        lm_head: maps [C, H] to logits [C, V]; a linear layer, for example. A module
            that FSDP shards by itself would be gathered for every chunk: call this in
            its forward.
        labels: [..., T], the target of each token (already shifted); -100: none.
        chunk: tokens C whose logits exist at one time.
        divisor: the divisor of the sum of losses; default the number of targets, so
            that the result is their mean. Over ranks that share sequences
            ``split.tokens_per_rank``.
        label_smoothing: in [0, 1], as in torch's cross entropy.
        cross_entropy_sum: called as torch's is, for logits of which this rank has some
            words only.

    Returns:
        0-d, float32, or float64 for float64 logits (as Transformers' loss: half
        precision logits are cast).

    Raises:
        ValueError: shapes that do not fit, or no positive chunk.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} and labels {tuple(labels.shape)} differ in their tokens"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; allowed: 1 token or more")
    hidden_TH, labels_T = hidden.flatten(0, -2), labels.flatten()

    # Half precision would lose the small differences between large sums of
    # exponentials.
    def loss_of(hidden_CH: Tensor, labels_C: Tensor) -> Tensor:
        logits_CV = lm_head(hidden_CH)
        if logits_CV.dtype != torch.float64:
            logits_CV = logits_CV.float()
        return cross_entropy_sum(
            logits_CV, labels_C, ignore_index=IGNORED, label_smoothing=label_smoothing
        )

    # Each chunk keeps its input and nothing of its logits.
    parts = [
        checkpoint(
            loss_of, hidden_CH, labels_C, use_reentrant=False, preserve_rng_state=False
        )
        for hidden_CH, labels_C in zip(
            hidden_TH.split(chunk), labels_T.split(chunk), strict=True
        )
    ]
    total = torch.stack(parts).sum()
    if divisor is None:
        divisor = (labels_T != IGNORED).sum()
    return total / divisor
