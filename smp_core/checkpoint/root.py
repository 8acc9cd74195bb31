"""A folder of checkpoints: ``root/step-00001000/``, the file ``LATEST``, keep-last-k and the newest whole one."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from smp_core.checkpoint.layout import MANIFEST, PREVIOUS_PREFIX, TEMPORARY_PREFIX, CheckpointError
from smp_core.checkpoint.opening import is_checkpoint
from smp_core.checkpoint.storage import is_address, local_path

logger = logging.getLogger("smp")

LATEST = "LATEST"


def step_name(step: int) -> str:
    """``1000`` -> ``"step-00001000"``."""
    if step < 0:
        raise CheckpointError(f"step={step} must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The inverse of :func:`step_name`, None for other names."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def find_checkpoints(root: str | os.PathLike[str], broken_too: bool = False) -> list[str]:
    """Names of the checkpoints in a folder: by step where the name says it, by time of change otherwise.

    Args:
        root: the folder.
        broken_too: also folders that only look like a checkpoint: half ones, damaged ones.

    Raises:
        CheckpointError: no such folder.
    """
    entries = list_entries(root)
    found = []
    for name in entries:
        if name.startswith((TEMPORARY_PREFIX, PREVIOUS_PREFIX)):
            continue
        address = f"{os.fspath(root).rstrip('/')}/{name}"
        if is_checkpoint(address) or (broken_too and _looks_like_one(address, name)):
            found.append((step_of(name) if step_of(name) is not None else -1, entries[name], name))
    return [name for _, _, name in sorted(found)]


def _looks_like_one(address: str, name: str) -> bool:
    if step_of(name) is not None:
        return True
    return not is_address(address) and os.path.exists(os.path.join(address, MANIFEST))


def list_entries(root: str | os.PathLike[str]) -> dict[str, float]:
    """Directories in a folder and when each changed last (0 on object stores).

    Raises:
        CheckpointError: no such folder.
    """
    if is_address(root):
        from smp_core.checkpoint.object_folder import list_objects

        return list_objects(os.fspath(root))
    path = Path(local_path(root))
    if not path.is_dir():
        raise CheckpointError(f"there is no folder of checkpoints at {path}")
    return {entry.name: entry.stat().st_mtime for entry in path.iterdir() if entry.is_dir()}


def read_latest(root: str | os.PathLike[str]) -> str | None:
    """What the file LATEST says, None where there is none."""
    if is_address(root):
        from smp_core.checkpoint.object_folder import read_object

        data = read_object(f"{os.fspath(root).rstrip('/')}/{LATEST}")
    else:
        file = Path(local_path(root), LATEST)
        data = file.read_bytes() if file.is_file() else None
    return data.decode().strip() if data is not None else None
