"""Models in whatever way people write them train like one process, to 1e-10 in float64
(a few steps of AdamW on small gradients lose two digits), or are refused by an error
that says what to type."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.equivalence import full_weights
from tests.core.fuzz.members import WIDTH
from tests.core.fuzz.structures import block, build, draw
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks

STEPS = 3
TOLERANCE = 1e-10
# What a model, or a knob beside it, may be refused for, by words of the error.
REFUSALS = (
    "was replaced after the model was sharded",  # functional_call on a unit
    "call the module, or leave it out of the units",
    "write forward_methods=",
    "optimizer_shard='world' steps parts",
    "steps by torch's fused kernels",
    "is called more than once before the backward pass, and gives tensors inside of",
    "changes its input in place, in ReLU; write inplace=False there",
)
Result = tuple[list[float], list[float], dict[str, torch.Tensor], torch.Tensor]


def inputs(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(2, 6, WIDTH, generator=generator, dtype=torch.float64)


def optimizer_of(case: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case["optimizer"] == "SGD":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    is_fused = case["optimizer"] == "fused" and not any(
        parameter.is_complex() for parameter in trained
    )
    return torch.optim.AdamW(trained, lr=0.01, fused=is_fused or None)


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(inputs(99, 0, 0)).clone()


def alone(case: dict[str, Any], world_size: int) -> Result:
    """One process, each micro-batch with the samples of all ranks: buffers see as many
    calls as on each rank."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for number in range(case["micro_batches"]):
            batch = torch.cat(
                [inputs(step, number, rank) for rank in range(world_size)]
            )
            loss = model(batch).square().mean() / case["micro_batches"]
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    weights = {
        name: value.detach().clone() for name, value in model.state_dict().items()
    }
    return losses, norms, weights, evaluated(model)


def sharded(case: dict[str, Any]) -> Result:
    parallel = parallel_model(build(case), **case["knobs"])
    model = parallel.module
    optimizer = optimizer_of(case, model)
    parallel.prepare_optimizer(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number in range(case["micro_batches"]):
            with parallel.window.accumulate(number < case["micro_batches"] - 1):
                batch = inputs(step, number, parallel.mesh.data_rank)
                loss = model(batch).square().mean() / case["micro_batches"]
                loss.backward()
            total += loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(float(parallel.clip_grad_norm_(1.0)))
        optimizer.step()
    return losses, norms, dict(full_weights(model)), evaluated(model)


def on_ranks(cases: list[dict[str, Any]]) -> list[Result | str]:
    warnings.filterwarnings("ignore")
    found: list[Result | str] = []
    for case in cases:
        try:
            found.append(sharded(case))
        except Exception as error:  # the same on all ranks
            found.append("".join(traceback.format_exception(error)))
    return found


def close(one: Any, other: Any) -> bool:
    return torch.allclose(
        torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=TOLERANCE
    )


def problem(found: Result | str, expected: Result) -> str | None:
    """What is wrong with a case; "refused" if it was, in words."""
    if isinstance(found, str):
        return "refused" if any(words in found for words in REFUSALS) else found
    for what, one, other in zip(("losses", "norms"), found, expected, strict=False):
        if not close(one, other):
            return f"{what}: {one}, in one process {other}"
    if found[2].keys() != expected[2].keys():
        return f"names: {sorted(found[2].keys() ^ expected[2].keys())}"
    for name, value in expected[2].items():
        if not close(found[2][name], value):
            return f"{name}: off by {(found[2][name] - value).abs().max()}"
    return None if close(found[3], expected[3]) else "evaluation gives other values"


def problems(
    cases: list[dict[str, Any]], world_size: int, ranks_per_node: int | None = None
) -> list[str | None]:
    expected = [alone(case, world_size) for case in cases]
    of_ranks = run_ranks(on_ranks, world_size, cases, ranks_per_node=ranks_per_node)
    return [
        next(filter(None, (problem(each, one) for each in found)), None)
        for *found, one in zip(*of_ranks, expected, strict=True)
    ]


def case(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    knobs = {
        "shard_degree": 2,
        "units": {"modules": ["Block0", "Block1"]},
        **more.pop("knobs", {}),
    }
    usual = {"seed": 3, "list": "list", "micro_batches": 1, "optimizer": "AdamW"}
    return {**usual, "blocks": [*blocks, block("linear")], "knobs": knobs, **more}


RECOMPUTED = {"activations": "full"}
REPLICAS = {"shard_degree": 1}
# What was wrong once.
CASES = {
    "complex parameters": case(block("complex"), knobs=REPLICAS),
    "complex parameters, partitioned": case(block("complex")),
    "complex parameters over the world": case(
        block("complex"), knobs=REPLICAS | {"optimizer_shard": "world"}
    ),
    "complex parameters in host memory": case(
        block("complex"), knobs={"state_offload": "all"}
    ),
    "complex parameters stepped on the host": case(
        block("complex"), knobs={"state_offload": "optimizer"}
    ),
    "complex parameters stepped on the host over the world": case(
        block("complex"),
        knobs=REPLICAS | {"optimizer_shard": "world", "state_offload": "optimizer"},
    ),
    "a reentrant checkpoint": case(block("linear", call="reentrant")),
    "a reentrant checkpoint on replicas": case(
        block("linear", call="reentrant"), knobs=REPLICAS
    ),
    "a reentrant checkpoint of a shared unit": case(
        block("linear", call="reentrant"), list="shared", micro_batches=2
    ),
    "an object": case(block("linear", output="object")),
    "a function": case(block("linear", output="closure")),
    "a distribution": case(
        block("distribution"), knobs={"units": {"min_parameters": 1}}
    ),
    "written buffers, recomputed": case(
        block("buffers"), knobs=RECOMPUTED, micro_batches=2
    ),
    "replaced buffers, recomputed": case(block("reassigned buffer"), knobs=RECOMPUTED),
    "a forward of the instance, recomputed": case(
        block("linear", style="instance"), knobs=RECOMPUTED
    ),
    "forces twice": case(
        block("inner gradient", call="map"), knobs={"units": {"min_parameters": 60}}
    ),
}


def test_what_was_wrong_once_is_as_in_one_process() -> None:
    found = dict(zip(CASES, problems(list(CASES.values()), 2), strict=True))
    assert not {name: each for name, each in found.items() if each}, found


def test_a_drawn_model_is_as_in_one_process_or_refused() -> None:
    cases = [draw(seed) for seed in range(6)]
    found = problems(cases, 2)
    wrong = [
        f"{one}\n{each}"
        for one, each in zip(found, cases, strict=True)
        if one not in (None, "refused")
    ]
    assert not wrong, "\n\n".join(wrong)
    assert found.count(None) >= 4


def test_a_unit_that_changes_its_input_in_place_is_named() -> None:
    model = case(block("relu in place"), knobs={"units": {"modules": ["Sequential"]}})
    for (said,) in run_ranks(on_ranks, 2, [model]):
        assert isinstance(said, str)
        assert "changes its input in place, in ReLU; write inplace=False there" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(6, 606, 60))
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (2, 1), (4, 2)])
def test_many_drawn_models_are_as_in_one_process_or_refused(
    first: int, ranks: int, per_node: int
) -> None:
    cases = [draw(seed) for seed in range(first, first + 60)]
    found = problems(cases, ranks, per_node)
    wrong = [
        f"{one}\n{each}"
        for one, each in zip(found, cases, strict=True)
        if one not in (None, "refused")
    ]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"param_dtype": "bfloat16"}, "write param_dtype=None"),
        ({"reduce_dtype": "bfloat16"}, "write reduce_dtype=None"),
        ({"compression": {"reduce": "int8"}}, "write compression=None"),
    ],
)
def test_casts_of_complex_parameters_are_refused(
    knobs: dict[str, Any], message: str
) -> None:
    for (said,) in run_ranks(on_ranks, 2, [case(block("complex"), knobs=knobs)]):
        assert isinstance(said, str) and message in said and "complex" in said
