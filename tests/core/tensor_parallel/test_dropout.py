"""Dropout over tensor ranks: masks of whole activations are the same on all ranks,
those of split ones are not.

One process draws other masks, so its numbers cannot be met: what is shown is what makes
the ranks one model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks

KEPT = 0.75


def gpt2() -> transformers.GPT2LMHeadModel:
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 1 - KEPT)
    config = transformers.GPT2Config(
        vocab_size=48,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        **dropped,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


class Masks:
    """What the dropout modules of these names let through, in their last call."""

    def __init__(self, model: torch.nn.Module, *names: str) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda _, args, output, name=name: self._take(name, output)
            )

    def _take(self, name: str, output: torch.Tensor) -> None:
        self.kept[name] = (output.detach() != 0).clone()


def train(activations: str, seed: int = 0, steps: int = 2) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "shard_degree": 1,
        "tensor_parallel_degree": 2,
        "activations": activations,
    }
    parallel = parallelize(gpt2(), SmpConfig(**knobs))
    model = parallel.module
    masks = Masks(
        model,
        "transformer.drop",
        "transformer.h.1.attn.resid_dropout",
        "transformer.h.1.mlp.dropout",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    torch.manual_seed(seed)
    words = torch.randint(48, (8, 32), generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    own = {
        name: p.to_local() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    weights = {name: p.detach().clone() for name, p in own.items()}
    whole = [
        name
        for name, p in model.named_parameters()
        if p.numel() == weights[name].numel()
    ]
    after = torch.rand(4)
    return {"masks": masks.kept, "weights": weights, "whole": whole, "after": after}


def trainings() -> list[dict[str, Any]]:
    return [train("none"), train("full"), train("none", seed=1)]


def test_ranks_drop_whole_activations_alike_and_split_ones_each_for_itself() -> None:
    first, second = run_ranks(trainings, 2)
    ours, theirs = first[0], second[0]
    words, attention, mlp = (ours["masks"][name] for name in ours["masks"])
    assert torch.equal(words, theirs["masks"]["transformer.drop"])
    for name in list(ours["masks"])[1:]:
        assert ours["masks"][name].shape[1] == 16, "half of the tokens"
        assert not torch.equal(ours["masks"][name], theirs["masks"][name])
    assert not torch.equal(attention, mlp)
    for mask in (words, attention, mlp):
        spread = (KEPT * (1 - KEPT) / mask.numel()) ** 0.5
        assert abs(mask.double().mean() - KEPT) < 5 * spread
    # What every rank holds whole stays equal, and the generators go on alike.
    assert len(ours["whole"]) > 5 and all(
        torch.equal(ours["weights"][n], theirs["weights"][n]) for n in ours["whole"]
    )
    assert torch.equal(ours["after"], theirs["after"])


@pytest.mark.slow
def test_recomputed_blocks_drop_the_same_again() -> None:
    for plain, recomputed, other in run_ranks(trainings, 2):
        assert all(
            torch.equal(recomputed["weights"][name], value)
            for name, value in plain["weights"].items()
        )
        assert not all(
            torch.equal(other["weights"][name], value)
            for name, value in plain["weights"].items()
        )


def test_ranks_whose_generators_differ_are_told() -> None:
    for said in run_ranks(with_other_seeds, 2):
        assert "torch.manual_seed(seed + mesh.data_rank)" in said


def with_other_seeds() -> str:
    with pytest.raises(
        ValueError, match="random states of tensor ranks differ"
    ) as caught:
        train("none", seed=dist.get_rank())
    return str(caught.value)
