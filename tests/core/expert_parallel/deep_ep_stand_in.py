"""A stand-in for DeepEP, which runs on CUDA only: the signatures and return values of
``deep_ep.Buffer`` of release 1.2.1, over gloo's all-to-alls. It checks what it is given
as DeepEP's own code does."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.expert_parallel import deep_ep


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks


class Buffer:
    calls: tuple[str, ...] = ()

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
    ) -> None:
        assert group is not None and num_rdma_bytes == 0
        self.group, self.size, self.num_nvl_bytes = group, group.size(), num_nvl_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert (
            topk_idx.dtype == torch.int64
            and topk_idx.is_contiguous()
            and topk_idx.ndim == 2
        )
        assert topk_idx.min() >= -1 and topk_idx.max() < num_experts
        rank = topk_idx // (num_experts // self.size)
        is_in_rank = torch.stack(
            [(rank == each).any(1) for each in range(self.size)], 1
        )
        of_experts = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_in_rank.sum(0).int(), None, of_experts.int(), is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        self._called("dispatch" if handle is None else "dispatch again", x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._to_ranks(x, *handle), None, None, None, None, None
        assert (
            num_tokens_per_rank is not None
            and is_token_in_rank is not None
            and num_tokens_per_expert is not None
        )
        assert (
            topk_idx is not None
            and topk_weights is not None
            and topk_weights.is_contiguous()
        )
        assert topk_weights.dtype in (torch.float32, torch.float64)
        arriving = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(arriving, num_tokens_per_rank, group=self.group)
        new = is_token_in_rank, arriving
        n_here = len(num_tokens_per_expert) // self.size
        experts = self._to_ranks(topk_idx, *new) - self.group.rank() * n_here
        is_here = (experts >= 0) & (experts < n_here)
        weights = self._to_ranks(topk_weights, *new).where(is_here, 0)
        counts = experts[is_here].bincount(minlength=n_here).tolist()
        return (
            self._to_ranks(x, *new),
            experts.where(is_here, -1),
            weights,
            counts,
            new,
            None,
        )

    def combine(
        self, x: Tensor, handle: tuple[Tensor, ...], topk_weights: Tensor | None = None
    ) -> tuple[Any, ...]:
        self._called("combine", x)
        weights = (
            None if topk_weights is None else self._from_ranks(topk_weights, *handle)
        )
        return self._from_ranks(x, *handle), weights, None

    def _called(self, call: str, x: Tensor) -> None:
        assert (
            x.ndim == 2
            and x.is_contiguous()
            and x.shape[1] * x.element_size() * self.size <= self.num_nvl_bytes
        )
        Buffer.calls += (call,)

    def _to_ranks(self, rows: Tensor, is_in_rank: Tensor, arriving: Tensor) -> Tensor:
        _, token = is_in_rank.T.nonzero(as_tuple=True)
        arrived = rows.new_empty(int(arriving.sum()), rows.shape[1])
        sizes = arriving.tolist(), is_in_rank.sum(0).tolist()
        dist.all_to_all_single(arrived, rows[token], *sizes, group=self.group)
        return arrived

    def _from_ranks(self, rows: Tensor, is_in_rank: Tensor, arriving: Tensor) -> Tensor:
        _, token = is_in_rank.T.nonzero(as_tuple=True)
        back = rows.new_empty(len(token), rows.shape[1])
        sizes = is_in_rank.sum(0).tolist(), arriving.tolist()
        dist.all_to_all_single(back, rows, *sizes, group=self.group)
        return rows.new_zeros(len(is_in_rank), rows.shape[1]).index_add(0, token, back)


@contextlib.contextmanager
def importable(buffer: Any = Buffer) -> Iterator[None]:
    """While it lasts, ``import deep_ep`` finds this."""
    module: Any = types.ModuleType("deep_ep")
    module.Buffer = buffer
    with mock.patch.dict(sys.modules, {"deep_ep": module}):
        yield


@contextlib.contextmanager
def installed(dtype: torch.dtype = torch.float64) -> Iterator[type[Buffer]]:
    """The same, and this dtype on CPUs, on nodes of any size, passes for what its
    kernels are for."""
    Buffer.calls = ()
    with (
        importable(),
        mock.patch.multiple(deep_ep, DTYPES=(dtype,), unfit=lambda draft, degree: ""),
    ):
        yield Buffer
