"""The activation checkpointing of a module (arXiv 1604.06174): it keeps its inputs and
computes the rest again in backward.

A checkpointed module gets a subclass of its own class whose forward runs under
``torch.utils.checkpoint`` without reentrant autograd. That forward runs

- inside FSDP2's hooks, which are on the module and not in its forward: the unit is
  gathered once for recomputation and backward together;
- inside ``torch.compile`` where the module was compiled, so that the compiler sees
  which values to keep;
- a subclass and not an attribute of the instance, so that names, signatures and copies
  of the module stay as they were. A forward that the instance has of its own (around
  the layers of tensor ranks) would hide it, and is moved inside.

Under ``torch.no_grad`` the module runs its own forward. A recomputation draws the same
random numbers (torch restores the state of its generators), reads the buffers that the
forward read, and changes none. A Transformers block that would append to a key-value
cache once more in its recomputation gets no cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from smp_core.activations.buffers import ForwardWithBuffers, buffer_places
from smp_core.activations.selective import (
    ContextPair,
    all_else_contexts,
    selective_contexts,
)
from smp_core.plan import CheckpointedModule
from smp_core.torch_facts import uncompiled, without_caches

logger = logging.getLogger("smp")

_OWN_FORWARD = "_smp_own_forward"
_BUFFERS, _WRITTEN = "_smp_buffers", "_smp_written_buffers"
SENDS = "_smp_sends_tokens"
"""An attribute of modules whose forward sends tokens to other ranks, which a
recomputation is not to do again."""


class NotDeterministicError(RuntimeError):
    """A module computed other values in its recomputation; its gradients would be
    wrong."""


def apply_checkpointing(
    model: nn.Module,
    chosen: CheckpointedModule,
    *,
    check: bool = False,
    to_the_end: bool = False,
) -> None:
    """Make a module of ``model`` recompute. In place, before ``fully_shard``.

    Args:
        check: compare the outputs of every recomputation with those of forward, bit by
            bit (costs the part of recomputation that is otherwise left out, and a sum
            over the outputs).
        to_the_end: run recomputations to the end of forward, not only as far as values
            are needed. For modules with FSDP units inside, whose hooks come in pairs.
    """
    module = uncompiled(model.get_submodule(chosen.name))
    kind: Any = type(module)
    # A forward of the instance would hide that of the class, and runs inside it.
    if "forward" in vars(module):
        vars(module)[_OWN_FORWARD] = vars(module).pop("forward")
    vars(module)[_BUFFERS] = buffer_places(module)
    module.__class__ = _checkpointed(
        kind, chosen.mode == "selective", chosen.name if check else None, to_the_end
    )


@functools.cache
def _checkpointed(
    kind: type[nn.Module], selective: bool, compared_as: str | None, to_the_end: bool
) -> type[nn.Module]:
    """Make the checkpointed subclass of a class of modules.

    Args:
        compared_as: the module's name for the error when a recomputation differs; None:
            it is not compared.
    """

    def computed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get(_OWN_FORWARD)
        if own is None:
            # Nothing of the instance's own: the class's forward.
            return kind.forward(self, *args, **kwargs)
        vars(self)[_OWN_FORWARD] = None  # which may call the forward of the class
        try:
            return own(*args, **kwargs)
        finally:
            vars(self)[_OWN_FORWARD] = own

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The own forward may call the class's, which must not checkpoint once more.
        is_within_own = vars(self).get(_OWN_FORWARD, self) is None
        if (
            not torch.is_grad_enabled()
            or is_within_own
            or _is_recomputed_by_its_own(self)
        ):
            return computed(self, *args, **kwargs)
        args, kwargs = _without_caches(self, args, kwargs)
        # Tensors become positional: torch stores the random state of the devices of
        # positional arguments.
        names = [
            key for key, value in kwargs.items() if isinstance(value, torch.Tensor)
        ]
        tensors = [kwargs.pop(key) for key in names]

        # Not args itself: the objects that run refers to live until backward.
        first_named = len(args)

        def run(*given: Any) -> Any:
            named = dict(zip(names, given[first_named:], strict=True))
            return computed(self, *given[:first_named], **kwargs, **named)

        # The compiler has its own way with buffers.
        if vars(self)[_BUFFERS] and not torch.compiler.is_compiling():
            run = _with_buffers(self, run)

        # With FSDP units inside, or for the comparison, recomputation runs to the end
        # of forward.
        given = (*args, *tensors)
        if compared_as is not None and not torch.compiler.is_compiling():
            compared = _Compared(
                run, compared_as, selective_contexts if selective else noop_context_fn
            )
            with set_checkpoint_early_stop(False):
                return checkpoint(
                    compared, *given, use_reentrant=False, context_fn=compared.contexts
                )
        if to_the_end and not torch.compiler.is_compiling():
            contexts = selective_contexts if selective else _contexts_of_all(self)
            with set_checkpoint_early_stop(False):
                return checkpoint(run, *given, use_reentrant=False, context_fn=contexts)
        # Dynamo takes a context_fn only where it is written out as a global function.
        if selective:
            return checkpoint(
                run, *given, use_reentrant=False, context_fn=selective_contexts
            )
        return checkpoint(run, *given, use_reentrant=False)

    return type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}
    )


def _with_buffers(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose recomputation reads the buffers that it read, and changes
    none."""
    attributes = vars(module)
    kept = ForwardWithBuffers(run, attributes[_BUFFERS], attributes.get(_WRITTEN))

    def kept_run(*given: Any) -> Any:
        output = kept(*given)
        attributes[_WRITTEN] = kept.written()
        return output

    return kept_run


def _contexts_of_all(module: nn.Module) -> ContextPair:
    """Return the contexts of a module that recomputes everything: rows of tokens are
    not sent to experts again."""
    sends = any(getattr(inner, SENDS, False) for inner in module.modules())
    return all_else_contexts if sends else noop_context_fn


def _is_recomputed_by_its_own(module: nn.Module) -> bool:
    """Return whether a Transformers model recomputes this module already."""
    return getattr(module, "gradient_checkpointing", False) is True and module.training


def _without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop key-value caches, to which a recomputation would append once more."""
    plain_args, plain = without_caches(args, kwargs)
    # Only a call that has a cache is changed.
    pairs = [
        *zip(args, plain_args, strict=True),
        *((kwargs[name], plain[name]) for name in kwargs),
    ]
    has_none = all(given is kept for given, kept in pairs)
    # Transformers' mark of layers that only read.
    if has_none or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    if "use_cache" in plain:
        plain["use_cache"] = False
    return plain_args, plain


class _Compared:
    """A function that is called twice, and raises when the second call (the
    recomputation) gives other values.

    The outputs are compared after the contexts of ``contexts`` are left: inside,
    selective checkpointing would take the comparison for a part of the function.

    """

    def __init__(
        self, function: Callable[..., Any], name: str, contexts: ContextPair
    ) -> None:
        self._function = function
        self._name = name
        self._contexts = contexts
        self._outputs: Any = None
        self._first: list[torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        self._outputs = self._function(*args)
        return self._outputs

    def contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # Both contexts are left before outputs are compared.
        forward, recomputation = self._contexts()
        return _LookedAt(self, forward), _LookedAt(self, recomputation)

    def look(self) -> None:
        """Compare the sums over the latest outputs with those of forward."""
        outputs, self._outputs = self._outputs, None
        with torch.no_grad():
            sums = [_bits(tensor) for tensor in _tensors(outputs)]
        # The first time is forward; each later one a recomputation.
        if self._first is None:
            self._first = sums
        elif not all(map(torch.equal, self._first, sums)):
            raise NotDeterministicError(
                f"{self._name} gave other values when it was computed again in backward, so gradients would be wrong: "
                "it draws random numbers that torch's generators do not give, or depends on something that changed. "
                f'Leave it out: activations={{"checkpoint": {{"{self._name}": "none", ...}}}}'
            )


class _LookedAt(AbstractContextManager[None]):
    """A context after which the outputs are compared. Each backward pass through one
    graph enters it again."""

    def __init__(
        self, compared: _Compared, context: AbstractContextManager[Any]
    ) -> None:
        self._compared, self._context = compared, context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._context.__exit__(kind, *error)
        if kind is None:
            self._compared.look()


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nest of outputs."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(each)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the bits of every element, each weighted by its place: exact, so the order of
    the sum does not matter."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Complex numbers as pairs, all others as the integers of the same size.
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = (
        plain.detach()
        .contiguous()
        .view(whole[plain.element_size()])
        .flatten()
        .to(torch.int64)
    )
    return (bits * (torch.arange(bits.numel(), device=bits.device) * 2 + 1)).sum()
