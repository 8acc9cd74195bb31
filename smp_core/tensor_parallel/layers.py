"""Forwards of layers that are split over the tensor axis.

No layer is reimplemented: its own forward is called with this rank's part of its weight
in the place of the weight, and what stands around the call brings inputs and outputs
into the state they have to be in (:mod:`smp_core.tensor_parallel.operators`). Scaled
embeddings, Transformers' Conv1D and norms of any kind stay what they are. Nothing here
looks at FSDP2: it shows a parameter as a DTensor over the tensor axis while a unit is
gathered.

Parameters are exchanged in ``Module._parameters``, the dictionary where torch keeps
them: there is no public way to show a tensor that is no parameter for the time of one
call (``torch.func.functional_call`` calls the module, and with it this forward).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import map_tensors
from smp_core.tensor_parallel.fused import factor_of, row_product
from smp_core.tensor_parallel.operators import (
    RowsInUse,
    TensorAxis,
    exchange_rows,
    gather_features,
    gradient_once,
    join_tokens,
    scatter_tokens,
    split_features,
    split_tokens,
    sum_gradient,
    sum_outputs,
)
from smp_core.tensor_parallel.overlap import ColumnInputs
from smp_core.tensor_parallel.randomness import same_random
from smp_core.torch_facts import Args, Kwargs, local_part

Forward = Callable[..., Any]
# Where blocks are compiled: what is split runs as it is, and so does what stands around
# a module; the module's own forward is compiled inside.
around_compiled = functools.partial(torch.compiler.disable, recursive=False)


@contextlib.contextmanager
def showing(
    module: nn.Module, tensors: Mapping[str, Tensor | None], **attributes: Any
) -> Iterator[None]:
    """Let a module have these tensors for parameters, and these attributes, inside the
    block."""
    # The module keeps its own tensors at hand; they come back whatever the forward
    # raises.
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in tensors}
    attributes_before = {name: getattr(module, name) for name in attributes}
    parameters.update(tensors)
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        parameters.update(before)
        for name, value in attributes_before.items():
            setattr(module, name, value)


@dataclass(eq=False)
class Tokens:
    """The tokens inside one block.

    Attributes:
        split: whether each rank holds 1/T of them; not before the block was tried out
            (:mod:`smp_core.tensor_parallel.token_trial`).
        why: they stay whole; "": they do not, or it is not known yet.
        calls: layers that were called, with the sizes of what they took, while a trial
            looks; None: none does.
    """

    split: bool = False
    why: str = ""
    calls: list[Any] | None = None

    def note(self, module: nn.Module, args: Iterable[Any]) -> None:
        """Note a call of a layer, if a trial looks."""
        if self.calls is not None:
            self.calls.append(
                (module, [value.shape for value in args if isinstance(value, Tensor)])
            )


WHOLE_TOKENS = Tokens()
"""Outside of blocks, and in modules that need all tokens."""


@dataclass(eq=False)
class SharingForward:
    """The forward of a module with column layers: what these share ends with it."""

    original: Forward
    inputs: ColumnInputs

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # With products in pieces, a layer that did not read what was gathered would
            # leave one unused.
            output = self.original(*args, **kwargs)
            self.inputs.require_all_read()
            return output
        finally:
            self.inputs.forget()


@dataclass(eq=False)
class ColumnForward:
    """A layer whose outputs are split: each rank computes some of the features.

    Attributes:
        inputs: those of the column layers of the module that the layer is in.
        tokens: of its block.
        is_entered: where tokens are split, what it is called with is whole: the module
            that it is in gathered it, or it came whole into the block, where gradients
            of that are added up.
        gathers: the output is gathered.
        rows: which rows of the weight this rank uses, where those are not the ones it
            stores.
        weight_dim: the dimension of the outputs in the weight.
        is_alone: calls of the module that the layer is in are not seen.
    """

    module: nn.Module
    original: Forward
    axis: TensorAxis
    inputs: ColumnInputs
    tokens: Tokens
    is_entered: bool
    gathers: Callable[[], bool]
    rows: RowsInUse | None
    weight_dim: int
    is_alone: bool

    @torch.compiler.disable
    def __call__(self, hidden: Tensor) -> Tensor:
        # A trial compares the calls of two runs by these notes.
        self.tokens.note(self.module, [hidden])
        split = self.tokens.split
        # Gathered once by the module around the layer, or here for all layers that read
        # this input.
        entered = (
            hidden
            if split and self.is_entered
            else self.inputs.enter(hidden, split, self.module)
        )
        # With products in pieces it was made while the input was gathered; the bias is
        # still missing.
        output = self.inputs.product(self.module, entered)
        if output is None:
            output = self._own_forward(entered)
        elif self.module.bias is not None:
            output = output + local_part(self.module.bias)  # type: ignore[arg-type]
        if self.is_alone:
            self.inputs.forget()
        # A head whose loss is computed from split logits does not gather.
        return gather_features(output, self.axis) if self.gathers() else output

    def _own_forward(self, entered: Tensor) -> Tensor:
        # The layer's weight is detached where its gradient is computed by a node of its
        # own.
        later = self.inputs.later(self.module, entered)
        weight = (
            self._used(self.module.weight, self.weight_dim)
            if later is None
            else later.weight
        )
        bias = self.module.bias
        # The layer's own forward runs with this rank's rows of weight and bias.
        shown = {
            "weight": weight,
            "bias": None if bias is None else self._used(bias, 0),
        }
        # Transformers' Conv1D has the number of its outputs as `nf`.
        attributes = (
            {"nf": weight.shape[self.weight_dim]} if hasattr(self.module, "nf") else {}
        )
        with showing(self.module, shown, **attributes):
            output: Tensor = self.original(entered)
        return output if later is None else later.take_from(output)

    def _used(self, parameter: Any, dim: int) -> Tensor:
        # Without an exchange the rank computes with the rows it stores.
        stored = local_part(parameter)
        return (
            stored
            if self.rows is None
            else exchange_rows(stored, self.axis, self.rows, dim)
        )


@dataclass(eq=False)
class RowForward:
    """A layer whose inputs are split: each rank's output is a part of the sum. The bias
    is added to the sum.

    Attributes:
        tokens: of its block; where they are split, each rank gets its tokens of the
            sum.
        splits_input: the input is whole, and this rank's features of it are taken.
        in_pieces: the product is made together with the sum of its tokens.
    """

    module: nn.Module
    original: Forward
    axis: TensorAxis
    tokens: Tokens
    splits_input: bool
    in_pieces: bool

    @torch.compiler.disable
    def __call__(self, hidden: Tensor) -> Tensor:
        self.tokens.note(self.module, [hidden])
        if self.splits_input:
            hidden = split_features(hidden, self.axis)
        bias: Any = self.module.bias
        weight = local_part(self.module.weight)  # type: ignore[arg-type]
        # In training among split tokens, the sum over the ranks overlaps with the
        # product.
        if self.in_pieces and self.tokens.split and torch.is_grad_enabled():
            total = row_product(
                hidden, factor_of(self.module, weight, hidden), self.axis
            )
        else:
            total = self._own_forward(hidden, weight, bias)
        # The bias is added once, after the sum; each rank adds it to other tokens, so
        # its gradient is added up.
        if bias is None:
            return total
        added = sum_gradient(bias, self.axis) if self.tokens.split else bias
        return total + added.to(total.dtype)

    def _own_forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        shown: dict[str, Tensor | None] = {"weight": weight}
        if bias is not None:
            # Transformers' Conv1D has no way to compute without a bias.
            shown["bias"] = (
                None if isinstance(self.module, nn.Linear) else torch.zeros_like(bias)
            )
        with showing(self.module, shown):
            partial = self.original(hidden)
        # The ranks' outputs are parts of one sum.
        return (
            scatter_tokens(partial, self.axis)
            if self.tokens.split
            else sum_outputs(partial, self.axis)
        )


@dataclass(eq=False)
class EmbeddingForward:
    """An embedding whose rows, the vocabulary, are split: a rank's output is zero where
    the word is another's."""

    module: nn.Embedding
    original: Forward
    axis: TensorAxis
    checked: bool = False

    @torch.compiler.disable
    def __call__(self, words: Tensor) -> Tensor:
        # Words that were sampled may differ at any time.
        if not self.checked or not torch.is_grad_enabled():
            # What ranks compute parts of has to be the same.
            if not self.axis.holds_alike(words.reshape(-1).double()):
                raise self.axis.other_batches()
            self.checked = True
        # Words of other ranks are clamped into this rank's rows, and their embeddings
        # set to zero.
        weight = local_part(self.module.weight)
        own = words - self.axis.rank * weight.shape[0]
        is_own = (own >= 0) & (own < weight.shape[0])
        # The padding word's row gets no gradient; it stands on one rank only.
        padding = self.module.padding_idx
        if padding is not None:
            padding -= self.axis.rank * weight.shape[0]
            padding = padding if 0 <= padding < weight.shape[0] else None
        with showing(self.module, {"weight": weight}, padding_idx=padding):
            found = self.original(own.clamp(0, weight.shape[0] - 1))
        # Each word's embedding comes from exactly one rank.
        return sum_outputs(found * is_own.unsqueeze(-1), self.axis)


@dataclass(eq=False)
class PartForward:
    """A module of whose parameters each rank uses its part, and nothing is sent."""

    module: nn.Module
    original: Forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Every parameter of the module is shown as this rank's plain tensor.
        own = {name: p for name, p in self.module._parameters.items() if p is not None}
        with showing(self.module, {name: local_part(p) for name, p in own.items()}):
            return self.original(*args, **kwargs)


@dataclass(eq=False)
class SummingForward:
    """A module whose own parameters are whole on every rank and see another part of the
    activations on each: their gradients are added up.

    Attributes:
        tokens: of its block: another part where these are split.
        always: another part in any case, as of features.
        is_open: whether always is an assumption, as of what stands in attention, which
            a trial of the block settles.
    """

    module: nn.Module
    original: Forward
    axis: TensorAxis
    tokens: Tokens
    always: bool
    is_open: bool = False

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.tokens.note(self.module, [*args, *kwargs.values()])
        if not (self.always or self.tokens.split):
            return self.original(*args, **kwargs)
        # Parameters that are trained pass through a node that adds their gradients up.
        own = {
            name: p
            for name, p in self.module._parameters.items()
            if p is not None and p.requires_grad
        }
        with showing(
            self.module,
            {name: sum_gradient(local_part(p), self.axis) for name, p in own.items()},
        ):
            return self.original(*args, **kwargs)


@dataclass(eq=False)
class ExpertsForward:
    """Fused experts, all of them on every rank and each with some of its inner
    features.

    Attributes:
        rows: parameter -> the rows (dimension 1) that ranks use, where those are not
            the ones they store.
    """

    module: nn.Module
    original: Forward
    axis: TensorAxis
    rows: Mapping[str, RowsInUse]

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def enter(value: Any) -> Any:
            wants = isinstance(value, Tensor) and value.is_floating_point()
            return sum_gradient(value, self.axis) if wants else value

        # Rows of gate and up that belong together are fetched from the ranks that store
        # them.
        shown: dict[str, Tensor | None] = {}
        for name, parameter in self.module._parameters.items():
            if isinstance(parameter, DTensor):
                part = local_part(parameter)
                rows = self.rows.get(name)
                shown[name] = (
                    part if rows is None else exchange_rows(part, self.axis, rows, 1)
                )
        with showing(self.module, shown):
            partial = self.original(
                *map(enter, args),
                **{name: enter(value) for name, value in kwargs.items()},
            )
        # Each rank has a part of the inner features, so its output is a part of the
        # sum.
        return sum_outputs(partial, self.axis)


@dataclass(eq=False)
class AttentionForward:
    """The forward of attention among split tokens: it makes views by the shape of its
    input, so the tokens are gathered for the module and not for each of its column
    layers."""

    original: Forward
    inputs: ColumnInputs
    tokens: Tokens

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tokens.split:
            return self.original(*args, **kwargs)
        # Gathered here, column layers inside find the same tensor and do not gather
        # again.
        args, kwargs = with_hidden(
            args, kwargs, lambda hidden: self.inputs.enter(hidden, True)
        )
        try:
            return self.original(*args, **kwargs)
        finally:
            self.inputs.forget()


@dataclass(eq=False)
class OwnHeadsForward:
    """The forward of attention that is given something for each head: [B x heads, ...],
    of which a rank takes its own.

    Attributes:
        argument: its name; it comes by keyword.
        heads: of this rank.
    """

    original: Forward
    axis: TensorAxis
    argument: str
    heads: int

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: Tensor = kwargs[self.argument]
        # Heads of one sample lie side by side, rank after rank.
        by_rank = given.unflatten(0, (-1, self.axis.degree, self.heads))
        return self.original(
            *args, **{**kwargs, self.argument: by_rank[:, self.axis.rank].flatten(0, 1)}
        )


@dataclass(eq=False)
class WholeForward:
    """A module among split tokens that needs all of them, and computes the same on
    every rank: so gradients of what else it reads come once, and what else it returns
    is read by ranks with other tokens."""

    original: Forward
    axis: TensorAxis
    tokens: Tokens

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tokens.split:
            return self.original(*args, **kwargs)
        # Every rank computes the same, so gradients of other inputs count once where
        # they are added up later.
        args, kwargs = with_others(
            args, kwargs, lambda other: gradient_once(other, self.axis)
        )
        # All tokens of the hidden states, and one random state, so that ranks stay
        # equal.
        args, kwargs = with_hidden(
            args, kwargs, lambda hidden: join_tokens(hidden, self.axis)
        )
        with same_random(self.axis, args, kwargs):
            output = self.original(*args, **kwargs)
        # Readers of the other outputs have other tokens on each rank: their gradients
        # are parts.
        output = with_other_outputs(
            output, lambda other: sum_gradient(other, self.axis)
        )
        return with_output(output, lambda output: split_tokens(output, self.axis))


def hidden_among(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the hidden states of a call: the first tensor, wherever it stands."""
    # Transformers passes them by this name, maybe behind other tensors.
    hidden = kwargs.get("hidden_states")
    if hidden is None:
        hidden = next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)),
            None,
        )
    if hidden is None:
        raise ValueError(
            "tensor_parallel: a block was called without a tensor; its first one is split by tokens"
        )
    return hidden


def with_hidden(
    args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]
) -> tuple[Args, Kwargs]:
    """Return a call's arguments with the hidden states changed: the first tensor,
    wherever it stands among them."""
    everything = [*args, *kwargs.values()]
    hidden = hidden_among(args, kwargs)
    changed = change(hidden)
    given = [changed if value is hidden else value for value in everything]
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))


def with_others(
    args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]
) -> tuple[Args, Kwargs]:
    """Return a call's arguments with all tensors changed that gradients come to, but
    for the hidden states; also those in lists, tuples and dictionaries."""
    hidden = hidden_among(args, kwargs)

    def of_other(tensor: Tensor) -> Tensor:
        return (
            change(tensor) if tensor.requires_grad and tensor is not hidden else tensor
        )

    return map_tensors((args, kwargs), of_other)  # type: ignore[no-any-return]


def with_other_outputs(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with all tensors changed that gradients come from, but
    for the hidden states."""
    if not isinstance(output, tuple):
        return output
    others = map_tensors(
        output[1:], lambda tensor: change(tensor) if tensor.requires_grad else tensor
    )
    return (*output[:1], *others)


def with_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with the hidden states changed: all of it, or the first
    of several."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (change(output[0]), *output[1:])
    raise ValueError(
        f"tensor_parallel: a block returned {type(output).__name__}; a tensor or a tuple can be split"
    )
