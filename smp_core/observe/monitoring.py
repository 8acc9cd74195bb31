"""The throughput and memory of training: samples/s, tokens/s, model TFLOPS per device,
MFU, peak memory.

Model FLOPs are counted by torch's FlopCounterMode while a forward pass runs: matrix
products, convolutions and attention, with one multiply-add as two operations and causal
attention as if it were full (the convention of PaLM, arXiv 2204.02311, appendix B). A
training step is taken as three forwards, also where layers are frozen or recomputed:
MFU is about the model's useful work, not about what the hardware was kept busy with.
Not counted: element-wise operations, normalisation, softmax, embedding look-ups,
recurrent (LSTM, GRU) kernels, the optimizer, communication.

All rates are of the whole job. Ranks that share samples (context parallel ones) are one
data rank: samples are counted once, not once per rank.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from smp_core.checkpoint import map_tensors
from smp_core.plan import GIB, call_with
from smp_core.planner import peak_flops


def device_peak_flops(device: torch.device) -> float | None:
    """Return `peak_flops` of a torch device; None for a CPU."""
    return (
        peak_flops(torch.cuda.get_device_name(device))
        if device.type == "cuda"
        else None
    )


@dataclass
class ModelFlops:
    """The model FLOPs of one batch of one data rank.

    `forward` is what was counted; `training` three times that (the backward pass costs
    two forwards). `by_operator` splits `forward` by operator, as in {"aten.mm": ...}.
    """

    by_operator: dict[str, int] = field(default_factory=dict)

    @property
    def forward(self) -> int:
        return sum(self.by_operator.values())

    @property
    def training(self) -> int:
        return 3 * self.forward


class FlopMeasurement:
    """A counter of the model FLOPs of operations between `start` and `stop`, for
    example of a real first forward.

    Works on sharded models (their parameters are whole while a unit computes) and costs
    some time per operator, so it is meant for one batch. Use `start`/`stop`, or `with
    FlopMeasurement() as measured: model(batch)`.
    """

    def __init__(self) -> None:
        self.flops = ModelFlops()
        self._counter: FlopCounterMode | None = None

    def start(self) -> None:
        assert self._counter is None, "already started"
        # Reads the operators of everything that runs until `stop`.
        self._counter = FlopCounterMode(
            display=False, custom_mapping=_formulas_torch_lacks()
        )
        self._counter.__enter__()

    def stop(self) -> ModelFlops:
        assert self._counter is not None, "not started"
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        # The counter has a count for each module, too; "Global" is the whole.
        counts = counter.get_flop_counts().get("Global", {})
        self.flops = ModelFlops(
            {str(operator): int(count) for operator, count in counts.items()}
        )
        return self.flops

    def __enter__(self) -> FlopMeasurement:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def count_model_flops(
    model: nn.Module,
    batch: Any,
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> ModelFlops:
    """Count the model FLOPs of a forward pass on `batch` without computing it:
    everything runs on the meta device.

    Args:
        model: real or on meta, not sharded yet; it is neither changed nor copied.
        batch: any nest of tensors (only shapes and dtypes count), on any device.
        forward: (model, batch) -> anything; by default the batch is passed as the
            model's arguments: a dict as keywords, a tuple or list as positions.

    Raises:
        ValueError: the model is sharded already.
        RuntimeError: the forward pass looks at values, which meta tensors do not have.
    """
    # A sharded model has parameters without values, whose shapes are not the model's.
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "count_model_flops needs the model before it is sharded; count a real forward of a sharded one: "
            "with FlopMeasurement() as measured: model(batch)"
        )

    def to_meta(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta")

    # A module, so that functional_call can replace parameters by meta ones.
    call = _Call(model, forward or call_with)
    named = itertools.chain(call.named_parameters(), call.named_buffers())
    tensors = {name: to_meta(tensor.detach()) for name, tensor in named}
    meta_batch = map_tensors(batch, to_meta, MutableMapping)
    measured = FlopMeasurement()
    try:
        # Shapes and dtypes are all that is needed: nothing is computed.
        with torch.no_grad(), torch.device("meta"), measured:
            torch.func.functional_call(call, tensors, (meta_batch,))
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} does not run on the meta device ({type(error).__name__}: {error}); count a real "
            "forward instead: with FlopMeasurement() as measured: model(batch)"
        ) from error
    return measured.flops


class _Call(nn.Module):
    """Makes a free function of a model something that `functional_call` can call."""

    def __init__(
        self, model: nn.Module, function: Callable[[nn.Module, Any], object]
    ) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, batch: Any) -> object:
        return self.function(self.model, batch)


def _formulas_torch_lacks() -> dict[Any, Callable[..., int]]:
    """Return FLOP formulas that FlopCounterMode (torch 2.13) lacks: attention on CPU,
    and grouped products of mixture-of-experts layers.
    """

    # By name, so that an operator that torch does not have is passed over.
    formulas: dict[str, Callable[..., int]] = {}

    def attention(
        query: Any,
        key: Any,
        value: Any,
        *args: Any,
        out_shape: Any = None,
        **kwargs: Any,
    ) -> int:
        batch, heads, queries, width = query
        keys, value_width = key[2], value[3]
        return 2 * batch * heads * queries * keys * (width + value_width)

    def grouped_product(
        a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any
    ) -> int:
        # The groups split one of the three dimensions between them, unless both
        # operands have a group dimension
        groups = a[0] if len(a) == len(b) == 3 else 1
        return 2 * groups * a[-2] * a[-1] * b[-1]

    formulas |= {
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_fused_attention_overrideable": attention,
        "_grouped_mm": grouped_product,
    }
    return {
        getattr(torch.ops.aten, name): f
        for name, f in formulas.items()
        if hasattr(torch.ops.aten, name)
    }


@dataclass(frozen=True)
class Throughput:
    """The rates of the whole job; None where an input of the rate is not known."""

    samples_per_second: float
    tokens_per_second: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Return the known rates by name, for loggers."""
        return {name: value for name, value in vars(self).items() if value is not None}


class StepMeter:
    """A meter of rates over the last steps.

    Args:
        data_size: data ranks, that is ranks that read different samples
            (`SmpMesh.data_size`).
        world_size: all ranks; each is one device.
        peak_flops_per_device: in FLOP/s, for MFU; None: MFU is not reported.
        window: how many steps the rates are averaged over.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        data_size: int = 1,
        world_size: int = 1,
        peak_flops_per_device: float | None = None,
        window: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1:
            raise ValueError(
                f"window={window} is not a number of steps; allowed: 1 and more"
            )
        if not 1 <= data_size <= world_size:
            raise ValueError(
                f"data_size={data_size} must be between 1 and world_size={world_size}"
            )
        self.data_size = data_size
        self.world_size = world_size
        self.peak_flops_per_device = peak_flops_per_device
        self.samples = 0
        """Samples of the whole job since the meter was made."""
        self._clock = clock
        self._pauses = 0.0
        self._paused_at: float | None = None
        # (end of step, samples, tokens, flops) of data rank 0; the first entry only
        # marks where the window begins
        self._steps: deque[tuple[float, int, int | None, float | None]] = deque(
            maxlen=window + 1
        )

    def start(self) -> None:
        """Begin a new window now: before the first step, and after anything that should
        not count."""
        self._steps.clear()
        self._steps.append((self._now(), 0, None, None))

    def step(
        self, samples: int, tokens: int | None = None, flops: float | None = None
    ) -> None:
        """Count a step that has just ended. All figures are of this data rank's batch,
        unsplit sequences.

        Args:
            samples: samples in the batch.
            tokens: tokens in the batch.
            flops: model FLOPs of the batch (`ModelFlops.training`).
        """
        if not self._steps:
            raise RuntimeError("StepMeter.start() was not called before the first step")
        # In the units of the rates: samples of all data ranks.
        self.samples += samples * self.data_size
        self._steps.append((self._now(), samples, tokens, flops))

    def pause(self) -> None:
        """Stop the clock until `resume`: for validation or a checkpoint."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._pauses += self._clock() - self._paused_at
            self._paused_at = None

    def throughput(self) -> Throughput | None:
        """Return rates over the window; None before the first step. Other data ranks
        are taken to do as much as this one.
        """
        if len(self._steps) < 2:
            return None
        # The window begins where the first entry says.
        seconds = self._steps[-1][0] - self._steps[0][0]
        if seconds <= 0:
            return None
        _, samples, tokens, flops = zip(*list(self._steps)[1:], strict=True)
        # Rates of all data ranks: each does as much as this one.
        per_second = self.data_size / seconds
        tokens_per_second = None if None in tokens else sum(tokens) * per_second
        tflops = mfu = None
        # Model FLOPs over all devices: MFU is a share of what they could do.
        if None not in flops:
            achieved = sum(flops) * per_second / self.world_size
            tflops = achieved / 1e12
            if self.peak_flops_per_device is not None:
                mfu = achieved / self.peak_flops_per_device
        return Throughput(
            samples_per_second=sum(samples) * per_second,
            tokens_per_second=tokens_per_second,
            tflops_per_device=tflops,
            mfu=mfu,
        )

    def _now(self) -> float:
        # While the clock stands still, now is when it was stopped.
        return (
            self._clock() if self._paused_at is None else self._paused_at
        ) - self._pauses


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Return the highest memory use so far in GiB, under a name that tells the kind of
    memory.

    On CUDA "peak_device_memory_gib", the allocator's peak since
    `torch.cuda.reset_peak_memory_stats`; elsewhere "peak_host_rss_gib", the resident
    set of this process since it started (not of its data loader workers).
    """
    # The allocator's peak since it was last started anew.
    if device.type == "cuda":
        return {"peak_device_memory_gib": torch.cuda.max_memory_allocated(device) / GIB}
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_host_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * unit
        / GIB
    }
