"""Models and optimizers whose states are on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_core.sharding.optimizer.host import step_on_host


def offloaded(
    parameters: list[nn.Parameter], make: Any, device: str = "cpu"
) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    step_on_host(optimizer, torch.device(device))
    return optimizer


def bfloat16_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(n, 3, generator=generator).bfloat16())
        for n in (2, 5, 4)
    ]


def gradients(step: int, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(
            parameter.dtype
        )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def master_steps(steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What stepping float32 masters by hand gives: (rounded weights, masters)."""
    parameters = bfloat16_parameters()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = adamw(masters)
    for step in range(steps):
        gradients(step, parameters)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    return [master.detach().bfloat16() for master in masters], [
        master.detach() for master in masters
    ]
