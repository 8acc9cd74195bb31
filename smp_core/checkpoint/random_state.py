"""The random states of all ranks: saved with a checkpoint, restored on the same number
of ranks, derived anew on another.

On another world size there is no rank to which an old state belongs. Each rank is then
seeded from (seed, step, rank), so that a resume is the same every time it is tried, and
ranks differ.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import open_checkpoint
from smp_core.checkpoint.reader import read_per_rank

logger = logging.getLogger("smp")


def random_state() -> dict[str, Any]:
    """Return the states of this rank's generators: Python, numpy, torch on the CPU and
    on the current CUDA device.

    The values are plain types and tensors, so that ``torch.load(weights_only=True)``
    reads them too.
    """
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(numpy.asarray(keys).astype("int64")),
            position,
            has_gauss,
            gauss,
        ),
        "torch": torch.get_rng_state(),
    }
    # A process that computes on the CPU, or a loader's worker, makes no context.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states from :func:`random_state`.

    Raises:
        CheckpointError: a part is missing.
    """
    try:
        random.setstate(state["python"])
        # numpy takes its own 32-bit words back, not a tensor's 64-bit ones.
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.asarray(keys).astype("uint32"), *rest))
        torch.set_rng_state(state["torch"])
    except KeyError as error:
        raise CheckpointError(f"the saved random state has no {error}") from None
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def derived_seed(seed: int, step: int, rank: int) -> int:
    """Derive a 32-bit seed from (seed, step, rank): equal every time, unrelated for
    neighbours."""
    digest = hashlib.sha256(f"smp {seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def seed_random_state(seed: int) -> None:
    """Seed all generators of this rank with a 32-bit seed."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's too


def resumed_random_state(
    saved: Sequence[Mapping[str, Any] | None],
    rank: int,
    world_size: int,
    seed: int,
    step: int,
    where: str,
) -> dict[str, Any]:
    """Return the random state with which this rank of a resumed run continues; no
    generator is changed.

    Args:
        saved: :func:`random_state` of every rank of the run that saved, by rank; empty
            or None where there is none.
        rank, world_size: of this run.
        seed, step: the run's seed and the optimizer step of the checkpoint, for another
            world size.
        where: the checkpoint's name, for the log.

    Returns:
        this rank's saved state; on another world size one that is derived from (seed,
        step, rank), which rank 0 logs.
    """
    # Each rank's own state, if the run that saved had as many ranks.
    own = saved[rank] if len(saved) == world_size else None
    if own is not None:
        return dict(own)
    if rank == 0:
        logger.warning(
            "%s holds random states of %d ranks, this run has %d: each rank is seeded from (seed=%d, step=%d, rank)",
            where,
            sum(state is not None for state in saved),
            world_size,
            seed,
            step,
        )
    # The generators are only borrowed, to make a state from the seed.
    now = random_state()
    try:
        seed_random_state(derived_seed(seed, step, rank))
        return random_state()
    finally:
        set_random_state(now)


def restore_random_state(
    path: str | os.PathLike[str], rank: int, world_size: int, seed: int
) -> bool:
    """Restore this rank's generators from the checkpoint, or seed them anew on another
    number of ranks.

    Args:
        path: a checkpoint whose ``per_rank`` was a dict with ``{"random":
            random_state()}``.
        rank, world_size: of this run.
        seed: the run's seed, for another world size.

    Returns:
        True when the saved state was restored; False when the generators were seeded
        from (seed, step, rank), which rank 0 logs.

    Raises:
        CheckpointError: not a readable checkpoint.
    """
    opened = open_checkpoint(path)
    step = opened.manifest.step or 0
    parts = read_per_rank(opened)
    # Older checkpoints may have another value for each rank, or none.
    saved = [part.get("random") if isinstance(part, dict) else None for part in parts]
    set_random_state(
        resumed_random_state(saved, rank, world_size, seed, step, os.fspath(path))
    )
    return len(saved) == world_size and saved[rank] is not None
