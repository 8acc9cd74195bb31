"""A trial of a model's first call: does it compute over parts of the tokens what it
computes over all of them?

Under context parallelism only attention looks along the sequence, and it is ours.
Whatever else does (positions counted by the length of the input, convolutions, pooling,
shifts, a class token, RNNs) would see a rank's own tokens alone, and only the numbers
would show it. No list of operators is complete, so the model itself is asked: before
its first call in training, and in evaluation, it runs without gradients on a sample,
the first M tokens of every rank.

    1. M tokens on each rank, as in a real step
    2. all RM tokens, on every rank alike: each compares its own tokens of the two
    3. all of them again, with the outputs of all modules off by a rounding error:
       smaller differences are rounding

The sample is taken from the real input, so that arguments are what the model expects,
and needs about the time and memory of one forward of a rank's own tokens, whatever the
model's size: weights are gathered as in any forward. (A copy under fake tensors would
have no numbers, and a small one not the model's branches.) Random numbers are constants
inside, and parameters of zeros (gates) are others; buffers, attributes and random
states are restored.

Between its calls of modules a step may go wrong too. An argument that is the same on
ranks whose tokens differ was counted by their length
(:meth:`smp_core.context_parallel.trial_sample.Sample.counted_by_length`), and gradients
of the outputs show what its loss took of them
(:mod:`smp_core.context_parallel.trial_loss`).

Shape letters: R ranks, L tokens of a rank, M tokens of each rank in the sample.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from smp_core.cluster import of_all_ranks
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.replaced_attention import (
    SplitBatch,
    enabled,
    part_of_mean,
)
from smp_core.context_parallel.trial_loss import Share, other_shares, watch_loss
from smp_core.context_parallel.trial_run import Ran, run, tensors_of, undisturbed
from smp_core.context_parallel.trial_sample import Call, Sample
from smp_core.outside import changed
from smp_core.torch_facts import Args, Kwargs, clean_name, is_compiled

logger = logging.getLogger("smp")

_Found = TypeVar("_Found")

# Later layers amplify rounding errors, and run 3 draws other ones than 1 and 2 have.
_MARGIN = 10
# Where rounding is coarse, single tokens may go to other experts: this share of the
# tokens has to differ.
_COARSE, _SHARE = 1e-4, 0.02

ADVICE = (
    "Outside of torch's attention (F.scaled_dot_product_attention) a model has to compute each token by itself: take "
    "positions from smp_core.context_parallel.positions(tokens), not from the length (torch.arange, a slice of "
    "a table, cumsum), let the batch bring shifted targets, and neither convolve, pool, add up, shift nor select along "
    "the tokens (docs/context-batches.md has an example). Otherwise write context_parallel_degree=1"
)


class Trial:
    """The trials of one model: before the first call of each module that is called from
    outside of all others.

    Args:
        model: after its conversions; it is not kept alive.
        group: the ranks that share sequences.
        everyone: all ranks that train on one global batch.
        coarse: whether it computes with fewer digits than its tensors have (FP8,
            compressed gathers).
        in_stages: whether it is cut into pipeline stages, which begin trials
            themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ContextGroup,
        everyone: dist.ProcessGroup | None,
        *,
        coarse: bool = False,
        in_stages: bool = False,
    ) -> None:
        self._everyone = everyone
        self._model = weakref.ref(model)
        self._group = group
        self._coarse = coarse
        self._in_stages = in_stages
        self._over: set[Any] = set()
        self._without_loss: set[int] = set()
        self._outputs = 0
        self._is_running = False
        self._called: nn.Module | None = None

    @contextlib.contextmanager
    def watching(self, split: SplitBatch) -> Iterator[None]:
        """Try modules that are called inside the block.

        A block like an earlier one (in training or not, with the same keys in its
        batch) is not watched again.
        """
        # A trial calls the model itself, and a call of a known kind would only cost
        # time.
        model = self._model()
        kind = None if model is None else _kind(model, split)
        if model is None or self._in_stages or self._is_running or kind in self._over:
            yield
            return
        # Modules of outermost calls of this block: weak, as a trial keeps no model
        # alive.
        inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def enter(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            # Only outermost calls are tried: what they call is part of them.
            if self._called is not None or self._is_running:
                return
            # A module of one that was called before is called by a recomputation;
            # torchmetrics see each token once.
            if module not in inside and not all(
                hasattr(module, name) for name in ("update", "compute", "reset")
            ):
                inside.update(module.modules())
                self.of_call(module, args, kwargs, split)
            self._called = module

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if self._called is module:
                self._called = None
                self.of_output(module, output, split)

        # Hooks stand for this block only; if it raises, the kind is tried again.
        with contextlib.ExitStack() as hooks:
            hooks.callback(setattr, self, "_called", None)
            for module in _outside_of_graphs(model):
                _around_calls(module, enter, leave, hooks)
            yield
            if inside:
                self._over.add(kind)

    def of_call(
        self,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
        split: SplitBatch,
        forward: Callable[..., Any] | None = None,
        part: int = 0,
    ) -> None:
        """Try a call, unless one like it was tried. Collective over the context group,
        and over all ranks that hold parts of the module's parameters.

        Args:
            forward: what is called; None: the module.
            part: the number of the pipeline's part that it computes.

        Raises:
            ValueError: on every rank of the group: it computes something else over
                parts of the tokens.
        """
        model = self._model()
        if model is None or self._is_running:
            return
        # One trial for each kind of batch and each module, however many steps follow.
        kind = _kind(model, split)
        if (kind, id(module), part) in self._over:
            return
        is_first = kind not in self._over and torch.is_grad_enabled()
        self._over.update((kind, (kind, id(module), part)))
        # Calls without tokens (of a label embedding, say) cannot depend on how tokens
        # are split.
        sample = Sample(split, self._group, args, kwargs)
        found = (
            self._tried(module, forward or module, sample)
            if sample.has_tokens
            else None
        )
        # Ranks with other batches may go on to other modules, but each has a first one.
        self._refuse(
            found,
            self._everyone
            if is_first and not self._in_stages
            else self._group.process_group,
        )
        if torch.is_grad_enabled():
            self._without_loss.add(id(module))

    def of_output(self, module: nn.Module, output: Any, split: SplitBatch) -> None:
        """Look at what the loss of the step takes of a tried call's outputs. Collective
        over the context group in backward.

        Raises:
            ValueError: in backward, on every rank of the group: a shift or a pooling.
                On the last of several stages it is a warning, as the others would wait
                for a gradient.
        """
        if self._is_running:
            return
        # What a further call computes of an output hides which tokens the loss takes.
        if any(
            tensor.requires_grad and tensor.dim() > 1
            for _, tensor in tensors_of(output)
        ):
            self._outputs += 1
        number = self._outputs
        if id(module) in self._without_loss:
            self._without_loss.remove(id(module))
            watch_loss(
                output,
                split,
                self._warn if self._in_stages else self._refuse_here,
                lambda: self._outputs == number,
            )

    def _refuse_here(self, found: str | None, share: Share | None) -> None:
        # What targets weigh is compared where no rank has found anything itself.
        told = self._of_all((found, share), self._group.process_group)
        texts = [text for text, _ in filter(None, told)]
        self._raise([*texts, other_shares([each for _, each in filter(None, told)])])

    def _warn(self, found: str | None, share: Share | None) -> None:
        try:
            self._refuse_here(found, share)
        except ValueError as error:
            logger.warning("numbers are not those of one process: %s", error)

    def _refuse(self, found: str | None, group: dist.ProcessGroup | None) -> None:
        """Raise on all ranks of a group what any of them found."""
        self._raise(self._of_all(found, group))

    def _raise(self, found: list[str | None]) -> None:
        for text in filter(None, found):
            raise ValueError(
                f"context_parallel_degree={self._group.degree}: {text}. {ADVICE}"
            )

    def _tried(
        self, module: nn.Module, forward: Callable[..., Any], sample: Sample
    ) -> str | None:
        """Return in words what is wrong for this rank's tokens; None: nothing is."""
        model = self._model()
        assert model is not None
        # Names as the user wrote them, without those of wrappers.
        names = {each: clean_name(name) for name, each in model.named_modules()}
        with changed(self, _is_running=True):
            # The cheap question first: did an argument count by the length of a part?
            found = sample.counted_by_length() or self._difference(
                module, forward, sample, names
            )
        label = " ".join(
            filter(
                None,
                (names.get(module), f"({type(module).__name__.removeprefix('FSDP')})"),
            )
        )
        if found is None:
            return None
        return f"{label} computes something else over each rank's tokens than over whole sequences: {found}"

    def _of_all(
        self, found: _Found | None, group: dist.ProcessGroup | None
    ) -> list[_Found | None]:
        """Gather what every rank of a group found."""
        if group is None:
            return [found]
        return of_all_ranks(found, group)

    def _difference(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        sample: Sample,
        names: Mapping[nn.Module, str],
    ) -> str | None:
        """Return in words how this rank's tokens differ from the same ones of the whole
        sample; None: they do not."""
        # Run 1: this rank's part. Run 2: all parts, alone on each rank. Run 3: the same
        # with errors added.
        active, part = self._run(module, forward, sample.part(), sample.tokens)
        count = sample.tokens * sample.degree
        _, whole = self._run(module, forward, sample.whole(), count)
        # FP8 keeps three bits of a fraction, so that it rounds by up to a sixteenth.
        rounding = max(part.rounding, 2**-4 if self._coarse else 0.0)
        _, off = self._run(module, forward, sample.whole(), count, off_by=rounding)
        # What is returned may be coarser than what was computed inside.
        returned = [torch.finfo(tensor.dtype).eps for _, tensor in whole.outputs]
        rounding = max(rounding, *returned) if returned else rounding
        own_names = [name for name, _ in part.outputs]
        if own_names != [name for name, _ in whole.outputs]:
            return "it returns other tensors"
        # Transformers' routers have losses that each rank counts for itself.
        counts_alone = any(
            getattr(getattr(each, "config", 0), "output_router_logits", False)
            for each in names
        )
        # Numbers for samples or for a whole layer have to be the same on all ranks.
        for_samples = [
            a for a, b in zip(part.drawn, whole.drawn, strict=False) if a == b
        ]
        if other := self._other_states(for_samples):
            return other
        if not counts_alone:
            self._warn_of_kept(part, whole, off, rounding, active)
        found = None
        for (name, mine), (_, theirs), (_, near) in zip(
            part.outputs, whole.outputs, off.outputs, strict=True
        ):
            # Numbers without a dimension are losses; all else has tokens.
            if mine.dim() == 0 and theirs.dim() == 0:
                text = (
                    None
                    if counts_alone
                    else self._of_numbers(mine, theirs, near, rounding, active)
                )
            else:
                text = _of_tokens(mine, theirs, near, rounding, sample)
            found = found or (
                text
                and f"{name} {text}{_first_seen(part, whole, sample, rounding, names)}"
            )
        return found

    def _other_states(self, shapes: list[tuple[int, ...]]) -> str | None:
        """Return in words that ranks would draw other numbers where they share samples.
        Collective."""
        states = [torch.get_rng_state()]
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
            assert device is not None
            states.append(torch.get_device_module(device).get_rng_state())
        own = [xxhash.xxh3_64_hexdigest(state.numpy().tobytes()) for state in states]
        told = self._of_all(
            " ".join(own) if shapes else None, self._group.process_group
        )
        if len(set(filter(None, told))) < 2:
            return None
        return (
            f"it draws random numbers of {list(shapes[0]) if shapes else 'one shape'} for samples or layers that ranks "
            "share, whose random states differ: seed them alike, with torch.manual_seed(seed + mesh.data_rank) or one "
            "seed for all"
        )

    def _warn_of_kept(
        self, part: Ran, whole: Ran, off: Ran, rounding: float, active: SplitBatch
    ) -> None:
        """Warn of losses that modules keep where their mean over ranks is another: a
        step may add them to its loss, or only look at them. Collective."""
        for place in sorted(part.kept.keys() & whole.kept.keys() & off.kept.keys()):
            mine, theirs, near = (ran.kept[place] for ran in (part, whole, off))
            text = self._of_numbers(mine, theirs, near, rounding, active)
            if text is not None:
                logger.warning(
                    "context_parallel_degree=%d: %s, which forward keeps, %s; a loss that it is added to is not that "
                    "of one process",
                    self._group.degree,
                    place,
                    text,
                )

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        tokens: int,
        off_by: float | None = None,
    ) -> tuple[SplitBatch, Ran]:
        """Run a call; say in words why it cannot be run with other numbers of
        tokens."""
        args, kwargs, active = call
        try:
            # Each run begins from the same state, and leaves it.
            with undisturbed(module, self._group.meter):
                return active, run(
                    module, forward, args, kwargs, active, tokens, off_by
                )
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:
            # Words of ours, and of layers that are called past their unit.
            if _is_refusal(error) or "DTensor" in str(error):
                raise
            raise ValueError(
                f"context_parallel_degree={self._group.degree}: {type(module).__name__.removeprefix('FSDP')} does not "
                f"run with {tokens} tokens, a part of a sequence: {type(error).__name__}: {error}. {ADVICE}"
            ) from error

    def _of_numbers(
        self,
        mine: Tensor,
        theirs: Tensor,
        near: Tensor,
        rounding: float,
        active: SplitBatch,
    ) -> str | None:
        """Compare a loss of the whole sample with the mean of the ranks' losses, as a
        step takes it. Collective."""
        # The mean as the step takes it: weighted by targets, unless the model has
        # divided already.
        with enabled(active):
            mean = part_of_mean(mine.detach().double())
        if self._group.process_group is not None:
            dist.all_reduce(mean, group=self._group.process_group)
        found, expected = mean.item() / self._group.degree, theirs.item()
        # What a rounding error inside can change, and a margin for the sum itself.
        limit = _MARGIN * abs(near.item() - expected) + rounding * abs(expected) * (
            0.25 if rounding > _COARSE else 1e3
        )
        # A loss that is nan for whole sequences says nothing.
        if expected != expected or abs(found - expected) <= limit:
            return None
        return f"is {expected:.6g} for whole sequences, and its mean over ranks, weighted by targets, {found:.6g}"


def _kind(model: nn.Module, split: SplitBatch) -> Any:
    # Other keys may lead a model along other branches.
    batch = split.batch
    keys = tuple(batch) if isinstance(batch, Mapping) else len(batch)
    return torch.is_grad_enabled(), model.training, keys


def _outside_of_graphs(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules, without those that are called inside a compiled graph: hooks would
    be a part of it."""
    yield model
    if not is_compiled(model):
        for child in model.children():
            yield from _outside_of_graphs(child)


def _around_calls(
    module: nn.Module,
    enter: Callable[..., None],
    leave: Callable[..., None],
    hooks: contextlib.ExitStack,
) -> None:
    """Call ``enter(module, args, kwargs)`` and ``leave(module, args, output)`` around
    calls of a module.

    After ``module.compile()`` hooks are a part of its graph. What it calls then has no
    public name: ``_compiled_call_impl``.
    """
    compiled = vars(module).get("_compiled_call_impl")
    if compiled is None:
        before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        hooks.callback(before.remove)
        hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        enter(module, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            leave(module, args, output)
        return output

    vars(module)["_compiled_call_impl"] = call
    hooks.callback(vars(module).__setitem__, "_compiled_call_impl", compiled)


def _is_refusal(error: Exception) -> bool:
    """Return whether an error is one of ours, in words already. Errors of torch's
    functions pass through a mode of ours."""
    if not isinstance(error, ValueError):
        return False
    trace = error.__traceback__
    # The innermost frame tells whose words they are.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get(
        "__name__", ""
    ).startswith("smp_core.")


def _of_tokens(
    mine: Tensor, theirs: Tensor, near: Tensor, rounding: float, sample: Sample
) -> str | None:
    """Compare this rank's output with its part of the whole sample's; ``near`` is the
    same with rounding errors."""
    # At most one dimension may differ, and by the factor R: that of the tokens.
    shapes = list(zip(mine.shape, theirs.shape, strict=False))
    dims = [dim for dim, sizes in enumerate(shapes) if sizes[0] != sizes[1]]
    fits = mine.dim() == theirs.dim() and len(dims) <= 1
    if not fits or (
        dims
        and shapes[dims[0]]
        != (mine.shape[dims[0]], mine.shape[dims[0]] * sample.degree)
    ):
        return f"has the shape {list(mine.shape)} for {sample.tokens} of {sample.tokens * sample.degree} tokens"
    # Tokens may lie in two orders: one in which they agree is enough.
    found = None
    for own, whole, rounded in _own_parts(mine, theirs, near, dims, sample):
        errors = _errors(own, whole)
        # Ten times what rounding errors did, and the rounding of the output itself.
        limit = _MARGIN * _errors(rounded, whole).max().item()
        limit += rounding * (10 if rounding > _COARSE else 1e3)
        wrong = (errors > limit).double().mean().item()
        if wrong <= (_SHARE if rounding > _COARSE else 0):
            return None
        found = (
            found
            or f"differs by {errors.max().item():.2g} of its size for {wrong:.0%} of the tokens"
        )
    return found


def _own_parts(
    mine: Tensor, theirs: Tensor, near: Tensor, dims: list[int], sample: Sample
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the three as [tokens, rest], of this rank's tokens: in each order that
    tokens may have in the dim that differs."""
    # No dimension of tokens: the tensor has to be the same as one.
    if not dims:
        yield mine[None].flatten(1), theirs[None].flatten(1), near[None].flatten(1)
        return
    dim = dims[0]
    # Tokens may be flattened together with rows or heads, before or behind them.
    outer = mine.shape[dim] // sample.tokens
    for sizes, at in (((outer, -1), dim + 1), ((-1, outer), dim)):
        own = mine.unflatten(dim, sizes)
        others = (
            sample.own(tensor.unflatten(dim, sizes), at) for tensor in (theirs, near)
        )
        yield tuple(tensor.movedim(at, 0).flatten(1) for tensor in (own, *others))
        if outer == 1:
            return


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return [tokens], the distances of [tokens, rest] in units of the typical size of
    a token's."""
    dtype = torch.float64 if expected.dtype == torch.float64 else torch.float32
    found, expected = found.to(dtype), expected.to(dtype)
    # Equal infinities and nans in both are no difference.
    alike = (found == expected) | (found.isnan() & expected.isnan())
    distances = torch.where(alike, 0, found - expected).norm(dim=1)
    size = expected.nan_to_num(0, 0, 0).norm(dim=1).square().mean().sqrt()
    return torch.where(distances == 0, 0, distances / size).nan_to_num(
        torch.inf, torch.inf
    )


def _first_seen(
    part: Ran,
    whole: Ran,
    sample: Sample,
    rounding: float,
    names: Mapping[nn.Module, str],
) -> str:
    """Name the first module that gave something else for this rank's tokens."""
    # Calls are paired in their order; from the first other module on, there is nothing
    # to compare.
    for (module, mine), (other, theirs) in zip(part.seen, whole.seen, strict=False):
        if module is not other:
            break
        if mine is None or theirs is None or len(theirs) != len(mine) * sample.degree:
            continue
        own = sample.own(theirs, 0)
        if (mine - own).abs().max() > own.abs().max() * rounding * (
            10 if rounding > _COARSE else 1e3
        ):
            name = names.get(module)
            return (
                f", first seen in what {name} ({type(module).__name__}) gives"
                if name
                else ""
            )
    return ""
