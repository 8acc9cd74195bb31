"""Runs that are saved, and gone on with."""

from __future__ import annotations

from typing import Any

from tests.lightning.modules import ScheduledModule
from tests.lightning.running import Run, assert_same, make_trainer, report

# 5 batches, windows of 2: an epoch is 3 steps, the last one with a window of one batch.
BATCHES = 5

EXACT: dict[str, Any] = {
    "precision": "64-true",
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
}


def fit_from(
    knobs: dict[str, Any] | None,
    epochs: int,
    load: str | None = None,
    save: str | None = None,
    **flags: Any,
) -> Run:
    """Train until ``epochs`` are over, from the checkpoint ``load`` and into
    ``save``."""
    module = ScheduledModule(batches=BATCHES)
    trainer = make_trainer(knobs, max_epochs=epochs, **{**EXACT, **flags})
    trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return report(
        trainer,
        module,
        steps=trainer.global_step,
        epochs=trainer.current_epoch,
        rate=rate,
    )


def after(run: Run, epochs: int) -> Run:
    return Run(run.losses[epochs * BATCHES :], run.weights, run.metrics, run.extra)


def assert_goes_on(runs: list[Run] | Run, expected: Run) -> None:
    """From after the first epoch; and at the same place in steps, epochs and the
    schedule."""
    assert_same(runs, after(expected, 1))
    for run in [runs] if isinstance(runs, Run) else runs:
        assert (run.extra["steps"], run.extra["epochs"]) == (
            expected.extra["steps"],
            expected.extra["epochs"],
        )
        assert abs(run.extra["rate"] - expected.extra["rate"]) <= 1e-15
