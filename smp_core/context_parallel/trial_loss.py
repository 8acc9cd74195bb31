"""The last part of a trial (:mod:`smp_core.context_parallel.trial`), for steps that
compute their loss themselves: in the first backward pass, gradients of the model's
outputs show which of them the loss uses.

A loss over parts of the tokens is a mean of terms, one for each target. Gradients of
the outputs show what is not:

    of all targets only the first or the last one of a rank gets none      a shift inside the step
    only a rank's first or last token gets one                             a class token, the last hidden state
    all tokens of a row get the same                                       a mean over tokens
    a token without a target gets one                                      a mean over other tokens than the targets
    some targets get none                                                  a mask inside the step: a warning
    those of logits are not 1 / (own targets) for each target              a divisor that is not the number of targets

The last three are looked at in outputs that no further module takes: through attention
every token has a gradient.

Shape letters: B rows, L tokens of a rank, N targets of a rank, V classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from smp_core.context_parallel.chunked_loss import IGNORED
from smp_core.context_parallel.replaced_attention import SplitBatch
from smp_core.context_parallel.trial_run import tensors_of

logger = logging.getLogger("smp")

# Tokens whose probabilities are computed at once: all of them would be as large as the
# logits.
_TOKENS_AT_ONCE = 64

_NO_TARGETS = (
    "nothing, as a sum over labels does: labels of a batch that ranks share are all -100. Write "
    "labels=batch['shift_labels'], which are the targets of this rank's tokens, without a shift; under Trainer, "
    "compute_loss_func"
)


def watch_loss(
    output: object,
    split: SplitBatch,
    refuse: Callable[[str | None], None],
    is_last: Callable[[], bool],
) -> None:
    """Look at the gradients of a call's outputs once.

    Args:
        refuse: called on every context rank, with words where something is wrong.
        is_last: returns, in backward, whether no other call followed that gave features.
    """
    expected = _expected(split)
    for name, tensor in tensors_of(output):
        if has_features(tensor, split):
            look = _look_once(name, tensor.detach(), split, expected, refuse, is_last)
            tensor.register_hook(look)


def has_features(tensor: Tensor, split: SplitBatch) -> bool:
    """Return whether a loss may be taken of an output's features of each token."""
    return (
        tensor.requires_grad
        and tensor.dim() > 2
        and tensor.shape[1] == split.plan.local_length
    )


def _look_once(
    name: str,
    output: Tensor,
    split: SplitBatch,
    expected: Tensor,
    refuse: Callable[[str | None], None],
    is_last: Callable[[], bool],
) -> Callable[[Tensor], None]:
    is_over = False

    def look(gradient: Tensor) -> None:
        # Later backward passes are not looked at: they would cost a message each.
        nonlocal is_over
        if is_over:
            return
        is_over = True
        gradient, targets = gradient.detach(), expected.to(gradient.device)
        found = _wrong(gradient, targets.any(0), split.labels is not None)
        if found is None and is_last():
            found = _other_tokens(gradient, targets) or _other_divisor(
                gradient, output, split
            )
        refuse(None if found is None else f"the loss takes of {name} {found}")

    return look


def _expected(split: SplitBatch) -> Tensor:
    """Return [B, L], whether a token has a target; of a batch without targets [1, L],
    whether it is no padding."""
    if split.shift_labels is not None:
        return split.shift_labels != IGNORED
    return split.plan.positions(split.rank)[None] < split.length


def _other_tokens(gradient: Tensor, targets: Tensor) -> str | None:
    """Return in words that the loss counts tokens without a target; warn of targets
    that it leaves out."""
    # Rows that a step has put together in another way are not the batch's.
    if len(targets) not in (1, len(gradient)):
        return None
    taken = (gradient.flatten(2) != 0).any(2)
    more = int((taken & ~targets).sum())
    if more:
        return (
            f"{more} of a rank's tokens that have no target (padding, or a label of -100), while a mean is weighted by "
            "the targets of each rank: leave these tokens out of every term of the loss"
        )
    # A clipped or saturated term has no gradient by right, so this is no error.
    left, count = int((targets & ~taken).sum()), int(targets.expand_as(taken).sum())
    if taken.any() and left:
        logger.warning(
            "the loss leaves out %d of the %d targets of this rank's tokens, and a mean over the others is weighted by "
            "all of them: give tokens that a step masks the target -100 in the batch",
            left,
            count,
        )
    return None


def _wrong(gradient: Tensor, expected: Tensor, shifted: bool) -> str | None:
    # Tokens whose output the loss has used.
    taken = (gradient.flatten(2) != 0).any(2).any(0)
    # A first and a last token cannot be told from the rest among two.
    if int(expected.sum()) < 3:
        return None
    if not bool(taken.any()):
        return _NO_TARGETS if shifted else None
    for place, word in ((0, "first"), (-1, "last")):
        others = torch.ones_like(taken)
        others[place] = False
        if (
            expected[place]
            and not taken[place]
            and torch.equal(taken[others], expected[others])
        ):
            return f"all targets but those of a rank's {word} token, as a loss that shifts tokens inside the step does"
        if taken[place] and not taken[others].any():
            return f"a rank's {word} token alone"
    # One gradient for all tokens of a row is a mean; one number for all elements is a
    # sum, which splits well.
    is_same = bool((gradient == gradient[:, :1]).all())
    is_sum = bool((gradient == gradient.flatten()[0]).all())
    return "the mean over a rank's tokens" if is_same and not is_sum else None


def _other_divisor(gradient: Tensor, logits: Tensor, split: SplitBatch) -> str | None:
    """Return in words that a cross entropy of logits [B, L, V] is no mean over this
    rank's targets, where its gradient shows that; warn where it may be a scaled one."""
    targets, of_loss = split.shift_labels, split.loss_gradients
    # Of several weighted losses it is not known which one the logits went into.
    if targets is None or len(of_loss) != 1 or logits.shape[:-1] != targets.shape:
        return None
    # Values in place of classes have no cross entropy.
    if targets.is_floating_point():
        return None
    rows = (targets != IGNORED).flatten().nonzero()[:, 0].to(logits.device)
    factors = _factors(
        gradient.flatten(0, 1),
        logits.flatten(0, 1),
        targets.flatten().long().to(logits.device),
        rows,
    )
    scale = float(of_loss[0])
    if factors is None or not scale:
        return None
    # The derivative of the step's own loss by each target's cross entropy.
    factors = factors / scale
    total, count = float(factors.sum()), len(factors)
    eps = torch.finfo(gradient.dtype).eps
    is_even = float(factors.max() - factors.min()) <= max(4 * eps, 1e-4) * abs(total)
    is_even = is_even or _near(float(factors.max()), float(factors.min()), eps)

    # Each case has its own remedy. A loss that nothing weights has to do so itself.
    if split.divided_by_model and not split.weighted:
        weight = 1.0 if split.weight is None else float(split.weight)
        # Twice a rank's share may be an accumulated step's by right.
        is_own_mean = is_even and _near(total, 1, eps) and abs(weight - 1) > 1e-3
        if not is_own_mean or _near(weight, round(weight), 1e-3):
            return None
        return (
            f"the mean over a rank's targets, which have {weight:.3g} times the share of all, and nothing weights it: "
            "write loss = weighted_mean(loss) (smp_core.context_parallel), or take the loss that a Transformers model "
            "computes"
        )
    if not is_even:
        return (
            (
                "targets with weights that are divided by their sum over a rank's own tokens (F.cross_entropy with "
                "weight=, a mask inside the step, a mean for each row), while means are weighted by the number of "
                "targets of each rank: give tokens that a step masks the target -100 in the batch, and divide the sum "
                "of weighted terms by the number of targets"
            )
            if _near(total, 1, eps)
            else None
        )
    if count > 1 and _near(total, count, eps):
        return "the sum over a rank's targets, while losses are averaged over ranks: divide it by their number"
    is_of_all = count < targets.numel() and _near(total * targets.numel(), count, eps)
    # A round factor, as a weight of one loss of several, may be equal by chance.
    if is_of_all and not _near(20 * total, round(20 * total), eps):
        return (
            f"the sum over {count} targets divided by all {targets.numel()} tokens of a rank, while means are weighted "
            "by the targets of each rank: divide it by the number of targets"
        )
    # Half of a mean looks the same with two ranks, so this is no error.
    if is_of_all or _near(total * split.plan.degree, 1, eps):
        logger.warning(
            "the loss is %.3g of the mean over this rank's targets: right if a step multiplies its mean by that; a sum "
            "that is divided by the targets of whole sequences, or by all tokens, has to be divided by the targets of "
            "this rank",
            total,
        )
    return None


def _near(found: float, expected: float, eps: float) -> bool:
    return abs(found - expected) <= max(eps / 2, 1e-5) * abs(expected)


def _factors(
    gradient: Tensor, logits: Tensor, targets: Tensor, rows: Tensor
) -> Tensor | None:
    """Return [N], what the cross entropy of each target is multiplied by in the loss:
    the gradient is that times (probabilities - target). None: it is something else.

    Args:
        gradient, logits: [B * L, V]; ``targets`` [B * L] are classes.
        rows: [N], those that have a target.
    """
    if logits.shape[-1] < 3 or not len(rows):
        return None
    found = []
    for some in rows.split(_TOKENS_AT_ONCE):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        slope, p = gradient[some].to(dtype), logits[some].to(dtype).softmax(-1)
        at = targets[some][:, None]
        # Tokens without a target may have another number than -100.
        if int(at.min()) < 0 or int(at.max()) >= p.shape[-1]:
            return None
        # Classes besides the target: small probabilities have all their digits.
        others = p.scatter(-1, at, 0)
        factor = (slope * others).sum(-1) / others.square().sum(-1)
        # The target's own entry has to follow from the others.
        expected = factor[:, None] * p.scatter_add(-1, at, -torch.ones_like(p[:, :1]))
        error = (slope - expected).abs().amax(-1)
        # In half precision a few roundings are as large as another loss would be.
        eps = torch.finfo(gradient.dtype).eps
        limit = min(100 * eps, max(4 * eps, 1e-5)) * factor.abs()
        if not bool((error <= limit).all()):
            return None
        found.append(factor)
    return torch.cat(found)
