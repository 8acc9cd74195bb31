"""A pre-sharded model is asked what any other model is asked."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks


def looked_up_in(two_dimensional: bool) -> str:
    if two_dimensional:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError) as refused:
        parallelize(model, SmpConfig())
    return str(refused.value)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_embeddings_that_ranks_would_change_apart_are_refused(
    two_dimensional: bool,
) -> None:
    for said in run_ranks(looked_up_in, 2, two_dimensional):
        assert said.startswith("Embedding 0 has max_norm=1.0")
