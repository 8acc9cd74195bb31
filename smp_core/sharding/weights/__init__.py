"""Values for sharded parameters: initialised, broadcast, loaded or cast, a part for
each rank.

Delayed initialisation draws the numbers of one process, rank 0's values reach every
rank, whole tensors are cut for each rank, and for code that one rank runs alone a
module is a plain one for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.weights.cast_parameters import (
        CastParameters as CastParameters,
    )
    from smp_core.sharding.weights.delayed_init import materialize as materialize
    from smp_core.sharding.weights.load_state_dict import (
        load_full_state as load_full_state,
        load_own_parts as load_own_parts,
    )
    from smp_core.sharding.weights.rank_0 import (
        broadcast_from_rank_0 as broadcast_from_rank_0,
        send_to_stages as send_to_stages,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
