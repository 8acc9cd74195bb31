"""Checkpoints know nothing of tensor ranks: any layout saves, any other one loads the
same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smp_core.checkpoint.live_state import full_state_dict
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.checkpoint.reader import load_checkpoint
from smp_core.checkpoint.writer import save_checkpoint
from tests.core.tensor_parallel.model_cases import (
    Case,
    batches,
    build,
    everything,
    full,
    trained,
)
from tests.harness import run_ranks

KINDS = ("llama", "gpt2")


def save(folder: Path, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """Train, save, and show all: equal on all ranks."""
    seen = []
    for case in cases:
        parallel, optimizer = trained(case)
        states = {
            "model": parallel.model_state(),
            "optimizer": named_optimizer_state(parallel.module, optimizer),
        }
        save_checkpoint(folder / case.kind, states)
        seen.append(everything(parallel, optimizer))
        whole = full_state_dict(parallel.module, rank0_only=False)
        assert all(torch.equal(value, seen[-1][name]) for name, value in whole.items())
    return seen


def load(folder: Path, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    seen = []
    for case in cases:
        parallel, optimizer = trained(case, steps=1)
        states: dict[str, Any] = {"model": parallel.model_state()}
        load_checkpoint(folder / case.kind, states)
        parallel.take_model_state(states["model"])
        load_named_optimizer_state(
            folder / case.kind, ("optimizer",), parallel.module, optimizer
        )
        parallel.reshard()
        seen.append(everything(parallel, optimizer))
    return seen


OTHERS = [
    (4, {"tensor": 4, "shard": 1}),
    (1, {"tensor": 1, "shard": 1}),
    (4, {"tensor": 1, "shard": 4}),
]


@pytest.mark.parametrize(
    ("kinds", "others"),
    [(KINDS[:1], OTHERS[:2]), pytest.param(KINDS, OTHERS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_any_layout_loads_what_another_saved(
    kinds: tuple[str, ...], others: list[tuple[int, dict[str, int]]], tmp_path: Path
) -> None:
    saved = run_ranks(
        save, 4, tmp_path, [Case(kind, tensor=2, shard=2) for kind in kinds]
    )[0]
    for world, layout in others:
        for loaded in run_ranks(
            load, world, tmp_path, [Case(kind, **layout) for kind in kinds]
        ):
            for kind, ours, theirs in zip(kinds, loaded, saved, strict=True):
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs), (
                    f"{kind} on {layout}"
                )


SAVERS = [
    (4, {"tensor": 1, "shard": 4}),
    (4, {"tensor": 4, "shard": 1}),
    (1, {"tensor": 1, "shard": 1}),
]


@pytest.mark.parametrize(
    ("kind", "saver"),
    [pytest.param(kind, n, marks=pytest.mark.slow) for kind in KINDS for n in range(3)],
)
def test_tensor_ranks_load_what_other_layouts_saved(
    kind: str, saver: int, tmp_path: Path
) -> None:
    world, layout = SAVERS[saver]
    (saved,) = run_ranks(save, world, tmp_path, [Case(kind, **layout)])[0]
    for (loaded,) in run_ranks(load, 4, tmp_path, [Case(kind, tensor=2, shard=2)]):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def load_whole(case: Case, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parallel = case.parallel()
    parallel.module.load_state_dict(state)
    return {name: full(value) for name, value in parallel.module.state_dict().items()}


def test_a_whole_state_dict_is_taken_up_part_by_part() -> None:
    state = build("gpt2", seed=9).state_dict()
    for seen in run_ranks(load_whole, 4, Case("gpt2", tensor=2, shard=2), state):
        assert all(torch.equal(seen[name], value) for name, value in state.items())


def export(folder: Path, case: Case) -> torch.Tensor:
    """Train, export as users of Transformers do, and return logits."""
    parallel, _ = trained(case)
    state = full_state_dict(parallel.module, rank0_only=False)
    if parallel.mesh.rank == 0:
        parallel.module.save_pretrained(folder, state_dict=state)
    with torch.no_grad():
        return parallel.module(input_ids=batches(1)[0, 0]).logits


def test_transformers_loads_an_export_with_equal_logits(tmp_path: Path) -> None:
    """float64, sums in another order."""
    (logits, *_) = run_ranks(export, 2, tmp_path, Case("llama", tensor=2))
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        assert (plain(input_ids=batches(1)[0, 0]).logits - logits).abs().max() < 1e-12
