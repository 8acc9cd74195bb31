"""The sharded checkpoints: they survive crashes, load on any number of ranks and never run code from a file.

The format is described in docs/checkpoint-format.md.
"""

from __future__ import annotations

from smp_core.checkpoint.async_save import AsyncCheckpointer
from smp_core.checkpoint.folders.addresses import remove_checkpoint
from smp_core.checkpoint.foreign.conversion import export_checkpoint, import_checkpoint
from smp_core.checkpoint.full_state import consolidate
from smp_core.checkpoint.layout import CheckpointError, Index, Manifest
from smp_core.checkpoint.live_state import full_state_dict, save_full_state
from smp_core.checkpoint.opening import is_checkpoint
from smp_core.checkpoint.reader import (
    load_checkpoint,
    read_index,
    read_manifest,
    read_per_rank,
    read_rest,
    read_tensors,
)
from smp_core.checkpoint.root import find_checkpoints, first_undamaged, newest_checkpoint, save_step
from smp_core.checkpoint.verify import verify_checkpoint
from smp_core.checkpoint.writer import save_checkpoint

__all__ = [
    "AsyncCheckpointer",
    "CheckpointError",
    "Index",
    "Manifest",
    "consolidate",
    "export_checkpoint",
    "find_checkpoints",
    "first_undamaged",
    "full_state_dict",
    "import_checkpoint",
    "is_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "read_index",
    "read_manifest",
    "read_per_rank",
    "read_rest",
    "read_tensors",
    "remove_checkpoint",
    "save_checkpoint",
    "save_full_state",
    "save_step",
    "verify_checkpoint",
]
