"""Random numbers in a step of several stages.

What the user's code and the model draw before the blocks (noise, masks, shifts of
positions) has to be the same on all stages, and what the blocks draw (dropout) another
on each, although stages draw unlike numbers of times. So a step begins with a seed of
the first stage; each micro-batch's code begins with a seed made of it, and so does what
follows a module that other stages have a stand-in for, which draws nothing; the first
block of each chunk begins with a seed that is the chunk's own. Behind the step
generators are what they were before, one draw further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from smp_core.torch_facts import seed_generators

_SEEDS = 2**62


class StepSeeds:
    """Seeds of the steps of one stage."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seed = device, 0

    def draw(self) -> int:
        """Draw a seed; the first stage's is the step's."""
        return int(torch.randint(_SEEDS, (1,)))

    @contextlib.contextmanager
    def during_step(self, seed: int) -> Iterator[None]:
        """Seed what is drawn inside."""
        self._seed = seed
        with torch.random.fork_rng(
            [self._device] if self._device.type == "cuda" else []
        ):
            yield

    def begin_call(self, micro_batch: int) -> None:
        """Seed the user's code, and the model's before the blocks, alike on all
        stages."""
        seed_generators(_mixed(self._seed, micro_batch))

    def begin_again(self, micro_batch: int, count: int) -> None:
        """Seed what follows the module before the blocks that has this number, alike on
        all stages."""
        seed_generators(_mixed(self._seed, micro_batch, -count - 1))

    def begin_blocks(self, micro_batch: int, chunk: int) -> None:
        """Seed the blocks, apart for each chunk."""
        seed_generators(_mixed(self._seed, micro_batch, chunk + 1))


def _mixed(*numbers: int) -> int:
    return hash(numbers) % _SEEDS  # of integers it is the same in all processes
