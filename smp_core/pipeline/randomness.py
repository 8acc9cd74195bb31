"""Random numbers in a step of several stages.

What the user's code draws before it calls the model (noise, masks) has to be the same on all stages, and what the
blocks draw (dropout) another on each, although stages draw unlike numbers of times. So a step begins with a seed of the
first stage; each micro-batch's code begins with a seed made of it, the model's with one that is the chunk's own. Behind
the step generators are what they were before, one draw further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from smp_core.whereabouts import here

_SEEDS = 2**62


class StepSeeds:
    """Seeds of the steps of one stage.

    Args:
        group: the ranks of all stages that take a step together.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._seed = 0

    @contextlib.contextmanager
    def during_step(self) -> Iterator[None]:
        """Seed what is drawn inside. Collective over the stages."""
        seed = torch.randint(_SEEDS, (1,))
        sent = seed.to(self._device)
        with here.waiting("the first pipeline stage to begin a batch"):
            dist.broadcast(sent, group=self._group, group_src=0)
            self._seed = int(sent)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            yield

    def begin_call(self, micro_batch: int) -> None:
        """Seed the user's code, alike on all stages."""
        torch.manual_seed(_mixed(self._seed, micro_batch))

    def begin_model(self, micro_batch: int, chunk: int) -> None:
        """Seed the model's code, apart for each chunk."""
        torch.manual_seed(_mixed(self._seed, micro_batch, chunk + 1))


def _mixed(*numbers: int) -> int:
    return hash(numbers) % _SEEDS  # of integers it is the same in all processes
