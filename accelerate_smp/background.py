"""Saves behind training: the writer that an accelerator has with ``async_save=True``;
the steps that saves count.

Accelerate marks what it has prepared by ``_is_accelerate_prepared``, which has no
public name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer

from smp_core.checkpoint import AsyncCheckpointer
from smp_core.config import SmpConfig
from smp_core.torch_facts import after_each_step


class BackgroundSavingAccelerator(Accelerator):
    """An Accelerator with knobs, a count of its steps and a save in flight.

    Attributes:
        background_saves: the writer with ``async_save=True``, from the first save on.
    """

    smp_config: SmpConfig
    _steps_before = 0
    # Steps by the id of the optimizer.
    _steps_of: Mapping[int, int] = MappingProxyType({})
    background_saves: AsyncCheckpointer | None = None

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps since training began, of the processes before included:
        load_state and load_newest_state restore it, ``free_memory()`` sets it to 0. Of
        optimizers that step together, those of the one that has stepped most; one that
        is prepared after others have stepped counts on from there.
        """
        return self._steps_before + max(self._steps_of.values(), default=0)

    def resume_counting(self, steps: int) -> None:
        """Count on from so many steps."""
        self._steps_before, self._steps_of = steps, {}

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare as Accelerate does, and count the steps."""
        if isinstance(optimizer, Optimizer) and not getattr(
            optimizer, "_is_accelerate_prepared", False
        ):

            def count() -> None:
                self._steps_of = {
                    **self._steps_of,
                    id(optimizer): self._steps_of.get(id(optimizer), 0) + 1,
                }

            # Optimizers before it may be those of a phase of training that is over.
            self.resume_counting(self.optimizer_steps)
            after_each_step(optimizer, count)
        return super().prepare_optimizer(optimizer, device_placement)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of what was prepared, as Accelerate does between two trainings: steps
        are counted from 0."""
        self.resume_counting(0)
        return super().free_memory(*objects)

    def wait_for_save(self) -> None:
        """Wait for the save that ``async_save=True`` left in flight.

        Raises:
            CheckpointError: it failed, on all ranks.
        """
        if self.background_saves is not None:
            self.background_saves.wait()

    def settle_save(self) -> None:
        """Raise the error of a save that has ended since; does not wait for one in
        flight."""
        if self.background_saves is not None:
            self.background_saves.settle()
