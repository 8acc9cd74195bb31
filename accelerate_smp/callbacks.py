"""SmpMonitorCallback: what training achieves, in the log of transformers' Trainer.

The same figures as Lightning's SmpMonitor. A TrainerCallback does not see batches, so samples, tokens and FLOPs are
counted where they pass: in hooks around the model's forward. SmpTrainerMixin puts the figures into every log entry with
a loss, so that they reach the console, ``trainer.state.log_history`` and every logger.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accelerate_smp.handle import parallel_of
from smp_core.comm.meter import LINK_CLASSES, LinkClass
from smp_core.memory_watch import MemoryWatch, WatchesMemory
from smp_core.monitoring import FlopMeasurement, device_peak_flops

# What holds one number per token, in the order of preference.
TOKEN_INPUTS = ("input_ids", "decoder_input_ids")


class SmpMonitorCallback(WatchesMemory, TrainerCallback):
    """Samples/s, tokens/s, model TFLOPS per device, MFU, peak memory, and bytes between nodes and inside them.

    Args:
        peak_tflops: the device's peak in TFLOPS at the precision in use, for MFU; default: the known dense bfloat16
            peak of the GPU. Without it, on a CPU for example, MFU is not reported.
        flops_per_sample: model FLOPs of one sample's training step, where counting them does not work, as in a compiled
            model; default: counted while the first batch runs.
        memory_every_n_steps: optimizer steps between two whose peak memory is taken apart by kind; default: none. A
            watched step is slower (docs/memory.md).
        memory_log: the file that gets a JSON line for each watched step, for ``smp memory-report``; default
            ``memory.jsonl`` in the Trainer's ``output_dir``.

    Reported with every log entry of training (``logging_steps``): ``samples_per_second``, ``tokens_per_second``,
    ``tflops_per_device``, ``mfu``, ``peak_device_memory_gib`` or ``peak_host_rss_gib`` (the highest of all ranks), and
    ``bytes_between_nodes``, ``bytes_inside_nodes``: sent per optimizer step and node. Rates are of the whole job since
    the last entry; the clock starts after the first step and stands still in evaluations and while saving.
    With ``memory_every_n_steps`` also what the last watched step's peak was made of, each the highest of all ranks:
    ``peak_parameters_gib``, ``peak_gathered_gib``, ``peak_gradients_gib``, ``peak_optimizer_gib``,
    ``peak_activations_gib`` and, on CUDA, ``peak_other_gib``; :meth:`save_memory_plot` draws them. ``latest`` holds the
    last report.

    Raises:
        ValueError: a peak that is not positive, ``memory_every_n_steps`` below 1; when training starts,
            ``memory_every_n_steps`` where nothing is sharded.
    """

    def __init__(
        self,
        *,
        peak_tflops: float | None = None,
        flops_per_sample: float | None = None,
        memory_every_n_steps: int | None = None,
        memory_log: str | Path | None = None,
    ) -> None:
        self._will_watch(memory_every_n_steps)
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops={peak_tflops} is no peak; give TFLOPS of one device, or leave it out")
        self.peak_tflops, self.flops_per_sample = peak_tflops, flops_per_sample
        self._memory_log = memory_log
        self.latest: dict[str, float] = {}
        self._hooks: list[Any] = []
        # Seconds at which the present stretch of training began; None before the first step, inf in a pause.
        self._clock: float | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        handle = parallel_of(model)
        self._highest = {}
        if self._watch is not None:  # an earlier call of train() failed
            self._watch.abandon()
            self._watch = None
        if self.memory_every_n_steps is not None:
            if handle is None:
                raise ValueError(
                    "SmpMonitorCallback(memory_every_n_steps=...) takes the memory of a sharded model apart, and this "
                    "one is not; leave it out, or use SmpTrainer with more than one process"
                )
            log = Path(self._memory_log or Path(str(args.output_dir)) / "memory.jsonl")
            stepping = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has the real one
            self._watch = MemoryWatch(handle, [stepping], self.memory_every_n_steps, log, state.global_step)
        self._device = torch.device(args.device)
        self._meter = handle.meter if handle is not None and handle.meter.enabled else None
        self._nodes = 1 if handle is None else handle.mesh.topology.num_nodes
        self._sharing = 1 if handle is None else handle.mesh.context_degree
        peak = device_peak_flops(args.device) if self.peak_tflops is None else self.peak_tflops * 1e12
        self._peak = peak
        self._flops = self.flops_per_sample
        self._measurement: FlopMeasurement | None = None
        self._since = [0.0, 0.0]
        self._clock = None
        self._seconds = 0.0
        self._step = state.global_step
        self._sent = self._closed_bytes()
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._watch is not None:
            self._watch.abandon()
        self._clock = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not model.training:
            return
        tensor = next((kwargs[name] for name in TOKEN_INPUTS if isinstance(kwargs.get(name), torch.Tensor)), None)
        first = next((v for v in [tensor, *args, *kwargs.values()] if isinstance(v, torch.Tensor) and v.ndim), None)
        self._samples_here = 0 if first is None else first.shape[0]
        self._since[0] += self._samples_here
        self._since[1] += 0 if tensor is None else tensor.numel()
        if self._flops is None and self._samples_here:
            self._measurement = FlopMeasurement()
            self._measurement.start()

    def _after_forward(self, model: torch.nn.Module, *_: Any) -> None:
        if self._measurement is not None:
            self._flops = self._measurement.stop().training / self._samples_here
            self._measurement = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._watch_if_due(state.global_step, self._device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._watch.end(state.global_step)
        if self._clock is None:
            # The first step has the warm-up in it.
            self._since, self._clock = [0.0, 0.0], time.perf_counter()
        if control.should_log:
            self._report(state.global_step)
        if control.should_evaluate or control.should_save:
            self._pause()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._clock is not None and not control.should_save:
            self._resume()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._resume()

    def _pause(self) -> None:
        if self._clock is not None:
            self._seconds += time.perf_counter() - self._clock
            self._clock = float("inf")

    def _resume(self) -> None:
        if self._clock == float("inf"):
            self._clock = time.perf_counter()

    def _report(self, step: int) -> None:
        """Add up over the ranks. Collective: every rank gets here after the same optimizer step."""
        assert self._clock is not None
        now = time.perf_counter()
        seconds = self._seconds + max(now - self._clock, 0.0)
        self._seconds = 0.0
        sent = self._closed_bytes()
        steps = max(step - self._step, 1)
        own = [*self._since, *(sent[link] - self._sent[link] for link in LINK_CLASSES)]
        samples, tokens, *sent_since = _over_ranks(own, self._device, "sum")
        self.latest = {}
        if samples and seconds > 0:
            world = dist.get_world_size() if dist.is_initialized() else 1
            self.latest["samples_per_second"] = samples / self._sharing / seconds
            if tokens:
                self.latest["tokens_per_second"] = tokens / self._sharing / seconds
            if self._flops is not None:
                achieved = samples * self._flops / seconds / world
                self.latest["tflops_per_device"] = achieved / 1e12
                if self._peak is not None:
                    self.latest["mfu"] = achieved / self._peak
        self._note_peak(self._device)
        highest = _over_ranks(list(self._highest.values()), self._device, "max")
        self.latest |= dict(zip(self._highest, highest, strict=True))
        if self._watch is not None:
            self.latest |= self._watch.latest
        if self._meter is not None:
            names = {"inter": "bytes_between_nodes", "intra": "bytes_inside_nodes"}
            for link, value in zip(LINK_CLASSES, sent_since, strict=True):
                self.latest[names[link]] = value / self._nodes / steps
        self._since, self._clock, self._step, self._sent = [0.0, 0.0], now, step, sent

    def _closed_bytes(self) -> dict[LinkClass, float]:
        return dict.fromkeys(LINK_CLASSES, 0.0) if self._meter is None else self._meter.totals_by_link()


def _over_ranks(values: list[float], device: Any, operation: str) -> list[float]:
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return tensor.tolist()
