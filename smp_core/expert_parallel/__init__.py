"""Expert parallelism: ranks of a partition group hold whole experts, and tokens travel to them
(docs/mixture-of-experts.md).

The rules decide the degree; ``deal_experts`` (experts) gives each rank its experts, before FSDP2 shards those over the
rest of the group; a dispatch (dispatch) moves rows to the ranks of their experts and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.expert_parallel.dispatch import (
        Dispatch as Dispatch,
        FlatDispatch as FlatDispatch,
        TwoHopDispatch as TwoHopDispatch,
    )
    from smp_core.expert_parallel.experts import DealtExperts as DealtExperts, deal_experts as deal_experts
    from smp_core.expert_parallel.rules import EXPERT_PARALLELISM as EXPERT_PARALLELISM
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
