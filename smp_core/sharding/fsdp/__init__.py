"""FSDP2 units on the 1-D shard mesh: the only room that touches FSDP2's internals.

FSDP2 shards, gathers and reduces inside the partition group; the hop across replicas is ours
(:mod:`smp_core.sharding.gradients.accumulation`). Each file says what it reads beyond the public API, and why no public
one will do.
"""

from __future__ import annotations

from smp_core.sharding.fsdp.adopted import (
    adopt_units,
    forget_partial_sums,
    given_policy,
    given_units,
    partial_sum_bytes,
)
from smp_core.sharding.fsdp.calls import Calls, in_a_call
from smp_core.sharding.fsdp.internals import require_internals
from smp_core.sharding.fsdp.param_group import GivenPolicy
from smp_core.sharding.fsdp.passes import FAILED_PASS, at_end_of_backward, backward_pass, forget_passes, reshard
from smp_core.sharding.fsdp.uncalled import explain_uncalled, name_uncalled
from smp_core.sharding.fsdp.units import ShardedUnit, Slot, passing_by
from smp_core.sharding.fsdp.wrapping import shard_units

__all__ = [
    "adopt_units",
    "at_end_of_backward",
    "backward_pass",
    "Calls",
    "explain_uncalled",
    "FAILED_PASS",
    "forget_partial_sums",
    "forget_passes",
    "given_policy",
    "given_units",
    "GivenPolicy",
    "in_a_call",
    "name_uncalled",
    "partial_sum_bytes",
    "passing_by",
    "require_internals",
    "reshard",
    "shard_units",
    "ShardedUnit",
    "Slot",
]
