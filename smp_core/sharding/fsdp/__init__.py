"""FSDP2 units on the 1-D shard mesh: the only room that touches FSDP2's internals.

FSDP2 shards, gathers and reduces inside the partition group; the hop across replicas is
ours (:mod:`smp_core.sharding.gradients.accumulation`). Each file says what it reads
beyond the public API, and why no public one will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.fsdp.adopted import (
        adopt_units as adopt_units,
        forget_partial_sums as forget_partial_sums,
        given_policy as given_policy,
        given_units as given_units,
        partial_sum_bytes as partial_sum_bytes,
    )
    from smp_core.sharding.fsdp.calls import (
        Calls as Calls,
        in_a_call as in_a_call,
        in_graphs as in_graphs,
        name_of_shard as name_of_shard,
    )
    from smp_core.sharding.fsdp.data_attribute import (
        DATA_OF_COPY as DATA_OF_COPY,
        is_noted as is_noted,
    )
    from smp_core.sharding.fsdp.internals import require_internals as require_internals
    from smp_core.sharding.fsdp.passes import (
        FAILED_PASS as FAILED_PASS,
        at_end_of_backward as at_end_of_backward,
        backward_pass as backward_pass,
        forget_passes as forget_passes,
        outermost_pass as outermost_pass,
    )
    from smp_core.sharding.fsdp.units import (
        ShardedUnit as ShardedUnit,
        Slot as Slot,
        explain_uncalled as explain_uncalled,
        name_uncalled as name_uncalled,
        passing_by as passing_by,
        reshard as reshard,
    )
    from smp_core.sharding.fsdp.wrapping import (
        apply_fsdp_options as apply_fsdp_options,
        shard_units as shard_units,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
