"""What a step draws before it calls the model is the same on all stages, and what blocks draw another on each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.core.pipeline.cases import Case
from tests.core.tensor_parallel.model_cases import loss_of
from tests.harness import run_ranks


def drawn() -> tuple[list[float], list[float]]:
    """By the user's code and by the stage's block, in two steps of two micro-batches; ranks are seeded apart."""
    parallel = Case("plain").parallel()
    torch.manual_seed(100 + dist.get_rank())
    by_user: list[float] = []
    by_block: list[float] = []
    model, pipeline = parallel.module, parallel.pipeline
    assert pipeline is not None
    block = model.get_submodule(f"blocks.{parallel.mesh.stage}")
    block.register_forward_pre_hook(lambda *_: by_block.append(torch.rand(()).item()))
    tokens = torch.ones(2, 6, dtype=torch.long)

    def step() -> torch.Tensor:
        by_user.append(torch.rand(()).item())
        loss = loss_of(model, tokens[:1])
        torch.rand(3)  # on the last stage alone
        return loss

    for _ in range(2):
        pipeline.train([step, step], lambda loss: loss, 1.0, tokens)
        parallel.window.abandon()
    return by_user, by_block


def test_random_numbers_of_stages() -> None:
    first, last = run_ranks(drawn, 2)
    assert first[0] == last[0] and len(set(first[0])) == 4
    assert len({*first[0], *first[1], *last[1]}) == 12
