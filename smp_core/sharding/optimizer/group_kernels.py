"""Which of torch's kernels step the parameters of an optimizer's groups.

A fused or foreach kernel takes tensors of one kind: plain ones, or DTensors of one
mesh; torch has fused kernels for DTensors of Adam and AdamW only. Parameters in host
memory are stepped by the host's kernels. What was asked for and cannot run is said in
the log; numbers are the same.

A fused optimizer takes the scale of a gradient scaler into its kernel
(``_step_supports_amp_scaling``, which has no public name); one whose kernels were
changed gets unscaled gradients, as every other one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smp_core.sharding.optimizer.host import host_kernels
from smp_core.sharding.optimizer.kinds import held

logger = logging.getLogger("smp")

_FUSED_FOR_SHARDS = (torch.optim.Adam, torch.optim.AdamW)


def choose_kernels(optimizer: Optimizer, *, on_host: bool, stepped_there: bool) -> None:
    """Choose kernels that take what is in each group, and in all of them for
    ``zero_grad``, which goes by the defaults.

    Args:
        on_host: parameters live in host memory, where other kernels run than on the
            device.
        stepped_there: an optimizer that steps on the host chooses its kernels itself.
    """
    has_fused = isinstance(optimizer, _FUSED_FOR_SHARDS)
    for group in [] if stepped_there else optimizer.param_groups:
        parameters = held(group)
        if _are_mixed(parameters):
            _leave(
                optimizer,
                group,
                ("fused", "foreach"),
                "where 0-d, shared or tensor parallel parameters are in the group",
            )
        elif on_host:
            group.update(host_kernels(group, group["params"], type(optimizer)))
        elif not has_fused and any(isinstance(each, DTensor) for each in parameters):
            _leave(
                optimizer,
                group,
                ("fused",),
                "on sharded parameters, for which torch has the fused kernels of Adam and AdamW alone",
            )
    if _are_mixed(
        parameter for group in optimizer.param_groups for parameter in held(group)
    ):
        optimizer.defaults.update(
            {flag: False for flag in ("fused", "foreach") if flag in optimizer.defaults}
        )


def _leave(
    optimizer: Optimizer, group: dict[str, object], flags: tuple[str, ...], where: str
) -> None:
    """Switch kernels of a group off, and say so of those that were asked for."""
    asked = [flag for flag in flags if group.get(flag)]
    if asked:
        logger.info("%s=True has no effect %s", asked[0], where)
    if "fused" in asked:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    group.update({flag: False for flag in flags if flag in group})


def _are_mixed(parameters: Iterable[Tensor]) -> bool:
    """Return whether one kernel cannot take all: plain tensors, and DTensors of each
    mesh, go by themselves."""
    meshes = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in parameters
    }
    return len(meshes) > 1
