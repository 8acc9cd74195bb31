"""What happens to a model that nobody holds any more: it goes, with its gradients, mesh
and process groups."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from smp_core.config import SmpConfig
from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.entry import parallelize
from tests.core.scenarios import Net, samples
from tests.harness import run_ranks


def still_there(references: dict[str, weakref.ref[object]]) -> list[str]:
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 2)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def train_and_drop(degree: int) -> list[str]:
    parallel = parallelize(
        Net().double(), SmpConfig(shard_degree=degree, units=("Cell",))
    )
    mesh = parallel.mesh
    optimizer = torch.optim.AdamW(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    for micro in range(2):
        parallel.module(samples(micro, mesh.rank), "0lr 1l").square().mean().backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    held = {
        "mesh": mesh,
        "window": parallel.window,
        "module": parallel.module,
        "meter": parallel.meter,
    }
    references = {name: weakref.ref(value) for name, value in held.items()}
    references |= {
        name: weakref.ref(parameter)
        for name, parameter in parallel.module.named_parameters()
    }
    del mesh, parallel, optimizer, held
    return still_there(references)


def split_train_and_drop() -> list[str]:
    """Two runs, the second after the first: numbers of groups are not used again."""
    left: list[str] = []
    for _ in range(2):
        parallel = parallelize(
            Attention().double(), SmpConfig(shard_degree=2, context_parallel_degree=2)
        )
        mesh = parallel.mesh
        assert parallel.context is not None
        split = parallel.context.split(
            torch.ones(1, 8, 4, dtype=torch.float64).split(1)
        )
        with enabled(split):
            parallel.module(split.batch[0]).square().mean().backward()
        held: dict[str, object] = {
            "mesh": mesh,
            "module": parallel.module,
            "meter": parallel.meter,
        }
        held["context"] = parallel.context
        # Which hold the process group; torch itself does until it is destroyed.
        held["ranks"] = parallel.context.group
        references = {name: weakref.ref(value) for name, value in held.items()}
        plan = split.encoded
        del mesh, parallel, held, split
        left += still_there(references)
        with pytest.raises(ValueError, match="a model that is gone"):
            attention(*(torch.ones(1, 4, 2, 2) for _ in range(3)), plan)
    return left


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_dropped_model_is_freed_with_its_mesh(degree: int) -> None:
    for left in run_ranks(train_and_drop, 2, degree):
        assert left == []


def test_a_run_with_context_parallelism_is_freed() -> None:
    for left in run_ranks(split_train_and_drop, 2):
        assert left == []
