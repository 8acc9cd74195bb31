"""What a rank keeps for backward falls with the number of ranks that share a
sequence."""

from __future__ import annotations

import pytest
import torch

from smp_core.context_parallel.replaced_attention import enabled
from tests.core.context_parallel.measuring import saved_bytes
from tests.core.context_parallel.model_cases import Run, on_ranks, whole_batch
from tests.harness import run_ranks

LENGTH = 512


def kept_for_backward(degrees: list[int]) -> list[int]:
    """Saved-tensor bytes of one forward of a Llama on 512-token sequences, for each
    context degree."""
    found = []
    for context in degrees:
        run = Run("llama", 4, context, length=LENGTH)
        parallel, _ = on_ranks(run)
        rows = {key: value[:1] for key, value in whole_batch(run).items()}
        split = None if parallel.context is None else parallel.context.split(rows)
        tokens = rows["input_ids"] if split is None else split.batch["input_ids"]

        def forward(model=parallel.module, tokens=tokens, split=split) -> torch.Tensor:  # type: ignore[no-untyped-def]
            with enabled(split):
                return model(tokens, use_cache=False).logits

        found.append(saved_bytes(forward))
    return found


@pytest.mark.slow
def test_saved_bytes_fall_as_one_over_the_degree() -> None:
    """Within 10 %: what is not per token (gathered weights, of 16 dims here) is small
    beside 512 tokens."""
    for one, two, four in run_ranks(kept_for_backward, 4, [1, 2, 4]):
        assert abs(two / (one / 2) - 1) <= 0.1, two / one
        assert abs(four / (one / 4) - 1) <= 0.1, four / one
