"""A trial of one module in its first forward: does each rank compute its part of what
the unsplit module computes?

A module runs twice on inputs and weights drawn at random
(:mod:`smp_core.tensor_parallel.token_trial`), without gradients: as it is split, and as
it was before, with the forwards and attributes of that time, and each weight put
together from the parts of all ranks. What arrives at a row layer has to be this rank's
part of what arrives there unsplit, and what is returned has to be equal. This shows a
number of heads that a forward reads from an attribute, constants in a reshape, a norm
or softmax over split features, and a packed weight that is cut once, whatever the plan
comes from.

One layer's weight is unsplit at a time. FP8 layers multiply as plain ones, so that
their amaxes stay. Where units of FSDP2 are inside, the module's own weights are used.

Private name: ``Module._parameters`` (:mod:`smp_core.tensor_parallel.layers`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.fp8 import unquantized
from smp_core.outside import changed
from smp_core.tensor_parallel.adapters import around
from smp_core.tensor_parallel.layers import (
    WHOLE_TOKENS,
    Forward,
    around_compiled,
    hidden_among,
    showing,
)
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.randomness import NotedDropout, require_one_state
from smp_core.tensor_parallel.roles import Split, holds, numbers_of_heads
from smp_core.tensor_parallel.token_trial import TokenTrial
from smp_core.torch_facts import Args, Kwargs, seed_generators, without_caches

logger = logging.getLogger("smp")

OwnDim = Callable[[Tensor], "int | None"]

_OTHER_INPUT = 0.03
"""Ranks whose inputs differ by this share of their size read other batches."""


@dataclass(eq=False)
class Unsplit:
    """A model before it was split.

    Attributes:
        splits: module -> its role.
        before: module -> attributes that splitting has changed, with their values
            before.
    """

    splits: Mapping[nn.Module, Split]
    before: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)


@dataclass(eq=False)
class _Run:
    """One run.

    Attributes:
        called: split modules, in the order of their calls.
        arrived: what each was called with; None: it is no row layer.
        returned: floating-point tensors.
        error: what the forward raised; "": nothing.
    """

    called: list[nn.Module] = field(default_factory=list)
    arrived: list[Tensor | None] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the module, as both runs get it.

    Attributes:
        args, kwargs: with whole tokens.
        hidden: the hidden states among them.
        own_dim: of :meth:`UnsplitTrial.run`.
        dtype: of drawn weights and inputs; None: the module's own weights.
    """

    args: Args
    kwargs: Kwargs
    hidden: Tensor
    own_dim: OwnDim
    dtype: torch.dtype | None


class UnsplitTrial:
    """The trial of one module.

    Args:
        name: of the module; "": the model.
        forward: of the module as it is split, without recomputation and random numbers
            of its own.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Forward,
        axis: TensorAxis,
        unsplit: Unsplit,
    ) -> None:
        self.name = name
        self.module = module
        self.forward = forward
        self.axis = axis
        self.unsplit = unsplit
        self._splits = {
            each: unsplit.splits[each]
            for each in module.modules()
            if each in unsplit.splits
        }

    def run(self, args: Args, kwargs: Kwargs, own_dim: OwnDim) -> dict[int, int]:
        """Compare the two, and leave everything that a forward changes as before.
        Collective over the axis.

        Args:
            args, kwargs: of a call with whole tokens.
            own_dim: the dimension along which an argument is of this rank's heads;
                None: it is the same on all ranks.

        Returns:
            for what is returned alongside the hidden states and is of this rank's
            heads: its number -> the dimension.

        Raises:
            ValueError: ranks do not compute their parts; says what to write.
        """
        args, kwargs = without_caches(args, kwargs)
        hidden = _hidden_of(args, kwargs)
        if hidden is None or not self._splits:
            return {}
        self._require_one_input(hidden)
        inside = [
            module for module in self.module.modules() if module is not self.module
        ]
        # Units of FSDP2 gather their own parameters; drawn ones cannot be shown in
        # their place.
        is_wide = not any(isinstance(module, FSDPModule) for module in inside)
        stored = next(
            (p.dtype for p in self.module.parameters() if p.is_floating_point()),
            torch.float32,
        )
        dtype = hidden.dtype if hidden.is_floating_point() else stored
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # The length of sequences, for layers that leave padding out.
        length = hidden.shape[-2] if hidden.ndim > 1 else 0
        with changed(self.axis, length=length):
            # Full precision first, then the model's own where the forward cannot run in
            # it.
            for each in dict.fromkeys((wide, dtype)) if is_wide else (None,):
                call = _Call(args, kwargs, hidden, own_dim, each)
                split, whole = self._both(call)
                # An error in one of the two runs only is a finding; in both, this dtype
                # does not fit.
                if not (split.error and whole.error):
                    if torch.is_grad_enabled() and not self.axis.draws:
                        self._refuse_dropout(call)
                    # Another seed, for what draws random numbers.
                    again = functools.partial(self._both, call, seed=1)
                    return self._judged(split, whole, again)
            self._warn(f"where it raises {whole.error} with numbers drawn at random")
        return {}

    def _require_one_input(self, hidden: Tensor) -> None:
        """Check that all ranks were given the same: what each computes is a part of the
        same output. Collective over the axis.

        Raises:
            ValueError: other batches, or other random numbers before.
        """
        shape = torch.tensor(hidden.shape, device=hidden.device)
        is_one = self.axis.holds_alike(shape.double())
        if is_one:
            own = hidden.detach().double()
            mean = self.axis.all_reduce(own) / self.axis.degree
            # Kernels that ranks choose by themselves round differently.
            apart = (own - mean).norm() > _OTHER_INPUT * mean.norm()
            is_one = not bool(self.axis.maximum(apart.float()))
        if not is_one:
            if self.axis.draws:
                require_one_state(self.axis, hidden.device)
            raise self.axis.other_batches()

    def _drawing(self) -> TokenTrial:
        return TokenTrial(
            self.name, self.module, self.forward, self.axis, WHOLE_TOKENS, []
        )

    def _both(self, call: _Call, seed: int = 0) -> tuple[_Run, _Run]:
        """Run the module as it is split, and unsplit."""
        device = call.hidden.device
        is_wide = call.dtype is not None
        drawing = self._drawing()
        # Phase 1: as it is split.
        with drawing.undisturbed(device, is_wide, evaluating=True), torch.no_grad():
            shown = {} if call.dtype is None else drawing.drawn_weights(call.dtype)
            # The unsplit run is given the same numbers, with parts put together.
            given, whole_given = self._given(call, drawing)
            seed_generators(seed)
            split = self._played(self.forward, given, shown, self._noting)
        # Phase 2: as it was before.
        with drawing.undisturbed(device, is_wide, evaluating=True), torch.no_grad():
            for module in self.module.modules():
                # Forwards and attributes of before the split.
                vars(module).update(self.unsplit.before.get(module, {}))
            forward = self.unsplit.before.get(self.module, {}).get(
                "forward", self.forward
            )
            # The same seed: a forward that draws numbers draws the same ones twice.
            seed_generators(seed)
            whole = self._played(forward, whole_given, shown, self._with_whole_weights)
        return split, whole

    def _refuse_dropout(self, call: _Call) -> None:
        """Refuse dropout that is a function's: what is split would be dropped alike on
        all ranks."""
        drawing, noted = self._drawing(), NotedDropout()
        is_wide = call.dtype is not None
        with drawing.undisturbed(call.hidden.device, is_wide, False), torch.no_grad():
            shown = {} if call.dtype is None else drawing.drawn_weights(call.dtype)
            given, _ = self._given(call, drawing)
            with noted:
                self._played(self.forward, given, shown, self._noting)
        if noted.called:
            raise ValueError(
                f"tensor_parallel_degree={self.axis.degree}: {self.name or 'the model'} calls "
                f"{', '.join(sorted(noted.called))}, of no module of its own, and split activations would be dropped "
                "alike on all ranks; set the probability to 0.0 or, with sequence parallelism, write self.dropout = "
                "nn.Dropout(p) and call that"
            )

    def _given(self, call: _Call, drawing: TokenTrial) -> tuple[Any, Any]:
        """Return the arguments with what gradients come to drawn at random; and those
        of the unsplit module."""
        own: dict[int, int] = {}

        def of(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            dim = call.own_dim(tensor)
            # Hidden states and all that gradients come to: drawn, and alike on all
            # ranks.
            if dim is None and (tensor is call.hidden or tensor.requires_grad):
                return drawing.drawn_alike(tensor, call.dtype)
            # Masks and positions have a meaning that random numbers would not have.
            kept = tensor.detach().to(call.dtype or tensor.dtype)
            if dim is not None:
                own[id(kept)] = dim
            return kept

        given = map_tensors((call.args, call.kwargs), of)
        whole = map_tensors(
            given,
            lambda each: (
                self.axis.gather(each, own[id(each)]) if id(each) in own else each
            ),
        )
        return given, whole

    def _played(
        self,
        forward: Forward,
        given: tuple[Args, Kwargs],
        shown: Mapping[nn.Module, Mapping[str, Tensor | None]],
        stand_in: Callable[[nn.Module, Forward, _Run], Forward],
    ) -> _Run:
        run = _Run()
        # Each split layer notes its call; in the unsplit run it also computes with its
        # whole weight.
        for module in self._splits:
            if module is not self.module:
                vars(module)["forward"] = stand_in(module, module.forward, run)
        args, kwargs = given
        try:
            # Drawn weights in place, and FP8 layers as plain ones.
            with contextlib.ExitStack() as stack:
                for module, tensors in shown.items():
                    stack.enter_context(showing(module, tensors))
                stack.enter_context(unquantized())
                output = forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever a forward says to sizes that it does not expect.
            said = str(error).splitlines() or [""]
            run.error = f"{type(error).__name__}: {said[0][:300]}"
        else:
            run.returned = [
                tensor
                for _, tensor in iterate_tensors(output)
                if tensor.is_floating_point()
            ]
        return run

    def _note(self, run: _Run, module: nn.Module, args: Args) -> None:
        is_row = self._splits[module].role == "row"
        run.called.append(module)
        run.arrived.append(args[0] if is_row and args else None)

    def _noting(self, module: nn.Module, forward: Forward, run: _Run) -> Forward:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(run, module, args)
            return forward(*args, **kwargs)

        return noted

    def _with_whole_weights(
        self, module: nn.Module, forward: Forward, run: _Run
    ) -> Forward:
        def whole(*args: Any, **kwargs: Any) -> Any:
            self._note(run, module, args)
            own: dict[str, Any] = module._parameters
            parts = {name: p for name, p in own.items() if isinstance(p, DTensor)}
            # One layer's weight is whole at a time, so that the trial needs little
            # memory.
            with showing(
                module, {name: part.full_tensor() for name, part in parts.items()}
            ):
                return forward(*args, **kwargs)

        return whole

    def _judged(
        self, split: _Run, whole: _Run, again: Callable[[], tuple[_Run, _Run]]
    ) -> dict[int, int]:
        """Return what is of this rank's heads; refuse what is no part of the whole.

        Args:
            again: runs both with other random numbers.
        """
        # The unsplit module itself cannot be run like this: nothing can be said about
        # the split one.
        if whole.error:
            self._warn(f"where it raises {whole.error}")
            return {}
        # Outputs alongside the hidden states that are 1/T of the unsplit ones are of
        # this rank's heads.
        own = {
            n: dim
            for n, dim in enumerate(self._dims(split, whole))
            if n and dim is not None
        }
        # The ranks agree on the largest place, so that all raise or none does.
        place = self._agreed(self._first_difference(split, whole, own))
        if not place:
            return {n - 1: dim for n, dim in own.items()}
        # A forward that draws random numbers whatever its mode differs from itself.
        _, other = again()
        if not split.error and self._agreed(self._first_difference(other, whole, None)):
            self._warn("as it draws random numbers in evaluation too")
            return {}
        raise ValueError(self._words(split, place))

    def _warn(self, why: str) -> None:
        if dist.get_rank() == 0:
            name = f"{self.name or 'the model'} ({type(self.module).__name__})"
            logger.warning(
                "tensor_parallel: %s could not be compared with the unsplit model, %s",
                name,
                why,
            )

    def _agreed(self, place: int) -> int:
        device = next(self.module.parameters()).device
        return int(self.axis.maximum(torch.tensor(float(place), device=device)))

    def _dims(self, split: _Run, whole: _Run) -> list[int | None]:
        """Return for what is returned along which dimension ranks have parts of it;
        None: it is whole."""
        pairs = zip(split.returned, whole.returned, strict=False)
        return [_split_dim(part, of, self.axis.degree) for part, of in pairs]

    def _first_difference(
        self, seen: _Run, whole: _Run, own: Mapping[int, int] | None
    ) -> int:
        """Return where a run differs from the unsplit one: n for the n-th call of a
        split module, one more than all for what is returned; 0: nowhere.

        Args:
            own: numbers of what is returned in parts -> dimensions; None: the run is
                unsplit too.
        """
        # The place of what is returned: one behind all calls.
        last = len(seen.called) + 1

        def part(tensor: Tensor, dim: int | None) -> Tensor:
            if own is None or dim is None:
                return tensor
            return tensor.chunk(self.axis.degree, dim)[self.axis.rank]

        for place, (module, arrived) in enumerate(
            zip(seen.called, seen.arrived, strict=True), 1
        ):
            if place > len(whole.called) or whole.called[place - 1] is not module:
                break  # what is returned tells
            of = whole.arrived[place - 1]
            # Routed layers get other tokens where two routes are equal but for
            # roundings.
            if arrived is not None and of is not None and arrived.ndim == of.ndim:
                if arrived.shape[:-1] == of.shape[:-1] and _differs(
                    arrived, part(of, -1)
                ):
                    return place
        if seen.error or len(seen.returned) != len(whole.returned):
            return last
        for n, (tensor, of) in enumerate(
            zip(seen.returned, whole.returned, strict=True)
        ):
            # Parts are compared with this rank's part, all else with the whole.
            dim = (own or {}).get(n)
            # Where ranks share heads, a size is neither the whole nor 1/T of it.
            is_other_size = n > 0 and dim is None and tensor.shape != of.shape
            if not is_other_size and _differs(tensor, part(of, dim)):
                return last
        return 0

    def _words(self, split: _Run, place: int) -> str:
        """Return what to say where a difference was found."""
        # Where: what arrives at a split layer, or what comes out behind the last one.
        called = split.called[:place]
        names = [self._splits[module].name for module in called]
        if place <= len(split.called):
            # Only the layers since the last row layer can be at fault: before it, all
            # was found equal.
            rows = [
                n
                for n, module in enumerate(called[:-1])
                if self._splits[module].role == "row"
            ]
            first = rows[-1] + 1 if rows else 0
            layers = list(dict.fromkeys(names[first:]))
            where = f"what arrives at {names[-1]} is not this rank's part of what arrives there in the unsplit model"
        else:
            layers = list(dict.fromkeys(names)) or [
                split.name for split in self._splits.values()
            ]
            what = (
                f"behind {names[-1]} it raises {split.error}"
                if split.error and names
                else "it returns something"
            )
            where = f"{what} that the unsplit model does not"
        # The module of the user around these layers, whose code it is.
        above = around(layers[-1])
        while above != self.name and not _is_called(self._module_named(above)):
            above = above.rpartition(".")[0]
        parent = self.module if above == self.name else self._module_named(above)
        counted = ", ".join(
            f"{name}={value}" for name, value in numbers_of_heads(parent).items()
        )
        return (
            f"tensor_parallel.plan: {above or 'the model'} ({type(parent).__name__}), with {', '.join(layers[:6])} "
            f"split over tensor_parallel_degree={self.axis.degree}, does not compute this rank's part of what it "
            f"computes unsplit: {where}. Behind a 'column' layer there is 1/{self.axis.degree} of its features; take "
            f"sizes from these and not from attributes or constants{f' ({counted})' if counted else ''}, for example "
            "view(batch, tokens, -1, self.head_dim); write 'column:N' for a weight of N blocks, "
            "tensor_parallel={'plan': 'infer'}, which finds both out, or the role 'replicate' for these layers"
        )

    def _module_named(self, name: str) -> nn.Module:
        inside = name.removeprefix(f"{self.name}.") if self.name else name
        try:
            return self.module.get_submodule(inside)
        except AttributeError:
            return self.module


@dataclass(eq=False)
class ComparedForward:
    """The forward of a module with split layers outside of blocks: compared in its
    first call, and in the first that trains.

    Attributes:
        original: recomputes, where that was asked for.
        plain: does not.
    """

    name: str
    module: nn.Module
    original: Forward
    plain: Forward
    axis: TensorAxis
    unsplit: Unsplit
    compared: set[bool] = field(default_factory=set)

    @around_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._compare(args, kwargs)
        return self.original(*args, **kwargs)

    @torch.compiler.disable
    def _compare(self, args: Args, kwargs: Kwargs) -> None:
        trains = torch.is_grad_enabled()
        if trains not in self.compared:
            self.compared.add(trains)
            trial = UnsplitTrial(
                self.name, self.module, self.plain, self.axis, self.unsplit
            )
            trial.run(args, kwargs, lambda tensor: None)


_BEFORE_ROWS = ("column", "features")


def units_of(
    model: nn.Module, splits: Iterable[Split], blocks: Iterable[str]
) -> list[str]:
    """Return the names of the modules that are compared: blocks that hold both column
    and row layers, or experts; elsewhere the smallest module around a layer that does,
    or the model (``""``)."""
    # Roles whose layers leave part of the features, or of the sum, on each rank.
    partial = [
        split for split in splits if split.role in (*_BEFORE_ROWS, "row", "experts")
    ]

    def is_complete(name: str) -> bool:
        if not _is_called(model.get_submodule(name)):
            return False
        roles = {
            split.role
            for split in partial
            if not name or split.name.startswith(f"{name}.")
        }
        # A module is complete if what it splits is also added up again inside it.
        return "experts" in roles or (
            "row" in roles and not roles.isdisjoint(_BEFORE_ROWS)
        )

    complete = [name for name in blocks if is_complete(name)]
    found = dict.fromkeys(complete)
    # Layers outside of blocks: the smallest complete module around each.
    for split in partial:
        if not holds(complete, split.name):
            parts = split.name.split(".")
            above = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
            found.setdefault(next(filter(is_complete, above), ""))
    return list(found)


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward: lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _hidden_of(args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the first tensor of a call; None without one."""
    try:
        return hidden_among(args, kwargs)
    except ValueError:
        return next((tensor for _, tensor in iterate_tensors([args, kwargs])), None)


def _split_dim(part: Tensor, whole: Tensor, degree: int) -> int | None:
    """Return the one dimension of which ``part`` has 1/T of ``whole``; None: they are
    of other shapes, or of one."""
    if part.ndim != whole.ndim:
        return None
    # Exactly one dimension may differ, by the factor T.
    other = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
    is_part = len(other) == 1 and part.shape[other[0]] * degree == whole.shape[other[0]]
    return other[0] if is_part else None


def _differs(seen: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors [..., H] differ by more than roundings, in more rows
    than those whose routes are a matter of rounding."""
    if seen.shape != expected.shape:
        return True
    # A number, or one row of numbers alongside the hidden states.
    if seen.ndim < 2:
        seen, expected = seen.reshape(1, -1), expected.reshape(1, -1)
    # Limits by dtype, against each row's largest value and the largest of all.
    is_low = expected.dtype not in (torch.float64, torch.float32)
    relative, of_largest, spared = (3e-2, 3e-2, 10) if is_low else (1e-4, 1e-6, 1000)
    # Infinities of masks compare as equal numbers; rows are tokens.
    seen, expected = (
        each.nan_to_num(1.0, 2.0, -2.0).flatten(0, -2) for each in (seen, expected)
    )
    if not seen.numel():
        return False
    bound = (
        relative * expected.abs().amax(-1, keepdim=True)
        + of_largest * expected.abs().max()
    )
    # A few rows may differ: a router may choose another expert by a rounding.
    apart = ((seen - expected).abs() > bound).any(-1)
    return int(apart.sum()) > len(apart) // spared
