"""A trial of one block: does it compute the same with a part of its tokens? It runs on
the layers and ranks that train.

The block runs twice, forward and backward, once with all tokens on every rank and once
with each rank's own. If outputs, or gradients of anything that it reads, differ between
the two, its tokens stay whole. Attention that no plan names, convolutions, sums over
tokens, positions that the block counts and batch norms show like this, wherever in its
forward they stand; and so does everything that gets no or a wrong gradient.

Inputs and weights are drawn at random, alike on all ranks: fresh weights hide what they
multiply by zero (gates of adaLN, LayerScale, last layers of residual branches). Drawn
ones are float32 or float64, so that roundings do not look like differences. Blocks with
units of FSDP2 inside, or with FP8 layers, which keep amaxes of backward, are compared
without gradients and with their own weights.

Private names: ``_forward_hooks`` and ``_forward_pre_hooks``, which are hidden during
the trial (a trial is no call that a hook is meant to see) and which torch shows
nowhere else, and ``Module._parameters`` (:mod:`smp_core.tensor_parallel.layers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.fp8 import SITES
from smp_core.outside import changed
from smp_core.plan.chain import KeptTensors, state_restored
from smp_core.tensor_parallel.layers import (
    Forward,
    SummingForward,
    Tokens,
    hidden_among,
    showing,
    with_hidden,
    with_other_outputs,
    with_others,
)
from smp_core.tensor_parallel.operators import TensorAxis, gradient_once, sum_gradient
from smp_core.torch_facts import (
    Args,
    Kwargs,
    TrialGenerator,
    local_part,
    without_caches,
)

# Tolerances of values and gradients: relative to the largest of a token or tensor, and
# to the largest gradient of all, which covers what is zero but for roundings.
_TOLERANCE = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
_LOW_PRECISION = (3e-2, 3e-2)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Found:
    """The result of a trial.

    Attributes:
        why: tokens stay whole; "": they are split.
        own_outputs: numbers of the tensors alongside the hidden states that are of this
            rank's heads.
    """

    why: str
    own_outputs: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Leaf:
    """A tensor that the block reads.

    Attributes:
        kind: "hidden", "other" (an argument), "own" (an argument that is of this rank's
            heads), "whole" (a parameter that every rank holds), "part" (this rank's
            part of a parameter).
    """

    name: str
    kind: str
    tensor: Tensor


@dataclass(eq=False)
class _Seen:
    """One run: the hidden states that were returned, the other outputs, the gradients
    of all leaves, and how many leaves of the graph are not known."""

    hidden: Tensor
    others: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)
    unknown: int = 0


class _CannotRun(Exception):
    """A run raised something."""


class TokenTrial:
    """The trial of one block.

    Args:
        forward: of the block, without recomputation and random numbers of its own.
        tokens: of the block.
        summing: forwards inside that add up gradients of parameters.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        forward: Forward,
        axis: TensorAxis,
        tokens: Tokens,
        summing: list[SummingForward],
    ) -> None:
        self.name = name
        self.block = block
        self.forward = forward
        self.axis = axis
        self.tokens = tokens
        self.summing = summing
        self._leaves: list[_Leaf] = []
        self._own_outputs: frozenset[int] = frozenset()

    def run(
        self,
        args: Args,
        kwargs: Kwargs,
        is_own: Callable[[Tensor], bool],
        stay_whole: str,
        evaluating: bool,
    ) -> Found:
        """Try the block out, and leave it with split tokens if they can be. Collective
        over the axis; everything that a forward changes is as before.

        Args:
            args, kwargs: of a call with whole tokens.
            is_own: whether an argument is of this rank's heads.
            stay_whole: why tokens have to; "": it is to be found out.
            evaluating: leave dropout out.

        Raises:
            ValueError: gradients that whole tokens would not make right either; tokens
                that ranks cannot share equally.
        """
        args, kwargs = without_caches(args, kwargs)
        # Drawn weights replace the block's own, but not where units of FSDP2 are inside
        # (they gather their own) or FP8 layers (they keep amaxes).
        inside = [module for module in self.block.modules() if module is not self.block]
        is_wide = not any(
            isinstance(module, FSDPModule) or hasattr(module, SITES)
            for module in inside
        )
        hidden = hidden_among(args, kwargs)
        self._device, self._is_trained = hidden.device, hidden.requires_grad
        # Without a token dimension there is nothing to split, but ranks still compare
        # what they return with whole tokens.
        if not hidden.is_floating_point() or hidden.ndim < 2:
            stay_whole = stay_whole or "its first tensor is not [..., tokens, features]"
        # The axis notes the length of the present call; the trial's is another.
        length = hidden.shape[-2] if hidden.ndim > 1 else 0
        why = stay_whole or "it cannot be run with numbers drawn at random"
        self._kept = KeptTensors(self.block)
        with (
            changed(self.axis, length=length),
            self.undisturbed(hidden.device, is_wide, evaluating),
        ):
            # Full precision first; where a forward cannot run in it (a cast to half
            # inside), its own dtype is tried.
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            for dtype in dict.fromkeys((wide, hidden.dtype)) if is_wide else (None,):
                with contextlib.suppress(_CannotRun):
                    why = self._compared(args, kwargs, is_own, dtype, stay_whole)
                    break
        # From here on, the forwards inside the block do what was found.
        self.tokens.split = not why
        return Found(why, self._own_outputs)

    def _compared(
        self,
        args: Args,
        kwargs: Kwargs,
        is_own: Callable[[Tensor], bool],
        dtype: Any,
        failed: str,
    ) -> str:
        """Return why tokens have to stay whole; "": they can be split.

        Args:
            dtype: of drawn weights and inputs; None: the block's own weights, and no
                gradients.

        Raises:
            _CannotRun: with whole tokens; ValueError as :meth:`run`.
        """
        self._leaves = []
        shown: dict[nn.Module, dict[str, Tensor | None]] = (
            {} if dtype is None else self.drawn_weights(dtype)
        )
        args, kwargs = self._drawn_inputs(args, kwargs, is_own, dtype)
        open_sums = []
        # Without gradients nothing can settle the open assumptions; they stay as they
        # are.
        if dtype is not None:
            open_sums = [each for each in self.summing if each.is_open]
        with contextlib.ExitStack() as stack:
            # The drawn weights stand in the place of the parameters for both phases.
            for module, tensors in shown.items():
                stack.enter_context(showing(module, tensors))
            stack.enter_context(torch.set_grad_enabled(dtype is not None))
            # Phase 1: whole tokens. What other ranks return otherwise is of their
            # heads.
            # Open sums are switched off, so that parts of gradients show as differences
            # between the ranks.
            for each in open_sums:
                each.always = False
            try:
                whole, calls = self._noting_calls(args, kwargs)
            finally:
                for each in open_sums:
                    each.always = True
            self._own_outputs = frozenset(
                n
                for n, differs in enumerate(self._differing(whole.others, whole.others))
                if differs
            )
            # What differs is part of a sum; the sum is what split tokens have to give.
            apart = self._require_gradients_of_whole_tokens(whole, open_sums, shown)
            # Phase 2: each rank's own tokens.
            if not failed and whole.hidden.shape != hidden_among(args, kwargs).shape:
                failed = "what it returns is not of the shape of what it takes"
            failed = failed or self._keeping()
            if whole.unknown and not failed:
                failed = "it reads something that is trained and neither its own nor an argument"
            # All ranks have to make the same collectives, so the calls must not hang on
            # the numbers.
            failed = failed or self._calls_by_content(calls, args, kwargs)
            if not failed:
                require_equal_parts(whole.hidden.shape[-2], self.axis.degree)
                failed = self._with_own_tokens(whole, args, kwargs)
        # One rank's finding is everyone's: a rank that went on with split tokens alone
        # would wait forever.
        differs = self.axis.maximum(
            torch.tensor(float(bool(failed)), device=self._device)
        )
        # With whole tokens these gradients would stay parts, and no forward inside adds
        # them up.
        if differs and apart - {
            leaf for each in open_sums for leaf in self._leaves_of(each, shown)
        }:
            names = ", ".join(sorted(leaf.name for leaf in apart))
            raise ValueError(
                f"tensor_parallel: in {self.name}, {names} is used between layers whose features are split, so that "
                "each tensor rank has a part of its gradient, and tokens cannot be split, where such parts are added "
                "up; leave these layers out of tensor_parallel.plan"
            )
        return failed or (
            "another rank computes something else with its part of the tokens"
            if differs
            else ""
        )

    def _keeping(self) -> str:
        # A step may take its loss of such a tensor, and gradients of parts are no sums.
        for place, _, tensor in self._kept.found():
            if tensor.requires_grad:
                return f"its forward keeps a tensor with a gradient ({place})"
        return ""

    def _noting_calls(self, args: Args, kwargs: Kwargs) -> tuple[_Seen, list[Any]]:
        """Run the block with whole tokens; return what was seen, and which layers were
        called on how much."""
        calls: list[Any] = []
        with changed(self.tokens, calls=calls):
            return self._played(False, args, kwargs), calls

    def _calls_by_content(self, calls: list[Any], args: Args, kwargs: Kwargs) -> str:
        """Return why ranks with other tokens would not make the same calls, and wait
        for one another; "": they do."""

        def other(hidden: Tensor) -> Tensor:
            return self._random(hidden.shape, hidden.dtype, hidden.device, 50)

        # The same shapes with other numbers: what stays the same is the structure of
        # the calls.
        args, kwargs = with_hidden(args, kwargs, other)
        with torch.no_grad():
            _, others = self._noting_calls(args, kwargs)
        return (
            ""
            if calls == others
            else "which layers it calls, or on how many tokens, depends on what the tokens are"
        )

    def _with_own_tokens(self, whole: _Seen, args: Args, kwargs: Kwargs) -> str:
        """Return what is not the same with a part of the tokens."""
        try:
            split = self._played(True, args, kwargs)
        except _CannotRun as error:
            return f"with a part of the tokens it raises {error}"
        if not self._is_same(whole, split):
            return "it does not compute the same with a part of the tokens between its layers"
        return ""

    def _require_gradients_of_whole_tokens(
        self,
        whole: _Seen,
        open_sums: list[SummingForward],
        shown: dict[nn.Module, dict[str, Tensor | None]],
    ) -> set[_Leaf]:
        """Return the leaves of which each rank has a part of the gradient with whole
        tokens; their sums are put in place of these."""
        if not whole.gradients:
            return set()
        # Gradients of this rank's own heads and weights differ by right.
        own = {n for n, leaf in enumerate(self._leaves) if leaf.kind in ("own", "part")}
        gradients = [self._gradient(whole, n) for n in range(len(self._leaves))]
        shared = [gradient for n, gradient in enumerate(gradients) if n not in own]
        # The answers come in the order of the shared gradients only.
        differing = iter(self._differing(shared, gradients))
        apart = set()
        for n, leaf in enumerate(self._leaves):
            if (
                n not in own
                and next(differing)
                and (leaf.kind != "hidden" or self._is_trained)
            ):
                # The sum over the ranks is the gradient that one process has.
                whole.gradients[n] = self.axis.all_reduce(gradients[n])
                apart.add(leaf)
        # Assumptions are settled here: a forward sums only if a gradient of its own was
        # a part.
        for each in open_sums:
            each.always = bool(apart & set(self._leaves_of(each, shown)))
        return apart

    def _leaves_of(
        self, summing: SummingForward, shown: dict[nn.Module, dict[str, Tensor | None]]
    ) -> Iterator[_Leaf]:
        tensors = shown.get(summing.module, {}).values()
        for leaf in self._leaves:
            if any(leaf.tensor is each for each in tensors):
                yield leaf

    def _gradient(self, seen: _Seen, number: int) -> Tensor:
        found = seen.gradients[number]
        return torch.zeros_like(self._leaves[number].tensor) if found is None else found

    def _differing(self, tensors: list[Tensor], scaled_by: list[Tensor]) -> list[bool]:
        """Return for each tensor whether ranks have different ones. Collective over the
        axis."""
        if not tensors:
            return []
        # One scale for all: a gradient that is zero but for roundings is no difference.
        largest = max(map(_largest, scaled_by))
        found = []
        for tensor in tensors:
            # A tensor that equals the mean of the ranks on every rank is the same on
            # all.
            mean = self.axis.all_reduce(tensor.detach()) / self.axis.degree
            found.append(not _is_close(tensor.detach(), mean, largest))
        # A rank may be close to the mean where another is not, so the verdicts are
        # shared.
        return (
            self.axis.maximum(torch.tensor(found, device=self._device).float()) > 0
        ).tolist()

    def _is_same(self, whole: _Seen, split: _Seen) -> bool:
        """Return whether this rank's part is a part of the whole."""
        # Outputs first: this rank's tokens of the hidden states, and all of what comes
        # beside them.
        values = [
            (self._own_tokens(whole.hidden), split.hidden),
            *zip(whole.others, split.others, strict=False),
        ]
        if len(whole.others) != len(split.others) or not all(
            _is_close(seen, of, by_token=True) for of, seen in values
        ):
            return False
        if not whole.gradients:
            return True
        # Then gradients, of every leaf that the block reads.
        expected = [self._gradient(whole, n) for n in range(len(self._leaves))]
        largest = max(map(_largest, expected))
        for number, leaf in enumerate(self._leaves):
            gradient, of = self._gradient(split, number), expected[number]
            if leaf.kind == "hidden":
                # Only this rank's tokens get a gradient on this rank.
                gradient, of = self._own_tokens(gradient), self._own_tokens(of)
            if not _is_close(gradient, of, largest):
                return False
        return True

    def _own_tokens(self, hidden: Tensor) -> Tensor:
        return hidden.chunk(self.axis.degree, -2)[self.axis.rank]

    def _played(self, split: bool, args: Args, kwargs: Kwargs) -> _Seen:
        """Run the block forward and, where gradients are compared, backward.

        Raises:
            _CannotRun: it raised something.
        """
        self.tokens.split = split
        try:
            return self._computed(split, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever a forward says to sizes that it does not expect.
            said = str(error).splitlines() or [""]
            raise _CannotRun(f"{type(error).__name__}: {said[0][:300]}") from error
        finally:
            self.tokens.split = False

    def _computed(self, split: bool, args: Args, kwargs: Kwargs) -> _Seen:
        axis = self.axis
        # An argument of this rank's heads differs between ranks from the start, and its
        # gradient is complete on each.
        own = {id(leaf.tensor) for leaf in self._leaves if leaf.kind == "own"}
        # The same preparations that a block makes when it trains with split tokens.
        if split:
            args, kwargs = with_hidden(
                args, kwargs, lambda hidden: self._own_tokens(hidden).contiguous()
            )
            args, kwargs = with_others(
                args,
                kwargs,
                lambda other: other if id(other) in own else sum_gradient(other, axis),
            )
        output = self.forward(*args, **kwargs)
        # The hidden states come first in what a block returns.
        first, *others = _floating(output)
        seen = _Seen(first.detach(), [each.detach() for each in others])
        if not torch.is_grad_enabled() or not first.requires_grad:
            return seen
        # Each output alongside the tokens is counted once, as a block does when it
        # trains.
        if split:
            owned = {
                id(each) for n, each in enumerate(others) if n in self._own_outputs
            }
            output = with_other_outputs(
                output,
                lambda other: (
                    other if id(other) in owned else gradient_once(other, axis)
                ),
            )
            first, *others = _floating(output)
        # Random weights of the sum stand for what later layers would send back; no
        # gradient is zero by chance.
        targets = [first, *(each for each in others if each.requires_grad)]
        # The hidden states' weights are drawn for all tokens, so that both runs have
        # the same loss.
        shape = list(first.shape)
        if split:
            shape[-2] *= self.axis.degree
        of_hidden = self._random(shape, first.dtype, first.device, 1)
        weights = [self._own_tokens(of_hidden) if split else of_hidden]
        weights += [
            self._random(each.shape, each.dtype, each.device, 2 + n)
            for n, each in enumerate(targets[1:])
        ]
        loss = sum(
            (each * weight).sum() for each, weight in zip(targets, weights, strict=True)
        )
        leaves = [leaf.tensor for leaf in self._leaves]
        seen.unknown = _unknown_leaves(loss, leaves)
        seen.gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))  # type: ignore[arg-type]
        return seen

    def _random(
        self, shape: Any, dtype: torch.dtype, device: torch.device, seed: int
    ) -> Tensor:
        # A generator of its own: the trial leaves the global random states alone.
        generator = TrialGenerator(device).manual_seed(seed)
        kind = dtype if dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=kind).to(
            dtype
        )

    def _leaf(
        self, name: str, kind: str, like: Tensor, dtype: Any, scale: float = 1.0
    ) -> Tensor:
        # Parts differ between ranks, all else is drawn alike; the number of the leaf
        # keeps two runs alike.
        seed = (
            100
            + len(self._leaves)
            + (10_000 * (1 + self.axis.rank) if kind in ("own", "part") else 0)
        )
        tensor = (
            self._random(like.shape, dtype or like.dtype, like.device, seed) * scale
        ).requires_grad_()
        self._leaves.append(_Leaf(name, kind, tensor))
        return tensor

    def drawn_alike(self, like: Tensor, dtype: Any) -> Tensor:
        """Return a random tensor, the same on all ranks."""
        return self._leaf("", "other", like, dtype).detach()

    def _drawn_inputs(
        self, args: Args, kwargs: Kwargs, is_own: Callable[[Tensor], bool], dtype: Any
    ) -> Any:
        """Return the arguments with the hidden states, and all else that gradients come
        to, drawn at random."""
        hidden = hidden_among(args, kwargs)
        drawn = self._leaf("what it takes", "hidden", hidden, dtype)

        # The one tensor becomes a leaf, the rest of the arguments is kept and only
        # cast.
        def of(tensor: Tensor) -> Tensor:
            if tensor is hidden:
                return drawn
            if tensor.requires_grad and tensor.is_floating_point():
                name = next(
                    (key for key, value in kwargs.items() if value is tensor),
                    "an argument",
                )
                return self._leaf(
                    name, "own" if is_own(tensor) else "other", tensor, dtype
                )
            return (
                tensor.to(dtype)
                if dtype is not None and tensor.is_floating_point()
                else tensor
            )

        return map_tensors((args, kwargs), of)

    def drawn_weights(
        self, dtype: torch.dtype
    ) -> dict[nn.Module, dict[str, Tensor | None]]:
        """Return random weights for all modules inside; one for those that share a
        parameter."""
        made: dict[int, Tensor] = {}
        found: dict[nn.Module, dict[str, Tensor | None]] = {}
        names = {module: name for name, module in self.block.named_modules()}
        for module in self.block.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    if id(parameter) not in made:
                        full_name = f"{names[module]}.{key}" if names[module] else key
                        made[id(parameter)] = self._drawn_weight(
                            full_name, parameter, dtype
                        )
                    found.setdefault(module, {})[key] = made[id(parameter)]
        return found

    def _drawn_weight(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        # A split parameter is drawn as this rank's part, and shown as a DTensor again,
        # as forwards expect it.
        is_part = isinstance(parameter, DTensor)
        stored: Tensor = local_part(parameter)
        # Outputs of a layer stay near the size of its inputs.
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
        drawn = self._leaf(
            name, "part" if is_part else "whole", stored.detach(), dtype, scale
        )
        # A frozen parameter has no gradient to compare.
        if not parameter.requires_grad:
            self._leaves.pop()
            drawn = drawn.detach()
        if not isinstance(parameter, DTensor):
            return drawn
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            drawn,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @contextlib.contextmanager
    def undisturbed(
        self, device: torch.device, is_wide: bool, evaluating: bool
    ) -> Iterator[None]:
        """Restore random states, buffers, and attributes of all modules; hide hooks,
        casts and recomputation."""
        # What a forward may leave behind: attributes (counters, caches) and values of
        # buffers.
        attributes = {module: dict(vars(module)) for module in self.block.modules()}
        on_cpu = device.type == "cpu"
        forked = torch.random.fork_rng(
            [] if on_cpu else [device], device_type="cuda" if on_cpu else device.type
        )
        with (
            forked,
            state_restored(self.block),
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False)
            if is_wide
            else contextlib.nullcontext(),
            # On top of those of a checkpoint around the block.
            torch.autograd.graph.saved_tensors_hooks(
                Tensor.detach, lambda tensor: tensor
            ),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.manual_seed(0)
            try:
                own = [
                    module
                    for module in attributes
                    if is_wide or not isinstance(module, FSDPModule)
                ]
                for module in own:  # those of units gather
                    # Hooks would see calls that the training never makes.
                    vars(module)["_forward_hooks"] = type(module._forward_hooks)()
                    vars(module)["_forward_pre_hooks"] = type(
                        module._forward_pre_hooks
                    )()
                # Batch norms keep looking at several tokens, which is what the trial
                # has to find.
                for module in attributes if evaluating else ():
                    module.training = module.training and isinstance(
                        module, BATCH_NORMS
                    )
                yield
            finally:
                for module, before in attributes.items():
                    vars(module).clear()
                    vars(module).update(before)


def require_equal_parts(tokens: int, degree: int) -> None:
    """Check that ranks can share tokens equally.

    Raises:
        ValueError: says what to write.
    """
    if tokens % degree:
        raise ValueError(
            f"tensor_parallel: sequences of {tokens} tokens cannot be split over tensor_parallel_degree={degree} "
            f"ranks; pad batches to a multiple of {degree} (pad_to_multiple_of={degree} of the tokenizer or the "
            "collator), or write tensor_parallel={'sequence_parallel': false}"
        )


def _floating(nest: Any) -> list[Tensor]:
    return [tensor for _, tensor in iterate_tensors(nest) if tensor.is_floating_point()]


def _unknown_leaves(loss: Any, leaves: list[Tensor]) -> int:
    """Return how many leaves of a graph are not among these."""
    known = {id(leaf) for leaf in leaves}
    left = [loss.grad_fn]
    seen = {loss.grad_fn}
    count = 0
    # The graph is walked from the loss; leaves have a `variable`.
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        count += variable is not None and id(variable) not in known
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                left.append(further)
    return count


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor, 0 in an empty one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _is_close(
    seen: Tensor, expected: Tensor, largest: float = 0.0, by_token: bool = False
) -> bool:
    """Return whether two tensors are equal but for roundings.

    Args:
        largest: of all tensors that are compared together.
        by_token: [..., N, H]: relative to the largest of each token.
    """
    if seen.shape != expected.shape:
        return False
    if not seen.numel():
        return True
    # Two bounds: by the size of each token or tensor, and by the largest gradient of
    # all.
    relative, of_largest = _TOLERANCE.get(expected.dtype, _LOW_PRECISION)
    size = (
        expected.abs().amax(-1, keepdim=True)
        if by_token and expected.ndim > 1
        else expected.abs().max()
    )
    bound = (
        relative * size.clamp(min=torch.finfo(expected.dtype).tiny)
        + of_largest * largest
    )
    return bool(((seen - expected).abs() <= bound).all())
