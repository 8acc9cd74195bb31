"""What is saved comes back exactly, on any number of ranks and any shard degree."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.checkpoint import (
    CheckpointError,
    full_state_dict,
    load_checkpoint,
    read_index,
    read_per_rank,
    read_rest,
    read_tensors,
    save_checkpoint,
)
from tests.core.checkpoint.states import differences, gathered, sharded_state
from tests.harness import run_ranks

LAYOUTS = [
    (world, degree) for world in (1, 2, 4) for degree in (1, 2, 4) if degree <= world
]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
SAMPLE = [((4, 2), (2, 2)), ((2, 2), (4, 4)), ((4, 4), (1, 1))]


def save(path: str, shard_degree: int) -> Any:
    state = sharded_state(shard_degree, seed=1)
    save_checkpoint(
        path, state, metadata={"step": 7}, per_rank={"rng": torch.get_rng_state()}
    )
    return gathered(state)


def load(path: str, shard_degree: int) -> Any:
    state = sharded_state(shard_degree, seed=-1)
    load_checkpoint(path, state, verify="digests")
    # The rest's template is empty: what was saved replaces it whole.
    return gathered(state)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(
            *pair, marks=() if pair in SAMPLE else pytest.mark.slow, id=str(pair)
        )
        for pair in PAIRS
    ],
)
def test_state_is_the_same_after_other_ranks_load_it(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    path = str(tmp_path / "epoch=0-step=10.ckpt")
    expected = run_ranks(save, saved[0], path, saved[1])[0]
    for found in run_ranks(load, loaded[0], path, loaded[1]):
        assert differences(found, expected) == []


def test_replicas_share_the_writing_and_write_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "step"
    expected = run_ranks(save, 4, str(path), 2)[0]
    index = read_index(path)
    stored = sum(
        chunk.end - chunk.begin
        for record in index.tensors.values()
        for chunk in record.chunks
    )
    assert stored == sum(record.bytes for record in index.tensors.values())
    assert len(list(path.glob("tensors-*.safetensors"))) == 4
    assert index.aliases == {"state_dict.tied.weight": "state_dict.wide.weight"}
    everything = read_tensors(path)
    assert torch.equal(
        everything["state_dict.tied.weight"], expected["state_dict"]["wide.weight"]
    )
    assert differences(read_rest(path, tensors=["*"]), expected) == []
    assert len(read_per_rank(path)) == 4


def test_conjugate_and_negative_views_keep_their_values(tmp_path: Path) -> None:
    """State space models hold a tensor and its conjugate, which share memory."""
    base = torch.complex(torch.arange(1.0, 4.0), torch.arange(4.0, 7.0))
    views = {"base": base, "conj": base.conj(), "negative": torch._neg_view(base.real)}
    save_checkpoint(tmp_path / "step", {"state_dict": views})
    found = read_tensors(tmp_path / "step")
    whole = full_state_dict(views)
    # Targets that are such views themselves.
    loaded = {
        "base": torch.zeros_like(base),
        "conj": torch.zeros_like(base).conj(),
        "negative": torch._neg_view(torch.zeros(3)),
    }
    load_checkpoint(tmp_path / "step", {"state_dict": loaded})
    for name, view in views.items():
        assert torch.equal(found[f"state_dict.{name}"], view), name
        assert torch.equal(whole[name], view), name
        assert torch.equal(loaded[name], view), name


def save_what_differs(path: str) -> Any:
    """Ranks with values of their own in plain tensors, as sums of a metric."""
    rank = float(dist.get_rank())
    sizes = range(1, 40)
    state = {f"sum {size}": torch.full((size,), rank) for size in sizes}
    # More than what ranks would share the writing of, were it weights.
    state["large"] = torch.full((1 << 19,), rank)
    state["larger"] = torch.full((3 << 18,), rank)
    state["other shape"] = torch.full((2 + dist.get_rank(),), rank)
    save_checkpoint(path, {"metrics": state, "rank": rank})
    return None


def test_values_that_differ_by_rank_are_all_of_rank_0(tmp_path: Path) -> None:
    run_ranks(save_what_differs, 2, str(tmp_path / "a"))
    assert read_rest(tmp_path / "a")["rank"] == 0.0
    for name, value in read_tensors(tmp_path / "a").items():
        assert torch.equal(value, torch.zeros_like(value)), name


def save_a_part(path: str) -> str:
    state = sharded_state(2, seed=1)
    alone = dist.new_group([0])
    try:
        if dist.get_rank() == 0:
            save_checkpoint(path, state, process_group=alone)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_a_tensor_that_is_not_all_there_is_not_saved(tmp_path: Path) -> None:
    message, _ = run_ranks(save_a_part, 2, str(tmp_path / "a"))
    assert "is not all on the ranks that save it: save over all ranks" in message
    assert list(tmp_path.iterdir()) == []
