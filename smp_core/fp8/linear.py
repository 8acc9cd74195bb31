"""The linear layers whose three matrix products run in FP8.

Forward casts the input and the weight, backward the gradient; the input is kept for
backward in FP8, half the bytes of bfloat16. A layer keeps its class (as a base class),
its parameters and their names, so that state dicts, initialisers and adapters work as
before: only ``forward`` is another one.

Shape letters: R rows (all leading dims of the input flattened), K inputs, N outputs, E
experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smp_core.fp8.casting import Quantized, quantize, transposed
from smp_core.fp8.gathered import GatheredWeight
from smp_core.fp8.products import (
    forward_product,
    input_gradient,
    needs_columns,
    weight_gradient,
)
from smp_core.fp8.scaling import GRADIENT, INPUT, WEIGHT, Fp8State
from smp_core.torch_facts import depends_on

SITES = "fp8_sites"
"""Attribute of a converted module: its sites by parameter name."""


@dataclass(eq=False)
class Fp8Site:
    """A weight with its row in the state."""

    state: Fp8State
    index: int
    name: str

    def quantize_weight(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight's FP8 numbers, of its own shape, and their inverse
        scale."""
        if isinstance(weight, GatheredWeight):
            return weight.data8, weight.inverse_scale
        # Fused experts are cast as one matrix: all share a scale.
        flat = weight.detach().reshape(-1, weight.shape[-1])
        cast = quantize(flat, self.state, self.index, WEIGHT, recording=False)
        assert cast.rows is not None
        return cast.rows.view(weight.shape), cast.inverse_scale


class _Fp8Linear(torch.autograd.Function):
    """A product ``y[R, N]`` of ``x[R, K]`` and a weight ``[N, K]`` (``[K, N]`` with
    ``flipped``)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_RK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: Fp8Site,
        flipped: bool,
        dtype: torch.dtype,
        recording: bool,
    ) -> Tensor:
        # The weight's gradient reads the input once more: on the device its transpose,
        # and then only that is kept.
        wants_w = recording and ctx.needs_input_grad[1]
        columns = wants_w and needs_columns(x_RK.device)
        x = quantize(
            x_RK.detach(),
            site.state,
            site.index,
            INPUT,
            columns=columns,
            recording=recording,
        )
        w = _oriented(*site.quantize_weight(weight), flipped)
        y_RN = depends_on(forward_product(x, w, dtype, bias), x_RK, weight)
        kept = x.columns if columns else x.rows
        # A gathered weight is saved as the parameter: FSDP2 frees it now and gathers it
        # again for backward.
        gathered = isinstance(weight, GatheredWeight)
        saved_w: Any = weight
        inverse_w = None
        if not gathered:
            saved_w = w.columns if flipped else w.rows
            inverse_w = w.inverse_scale
        ctx.save_for_backward(
            kept if wants_w else None, x.inverse_scale, saved_w, inverse_w
        )
        ctx.site, ctx.flipped = site, flipped
        ctx.dtypes = x_RK.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_RN

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_RN: Tensor) -> Any:  # type: ignore[override]
        kept_x, inverse_x, weight, inverse_w = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        # Only the products that read a transpose need one made.
        columns = needs_columns(g_RN.device)
        g = quantize(
            g_RN, ctx.site.state, ctx.site.index, GRADIENT, columns=columns and wants_w
        )
        dx = dw = None
        # A gathered weight comes back from FSDP2's gather; another one was saved in
        # FP8.
        if wants_x:
            w8, inverse_w = (
                ctx.site.quantize_weight(weight)
                if inverse_w is None
                else (weight, inverse_w)
            )
            dx = input_gradient(
                g, _oriented(w8, inverse_w, ctx.flipped, backward=True), x_dtype
            )
        if wants_w:
            x = (
                Quantized(None, kept_x, inverse_x)
                if columns
                else Quantized(kept_x, None, inverse_x)
            )
            dw = weight_gradient(g, x, w_dtype)
            if ctx.flipped:
                dw = dw.t()
        # The bias adds the gradient itself, in high precision.
        db = g_RN.sum(0).to(bias_dtype) if wants_bias else None
        return dx, dw, db, None, None, None, None


def _oriented(
    w8: Tensor, inverse: Tensor, flipped: bool, backward: bool = False
) -> Quantized:
    """Return a weight as ``[N, K]``: stored in this form, or, ``flipped``, as its
    transpose, which backward reads."""
    if not flipped:
        return Quantized(w8, None, inverse)
    if not needs_columns(w8.device):
        return Quantized(w8.t(), w8, inverse)
    return Quantized(None if backward else transposed(w8), w8, inverse)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: Fp8Site,
    *,
    flipped: bool = False,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` in FP8.

    Args:
        x: ``[..., K]``, floating point.
        weight: ``[N, K]``, or ``[K, N]`` with ``flipped`` (Transformers' ``Conv1D``); a
            parameter or unsharded weight.

    Returns:
        ``[..., N]`` in autocast's dtype inside autocast, otherwise in ``x``'s.
    """
    # Autocast decides the dtype of the result, as for nn.Linear.
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    y_RN = _Fp8Linear.apply(
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        site,
        flipped,
        dtype,
        torch.is_grad_enabled(),
    )
    return y_RN.view(*x.shape[:-1], y_RN.shape[-1])


@contextlib.contextmanager
def unquantized() -> Iterator[None]:
    """Let FP8 linear layers compute in the dtype of their input inside, and record
    nothing."""

    def product(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: Fp8Site,
        *,
        flipped: bool = False,
    ) -> Tensor:
        return nn.functional.linear(x, weight.t() if flipped else weight, bias)

    # A global, because converted modules look the function up when they are called.
    global fp8_linear
    before, fp8_linear = fp8_linear, product
    try:
        yield
    finally:
        fp8_linear = before


class Float8Linear(nn.Linear):
    """A ``nn.Linear`` with FP8 products; made by :func:`smp_core.fp8.convert_to_fp8`,
    never by its constructor."""

    fp8_sites: dict[str, Fp8Site]

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.fp8_sites["weight"])


class _Conv1DForward:
    """The forward of Transformers' ``Conv1D``: a linear layer whose weight is stored as
    ``[K, N]``."""

    fp8_sites: dict[str, Fp8Site]
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(
            x, self.weight, self.bias, self.fp8_sites["weight"], flipped=True
        )


class _Fp8GroupedLinear(torch.autograd.Function):
    """A product ``y[R, N]`` of rows sorted by expert, each with its expert's ``[N, K]``
    part of a weight ``[E, N, K]``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_RK: Tensor,
        weight_ENK: Tensor,
        counts: Sequence[int],
        site: Fp8Site,
        dtype: torch.dtype,
        recording: bool,
    ) -> Tensor:
        x = quantize(x_RK.detach(), site.state, site.index, INPUT, recording=recording)
        w8_ENK, inverse_w = site.quantize_weight(weight_ENK)
        assert x.rows is not None
        # Each expert's rows by its own part of the weight.
        y_RN = x_RK.new_empty(x_RK.shape[0], weight_ENK.shape[1], dtype=dtype)
        for expert, rows in _groups(counts):
            y_RN[rows] = forward_product(
                Quantized(x.rows[rows], None, x.inverse_scale),
                Quantized(w8_ENK[expert], None, inverse_w),
                dtype,
                None,
            )
        # A gathered weight is saved as the parameter, which FSDP2 frees and gathers
        # again.
        gathered = isinstance(weight_ENK, GatheredWeight)
        ctx.save_for_backward(
            x.rows,
            x.inverse_scale,
            weight_ENK if gathered else w8_ENK,
            None if gathered else inverse_w,
        )
        ctx.site, ctx.counts, ctx.dtypes = site, counts, (x_RK.dtype, weight_ENK.dtype)
        return depends_on(y_RN, x_RK, weight_ENK)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_RN: Tensor) -> Any:  # type: ignore[override]
        x8_RK, inverse_x, weight, inverse_w = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        w8_ENK, inverse_w = (
            ctx.site.quantize_weight(weight)
            if inverse_w is None
            else (weight, inverse_w)
        )
        g = quantize(g_RN, ctx.site.state, ctx.site.index, GRADIENT)
        assert g.rows is not None
        columns = needs_columns(g_RN.device)
        wants_x, wants_w = ctx.needs_input_grad[:2]
        dx = (
            torch.empty(x8_RK.shape, dtype=x_dtype, device=g_RN.device)
            if wants_x
            else None
        )
        dw = (
            torch.zeros(w8_ENK.shape, dtype=w_dtype, device=g_RN.device)
            if wants_w
            else None
        )
        # Experts without rows have a gradient of zero.
        for expert, rows in _groups(ctx.counts):
            g8, x8 = g.rows[rows], x8_RK[rows]
            g_part = Quantized(
                g8, transposed(g8) if columns and wants_w else None, g.inverse_scale
            )
            if dx is not None:
                dx[rows] = input_gradient(
                    g_part, Quantized(w8_ENK[expert], None, inverse_w), x_dtype
                )
            if dw is not None:
                x_part = Quantized(x8, transposed(x8) if columns else None, inverse_x)
                dw[expert] = weight_gradient(g_part, x_part, w_dtype)
        return dx, dw, None, None, None, None


def _groups(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """List the experts that have rows, each with the slice of its rows."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, slice(start, start + count)))
        start += count
    return groups


class _ExpertsForward:
    """The forward of fused experts in Transformers' mixture-of-experts models.

    Gate and up projections are one ``[E, 2I, K]`` parameter, down projections one ``[E,
    K, I]``; an expert computes ``down(act(gate(x)) * up(x))``.
    """

    fp8_sites: dict[str, Fp8Site]
    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Any
    num_experts: int

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Compute ``[R, K]`` from ``hidden_states[R, K]``, the chosen experts and their
        weights ``[R, top_k]``."""
        # Rows sorted by expert, so that each expert's are one stretch.
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        # Experts of other ranks have the number after the last one; their rows are left
        # out. The host waits for the counts: products of each expert's rows are
        # launched one by one.
        experts = torch.arange(
            self.num_experts + 1, dtype=chosen.dtype, device=chosen.device
        )
        counts = torch.searchsorted(chosen[order], experts).diff().tolist()
        order = order[: sum(counts)]
        token = order // top_k_index.shape[-1]
        x = hidden_states[token]
        gate, up = self._grouped(x, self.gate_up_proj, counts, "gate_up_proj").chunk(
            2, dim=-1
        )
        y = self._grouped(self.act_fn(gate) * up, self.down_proj, counts, "down_proj")
        # Each token adds up what its experts gave, by the router's weights.
        y = y * top_k_weights.reshape(-1)[order, None]
        result = torch.zeros_like(hidden_states)
        return result.index_add(0, token, y.to(result.dtype))

    def _grouped(
        self, x: Tensor, weight: Tensor, counts: list[int], name: str
    ) -> Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        return _Fp8GroupedLinear.apply(
            x, weight, counts, self.fp8_sites[name], dtype, torch.is_grad_enabled()
        )


@functools.cache
def fp8_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class with FP8 products for modules of class ``kind``, from which it
    inherits.

    Raises:
        KeyError: there is none.
    """
    if kind is nn.Linear:
        return Float8Linear
    forwards: dict[str, type] = {"Conv1D": _Conv1DForward}
    forward = forwards.get(kind.__name__) or (
        _ExpertsForward if kind.__name__.endswith("Experts") else None
    )
    if forward is None:
        raise KeyError(kind.__name__)
    return type(
        f"Float8{kind.__name__}", (forward, kind), {"__module__": kind.__module__}
    )
