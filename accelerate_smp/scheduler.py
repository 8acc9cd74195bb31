"""SmpScheduler: a schedule that ends where it ends on one process."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from smp_core.torch_facts import after_each_step


class SmpScheduler(AcceleratedScheduler):
    """A prepared schedule, which ends where it ends on one process.

    A schedule that is stepped with every batch was counted in batches, before the
    loader was prepared (`len(loader) * epochs`, as all of Accelerate's examples count).
    Each optimizer step uses up one such batch for each rank that reads its own samples,
    so the schedule advances by that many. One that is stepped after several optimizer
    steps, an epoch or an evaluation, was not counted in batches and advances by one.

    Args:
        prepared: as Accelerate made it.
        batches: the batches that one optimizer step uses up, of the size that the
            unprepared loader has.
    """

    def __init__(self, prepared: AcceleratedScheduler, batches: int) -> None:
        super().__init__(
            prepared.scheduler,
            prepared.optimizers,
            prepared.step_with_optimizer,
            split_batches=True,
        )
        self._batches = batches
        self._optimizer_steps = [0] * len(self.optimizers)
        for number, optimizer in enumerate(self.optimizers):
            after_each_step(optimizer.optimizer, self._counter(number))

    def _counter(self, number: int) -> Any:
        def count() -> None:
            self._optimizer_steps[number] += 1

        return count

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by the batches of the last optimizer step.

        The schedule does not advance inside an accumulation window, or after a step
        that the gradient scaler skipped.
        """
        times = 1
        if self.step_with_optimizer and self.gradient_state.sync_gradients:
            # One optimizer step since the last call: the schedule is stepped with every
            # batch. ReduceLROnPlateau counts calls, whatever was trained in between.
            in_batches = max(self._optimizer_steps, default=0) <= 1
            if in_batches and not isinstance(self.scheduler, ReduceLROnPlateau):
                times = self._batches
            self._optimizer_steps = [0] * len(self.optimizers)
        for _ in range(times):
            # The last optimizer step of an epoch may use up fewer batches, and
            # OneCycleLR refuses to go past its end.
            if times > 1 and self.scheduler.last_epoch >= getattr(
                self.scheduler, "total_steps", float("inf")
            ):
                return
            super().step(*args, **kwargs)
