"""Rows of tokens for runs whose sequences several ranks share."""

from __future__ import annotations

import torch

VOCABULARY, LENGTH, STEPS, BATCH = 41, 21, 8, 4


def make_rows(
    samples: int, seed: int, packed: bool = True
) -> list[dict[str, torch.Tensor]]:
    """Rows with other numbers of targets; every third one is two documents."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(samples):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels, position_ids = tokens.clone(), torch.arange(LENGTH)
        labels[: number % 6] = -100
        if packed and number % 3 == 1:
            labels[4 + number % 5], position_ids[4 + number % 5 :] = (
                -100,
                torch.arange(LENGTH - 4 - number % 5),
            )
        rows.append(
            {"input_ids": tokens, "labels": labels, "position_ids": position_ids}
        )
    return rows
