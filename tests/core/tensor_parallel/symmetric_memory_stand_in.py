"""torch's fused products over symmetric memory, on gloo.

Their CUDA implementations cut operands up, lay out what comes back and multiply with
plain torch; only the copies between devices are CUDA's. Here these are collectives, and
the rest is torch's own, so that shapes, strides and dimensions mean what they mean on a
device. Streams, and what happens at the same time, are not played.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Torch defines the operators there.
import torch.distributed._symmetric_memory as symmetric

# As the operators find their group.
from torch.distributed.distributed_c10d import _resolve_process_group

Consumer = Callable[[list[torch.Tensor], int], None]


def _gather_and_consume(
    shards: list[torch.Tensor],
    consumer: Consumer,
    gathered: list[torch.Tensor],
    name: Any,
    *_: bool,
) -> None:
    group: Any = _resolve_process_group(name)
    for shard, all_of_it in zip(shards, gathered, strict=True):
        assert shard.is_contiguous() and all_of_it.is_contiguous()  # as torch requires
        dist.all_gather(list(all_of_it.chunk(group.size())), shard, group)
    for rank in range(group.size()):
        consumer([each.chunk(group.size())[rank] for each in gathered], rank)


def _produce_and_exchange(
    producer: Callable[[int, torch.Tensor], None],
    output: torch.Tensor,
    name: Any,
    out_chunk_dim: int = 0,
) -> None:
    group: Any = _resolve_process_group(name)
    assert out_chunk_dim == 0
    made = torch.empty_like(output)
    for rank, chunk in enumerate(made.chunk(group.size())):
        producer(rank, chunk)
    dist.all_to_all_single(output, made, group=group)


def _gather_products(
    part: torch.Tensor,
    factors: list[torch.Tensor],
    dim: int,
    group: Any,
    *,
    return_A: bool = True,
) -> Any:
    # Operands of other dtypes are an error in the products themselves, dimensions in
    # the function that is called.
    with mock.patch.object(
        symmetric, "_pipelined_multi_all_gather_and_consume", _gather_and_consume
    ):
        return symmetric._fused_all_gather_matmul_impl(
            torch.ops.aten.mm.out,
            part,
            factors,
            None,
            [{}] * len(factors),
            [None] * len(factors),
            dim,
            group,
            return_A,
        )


def _product_scatter(
    tensor: torch.Tensor, factor: torch.Tensor, reduce: str, dim: int, group: Any
) -> torch.Tensor:
    with mock.patch.object(
        symmetric, "_pipelined_produce_and_all2all", _produce_and_exchange
    ):
        return symmetric._fused_matmul_reduce_scatter_impl(
            torch.ops.aten.mm.out, tensor, factor, {}, tensor.dtype, reduce, dim, group
        )


@contextlib.contextmanager
def symmetric_memory_on_cpu() -> Iterator[None]:
    """Let the operators take tensors of a CPU, and knobs ask for them there."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _gather_products, "CPU")
    library.impl("fused_matmul_reduce_scatter", _product_scatter, "CPU")
    try:
        with mock.patch(
            "smp_core.tensor_parallel.rules._missing_for_overlap", return_value=None
        ):
            yield
    finally:
        library._destroy()  # there is no public way
