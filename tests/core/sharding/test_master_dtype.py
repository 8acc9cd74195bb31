"""`master_dtype`: float32 weights of half precision models at every layout; and what is
said where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan.plan import Plan
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.topology import Topology
from tests.core.scenarios import parallel_model
from tests.core.sharding.optimizer_shard_runs import (
    BF16_STEPS,
    HalfPrecisionRun,
    assert_near,
    bf16_model,
    bf16_tokens,
    half_precision_run,
    momentum,
    one_process_with_masters,
)
from tests.core.sharding.prepared_runs import whole
from tests.harness import run_ranks

MASTERS: list[dict[str, Any]] = [
    {"shard_degree": 4, "master_dtype": "float32"},
    {"shard_degree": 1, "master_dtype": "float32"},
    {"shard_degree": 4, "optimizer_shard": "world"},  # one replica
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 2, "master_dtype": "float32", "state_offload": "all"},
    {"shard_degree": 4, "state_offload": "optimizer"},
    {"shard_degree": 2, "optimizer_shard": "world", "state_offload": "optimizer"},
]


def planned(model: nn.Module, world: int = 4, **knobs: Any) -> Plan:
    config = SmpConfig(**{"shard_degree": 2, **knobs})
    return decide(
        Shapes.of(model, config),
        config,
        Cluster(Topology.uniform(world_size=world, ranks_per_node=2)),
    )


def test_half_precision_weights_without_masters_are_said_once() -> None:
    (said,) = planned(bf16_model("bfloat16 model")).warnings
    assert "master_dtype='float32'" in said and "1/256" in said and "bf16-mixed" in said
    frozen = bf16_model("bfloat16 model").requires_grad_(False)
    frozen.adapter = nn.Linear(2, 2)
    for plan in (
        planned(bf16_model("mixed")),
        planned(frozen),
        planned(bf16_model("bfloat16 model"), master_dtype=None),
        *(planned(bf16_model("bfloat16 model"), **knobs) for knobs in MASTERS),
    ):
        assert plan.warnings == ()


@pytest.mark.parametrize(
    "knobs", [{"optimizer_shard": "world"}, {"state_offload": "optimizer"}], ids=str
)
def test_knobs_that_make_masters_refuse_to_have_none(knobs: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"master_dtype=None: .* leave master_dtype out"
    ):
        SmpConfig(master_dtype=None, **knobs)


def test_one_replica_has_the_masters_of_many() -> None:
    plan = planned(bf16_model("bfloat16 model"), world=2, optimizer_shard="world")
    assert (
        plan.knobs.optimizer_shard == "shard" and plan.knobs.master_dtype == "float32"
    )


def runs_of(cases: Sequence[dict[str, Any]]) -> list[HalfPrecisionRun]:
    return [
        half_precision_run("bfloat16 model", knobs, (0, BF16_STEPS)) for knobs in cases
    ]


@pytest.mark.parametrize(
    "masters",
    [MASTERS[1::2], pytest.param(MASTERS[::2], marks=pytest.mark.slow)],
    ids=len,
)
def test_a_half_precision_model_trains_as_in_one_process_with_float32_masters(
    masters: list[dict[str, Any]],
) -> None:
    expected = one_process_with_masters("bfloat16 model")
    for runs in run_ranks(runs_of, 4, masters, ranks_per_node=2):
        for run in runs:
            assert_near(run.weights, expected)


def moved_on(
    folder: str, moves: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> list[HalfPrecisionRun]:
    runs = []
    for number, (before, later) in enumerate(moves):
        saved = f"{folder}/{number}"
        half_precision_run("bfloat16 model", before, (0, 2), save=saved)
        runs.append(
            half_precision_run("bfloat16 model", later, (2, BF16_STEPS), load=saved)
        )
    return runs


# Numbers of MASTERS: stored as the weights; of replicas; over the world; on the host;
# both.
MOVES = [(3, 5)]
MORE_MOVES = [(0, 3), (5, 0), (1, 6), (6, 1)]


@pytest.mark.parametrize(
    "numbers",
    [MOVES, pytest.param(MORE_MOVES, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_checkpoints_with_masters_move_between_layouts(
    numbers: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Stored as the weights, of each rank's part, or on the host: what is saved is
    float32, and resumed as such."""
    moves = [(MASTERS[before], MASTERS[after]) for before, after in numbers]
    expected = one_process_with_masters("bfloat16 model")
    for runs in run_ranks(moved_on, 4, str(tmp_path), moves, ranks_per_node=2):
        for run in runs:
            assert_near(run.weights, expected)


def thawed(later: bool, knobs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Four steps; a layer is trainable from the third on, in a unit with others and in
    one of its own."""
    model = bf16_model("bfloat16 model")
    parallel = parallel_model(model, master_dtype="float32", **knobs)
    layers = (
        [model.blocks[0].up, model.blocks[1]]
        if hasattr(model, "blocks")
        else list(model.children())[:1]
    )
    for layer in layers:
        layer.requires_grad_(False)
    kept = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = momentum(model.parameters() if later else kept)
    parallel.prepare_optimizer(optimizer)
    for step in range(BF16_STEPS):
        if step == 2:
            for layer in layers:
                layer.requires_grad_(True)
            if not later:
                optimizer.add_param_group(
                    {"params": [p for layer in layers for p in layer.parameters()]}
                )
        parallel.module(bf16_tokens(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return {name: whole(value) for name, value in parallel.model_state().items()}


def thawed_runs(cases: Sequence[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    return [thawed(later, knobs) for knobs in cases for later in (False, True)]


def test_weights_that_are_trained_later_are_stored_in_float32_then() -> None:
    cases = [{"shard_degree": 1}, {"shard_degree": 4}]
    for first, *others in run_ranks(thawed_runs, 4, cases, ranks_per_node=2):
        for other in others:
            for name, value in first.items():
                assert (other[name] - value).abs().max() <= 2e-6, name


def loaded_without_states(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights alone, into a model whose masters are on the host."""
    parallel = parallel_model(bf16_model("bfloat16 model"), **MASTERS[0])
    optimizer = momentum(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    parallel.module(bf16_tokens(0, 0, dist.get_rank())).backward()
    optimizer.step()
    save_checkpoint(folder, {"model": parallel.model_state()})
    again = parallel_model(bf16_model("bfloat16 model"), **MASTERS[5])
    state = again.model_state()
    load_checkpoint(folder, {"model": state})
    again.take_model_state(state)
    of = next(iter(state))
    return whole(parallel.model_state()[of]), whole(again.model_state()[of])


def test_weights_loaded_alone_are_the_masters(tmp_path: Path) -> None:
    for saved, loaded in run_ranks(
        loaded_without_states, 4, str(tmp_path / "saved"), ranks_per_node=2
    ):
        assert loaded.dtype == torch.float32 and torch.equal(saved, loaded)
        assert not torch.equal(saved, saved.bfloat16().float())
