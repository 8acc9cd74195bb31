"""Steps through pipeline stages under transformers' Trainer: ``compute_loss`` runs once
for each micro-batch on every stage, and what Trainer computes from its loss is of the
whole batch. Evaluation and prediction call the model without gradients, which goes
through all stages by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer

from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.handle import parallel_of
from accelerate_smp.loss_counts import seeing_use
from smp_core.outside import changed

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class PipelinedTrainerMixin(_Base):
    """A mixin before a Trainer class. With one stage it changes nothing."""

    accelerator: SmpAccelerator
    _takes_micro_batches = False
    _ignores_count: bool | None = None
    """Whether a model's loss takes the count of targets and does not divide by it;
    None: not seen yet."""
    _averages: bool | None = None
    """The same of what ``compute_loss`` returns, the user's own too."""
    _told_stages = False

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Take a batch forward and backward as Trainer does, in micro-batches where
        there are stages."""
        handle = parallel_of(self.model)  # type: ignore[arg-type]
        if handle is None or handle.pipeline is None:
            return super().training_step(model, inputs, num_items_in_batch)
        # Trainer divides by what it counted over a whole optimizer step, or by the
        # number of batches.
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        divisor = 1 if scaled else self.current_gradient_accumulation_steps
        count = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None
        can_see = scaled and count is not None
        # Trainer's training_step calls compute_loss once, and divides and goes backward
        # behind it: it gets a loss whose backward is over.
        own = self.compute_loss

        def in_micro_batches(
            model: torch.nn.Module, inputs: dict[str, Any], **options: Any
        ) -> Any:
            of = functools.partial(own, model, **options)
            if can_see and self._averages is None and count is not None:
                of = functools.partial(self._seeing_means, of, count)
            return self.accelerator.train_in_stages(
                handle,
                of,
                inputs,
                divisor * self.accelerator.gradient_accumulation_steps,
                adds_up=lambda: scaled and not self._averages,
                name="compute_loss",
            )

        # On the instance, for this call: it comes before methods of a user's subclass.
        with changed(self, compute_loss=in_micro_batches, _takes_micro_batches=True):
            loss = super().training_step(model, inputs, num_items_in_batch)
        # The last stage has seen the loss; evaluations ask on all of them.
        if can_see and not self._told_stages:
            seen = (self._averages, self._ignores_count)
            self._averages, self._ignores_count = handle.pipeline.share(seen)
            self._told_stages = True
        return loss

    def _seeing_means(
        self, compute_loss: Callable[..., Any], count: Tensor, inputs: dict[str, Any]
    ) -> Any:
        """Compute a micro-batch's loss, and find out, the first time, whether it is
        divided by the count of the whole step's targets."""
        if self._averages is not None:
            return compute_loss(inputs)
        with seeing_use(count) as reads:
            result = compute_loss(inputs)
        self._averages = not reads.seen
        return result
