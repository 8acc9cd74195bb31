"""Parameters that were attached to a model after it was sharded, as adapters are by peft's ``get_peft_model``.

FSDP2 knows nothing of them. Each rank holds them whole: all get rank 0's values, and gradients are added up over all
ranks as those of other replicated parameters are.

Ranks may attach them in another order, and list them for an optimizer in another order: rank 0's order holds for all,
because whoever sums over parameters, or sends them one after another, goes by it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smp_core.cluster import lists_of_all_ranks, of_all_ranks, of_rank_0
from smp_core.sharding.gradients.accumulation import AccumulationWindow
from smp_core.sharding.weights import broadcast_from_rank_0
from smp_core.torch_facts import clean_name, model_parameter

logger = logging.getLogger("smp")


def take_in_attached(model: Any) -> None:
    """Take in what was attached to a model since it was sharded, or since the last call. Collective over the world.

    Args:
        model: a :class:`smp_core.sharding.optimizer.prepared.SteppedModel`.

    Raises:
        ValueError: ranks attached different parameters, or the model's layout has no place for them. On all ranks.
    """
    window, mesh = model.window, model.mesh
    attached = window.attached()
    _require_the_same(attached)
    if not attached:
        return
    if not isinstance(window, AccumulationWindow) or mesh.pipeline_degree > 1 or mesh.tensor_degree > 1:
        raise ValueError(
            f"{next(iter(attached))} was attached after the model was sharded, which is not built with "
            "pipeline stages, tensor ranks, or a model that came sharded on a (replicate, shard) mesh; attach adapters "
            "before the model is prepared"
        )
    _order_as_on_rank_0(model.module)
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
    by_rank = lists_of_all_ranks(own) or []
    for rank, theirs in enumerate(by_rank):
        odd = sorted(set(theirs).symmetric_difference(by_rank[0]))
        if odd:
            name, shape, dtype, trained = odd[0]
            raise ValueError(
                f"ranks 0 and {rank} attached different parameters to the model: {name} {list(shape)} {dtype}, "
                f"requires_grad={trained}, is on one of them only; attach the same adapters on all ranks, before or "
                "after the model is prepared"
            )


def _order_as_on_rank_0(model: nn.Module) -> None:
    """Bring modules and parameters into the order that rank 0 has them in. Collective over the world.

    Raises:
        ValueError: modules of an ``nn.Sequential`` are in another order, which would compute something else. On all
            ranks.
    """
    own = [name for name, _ in model.named_parameters()]
    if lists_of_all_ranks(own) is None:
        return
    places = {name: (list(each._modules), list(each._parameters)) for name, each in model.named_modules()}
    first = of_rank_0(lambda: places)
    moved = [name for name, here in places.items() if here != first.get(name, here)]
    sequences = [name for name in moved if isinstance(model.get_submodule(name), (nn.Sequential, nn.ModuleList))]
    for names in lists_of_all_ranks(sequences) or []:
        if names:
            raise ValueError(
                f"{names[0]} has its modules in another order on some ranks than on rank 0, and would compute "
                "something else there; build it in the same way on all ranks"
            )
    for name in moved:
        module = model.get_submodule(name)
        registries: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
        for registry, order in zip(registries, first[name], strict=True):
            for key in [key for key in order if key in registry]:
                registry[key] = registry.pop(key)


def step_alike(optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> None:
    """Bring each group's parameters into the order that the first rank with the same layers has them in. Collective
    over the world.

    Raises:
        ValueError: ranks step other parameters. On all ranks.
    """
    names = {}
    for number, model in enumerate(models):
        for name, parameter in model.module.named_parameters():
            names[id(parameter)] = f"{clean_name(name)}" + (f" of model {number}" if number else "")
    own: list[list[str]] = []
    for group in optimizer.param_groups:
        # What is of no model is refused by its shape.
        own.append([names.get(id(model_parameter(p)), f"none, {list(p.shape)}") for p in group["params"]])
    by_rank = lists_of_all_ranks(own)
    if by_rank is None:
        return
    stage = models[0].mesh.stage
    stages = of_all_ranks(stage)
    for rank, theirs in enumerate(by_rank):
        first = stages.index(stages[rank])
        _require_the_same_groups(type(optimizer).__name__, (first, by_rank[first]), (rank, theirs))
    for group, order, here in zip(optimizer.param_groups, by_rank[stages.index(stage)], own, strict=True):
        place = {name: number for number, name in enumerate(order)}
        pairs = sorted(zip(here, group["params"], strict=True), key=lambda pair: place[pair[0]])
        group["params"] = [parameter for _, parameter in pairs]


_Groups = Sequence[Sequence[str]]


def _require_the_same_groups(kind: str, at_one: tuple[int, _Groups], at_other: tuple[int, _Groups]) -> None:
    """Refuse groups that two ranks do not have alike, whatever the order in them."""
    (one, ours), (other, theirs) = at_one, at_other
    what_to_do = "give the optimizer the same parameters in the same groups on all ranks"
    if len(ours) != len(theirs):
        raise ValueError(
            f"the optimizer ({kind}) has {len(ours)} parameter groups on rank {one} and {len(theirs)} on rank {other}; "
            + what_to_do
        )
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        odd = sorted(set(left).symmetric_difference(right))
        if odd:
            only, others = (one, other) if odd[0] in left else (other, one)
            raise ValueError(
                f"the optimizer ({kind}) steps {odd[0]} in group {number} on rank {only} and not on rank {others}; "
                + what_to_do
            )
