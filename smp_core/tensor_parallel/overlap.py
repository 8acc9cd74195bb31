"""Overlap in backward: the gradient of a column layer's input is summed over the ranks
while the gradients of its weights are computed.

Backward of a column layer makes two products: the gradient of its input, which has to
be added up over the ranks before anything below can go on, and the gradient of its
weight, which nothing waits for. Autograd makes both in one node. Here the second is a
node of its own that runs between the start of the sum and the wait for it
(Megatron-LM's asynchronous sums of input gradients, for however many layers read one
input):

    forward     input -> _Wait -> (one _Weight for each layer) -> _Start: gathers -> layers, each -> _Output
    backward    _Output: keeps the outputs' gradient for _Weight -> layers: the input's gradient -> _Start: starts its
                sum -> _Weight of each layer: the weight's gradient -> _Wait

Of the nodes that could run, autograd takes the one that was made last, so the order of
backward follows from the order in which forward makes them. Nothing but the overlap
depends on it. Each layer's own forward is called, with its weight detached; the
products are those that autograd would make, in the same order of operands, so numbers
are equal to the bit. Layers of other kinds than torch's Linear and Transformers'
Conv1D, under autocast, in a unit of their own, or with rows of other ranks, keep
autograd's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.tensor_parallel.fused import column_products, factor_of
from smp_core.tensor_parallel.operators import TensorAxis, without_padding
from smp_core.tensor_parallel.roles import is_conv1d


@dataclass(eq=False)
class _Sum:
    """The sum of one input's gradient, and how to wait for it once it was started."""

    finish: Callable[[], Tensor] | None = None


@dataclass(eq=False)
class _Operands:
    """The operands of one weight's gradient: the layer's input and its outputs'
    gradient, [tokens, features] each."""

    transposed: bool
    found: tuple[Tensor, Tensor] | None = None

    def product(self) -> Tensor:
        assert self.found is not None
        # The operands are dropped with the product: they take as much memory as
        # activations.
        (hidden, grad), self.found = self.found, None
        return hidden.t().mm(grad) if self.transposed else grad.t().mm(hidden)


@dataclass(frozen=True, eq=False)
class LaterGradient:
    """The gradient of one layer's weight, to be computed later.

    Attributes:
        entered: what the layer is expected to be called with.
        weight: of the layer; its own gradient is left out.
        token: a number in the graph, behind which the weight is.
    """

    entered: Tensor
    weight: Tensor
    token: Tensor
    operands: _Operands

    def take_from(self, output: Tensor) -> Tensor:
        """Return the output of the layer such that its gradient is kept for the
        weight's."""
        return _Output.apply(output, self.entered.detach(), self.token, self.operands)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        # By now the sum has been under way while the weights' gradients were computed.
        finish, ctx.total.finish = ctx.total.finish, None
        return finish(), None


class _Start(torch.autograd.Function):
    """An input is gathered on its way to the layers; the sum of its gradient is started
    on the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: TensorAxis, total: _Sum, tokens_are_split: bool
    ) -> Tensor:
        # What backward needs to know of the input: its shape, as the sum has another
        # one.
        ctx.axis, ctx.total, ctx.tokens_are_split, ctx.shape = (
            axis,
            total,
            tokens_are_split,
            tensor.shape,
        )
        return axis.gather(tensor, -2) if tokens_are_split else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        # Gathered tokens give their gradient back as tokens, whole ones as a sum.
        start = (
            ctx.axis.start_reduce_scatter
            if ctx.tokens_are_split
            else ctx.axis.start_all_reduce
        )
        ctx.total.finish = start(grad, -2)
        # The sum itself is handed on by _Wait. Autograd only looks at the shape of
        # this.
        return grad.new_zeros(()).expand(ctx.shape), None, None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, operands: _Operands) -> Tensor:
        ctx.operands = operands
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.operands.product(), None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, token: Tensor, operands: _Operands
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.operands = operands
        return output.view_as(output)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (grad,) = grads
        (hidden,) = ctx.saved_tensors
        # Kept until the sum of the input's gradient was started; then _Weight takes it.
        ctx.operands.found = (
            hidden.reshape(-1, hidden.shape[-1]),
            grad.reshape(-1, grad.shape[-1]),
        )
        return grad, None, grad.new_zeros(()), None


def is_plain_product(layer: nn.Module) -> bool:
    """Return whether a layer is known to be one matrix product and a bias. Before its
    forward is exchanged."""
    # A subclass may compute something else than a product, and so may an exchanged
    # forward.
    known = type(layer) is nn.Linear or (
        is_conv1d(layer) and type(layer).__name__ == "Conv1D"
    )
    return known and "forward" not in vars(layer)


def _gathered(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the layers whose weights are here now, with this rank's parts of these."""
    for layer in layers:
        weight: Any = layer.weight
        # A unit by itself is gathered when it is called, and its gradient is reduced
        # when its own backward is over. A parameter that is not gathered now is a
        # DTensor over the shards too.
        if (
            not isinstance(layer, FSDPModule)
            and isinstance(weight, DTensor)
            and weight.device_mesh.ndim == 1
        ):
            yield layer, weight.to_local()


class ColumnInputs:
    """The inputs of the column layers of one module: queries, keys and values are
    projections of one tensor, which is gathered once, and whose gradient is added up
    once.

    What was made in a call of the module is dropped at its end.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.layers: list[nn.Module] = []
        self.in_pieces: dict[nn.Module, str] = {}
        self._entered: list[tuple[Tensor, Tensor]] = []
        self._later: dict[nn.Module, LaterGradient] = {}
        self._products: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def add(self, layer: nn.Module, in_pieces: str | None = None) -> None:
        """Let the gradient of a layer's weight be computed later, if that is possible.
        Before the layer's forward is exchanged.

        Args:
            in_pieces: the name of a layer that reads what its neighbours do, among
                split tokens, and is multiplied while that is gathered; None: it is not.
        """
        if is_plain_product(layer):
            self.layers.append(layer)
            if in_pieces is not None:
                self.in_pieces[layer] = in_pieces

    @torch.compiler.disable
    def enter(
        self, tensor: Tensor, tokens_are_split: bool, reader: nn.Module | None = None
    ) -> Tensor:
        """Return what the layers read, made once for each tensor in a call.

        Args:
            tensor: [..., N, H], or [..., N/T, H] where the tokens are split.
            reader: the layer that asks; None: the module that they are in.
        """
        for given, made in self._entered:
            if given is tensor:
                return made
        # Products in pieces are made for all readers at once, or not at all.
        in_pieces = bool(self.in_pieces) if reader is None else reader in self.in_pieces
        # Units of their own are gathered later.
        in_pieces = in_pieces and any(True for _ in _gathered(self.in_pieces))
        if in_pieces and tokens_are_split and torch.is_grad_enabled():
            return self._enter_with_products(tensor)
        # The order of these nodes decides the order of backward; see the top of this
        # file.
        total = _Sum()
        waited: Tensor = _Wait.apply(tensor, total)
        weights = self._weights() if torch.is_grad_enabled() else []
        entered: Tensor = _Start.apply(waited, self.axis, total, tokens_are_split)
        if tokens_are_split:
            entered = without_padding(entered, self.axis)
        # Autograd computes the gradient itself where operands would be cast.
        for layer, weight, token, operands in weights:
            if entered.dtype == weight.dtype and not torch.is_autocast_enabled(
                entered.device.type
            ):
                self._later[layer] = LaterGradient(
                    entered, weight.detach(), token, operands
                )
        self._entered.append((tensor, entered))
        return entered

    def _enter_with_products(self, tensor: Tensor) -> Tensor:
        # A second input of one module's layers must not replace products that are still
        # unused.
        self.require_all_read()
        weights = dict(_gathered(self.in_pieces))
        factors = [
            factor_of(layer, weight, tensor) for layer, weight in weights.items()
        ]
        entered, products = column_products(tensor, self.axis, factors)
        self._products = {
            layer: (entered, product)
            for layer, product in zip(weights, products, strict=True)
        }
        self._entered.append((tensor, entered))
        return entered

    def product(self, layer: nn.Module, entered: Tensor) -> Tensor | None:
        """Return the product of a layer that was made when its input was gathered,
        once; None: there is none."""
        found = self._products.get(layer)
        # The product belongs to one input; another tensor is multiplied as usual.
        if found is None or found[0] is not entered:
            return None
        del self._products[layer]
        return found[1]

    def require_all_read(self) -> None:
        """Check that each product that was made has been used.

        Raises:
            ValueError: a layer that read something else than its neighbours, or was not
                called.
        """
        if self._products:
            names = ", ".join(self.in_pieces[layer] for layer in self._products)
            raise ValueError(
                f"tensor_parallel.overlap={self.axis.overlap!r} multiplies all column layers of a module while their "
                f"common input is gathered, and {names} did not read it; write tensor_parallel={{'overlap': 'sums'}}"
            )

    def _weights(self) -> list[tuple[nn.Module, Tensor, Tensor, _Operands]]:
        found = []
        # Frozen weights have no gradient to put off.
        for layer, part in _gathered(self.layers):
            if part.requires_grad:
                operands = _Operands(transposed=is_conv1d(layer))
                found.append((layer, part, _Weight.apply(part, operands), operands))
        return found

    def later(self, layer: nn.Module, entered: Tensor) -> LaterGradient | None:
        """Return the later gradient of a layer that is called with this input, once;
        None: it is autograd's."""
        # Another input than was expected: this call's gradient is computed as usual.
        found = self._later.pop(layer, None)
        return found if found is not None and found.entered is entered else None

    def forget(self) -> None:
        """Drop everything: the module's call is over."""
        self._entered.clear()
        self._later.clear()
        self._products.clear()
