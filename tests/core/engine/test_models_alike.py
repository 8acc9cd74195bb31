"""Ranks that built a model in other ways: refused on all of them before anything is
sharded, by the first parameter or buffer that differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.topology import Topology
from tests.harness import run_ranks

# What rank 1 does otherwise, and what is said of it.
DIFFERENT = {
    "order": "number 2 ('0.a.weight [2, 4] torch.float32' on rank 0; '0.b.weight [2, 4] torch.float32' on rank 1)",
    "name": "number 4 ('0.b.weight [2, 4] torch.float32' on rank 0; '0.c.weight [2, 4] torch.float32' on rank 1)",
    "shape": "number 2 ('0.a.weight [2, 4] torch.float32' on rank 0; '0.a.weight [3, 4] torch.float32' on rank 1)",
    "dtype": "number 2 ('0.a.weight [2, 4] torch.float32' on rank 0; '0.a.weight [2, 4] torch.bfloat16' on rank 1)",
    "frozen": "'0.a.weight [2, 4] torch.float32, frozen' on rank 1)",
    "more": "number 6 ('0.p [2] torch.float32, buffer' on rank 0; '1.weight [4, 4] torch.float32' on rank 1)",
    "tied": "number 4 ('0.b.weight [2, 4] torch.float32' on rank 0; '0.b.bias [2] torch.float32' on rank 1)",
    "order of buffers": "'0.p [2] torch.float32, buffer' on rank 0; '0.q [2] torch.float32, buffer' on rank 1)",
    "buffer": "('none' on rank 0; '0.r [2] torch.float32, buffer' on rank 1)",
}


def build(case: str) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Module()
    block.base = nn.Linear(4, 4)
    names = {"order": "ba", "name": "ac"}.get(case, "ab")
    for name in names:
        block.add_module(name, nn.Linear(4, 3 if (case, name) == ("shape", "a") else 2))
    for name in {"order of buffers": "qp", "buffer": "pqr"}.get(case, "pq"):
        block.register_buffer(name, torch.full((2,), float(ord(name))))
    if case == "dtype":
        block.a.bfloat16()
    if case == "tied":
        block.b.weight = block.a.weight
    block.requires_grad_(True)
    if case == "frozen":
        block.a.requires_grad_(False)
    model = nn.Sequential(block)
    return model.append(nn.Linear(4, 4)) if case == "more" else model


def refused(cases: list[str], came_sharded: bool) -> list[str]:
    found = []
    for case in cases:
        model = build(case if dist.get_rank() == 1 else "")
        if came_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError) as caught:
            parallelize(
                model, SmpConfig(shard_degree="world"), topology=Topology.discover()
            )
        found.append(str(caught.value))
    return found


def test_models_that_ranks_built_otherwise_are_refused_on_all_of_them() -> None:
    for said in run_ranks(refused, 2, list(DIFFERENT), False):
        for text, words in zip(said, DIFFERENT.values(), strict=True):
            assert (
                words in text and "build the model in the same way on all ranks" in text
            ), text


def test_a_model_that_came_sharded_is_compared_too() -> None:
    """By the shapes of whole parameters, which FSDP2 has not compared."""
    cases = ["order", "name", "frozen", "order of buffers"]
    for said in run_ranks(refused, 2, cases, True):
        for text, case in zip(said, cases, strict=True):
            assert DIFFERENT[case] in text, text


def test_knobs_in_a_dict_are_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"SmpConfig\.from_dict\(knobs\)"):
        parallelize(nn.Linear(2, 2), {"shard_degree": 1})  # type: ignore[arg-type]
