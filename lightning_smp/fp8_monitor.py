"""Fp8Monitor: saturation, underflow and scales of FP8 layers, to loggers and to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from smp_core.engine import ParallelModel
from smp_core.fp8 import Fp8Watch


class Fp8Monitor(Callback):
    """A callback that measures, every ``every_n_steps`` optimizer steps, how each FP8 layer's numbers fitted.

    Loggers get ``fp8/<module>/<figure>``; a line of JSON goes to ``fp8.jsonl``, which ``smp fp8-report`` draws.
    Figures: see :meth:`smp_core.fp8.monitoring.Fp8Probe.end`. A probed step is slower, the others are not touched.

    Args:
        every_n_steps: >= 1.
        path: the file; default ``fp8.jsonl`` in the Trainer's ``default_root_dir``.
        modules: globs over module names that loggers get; the file gets all.

    Raises:
        ValueError: ``every_n_steps`` below 1; when training starts, a run without FP8.
    """

    def __init__(
        self, every_n_steps: int = 100, path: str | Path | None = None, modules: Sequence[str] = ("*",)
    ) -> None:
        self._watch = Fp8Watch("Fp8Monitor", every_n_steps, path, modules)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parallel: ParallelModel | None = getattr(trainer.strategy, "parallel", None)
        fp8 = None if parallel is None else parallel.fp8
        self._watch.start(fp8, trainer.default_root_dir, "plugins=[Fp8Precision()]")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._watch.step_begins(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shown = self._watch.step_ends(trainer.global_step, writes=trainer.is_global_zero)
        if shown and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=trainer.global_step)
