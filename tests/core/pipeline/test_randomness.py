"""What a step and the model draw before the blocks is the same on all stages, and what
blocks draw another on each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.core.pipeline.cases import Case
from tests.core.tensor_parallel.model_cases import loss_of
from tests.harness import run_ranks


def drawn() -> tuple[list[float], list[float], list[float]]:
    """By the user's code, by the model before its blocks and by the stage's block, in
    two steps of two micro-batches; all of that twice, with ranks seeded apart, and
    alike the second time."""
    parallel = Case("plain").parallel()
    by_user: list[float] = []
    by_model: list[float] = []
    by_block: list[float] = []
    model, pipeline = parallel.module, parallel.pipeline
    assert pipeline is not None
    words = model.get_submodule("words")
    if parallel.mesh.stage == 0:  # the last one has a stand-in
        words.register_forward_pre_hook(
            lambda *_: setattr(words, "noise", torch.rand(3))
        )
    words.register_forward_hook(lambda *_: by_model.append(torch.rand(()).item()))
    block = model.get_submodule(f"blocks.{parallel.mesh.stage}")
    block.register_forward_pre_hook(lambda *_: by_block.append(torch.rand(()).item()))
    tokens = torch.ones(2, 6, dtype=torch.long)

    def step() -> torch.Tensor:
        by_user.append(torch.rand(()).item())
        loss = loss_of(model, tokens[:1])
        torch.rand(3)  # on the last stage alone
        return loss

    for _ in range(2):
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(2):
            pipeline.train([step, step], lambda loss: loss, 1.0, tokens)
            parallel.window.abandon()
        own = torch.Generator().manual_seed(100 + dist.get_rank())
        torch.randint(2**62, (2,), generator=own)
        assert torch.equal(torch.get_rng_state(), own.get_state()), (
            "a step takes one draw of a rank's generator"
        )
    return by_user, by_model, by_block


def test_random_numbers_of_stages() -> None:
    """Dropout is another on each stage, micro-batch and step, and the same when it is
    begun again."""
    first, last = run_ranks(drawn, 2)
    assert first[:2] == last[:2] and len({*first[0], *first[1]}) == 8
    assert len({*first[0], *first[1], *first[2], *last[2]}) == 16
    assert all(numbers[:4] == numbers[4:] for numbers in (*first, *last))
