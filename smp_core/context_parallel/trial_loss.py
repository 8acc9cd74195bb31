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
    those of logits weigh a target more on one rank than on another        a divisor that is the same on all ranks

The last four are looked at in outputs that no further module takes: through attention
every token has a gradient. What a target weighs is the derivative of the loss by its
cross entropy, and is found whatever else the loss has of the logits that is a function
of their log-sum-exp (z-loss) or mean (label smoothing). Of targets that are values it is
the derivative by the mean squared or absolute error of a token.

Shape letters: B rows, L tokens of a rank, N targets of a rank, V classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smp_core.context_parallel.chunked_loss import IGNORED
from smp_core.context_parallel.replaced_attention import SplitBatch
from smp_core.context_parallel.trial_run import tensors_of

logger = logging.getLogger("smp")

# Tokens whose probabilities are computed at once: all of them would be as large as the
# logits, of which the largest classes of each token are kept until backward.
_TOKENS_AT_ONCE, _CLASSES = 64, 32

_NO_TARGETS = (
    "nothing, as a sum over labels does: labels of a batch that ranks share are all -100. Write "
    "labels=batch['shift_labels'], which are the targets of this rank's tokens, without a shift; under Trainer, "
    "compute_loss_func"
)


Share = tuple[float, float]
"""What each target of a rank weighs in the loss, and the rounding of the gradients that
show it."""


def watch_loss(
    output: object,
    split: SplitBatch,
    refuse: Callable[[str | None, Share | None], None],
    is_last: Callable[[], bool],
) -> None:
    """Look at the gradients of a call's outputs once.

    Args:
        refuse: called on every context rank, with words where something is wrong, and
            with what each target of this rank weighs, if that is known.
        is_last: returns, in backward, whether no other call followed that gave features.
    """
    expected = _expected(split)
    for name, tensor in tensors_of(output):
        if has_features(tensor, split):
            made = tensor.detach()
            logits = _Logits.of(made, split) or _Values.of(made, split)
            tensor.register_hook(
                _look_once(name, logits, split, expected, refuse, is_last)
            )


def has_features(tensor: Tensor, split: SplitBatch) -> bool:
    """Return whether a loss may be taken of an output's features of each token."""
    return (
        tensor.requires_grad
        and tensor.dim() > 2
        and tensor.shape[1] == split.plan.local_length
    )


def _look_once(
    name: str,
    logits: _Logits | _Values | None,
    split: SplitBatch,
    expected: Tensor,
    refuse: Callable[[str | None, Share | None], None],
    is_last: Callable[[], bool],
) -> Callable[[Tensor], None]:
    is_over = False

    def look(gradient: Tensor) -> None:
        # Later backward passes are not looked at: they would cost a message each.
        nonlocal is_over, logits
        if is_over:
            return
        is_over = True
        gradient, targets = gradient.detach(), expected.to(gradient.device)
        found, share = _wrong(gradient, targets.any(0), split.labels is not None), None
        if found is None and is_last():
            found = _other_tokens(gradient, targets)
            if found is None and logits is not None:
                found, share = _other_divisor(gradient, logits, split)
        logits = None
        refuse(None if found is None else f"the loss takes of {name} {found}", share)

    return look


@dataclass(frozen=True, eq=False)
class _Logits:
    """The part of logits [B, L, V] that is kept until backward, of the N tokens with a
    target.

    Attributes:
        rows: [N], places in [B * L].
        targets: [N], classes.
        top: [N, K], the classes with the largest logits, and ``logits`` of these.
        at_target: [N], the target's logit.
        lse: [N], log-sum-exp over all classes.
    """

    rows: Tensor
    targets: Tensor
    top: Tensor
    logits: Tensor
    at_target: Tensor
    lse: Tensor

    @classmethod
    def of(cls, output: Tensor, split: SplitBatch) -> _Logits | None:
        """Take what is kept of an output; None: it has no cross entropy of the batch's
        targets."""
        targets = split.shift_labels
        # Values in place of classes have no cross entropy.
        if targets is None or targets.is_floating_point():
            return None
        if output.shape[:-1] != targets.shape or output.shape[-1] < 5:
            return None
        flat = targets.flatten().long().to(output.device)
        return cls.among(output.flatten(0, 1), flat)

    @classmethod
    def among(cls, output: Tensor, targets: Tensor) -> _Logits | None:
        """Take the same of logits [B * L, V] and targets [B * L]."""
        rows = (targets != IGNORED).nonzero()[:, 0]
        of_rows = targets[rows]
        # Tokens without a target may have another number than -100.
        if not len(rows) or int(of_rows.min()) < 0:
            return None
        if int(of_rows.max()) >= output.shape[-1]:
            return None
        dtype = torch.promote_types(output.dtype, torch.float32)
        parts = []
        for some, at in zip(
            rows.split(_TOKENS_AT_ONCE), of_rows.split(_TOKENS_AT_ONCE), strict=True
        ):
            logits = output[some].to(dtype)
            values, top = logits.topk(min(_CLASSES, logits.shape[-1]))
            at_target = logits.gather(-1, at[:, None])[:, 0]
            parts.append((top, values, at_target, logits.logsumexp(-1)))
        return cls(rows, of_rows, *map(torch.cat, zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class _Values:
    """The differences of outputs [B, L, V] from targets that are values.

    Attributes:
        rows: [N], places in [B * L] of the tokens with a target.
        off: [N, V], the differences there.
    """

    rows: Tensor
    off: Tensor

    @classmethod
    def of(cls, output: Tensor, split: SplitBatch) -> _Values | None:
        """Take what is kept of an output; None: it is not compared with values."""
        if split.values is None or split.shift_labels is None:
            return None
        if output.numel() != split.values.numel():
            return None
        rows = (split.shift_labels.flatten() != IGNORED).nonzero()[:, 0]
        values = split.values.to(output).view_as(output)
        off = (output - values).flatten(0, 1)[rows]
        return cls(rows, off) if len(rows) and off.any() else None

    def factors(self, gradient: Tensor) -> Tensor | None:
        """Return [N], the derivative of the loss by the mean error of each token; None:
        it has other terms of the outputs.

        Args:
            gradient: [B * L, V].
        """
        slope = gradient[self.rows].to(self.off.dtype)
        limit = max(8 * torch.finfo(gradient.dtype).eps, 1e-4)
        for error in (2 * self.off, self.off.sign()):
            rate = (slope * error).sum() / error.square().sum()
            if (slope - rate * error).abs().max() <= limit * slope.abs().max():
                return (rate * error.shape[-1]).expand(len(error))
        return None


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


def _other_divisor(
    gradient: Tensor, logits: _Logits | _Values, split: SplitBatch
) -> tuple[str | None, Share | None]:
    """Return in words that a cross entropy of logits [B, L, V], or an error of values,
    is no mean over this rank's targets, where its gradient shows that, and what each
    target weighs; warn where it may be a scaled mean."""
    flat = gradient.flatten(0, 1)
    if isinstance(logits, _Values):
        factors, kind = logits.factors(flat), "squared or absolute error"
    else:
        factors, kind = _factors(flat, logits), "cross entropy"
    if factors is None:
        if split.rank == 0:
            logger.warning(
                "context_parallel_degree=%d: the loss of the outputs is no %s of each token, so its divisor "
                "is not looked at: every term has to be a mean over this rank's targets",
                split.plan.degree,
                kind,
            )
        return None, None
    eps, count = torch.finfo(gradient.dtype).eps, len(factors)
    mean = float(factors.mean())
    near = max(8 * eps, 1e-3)
    is_even = float(factors.max() - factors.min()) <= near * abs(mean)
    share = (mean, eps) if is_even and mean else None

    # Of several weighted losses it is not known which one the logits went into.
    of_loss = split.loss_gradients
    scale = float(of_loss[0]) if len(of_loss) == 1 else 0.0
    if not scale or not mean:
        return None, share
    # The derivative of the step's own loss by the cross entropy of all targets.
    total = mean * count / scale
    # A sum may be one over the elements of each token, too.
    width = gradient.shape[-1] if isinstance(logits, _Values) else 1
    return _unlike_mean(total, count, width, is_even, eps, split), share


def _unlike_mean(
    total: float, count: int, width: int, is_even: bool, eps: float, split: SplitBatch
) -> str | None:
    """Return in words that the weights of ``count`` targets of ``width`` elements,
    ``total`` together, are not those of their mean."""
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
    if count > 1 and any(_near(total, count * each, eps) for each in (1, width)):
        return "the sum over a rank's targets, while losses are averaged over ranks: divide it by their number"
    assert split.shift_labels is not None
    tokens = split.shift_labels.numel()
    is_of_all = count < tokens and _near(total * tokens, count, eps)
    # A round factor, as a weight of one loss of several, may be equal by chance.
    if is_of_all and not _is_round(total, eps):
        return (
            f"the sum over {count} targets divided by all {tokens} tokens of a rank, while means are weighted "
            "by the targets of each rank: divide it by the number of targets"
        )
    # Half of a mean looks the same with two ranks, so this is no error. Another part
    # may be a step's own weight of a term, or 1 / (steps accumulated).
    is_part = _near(total * split.plan.degree, 1, eps)
    is_other = not _is_round(total, eps) and not _is_round(1 / total, eps)
    if is_of_all or is_part or is_other:
        logger.warning(
            "the loss is %.3g of the mean over this rank's targets: right if a step multiplies its mean by that; a sum "
            "that is divided by the targets of whole sequences, by all tokens or by a constant has to be divided by "
            "the targets of this rank",
            total,
        )
    return None


def other_shares(shares: list[Share | None]) -> str | None:
    """Return in words that targets weigh more on one context rank than on another."""
    known = [share[0] for share in shares if share is not None]
    # In half precision single targets are rounded by 4 eps and more.
    near = max([5e-3, *(4 * share[1] for share in shares if share is not None)])
    if not known or max(known) - min(known) <= near * max(map(abs, known)):
        return None
    return (
        f"targets that weigh {min(known):.3g} on one rank and {max(known):.3g} on another, as those of a sum that is "
        "divided by a constant do, while means are weighted by the targets of each rank: divide it by the number of "
        "targets of this rank"
    )


def _near(found: float, expected: float, eps: float) -> bool:
    return abs(found - expected) <= max(eps / 2, 1e-5) * abs(expected)


def _is_round(number: float, eps: float) -> bool:
    """Return whether a number is a multiple of 0.05, or of 1 where it is large."""
    steps = 20 * number
    return abs(steps - round(steps)) <= max(eps / 2, 1e-5) * min(abs(steps), 20)


def _factors(gradient: Tensor, logits: _Logits) -> Tensor | None:
    """Return [N], the derivative of the loss by the cross entropy of each target. None:
    it has other terms of the logits.

    Args:
        gradient: [B * L, V], of a token with probabilities p and target t

                slope_j = (factor + z) p_j - smooth - (factor - V smooth) [j = t]

            where ``z`` comes from a term of the log-sum-exp, and ``smooth`` from label
            smoothing.
    """
    classes, found = gradient.shape[-1], []
    # In half precision a few roundings are as large as another loss would be.
    limit = max(8 * torch.finfo(gradient.dtype).eps, 1e-4)
    for part in torch.arange(len(logits.rows), device=gradient.device).split(
        _TOKENS_AT_ONCE
    ):
        top, at = logits.top[part], logits.targets[part][:, None]
        lse = logits.lse[part][:, None]
        slope = gradient[logits.rows[part]].to(logits.lse.dtype)
        p = (logits.logits[part] - lse).exp()
        others, slopes = top != at, slope.gather(-1, top)
        largest = torch.where(others, slopes, 0).abs().amax(-1)

        rate, smooth, error = _line(p, slopes, others, smooths=False)
        if not bool((error <= limit * largest).all()):
            rate, smooth, error = _line(p, slopes, others, smooths=True)
        factor = rate - slope.sum(-1)
        # The target's own entry has to follow from the others.
        p_target = (logits.at_target[part] - lse[:, 0]).exp()
        of_target = rate * p_target - smooth - (factor - classes * smooth)
        off = (slope.gather(-1, at)[:, 0] - of_target).abs()
        is_smooth = (smooth * factor >= 0) & (
            (classes * smooth).abs() <= factor.abs() * (1 + limit)
        )
        fits = (error <= limit * largest) & (off <= limit * rate.abs()) & is_smooth
        if not bool(fits.all()):
            return None
        found.append(factor)
    return torch.cat(found)


def _line(
    p: Tensor, slopes: Tensor, others: Tensor, *, smooths: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit ``slopes`` [N, K] of classes besides the target by ``rate * p - smooth``;
    return [N] of these two, and of the largest error."""
    weight = others.to(p.dtype)
    count = weight.sum(-1, keepdim=True)
    # A line through the origin where nothing smooths.
    centre = (p * weight).sum(-1, keepdim=True) / count * smooths
    height = (slopes * weight).sum(-1, keepdim=True) / count * smooths
    off = (p - centre) * weight
    squares = off.square().sum(-1, keepdim=True)
    rate = (off * (slopes - height)).sum(-1, keepdim=True) / squares
    smooth = rate * centre - height
    error = torch.where(others, slopes - rate * p + smooth, 0).abs().amax(-1)
    return rate[:, 0], smooth[:, 0], error
