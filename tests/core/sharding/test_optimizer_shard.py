"""Optimizer states over all replicas train like one process; what cannot be stepped in
parts is refused.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another
order."""

from __future__ import annotations

import copy
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import save_checkpoint
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.engine.parallel_model import ParallelModel
from smp_core.torch_facts.modules import model_parameter
from tests.core.comm.metered import per_node, train_one_step, unit_bytes
from tests.core.equivalence import HELD, SAMPLES, STEPS, assert_close, full_weights
from tests.core.models import (
    Trajectory,
    TroubledModel,
    global_batches,
    loss_of,
    train_alone,
)
from tests.core.scenarios import (
    SCENARIOS,
    Gradients,
    allowed,
    alone,
    differences,
    net_on_ranks,
    parallel_model,
    run_window,
)
from tests.core.sharding import prepared_runs
from tests.core.sharding.optimizer_shard_runs import RECIPES, bf16_model, momentum
from tests.harness import run_ranks
from tests.logged import warnings_said

CASES = [
    {
        "shard_degree": degree,
        "collectives": {"hierarchical": hierarchical},
        "micro_batches": micro,
    }
    for degree, hierarchical, micro in itertools.product(
        (1, 2), ("auto", False), (1, 3)
    )
]


CASES += [
    {"shard_degree": degree, "micro_batches": 3, "state_offload": "optimizer"}
    for degree in (1, 2)
]


def adamw(parallel: ParallelModel) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        parallel.module.parameters(), lr=1e-2, weight_decay=0.1
    )
    parallel.prepare_optimizer(optimizer)
    return optimizer


def train(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    steps: range = range(STEPS),
) -> Trajectory:
    seen = Trajectory()
    batches = global_batches(STEPS, micro_batches, SAMPLES)
    for step in steps:
        total = 0.0
        for number, tokens in enumerate(batches[step]):
            mine = tokens.chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
            with parallel.window.accumulate(number < micro_batches - 1):
                loss = loss_of(parallel.module, mine) / micro_batches
                loss.backward()
            total += loss.item()
        norm = parallel.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        seen.losses.append(mean.item() / dist.get_world_size())
        seen.norms.append(norm.item())
    seen.weights = full_weights(parallel.module)
    return seen


def troubled(dtype: torch.dtype = torch.float64, **knobs: Any) -> ParallelModel:
    torch.manual_seed(dist.get_rank())
    return parallel_model(TroubledModel().to(dtype), optimizer_shard="world", **knobs)


def train_cases(cases: list[dict[str, Any]]) -> list[Trajectory]:
    found = []
    for case in cases:
        knobs = {key: value for key, value in case.items() if key != "micro_batches"}
        parallel = troubled(**knobs)
        found.append(train(parallel, adamw(parallel), case["micro_batches"]))
    return found


@pytest.mark.parametrize(
    "cases", [CASES[1::8], pytest.param(CASES, marks=pytest.mark.slow)], ids=len
)
def test_float64_training_equals_one_process(cases: list[dict[str, Any]]) -> None:
    for trajectories in run_ranks(train_cases, 4, cases, ranks_per_node=2, timeout=600):
        for case, seen in zip(cases, trajectories, strict=True):
            expected = train_alone(
                torch.float64, global_batches(STEPS, case["micro_batches"], SAMPLES)
            )
            assert_close(seen, expected, lambda step: 1e-12, 1e-12)


def gradients_of_scenarios(names: list[str], **knobs: Any) -> dict[str, Gradients]:
    """What masters' gradients are, put together over replicas."""
    found = {}
    for name in names:
        parallel = net_on_ranks(SCENARIOS[name], optimizer_shard="world", **knobs)
        parallel.prepare_optimizer(
            torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        )
        run_window(parallel, SCENARIOS[name])
        world, seen = parallel.window.world, {}
        assert world is not None
        for shard in world.shards:
            given = {
                i: m.grad for i, m in enumerate(shard.masters) if m.grad is not None
            }
            for i, whole in shard.put_together(given).items():
                seen[id(shard.parameters[i])] = (
                    whole.full_tensor() if isinstance(whole, DTensor) else whole
                )
        found[name] = {
            n: seen.get(id(p), p.grad) for n, p in parallel.module.named_parameters()
        }
    return found


@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 1, "every": 2},
        *(
            pytest.param(knobs, marks=pytest.mark.slow)
            for knobs in ({"shard_degree": 1}, {"shard_degree": 2})
        ),
        pytest.param({"shard_degree": 2, **HELD}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_conditional_and_repeated_parameters_have_the_gradients_of_one_process(
    knobs: dict[str, Any],
) -> None:
    """Also None where one process has None. Thawing is another test's. ``every``: a
    sample of the scenarios."""
    knobs = dict(knobs)
    every = knobs.pop("every", 1)
    names = [
        name
        for name in allowed(knobs["shard_degree"])
        if "frozen" not in name and "thawed" not in name
    ][::every]
    expected = {name: alone(SCENARIOS[name], 4) for name in names}
    ranks = run_ranks(
        gradients_of_scenarios, 4, names, ranks_per_node=2, timeout=600, **knobs
    )
    for seen in ranks:
        wrong = {
            name: found
            for name in names
            if (found := differences(seen[name], expected[name]))
        }
        assert not wrong


def bytes_per_state(**knobs: Any) -> tuple[int, int]:
    parallel = troubled(**knobs)
    optimizer = adamw(parallel)
    train(parallel, optimizer, 1, range(1))
    held = sum(
        value.numel()
        for entry in optimizer.state.values()
        for value in entry.values()
        if value.ndim
    )
    return held, sum(
        parameter.numel()
        for parameter in parallel.module.parameters()
        if parameter.requires_grad
    )


def test_states_are_divided_by_the_world() -> None:
    """Two tensors per trainable parameter that was reached, a quarter of them on each
    rank."""
    for degree in (1, 2):
        ranks = run_ranks(bytes_per_state, 4, ranks_per_node=2, shard_degree=degree)
        total = sum(held for held, _ in ranks)
        unused = 8 * 5 + 5
        whole = 2 * (ranks[0][1] - unused)
        assert total == whole - 2, (
            "all but those of the 0-d gain, which every rank steps whole"
        )
        assert max(held for held, _ in ranks) <= 0.4 * whole


def test_it_sends_what_the_all_reduce_would() -> None:
    for degree in (1, 2):
        steps = run_ranks(
            train_one_step,
            4,
            1,
            ranks_per_node=2,
            shard_degree=degree,
            optimizer_shard="world",
            prepared=True,
        )
        expected = sum(-(-unit // 16) * 16 for unit in unit_bytes(degree))
        assert per_node(steps, "inter_bytes") == [expected] * 2


def save_and_load(
    path: str, before: dict[str, Any], later: dict[str, Any]
) -> Trajectory:
    torch.manual_seed(0)
    first = parallel_model(TroubledModel().double(), **before)
    optimizer = adamw(first)
    train(first, optimizer, 2, range(2))
    save_checkpoint(
        path,
        {
            "model": first.module.state_dict(),
            "optimizer": named_optimizer_state(first.module, optimizer),
        },
    )
    weights = full_weights(first.module)
    second = parallel_model(TroubledModel().double(), **later)
    again = adamw(second)
    with torch.no_grad():
        for name, value in second.module.state_dict().items():
            whole = weights[name]
            if isinstance(value, DTensor):
                rows, start = (
                    value.to_local().shape[0],
                    value.device_mesh.get_local_rank(),
                )
                step = -(-value.shape[0] // value.device_mesh.size())
                value.to_local().copy_(whole[start * step : start * step + rows])
            else:
                value.copy_(whole)
    load_named_optimizer_state(path, ("optimizer",), second.module, again)
    return train(second, again, 2, range(2, STEPS))


OFFLOADED = {"optimizer_shard": "world", "state_offload": "optimizer"}
MOVES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"shard_degree": 2, "optimizer_shard": "world"},
        {"shard_degree": 1, "optimizer_shard": "world"},
    ),
    ({"shard_degree": 1, "optimizer_shard": "world"}, {"shard_degree": 4}),
    ({"shard_degree": 4}, {"shard_degree": 2, "optimizer_shard": "world"}),
    ({"shard_degree": 2, **OFFLOADED}, {"shard_degree": 4}),
    (
        {"shard_degree": 4, "state_offload": "optimizer"},
        {"shard_degree": 1, **OFFLOADED},
    ),
    ({"shard_degree": 1, "optimizer_shard": "world"}, {"shard_degree": 2, **OFFLOADED}),
    ({"shard_degree": 1, **OFFLOADED}, {"shard_degree": 2, "optimizer_shard": "world"}),
]


@pytest.mark.parametrize(
    ("before", "later"),
    [
        pytest.param(*move, marks=() if move in MOVES[2:5:2] else pytest.mark.slow)
        for move in MOVES
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_degrees_and_without(
    before: dict, later: dict, tmp_path: Path
) -> None:
    expected = train_alone(torch.float64, global_batches(STEPS, 2, SAMPLES))
    for seen in run_ranks(
        save_and_load, 4, str(tmp_path / "saved"), before, later, ranks_per_node=2
    ):
        assert seen.losses == pytest.approx(expected.losses[2:], abs=1e-12)
        for name, value in expected.weights.items():
            assert (seen.weights[name] - value).abs().max() <= 1e-12, name


def referred_to_weakly() -> str:
    parallel = parallel_model(
        bf16_model("mixed"), **RECIPES["mixed"], shard_degree=2, optimizer_shard="world"
    )
    parameter = next(parallel.module.blocks[0].parameters())
    reference = weakref.ref(parameter)
    try:
        parallel.prepare_optimizer(momentum(parallel.module.parameters()))
    except ValueError as error:
        return str(error)
    return f"accepted: {reference}"


def test_a_parameter_that_cannot_be_exchanged_is_named() -> None:
    for said in run_ranks(referred_to_weakly, 4, ranks_per_node=2):
        assert (
            "blocks.0.attention_norm.weight cannot be stored in torch.bfloat16" in said
            and "weakref" in said
        )


def thaw_after_the_optimizer() -> str:
    parallel = troubled(shard_degree=2)
    adamw(parallel)
    for parameter in parallel.module.parameters():
        parameter.requires_grad_(True)
    try:
        loss_of(parallel.module, global_batches(1, 1, 1)[0, 0]).backward()
    except ValueError as error:
        parallel.window.abandon()
        return str(error)
    return "accepted"


def without_an_optimizer() -> str:
    parallel = troubled(shard_degree=2)
    try:
        loss_of(parallel.module, global_batches(1, 1, 1)[0, 0]).backward()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_what_has_no_master_is_named() -> None:
    for said in run_ranks(thaw_after_the_optimizer, 4, ranks_per_node=2):
        assert "blocks.0.down.weight was frozen" in said
    for said in run_ranks(without_an_optimizer, 4, ranks_per_node=2):
        assert "prepare_optimizer" in said


def masters_and_parameters() -> bool:
    parallel = troubled(shard_degree=2)
    optimizer = adamw(parallel)
    stepped = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    return all(
        any(model_parameter(m) is p for p in parallel.module.parameters())
        for m in stepped
    )


def test_parameter_groups_keep_their_order() -> None:
    assert all(run_ranks(masters_and_parameters, 4, ranks_per_node=2))


def looked_up_states() -> list[str]:
    parallel = prepared_runs.sharded({"shard_degree": 1, "optimizer_shard": "world"})
    optimizer = torch.optim.AdamW(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    with warnings_said() as said:
        # Steps, and a state dict, look nothing up by parameters.
        for step in range(2):
            parallel.module(prepared_runs.batch(step, dist.get_rank())).backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert not said
        for _ in range(2):
            assert optimizer.state[parallel.module.head.weight]["exp_avg"].ndim == 1  # type: ignore[union-attr]
    return said


def test_a_state_that_is_looked_up_by_its_parameter_is_said_to_be_a_part() -> None:
    first, second = run_ranks(looked_up_states, 2)
    assert len(first) == 1 and "has this rank's part of each state" in first[0]
    assert second == []


def resumed_by_torch(folder: str, degree: int) -> list[bool]:
    """Whether runs that torch's functions for checkpoints resume, from files and from
    rank 0's whole states, go on as the first one does."""

    def fresh() -> tuple[ParallelModel, torch.optim.Optimizer]:
        model = bf16_model("mixed").double()
        made = parallel_model(model, shard_degree=degree, optimizer_shard="world")
        optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
        made.prepare_optimizer(optimizer)
        return made, optimizer

    def step(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        optimizer.zero_grad()
        parallel.module(torch.randint(101, (2, 9), generator=generator)).backward()
        optimizer.step()

    first, optimizer = fresh()
    step(first, optimizer)
    weights, states = get_state_dict(first.module, optimizer)
    dcp.save({"weights": weights, "states": states}, checkpoint_id=folder)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # A copy, because counters of steps are the optimizer's own.
    of_rank_0 = copy.deepcopy(
        get_optimizer_state_dict(first.module, optimizer, options=whole)
    )
    later = []
    for is_whole in (False, True):
        second, own = fresh()
        weights, states = get_state_dict(second.module, own)
        into = {"weights": weights, "states": states}
        dcp.load(into, checkpoint_id=folder)
        set_model_state_dict(second.module, into["weights"])
        if is_whole:
            set_optimizer_state_dict(second.module, own, of_rank_0, options=whole)
        else:
            set_optimizer_state_dict(second.module, own, into["states"])
        later.append((second, own))
    found = []
    for parallel, own in ((first, optimizer), *later):
        step(parallel, own)
        found.append(full_weights(parallel.module))
    return [
        all(torch.equal(each[name], found[0][name]) for name in found[0])
        for each in found[1:]
    ]


def test_torchs_functions_for_checkpoints_resume_it(tmp_path: Path) -> None:
    for degree in (1, 2):
        folder = str(tmp_path / str(degree))
        for found in run_ranks(resumed_by_torch, 2, folder, degree):
            assert found == [True, True]
