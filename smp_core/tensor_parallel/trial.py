"""Trials on one rank alone: does a block compute the same if some of its layers are
split? Each rank's part is simulated, one after the other.

Column layers return this rank's part of outputs that were drawn at random. What arrives
at row layers has to be this rank's part of what arrives there in the whole block; these
return random outputs too, of this rank's tokens. Weights are neither read nor copied,
so a trial costs what lies between the layers. Tokens are whole here: whether a block
can do with a part of them is tried out on all ranks, for plans of any kind
(:mod:`smp_core.tensor_parallel.token_trial`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from smp_core.checkpoint import iterate_tensors
from smp_core.outside import changed
from smp_core.tensor_parallel.adapters import around
from smp_core.tensor_parallel.layers import with_hidden, with_others
from smp_core.tensor_parallel.roles import is_conv1d
from smp_core.torch_facts import Args, Kwargs

_PIECES = (1, 2, 3)
_MOST_ATTRIBUTES = 8  # 2^8 trials
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Group:
    """Layers of one block that are split together.

    Attributes:
        columns, rows: names of layers.
        between: names of modules with parameters between them.
        pieces: equal blocks in the weight of each column.
        divided: (module, attribute) of numbers that count what is split.
        gathered: the module whose tokens are gathered as a whole; "": each column
            gathers its own.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    between: tuple[str, ...]
    pieces: int = 1
    divided: tuple[tuple[str, str], ...] = ()
    gathered: str = ""


@dataclass(frozen=True, eq=False)
class Call:
    """A recorded call of a module: its first tensor [..., N, H], and the first one of
    its output; with their nodes in the graph at that time, which what is done in place
    changes."""

    hidden: Tensor
    output: Tensor
    taken: Any
    made: Any


class Block:
    """One block, and the calls of its modules in one run of the model.

    Attributes:
        inside: name -> module.
        linears: linear layer -> name, in the order in which they were called.
        entered: what the block took, a leaf of the graph.
        handed_on: numbers of the tensors alongside its hidden states that other blocks
            take.
        calls: of the block in one run.
    """

    entered: Tensor
    output: Tensor

    def __init__(
        self, name: str, module: nn.Module, names: Mapping[nn.Module, str]
    ) -> None:
        self.name, self.module = name, module
        self.inside = {names[each]: each for each in module.modules()}
        self._names = names
        self.linears: dict[nn.Module, str] = {}
        self.calls = 0
        self.handed_on: list[int] = []
        self._returned: list[Tensor] = []
        self._seen: dict[nn.Module, list[Call]] = {}
        self._arguments: tuple[Args, Kwargs] = ((), {})

    def watch(self) -> Iterator[Any]:
        """Register hooks that note calls; yield their handles."""
        yield self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for module in self.inside.values():
            yield module.register_forward_hook(self._note, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        self.calls += 1
        # Leaves of the graph, so that it ends at what enters the block.
        args, kwargs = with_hidden(
            args, kwargs, lambda hidden: hidden.detach().requires_grad_()
        )
        args, kwargs = with_others(
            args, kwargs, lambda other: other.detach().requires_grad_()
        )
        self._arguments = args, kwargs
        self.entered = _hidden_of(args, kwargs)
        return args, kwargs

    def _note(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        # Modules without tensors on both sides (containers, masks) have nothing to
        # compare.
        tensors = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
        ]
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not tensors or not isinstance(first, Tensor):
            return
        hidden = _hidden_of(args, kwargs)
        # The nodes are noted now: an in-place operation later replaces them.
        self._seen.setdefault(module, []).append(
            Call(hidden, first, hidden.grad_fn, first.grad_fn)
        )
        if isinstance(module, nn.Linear) or is_conv1d(module):
            self.linears.setdefault(module, self._names[module])
        if module is self.module:
            # The block's own hook runs last, with all that it returns.
            self.output = first
            self._returned = [tensor for _, tensor in iterate_tensors(output)]

    def of_linears(self) -> Iterator[tuple[nn.Module, Call]]:
        """Yield the linear layers that were called once, with their calls."""
        for module in self.linears:
            call = self.call_of(module)
            if call is not None:
                yield module, call

    def call_of(self, module: nn.Module) -> Call | None:
        """Return a module's call; None: there was none, or there were several."""
        seen = self._seen.get(module, [])
        return seen[0] if len(seen) == 1 else None

    def taken(self) -> set[int]:
        """Return where in memory the tensors are that the block took."""
        return {tensor.data_ptr() for _, tensor in iterate_tensors(self._arguments)}

    def note_handed_on(self, taken: set[int]) -> None:
        """Note which of the tensors that it returned are among those that blocks
        took."""
        self.handed_on = [
            n
            for n, tensor in enumerate(self._returned)
            if n and tensor.data_ptr() in taken
        ]

    def play(self) -> list[Tensor]:
        """Call the block again; return the first tensor of its output, and those that
        it hands on beside it."""
        # The same arguments as in the recorded run; forwards in it may have been
        # exchanged.
        args, kwargs = self._arguments
        returned = [
            tensor for _, tensor in iterate_tensors(self.module(*args, **kwargs))
        ]
        return [returned[number] for number in (0, *self.handed_on)]


def _hidden_of(args: Args, kwargs: Kwargs) -> Tensor:
    found: list[Tensor] = []

    def take(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return hidden

    with_hidden(args, kwargs, take)
    return found[0]


def mixes_tokens(hidden: Tensor, output: Tensor) -> bool:
    """Return whether an output's first or last token depends on other tokens [..., N,
    H] of the input, in its graph."""
    if (
        # Without a graph, or a dimension of tokens, nothing can be seen.
        not hidden.requires_grad
        or not output.requires_grad
        or hidden.ndim < 3
        or output.ndim != hidden.ndim
    ):
        return False
    # Causal attention shows at the last token, its mirror image at the first.
    for end, others in ((0, slice(1, None)), (-1, slice(0, -1))):
        (grad,) = torch.autograd.grad(
            output[..., end, :].sum(), hidden, retain_graph=True, allow_unused=True
        )
        if grad is not None and bool(grad[..., others, :].count_nonzero()):
            return True
    return False


class _Differs(Exception):
    """An error: what arrives at a row layer is not a part of the whole, or something
    else leaves the block."""


class Trial:
    """Trials of one block.

    Args:
        degree: the ranks that share its layers.
    """

    def __init__(self, block: Block, degree: int) -> None:
        self.block, self.degree = block, degree
        self._generator = torch.Generator().manual_seed(0)

    def fitted(self, group: Group, known: dict[Any, Any]) -> Group | None:
        """Return the group with what has to be done for it; None: it cannot be split.

        Args:
            known: what was found for alike groups of other blocks: what is tried first,
                or None for what cannot be split.
        """
        # Names inside the block, so that alike blocks compare as equal.
        start = len(self.block.name)
        layers = tuple(name[start:] for name in (*group.columns, *group.rows))
        kinds = tuple(
            (name[start:], type(module)) for name, module in self.block.inside.items()
        )
        alike = (
            layers,
            kinds,
            tuple(
                self._output(name).shape[-1] for name in (*group.columns, *group.rows)
            ),
        )
        # A known answer is checked on this block too: its weights are others, and so
        # may its numbers be.
        if alike in known:
            if known[alike] is None:
                return None
            pieces, divided = known[alike]
            here = tuple(
                (f"{self.block.name}{name}", attribute) for name, attribute in divided
            )
            tried = replace(group, pieces=pieces, divided=here)
            if self._passes(tried):
                return self._with_gathering(tried)
        # Otherwise from the beginning, the least first.
        for tried in self._possible(group):
            if self._passes(tried):
                known[alike] = (
                    tried.pieces,
                    tuple(
                        (name[start:], attribute) for name, attribute in tried.divided
                    ),
                )
                return self._with_gathering(tried)
        known.setdefault(alike, None)
        return None

    def _possible(self, group: Group) -> Iterator[Group]:
        """Yield what may have to be done for a group, the least first."""
        outputs = [self._output(name).shape[-1] for name in group.columns]
        inputs = [self._call(name).hidden.shape[-1] for name in group.rows]
        counting = list(self._counting(group, outputs))[:_MOST_ATTRIBUTES]
        # Rows of uneven inputs cannot be cut.
        if any(size % self.degree for size in inputs):
            return
        # Few attributes before many, one block before several.
        for number in range(len(counting) + 1):
            for divided in itertools.combinations(counting, number):
                for pieces in _PIECES:
                    if all(size % (pieces * self.degree) == 0 for size in outputs):
                        yield replace(group, pieces=pieces, divided=divided)

    def _counting(
        self, group: Group, outputs: Sequence[int]
    ) -> Iterator[tuple[str, str]]:
        """Yield the numbers that modules around the layers have, and that may count
        heads or features."""
        layers = (*group.columns, *group.rows)
        for name, module in self.block.inside.items():
            if any(layer.startswith(f"{name}.") for layer in layers):
                # Plain integers of the module itself; True and properties are none.
                for attribute, value in vars(module).items():
                    if type(value) is int and value > 1 and value % self.degree == 0:
                        if any(size % value == 0 for size in outputs):
                            yield name, attribute

    def _passes(self, group: Group) -> bool:
        try:
            # Every rank's part has to come out right: attention could pass on the first
            # by chance.
            for rank in range(self.degree):
                self._compare(group, rank)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a forward says to sizes that it does not expect
            return False
        return True

    def _with_gathering(self, group: Group) -> Group | None:
        """Find out whether what lies between the layers looks at several tokens, which
        are gathered then."""
        # Drawn outputs are leaves here, so that the graph between the layers shows who
        # reads which token.
        drawn = {
            name: self._drawn(name).requires_grad_()
            for name in (*group.columns, *group.rows)
        }
        arrived: dict[str, Tensor] = {}
        with self._playing(group, drawn.__getitem__, arrived.__setitem__):
            self.block.play()
        mixes = any(
            mixes_tokens(drawn[name], hidden)
            for name in group.columns
            for hidden in arrived.values()
        )
        return replace(group, gathered=around(group.columns[0])) if mixes else group

    @torch.no_grad()
    def _compare(self, group: Group, rank: int) -> None:
        """Play the block whole and as one rank.

        Raises:
            _Differs: something differs; any other error of a forward whose sizes do not
                fit.
        """
        # Phase 1: the whole block, for what arrives at row layers.
        drawn = {name: self._drawn(name) for name in (*group.columns, *group.rows)}
        expected: dict[str, Tensor] = {}
        with self._playing(group, drawn.__getitem__, expected.__setitem__):
            outputs = self.block.play()

        # Phase 2: the same outputs, of which this rank has its part.
        def part(name: str) -> Tensor:
            if name in group.rows:
                return drawn[name]
            pieces = drawn[name].chunk(group.pieces, -1)
            return torch.cat(
                [piece.chunk(self.degree, -1)[rank] for piece in pieces], -1
            )

        def arrive(name: str, hidden: Tensor) -> None:
            _require_close(hidden, expected[name].chunk(self.degree, -1)[rank])

        with self._divided(group.divided), self._playing(group, part, arrive):
            for seen, output in zip(self.block.play(), outputs, strict=True):
                _require_close(seen, output)

    @contextlib.contextmanager
    def _playing(
        self,
        group: Group,
        given: Callable[[str], Tensor],
        arrive: Callable[[str, Tensor], None],
    ) -> Iterator[None]:
        """Let columns and rows return what is given, and rows show what arrives."""

        def column(name: str) -> Callable[..., Any]:
            return lambda hidden: given(name).clone()  # forwards may change it in place

        def row(name: str) -> Callable[..., Any]:
            def forward(hidden: Tensor) -> Tensor:
                arrive(name, hidden)
                return given(name).clone()

            return forward

        # The layers' own forwards are left out: their products are not what is in
        # question.
        forwards = {name: column(name) for name in group.columns}
        forwards |= {name: row(name) for name in group.rows}
        with contextlib.ExitStack() as stack:
            for name, forward in forwards.items():
                stack.enter_context(changed(self.block.inside[name], forward=forward))
            yield

    @contextlib.contextmanager
    def _divided(self, attributes: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Let numbers of modules count what one rank has."""
        with contextlib.ExitStack() as stack:
            for name, attribute in dict.fromkeys(attributes):
                module = self.block.inside[name]
                own = getattr(module, attribute) // self.degree
                stack.enter_context(changed(module, **{attribute: own}))
            yield

    def _call(self, name: str) -> Call:
        call = self.block.call_of(self.block.inside[name])
        assert call is not None
        return call

    def _output(self, name: str) -> Tensor:
        return self._call(name).output

    def _drawn(self, name: str) -> Tensor:
        output = self._output(name).detach()
        return torch.randn(output.shape, generator=self._generator).to(output)


def _require_close(seen: Tensor, expected: Tensor) -> None:
    # Half precision: 3 percent, as sums are made in another order.
    tolerance = _TOLERANCE.get(expected.dtype, 3e-2)
    if seen.shape != expected.shape or not torch.allclose(
        seen, expected, rtol=tolerance, atol=tolerance
    ):
        raise _Differs
