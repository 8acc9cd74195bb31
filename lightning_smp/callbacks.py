"""SmpMonitor: what training achieves, for any Lightning logger and the progress bar.

Thin: rates and FLOPs come from smp_core.monitoring, bytes from the strategy's CommMeter. What is owned here is when to
look (every N optimizer steps, validation excluded) and adding up over ranks: one small sum and one small maximum per
report, so that the figures are those of the job and not rank 0's times a guess.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from smp_core.comm.meter import LINK_CLASSES, LinkClass
from smp_core.memory_log import KINDS
from smp_core.memory_watch import MemoryWatch, WatchesMemory
from smp_core.monitoring import FlopMeasurement, ModelFlops, StepMeter, device_peak_flops
from smp_core.parallel_model import ParallelModel

logger = logging.getLogger("smp")

# Keys of a batch that hold one number per token, in the order of preference (Transformers' names).
TOKEN_KEYS = ("input_ids", "decoder_input_ids", "tokens")

_BYTES = ("bytes_between_nodes", "bytes_inside_nodes")

# Units for people; loggers get plain bytes and a plain share.
_SCALE = {name: 1e6 for name in _BYTES} | {"mfu": 0.01}
_SHORT = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tflops_per_device": "TFLOPS",
    "mfu": "MFU%",
    "bytes_between_nodes": "MB_between",
    "bytes_inside_nodes": "MB_inside",
}
_WORDS = {
    "samples_per_second": "{:.1f} samples/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops_per_device": "{:.3g} model TFLOPS per device",
    "mfu": "{:.1f} % MFU",
    "peak_device_memory_gib": "peak device memory {:.2f} GiB",
    "peak_host_rss_gib": "peak memory {:.2f} GiB per rank",
    **{f"peak_{kind}_gib": f"{kind} {{:.3f}} GiB" for kind in KINDS},
    "bytes_between_nodes": "per step and node {:.2f} MB sent to other nodes",
    "bytes_inside_nodes": "{:.2f} MB inside the node",
}


@dataclass
class _Counts:
    """What this rank has done since the last report."""

    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


class SmpMonitor(WatchesMemory, Callback):
    """Samples/s, tokens/s, model TFLOPS per device, MFU, peak memory, and bytes between nodes and inside them.

    Args:
        every_n_steps: optimizer steps between two reports (with several optimizers, each of their steps counts, as in
            ``trainer.global_step``).
        samples: ``batch -> samples``; default: the first dimension of the batch's token ids or first tensor.
        tokens: ``batch -> tokens``, padding included; default: the elements of ``input_ids`` (or the like) of a dict,
            or of an integer tensor [samples, sequence]; where neither is there, no tokens are reported.
        peak_tflops: the device's peak in TFLOPS at the precision in use, for MFU; default: the known dense bfloat16
            peak of the GPU. Without it, on a CPU for example, MFU is not reported.
        flops_per_sample: model FLOPs of one sample's training step (forward and backward), where torch cannot see the
            products (kernels of one's own); default: counted while the first batch runs.
        prefix: put before the names in loggers.
        memory_every_n_steps: optimizer steps between two whose peak memory is taken apart by kind; default: none. A
            watched step is slower (docs/memory.md).
        memory_log: the file that gets a JSON line for each watched step, for ``smp memory-report``; default
            ``memory.jsonl`` in the Trainer's ``default_root_dir``.

    Reported by name: ``samples_per_second``, ``tokens_per_second``, ``tflops_per_device``, ``mfu``, ``samples`` (since
    the start of fit), ``peak_device_memory_gib`` or ``peak_host_rss_gib`` (the highest of all ranks), and, under
    :class:`~lightning_smp.SmpShardedStrategy`, ``bytes_between_nodes`` and ``bytes_inside_nodes``: **sent per optimizer
    step and node** (the sum over a node's ranks, averaged over nodes and over the steps since the last report, without
    evaluation). With ``memory_every_n_steps`` also what the last watched step's peak was made of, each the highest of
    all ranks: ``peak_parameters_gib``, ``peak_gathered_gib``, ``peak_gradients_gib``, ``peak_optimizer_gib``,
    ``peak_activations_gib`` and, on CUDA, ``peak_other_gib``; :meth:`save_memory_plot` draws them.

    Rates are of the whole job; a sample that several ranks share counts once. The clock starts after the first
    optimizer step, which has the warm-up in it, and stands still during validation. ``latest`` holds the last report.

    Raises:
        ValueError: ``every_n_steps`` or ``memory_every_n_steps`` below 1, or a peak that is not positive; when training
            starts, ``memory_every_n_steps`` under another strategy.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        *,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
        peak_tflops: float | None = None,
        flops_per_sample: float | None = None,
        prefix: str = "smp/",
        memory_every_n_steps: int | None = None,
        memory_log: str | Path | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not a number of steps; allowed: 1 and more")
        self._will_watch(memory_every_n_steps)
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops={peak_tflops} is no peak; give TFLOPS of one device, or leave it out")
        self.every_n_steps = every_n_steps
        self.peak_tflops = peak_tflops
        self.flops_per_sample = flops_per_sample
        self.prefix = prefix
        self.latest: dict[str, float] = {}
        self._samples_of = samples or count_samples
        self._tokens_of = tokens or count_tokens
        self._measurement: FlopMeasurement | None = None
        self._memory_log = memory_log

    # The job

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parallel = _parallel_model(trainer)
        self._comm = parallel.meter if parallel is not None and parallel.meter.enabled else None
        self._nodes = 1 if parallel is None else parallel.mesh.topology.num_nodes
        if self._comm is None and trainer.is_global_zero:
            why = "comm_meter=False" if parallel else f"{type(trainer.strategy).__name__} does not count them"
            logger.warning("SmpMonitor reports no bytes between nodes and inside them: %s", why)
        self._sharing = trainer.world_size // _data_size(trainer, parallel)
        peak = device_peak_flops(trainer.strategy.root_device) if self.peak_tflops is None else self.peak_tflops * 1e12
        # What is booked has been added up over the ranks before, so to the meter there is one data rank.
        self._rates = StepMeter(world_size=trainer.world_size, peak_flops_per_device=peak, window=1)
        self._clock_runs = False
        self._since = _Counts()
        self._samples = 0.0
        self._tokens_known = True
        self._flops_per_sample = None if self.flops_per_sample is None else self.flops_per_sample / self._sharing
        self._booked_step = self._reported_step = trainer.global_step
        self._sent_before = self._closed_bytes()
        self._highest = {}
        self._watch = None
        if self.memory_every_n_steps is not None:
            if parallel is None:
                raise ValueError(
                    "SmpMonitor(memory_every_n_steps=...) takes the memory of SmpShardedStrategy apart, and this is "
                    f"{type(trainer.strategy).__name__}; leave it out"
                )
            log = Path(self._memory_log or Path(trainer.default_root_dir) / "memory.jsonl")
            step = trainer.global_step
            self._watch = MemoryWatch(parallel, trainer.optimizers, self.memory_every_n_steps, log, step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._watch_if_due(trainer.global_step, trainer.strategy.root_device)
        if self._flops_per_sample is None:
            self._forward_flops = 0
            self._begin_counting()

    # A batch may have several forward and backward passes (manual optimization). FLOPs are counted of what runs outside
    # the backward passes: the forward, without what is recomputed in backward.

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._end_counting()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._flops_per_sample is None and not pl_module.automatic_optimization:
            self._begin_counting()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end_counting()
        if self._watch is not None:
            self._watch.abandon()

    def _begin_counting(self) -> None:
        self._measurement = FlopMeasurement()
        self._measurement.start()

    def _end_counting(self) -> None:
        if self._measurement is not None:
            self._forward_flops += self._measurement.stop().forward
            self._measurement = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, tokens = self._samples_of(batch), self._tokens_of(batch)
        self._end_counting()
        if self._flops_per_sample is None and samples:
            self._flops_per_sample = ModelFlops({"forward": self._forward_flops}).training / samples
        self._tokens_known = self._tokens_known and tokens is not None
        self._samples += samples
        self._since.samples += samples
        self._since.tokens += tokens or 0
        self._since.flops += samples * (self._flops_per_sample or 0.0)
        if trainer.global_step == self._booked_step:
            return
        if self._watch is not None:
            self._watch.end(trainer.global_step)
        self._booked_step = trainer.global_step
        if trainer.global_step - self._reported_step >= self.every_n_steps:
            self._report(trainer)
            shown = {
                short: self.latest[name] / _SCALE.get(name, 1) for name, short in _SHORT.items() if name in self.latest
            }
            pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
        if not self._clock_runs:
            self._rates.start()
            self._clock_runs, self._since = True, _Counts()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:
            self._watch.abandon()
        if self._booked_step > self._reported_step:
            self._report(trainer, ended=True)

    # Validation is not training

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _between_training_steps(trainer):
            self._rates.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _between_training_steps(trainer):
            self._rates.resume()

    # Reports

    def summary(self) -> str:
        """The last report as one line for people; empty before the first."""
        shown = [(name, text) for name, text in _WORDS.items() if name in self.latest]
        return ", ".join(text.format(self.latest[name] / _SCALE.get(name, 1)) for name, text in shown)

    def _report(self, trainer: Trainer, ended: bool = False) -> None:
        """Add up over the ranks, publish. Collective: every rank gets here after the same optimizer step.

        ``ended``: Lightning's loop has counted the step already.
        """
        steps = self._booked_step - self._reported_step
        closed = self._closed_bytes()
        sent = {link: closed[link] - self._sent_before[link] for link in LINK_CLASSES}
        since = self._since
        own = [self._samples, since.samples, since.tokens, since.flops, sent["inter"], sent["intra"]]
        total = self._over_ranks(trainer, own, "sum")
        samples, since_samples = (value / self._sharing for value in total[:2])
        since_tokens = total[2]  # each rank has its own part of a shared sequence
        self.latest = {"samples": samples}
        if self._clock_runs:
            tokens = round(since_tokens) if self._tokens_known else None
            self._rates.step(round(since_samples), tokens, total[3] or None)
            throughput = self._rates.throughput()
            self.latest |= {} if throughput is None else throughput.as_dict()
        self._note_peak(trainer.strategy.root_device)
        highest = self._over_ranks(trainer, list(self._highest.values()), "max")
        self.latest |= dict(zip(self._highest, highest, strict=True))
        if self._watch is not None:
            self.latest |= self._watch.latest
        if self._comm is not None:
            for name, value in zip(_BYTES, total[4:], strict=True):
                self.latest[name] = value / self._nodes / steps
        self._reported_step, self._sent_before, self._since = self._booked_step, closed, _Counts()
        # The step that LightningModule.log uses for this batch, so that both stand in one row of a CSV file.
        # Lightning's own monitors take it from the same place, `_batches_that_stepped`; there is no public one.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - int(ended)
        for each in trainer.loggers:
            each.log_metrics({f"{self.prefix}{name}": value for name, value in self.latest.items()}, step=step)

    def _closed_bytes(self) -> dict[LinkClass, float]:
        return dict.fromkeys(LINK_CLASSES, 0.0) if self._comm is None else self._comm.totals_by_link()

    def _over_ranks(self, trainer: Trainer, values: list[float], operation: str) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
        reduced: list[float] = trainer.strategy.reduce(tensor, reduce_op=operation).tolist()
        return reduced


def _parallel_model(trainer: Trainer) -> ParallelModel | None:
    found = getattr(trainer.strategy, "parallel", None)
    return found if isinstance(found, ParallelModel) else None


def _data_size(trainer: Trainer, parallel: ParallelModel | None) -> int:
    """Ranks that read different samples."""
    if parallel is not None:
        return parallel.mesh.data_size
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", trainer.world_size))


def _between_training_steps(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def count_samples(batch: Any) -> int:
    """The first dimension of a batch's token ids, or else of its first tensor.

    Raises:
        ValueError: there is no tensor in it.
    """
    tensor = _main_tensor(batch)
    if tensor is None:
        raise ValueError(
            f"SmpMonitor cannot tell how many samples a batch of type {type(batch).__name__} has: there is no tensor "
            "in it; write SmpMonitor(samples=lambda batch: ...)"
        )
    return int(tensor.shape[0])


def count_tokens(batch: Any) -> int | None:
    """The elements of a batch's token ids, padding included; None for a batch that is not text."""
    tensor = _main_tensor(batch)
    if tensor is None or tensor.ndim != 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return None
    return tensor.numel()


def _main_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim > 0 else None
    if isinstance(batch, Mapping):
        named = [batch[key] for key in TOKEN_KEYS if key in batch]
        return next((found for value in [*named, *batch.values()] if (found := _main_tensor(value)) is not None), None)
    if isinstance(batch, (tuple, list)):
        return next((found for value in batch if (found := _main_tensor(value)) is not None), None)
    return None
