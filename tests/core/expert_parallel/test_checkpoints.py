"""Checkpoints know nothing of expert ranks: any layout saves, any other one loads the
same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smp_core.checkpoint.live_state import full_state_dict
from tests.core.expert_parallel.cases import Case, saved_and_loaded
from tests.core.tensor_parallel.model_cases import batches, build, trained
from tests.harness import run_ranks

# Shard degree and expert degree; with 4 x 4 experts are sharded in another dimension,
# or not at all.
LAYOUTS = [(4, 2), (2, 1)]
ALL = [
    (shard, expert)
    for shard, expert in itertools.product((1, 2, 4), (1, 2, 4))
    if shard % expert == 0
]


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_any_layout_loads_what_another_saved(
    layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    cases = [Case("Mixtral", *layout) for layout in layouts]
    for problems in run_ranks(
        saved_and_loaded, 4, tmp_path, cases, ranks_per_node=2, timeout=600
    ):
        assert problems == []


def exported(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train, load a whole state dict, export as users of Transformers do."""
    parallel, _ = trained(Case("Mixtral", 4, 2), 1)
    whole = full_state_dict(parallel.module, rank0_only=False)
    parallel.module.load_state_dict(whole)
    state = full_state_dict(parallel.module, rank0_only=False)
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    if parallel.mesh.rank == 0:
        parallel.module.save_pretrained(folder, state_dict=state)
    with torch.no_grad():
        return state, parallel.module(input_ids=batches(1)[0, 0]).logits


def test_transformers_loads_an_export(tmp_path: Path) -> None:
    """The same bits; logits to 1e-6: Transformers computes rotations and softmax in
    float32."""
    state, logits = run_ranks(exported, 4, tmp_path, ranks_per_node=2)[0]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    )
    assert all(
        torch.equal(value, state[name]) for name, value in model.state_dict().items()
    )
    with torch.no_grad():
        assert (model(input_ids=batches(1)[0, 0]).logits - logits).abs().max() < 1e-6


def adapters_exported(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train adapters of experts, and save them as users of PEFT do."""
    parallel, _ = trained(Case("adapted experts", 4, 2), 2)
    state = full_state_dict(parallel.module, rank0_only=False)
    if parallel.mesh.rank == 0:
        parallel.module.save_pretrained(folder, state_dict=state)
    with torch.no_grad():
        return state, parallel.module(input_ids=batches(1)[0, 0]).logits


def test_peft_loads_adapters_of_experts(tmp_path: Path) -> None:
    """In PEFT's own format: the same bits, and logits to 1e-6, as above."""
    peft = pytest.importorskip("peft")
    state, logits = run_ranks(adapters_exported, 4, tmp_path, ranks_per_node=2)[0]
    base: Any = build("adapted experts").unload()
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    adapters = [
        name for name in model.state_dict() if "experts" in name and "lora" in name
    ]
    assert len(adapters) == 8  # two layers, two parameters, A and B
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in adapters)
    with torch.no_grad():
        assert (model(input_ids=batches(1)[0, 0]).logits - logits).abs().max() < 1e-6


def called_alone() -> str:
    """Rank 0 calls the model while it saves, which no other rank takes part in."""
    parallel = Case("Mixtral", 4, 2).parallel()
    whole = full_state_dict(parallel.module, rank0_only=False)
    if parallel.mesh.rank > 0:
        return ""
    with (
        parallel.unsharded(parallel.module, whole),
        pytest.raises(RuntimeError) as error,
    ):
        parallel.module(input_ids=batches(1)[0, 0])
    return str(error.value)


def test_a_call_on_one_rank_alone_is_refused_and_does_not_wait() -> None:
    refused, *_ = run_ranks(called_alone, 4, ranks_per_node=2, timeout=60)
    assert "expert_parallel_degree=2 all ranks compute it together" in refused
