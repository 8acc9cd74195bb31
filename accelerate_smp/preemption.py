"""What a loop does when its job is about to be ended: every rank hears of it after the same step, saves and leaves."""

from __future__ import annotations

from typing import NoReturn

from accelerate_smp.memory import StatesInMemoryAccelerator
from smp_core.watch import Preemption


class PreemptibleAccelerator(StatesInMemoryAccelerator):
    """An Accelerator that takes notices of the job's end, once a loop asks for them."""

    _preemption: Preemption | None = None

    @property
    def preemption(self) -> Preemption:
        """The notices to all ranks; made, and its signals taken, when it is first asked for. Collective then."""
        if self._preemption is None:
            self._preemption = Preemption(self.smp_config.checkpoint.preemption_grace_s)
            self._preemption.install()
        return self._preemption

    def is_preempted(self) -> bool:
        """Return whether some rank was told (SIGTERM, SIGUSR1) that the job is about to be ended. Collective.

        Ask after each optimizer step, schedules included. From the first call on signals do not end the process by
        themselves; where the answer is True, it is so on every rank::

            if accelerator.is_preempted():
                accelerator.save_state("checkpoints/last")
                accelerator.leave()
        """
        return self.preemption.agreed()

    def leave(self) -> NoReturn:
        """Wait for the save in flight and end the process with 128 + the signal's number, 143 for SIGTERM. Collective.

        Raises:
            SystemExit: always.
            CheckpointError: the save in flight failed.
        """
        self.wait_for_save()
        self.preemption.restore()
        self.preemption.leave("its state is saved")
