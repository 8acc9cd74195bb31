"""The sequences that several ranks share, under the Trainer: batches split, losses
weighted, outputs gathered.

The strategy calls these where Lightning hands it a batch, a step and a backward pass;
the work is :mod:`smp_core.context_parallel`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from smp_core.context_parallel import (
    BatchLayout,
    ContextParallel,
    SplitBatch,
    enabled,
    part_of_mean,
    shifts_labels,
)
from smp_core.outside import changed


class SharedSequences:
    """The present batch of one strategy, if sequences are shared; otherwise everything
    passes as it is.

    Args:
        layout: how to split batches; None: found out.
        full_outputs: whether what evaluation and predict steps return is made whole
            over the context ranks.
    """

    def __init__(self, layout: BatchLayout | None, full_outputs: bool) -> None:
        self._layout = layout
        self._full_outputs = full_outputs
        self.context: ContextParallel | None = None
        self._shifts = True
        self._in_stages = False
        self.split: SplitBatch | None = None

    def attach(
        self,
        context: ContextParallel | None,
        module: nn.Module,
        in_stages: bool = False,
    ) -> None:
        """Begin with a model that has been parallelized.

        Args:
            in_stages: whether pipeline stages cut batches into micro-batches, each of
                which is split by itself.
        """
        self.context = context
        self.split = None
        self._in_stages = in_stages
        if context is not None:
            self._shifts = shifts_labels(module)

    def part_of(self, batch: Any, weight: float | None) -> Any:
        """Return this rank's part of the first context peer's batch. Collective over
        all ranks.

        Args:
            weight: of an evaluation's batch, 0 where it is another rank's; None in
                training.
        """
        # Stages split each micro-batch for themselves.
        assert self.context is not None
        if self._in_stages:
            return batch
        self.split = self.context.split(
            batch, self._layout, shifts=self._shifts, weight=weight
        )
        return self.split.batch

    def split_each(
        self, batches: Sequence[Any]
    ) -> tuple[list[Any], list[SplitBatch | None]]:
        """Return this rank's parts of several batches, and what :meth:`during` takes
        for each. Collective over all ranks."""
        if self.context is None:
            return list(batches), [None] * len(batches)
        splits = [
            self.context.split(batch, self._layout, shifts=self._shifts)
            for batch in batches
        ]
        return [split.batch for split in splits], list(splits)

    @contextlib.contextmanager
    def during(self, split: SplitBatch | None) -> Iterator[None]:
        """Make one of these the present batch inside."""
        with changed(self, split=split), self.active():
            yield

    def active(self) -> AbstractContextManager[None]:
        """Return the context to enter around a step and around backward."""
        return contextlib.nullcontext() if self.split is None else enabled(self.split)

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward starts."""
        return part_of_mean(loss)

    def outputs(self, outputs: Any) -> Any:
        """Gather the unsplit sequences of an evaluation or predict step's outputs, if
        asked for. Collective over context ranks.
        """
        if self.context is None or self.split is None or not self._full_outputs:
            return outputs
        return self.context.gather_all(outputs, self.split)

    def full(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return a tensor of the present batch's tokens over all context ranks.
        Collective over them."""
        if self.context is None or self.split is None:
            return tensor
        return self.context.gather(tensor, self.split, dim)
