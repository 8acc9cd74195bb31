"""Lightning's Trainer over tensor ranks equals one process: its sampler gives tensor
ranks the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.tensor_parallel.model_cases import Wide, batches, build, own_loss
from tests.core.tensor_parallel.models import GLOBS
from tests.lightning.modules import LanguageModule
from tests.lightning.running import Run, assert_same, fit, together


class SplitModule(LanguageModule):
    def build(self) -> None:
        self.model = build("plain", seed=torch.initial_seed() % 100)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return own_loss(self.model(tokens), tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)

    def train_dataloader(self) -> Any:
        data: Any = batches(1, 4).flatten(0, 2)
        if dist.is_initialized():
            return DataLoader(data, batch_size=self.options["batch_size"])
        # As Lightning's sampler does on ranks.
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
        return DataLoader(data, batch_size=self.options["batch_size"], sampler=sampler)


def train(batch_size: int, knobs: dict[str, Any] | None = None) -> Run:
    with Wide():
        flags = {
            "gradient_clip_val": 0.5,
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 0,
        }
        return fit(SplitModule, {"batch_size": batch_size}, knobs, **flags)


def test_a_fit_equals_one_process() -> None:
    plan = {
        f"model.{glob}" if not glob.startswith("*") else glob: role
        for glob, role in GLOBS.items()
    }
    knobs = {
        "shard_degree": 2,
        "tensor_parallel_degree": 2,
        "tensor_parallel": {"plan": plan},
    }
    expected = train(8)
    assert_same(together(train, 4, knobs), expected)
