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

The last two are looked at in outputs that no further module takes: through attention
every token has a gradient.

Shape letters: B rows, L tokens of a rank.
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
    shifted = split.labels is not None
    for name, tensor in tensors_of(output):
        if has_features(tensor, split):
            tensor.register_hook(_look_once(name, expected, shifted, refuse, is_last))


def has_features(tensor: Tensor, split: SplitBatch) -> bool:
    """Return whether a loss may be taken of an output's features of each token."""
    return (
        tensor.requires_grad
        and tensor.dim() > 2
        and tensor.shape[1] == split.plan.local_length
    )


def _look_once(
    name: str,
    expected: Tensor,
    shifted: bool,
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
        found = _wrong(gradient, targets.any(0), shifted)
        if found is None and is_last():
            found = _other_tokens(gradient, targets)
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
