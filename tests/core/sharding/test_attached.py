"""Adapters that are attached after a model was sharded, or to one that came sharded,
are one adapter on all ranks, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.optim import Adafactor
from smp_core.sharding.gradients import RanksDiverged
from smp_core.topology import Topology
from tests.core.sharding.attached_nets import WIDTH, attach, net
from tests.core.sharding.frozen_runs import with_decoded_base
from tests.harness import run_ranks

WORLD = 4
# Sums of float64 gradients in another order.
EXACT = 1e-12


def own_part(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to_local() if isinstance(value, DTensor) else value.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
            (model(x) / len(ranks)).backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )


def alone(coded: str | None) -> dict[str, torch.Tensor]:
    model = net() if coded is None else with_decoded_base(net(), coded)
    attach(model, 0)
    train(model, adamw(model), list(range(WORLD)))
    return dict(model.named_parameters())


def attached(order: str, knobs: dict[str, Any]) -> float:
    """The largest difference of a parameter from one process's."""
    rank, model = dist.get_rank(), net()
    asked = SmpConfig(units=["Block"], **knobs)
    if order == "came sharded":
        asked, mesh = (
            SmpConfig(**knobs),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "shard")),
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    if order in ("before", "came sharded"):
        attach(model, rank)
    parallel = parallelize(model, asked, topology=Topology.discover())
    if order == "after":
        attach(model, rank, swapped=rank % 2 == 1)
    # Frozen parameters have no gradients, and are not stepped.
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2)
        if order == "in a group"
        else adamw(model)
    )
    parallel.prepare_optimizer(optimizer)
    if order == "in a group":
        attach(model, rank)
        optimizer.add_param_group(
            {"params": [each for each in model.parameters() if each.requires_grad]}
        )
    train(model, optimizer, [rank])
    expected = alone(knobs.get("frozen_storage"))
    pairs = [(value, expected[name]) for name, value in model.named_parameters()]
    return max(
        ((value.full_tensor() if isinstance(value, DTensor) else value) - other)
        .abs()
        .max()
        .item()
        for value, other in pairs
    )


@pytest.mark.parametrize(
    ("order", "knobs"),
    [
        ("before", {"shard_degree": 2}),
        pytest.param("after", {"shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param("after", {"shard_degree": 1}, marks=pytest.mark.slow),
        ("after", {"shard_degree": 4, "frozen_storage": "int8"}),
        pytest.param(
            "after",
            {"shard_degree": 2, "keep_between_micro_batches": "gradients"},
            marks=pytest.mark.slow,
        ),
        ("in a group", {"shard_degree": 2}),
        ("came sharded", {}),
    ],
    ids=str,
)
def test_adapters_train_like_one_process_whenever_they_are_attached(
    order: str, knobs: dict[str, Any]
) -> None:
    for seen in run_ranks(attached, WORLD, order, knobs, ranks_per_node=2):
        assert seen <= EXACT


def listed_otherwise() -> float:
    """Adafactor adds up numbers of all parameters in one message, in the order in which
    they are listed."""
    rank, model = dist.get_rank(), net()
    attach(model, rank)
    parallel = parallelize(
        model, SmpConfig(units=["Block"], shard_degree=4), topology=Topology.discover()
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = Adafactor(trained[::-1] if rank % 2 else trained)
    parallel.prepare_optimizer(optimizer)
    train(model, optimizer, [rank])
    expected = net()
    attach(expected, 0)
    theirs = torch.optim.Adafactor(
        [each for each in expected.parameters() if each.requires_grad]
    )
    train(expected, theirs, list(range(WORLD)))
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(
        (value.full_tensor() - other).abs().max().item() for value, other in pairs
    )


def test_an_optimizer_that_lists_parameters_in_another_order_on_some_ranks_is_exact() -> (
    None
):
    assert max(run_ranks(listed_otherwise, WORLD, ranks_per_node=2)) <= EXACT


def others_on_a_rank(case: str) -> str:
    """Return what is said on this rank, of four, of which one does something else."""
    rank = dist.get_rank()
    model = net()
    attach(model, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    parallel = parallelize(
        model, SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover()
    )
    optimizer = adamw(model)
    parallel.prepare_optimizer(optimizer)
    train(model, optimizer, [rank])
    if "nothing else" in case:
        model.requires_grad_(False)
    before = {name: own_part(value).clone() for name, value in model.named_parameters()}
    late = (
        [f"late{rank}"]
        if case == "of other names"
        else ["late"] * (rank == 2 or "on one" not in case)
    )
    for name in late:
        attach(model, 0, 2 + (rank == 2 and case == "of another shape"), names=[name])
    attached = [value for name, value in model.named_parameters() if "late" in name]
    try:
        if case.endswith("in a group there"):
            optimizer.param_groups[0]["params"] += attached
        elif case == "attached on one rank, in a new group":
            optimizer.add_param_group({"params": attached})
        elif case == "of one rank's optimizer":
            parallel.prepare_optimizer(torch.optim.AdamW(attached[: 2 + (rank == 2)]))
        elif case == "in another group at one rank":
            groups = [{"params": attached[:1]}, {"params": attached[1:]}]
            parallel.prepare_optimizer(
                torch.optim.AdamW(groups[:: -1 if rank == 2 else 1])
            )
        elif case in ("of another shape", "of other names"):
            parallel.prepare_optimizer(torch.optim.AdamW(attached))
        train(model, optimizer, [rank])
    except (ValueError, RanksDiverged) as error:
        assert all(
            torch.equal(own_part(model.get_parameter(name)), value)
            for name, value in before.items()
        )
        return str(error)
    return ""


ELSEWHERE = {
    "attached on one rank, in no optimizer": "only on rank 2 'blocks.0.late.0.bias' was attached",
    "attached on one rank, in a group there": "only on rank 2 'blocks.0.late.0.bias' was attached",
    "attached on all, where nothing else is trained, in a group there": "blocks.0.late.0.bias was attached to",
    "attached on one rank, in a new group": "ranks 0 and 2 attached different parameters to the model: blocks.0.late.0",
    "attached on all, in no optimizer": "blocks.0.late.0.bias was attached to the model after it was sharded, and is",
    "of one rank's optimizer": "(AdamW) steps blocks.0.late.1.weight in group 0 on rank 2 and not on rank 0",
    "in another group at one rank": "(AdamW) steps blocks.0.late.0.bias in group 0 on rank 2 and not on rank 0",
    "of another shape": "ranks 0 and 2 attached different parameters to the model: blocks.0.late.0.bias",
    "of other names": "ranks 0 and 1 attached different parameters to the model: blocks.0.late0.0.bias",
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_one_rank_does_otherwise_is_refused_on_all_ranks(case: str) -> None:
    for seen in run_ranks(others_on_a_rank, WORLD, case, ranks_per_node=2):
        assert ELSEWHERE[case] in seen and "on all ranks" in seen


def saved_and_loaded(folder: Any) -> list[bool]:
    """From one attached after to one attached before, which is sharded."""
    found = []
    late = parallelize(
        net(), SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover()
    )
    attach(late.module, 0)
    late.prepare_optimizer(adamw(late.module))
    save_checkpoint(folder, {"model": late.model_state()})
    model = net()
    attach(model, 1)
    early = parallelize(
        model, SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover()
    )
    load_checkpoint(folder, {"model": early.model_state()})
    for name, value in early.module.named_parameters():
        assert isinstance(value, DTensor)
        other = late.module.get_parameter(name)
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        found.append(torch.equal(value.full_tensor(), whole))
    return found


def test_checkpoints_hold_what_was_attached(tmp_path: Any) -> None:
    for seen in run_ranks(saved_and_loaded, 2, tmp_path):
        assert all(seen) and len(seen) == 20
