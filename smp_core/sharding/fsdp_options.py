"""FSDP2's own options about gathers and reductions in flight, by its public methods: how many units ahead gathers run,
how many gradients wait for their reduction, a communicator of its own for reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.config import SmpConfig
from smp_core.torch_facts import collective_timeout


def apply_fsdp_options(model: nn.Module, config: SmpConfig, device: torch.device) -> None:
    """Hand resolved options to the model's roots, before the first forward. Collective with
    ``separate_reduce_scatter_group``."""
    options = config.collectives
    forward, backward = options.forward_prefetch, options.backward_prefetch
    assert isinstance(forward, int) and isinstance(backward, int)
    prefetch(model, forward=forward, backward=backward)
    for root in _roots(model):
        if options.separate_reduce_scatter_group:
            with _groups_of_the_run(device):
                root.set_separate_reduce_scatter_group(True)
        if options.reduce_scatter_buffers != 1:
            root.set_reduce_scatter_max_input_buffers(options.reduce_scatter_buffers)  # type: ignore[arg-type]


@contextlib.contextmanager
def _groups_of_the_run(device: torch.device) -> Iterator[None]:
    """Let process groups that are made inside have the run's timeout, and connect them while all ranks are here.
    (FSDP2 gives none, which is torch's ten minutes, and first uses them in a backward pass.)"""
    make, made = dist.new_group, []

    def new_group(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **{"timeout": collective_timeout(), **options}))
        return made[-1]

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = make
    for group in made:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def prefetch(model: nn.Module, *, forward: int, backward: int) -> None:
    """Gather ahead of use: in forward the next ``forward`` units in the order in which they are registered (0: FSDP2's
    own, which overlaps by streams only), in backward the ``backward`` before (1: FSDP2's own, by the order in which
    they ran)."""
    for root in _roots(model):
        units: list[FSDPModule] = [module for module in root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
        for place, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + forward])
            if backward > 1:
                unit.set_modules_to_backward_prefetch(units[max(place - backward, 0) : place][::-1])


def _roots(model: nn.Module) -> Iterable[FSDPModule]:
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in inside:
            inside.update(module.modules())  # type: ignore[attr-defined]
            yield module
