"""States drawn from a seed come back with the same bits and types, on other ranks and
from exports as other libraries read them, or are refused in words."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from smp_core.checkpoint import (
    CheckpointError,
    consolidate,
    iterate_tensors,
    path_text,
    save_checkpoint,
)
from tests.core.checkpoint.drawn_states import (
    built,
    differences,
    draw,
    load_drawn,
    save_drawn,
    with_ties,
)
from tests.harness import run_ranks

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4))
PAIRS = list(itertools.product(SHAPES, SHAPES))
# What only unrestricted unpickling reads; names that are two tensors' in a file.
REFUSALS = ("these values cannot be saved",)


def check(seeds: range, saved: Shape, loaded: Shape, way: str, folder: str) -> int:
    """Save over one mesh, load over another; return how many were refused."""
    numbers = list(seeds)
    ranks = saved[0] * saved[1], loaded[0] * loaded[1]
    words = run_ranks(save_drawn, ranks[0], numbers, folder, saved, way)
    refused = set(words[0])
    for each in words:
        assert set(each) == refused
        assert all(any(known in text for known in REFUSALS) for text in each.values())
    assert not refused & {int(name) for name in os.listdir(folder)}
    whole = [seed for seed in numbers if seed not in refused]
    for found in run_ranks(load_drawn, ranks[1], whole, folder, loaded):
        assert found == {seed: [] for seed in whole}
    return len(refused)


def test_drawn_states_come_back_over_another_mesh(tmp_path: Path) -> None:
    assert check(range(6), (2, 1), (1, 2), "async", str(tmp_path)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_many_drawn_states(
    tmp_path: Path, saved: Shape, loaded: Shape, way: str
) -> None:
    begin = 100 * (1 + PAIRS.index((saved, loaded)))
    check(range(begin, begin + 25), saved, loaded, way, str(tmp_path))


def _model_of(state: dict[Any, Any]) -> dict[str, Any]:
    """The tensors of the model by their names in an export."""
    keys = [key for key in ("state_dict", "model") if _tensors(state.get(key))]
    return _tensors(state[keys[0]] if keys else state)


def _tensors(state: Any) -> dict[str, Any]:
    return {path_text(path): tensor for path, tensor in iterate_tensors(state)}


def read_by_others(path: Path, folder: Path, expected: dict[Any, Any]) -> list[str]:
    """What differs in exports of a checkpoint, or the words of those that refuse."""
    model, told = _model_of(expected), []
    try:
        consolidate(path, folder / "whole.pt")
        whole = torch.load(folder / "whole.pt", weights_only=True)
        # In another order: that of the files.
        assert whole.keys() == model.keys()
        told += list(differences({name: whole[name] for name in model}, model))
    except CheckpointError as error:
        told.append(f"refused: {error}")
    try:
        consolidate(path, folder / "hub", max_shard_size=300)
        found: dict[str, Any] = {}
        ties: dict[str, str] = {}
        for file in sorted((folder / "hub").glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                ties |= opened.metadata()
        by_name = {name: found[ties.get(name, name)] for name in model}
        told += list(differences(by_name, model))
        told += [f"{name} is too much" for name in found.keys() - model.keys()]
    except CheckpointError as error:
        told.append(f"refused: {error}")
    return told


@pytest.mark.parametrize(
    "seeds",
    [
        range(16),
        *(
            pytest.param(range(n, n + 100), marks=pytest.mark.slow)
            for n in range(100, 600, 100)
        ),
    ],
)
def test_exports_are_read_by_other_libraries(tmp_path: Path, seeds: range) -> None:
    exact = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            save_checkpoint(folder / "step", built(draw(seed), None))
        except CheckpointError:
            continue
        expected = built(with_ties(draw(seed)), None)
        told = read_by_others(folder / "step", folder, expected)
        exact += not told
        for text in told:
            assert "refused: " in text, (seed, text)
            assert (
                "safetensors files" in text
                or "holds no model tensors" in text
                or "two tensors" in text
            ), (seed, text)
    assert exact > len(seeds) // 5
