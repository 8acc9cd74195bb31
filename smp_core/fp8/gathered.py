"""GatheredWeight: a weight that was gathered in FP8, seen as a tensor of the
parameters' dtype.

A sharded parameter gives FSDP2 the tensor to gather (``fsdp_pre_all_gather``), and
makes the unsharded parameter of the gathered one (``fsdp_post_all_gather``). Gathered
is the shard cast with the scale all ranks share, as uint8 (gloo knows no FP8), half the
bytes of bfloat16. The unsharded parameter must look like one in high precision, so that
its gradient is one: it is this wrapper. FP8 products read :attr:`GatheredWeight.data8`;
any other operation sees the dequantised values.

The wrapper exists only while a unit is unsharded. Sharded parameters, hence state dicts
and checkpoints, are plain DTensors.

``_make_wrapper_subclass`` is torch's documented way to make such a tensor, and
``_pytree`` maps over an operation's arguments; neither has a public name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_core.fp8.casting import cast_eager
from smp_core.fp8.scaling import WEIGHT, Fp8State


class GatheredWeight(Tensor):
    """A tensor of value ``data8 * inverse_scale``, of ``data8``'s shape and the dtype
    given.

    Views of all of it have one scale: a new one, of the next gather, is that of all of
    them, as its bytes are.
    """

    data8: Tensor
    _scale: list[Tensor]

    # Operations arrive in __torch_dispatch__ below; results are plain tensors, not
    # wrapped again.
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, data8: Tensor, inverse_scale: Tensor, dtype: torch.dtype
    ) -> GatheredWeight:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data8.shape, strides=data8.stride(), dtype=dtype, device=data8.device
        )

    def __init__(
        self, data8: Tensor, inverse_scale: Tensor, dtype: torch.dtype
    ) -> None:
        self.data8, self._scale = data8, [inverse_scale]

    @property
    def inverse_scale(self) -> Tensor:
        return self._scale[0]

    def scale_by(self, inverse_scale: Tensor) -> None:
        """Take another scale, for new bytes in the same storage."""
        self._scale[0] = inverse_scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["data8"], inner["inverse_scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view of all of it stays a gathered weight; any other view reads values.
        if func in _SAME_TENSOR:
            weight = args[0]
            if func is torch.ops.aten.as_strided.default:
                size, stride = tuple(args[1]), tuple(args[2])
                if size != tuple(weight.shape) or stride != weight.stride():
                    return func(dequantize(weight), *args[1:], **kwargs)
            if func is torch.ops.aten.view.default and tuple(args[1]) != tuple(
                weight.shape
            ):
                return func(dequantize(weight), *args[1:], **kwargs)
            view = GatheredWeight(weight.data8, weight.inverse_scale, weight.dtype)
            view._scale = weight._scale
            return view
        # A gradient of nothing, perhaps of a weight that is freed.
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(
                args[0].shape,
                dtype=kwargs.get("dtype") or args[0].dtype,
                device=args[0].device,
            )
        # Any other operation reads the dequantised values.
        args, kwargs = pytree.tree_map_only(GatheredWeight, dequantize, (args, kwargs))
        return func(*args, **kwargs)


# The operations by which FSDP2 and nn.Parameter make a parameter of a tensor, and
# DTensor shows its local one.
_SAME_TENSOR = (
    *(torch.ops.aten.as_strided.default, torch.ops.aten.detach.default),
    *(torch.ops.aten.alias.default, torch.ops.aten.view.default),
)


def dequantize(weight: GatheredWeight) -> Tensor:
    """Return the values as a plain tensor."""
    return (weight.data8.float() * weight.inverse_scale).to(weight.dtype)


class WeightGather:
    """The FP8 form of one weight in an all-gather, for FSDP2.

    Args:
        state, site: the state and the site whose weight scale is used.
    """

    def __init__(self, state: Fp8State, site: int) -> None:
        self._state, self._site = state, site

    def pack(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return uint8 of the shard's shape, and the inverse scale (known to every
        rank)."""
        scale, inverse = self._state.scales(self._site, WEIGHT)
        return cast_eager(shard, scale, self._state.formats[WEIGHT]).view(
            torch.uint8
        ), inverse

    def unpack(
        self,
        payload: Tensor,
        inverse: Tensor,
        size: torch.Size,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> GatheredWeight | None:
        """Return the unsharded weight of ``size`` from ``payload`` (rows padded), or
        renew ``out``.

        The bytes of ``out`` are in the same storage; only its scale may have changed.
        """
        # FSDP2 has filled the bytes of before.
        if out is not None:
            assert isinstance(out, GatheredWeight)
            out.scale_by(inverse)
            return None
        data8 = payload.view(self._state.formats[WEIGHT])[: size[0]].view(size)
        return GatheredWeight(data8, inverse, dtype)
