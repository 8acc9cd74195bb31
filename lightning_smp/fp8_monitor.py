"""Fp8Monitor: saturation, underflow and scales of FP8 layers, to loggers and to a file."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from smp_core.fp8.monitoring import Fp8Probe, append_to_log
from smp_core.parallelize import ParallelModel


class Fp8Monitor(Callback):
    """Every ``every_n_steps`` optimizer steps: how each FP8 layer's numbers fitted.

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
        self, every_n_steps: int = 100, path: str | Path | None = None, modules: tuple[str, ...] | list[str] = ("*",)
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"Fp8Monitor: every_n_steps={every_n_steps} is not allowed; allowed: 1 and more")
        self.every_n_steps, self.modules = every_n_steps, tuple(modules)
        self.path = None if path is None else Path(path)
        self._probe: Fp8Probe | None = None
        self._began = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parallel: ParallelModel | None = getattr(trainer.strategy, "parallel", None)
        if parallel is None or parallel.fp8 is None:
            raise ValueError(
                "Fp8Monitor: this run computes without FP8; write plugins=[Fp8Precision()] or leave it out"
            )
        self._probe = Fp8Probe(parallel.fp8, dist.all_reduce if dist.get_world_size() > 1 else lambda _: None)
        if self.path is None:
            self.path = Path(trainer.default_root_dir) / "fp8.jsonl"

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._probe is not None
        if not self._probe.is_counting and trainer.global_step % self.every_n_steps == 0:
            self._probe.begin()
            self._began = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._probe is not None and self.path is not None
        if not self._probe.is_counting or trainer.global_step == self._began:
            return  # inside an accumulation window
        figures = self._probe.end()
        if not trainer.is_global_zero:
            return
        append_to_log(self.path, trainer.global_step, figures)
        shown = {
            f"fp8/{name}/{figure}": value
            for name, values in figures.items()
            if any(fnmatch.fnmatchcase(name, glob) for glob in self.modules)
            for figure, value in values.items()
        }
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=trainer.global_step)
