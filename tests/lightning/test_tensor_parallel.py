"""Lightning's Trainer over tensor ranks equals one process: its sampler gives tensor
ranks the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
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


class TogetherModule(SplitModule):
    """Split and unsplit weights in one operation, as people write penalties and clip
    gradients."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = list(self.model.parameters())
        penalty = sum(weight.square().sum() for weight in weights)
        norm = torch.stack([weight.norm() for weight in weights]).norm()
        return super().loss(tokens) + 1e-3 * penalty + 1e-2 * norm

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, eps=1e-4)


class Thawing(BaseFinetuning):
    """Compares the weights that it thaws with the optimizer's, which it has all."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[0], optimizer)


def train_together(batch_size: int, knobs: dict[str, Any] | None = None) -> Run:
    with Wide():
        flags: dict[str, Any] = {"callbacks": [Thawing()], "limit_val_batches": 0}
        flags["limit_train_batches"] = 2
        options = {"batch_size": batch_size}
        return fit(TogetherModule, options, knobs, max_epochs=2, **flags)


def train(batch_size: int, knobs: dict[str, Any] | None = None) -> Run:
    with Wide():
        flags = {
            "gradient_clip_val": 0.5,
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 0,
        }
        return fit(SplitModule, {"batch_size": batch_size}, knobs, **flags)


PLAN = {
    f"model.{glob}" if not glob.startswith("*") else glob: role
    for glob, role in GLOBS.items()
}
KNOBS = {
    "shard_degree": 2,
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"plan": PLAN},
}


def test_a_fit_equals_one_process() -> None:
    expected = train(8)
    assert_same(together(train, 4, KNOBS), expected)


def test_operations_on_split_and_unsplit_weights_equal_one_process() -> None:
    expected = train_together(8)
    assert_same(together(train_together, 4, KNOBS), expected)
