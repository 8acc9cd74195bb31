"""The blocks of a stack: which of them hold 1/T of the tokens, and where tokens are
split and joined.

A block is compared with the unsplit one in its first forward
(:mod:`smp_core.tensor_parallel.unsplit_trial`), and tried out in its first forward that
trains (:mod:`smp_core.tensor_parallel.token_trial`). Before, and if it does not compute
the same with a part of its tokens, it holds all of them.

What the model computes between two blocks is not known before it has been run: in the
first step each block joins its tokens behind itself. Where that shows that the next
block takes what this one returned, and nothing else does, tokens stay split between the
two from the second step on. From then on each block checks that it is given what the
one before it returned.

Inside a block with split tokens every gradient is a part: of parameters, and of all
that comes into the block whole (conditions, memory). Their sums are made where it comes
in; what goes out whole has its gradient once.

A use of what a block returned is seen where torch calls ``__torch_function__`` of a
tensor's class (inside of which ``torch._C.DisableTorchFunctionSubclass``, of torch's
notes on extending it, calls the function itself), or by the gradient that comes from
it.

Splitting and joining stands outside of what is recomputed, so that it may change
between forward and backward. A checkpoint around the whole block, as of Transformers,
runs it again in backward: ``torch._C._current_graph_task_id``, torch's own way to know,
tells; there is no public one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_core.checkpoint import iterate_tensors
from smp_core.tensor_parallel.layers import (
    Forward,
    SummingForward,
    Tokens,
    around_compiled,
    hidden_among,
    with_hidden,
    with_other_outputs,
    with_others,
    with_output,
)
from smp_core.tensor_parallel.operators import (
    TensorAxis,
    gradient_once,
    join_tokens,
    split_tokens,
    sum_gradient,
)
from smp_core.tensor_parallel.randomness import refuse_random
from smp_core.tensor_parallel.token_trial import Found, TokenTrial, require_equal_parts
from smp_core.tensor_parallel.unsplit_trial import Unsplit, UnsplitTrial
from smp_core.torch_facts import Args, Kwargs

logger = logging.getLogger("smp")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors show the same numbers, unchanged (``_version``, the
    count of in-place changes, which nothing public tells): FSDP2 hands on an alias."""
    # Two tensors of one storage may still show other elements of it.
    same_memory = (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
    return same_memory and one.dtype == other.dtype and one._version == other._version


@dataclass(eq=False)
class _Given:
    """The last output of a block.

    Attributes:
        place: of the block in its stack.
        hidden: without its graph.
        of_next: the gradient that comes from the next block.
        is_used: by something else than a block.
    """

    place: int
    hidden: Tensor
    is_split: bool
    of_next: Tensor | None = None
    is_used: bool = False


# What a call says of a tensor that does not depend on its tokens.
_SAYS_NOTHING = (
    bool,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.utils.hooks.RemovableHandle,
    type(None),
)


class _Watched(Tensor):
    """The output of a block in the first step."""

    given: _Given

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The operation itself, on plain tensors.
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        # torch.autograd.Function and FSDP2's units make such aliases; they are no use.
        if func is Tensor.view_as and isinstance(args[0], _Watched):
            made.__class__, made.given = cls, args[0].given
        # Asking for a shape or a dtype is no use of the numbers.
        elif not isinstance(made, _SAYS_NOTHING):
            for _, tensor in iterate_tensors([args, kwargs or {}]):
                if isinstance(tensor, _Watched):
                    # Something other than the next block reads it: tokens have to be
                    # joined there.
                    tensor.given.is_used = True
        return made


def _plain(hidden: Tensor) -> Tensor:
    """Return what a block takes such that its uses are not noted."""
    if not isinstance(hidden, _Watched):
        return hidden
    with torch._C.DisableTorchFunctionSubclass():
        return hidden.view_as(hidden)


@dataclass(eq=False)
class Stack:
    """The blocks of one ``nn.ModuleList``.

    Attributes:
        names, tokens: of its blocks, in order.
        links: for each block but the last, whether tokens stay split between it and the
            next.
        may_split: tokens are to be split where that is exact.
        is_known: nothing stands between blocks (pipeline stages see to that
            themselves).
        is_tried: its blocks are tried out in their first forward.
    """

    names: list[str]
    tokens: list[Tokens]
    axis: TensorAxis
    may_split: bool
    links: list[bool] = field(init=False)
    is_known: bool = False
    is_tried: bool = True
    _last: _Given | None = None
    _is_learning: bool = True
    _device: torch.device | None = None
    _direct: set[int] = field(default_factory=set)
    _indirect: set[int] = field(default_factory=set)
    _returned: list[_Given] = field(default_factory=list)
    _own: list[tuple[Tensor, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = [False] * (len(self.names) - 1)

    def know(self, without_trial: bool) -> None:
        """Let tokens stay split between all blocks; and in them, if they are not to be
        tried out."""
        # Without values nothing can be tried out; what is assumed of the blocks is set
        # at once.
        self.is_tried = not without_trial
        if not self.may_split:
            return
        # Stages hand on a part of the tokens, so that nothing has to be learned about
        # what stands between.
        self.is_known, self._is_learning = True, False
        self.links = [True] * len(self.links)
        for tokens in self.tokens if without_trial else ():
            tokens.split = True

    def enter(self, place: int, hidden: Tensor) -> tuple[Tensor, bool]:
        """Return what a block takes, and whether its tokens came split.

        Raises:
            ValueError: split tokens went to something else than a block.
        """
        if self.is_known or _in_backward():
            return hidden, place > 0 and self.links[place - 1]
        # A new forward pass: what blocks of the last one returned is forgotten.
        if place == 0:
            self._own.clear()
        self._device = hidden.device
        # What the block before returned; None after the stack's begin or a block with
        # whole tokens.
        last, self._last = self._last, None
        if last is None:
            return hidden, False
        with torch._C.DisableTorchFunctionSubclass():
            return self._follow(last, hidden)

    def _follow(self, last: _Given, hidden: Tensor) -> tuple[Tensor, bool]:
        # Something stands between: what was returned must be whole for it.
        if not _same_tensor(last.hidden, hidden):
            self._require_whole(last)
            self._indirect.add(last.place)
            return hidden, False
        if self._is_learning and hidden.requires_grad:
            hidden = hidden.view_as(hidden)  # what comes from the next block alone

            # The gradient that comes through the next block, to be compared with all of
            # it.
            def note(gradient: Tensor) -> None:
                last.of_next = gradient

            hidden.register_hook(note)
        return hidden, last.is_split

    def leave(self, place: int, hidden: Tensor, is_split: bool) -> None:
        """Note what a block returns."""
        # A recomputed forward has been noted already, and the last block is followed by
        # no other.
        if self.is_known or _in_backward() or place == len(self.links):
            return
        self._last = last = _Given(place, hidden.detach(), is_split)
        if self._is_learning and hidden.requires_grad:
            self._returned.append(last)

            def compare(gradient: Tensor) -> None:
                # If the next block sends the whole gradient, nothing else has read the
                # output.
                of_next, last.of_next = last.of_next, None
                alone = of_next is not None and torch.equal(of_next, gradient)
                (self._direct if alone else self._indirect).add(place)

            hidden.register_hook(compare)
            hidden.__class__, hidden.given = _Watched, last  # type: ignore[assignment,attr-defined]

    def learn(self) -> None:
        """Let tokens stay split from the next step on, where the last one showed that
        they can. Collective over the axis; when gradients are complete."""
        # The last output of a step that no block took, as with layers that are skipped.
        last, self._last = self._last, None
        if last is not None:
            self._require_whole(last)
            self._indirect.add(last.place)
        # Only steps that sent gradients show anything.
        if not self._is_learning or not (self._direct or self._indirect):
            return
        self._is_learning = False
        self._indirect |= {each.place for each in self._returned if each.is_used}
        self._returned.clear()
        # Tokens stay split between two blocks that are both split and directly
        # connected.
        both = [
            one.split and other.split
            for one, other in zip(self.tokens, self.tokens[1:], strict=False)
        ]
        keeps = [
            split and n in self._direct and n not in self._indirect
            for n, split in enumerate(both)
        ]
        # One rank that saw another use breaks the link for all.
        breaks = torch.tensor([not keep for keep in keeps], device=self._device).float()
        self.links = (self.axis.maximum(breaks) == 0).tolist()

    def _require_whole(self, last: _Given) -> None:
        if last.is_split:
            raise ValueError(
                f"tensor_parallel: the next block did not take what {self.names[last.place]} returned, as it did in "
                "the first step, and this is a part of the tokens; write tensor_parallel={'sequence_parallel': false}"
            )

    def is_own(self, tensor: Tensor) -> bool:
        """Return whether an earlier block of this forward returned this tensor as
        something of this rank's heads."""
        return any(_same_tensor(each, tensor) for each, _ in self._own)

    def own_dim(self, tensor: Tensor) -> int | None:
        """Return the dimension of this rank's heads in such a tensor; None: it is no
        such tensor, or not known."""
        return next(
            (dim for each, dim in self._own if _same_tensor(each, tensor)), None
        )

    def add_own(self, tensors: Iterable[tuple[Tensor, int | None]]) -> None:
        self._own += [(tensor.detach(), dim) for tensor, dim in tensors]


@dataclass(eq=False)
class BlockForward:
    """The forward of a block of a stack, around all else that was put around it.
    Gradients of what is returned alongside the tokens count once, but for what is of
    this rank's heads.

    Attributes:
        original: recomputes, where that was asked for.
        plain: does not, and draws no random numbers of its own.
        summing: forwards inside that add up gradients of parameters.
        shared: what the block shares with others, in words; "": nothing.
        unsplit: before the model was split; None: the block alone computes something
            else.
        compared: with the unsplit block, in a call that trains or not.
        own: what is returned alongside the tokens and is of this rank's heads: number
            -> dimension, if known.
    """

    block: nn.Module
    original: Forward
    plain: Forward
    stack: Stack
    place: int
    summing: list[SummingForward]
    random: list[str]
    shared: str
    unsplit: Unsplit | None = None
    found: Found | None = None
    compared: set[bool] = field(default_factory=set)
    own: dict[int, int | None] = field(default_factory=dict)

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._taken(args, kwargs)
        return self._returned(self.original(*args, **kwargs))

    @torch.compiler.disable
    def _taken(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        axis = self.stack.axis
        tokens = self.stack.tokens[self.place]
        stack = self.stack
        # A watched output that enters a block is no use of it.
        args, kwargs = with_hidden(args, kwargs, _plain)
        # The first call decides; all ranks make it together.
        if stack.is_tried and self.found is None and not tokens.split:
            self._try_out(args, kwargs)
        args, kwargs = with_hidden(
            args, kwargs, lambda hidden: self._enter(hidden, tokens.split)
        )
        if not tokens.split:
            return args, kwargs
        # What comes in whole has a part of its gradient on each rank, but for this
        # rank's heads.
        return with_others(
            args,
            kwargs,
            lambda other: other if stack.is_own(other) else sum_gradient(other, axis),
        )

    @torch.compiler.disable
    def _returned(self, output: Any) -> Any:
        axis, split = self.stack.axis, self.stack.tokens[self.place].split
        # Float tensors alongside the hidden states; those of this rank's heads are
        # remembered for later blocks.
        found = iterate_tensors(output[1:]) if isinstance(output, tuple) else ()
        others = [tensor for _, tensor in found if tensor.is_floating_point()]
        own = [
            (tensor, self.own[n]) for n, tensor in enumerate(others) if n in self.own
        ]
        self.stack.add_own(own)
        # All ranks return the same here, and gradients of it are equal: one of them
        # counts.
        if split:
            ids = {id(tensor) for tensor, _ in own}
            output = with_other_outputs(
                output,
                lambda other: other if id(other) in ids else gradient_once(other, axis),
            )
        return self._leave(output, split)

    def _enter(self, hidden: Tensor, split: bool) -> Tensor:
        axis = self.stack.axis
        # Tokens come split from the block before, or whole from anything else.
        hidden, came_split = self.stack.enter(self.place, hidden)
        if came_split and not split:
            return join_tokens(hidden, axis)
        return self._split(hidden) if split and not came_split else hidden

    def _split(self, hidden: Tensor) -> Tensor:
        # Without gradients uneven tokens are padded.
        if torch.is_grad_enabled():
            require_equal_parts(hidden.shape[-2], self.stack.axis.degree)
        # The length gives the number of tokens before padding, which joining cuts off.
        self.stack.axis.begin(hidden)
        return split_tokens(hidden, self.stack.axis)

    def _leave(self, output: Any, split: bool) -> Any:
        stack, axis = self.stack, self.stack.axis
        # Tokens stay split if the next block is known to take exactly this.
        gives_split = self.place < len(stack.links) and stack.links[self.place]
        if split and not gives_split:
            output = with_output(output, lambda hidden: join_tokens(hidden, axis))
        elif gives_split and not split:
            output = with_output(output, self._split)
        # Noted for the block behind, which checks that it is given this.
        if split or gives_split:
            stack.leave(
                self.place,
                output if isinstance(output, Tensor) else output[0],
                gives_split,
            )
        return output

    def _try_out(self, args: Args, kwargs: Kwargs) -> None:
        """Find out whether the block computes what it does unsplit, in its first
        forward, and whether it computes the same with a part of its tokens, in its
        first that trains. Collective over the axis.

        Raises:
            ValueError: what is not the same with whole tokens either.
        """
        stack, name = self.stack, self.stack.names[self.place]
        # Blocks that draw random numbers cannot go on with whole tokens; they are tried
        # out in their first forward of any kind.
        draws = bool(self.random) and self.block.training
        if stack.is_known and self.place > 0:  # this rank's tokens of them
            args, kwargs = with_hidden(args, kwargs, self._like_whole)
        hidden = hidden_among(args, kwargs)
        # Evaluation may have any number of tokens; a trial then waits for a training
        # call.
        is_even = hidden.ndim > 1 and hidden.shape[-2] % stack.axis.degree == 0
        trains = torch.is_grad_enabled()
        if trains not in self.compared:
            self.compared.add(trains)
            self._compare(args, kwargs)
        if not trains and not (draws and is_even):
            return
        # Known reasons are handed in: the trial still settles which gradients are
        # parts.
        stay_whole = self.shared if stack.may_split else "sequence_parallel=False"
        trial = TokenTrial(
            name,
            self.block,
            self.plain,
            stack.axis,
            stack.tokens[self.place],
            self.summing,
        )
        self.found = trial.run(
            args, kwargs, stack.is_own, stay_whole, evaluating=bool(self.random)
        )
        # Dimensions that the comparison has found are kept; the trial only knows
        # numbers of outputs.
        self.own = dict.fromkeys(self.found.own_outputs) | self.own
        if self.found.why and stack.may_split:
            self._go_on_with_whole_tokens(name, self.found.why)

    def _compare(self, args: Args, kwargs: Kwargs) -> None:
        """Compare the block with the unsplit one, unless it takes parts whose dimension
        is not known."""
        stack = self.stack
        # Arguments that an earlier block returned as parts.
        own = [
            tensor
            for _, tensor in iterate_tensors([args, kwargs])
            if stack.is_own(tensor)
        ]
        if self.unsplit is not None and not any(
            stack.own_dim(tensor) is None for tensor in own
        ):
            trial = UnsplitTrial(
                stack.names[self.place],
                self.block,
                self.plain,
                stack.axis,
                self.unsplit,
            )
            self.own |= trial.run(args, kwargs, stack.own_dim)

    def _like_whole(self, part: Tensor) -> Tensor:
        return part.new_zeros(
            (*part.shape[:-2], part.shape[-2] * self.stack.axis.degree, part.shape[-1])
        )

    def _go_on_with_whole_tokens(self, name: str, why: str) -> None:
        # Dropout among whole tokens has no right answer; products in pieces need split
        # tokens.
        if self.random:
            refuse_random(self.random, f"{name} keeps whole tokens ({why}), and ")
        axis = self.stack.axis
        if axis.overlap != "sums":
            raise ValueError(
                f"tensor_parallel.overlap={axis.overlap!r}: {name} keeps whole tokens: {why}; "
                "write tensor_parallel={'overlap': 'sums'}"
            )
        # One warning for a model, not one for each block.
        is_first_found = not any(tokens.why for tokens in self.stack.tokens)
        self.stack.tokens[self.place].why = why
        if is_first_found and dist.get_rank() == 0:
            logger.warning(
                "tensor_parallel: tokens stay whole in %s, and in blocks that compute likewise: %s. Numbers are those "
                "of one process; memory of what stands between split layers is not divided. "
                "tensor_parallel={'sequence_parallel': false} says so from the start",
                name,
                why,
            )
