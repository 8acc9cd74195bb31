"""Payloads smaller than their tensors: bfloat16, and blocks of 256 elements that share a scale (int8, int4, fp8).

Blockwise quantisation as in ZeRO++ (arXiv 2306.10209, 3.1): every block of 256 elements is divided by a float32 scale,
its largest magnitude over the largest code, and rounded to the nearest code. A payload is bytes: the scales first, then
the codes, padded to a multiple of 16. A block that holds inf or nan gets a scale that is not finite, so that whoever
decodes a payload sees it too.

Error bound per element, with a = the block's largest magnitude: int8 a/254, int4 a/14, fp8 (e4m3) 2**-4 of the element
or a * 2**-18, whichever is larger.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F

BLOCK = 256
_ALIGN = 16

CodeName = Literal["int8", "int4", "fp8", "bfloat16"]
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


class Codec(Protocol):
    """How ``n`` elements become bytes and back."""

    def size(self, n: int) -> int:
        """Bytes of the payload of ``n`` elements."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """``values`` [n] into ``out`` uint8 [size(n)]."""

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """``payload`` uint8 [size(n)] into ``out`` [n], in its dtype."""

    def exact_in(self, payload: torch.Tensor, n: int) -> bool:
        """Whether the payload can stand for its values: False if a block had inf or nan in it."""


class Bfloat16:
    """Half of float32's bytes; inf and nan travel as they are."""

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.view(torch.bfloat16))

    def exact_in(self, payload: torch.Tensor, n: int) -> bool:
        return True


class Blockwise:
    """Codes with one float32 scale per block."""

    def __init__(self, name: Literal["int8", "int4", "fp8"]) -> None:
        self.name = name

    def size(self, n: int) -> int:
        codes = -(-n // 2) if self.name == "int4" else n
        return -(-(4 * self._blocks(n) + codes) // _ALIGN) * _ALIGN

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        n, blocks = values.numel(), self._blocks(values.numel())
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        if n % BLOCK:
            values = F.pad(values, (0, blocks * BLOCK - n))
        rows = values.view(blocks, BLOCK)
        low, high = rows.aminmax(dim=1)
        largest = torch.maximum(high, low.neg_())
        scales = (largest / _LARGEST[self.name]).to(torch.float32)
        divisor = scales.clamp(min=torch.finfo(torch.float32).tiny).to(rows.dtype).unsqueeze(1)
        out[: 4 * blocks].view(torch.float32).copy_(scales)
        scaled = rows / divisor
        if self.name == "fp8":
            limit = _LARGEST["fp8"]
            codes = scaled.clamp_(-limit, limit).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
        else:
            limit = _LARGEST[self.name]
            codes = scaled.round_().clamp_(-limit, limit).nan_to_num_(0.0).to(torch.int8).flatten()
            if self.name == "int4":
                codes = (codes[0::2] & 15) | (codes[1::2] << 4)
            codes = codes.view(torch.uint8)
        used = -(-n // 2) if self.name == "int4" else n
        out[4 * blocks : 4 * blocks + used].copy_(codes[:used])

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        n, blocks = out.numel(), self._blocks(out.numel())
        scales = payload[: 4 * blocks].view(torch.float32)
        used = -(-n // 2) if self.name == "int4" else n
        codes = payload[4 * blocks : 4 * blocks + used]
        if self.name == "fp8":
            values = codes.view(torch.float8_e4m3fn).to(torch.float32)
        elif self.name == "int4":
            pairs = codes.view(torch.int8)
            values = torch.stack(((pairs << 4) >> 4, pairs >> 4), dim=1).flatten()[:n]
        else:
            values = codes.view(torch.int8)
        whole = n - n % BLOCK
        # Always the float32 product, rounded once, whatever dtype the caller wants: all decoders agree.
        target = out if out.dtype == torch.float32 else torch.empty(n, dtype=torch.float32, device=out.device)
        torch.mul(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None], out=target[:whole].view(-1, BLOCK))
        if whole < n:
            torch.mul(values[whole:], scales[-1], out=target[whole:])
        if target is not out:
            out.copy_(target)

    def exact_in(self, payload: torch.Tensor, n: int) -> bool:
        return bool(payload[: 4 * self._blocks(n)].view(torch.float32).isfinite().all())

    @staticmethod
    def _blocks(n: int) -> int:
        return -(-n // BLOCK)


def codec(name: CodeName) -> Codec:
    """The codec of a knob's value."""
    return Bfloat16() if name == "bfloat16" else Blockwise(name)
