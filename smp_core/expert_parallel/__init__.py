"""Expert parallelism: ranks of a partition group hold whole experts, and tokens travel
to them (docs/mixture-of-experts.md).

The rules decide the degree; ``deal_experts`` (experts) gives each rank its experts,
before FSDP2 shards those over the rest of the group; a dispatch (dispatch) moves rows
to the ranks of their experts and back; ``balance_routers`` (balance) lets routers learn
from all ranks' tokens, with and without expert ranks, by their losses (losses) and
biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.expert_parallel.balance import (
        BalancedRouters as BalancedRouters,
        balance_routers as balance_routers,
    )
    from smp_core.expert_parallel.experts import deal_experts as deal_experts
    from smp_core.expert_parallel.losses import (
        Sums as Sums,
        auxiliary_loss as auxiliary_loss,
        losses_multiplied_by as losses_multiplied_by,
    )
    from smp_core.expert_parallel.rules import (
        EXPERT_PARALLELISM as EXPERT_PARALLELISM,
        ROUTER_BALANCE as ROUTER_BALANCE,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
