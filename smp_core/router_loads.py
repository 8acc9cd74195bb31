"""RouterLoads: how evenly a mixture of experts uses its experts.

A router is a module with the numbers ``num_experts`` and ``top_k`` whose forward returns, among other things, the
experts chosen for each token: an integer tensor [..., top_k]. Those of Transformers are such modules. Choices are
counted on their device, and nothing waits for them between two reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class RouterLoads:
    """The choices of all routers of a model, in training.

    Args:
        modules: what this rank computes of the model.
        share_models: whether other ranks compute other modules (pipeline stages).

    Attributes:
        by_router: of the last report: ``busiest``, the tokens of a router's busiest expert over the mean of its experts
            (1: all have as many), and ``idle``, the share of its experts without a token. Routers that were not
            called are left out.
    """

    def __init__(self, modules: Iterable[nn.Module], share_models: bool) -> None:
        self.by_router: dict[str, dict[str, float]] = {}
        self._share_models = share_models
        self._counts: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] | None = None  # experts of every router of the job
        self._hooks: list[Any] = []
        for module in modules:
            for name, router in module.named_modules():
                experts, top_k = getattr(router, "num_experts", None), getattr(router, "top_k", None)
                if isinstance(experts, int) and isinstance(top_k, int) and 1 <= top_k <= experts:
                    self._counts[name] = torch.zeros(experts, dtype=torch.int64)
                    self._hooks.append(router.register_forward_hook(self._counter(name, top_k)))

    def _counter(self, name: str, top_k: int) -> Callable[..., None]:
        def count(router: nn.Module, args: Any, output: Any) -> None:
            if not router.training:
                return
            for each in output if isinstance(output, tuple) else (output,):
                if isinstance(each, torch.Tensor) and each.dtype in (torch.int64, torch.int32) and each.ndim > 1:
                    if each.shape[-1] == top_k:
                        self._add(name, each)
                        return

        return count

    def _add(self, name: str, chosen: torch.Tensor) -> None:
        counts = self._counts[name]
        if counts.device != chosen.device:
            counts = self._counts[name] = counts.to(chosen.device)
        chosen = chosen.detach().reshape(-1).to(torch.int64)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))

    def report(self, over_ranks: Callable[[list[float], str], list[float]]) -> dict[str, float]:
        """Add up the choices of all ranks since the last report. Collective.

        Returns:
            ``expert_load``: the highest ``busiest`` of all routers; ``idle_experts``: the share of all experts without
            a token. Empty for a model without routers, or if none was called.
        """
        if self._sizes is None:
            self._sizes = {name: len(counts) for name, counts in self._counts.items()}
            if self._share_models:
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, self._sizes)
                self._sizes = {name: size for sizes in everyone for name, size in sizes.items()}
        if not self._sizes:
            return {}
        none = {name: torch.zeros(size, dtype=torch.int64) for name, size in sorted(self._sizes.items())}
        own = [self._counts.get(name, zeros).cpu() for name, zeros in none.items()]
        together = torch.tensor(over_ranks(torch.cat(own).tolist(), "sum"))
        for counts in self._counts.values():
            counts.zero_()
        loads = dict(zip(none, together.split([len(zeros) for zeros in none.values()]), strict=True))
        self.by_router = {
            name: {"busiest": float(load.max() / load.mean()), "idle": float((load == 0).double().mean())}
            for name, load in loads.items()
            if load.sum() > 0
        }
        if not self.by_router:
            return {}
        used = torch.cat([loads[name] for name in self.by_router])
        highest = max(figures["busiest"] for figures in self.by_router.values())
        return {"expert_load": highest, "idle_experts": float((used == 0).double().mean())}

    def end(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
