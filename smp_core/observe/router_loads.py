"""RouterLoads: how evenly a mixture of experts uses its experts.

A router is a module with the numbers ``num_experts`` and ``top_k`` whose forward
returns, among other things, the experts chosen for each token: an integer tensor [...,
top_k]. Those of most Transformers models are such modules. Choices are counted on their
device, and nothing waits for them between two reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.cluster import of_all_ranks
from smp_core.plan import DROPPED
from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")

_COUNTS = "_smp_expert_counts"


def _count(router: Any, args: Any, output: Any) -> None:
    """Count a router's choices. One hook for all, and the counts on the router: a
    compiled block is one graph for all layers."""
    # Evaluations choose too, and would look like training.
    if not router.training:
        return
    # The experts of each token are a tensor of integers among the outputs.
    for each in _values(output):
        if (
            isinstance(each, torch.Tensor)
            and each.dtype in (torch.int64, torch.int32)
            and each.ndim > 1
        ):
            if each.shape[-1] == router.top_k:
                # One count more than experts: for choices of none, which capacity
                # drops.
                chosen = each.detach().reshape(-1).to(torch.int64)
                experts = router.num_experts
                is_none = (chosen < 0) | (chosen >= experts)  # tokens that are dropped
                counts = getattr(router, _COUNTS)
                counts.scatter_add_(
                    0, torch.where(is_none, experts, chosen), torch.ones_like(chosen)
                )
                return


def _values(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, (tuple, list)) else (output,)


class RouterLoads:
    """The choices of all routers of a model, in training.

    Args:
        modules: what this rank computes of the model.
        share_models: whether other ranks compute other modules (pipeline stages).
        device: of this rank.

    Attributes:
        by_router: of the last report: ``busiest``, the tokens of a router's busiest
            expert over the mean of its experts (1: all have as many), and ``idle``, the
            share of its experts without a token. Routers that were not called are left
            out.
    """

    def __init__(
        self, modules: Sequence[nn.Module], share_models: bool, device: torch.device
    ) -> None:
        self.by_router: dict[str, dict[str, float]] = {}
        self._share_models = share_models
        self._routers = dict(_routers(modules))
        self._limited = [
            each
            for module in modules
            for each in module.modules()
            if hasattr(each, DROPPED)
        ]
        self._sizes: dict[str, int] | None = None  # experts of every router of the job
        self._warned = False
        self._hooks = [
            router.register_forward_hook(_count) for router in self._routers.values()
        ]
        # A count on each router, on its device: a report adds them up.
        for router in self._routers.values():  # the last count is of what is no expert
            setattr(
                router,
                _COUNTS,
                torch.zeros(router.num_experts + 1, dtype=torch.int64, device=device),
            )

    def report(
        self, over_ranks: Callable[[list[float], str], list[float]]
    ) -> dict[str, float]:
        """Add up the choices of all ranks since the last report. Collective.

        Returns:
            ``expert_load``: the highest ``busiest`` of all routers; ``idle_experts``:
                the share of all experts without
            a token; ``dropped_choices``: the share of choices that experts with a
            capacity left out. Empty for a model without routers, or if none was called.
        """
        # Asked once: which routers the job has, stages included.
        if self._sizes is None:
            self._sizes = {
                name: router.num_experts for name, router in self._routers.items()
            }
            if self._share_models:
                everyone = of_all_ranks(self._sizes)
                self._sizes = {
                    name: size for sizes in everyone for name, size in sizes.items()
                }
        if not self._sizes:
            return {}
        # Tokens of each expert, over all ranks.
        # All ranks in one order, each with all routers of the job.
        sizes = dict(sorted(self._sizes.items()))
        own = [
            float(count)
            for name, size in sizes.items()
            for count in self._taken(name, size)
        ]
        own += self._dropped()
        *counts, dropped, limited = over_ranks(own, "sum")
        # The sums again by router.
        together = torch.tensor(counts, dtype=torch.float64)
        loads = dict(zip(sizes, together.split(list(sizes.values())), strict=True))
        self.by_router = {
            name: {
                "busiest": float(load.max() / load.mean()),
                "idle": float((load == 0).double().mean()),
            }
            for name, load in loads.items()
            if load.sum() > 0
        }
        if not self.by_router:
            self._say_that_nothing_was_counted()
            return {}
        used = torch.cat([loads[name] for name in self.by_router])
        highest = max(figures["busiest"] for figures in self.by_router.values())
        found = {
            "expert_load": highest,
            "idle_experts": float((used == 0).double().mean()),
        }
        return {**found, "dropped_choices": dropped / limited} if limited else found

    def _taken(self, name: str, size: int) -> list[int]:
        # A router of another stage counts nothing here.
        if name not in self._routers:
            return [0] * size
        counts = getattr(self._routers[name], _COUNTS)
        taken: list[int] = counts[:size].tolist()
        counts.zero_()
        return taken

    def _dropped(self) -> list[float]:
        """Take what this rank's experts left out, and all choices of those that may
        leave out any."""
        totals = [getattr(experts, DROPPED) for experts in self._limited]
        if not totals:
            return [0.0, 0.0]
        found: list[float] = torch.stack(totals).sum(0).tolist()
        for each in totals:
            each.zero_()
        return found

    def _say_that_nothing_was_counted(self) -> None:
        if not self._warned and is_rank_0():
            logger.warning(
                "the monitor has counted no choice of the model's experts: no module with num_experts and top_k "
                "returned an integer tensor [..., top_k], or the blocks were compiled before the monitor was there"
            )
        self._warned = True

    def end(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for router in self._routers.values():
            # The hook is gone, and its counts with it.
            vars(router).pop(_COUNTS, None)
        self._routers = {}


def _routers(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    for module in modules:
        for name, router in module.named_modules():
            experts = getattr(router, "num_experts", None)
            top_k = getattr(router, "top_k", None)
            # Not every module with these names is a router: the numbers have to fit.
            if type(experts) is int and type(top_k) is int and 1 <= top_k <= experts:
                yield name, router
