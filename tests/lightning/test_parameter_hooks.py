"""Hooks of parameters that a LightningModule registers in `__init__`, in
`configure_model` or in `on_fit_start` see, and change, one process's gradients:
float64, to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning.modules import LanguageModule, LateModule
from tests.lightning.running import Run, assert_same, make_trainer, report, together


def register(module: Any) -> None:
    """A mask of the rows that are trained, a clamp, and a note of the norm."""
    module.norms = []
    first, *_, last, _ = (
        p for p in module.model.parameters() if p.requires_grad and p.ndim > 1
    )
    trained = torch.ones(len(first), 1)
    trained[::2] = 0
    first.register_hook(lambda gradient: gradient * trained)
    last.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    last.register_hook(lambda gradient: module.norms.append(float(gradient.norm())))


class Early(LanguageModule):
    def build(self) -> None:
        super().build()
        register(self)


class Late(LateModule):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().configure_model()
            register(self)


class AtStart(LanguageModule):
    def on_fit_start(self) -> None:
        register(self)


KINDS = (Early, Late, AtStart)


def fits(knobs: dict[str, Any]) -> list[Run]:
    runs = []
    for kind in KINDS:
        module = kind(batches=5)
        trainer = make_trainer(
            knobs,
            precision="64-true",
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            limit_val_batches=0,
        )
        trainer.fit(module)
        runs.append(report(trainer, module, norms=module.norms))
    return runs


def fits_of_all(layouts: list[dict[str, Any]]) -> list[list[Run]]:
    return [fits(knobs) for knobs in layouts]


@pytest.mark.parametrize(
    "layout",
    [
        {"shard_degree": 2, "keep_between_micro_batches": "parameters"},
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hooks_of_a_module_see_and_change_one_processs_gradients(
    layout: dict[str, Any],
) -> None:
    expected = fits({})
    for by_layout in together(fits_of_all, [layout]):
        for runs in by_layout:
            for seen, right in zip(runs, expected, strict=True):
                assert_same(seen, right)
                assert right.extra["norms"]
                assert seen.extra["norms"] == pytest.approx(
                    right.extra["norms"], rel=1e-12
                )
