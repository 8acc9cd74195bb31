"""Values for sharded parameters: initialised or cast, a part for each rank.

Delayed initialisation draws the numbers of one process, parameters that are replicated
are computed with in another dtype, and for code that one rank runs alone a module is a
plain one for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.weights.cast_parameters import (
        CastParameters as CastParameters,
    )
    from smp_core.sharding.weights.delayed_init import (
        materialize as materialize,
        warn_of_lost_writes as warn_of_lost_writes,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
