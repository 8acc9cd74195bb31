"""Saves behind training: the writer that an accelerator has with ``async_save=True``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from smp_core.checkpoint import AsyncCheckpointer
from smp_core.config import SmpConfig


class BackgroundSavingAccelerator(Accelerator):
    """An Accelerator with knobs and a save in flight.

    Attributes:
        background_saves: the writer with ``async_save=True``, from the first save on.
    """

    smp_config: SmpConfig
    background_saves: AsyncCheckpointer | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that the manifest of a save begins with."""
        return {"step": self.step}

    def wait_for_save(self) -> None:
        """Wait for the save that ``async_save=True`` left in flight.

        Raises:
            CheckpointError: it failed, on all ranks.
        """
        if self.background_saves is not None:
            self.background_saves.wait()

    def settle_save(self) -> None:
        """Raise the error of a save that has ended since; does not wait for one in flight."""
        if self.background_saves is not None:
            self.background_saves.settle()
