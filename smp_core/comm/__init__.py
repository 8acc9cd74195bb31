"""Communication: collectives as FSDP2 communication objects, and the meter that counts
their bytes.

Traffic makes the objects that a plan asks for: collectives in one stage (flat) or two
(hierarchical), sums across replicas (replica_hop), quantized gathers and reductions.
IssuedCollectives notes each call, CommMeter counts it. The rules settle what is sent
and in which form, with measured links where there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.comm.background import Background as Background, Pending as Pending
    from smp_core.comm.deferred import Deferred as Deferred
    from smp_core.comm.exchange import (
        Message as Message,
        sum_rows as sum_rows,
    )
    from smp_core.comm.flat import (
        CommObject as CommObject,
        FlatAllGather as FlatAllGather,
        FlatAllReduce as FlatAllReduce,
        FlatMaxReduce as FlatMaxReduce,
        FlatReduceScatter as FlatReduceScatter,
    )
    from smp_core.comm.measuring import (
        SIZES as SIZES,
        TIMEOUT as TIMEOUT,
        measure as measure,
    )
    from smp_core.comm.meter import (
        LINK_CLASSES as LINK_CLASSES,
        CommMeter as CommMeter,
        LinkClass as LinkClass,
    )
    from smp_core.comm.remainder_state import (
        KEY as KEY,
        load_remainder_state as load_remainder_state,
    )
    from smp_core.comm.replica_hop import ReplicaHop as ReplicaHop
    from smp_core.comm.rules import COMMUNICATION as COMMUNICATION
    from smp_core.comm.traffic import (
        IssuedCollectives as IssuedCollectives,
        Route as Route,
        Traffic as Traffic,
        first_to_differ as first_to_differ,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
