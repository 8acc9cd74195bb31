"""Adapters beside a base that is stored as codes under Lightning: one process's
training beside the decoded base, through checkpoints that another degree goes on
from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.models import WIDTH
from tests.core.sharding.frozen_runs import codes_of, with_decoded_base
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import Run, assert_same, fit, fit_twice, report


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Adapted(LanguageModule):
    """The decoded base has the same codes again, so that ranks may begin with it,
    too."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = PlainModel()
        for block in self.model.blocks:
            # The second has rows that become codes.
            block[1], block[3] = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.model.requires_grad_(False)
        for block in self.model.blocks:
            block[1], block[3] = Adapter(block[1]), Adapter(block[3])
        with_decoded_base(self.model, "int4")


FLAGS: dict[str, Any] = {
    "precision": "64-true",
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
}


def in_two_fits(
    folder: Path, first: dict[str, Any], second: dict[str, Any]
) -> tuple[Run, int]:
    """What both fits showed, and how many weights were codes."""
    trainer, module = fit_twice(Adapted, {"batches": 4}, folder, first, second, **FLAGS)
    return report(trainer, module), len(codes_of(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"shard_degree": 4}, {"shard_degree": 2}),
        (
            {"shard_degree": 2, "checkpoint": "full"},
            {"shard_degree": 4, "checkpoint": "async"},
        ),
    ],
    ids=["sharded", "full-async"],
)
def test_trains_and_resumes_like_one_process(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    expected = fit(Adapted, {"batches": 4}, max_epochs=2, **FLAGS)
    knobs = {"frozen_storage": "int4"}
    for seen, coded in run_ranks(
        in_two_fits, 4, tmp_path, first | knobs, second | knobs, ranks_per_node=2
    ):
        assert coded >= 2
        assert_same(seen, expected)
