"""What happens to a model that nobody holds any more: it goes, with its gradients, mesh and process groups."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.mesh import SmpMesh
from smp_core.parallelize import parallelize_model
from smp_core.topology import Topology
from tests.core.scenarios import Net, samples
from tests.harness import run_ranks


def still_there(references: dict[str, weakref.ref[object]]) -> list[str]:
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def train_and_drop(degree: int) -> list[str]:
    mesh, config = SmpMesh.build(SmpConfig(shard_degree=degree, wrap=("Cell",)), Topology.discover(), "cpu")
    parallel = parallelize_model(Net().double(), mesh, config)
    optimizer = torch.optim.AdamW(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    for micro in range(2):
        parallel.module(samples(micro, mesh.rank), "0lr 1l").square().mean().backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    held = {"mesh": mesh, "window": parallel.window, "module": parallel.module, "meter": parallel.meter}
    references = {name: weakref.ref(value) for name, value in held.items()}
    references |= {name: weakref.ref(parameter) for name, parameter in parallel.module.named_parameters()}
    del mesh, parallel, optimizer, held
    return still_there(references)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_dropped_model_is_freed_with_its_mesh(degree: int) -> None:
    for left in run_ranks(train_and_drop, 2, degree):
        assert left == []
