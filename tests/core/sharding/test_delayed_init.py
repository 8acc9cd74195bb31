"""Delayed initialisation: the same numbers on every number of ranks, from every
initialiser a model may have."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor

from smp_core.sharding.weights.delayed_init import materialize
from tests.core.sharding.delayed_init_runs import (
    CPU,
    UNITS,
    Everything,
    Halved,
    digest,
    full_state,
    gpt2,
    materialized,
    on_meta,
    shard,
    tiny,
)
from tests.harness import run_ranks

MODELS: dict[str, Callable[[], nn.Module]] = {"everything": Everything, "gpt2": gpt2}


def sharded_digests(degree: int, units: tuple[str, ...]) -> list[str]:
    digests = []
    for make in MODELS.values():
        torch.manual_seed(dist.get_rank())  # must not matter
        model = on_meta(make)
        shard(model, degree, units)
        materialize(model, CPU, seed=5)
        assert not any(
            tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
        )
        digests.append(digest(model))
    return digests


@pytest.fixture(scope="module")
def plain_digests() -> list[str]:
    return [digest(materialized(make, seed=5)) for make in MODELS.values()]


@pytest.mark.parametrize(
    ("world", "degree"),
    [
        (1, 1),
        (4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2), (3, 3), (4, 1), (4, 4))
        ),
    ],
)
def test_same_numbers_at_every_world_size_and_shard_degree(
    world: int, degree: int, plain_digests: list[str]
) -> None:
    assert run_ranks(sharded_digests, world, degree, UNITS) == [plain_digests] * world


@pytest.mark.parametrize(
    "units",
    [pytest.param((), marks=pytest.mark.slow), ("BatchNorm1d", "Halved", "LayerNorm")],
)
def test_same_numbers_whatever_the_units_are(
    units: tuple[str, ...], plain_digests: list[str]
) -> None:
    assert run_ranks(sharded_digests, 2, 2, units) == [plain_digests] * 2


def test_other_seed_gives_other_numbers() -> None:
    assert digest(materialized(gpt2, seed=1)) != digest(materialized(gpt2, seed=2))


def test_equal_modules_under_other_names_get_other_numbers() -> None:
    model = materialized(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert not torch.equal(model[0].weight, model[1].weight)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on a batch that is the same on every rank, so that gradients are those
    of one process."""
    model.eval()  # no dropout
    out = model(torch.arange(6).view(2, 3))
    loss = (out if isinstance(out, torch.Tensor) else out.logits).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def sharded_step(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = on_meta(MODELS[name]).double()
    shard(model, dist.get_world_size(), UNITS)
    objects = list(model.parameters())
    # Made before: its references must survive.
    optimizer = torch.optim.SGD(objects, lr=0.1)
    materialize(model, CPU, seed=5)
    storages = [p.to_local().data_ptr() for p in objects if isinstance(p, DTensor)]
    loss = step(model, optimizer)
    assert all(p is q for p, q in zip(objects, model.parameters(), strict=True))
    assert storages == [
        p.to_local().data_ptr() for p in objects if isinstance(p, DTensor)
    ]
    return loss, full_state(model)


@pytest.mark.parametrize("name", MODELS)
def test_sharded_model_trains_after_materialisation(name: str) -> None:
    """Losses and weights after a step equal one process's. float64, 1e-12: nothing but
    the order of sums differs."""
    model = materialized(lambda: MODELS[name]().double(), seed=5)
    loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = full_state(model)
    for world in (1, 2, 4):
        for rank_loss, state in run_ranks(sharded_step, world, name):
            assert rank_loss == pytest.approx(loss, rel=1e-12)
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(
                    state[key],
                    tensor,
                    rtol=0,
                    atol=1e-12,
                    msg=lambda m, k=key: f"{k}: {m}",
                )


@pytest.mark.parametrize(
    "family", ["gpt2", "llama3-rope", "mixtral", "vit", "swin", "t5"]
)
def test_same_distributions_and_buffers_as_from_config(family: str) -> None:
    """Mean and standard deviation of every parameter against a plain construction,
    buffers bit for bit.

    Two samples of n draws of standard deviation s: one sigma of the difference of their
    means is s sqrt(2/n), of their standard deviations at most s/sqrt(n) (less for
    uniform and truncated). 5 sigma are allowed. Constants are equal.
    """
    torch.manual_seed(0)
    plain, delayed = tiny(family)(), materialized(tiny(family), seed=1)
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in delayed.named_parameters()]
    for name, expected, got in zip(
        names, plain.parameters(), delayed.parameters(), strict=True
    ):
        expected, got, n = (
            expected.detach().double(),
            got.detach().double(),
            expected.numel(),
        )
        spread = expected.std(correction=0).item()
        if spread == 0:
            assert torch.equal(expected, got), name
            continue
        assert abs(expected.mean() - got.mean()) < 5 * spread * math.sqrt(2 / n), name
        assert abs(spread - got.std(correction=0)) < 5 * spread / math.sqrt(n), name
    buffers, delayed_buffers = (
        dict(plain.named_buffers()),
        dict(delayed.named_buffers()),
    )
    assert buffers.keys() == delayed_buffers.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == delayed_buffers[name].dtype and torch.equal(
            buffer, delayed_buffers[name]
        ), name


def test_residual_projection_scale_would_be_noticed() -> None:
    """GPT-2's c_proj is drawn with initializer_range / sqrt(2 n_layer) = 0.01 by its
    parent, c_fc with 0.02."""
    block = materialized(tiny("gpt2")).transformer.h[0]
    for projection, std in [
        (block.attn.c_proj, 0.01),
        (block.mlp.c_proj, 0.01),
        (block.mlp.c_fc, 0.02),
    ]:
        n = projection.weight.numel()  # 5 sigma of a normal sample's standard deviation
        assert projection.weight.std().item() == pytest.approx(
            std, abs=5 * std / math.sqrt(2 * n)
        )


def test_parent_that_scales_its_child_sees_the_childs_values() -> None:
    halved = materialized(lambda: nn.ModuleDict({"inner": Halved()}))["inner"]
    alone = materialized(
        lambda: nn.ModuleDict({"inner": nn.ModuleDict({"inner": nn.Linear(6, 6)})})
    )["inner"]
    assert torch.equal(halved.inner.weight, 0.5 * alone["inner"].weight)


def test_tied_weights_stay_one_tensor_with_the_first_modules_values() -> None:
    model = materialized(Everything)
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight[0].any(), (
        "Embedding zeroes its padding row, Linear does not"
    )


def test_flags_attributes_and_buffer_kinds_survive() -> None:
    model = on_meta(Everything)
    model.embed.weight.no_weight_decay = True  # type: ignore[attr-defined]
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    materialize(model, CPU, seed=0)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert not all(flags.values())
    assert model.head.weight.no_weight_decay is True
    assert "scale.mask" not in model.state_dict()
    assert torch.equal(model.scale.mask, torch.ones(4, 4).tril().bool())
    assert (
        torch.equal(model.norm.running_var, torch.ones(6))
        and model.norm.num_batches_tracked.item() == 0
    )


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    materialized(gpt2)
    assert torch.equal(torch.rand(3), expected)


def test_activation_checkpointing_does_not_change_the_numbers() -> None:
    def wrapped() -> nn.Module:
        model = gpt2()
        model.transformer.h[0].mlp = checkpoint_wrapper(model.transformer.h[0].mlp)
        return model

    for expected, got in zip(
        materialized(gpt2).parameters(), materialized(wrapped).parameters(), strict=True
    ):
        assert torch.equal(expected, got)
