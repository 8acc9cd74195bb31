"""A model's blocks in the order they run in, recorded by running the model once on the
meta device.

Chain is the result; recording runs the model with an example; stand_ins and
saved_buffers are about modules and buffers that work before or between the blocks, and
kept about what forwards leave in attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.plan.chain.chain import (
        Chain as Chain,
        StandIn as StandIn,
        argument as argument,
        given_by as given_by,
        with_argument as with_argument,
    )
    from smp_core.plan.chain.kept import (
        KeptTensors as KeptTensors,
        numbers_of as numbers_of,
    )
    from smp_core.plan.chain.played import (
        is_played as is_played,
        with_fake_values as with_fake_values,
    )
    from smp_core.plan.chain.recording import (
        as_in_training as as_in_training,
        record_chain as record_chain,
        refusal_of as refusal_of,
        running_the_example as running_the_example,
        with_chain as with_chain,
    )
    from smp_core.plan.chain.saved_buffers import (
        EXTRA_STATE as EXTRA_STATE,
        state_restored as state_restored,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
