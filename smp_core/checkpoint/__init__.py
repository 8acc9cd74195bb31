"""The sharded checkpoints: they survive crashes, load on any number of ranks and never
run code from a file.

The format is described in docs/checkpoint-format.md; its fields stand in layout, what
is believed of a file in untrusted. A save deals out slices (save_plan), stages them
(staging) and writes them (writer); async_save does the same behind training, and has
the seconds for which training waited. reader loads onto any ranks, root finds the
newest whole one in a folder. folders/ are disks and object stores, memory/ is the
newest state in shared memory, foreign/ other programs' files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.checkpoint.async_save import AsyncCheckpointer as AsyncCheckpointer
    from smp_core.checkpoint.folders.addresses import (
        remove_checkpoint as remove_checkpoint,
    )
    from smp_core.checkpoint.foreign.conversion import (
        export_checkpoint as export_checkpoint,
        import_checkpoint as import_checkpoint,
    )
    from smp_core.checkpoint.full_state import consolidate as consolidate
    from smp_core.checkpoint.interval import SaveSchedule as SaveSchedule
    from smp_core.checkpoint.layout import (
        CheckpointError as CheckpointError,
        Index as Index,
        Manifest as Manifest,
    )
    from smp_core.checkpoint.lazy_state import (
        LazyState as LazyState,
        Unread as Unread,
        as_it_lies as as_it_lies,
    )
    from smp_core.checkpoint.live_state import (
        full_state_dict as full_state_dict,
        save_full_state as save_full_state,
    )
    from smp_core.checkpoint.opening import (
        OpenCheckpoint as OpenCheckpoint,
        is_checkpoint as is_checkpoint,
        open_checkpoint as open_checkpoint,
    )
    from smp_core.checkpoint.optimizers import (
        copy_into as copy_into,
        like_parameter as like_parameter,
        load_full_optimizer_state as load_full_optimizer_state,
        load_named_optimizer_state as load_named_optimizer_state,
        named_optimizer_state as named_optimizer_state,
        names_between as names_between,
        numbered as numbered,
        own_part as own_part,
        parameter_names as parameter_names,
        shard_like as shard_like,
        stepped_parameters as stepped_parameters,
    )
    from smp_core.checkpoint.random_state import (
        restore_random_state as restore_random_state,
        resumed_random_state as resumed_random_state,
        seed_random_state as seed_random_state,
        set_random_state as set_random_state,
    )
    from smp_core.checkpoint.ranks import Ranks as Ranks
    from smp_core.checkpoint.reader import (
        load_checkpoint as load_checkpoint,
        read_index as read_index,
        read_manifest as read_manifest,
        read_per_rank as read_per_rank,
        read_rest as read_rest,
        read_template as read_template,
        read_tensors as read_tensors,
    )
    from smp_core.checkpoint.root import (
        find_checkpoints as find_checkpoints,
        first_undamaged as first_undamaged,
        join as join,
        newest_checkpoint as newest_checkpoint,
        open_first_undamaged as open_first_undamaged,
        readable_checkpoints as readable_checkpoints,
        save_step as save_step,
        surplus as surplus,
    )
    from smp_core.checkpoint.tensor_files import TensorFiles as TensorFiles
    from smp_core.checkpoint.tree import (
        Path as Path,
        encode_rest as encode_rest,
        iterate_tensors as iterate_tensors,
        map_tensors as map_tensors,
        of_kind as of_kind,
        path_text as path_text,
    )
    from smp_core.checkpoint.untrusted import NoSuchFolder as NoSuchFolder
    from smp_core.checkpoint.verify import (
        open_checked as open_checked,
        verify_checkpoint as verify_checkpoint,
    )
    from smp_core.checkpoint.writer import (
        config_files as config_files,
        save_checkpoint as save_checkpoint,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
