"""The sharded checkpoints: they survive crashes, load on any number of ranks and never run code from a file.

The format is described in docs/checkpoint-format.md.
"""

from __future__ import annotations

from smp_core.checkpoint.async_save import AsyncCheckpointer
from smp_core.checkpoint.folders.addresses import remove_checkpoint
from smp_core.checkpoint.foreign.conversion import export_checkpoint, import_checkpoint
from smp_core.checkpoint.full_state import consolidate
from smp_core.checkpoint.interval import SaveSchedule
from smp_core.checkpoint.layout import CheckpointError, Index, Manifest
from smp_core.checkpoint.lazy_state import LazyState, Unread, as_it_lies
from smp_core.checkpoint.live_state import full_state_dict, save_full_state
from smp_core.checkpoint.opening import OpenCheckpoint, is_checkpoint, open_checkpoint
from smp_core.checkpoint.optimizers import (
    copy_into,
    like_parameter,
    load_full_optimizer_state,
    load_named_optimizer_state,
    named_optimizer_state,
    names_between,
    numbered,
    own_part,
    parameter_names,
    shard_like,
    stepped_parameters,
)
from smp_core.checkpoint.random_state import restore_random_state, resumed_random_state, set_random_state
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.reader import (
    load_checkpoint,
    read_index,
    read_manifest,
    read_per_rank,
    read_rest,
    read_tensors,
)
from smp_core.checkpoint.root import (
    find_checkpoints,
    first_undamaged,
    join,
    newest_checkpoint,
    open_first_undamaged,
    readable_checkpoints,
    save_step,
    surplus,
)
from smp_core.checkpoint.tensor_files import TensorFiles
from smp_core.checkpoint.tree import Path, iterate_tensors, map_tensors, path_text
from smp_core.checkpoint.untrusted import NoSuchFolder
from smp_core.checkpoint.verify import open_checked, verify_checkpoint
from smp_core.checkpoint.writer import save_checkpoint

__all__ = [
    "as_it_lies",
    "AsyncCheckpointer",
    "CheckpointError",
    "consolidate",
    "copy_into",
    "export_checkpoint",
    "find_checkpoints",
    "first_undamaged",
    "full_state_dict",
    "import_checkpoint",
    "Index",
    "is_checkpoint",
    "iterate_tensors",
    "join",
    "LazyState",
    "like_parameter",
    "load_checkpoint",
    "load_full_optimizer_state",
    "load_named_optimizer_state",
    "Manifest",
    "map_tensors",
    "named_optimizer_state",
    "names_between",
    "newest_checkpoint",
    "NoSuchFolder",
    "numbered",
    "open_checked",
    "open_checkpoint",
    "open_first_undamaged",
    "OpenCheckpoint",
    "own_part",
    "parameter_names",
    "Path",
    "path_text",
    "Ranks",
    "read_index",
    "read_manifest",
    "read_per_rank",
    "read_rest",
    "read_tensors",
    "readable_checkpoints",
    "remove_checkpoint",
    "restore_random_state",
    "resumed_random_state",
    "save_checkpoint",
    "save_full_state",
    "save_step",
    "SaveSchedule",
    "set_random_state",
    "shard_like",
    "stepped_parameters",
    "surplus",
    "TensorFiles",
    "Unread",
    "verify_checkpoint",
]
