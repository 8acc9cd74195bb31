"""Optimizers over shards: which may step them, their norms, scales and states.

Lists, and a trial on small parameters, decide whether an optimizer may step shards
(kinds). ``prepare_optimizer`` (prepared) replaces its parameters by shards over all
replicas (shards) or on the host (host). Norms and loss scaling see every mesh axis, and what is inf or nan
(grad_norm, grad_scaler; all places in docs/what-happens.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.optimizer.grad_norm import (
        clip_grad_norm_ as clip_grad_norm_,
        clip_grad_value_ as clip_grad_value_,
        settle_nonfinite as settle_nonfinite,
    )
    from smp_core.sharding.optimizer.grad_scaler import (
        ShardedGradScaler as ShardedGradScaler,
        scale_in_stages as scale_in_stages,
        take_scaler as take_scaler,
    )
    from smp_core.sharding.optimizer.gradient_readers import (
        say_where_gradients_are as say_where_gradients_are,
    )
    from smp_core.sharding.optimizer.kinds import (
        register_elementwise as register_elementwise,
        register_tensorwise as register_tensorwise,
    )
    from smp_core.sharding.optimizer.prepared import (
        prepare_optimizer as prepare_optimizer,
    )
    from smp_core.sharding.optimizer.shards import (
        WorldSharding as WorldSharding,
        like as like,
        local_of as local_of,
        master_dtype as master_dtype,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
