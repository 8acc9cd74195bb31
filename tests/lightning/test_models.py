"""Kinds of models: vision, frozen for a while, compiled; each trains like one
process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from smp_core.checkpoint import read_index
from tests.core.models import TroubledModel
from tests.lightning.modules import LanguageModule, PictureModule
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
)

EXACT: dict[str, Any] = {
    "precision": "64-true",
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
}


class Convolutions(PictureModule):
    """Kernels [out, in, height, width] with fewer rows than ranks (3) and an uneven
    number (7)."""

    def build(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 7, 3),
            nn.GELU(),
            nn.GroupNorm(1, 7),
            nn.Conv2d(7, 3, 3),
            nn.Flatten(),
            nn.Linear(12, 4),
        )


class VisionTransformer(PictureModule):
    """ViT of Transformers from a config, on pictures enlarged to 8 x 8."""

    def build(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
            num_labels=4,
            attn_implementation="eager",
        )
        self.model = ViTForImageClassification(config)

    def loss(self, batch: Any) -> torch.Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.model(F.pad(pictures, (1, 1, 1, 1))).logits, labels)


@pytest.mark.parametrize(
    "kind, degree",
    [
        pytest.param(Convolutions, 2, marks=pytest.mark.slow),
        (Convolutions, 4),
        pytest.param(VisionTransformer, 4, marks=pytest.mark.slow),
    ],
)
def test_vision_models_train_like_one_process(
    kind: type[PictureModule], degree: int
) -> None:
    flags = {**EXACT, "max_epochs": 2}
    assert_same(
        together(fit, kind, knobs={"shard_degree": degree}, **flags), fit(kind, **flags)
    )


def test_blocks_of_a_transformers_vision_model_become_units() -> None:
    for run in together(fit_and_list_units, VisionTransformer, {"shard_degree": 2}):
        # Before 5 Transformers called the blocks vit.encoder.layer.0 and so on.
        blocks = [
            re.fullmatch(r"model\.vit\.(?:layers|encoder\.layer)\.(\d+)", name)
            for name in run.extra["units"]
        ]
        assert (
            sorted(block[1] for block in blocks if block) == ["0", "1"]
            and run.extra["whole"] == []
        )


def fit_and_list_units(kind: type[LanguageModule], knobs: dict[str, Any]) -> Run:
    module = kind()
    trainer = make_trainer(knobs, max_steps=1)
    trainer.fit(module)
    parallel = trainer.strategy.parallel  # type: ignore[attr-defined]
    return report(
        trainer,
        module,
        units=[unit.name for unit in parallel.units],
        whole=list(parallel.plan.shapes.units.replicated),
    )


class ThawLater(BaseFinetuning):
    """Lightning's own way to finetune: the blocks are frozen first and join the
    optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                pl_module.model.blocks, optimizer, lr=0.02
            )


class TrainableOnly(LanguageModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=self.lr
        )


def fit_thawing(knobs: dict[str, Any] | None = None) -> Run:
    module = TrainableOnly()
    trainer = make_trainer(knobs, **EXACT, max_epochs=3, callbacks=[ThawLater()])
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_blocks_that_are_thawed_later_train_like_one_process(degree: int) -> None:
    expected = fit_thawing()
    assert_same(together(fit_thawing, {"shard_degree": degree}), expected)


class Compiled(LanguageModule):
    """options["backend"]: of torch.compile; options["blocks"]: compiles blocks in place
    of the whole model."""

    def build(self) -> None:
        model = TroubledModel()
        backend = self.options["backend"]
        if self.options.get("blocks"):
            model.blocks = nn.ModuleList(
                torch.compile(block, backend=backend) for block in model.blocks
            )
            self.model = model
        else:
            self.model = torch.compile(model, backend=backend)  # type: ignore[assignment]


def fit_and_save(
    kind: type[LanguageModule],
    options: dict[str, Any],
    knobs: dict[str, Any],
    folder: str,
) -> Run:
    """Then another module, not compiled, starts from the checkpoint and trains a second
    epoch."""
    module = kind(**options)
    trainer = make_trainer(knobs, **EXACT)
    trainer.fit(module)
    trainer.save_checkpoint(folder)
    plain = LanguageModule()
    second = make_trainer(knobs, **{**EXACT, "max_epochs": 2})
    second.fit(plain, ckpt_path=folder)
    return report(trainer, module, resumed=report(second, plain))


def check_compiled(options: dict[str, Any], folder: Path) -> None:
    expected = fit(LanguageModule, **EXACT)
    longer = fit(LanguageModule, **EXACT, max_epochs=2)
    knobs = {"shard_degree": 2}
    runs = together(fit_and_save, Compiled, options, knobs, str(folder), ranks=2)
    assert_same(runs, expected)
    names = read_index(folder).by_path().values()
    assert len(names) > 20 and not [name for name in names if "_orig_mod" in name]
    for run in runs:
        resumed = run.extra["resumed"]
        assert_same(resumed, Run(longer.losses[4:], longer.weights, longer.metrics))


@pytest.mark.parametrize("blocks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_submodules_train_alike_and_save_plain_names(
    blocks: bool, tmp_path: Path
) -> None:
    """The backend that runs the captured graph as it is: capture, guards and names,
    without a C++ compiler."""
    check_compiled({"backend": "eager", "blocks": blocks}, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_compiled_submodules_train_alike_with_generated_code(
    blocks: bool, tmp_path: Path
) -> None:
    check_compiled({"backend": "inductor", "blocks": blocks}, tmp_path / "saved")
