"""FastestKernel: several attention kernels are measured once for each kind of call, and
the fastest is used from then on.

Kernels differ by tens of percent, and which one wins depends on the device, the lengths
and the heads. The first call of a kind runs every kernel that takes it, forward and
backward, on the call's own tensors: what differs from the first kernel's numbers by
more than rounding, or raises, is left out with a warning; of the others the fastest is
kept until the process ends. No random numbers are drawn. This makes the host wait for
the device, once for each kind.

torch's own switches decide between which kernels there is a choice
(:mod:`smp_core.context_parallel.kernels`).

Shape letters: B rows, L queries, M keys, H query heads, K key and value heads, D head
size, E head size of values.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")

Segments = Sequence[tuple[int, int]]
Tensors = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""
# Largest difference between two kernels over the largest value, in units of the dtype's
# own rounding: the output once, gradients twice as much.
_OUTPUT = 4
_GRADIENTS = 8
_LSE = 1e-3
_RESULTS = (
    "output",
    "LSE",
    "gradient of queries",
    "gradient of keys",
    "gradient of values",
)


class Masks(NamedTuple):
    """The mask of a call: what a kernel is given beside tensors.

    Attributes:
        segments: queries and keys of each document.
        scale: factor of the products of queries and keys.
        causal: whether a query sees the keys up to its own only, aligned at the
            document's end.
        window: how many of these it sees, its own included; None: all.
    """

    segments: Segments
    scale: float
    causal: bool
    window: int | None


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute attention.

    Attributes:
        forward: (queries [B, L, H, D], keys [B, M, K, D], values [B, M, K, E], masks)
            -> output [B, L, H, E] and LSE [B, H, L].
        backward: (gradient, queries, keys, values, output, LSE, masks) -> the gradients
            of queries, keys and values.
        takes: whether it can be called with (queries, keys, values, masks), whatever
            their head sizes, which are padded.
        multiple: of which the head sizes have to be multiples.
        one_size: whether D and E have to be the same.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensors]
    takes: Callable[..., bool] = lambda *_: True
    multiple: int = 1
    one_size: bool = False

    def padded(self, *tensors: Tensor) -> list[Tensor]:
        """Pad every head with zeros to a size that the kernel takes.

        Zeros behind shorter heads change no score and no sum; their results are cut off
        again.
        """
        # Kernels of one head size get keys and values padded to the larger of the two.
        largest = max(tensor.shape[-1] for tensor in tensors)
        found = []
        for tensor in tensors:
            wanted = largest if self.one_size else tensor.shape[-1]
            missing = -(-wanted // self.multiple) * self.multiple - tensor.shape[-1]
            found.append(F.pad(tensor, (0, missing)) if missing else tensor)
        return found


class Kind(NamedTuple):
    """Calls that one measurement holds for. Numbers of tokens are rounded up to a power
    of two: batches of other lengths are no reason to measure again."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    queries: int
    keys: int
    heads: tuple[int, int]
    sizes: tuple[int, int]
    documents: bool
    causal: bool
    window: bool
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        masks = [
            name for name in ("causal", "window", "documents") if getattr(self, name)
        ]
        return (
            f"attention of up to {self.queries} x {self.keys} tokens, {self.rows} rows, heads {self.heads} of "
            f"{self.sizes}, {self.dtype}{''.join(f', {mask}' for mask in masks)}, on {self.device}"
        )


def kind_of(tensors: Tensors, masks: Masks, kernels: Sequence[Kernel]) -> Kind:
    """Return the kind of a call."""
    q_BLHD, k_BMKD, v_BMKE = tensors
    # Rounded up to a power of two.
    queries, keys = (
        1 << (tensor.shape[1] - 1).bit_length() for tensor in (q_BLHD, k_BMKD)
    )
    return Kind(
        q_BLHD.device,
        q_BLHD.dtype,
        len(q_BLHD),
        queries,
        keys,
        (q_BLHD.shape[2], k_BMKD.shape[2]),
        (q_BLHD.shape[3], v_BMKE.shape[3]),
        len(masks.segments) > 1,
        masks.causal,
        masks.window is not None,
        tuple(kernel.name for kernel in kernels),
    )


def milliseconds_on_device(work: Callable[[], object]) -> float:
    """Measure the present stream's milliseconds for ``work``, the median of three."""
    times = []
    # The median leaves out a run that something else on the device has slowed.
    for _ in range(3):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class FastestKernel:
    """The kernels that were chosen so far.

    Args:
        milliseconds: measures a function.

    Attributes:
        measured: kind -> kernel's name -> milliseconds forward and backward, or why it
            was left out.
    """

    def __init__(
        self,
        milliseconds: Callable[[Callable[[], object]], float] = milliseconds_on_device,
    ) -> None:
        self.measured: dict[Kind, dict[str, float | str]] = {}
        self._chosen: dict[Kind, Kernel] = {}
        self._milliseconds = milliseconds

    def run(
        self,
        kind: Kind,
        kernels: Sequence[Kernel],
        both_ways: Callable[[Kernel], Sequence[Tensor]],
        work: Callable[[Kernel], Any],
    ) -> Any:
        """Return ``work(kernel)`` with the fastest kernel; with the first, if another
        raises all at once.

        Args:
            kernels: the first is the one to trust.
            both_ways: runs forward and backward; the results in the order of
                ``_RESULTS``.
        """
        if kind not in self._chosen:
            # Measuring needs results of two kernels side by side; without memory for
            # that, the first one runs.
            try:
                self._chosen[kind] = self._choose(kind, kernels, both_ways)
            except torch.OutOfMemoryError:
                logger.warning(
                    "%s: no memory to measure kernels side by side: %s",
                    kind,
                    kernels[0].name,
                )
                self._chosen[kind], self.measured[kind] = kernels[0], {}
        kernel = self._chosen[kind]
        # A kernel may take the measured call and refuse another one of the same kind
        # (other lengths).
        try:
            return work(kernel)
        except RuntimeError as error:
            if kernel is kernels[0] or isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning(
                "%s: %s raised, %s takes its place: %s",
                kind,
                kernel.name,
                kernels[0].name,
                _short(error),
            )
            self.measured[kind][kernel.name] = _short(error)
            self._chosen[kind] = kernels[0]
            return work(kernels[0])

    def _choose(
        self,
        kind: Kind,
        kernels: Sequence[Kernel],
        both_ways: Callable[[Kernel], Sequence[Tensor]],
    ) -> Kernel:
        """Measure all kernels, and say which one it is to be."""
        first, *others = kernels
        found: dict[str, float | str] = {}
        # The first kernel's numbers are what the others are compared with.
        expected = both_ways(first)
        found[first.name] = self._milliseconds(lambda: both_ways(first))
        best = first
        for kernel in others:
            found[kernel.name] = self._tried(kernel, both_ways, expected)
            if isinstance(found[kernel.name], str):
                logger.warning(
                    "%s: %s is left out: %s", kind, kernel.name, found[kernel.name]
                )
            elif found[kernel.name] < found[best.name]:  # type: ignore[operator]
                best = kernel
        self.measured[kind] = found
        # Said once for each kind, by one rank.
        times = ", ".join(
            f"{name} {ms:.3f} ms"
            for name, ms in found.items()
            if not isinstance(ms, str)
        )
        logger.log(
            logging.INFO if is_rank_0() else logging.DEBUG,
            "%s: %s, of %s",
            kind,
            best.name,
            times,
        )
        return best

    def _tried(
        self,
        kernel: Kernel,
        both_ways: Callable[[Kernel], Sequence[Tensor]],
        expected: Sequence[Tensor],
    ) -> float | str:
        """Return a kernel's milliseconds, or why it is none to choose."""
        try:
            wrong = difference(both_ways(kernel), expected)
            return wrong or self._milliseconds(lambda: both_ways(kernel))
        except RuntimeError as error:
            return _short(error)


def difference(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Say which result is further from what was expected than two kernels' rounding
    explains; "": none."""
    # Differences are measured against the largest value, as small values carry its
    # rounding.
    for name, one, other in zip(_RESULTS, seen, expected, strict=True):
        rounding = torch.finfo(other.dtype).eps
        limits = {"LSE": _LSE, "output": _OUTPUT * rounding}
        limit = limits.get(name, _GRADIENTS * rounding)
        wide = torch.promote_types(other.dtype, torch.float32)
        largest = other.abs().max().to(wide).clamp(min=torch.finfo(torch.float32).tiny)
        apart = (one.to(wide) - other.to(wide)).abs().max() / largest
        if not apart <= limit:  # nan is wrong too
            return f"its {name} is off by {apart.item():.2g} of the largest value"
    return ""


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
