"""Payloads smaller than their tensors: bfloat16, and blocks of 256 elements that share
a scale (int8, int4, fp8).

Blockwise quantisation as in ZeRO++ (arXiv 2306.10209, 3.1): every block of 256 elements
is divided by a float32 scale, its largest magnitude over the largest code, and rounded
to the nearest code. A payload is bytes: the scales first, then the codes, padded to a
multiple of 16. A block that holds inf or nan gets a scale that is not finite, so that
the receiver of a payload sees it too.

Error bound per element, with a = the block's largest magnitude: int8 a/254, int4 a/14,
fp8 (e4m3) 2**-4 of the element or a * 2**-18, whichever is larger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_core.torch_facts import device_multiplies_fp8, has_triton, streams

BLOCK = 256
ALIGN = 16

CodeName = Literal["int8", "int4", "fp8", "bfloat16"]
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


class Codec(ABC):
    """A way to turn ``n`` elements into bytes and back."""

    name: CodeName

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes of the payload of ``n`` elements."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
        """Compress ``values`` [n] into ``out`` uint8 [size(n)].

        Args:
            rest: [n], what was rounded off before (error feedback). ``values`` become
                the sum of both, ``rest`` what is rounded off that, or 0 where the
                payload cannot stand for its values.
        """

    @abstractmethod
    def decode(self, payloads: Tensor, out: Tensor) -> None:
        """Decompress ``payloads`` uint8 [size(n)] or [rows, size(n)] into ``out`` [n]
        or [rows, n], in its dtype."""

    @abstractmethod
    def finite_in(self, payloads: Tensor, n: int) -> Tensor:
        """Return whether payloads [..., size(n)] can stand for their values, bool
        [...]: not if a block had inf or nan."""

    def sum_rows(
        self, payloads: Tensor, own: Tensor, me: int, exact: Mapping[int, Tensor]
    ) -> Tensor:
        """Return the sum of rows in their order, in ``own``'s dtype: ``own`` [n] in the
        place ``me``, ``exact``'s in theirs, the others decoded from ``payloads`` [rows,
        size(n)]."""
        kernels = self._kernels(own)
        # Terms that came exactly are in no payload, so the kernel cannot see them.
        if kernels is not None and not exact:
            total = torch.empty_like(own)
            kernels.sum_rows(self.name, BLOCK, payloads, own, me, total)
            return total
        # In the order of ranks, so that all owners round alike.
        total, term = torch.zeros_like(own), torch.empty_like(own)
        for i, payload in enumerate(payloads):
            if i != me and i not in exact:
                self.decode(payload, term)
            total += own if i == me else exact.get(i, term)
        return total

    def _kernels(self, tensor: Tensor) -> Any:
        """Return the module of kernels, if they can do it: they compute in float32."""
        # They would round float64, and take no empty tensors.
        if (
            tensor.device.type != "cuda"
            or tensor.dtype == torch.float64
            or not tensor.numel()
            or not has_triton()
        ):
            return None
        if self.name == "fp8" and not device_multiplies_fp8(tensor.device):
            return None  # Triton knows E4M3 from the devices on that have it
        from smp_core.codecs import triton_codec

        return triton_codec

    def _keep_rest(self, values: Tensor, payload: Tensor, rest: Tensor) -> None:
        # What the receiver will see, and what is missing to the value.
        self.decode(payload, rest)
        torch.sub(values, rest, out=rest)
        self._drop_rest(payload, rest)

    def _drop_rest(self, payload: Tensor, rest: Tensor) -> None:
        """Keep nothing of values that cannot be compressed: they are sent exactly, or
        the sum is not finite."""
        finite = self.finite_in(payload, rest.numel())
        # There asking would be waiting.
        if streams.run_behind(rest.device) or not finite:
            rest.masked_fill_(~finite, 0.0)


class Bfloat16(Codec):
    """Half of float32's bytes; inf and nan travel as they are. On CUDA one Triton kernel
    adds payloads up."""

    name = "bfloat16"

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, values: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
        if rest is not None:
            values += rest
        out.view(torch.bfloat16).copy_(values)
        if rest is not None:
            self._keep_rest(values, out, rest)

    def decode(self, payloads: Tensor, out: Tensor) -> None:
        out.copy_(payloads.view(torch.bfloat16))

    def finite_in(self, payloads: Tensor, n: int) -> Tensor:
        return torch.ones(payloads.shape[:-1], dtype=torch.bool, device=payloads.device)


class Blockwise(Codec):
    """Codes with one float32 scale per block: by one Triton kernel each way on CUDA,
    where Triton is there (:mod:`smp_core.codecs.triton_codec`), by the formulas below
    everywhere else."""

    def __init__(self, name: Literal["int8", "int4", "fp8"]) -> None:
        self.name = name

    def size(self, n: int) -> int:
        codes = -(-n // 2) if self.name == "int4" else n
        return -(-(4 * self._blocks(n) + codes) // ALIGN) * ALIGN

    def encode(self, values: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
        # The kernel does it all in one pass, remainders included.
        kernels = self._kernels(values)
        if kernels is not None:
            kernels.encode(self.name, _LARGEST[self.name], BLOCK, values, rest, out)
            if rest is not None:
                self._drop_rest(out, rest)
            return
        # By formulas: first the remainder of before joins the values.
        if rest is not None:
            values += rest
        self._encode(values, out)
        if rest is not None:
            self._keep_rest(values, out, rest)

    def decode(self, payloads: Tensor, out: Tensor) -> None:
        kernels = self._kernels(out)
        # The kernel takes rows; one payload is one row.
        if kernels is not None:
            rows = (payloads, out) if out.ndim == 2 else (payloads[None], out[None])
            kernels.decode(self.name, BLOCK, *rows)
        elif out.ndim == 1:
            self._decode(payloads, out)
        else:
            for payload, values in zip(payloads, out, strict=True):
                self._decode(payload, values)

    def finite_in(self, payloads: Tensor, n: int) -> Tensor:
        return (
            payloads[..., : 4 * self._blocks(n)].view(torch.float32).isfinite().all(-1)
        )

    def _encode(self, values: Tensor, out: Tensor) -> None:
        # Half precision is scaled in float32; a last block is filled up with zeros.
        n, blocks = values.numel(), self._blocks(values.numel())
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        if n % BLOCK:
            values = F.pad(values, (0, blocks * BLOCK - n))
        rows = values.view(blocks, BLOCK)
        low, high = rows.aminmax(dim=1)
        largest = torch.maximum(high, low.neg_())
        # By a tensor: by a Python number CUDA multiplies with the reciprocal, which
        # rounds once more.
        scales = (largest / largest.new_full((), _LARGEST[self.name])).to(torch.float32)
        # A block of zeros has a scale of zero, which nothing can be divided by.
        divisor = (
            scales.clamp(min=torch.finfo(torch.float32).tiny)
            .to(rows.dtype)
            .unsqueeze(1)
        )
        out[: 4 * blocks].view(torch.float32).copy_(scales)
        scaled = rows / divisor
        if self.name == "fp8":
            limit = _LARGEST["fp8"]
            codes = (
                scaled.clamp_(-limit, limit)
                .to(torch.float32)
                .to(torch.float8_e4m3fn)
                .view(torch.uint8)
                .flatten()
            )
        else:
            limit = _LARGEST[self.name]
            codes = (
                scaled.round_()
                .clamp_(-limit, limit)
                .nan_to_num_(0.0)
                .to(torch.int8)
                .flatten()
            )
            if self.name == "int4":
                # Two codes in a byte, the even one in the lower half.
                codes = (codes[0::2] & 15) | (codes[1::2] << 4)
            codes = codes.view(torch.uint8)
        used = -(-n // 2) if self.name == "int4" else n
        out[4 * blocks : 4 * blocks + used].copy_(codes[:used])

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        n, blocks = out.numel(), self._blocks(out.numel())
        scales = payload[: 4 * blocks].view(torch.float32)
        used = -(-n // 2) if self.name == "int4" else n
        codes = payload[4 * blocks : 4 * blocks + used]
        if self.name == "fp8":
            values = codes.view(torch.float8_e4m3fn).to(torch.float32)
        elif self.name == "int4":
            # Shifted left and right again, the lower half of a byte keeps its sign.
            pairs = codes.view(torch.int8)
            values = torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=1).flatten()[:n]
        else:
            values = codes.view(torch.int8)
        # All full blocks at once, then the rest of the last one.
        whole = n - n % BLOCK
        # Always the float32 product, rounded once, whatever dtype the caller wants: all
        # decoders agree.
        target = (
            out
            if out.dtype == torch.float32
            else torch.empty(n, dtype=torch.float32, device=out.device)
        )
        torch.mul(
            values[:whole].view(-1, BLOCK),
            scales[: whole // BLOCK, None],
            out=target[:whole].view(-1, BLOCK),
        )
        if whole < n:
            torch.mul(values[whole:], scales[-1], out=target[whole:])
        if target is not out:
            out.copy_(target)

    @staticmethod
    def _blocks(n: int) -> int:
        return -(-n // BLOCK)


def codec(name: CodeName) -> Codec:
    """Return the codec of a knob's value."""
    return Bfloat16() if name == "bfloat16" else Blockwise(name)
