"""Random states per rank: saved with a checkpoint, restored on the same number of ranks, derived anew on another.

On another world size there is no rank to which an old state belongs. Each rank is then seeded from (seed, step, rank),
so that a resume is the same every time it is tried, and ranks differ.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.reader import read_manifest, read_per_rank

logger = logging.getLogger("smp")


def random_state() -> dict[str, Any]:
    """States of this rank's generators: Python, numpy, torch on the CPU and on the current CUDA device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`random_state` gave.

    Raises:
        CheckpointError: a part is missing.
    """
    try:
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
    except KeyError as error:
        raise CheckpointError(f"the saved random state has no {error}") from None
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def derived_seed(seed: int, step: int, rank: int) -> int:
    """A 32-bit seed out of (seed, step, rank): equal every time, unrelated for neighbours."""
    digest = hashlib.sha256(f"smp {seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def restore_random_state(
    path: str | os.PathLike[str], rank: int, world_size: int, seed: int, key: str = "random"
) -> bool:
    """Bring this rank's generators to where the checkpoint left them, as far as that has a meaning.

    Args:
        path: a checkpoint whose ``per_rank`` was a dict with ``{key: random_state()}``.
        rank, world_size: of this run.
        seed: the run's seed, for another world size.
        key: see ``path``.

    Returns:
        True when the saved state was restored; False when the generators were seeded from (seed, step, rank), which
        rank 0 logs.

    Raises:
        CheckpointError: not a readable checkpoint.
    """
    manifest = read_manifest(path)
    saved = [value.get(key) if isinstance(value, dict) else None for value in read_per_rank(path)]
    own = saved[rank] if len(saved) == world_size else None
    if own is not None:
        set_random_state(own)
        return True
    mine = derived_seed(seed, manifest.step or 0, rank)
    random.seed(mine)
    numpy.random.seed(mine)
    torch.manual_seed(mine)
    if rank == 0:
        logger.warning(
            "%s holds random states of %d ranks, this run has %d: each rank is seeded from (seed=%d, step=%d, rank)",
            os.fspath(path),
            sum(state is not None for state in saved),
            world_size,
            seed,
            manifest.step or 0,
        )
    return False
