"""Every checkpoint that a run can take resumes with the numbers of the uninterrupted
run: after a batch, inside a window, before, in and after a validation, at an epoch's
end. Training and validation draw from the generators, and so does the order of the
data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, token_rows
from tests.lightning.running import Run, make_trainer, report

BATCHES = 6


class DrawingModule(LanguageModule):
    """Draws in training and in validation, and shuffles with a sampler that draws
    too."""

    def __init__(self, workers: int) -> None:
        super().__init__(BATCHES // 2, 2)
        self.workers = workers
        self.validated: list[tuple[int, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch) * (1 + 0.1 * torch.rand(()))
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.validated.append(
            (self.trainer.global_step, batch_idx, float(torch.rand(())))
        )
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(
            token_rows(self.batches),
            batch_size=4,
            shuffle=True,
            num_workers=self.workers,
        )


class Saves(Callback):
    """Saves whenever a hook is called, as ``<batches before it>-<hook>.ckpt``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, trainer: Trainer, hook: str) -> None:
        trainer.save_checkpoint(
            f"{self.folder}/{trainer.fit_loop.total_batch_idx:02d}-{hook}.ckpt"
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        self.save(trainer, "batch")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        self.save(trainer, f"validation{arguments[2]}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer, "validated")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer, "epoch")


def train(
    case: dict[str, Any], callbacks: list[Callback], checkpoint: str | None = None
) -> Run:
    """Two epochs of six batches."""
    seed_everything(3, verbose=False)
    case = dict(case)
    module = DrawingModule(case.pop("workers", 0))
    trainer = make_trainer(
        {"shard_degree": 1}, callbacks=callbacks, max_epochs=2, **case
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return report(trainer, module, validated=module.validated)


def resumed(
    folder: str, case: dict[str, Any], names: list[str]
) -> tuple[Run, dict[str, Run]]:
    """The uninterrupted run, and those from its checkpoints: from the named ones, or
    from all."""
    place = Path(folder)
    plain = train(case, [Saves(folder)])
    found = names or sorted(path.stem for path in place.glob("*.ckpt"))
    return plain, {name: train(case, [], str(place / f"{name}.ckpt")) for name in found}


def check(plain: Run, runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        assert run.losses == plain.losses[len(plain.losses) - len(run.losses) :], name
        validated = plain.extra["validated"]
        assert (
            run.extra["validated"]
            == validated[len(validated) - len(run.extra["validated"]) :]
        ), name
        for key, value in plain.weights.items():
            assert torch.equal(value, run.weights[key]), (name, key)


# Where checkpoints are of one place, which differ only in what Lightning has left to
# do.
QUICK = [
    (
        {"val_check_interval": 4, "use_distributed_sampler": False},
        ["03-batch", "03-validation0", "05-batch"],
    ),
    (
        {"accumulate_grad_batches": 2, "use_distributed_sampler": False},
        ["00-batch", "05-validated"],
    ),
]
ALL = [
    {"val_check_interval": 4, "use_distributed_sampler": False},
    {"val_check_interval": 3},
    {
        "val_check_interval": 2,
        "accumulate_grad_batches": 2,
        "use_distributed_sampler": False,
    },
    {"val_check_interval": 5, "accumulate_grad_batches": 2},
    {
        "val_check_interval": 3,
        "accumulate_grad_batches": 2,
        "use_distributed_sampler": False,
    },
    {"use_distributed_sampler": False},
    {
        "limit_val_batches": 0,
        "accumulate_grad_batches": 2,
        "use_distributed_sampler": False,
    },
    {"val_check_interval": 2, "use_distributed_sampler": False, "workers": 1},
]


def test_a_resumed_run_draws_the_numbers_of_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """To the last bit, validations included."""
    for number, (case, names) in enumerate(QUICK):
        check(*run_ranks(resumed, 1, str(tmp_path / str(number)), case, names)[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_from_every_checkpoint_of_a_run(case: dict[str, Any], tmp_path: Path) -> None:
    check(*run_ranks(resumed, 1, str(tmp_path / "run"), case, [], timeout=900.0)[0])
