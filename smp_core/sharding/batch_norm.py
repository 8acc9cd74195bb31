"""BatchNorm whose statistics are those of the whole global batch, on CPU too.

torch.nn.SyncBatchNorm refuses CPU tensors, so a run that is right on CUDA could not be
tried or tested without it. This is the same computation from two differentiable sums
over all ranks (the mean, then the squared distances from it). ``_BatchNorm`` is the
class that torch's BatchNorm1d/2d/3d and SyncBatchNorm share; there is no public one.

Shape letters: N samples, C channels, * any further dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from smp_core.cluster import SmpMesh


class _SumOverRanks(torch.autograd.Function):
    """y = sum over ranks of x; so dL/dx, with L the sum of all ranks' losses, is the
    sum of all ranks' dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class CpuSyncBatchNorm(_BatchNorm):
    """Drop-in for BatchNorm1d/2d/3d; the input is [N, C, *] or [N, C]."""

    group: dist.ProcessGroup | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"expected an input of at least 2 dims [N, C, *], got {input.dim()}"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        # In evaluation the running statistics count, which need no messages.
        whole_batch = self.training or self.running_mean is None
        if (
            not whole_batch
            or not dist.is_initialized()
            or dist.get_world_size(self.group) == 1
        ):
            return super().forward(input)
        # The mean of all ranks' elements, of which ranks may have different numbers.
        # Half precision is summed in float32, as by torch's own kernels: in bfloat16 the
        # sums would lose digits, in float16 more than 65,504 elements overflow.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        per_channel = [1, -1] + [1] * (input.dim() - 2)
        # Ranks may have different numbers of samples, so counts are added up as well.
        local_count = wide.new_full((1,), input.numel() / input.shape[1])
        sums = _SumOverRanks.apply(torch.cat([wide.sum(dims), local_count]), self.group)
        count, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        # Their variance, in a second pass, which loses no digits; running statistics
        # are unbiased.
        centred = wide - mean.view(per_channel)
        variance = (
            _SumOverRanks.apply((centred * centred).sum(dims), self.group) / count
        )
        self._update_running(mean.detach(), variance.detach() * count / (count - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(per_channel)
        if self.affine:
            normal = normal * self.weight.view(per_channel) + self.bias.view(
                per_channel
            )
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked += 1
        # Without momentum torch keeps the mean over all batches.
        share = (
            1.0 / float(self.num_batches_tracked)
            if self.momentum is None
            else self.momentum
        )
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def sync_batch_norm_on_cpu(module: nn.Module) -> nn.Module:
    """Let every BatchNorm in ``module`` be one over all ranks, in place: what it holds
    is kept, hooks and places that share it included.

    Raises:
        ValueError: as of :func:`require_plain_batch_norms`.
    """
    require_plain_batch_norms(module)
    for each in module.modules():
        if isinstance(each, _BatchNorm):
            # The ranks that a user chose for torch's own stay the ones.
            if isinstance(each, nn.SyncBatchNorm):
                vars(each)["group"] = each.process_group
            each.__class__ = CpuSyncBatchNorm
    return module


def require_plain_batch_norms(module: nn.Module) -> None:
    """Refuse BatchNorms of classes that compute something else besides, an activation
    say: a synchronised one in their place, torch's too, would leave that out.

    Raises:
        ValueError: with the first of them.
    """
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward, CpuSyncBatchNorm.forward)
    for name, each in module.named_modules():
        if isinstance(each, _BatchNorm) and type(each).forward not in plain:
            raise ValueError(
                f"sync_batchnorm: {name} is a {type(each).__name__}, whose forward is not torch's BatchNorm's, and a "
                "synchronised BatchNorm in its place would leave out what it does besides; write "
                "sync_batchnorm=False, or that class with nn.SyncBatchNorm inside of it"
            )


def sync_over_samples(model: nn.Module, mesh: SmpMesh) -> None:
    """Let synchronised BatchNorms, torch's or ours, add up over the ranks that have
    other samples or tokens, where they were given no group.

    Tensor ranks have the same ones, which would count several times in the unbiased
    variance; other pipeline stages do not run this layer.
    """
    if mesh.tensor_degree == mesh.pipeline_degree == 1:
        return
    for module in model.modules():
        if isinstance(module, CpuSyncBatchNorm) and module.group is None:
            module.group = mesh.gradient_group
        elif isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.process_group = mesh.gradient_group
