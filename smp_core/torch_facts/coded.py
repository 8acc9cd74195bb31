"""CodedTensor: a tensor of a floating point dtype whose values are stored as codes.

It is the local part of a sharded parameter (a DTensor) that is frozen. An operation
that reads it sees the decoded values; ``copy_`` writes codes of what it is given;
nothing else may write into it.

``_make_wrapper_subclass`` is torch's documented way to make such a tensor, and
``_pytree`` maps over an operation's arguments; neither has a public name. ``_schema``
is where torch says what an operation writes into.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


# What this file asks of a codec, so that it need not know one.
class Coder(Protocol):
    """A codec of rows, as :class:`smp_core.codecs.RowCodec` is one."""

    name: Any

    def row_bytes(self, row: int) -> int: ...

    def encode(self, values: Tensor, out: Tensor) -> None: ...

    def decode(self, codes: Tensor, out: Tensor) -> None: ...


class CodedTensor(Tensor):
    """A contiguous tensor of size [n, ...], whose rows are those of ``codes``.

    Args:
        codes: uint8 [n or more, row_bytes]; what is behind the n rows is padding.
        size, dtype: those that it appears with.
        coder: what made the codes.
    """

    codes: Tensor
    coder: Coder

    # Operations arrive in __torch_dispatch__ below; results are plain tensors, not
    # wrapped again.
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, codes: Tensor, size: torch.Size, dtype: torch.dtype, coder: Coder
    ) -> CodedTensor:
        return Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=codes.device
        )  # type: ignore[attr-defined]

    def __init__(
        self, codes: Tensor, size: torch.Size, dtype: torch.dtype, coder: Coder
    ) -> None:
        self.codes, self.coder = codes, coder

    @torch.no_grad()
    def decoded(self) -> Tensor:
        """Return the values as a plain tensor."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        decode_rows(self.coder, self.codes, values)
        return values

    # Where the bytes are: by these addresses parameters are told apart and memory is
    # counted.

    def data_ptr(self) -> int:
        return self.codes.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.codes.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodedTensor({tuple(self.shape)}, {self.dtype}, as {self.coder.name})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view of the same shape shares the codes, as it would share memory.
        if func in _SAME_TENSOR and (
            len(args) == 1 or tuple(args[1]) == tuple(args[0].shape)
        ):
            return CodedTensor(
                args[0].codes, args[0].shape, args[0].dtype, args[0].coder
            )
        # New values are coded; they may be codes themselves, on another device, or one
        # number for all elements.
        if func is torch.ops.aten.copy_.default and isinstance(args[0], CodedTensor):
            target, values = args[:2]
            values = decoded(values).to(target.device).expand(target.shape)
            _encode_rows(target.coder, values.contiguous(), target.codes)
            return target
        # Anything else reads decoded values, and may write into nothing that is coded.
        _refuse_writes(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(
            CodedTensor, CodedTensor.decoded, (args, kwargs)
        )
        return func(*args, **kwargs)


_SAME_TENSOR = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
)


def decoded(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same values; the tensor itself where it is one."""
    return tensor.decoded() if isinstance(tensor, CodedTensor) else tensor


@torch.no_grad()
def as_codes(padded: Tensor, size: torch.Size, coder: Coder) -> CodedTensor:
    """Return a tensor of ``size`` [n, ...], stored as codes of ``padded`` [n or more,
    ...]."""
    row = math.prod(padded.shape[1:])
    codes = torch.empty(
        padded.shape[0], coder.row_bytes(row), dtype=torch.uint8, device=padded.device
    )
    coder.encode(padded.reshape(padded.shape[0], row), codes)
    return CodedTensor(codes, size, padded.dtype, coder)


def decode_rows(coder: Coder, codes: Tensor, out: Tensor) -> None:
    """Decode the first rows of ``codes`` into ``out`` [n, ...]."""
    if out.numel():
        coder.decode(codes[: out.shape[0]], out.view(out.shape[0], -1))


def _encode_rows(coder: Coder, values: Tensor, codes: Tensor) -> None:
    if values.numel():
        coder.encode(values.view(values.shape[0], -1), codes[: values.shape[0]])


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse to write into codes: the values would be written into a decoded copy of
    them.

    Raises:
        RuntimeError: what is written into is stored as codes.
    """
    # Operations declare what they write into.
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in pytree.tree_leaves(written):
            if isinstance(each, CodedTensor):
                raise RuntimeError(
                    f"{func} would write into a frozen weight {tuple(each.shape)} that is stored in {each.coder.name} "
                    f"codes (frozen_storage={each.coder.name!r}); give it new values by parameter.copy_(values), "
                    "merge adapters in a model that is not sharded, or leave frozen_storage out"
                )
