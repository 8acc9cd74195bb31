"""SmpMonitor: the throughput and memory of training, for any Lightning logger and the
progress bar. Fp8Monitor: the fit of numbers into FP8.

The figures come from smp_core.observe.job_figures and smp_core.fp8.monitoring. This
file owns the times of counts and reports (every N optimizer steps, validation
excluded), the counts of samples and tokens in a batch, and the names for people.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_smp.dealt import DealtLoader
from smp_core.engine import ParallelModel
from smp_core.fp8 import Fp8Watch
from smp_core.observe import (
    BYTES,
    KINDS,
    DrawsTimeline,
    JobFigures,
    RunRecord,
    WatchesMemory,
    check_peak,
)
from smp_core.run_log import FILE
from smp_core.watch import JoinedLoader

logger = logging.getLogger("smp")

# Keys of a batch that hold one number per token, in the order of preference
# (Transformers' names).
TOKEN_KEYS = ("input_ids", "decoder_input_ids", "tokens")

# Units for people; loggers get plain bytes and a plain share.
_SCALE = dict.fromkeys(BYTES.values(), 1e6) | {"mfu": 0.01, "bubble_share": 0.01}
_SHORT = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tflops_per_device": "TFLOPS",
    "mfu": "MFU%",
    "bytes_between_nodes": "MB_between",
    "bytes_inside_nodes": "MB_inside",
    "bubble_share": "bubble%",
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
    "bubble_share": "{:.1f} % pipeline bubble",
}


class SmpMonitor(WatchesMemory, DrawsTimeline, Callback):
    """Samples/s, tokens/s, model TFLOPS per device, MFU, peak memory, and bytes between
    nodes and inside them.

    Args:
        every_n_steps: optimizer steps between two reports (with several optimizers,
            each of their steps counts, as in ``trainer.global_step``).
        samples: ``batch -> samples``; default: the first dimension of the batch's token
            ids or first tensor.
        tokens: ``batch -> tokens``, padding included; default: the elements of
            ``input_ids`` (or the like) of a dict, or of an integer tensor [samples,
            sequence]; where neither is there, no tokens are reported.
        peak_tflops: the device's peak in TFLOPS at the precision in use, for MFU;
            default: the known dense bfloat16 peak of the GPU. Without it, on a CPU for
            example, MFU is not reported.
        flops_per_sample: model FLOPs of one sample's training step (forward and
            backward), where torch cannot see the products (kernels of one's own);
            default: counted while the first batch runs.
        prefix: put before the names in loggers.
        memory_every_n_steps: optimizer steps between two whose peak memory is taken
            apart by kind; default: none. A watched step is slower
            (docs/memory-reports.md).
        memory_log: the file that gets a JSON line for each watched step, for ``smp
            memory-report``; default ``memory.jsonl`` in the Trainer's
            ``default_root_dir``.
        run_log: the file that ``smp report`` makes a page of (docs/monitoring.md);
            default ``run.jsonl`` where the Trainer's first logger writes
            (``trainer.log_dir``), in ``default_root_dir`` where that one has no folder;
            none where there is no logger.

    Reported by name: ``samples_per_second``, ``tokens_per_second``,
    ``tflops_per_device``, ``mfu``, ``samples`` (since the start of fit),
    ``peak_device_memory_gib`` or ``peak_host_rss_gib`` (the highest of all ranks), and,
    under :class:`~lightning_smp.SmpShardedStrategy`, ``bytes_between_nodes`` and
    ``bytes_inside_nodes``: **sent per optimizer step and node** (the sum over a node's
    ranks, averaged over nodes and over the steps since the last report, without
    evaluation). With ``memory_every_n_steps`` also what the last watched step's peak
    was made of, each the highest of all ranks: ``peak_parameters_gib``,
    ``peak_gathered_gib``, ``peak_gradients_gib``, ``peak_optimizer_gib``,
    ``peak_activations_gib`` and, on CUDA, ``peak_other_gib``; :meth:`save_memory_plot`
    draws them. On CPU ranks with pipeline stages also ``bubble_share``,
    ``bubble_share_stage_0``, ..., and ``seconds_stage_0``, ... that they compute in an
    optimizer step; :meth:`save_timeline` draws the last batch.

    Rates are of the whole job; a sample that several ranks share counts once. The clock
    starts after the first optimizer step, which has the warm-up in it, and stands still
    during validation. ``latest`` holds the last report.

    Raises:
        ValueError: ``every_n_steps`` or ``memory_every_n_steps`` below 1, or a peak
            that is not positive; when training starts, ``memory_every_n_steps`` under
            another strategy.
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
        run_log: str | Path | None = None,
    ) -> None:
        # Refused when the callback is made, not in the middle of a run.
        if every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} is not a number of steps; allowed: 1 and more"
            )
        self._will_watch(memory_every_n_steps)
        check_peak(peak_tflops)
        self.every_n_steps = every_n_steps
        self.peak_tflops = peak_tflops
        self.flops_per_sample = flops_per_sample
        self.prefix = prefix
        self.latest: dict[str, float] = {}
        self._samples_of = samples or count_samples
        self._tokens_of = tokens or count_tokens
        self._memory_log, self._run_log = memory_log, run_log
        self._record: RunRecord | None = None
        self._logged: dict[str, Any] = {}
        self._steps: list[RemovableHandle] = []
        self._of_evaluation: set[str] = set()

    # The batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The monitor also works under Lightning's own strategies, which have no such
        # handle.
        parallel = _parallel_model(trainer)
        strategy = trainer.strategy
        step = trainer.global_step
        self._figures = JobFigures(
            parallel,
            device=strategy.root_device,
            world_size=trainer.world_size
            if parallel is None
            else parallel.mesh.topology.world_size,
            data_size=_data_size(trainer, parallel),
            over_ranks=functools.partial(_over_ranks, trainer),
            peak_tflops=self.peak_tflops,
            flops_per_sample=self.flops_per_sample,
            step=step,
        )
        # Figures that are missing are said once, with the reason.
        if not self._figures.counts_bytes and trainer.is_global_zero:
            why = (
                "collectives.meter=False"
                if parallel
                else f"{type(strategy).__name__} does not count them"
            )
            logger.warning(
                "SmpMonitor reports no bytes between nodes and inside them: %s", why
            )
        # Steps that were booked, and the step of the last report; a resumed run does
        # not begin at 0.
        self._booked_step = self._reported_step = step
        log = Path(self._memory_log or Path(trainer.default_root_dir) / "memory.jsonl")
        why_not = f"takes the memory of SmpShardedStrategy apart, and this is {type(strategy).__name__}; leave it out"
        self._start_watching(parallel, trainer.optimizers, log, step, why_not)
        self._start_record(trainer, parallel)
        # Forward passes may follow a step of manual optimization, in the same batch.
        go_on = functools.partial(_after_step, self._figures)
        self._steps = [
            optimizer.register_step_post_hook(go_on)
            for optimizer in trainer.optimizers
            if not pl_module.automatic_optimization
        ]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._figures is not None
        self._watch_if_due(trainer.global_step, trainer.strategy.root_device)
        self._figures.measure_forward()
        self._figures.enter("forward")

    def _start_record(self, trainer: Trainer, parallel: ParallelModel | None) -> None:
        """Begin the log of the run, on rank 0. Collective."""
        path = self._run_log
        if path is None and trainer.loggers:
            # A logger of a database has no folder.
            folder = trainer.log_dir or trainer.default_root_dir
            path = Path(folder) / FILE
        self._record = None
        if path is not None and trainer.is_global_zero:
            micro_batches = trainer.accumulate_grad_batches or 1
            self._record = RunRecord(
                parallel,
                trainer.optimizers,
                Path(path),
                trainer.global_step,
                micro_batches,
            )

    # A batch may have several forward and backward passes (manual optimization). FLOPs
    # are counted of what runs outside the backward passes: the forward, without
    # recomputations in backward.

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        assert self._figures is not None
        self._figures.end_forward()
        self._figures.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._figures is not None
        self._figures.enter("optimizer")
        if not pl_module.automatic_optimization:
            self._figures.measure_forward()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        # An optimizer's own products (Muon's) are none of the model's.
        assert self._figures is not None
        self._figures.end_forward()

    def _end_figures(self) -> None:
        for hook in self._steps:
            hook.remove()
        if self._figures is not None:
            self._figures.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end_figures()
        self._abandon_watch()
        self._end_record(exception)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self._figures is not None
        # A rank that has run out of batches takes its last one again, with no weight.
        loader = trainer.train_dataloader
        if isinstance(loader, (JoinedLoader, DealtLoader)) and loader.weight == 0:
            self._figures.count(0, 0)  # it is repeated
        else:
            tokens = self._tokens_of_this_rank(trainer, batch)
            self._figures.count(
                self._samples_of(batch), tokens, _loss_of(trainer, outputs)
            )
        # A micro-batch that is not its window's last ends no step.
        if trainer.global_step == self._booked_step:
            self._figures.enter("data")
            return
        self._figures.end_step()
        if self._watch is not None:
            self._watch.end(trainer.global_step)
        self._booked_step = trainer.global_step
        # Several optimizers may have stepped in one batch, so that a step may pass the
        # mark.
        if trainer.global_step - self._reported_step >= self.every_n_steps:
            self._report(trainer)
            names = [name for name in _SHORT if name in self.latest]
            shown = {
                _SHORT[name]: self.latest[name] / _SCALE.get(name, 1) for name in names
            }
            pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
        self._figures.start_clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._abandon_watch()
        # The last steps, fewer than a report has.
        if self._booked_step > self._reported_step:
            self._report(trainer, ended=True)
        self._end_figures()

    def _end_record(self, error: BaseException | None = None) -> None:
        if self._record is not None:
            self._record.end(self._booked_step, error)
            self._record = None

    # Validation is not training

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _between_training_steps(trainer) and self._figures is not None:
            self._figures.pause()
            # An epoch may be shorter than a report; what evaluations log comes apart.
            self._write_logged(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _between_training_steps(trainer) and self._figures is not None:
            self._figures.resume()
            self._of_evaluation |= trainer.callback_metrics.keys() - self._logged.keys()
            self._write_logged(trainer, of_evaluation=True)

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        # What was logged in the epoch before: its means are known now.
        self._write_logged(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_logged(trainer)
        self._end_record()

    def _write_logged(self, trainer: Trainer, of_evaluation: bool = False) -> None:
        """Write what ``self.log`` has given in training, or in an evaluation, into the
        run's log. Collective: Lightning reduces where it is asked."""
        logged = dict(trainer.callback_metrics)
        # Lightning makes a new tensor for each value that is new, and others of
        # evaluations when these are over.
        fresh = {
            name
            for name, value in logged.items()
            if value is not self._logged.get(name)
        }
        fresh -= {*_SHORT.values()}
        # A name belongs to evaluations if it first came up in one.
        names = (
            fresh & self._of_evaluation
            if of_evaluation
            else fresh - self._of_evaluation
        )
        self._logged = logged
        if self._record is not None:
            values = {
                name: float(logged[name])
                for name in sorted(names)
                if logged[name].numel() == 1
            }
            self._record.write_metrics(self._booked_step, values)

    # Reports

    def summary(self) -> str:
        """Describe the last report in one line for people; empty before the first."""
        shown = [(name, text) for name, text in _WORDS.items() if name in self.latest]
        return ", ".join(
            text.format(self.latest[name] / _SCALE.get(name, 1)) for name, text in shown
        )

    def _tokens_of_this_rank(self, trainer: Trainer, batch: Any) -> int | None:
        # Without stages the batch was split over context ranks already.
        tokens, parallel = self._tokens_of(batch), _parallel_model(trainer)
        if tokens is None or parallel is None or parallel.pipeline is None:
            return tokens
        # Stages split sequences micro-batch by micro-batch.
        return tokens // parallel.mesh.context_degree

    def _report(self, trainer: Trainer, ended: bool = False) -> None:
        """Make a report and send it to the loggers. Collective: every rank calls it
        after the same optimizer step.

        Args:
            ended: Lightning's loop has counted the step already.
        """
        assert self._figures is not None
        # Figures of all ranks, then the run's log, then the Trainer's loggers.
        device = trainer.strategy.root_device
        self.latest = self._report_of(self._figures, self._booked_step, device)
        self._reported_step = self._booked_step
        if self._record is not None:
            loss = {} if self._figures.loss is None else {"loss": self._figures.loss}
            self._record.write_step(
                self._booked_step, {**loss, **self.latest}, self._figures.details
            )
        self._write_logged(trainer)
        # The step that LightningModule.log uses for this batch, so that both stand in
        # one row of a CSV file. Lightning's own monitors take it from the same place,
        # `_batches_that_stepped`; there is no public one.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - int(ended)
        for each in trainer.loggers:
            each.log_metrics(
                {f"{self.prefix}{name}": value for name, value in self.latest.items()},
                step=step,
            )


def _over_ranks(trainer: Trainer, values: list[float], operation: str) -> list[float]:
    # float64: counts of tokens and bytes pass what float32 holds exactly.
    tensor = torch.tensor(
        values, dtype=torch.float64, device=trainer.strategy.root_device
    )
    every = dist.group.WORLD if dist.is_initialized() else None
    return trainer.strategy.reduce(tensor, every, reduce_op=operation).tolist()


def _after_step(figures: JobFigures, *_: Any) -> None:
    figures.measure_forward()


def _parallel_model(trainer: Trainer) -> ParallelModel | None:
    found = getattr(trainer.strategy, "parallel", None)
    return found if isinstance(found, ParallelModel) else None


def _data_size(trainer: Trainer, parallel: ParallelModel | None) -> int:
    """Count the ranks that read different samples."""
    if parallel is not None:
        return parallel.mesh.data_size
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", trainer.world_size))


def _loss_of(trainer: Trainer, outputs: Any) -> torch.Tensor | None:
    """Return what ``training_step`` returned as its loss; Lightning has divided it by
    the batches of a window."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if (
        not isinstance(loss, torch.Tensor)
        or loss.numel() != 1
        or not loss.is_floating_point()
    ):
        return None
    module = trainer.lightning_module
    return loss.detach().sum() * (
        trainer.accumulate_grad_batches if module.automatic_optimization else 1
    )


def _between_training_steps(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def count_samples(batch: Any) -> int:
    """Count the samples of a batch: the first dimension of its token ids, or else of
    its first tensor.

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
    """Count the tokens of a batch: the elements of its token ids, padding included;
    None for a batch without text."""
    tensor = _main_tensor(batch)
    if (
        tensor is None
        or tensor.ndim != 2
        or tensor.is_floating_point()
        or tensor.dtype == torch.bool
    ):
        return None
    return tensor.numel()


def _main_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim > 0 else None
    if isinstance(batch, Mapping):
        # Token ids before anything else, since a mask or labels may come first.
        token_ids = [batch[key] for key in TOKEN_KEYS if key in batch]
        return _main_tensor([*token_ids, *batch.values()])
    if isinstance(batch, (tuple, list)):
        for value in batch:
            found = _main_tensor(value)
            if found is not None:
                return found
    return None


class Fp8Monitor(Callback):
    """A callback that measures, every ``every_n_steps`` optimizer steps, how each FP8
    layer's numbers fitted.

    Loggers get ``fp8/<module>/<figure>``; a line of JSON goes to ``fp8.jsonl``, which
    ``smp fp8-report`` draws. Figures: see :meth:`smp_core.fp8.monitoring.Fp8Probe.end`.
    A probed step is slower, the others are not touched.

    Args:
        every_n_steps: >= 1.
        path: the file; default ``fp8.jsonl`` in the Trainer's ``default_root_dir``.
        modules: globs over module names that loggers get; the file gets all.

    Raises:
        ValueError: ``every_n_steps`` below 1; when training starts, a run without FP8.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        path: str | Path | None = None,
        modules: Sequence[str] = ("*",),
    ) -> None:
        self._watch = Fp8Watch("Fp8Monitor", every_n_steps, path, modules)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parallel: ParallelModel | None = getattr(trainer.strategy, "parallel", None)
        fp8 = None if parallel is None else parallel.fp8
        self._watch.start(fp8, trainer.default_root_dir, "plugins=[Fp8Precision()]")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._watch.step_begins(trainer.global_step)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        shown = self._watch.step_ends(
            trainer.global_step, writes=trainer.is_global_zero
        )
        if shown and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=trainer.global_step)
