"""The knob ``chunked_cross_entropy``: Transformers causal models compute their loss in
chunks of tokens.

The model's own forward runs, so that all its other work stays as it is. Only its head
is replaced, by a module that computes nothing: its result, :class:`PendingLogits`, is
the head's input and a list of the model's steps on its logits (capping, scaling). The
model's loss function takes the pending logits and calls the head once, so that a head
that is an FSDP unit is gathered once; :func:`chunked_cross_entropy` runs in this call.

Where the loss is not the only use of the logits (no labels, evaluation), all logits are
computed at once, as usual.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_core.context_parallel.chunked_loss import (
    IGNORED,
    chunked_cross_entropy,
    torchs_sum,
)
from smp_core.outside import changed
from smp_core.torch_facts import Args, transformers_models

logger = logging.getLogger("smp")

_NO_LABELS = "chunked_cross_entropy has no effect on %s: its forward gets no labels, so its logits are made whole"

# The functions that act on every logit by itself, by their names in torch and as
# methods; another argument is a number, or one for each word of the vocabulary.
_ELEMENTWISE = (
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "tanh",
    "float",
    "to",
    "contiguous",
    "clamp",
)


@dataclasses.dataclass
class _State:
    """The switches of this process, as the active batch is one
    (:mod:`smp_core.context_parallel.replaced_attention`)."""

    loss_only: bool = False
    label_smoothing: float = 0.0


_STATE = _State()


def loss_only() -> contextlib.AbstractContextManager[None]:
    """Let models whose loss is chunked chunk it in evaluation too: inside the block no
    code looks at logits."""
    return changed(_STATE, loss_only=True)


def smoothed(label_smoothing: float) -> contextlib.AbstractContextManager[None]:
    """Let models whose loss is chunked smooth their labels inside the block, in
    training and in evaluation."""
    return changed(_STATE, label_smoothing=label_smoothing)


class SplitVocabulary(Protocol):
    """Logits of which each rank holds those of its own words
    (:class:`smp_core.tensor_parallel.loss.SplitLogits`)."""

    def of(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Call the head for this rank's logits."""

    def cross_entropy_sum(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        """Compute what torch's cross entropy with ``reduction="sum"`` does of unsplit
        logits."""


class PendingLogits:
    """The logits that are not computed yet: the head's input, and the element-wise
    steps for its output."""

    def __init__(
        self, owner: str, head: nn.Module, hidden: Tensor, steps: tuple[_Step, ...] = ()
    ) -> None:
        self._owner = owner
        self._head = head
        self._hidden = hidden
        self._steps = steps
        self.device = hidden.device

    def whole(self) -> Tensor:
        """Compute the logits [..., T, V]."""
        return self._finished(self._head(self._hidden))

    def loss(
        self,
        targets: Tensor,
        chunk: int,
        divisor: Tensor | float | None,
        split: SplitVocabulary | None = None,
    ) -> Tensor:
        """Compute the cross entropy of the logits against ``targets`` [..., T], in
        chunks; see :func:`chunked_cross_entropy`.
        """

        def in_chunks(project: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            def logits_of(part: Tensor) -> Tensor:
                return self._finished(
                    project(part) if split is None else split.of(project, part)
                )

            return chunked_cross_entropy(
                hidden,
                logits_of,
                targets,
                chunk,
                divisor=divisor,
                label_smoothing=_STATE.label_smoothing,
                cross_entropy_sum=torchs_sum
                if split is None
                else split.cross_entropy_sum,
            )

        return self._head(self._hidden, in_chunks=in_chunks)

    def _finished(self, logits: Tensor) -> Tensor:
        for step in self._steps:
            logits = step(logits)
        return logits

    def _with(
        self,
        name: str,
        function: Callable[..., Any],
        args: Args,
        kwargs: Any,
    ) -> PendingLogits:
        """Return pending logits with one more step; refuse a step that needs more than
        one token's logits at a time."""
        # One step for each logit by itself can be made on any chunk.
        others = [arg for arg in (*args, *kwargs.values()) if arg is not self]
        if name not in _ELEMENTWISE or any(map(_has_values_per_token, others)):
            raise self._refusal(name)

        # The step is kept as it was called, with the logits' place open.
        def step(logits: Tensor) -> Tensor:
            named = {
                key: logits if value is self else value for key, value in kwargs.items()
            }
            return function(*(logits if arg is self else arg for arg in args), **named)

        return PendingLogits(
            self._owner, self._head, self._hidden, (*self._steps, step)
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Args = (), kwargs: Any = None
    ) -> Any:
        everything = (*args, *(kwargs or {}).values())
        found = next(
            (arg for arg in everything if isinstance(arg, PendingLogits)), None
        )
        assert found is not None
        return found._with(function.__name__, function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        # Python asks for special methods to find out what an object is.
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _ELEMENTWISE:
            raise self._refusal(name)
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: self._with(name, method, (self, *args), kwargs)

    def __getitem__(self, _: Any) -> Any:
        raise self._refusal("[...]")

    def __add__(self, other: Any) -> PendingLogits:
        return self._with("add", torch.add, (self, other), {})

    def __sub__(self, other: Any) -> PendingLogits:
        return self._with("sub", torch.sub, (self, other), {})

    def __mul__(self, other: Any) -> PendingLogits:
        return self._with("mul", torch.mul, (self, other), {})

    def __truediv__(self, other: Any) -> PendingLogits:
        return self._with("div", torch.div, (self, other), {})

    __radd__, __rmul__ = __add__, __mul__

    def _refusal(self, name: str) -> ValueError:
        return ValueError(
            f"chunked_cross_entropy: {self._owner} does {name!r} with its logits before its loss, which logits of a "
            "chunk of tokens do not allow; leave chunked_cross_entropy out for it"
        )


_Step = Callable[[Tensor], Tensor]


def _has_values_per_token(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return argument.ndim > 1
    return isinstance(argument, PendingLogits)


class _StandIn(nn.Module):
    """A module in the place of the head while the model's forward runs; it has the
    head's attributes, its weight among them.
    """

    def __init__(self, owner: str, head: nn.Module) -> None:
        super().__init__()
        self._owner, self._held = owner, (head,)  # not a submodule

    def forward(self, hidden: Tensor) -> PendingLogits:
        return PendingLogits(self._owner, self._held[0], hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held[0], name)


def chunk_losses(
    model: nn.Module, chunk: int, split: SplitVocabulary | None = None
) -> None:
    """Apply :func:`use_chunked_loss` to every Transformers causal model in ``model``.

    Args:
        split: of the head whose vocabulary is split over tensor ranks; None: heads
            compute all logits.

    Raises:
        ValueError: there is none, or one whose loss cannot be computed in chunks.
    """
    # Only outermost models with a head: a model inside of one has its loss computed
    # there.
    inside: set[nn.Module] = set()
    found = []
    for each in transformers_models(model):
        if each not in inside and each.get_output_embeddings() is not None:
            found.append(each)
            inside.update(each.modules())
    if not found:
        raise ValueError(
            f"chunked_cross_entropy={chunk}: {type(model).__name__} holds no Transformers model with a language head; "
            "leave it out, and call smp_core.context_parallel.chunked_loss.chunked_cross_entropy(hidden, head, "
            "labels) where the model computes its loss"
        )
    for each in found:
        use_chunked_loss(each, chunk, split)


def use_chunked_loss(
    model: Any, chunk: int = 1024, split: SplitVocabulary | None = None
) -> None:
    """Let a Transformers causal model compute its loss in chunks, in place.

    In training ``loss`` has the value of the unchunked one, and ``logits`` is None.
    Without labels, and in evaluation (but for :func:`loss_only`), nothing changes.

    Args:
        model: the model with the head.
        chunk: see :func:`chunked_cross_entropy`.
        split: see :func:`chunk_losses`.

    Raises:
        ValueError: no Transformers causal model, or one with a loss or a head of its
            own kind; in its first forward: logits that are more than capped or scaled.
    """
    name = type(model).__name__
    head, places = _head_of(model)
    stand_in = _StandIn(name, head)
    # The head itself learns to run a function instead, for one call that gathers its
    # weights.
    _let_compute_chunks(head)
    whole_loss, whole_forward = model.loss_function, model.forward
    warned = False

    def loss_function(
        logits: Tensor | PendingLogits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute what ForCausalLMLoss of Transformers computes, from pending logits in
        chunks."""
        # Whole logits: Transformers' own loss, which knows no smoothing.
        if isinstance(logits, Tensor) and not _STATE.label_smoothing:
            options |= {
                "num_items_in_batch": num_items_in_batch,
                "ignore_index": ignore_index,
            }
            return whole_loss(
                logits, labels, vocab_size, shift_labels=shift_labels, **options
            )
        # From here on the targets of each token, -100 where there is none.
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.masked_fill(shift_labels == ignore_index, IGNORED).to(
            logits.device
        )
        # Whole logits, smoothed: the chunks are cut from them.
        if isinstance(logits, Tensor):
            return PendingLogits(name, _Through(), logits).loss(
                targets, chunk, num_items_in_batch
            )
        return logits.loss(targets, chunk, num_items_in_batch, split)

    @functools.wraps(whole_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        # Evaluation looks at logits, unless the code has said that it does not.
        if not model.training and not _STATE.loss_only:
            return whole_forward(*args, **kwargs)
        with _in_its_place(places, stand_in):
            outputs = whole_forward(*args, **kwargs)
        # Without a loss the pending logits are still unused, so they are computed.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        has_loss = isinstance(loss, Tensor)
        if not has_loss and torch.is_grad_enabled() and not warned:
            warned = True
            logger.warning(_NO_LABELS, name)
        return _without_pending(outputs, has_loss)

    model.loss_function = loss_function
    # Dynamo could trace neither the exchange of the head nor pending logits; it
    # compiles the functions called inside.
    model.forward = torch.compiler.disable(forward, recursive=False)


class _Through(nn.Module):
    """A head for logits that are computed already."""

    def forward(self, logits: Tensor, in_chunks: Callable[..., Tensor]) -> Tensor:
        return in_chunks(lambda part: part, logits)


def _head_of(model: Any) -> tuple[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the head, and (module, attribute) of every place that it has in the
    model."""
    name = type(model).__name__
    if model not in transformers_models(model):
        raise ValueError(
            f"chunked_cross_entropy needs a Transformers causal language model, not {name}"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings()
    if (
        # Another loss may look at logits in a way that chunks do not allow.
        getattr(model.config, "is_encoder_decoder", False)
        or model.loss_function is not ForCausalLMLoss
        or head is None
    ):
        raise ValueError(
            f"chunked_cross_entropy: {name} does not have the loss of a causal language model with one head; leave "
            "chunked_cross_entropy out for it"
        )
    # A head may stand in several places of a model; each gets the stand-in.
    places = []
    for path, child in model.named_modules(remove_duplicate=False):
        if child is head:
            parent, _, attribute = path.rpartition(".")
            places.append((model.get_submodule(parent), attribute))
    return head, places


def _let_compute_chunks(head: nn.Module) -> None:
    """Give the head's forward a keyword ``in_chunks``: the function to run instead,
    called with the head's own forward and its input.
    """
    # The forward of now, with what other conversions have put around it.
    own = head.forward

    @functools.wraps(own)
    def forward(
        *args: Any, in_chunks: Callable[..., Tensor] | None = None, **kwargs: Any
    ) -> Any:
        return own(*args, **kwargs) if in_chunks is None else in_chunks(own, *args)

    head.forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _in_its_place(
    places: list[tuple[nn.Module, str]], stand_in: nn.Module
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for parent, attribute in places:
            stack.enter_context(changed(parent, **{attribute: stand_in}))
        yield


def _without_pending(outputs: Any, has_loss: bool) -> Any:
    """Replace pending logits in a model's outputs: by None if there is a loss, else by
    the computed logits."""

    def settled(value: Any) -> Any:
        if not isinstance(value, PendingLogits):
            return value
        return None if has_loss else value.whole()

    # Outputs keep their type: a tuple, a plain dictionary or a dataclass.
    if isinstance(outputs, tuple):
        return tuple(map(settled, outputs))
    changed = {
        key: settled(value)
        for key, value in outputs.items()
        if isinstance(value, PendingLogits)
    }
    if not changed:
        return outputs
    return (
        {**outputs, **changed}
        if type(outputs) is dict
        else dataclasses.replace(outputs, **changed)
    )
