"""Cross entropy of logits whose vocabulary is split: whole logits exist on no rank.

For each token the ranks tell each other the largest logit, the sum of exponentials and
the target's logit (Megatron-LM, arXiv 1909.08053, section 3). A Transformers model
takes its loss from ``model.loss_function``, which has a public setter; only the loss
functions that are understood here are replaced, and only for calls that get labels
while gradients are wanted: all others get whole logits.

Shape letters: N tokens, V words, T ranks.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smp_core.outside import changed
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.torch_facts import Args, Kwargs


class _CrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - s) * -log p[target] + s * mean of -log p."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: TensorAxis,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        own_words = logits.shape[-1]
        words = own_words * axis.degree
        kept_N = targets != ignored
        # Subtracting the largest logit of all ranks keeps exponentials finite, equally
        # on each.
        largest_N = axis.maximum(logits.amax(-1))
        # Rows of logits are what takes memory here: there is one tensor of them beside
        # the input.
        shifted = logits - largest_N[:, None]
        # A target is on exactly one rank; elsewhere its place is clamped and masked
        # out.
        place_N = targets - axis.rank * own_words
        is_own_N = (place_N >= 0) & (place_N < own_words) & kept_N
        place_N = place_N.clamp(0, own_words - 1)
        of_target_N = shifted.gather(1, place_N[:, None])[:, 0].where(is_own_N, 0)
        all_own_N = shifted.sum(-1)
        # In place: the shifted logits are needed no more.
        exponentials = shifted.exp_()
        # One message for all three sums of each token.
        denominator_N, target_N, all_N = axis.all_reduce(
            torch.stack([exponentials.sum(-1), of_target_N, all_own_N])
        )
        log_N = denominator_N.log()
        loss_N = (1 - smoothing) * (log_N - target_N)
        # A word that is ruled out has a logit of minus infinity, and 0 times that is nan.
        if smoothing:
            loss_N = loss_N + smoothing * (log_N - all_N / words)
        # Probabilities are all that backward needs of the logits.
        ctx.save_for_backward(
            exponentials.div_(denominator_N[:, None]), place_N, is_own_N, kept_N
        )
        ctx.smoothing, ctx.words = smoothing, words
        return (loss_N * kept_N).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, place_N, is_own_N, kept_N = ctx.saved_tensors
        # p minus the smoothed target distribution; only the owner of a target subtracts
        # the rest of it.
        gradient = probabilities - ctx.smoothing / ctx.words
        gradient.scatter_add_(
            1,
            place_N[:, None],
            -(1 - ctx.smoothing) * is_own_N.to(gradient.dtype)[:, None],
        )
        return gradient.mul_((kept_N * grads[0])[:, None]), None, None, None, None


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    axis: TensorAxis,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of the cross entropy over tokens, equal on all ranks of the axis.

    Args:
        logits: [N, V/T] of this rank's words; half precision is computed in float32.
        targets: [N], words of the unsplit vocabulary.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return _CrossEntropy.apply(wide, targets, axis, ignore_index, label_smoothing)


@dataclass(frozen=True, eq=False)
class SplitLogits:
    """A head that leaves its logits split by the vocabulary, and their loss: for losses
    in chunks of tokens."""

    axis: TensorAxis

    def of(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return logits [N, V/T] of this rank's words."""
        # Split for the time of this call; other callers of the head get what they got
        # before.
        with changed(self.axis, whole_logits=False):
            return head(hidden)

    def cross_entropy_sum(
        self, logits: Tensor, targets: Tensor, **options: Any
    ) -> Tensor:
        """See :func:`cross_entropy_sum`."""
        return cross_entropy_sum(logits, targets, self.axis, **options)


def split_vocabulary_loss(model: Any, axis: TensorAxis) -> bool:
    """Let a Transformers model with a split head compute its loss from split logits;
    False where its loss is none that is understood, and logits are gathered.

    In training the model returns no logits along with such a loss.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    # A loss of another kind may look at logits across the vocabulary.
    whole_loss = model.loss_function
    if whole_loss not in (ForCausalLMLoss, ForMaskedLMLoss):
        return False
    # The model has to hand its logits to the function, and not use them before.
    if not _hands_on_all_logits(type(model).forward):
        return False
    model.loss_function = _loss_function(
        whole_loss, axis, shifts=whole_loss is ForCausalLMLoss
    )
    signature = inspect.signature(type(model).forward)

    def announce(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        # By name or by place; without labels or gradients, logits are an output and
        # have to be whole.
        given = signature.bind_partial(module, *args, **kwargs).arguments
        axis.whole_logits = given.get("labels") is None or not torch.is_grad_enabled()

    def finish(module: nn.Module, args: Any, output: Any) -> Any:
        split, axis.whole_logits = not axis.whole_logits, True
        # A pipeline stage that is not the last hands on a tensor; a forward that failed
        # has no output.
        if not split or output is None or isinstance(output, Tensor):
            return None
        # Logits stand behind the loss in the tuple; a part of them is no output.
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output["logits"] = None
        return output

    model.register_forward_pre_hook(announce, with_kwargs=True)
    model.register_forward_hook(finish, always_call=True)
    return True


def _hands_on_all_logits(forward: Callable[..., Any]) -> bool:
    """Return whether a forward's code gives its logits to the loss function, without
    choosing some of them by their places: on a rank with a part of the vocabulary these
    are other words'."""
    source = textwrap.dedent(inspect.getsource(forward))
    if "self.loss_function(" not in source:
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if "logits" in node.value.id:
                return False
    return True


def _loss_function(
    whole_loss: Callable[..., Tensor], axis: TensorAxis, shifts: bool
) -> Callable[..., Any]:
    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        # Logits that all ranks have whole.
        if axis.whole_logits:
            options = {
                **options,
                "num_items_in_batch": num_items_in_batch,
                "ignore_index": ignore_index,
            }
            if shifts:
                options["shift_labels"] = shift_labels
            return whole_loss(logits, labels, vocab_size, **options)
        # Logits of a part of the vocabulary: the sum over targets, then their number.
        targets = labels
        if shifts:
            # The shift that Transformers makes: each token predicts the next one.
            targets = (
                F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
                if shift_labels is None
                else shift_labels
            )
        targets = targets.reshape(-1).to(logits.device)
        total = cross_entropy_sum(
            logits.reshape(-1, logits.shape[-1]),
            targets,
            axis,
            ignore_index=ignore_index,
        )
        # The mean over targets of this batch, or a sum by the step's number of targets.
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    return loss_function
