"""Sharding: where parameters, gradients and optimizer states live.

fsdp/ puts FSDP2 units on the partition group; gradients/ adds their gradients up over
the micro-batches of a window and across replicas; optimizer/ steps shards, masters and
states on the host; weights/ brings values into shards. Here are the rules for dtypes
and pre-sharded models, and what surrounds a sharded module: its replaced parameters,
shards as operands, pickled and drawn, notes under errors about them, BatchNorm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.batch_norm import (
        CpuSyncBatchNorm as CpuSyncBatchNorm,
        require_plain_batch_norms as require_plain_batch_norms,
        sync_batch_norm_on_cpu as sync_batch_norm_on_cpu,
        sync_over_samples as sync_over_samples,
    )
    from smp_core.sharding.error_notes import explain as explain
    from smp_core.sharding.frozen_rules import FROZEN_STORAGE as FROZEN_STORAGE
    from smp_core.sharding.given import (
        NativeWindow as NativeWindow,
        given_sharding as given_sharding,
    )
    from smp_core.sharding.given_rules import settle_given as settle_given
    from smp_core.sharding.patched import (
        change_this_process as change_this_process,
        follow_window as follow_window,
        is_a_part as is_a_part,
        load_full_state as load_full_state,
    )
    from smp_core.sharding.replaced import (
        ReplacedParameters as ReplacedParameters,
        of_replaced as of_replaced,
    )
    from smp_core.sharding.rules import (
        SHARDING as SHARDING,
        require_plain_lookups as require_plain_lookups,
        require_shardable as require_shardable,
        settle_precision as settle_precision,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
