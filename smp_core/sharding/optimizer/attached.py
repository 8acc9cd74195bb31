"""Parameters that were attached to a model after it was sharded, as adapters are by peft's ``get_peft_model``.

FSDP2 knows nothing of them. Each rank holds them whole: all get rank 0's values, and gradients are added up over all
ranks as those of other replicated parameters are.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.cluster import of_all_ranks
from smp_core.sharding.gradients.accumulation import AccumulationWindow
from smp_core.sharding.weights import broadcast_from_rank_0

logger = logging.getLogger("smp")


def take_in_attached(model: Any) -> None:
    """Take in what was attached to a model since it was sharded, or since the last call. Collective over the world.

    Args:
        model: a :class:`smp_core.sharding.optimizer.prepared.SteppedModel`.

    Raises:
        ValueError: ranks attached different parameters, or the model's layout has no place for them. On all ranks.
    """
    window, mesh = model.window, model.mesh
    # By name: ranks may have attached them in another order, and take part in the broadcast in this one.
    by_name = sorted(model.module.named_parameters(), key=lambda pair: pair[0])
    named = {name: each for name, each in by_name if not isinstance(each, DTensor)}
    if isinstance(window, AccumulationWindow):
        known = window.replicated_ids()
        attached = {name: parameter for name, parameter in named.items() if id(parameter) not in known}
    else:
        attached = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    _require_the_same(attached)
    if not attached:
        return
    if not isinstance(window, AccumulationWindow) or mesh.pipeline_degree > 1 or mesh.tensor_degree > 1:
        raise ValueError(
            f"{next(iter(attached))} was attached after the model was sharded, which is not built with "
            "pipeline stages, tensor ranks, or a model that came sharded on a (replicate, shard) mesh; attach adapters "
            "before the model is prepared"
        )
    broadcast_from_rank_0(attached.values(), mesh.device, mesh.model_group)
    window.add_replicated(attached)
    if mesh.rank == 0:
        elements = sum(parameter.numel() for parameter in attached.values())
        logger.info(
            "%d parameters (%s elements) were attached after the model was sharded: whole on every rank, rank 0's "
            "values; attached before, they would be sharded",
            len(attached),
            f"{elements:,}",
        )


def _require_the_same(attached: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that ranks do not have alike.

    Raises:
        ValueError: on all ranks.
    """
    own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in attached.items()]
    by_rank = of_all_ranks(own)
    for rank, theirs in enumerate(by_rank):
        odd = sorted(set(theirs).symmetric_difference(by_rank[0]))
        if odd:
            name, shape, dtype, trained = odd[0]
            raise ValueError(
                f"ranks 0 and {rank} attached different parameters to the model: {name} {list(shape)} {dtype}, "
                f"requires_grad={trained}, is on one of them only; attach the same adapters on all ranks, before or "
                "after the model is prepared"
            )
