"""Small saves that something happens to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smp_core.checkpoint import (
    CheckpointError,
    load_checkpoint,
)

ROWS = 1 << 16


def small(seed: int) -> dict[str, Any]:
    return {
        "model": {f"w{i}": torch.full((ROWS,), float(seed * 10 + i)) for i in range(4)},
        "step": seed,
    }


def loaded(path: str | Path) -> dict[str, Any]:
    target = {"model": {f"w{i}": torch.zeros(ROWS) for i in range(4)}, "step": 0}
    load_checkpoint(path, target, verify="digests")
    return target


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def attempt(action: Callable[[], None]) -> str:
    """The message of the CheckpointError that an action raises, "" when it raises
    none."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""
