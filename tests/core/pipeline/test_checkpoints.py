"""Checkpoints know nothing of stages: any number of them saves, any other layout loads
the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from smp_core.checkpoint import CheckpointError, consolidate
from smp_core.checkpoint.optimizers import load_named_optimizer_state
from smp_core.checkpoint.reader import load_checkpoint, read_rest
from smp_core.checkpoint.writer import save_checkpoint
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.optim import AdamW8bit
from tests.core.pipeline.cases import Case, everything, example_of
from tests.core.tensor_parallel.model_cases import batches, build, loss_of, optimizer_of
from tests.harness import run_ranks

Layout = dict[str, Any]
"""Of a case; without stages the ranks are a partition group."""


def trained(
    layout: Layout, steps: int, in_8_bits: bool = False
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    kind, stages = "gpt2_deep", layout.get("stages", 1)
    case = Case(kind, micro_batches=2, **layout)
    if stages > 1:
        parallel = case.parallel()
    else:
        model = build(kind, seed=dist.get_rank())
        parallel = parallelize(
            example_of(model), SmpConfig(shard_degree=layout["shard"])
        )
    optimizer = optimizer_of(parallel.module)
    if in_8_bits:
        optimizer = AdamW8bit(parallel.module.parameters(), min_8bit_size=0)
    parallel.prepare_optimizer(optimizer)
    for micro in batches(1, steps):
        own = micro[0].chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
        if stages > 1:
            case.backward(parallel, own)
            parallel.window.close()
        else:
            loss_of(parallel.module, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parallel, optimizer


def save(folder: Path, layout: Layout, in_8_bits: bool = False) -> dict[str, Any]:
    parallel, optimizer = trained(layout, 2, in_8_bits)
    state = {
        "state_dict": parallel.model_state(),
        "optimizer": parallel.optimizer_state(optimizer),
    }
    config = {"config.json": parallel.module.config.to_json_string(use_diff=False)}
    save_checkpoint(folder, state, metadata={"module_prefix": ""}, extra_files=config)
    return everything(parallel, optimizer)


def load(folder: Path, layout: Layout, in_8_bits: bool = False) -> dict[str, Any]:
    parallel, optimizer = trained(layout, 1, in_8_bits)
    state: dict[str, Any] = {"state_dict": parallel.model_state()}
    load_checkpoint(folder, state)
    parallel.take_model_state(state["state_dict"])
    load_named_optimizer_state(folder, ("optimizer",), parallel.module, optimizer)
    parallel.reshard()
    return everything(parallel, optimizer)


def assert_bits(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    expected = saved[0]
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for seen in [*saved, *loaded]:
        assert seen.keys() == expected.keys()
        different = [
            name for name in expected if not torch.equal(seen[name], expected[name])
        ]
        assert not different, different[:5]


def test_stages_load_what_other_numbers_of_them_saved(tmp_path: Path) -> None:
    """Two stages, then a partition group, and interleaved ones; tied embeddings; the
    export is the model."""
    saved = run_ranks(save, 2, tmp_path / "two", {"stages": 2})
    assert_bits(saved, run_ranks(load, 2, tmp_path / "two", {"shard": 2}))
    assert_bits(
        saved,
        run_ranks(
            load, 2, tmp_path / "two", {"stages": 2, "schedule": "interleaved:2"}
        ),
    )
    consolidate(tmp_path / "two", tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float64
    )
    assert all(
        torch.equal(saved[0][name], value) for name, value in model.state_dict().items()
    )


@pytest.mark.slow
def test_moments_of_8_bits_go_through_stages(tmp_path: Path) -> None:
    """Their scales are sharded without being of a parameter's shape."""
    for first, second in (
        ({"stages": 2, "shard": 2}, {"shard": 4}),
        ({"shard": 4}, {"stages": 2, "shard": 2}),
    ):
        folder = tmp_path / f"{len(first)}"
        saved = run_ranks(save, 4, folder, first, in_8_bits=True)
        assert any(name.endswith("exp_avg_scale") for name in saved[0])
        assert_bits(saved, run_ranks(load, 4, folder, second, in_8_bits=True))


LAYOUTS: dict[str, tuple[int, Layout]] = {
    "1": (1, {"shard": 1}),
    "2": (2, {"stages": 2}),
    "4": (4, {"stages": 4}),
    "2x2": (4, {"stages": 2, "shard": 2}),
    "shard 4": (4, {"shard": 4}),
    "2 x tensor 2": (4, {"stages": 2, "knobs": (("tensor_parallel_degree", 2),)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["2", "4", "2x2", "shard 4", "2 x tensor 2"])
def test_every_layout_loads_what_every_other_saved(first: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[first]
    saved = run_ranks(save, ranks, tmp_path, layout)
    for others, other in LAYOUTS.values():
        assert_bits(saved, run_ranks(load, others, tmp_path, other))


class CountingBlock(nn.Module):
    """A block that counts its calls where only its extra state has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.layer(x).tanh() * (1 + self.calls)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": [torch.ones(self.calls)]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert torch.equal(state["seen"][0], torch.ones(self.calls))


def counts_after_loading(folder: Path) -> tuple[list[int], list[int]]:
    """Calls of all blocks where they were saved, and in a model that loads them."""
    model = nn.Sequential(*[CountingBlock() for _ in range(4)])
    model.example_input_array = torch.ones(2, 6)
    recipe = {"microbatches": 2}
    knobs = SmpConfig(pipeline_parallel_degree=2, shard_degree=1, pipeline=recipe)
    again = parallelize(copy.deepcopy(model), knobs)
    parallel = parallelize(model, knobs)
    parts = torch.ones(4, 6).chunk(2)
    calls = [
        lambda part=part: parallel.run_as_forward(
            lambda: parallel.module(part).square().mean()
        )
        for part in parts
    ]
    parallel.pipeline.train(calls, lambda loss: loss, 0.5, torch.ones(4, 6))
    parallel.window.close()
    parallel.broadcast_buffers()
    saved = parallel.module.state_dict()
    save_checkpoint(folder, {"state_dict": parallel.model_state()})
    state = again.model_state()
    for name in [name for name in state if name.endswith("_extra_state")]:
        state[name] = read_rest(folder, ("state_dict", name), tensors="*")
    load_checkpoint(folder, {"state_dict": state})
    again.take_model_state(state)
    loaded = again.module.state_dict()
    names = [f"{number}._extra_state" for number in range(4)]
    return [saved[n]["calls"] for n in names], [loaded[n]["calls"] for n in names]


def test_extra_states_are_those_of_the_stage_that_a_module_works_on(
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(counts_after_loading, 2, tmp_path / "a") == [([2] * 4, [2] * 4)] * 2
    )


class Unsaveable(CountingBlock):
    """A block that has no extra state where it is asked for it."""

    def get_extra_state(self) -> dict[str, Any]:
        raise KeyError("no state")


class Unloadable(CountingBlock):
    """A block that takes no other stage's extra state."""

    def set_extra_state(self, state: dict[str, Any]) -> None:
        raise KeyError("no state")


def refusals_of_extra_states() -> list[str]:
    said = []
    for kinds in ((CountingBlock, Unsaveable), (Unloadable, CountingBlock)):
        blocks = [kind() for kind in kinds for _ in range(2)]
        model = nn.Sequential(*blocks)
        model.example_input_array = torch.ones(2, 6)
        recipe = {"microbatches": 2}
        knobs = SmpConfig(pipeline_parallel_degree=2, shard_degree=1, pipeline=recipe)
        with pytest.raises(CheckpointError) as refused:
            parallelize(model, knobs).broadcast_buffers()
        said.append(str(refused.value))
    return said


def test_an_extra_state_that_fails_on_one_stage_is_an_error_on_all() -> None:
    """Where it is given, and where another stage takes it."""
    by_rank = run_ranks(refusals_of_extra_states, 2)
    assert by_rank[0] == by_rank[1]
    assert all("rank 1" in said and "no state" in said for said in by_rank[0])
