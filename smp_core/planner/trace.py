"""Trace: what a model's blocks compute, move and keep, found by running it without
values.

Two models of n and n + 1 blocks run forward and backward under FakeTensorMode; what the
second has more is a block, what is left is the rest (embeddings, head, loss). Nothing
about an architecture is written down here. Counted are

    products     FLOPs of matrix products and convolutions (torch's table, a multiply-add is two)
    attention    FLOPs of attention, those above the diagonal left out where it is causal
    moved        bytes that all other operators read and write
    live         bytes of all storages but parameters, gradients of parameters apart, after each operation: in forward,
                 until backward comes to the last block, in that block's backward, and in the one's before it

for each way of recomputation, which really happens, so that its work is counted in
backward. Each figure is measured for 1 sample of s tokens, 2 of s and 1 of s / 2, and
is taken to be s (a + b (c + d s)) for b samples: a of what all samples share (a table
of positions), d of attention.

Where layers are split over tensor ranks, what is alive is measured of split layers,
over the fewest and the most ranks that they can be split over; bytes over others are
taken to be a + b / T. Degrees that split the same parameters are measured together: the
vocabulary's are whole where it is not divided.

Runs in a child process: models come from anywhere and take memory and imports with
them. :func:`trace_model` is the part that runs there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

# _subclasses: torch's documentation of fake tensors has it.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from smp_core.activations import selective_contexts
from smp_core.config import DEFAULTS, Fp8Recipe, SmpConfig
from smp_core.fp8 import choose
from smp_core.outside import ask_child, changed
from smp_core.plan import Entry, Shapes, experts_of
from smp_core.plan.chain import Chain, record_chain
from smp_core.planner.model_source import Source, build, copied
from smp_core.planner.model_trace import (
    LEFT,
    Curve,
    Instants,
    ModelTrace,
    SplitTrace,
    in_dtype,
)
from smp_core.planner.trace_meter import TraceMeter, tensors_in
from smp_core.torch_facts import embeddings_of, local_part

logger = logging.getLogger("smp")

Recomputation = Literal["none", "selective", "full"]
MODES: tuple[Recomputation, ...] = ("none", "selective", "full")
CHILD = "smp_core.dry_run.split_trace"
"""The module that traces in a child process. It stands above this one and is named, not
imported."""

Splitting = Callable[[Source, list[str], int, int, Sequence[Recomputation]], SplitTrace]
"""Runs two blocks with split layers: (model, lists of blocks, heads of keys, tokens,
modes) -> what was seen."""

_BLOCKS_OF_CHAIN = 3


@contextlib.contextmanager
def scores_kept() -> Iterator[set[float]]:
    """Let attention drop no scores; yield the shares that it was asked to drop.
    Dropping them has no flash kernel on a CPU, where runs without values are; on a GPU
    it keeps nothing. (A TorchFunctionMode would not see what backward computes
    again.)"""
    # Models look the function up when they are called, so that replacing the attribute
    # is enough.
    real = nn.functional.scaled_dot_product_attention
    asked: set[float] = set()

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        **rest: Any,
    ) -> Any:
        asked.add(dropout_p)
        return real(query, key, value, attn_mask, 0.0, **rest)

    with changed(nn.functional, scaled_dot_product_attention=attention):
        yield asked


def trace_model(
    words: str,
    tokens: int,
    given: Mapping[str, Any] | None = None,
    split: Splitting | None = None,
) -> ModelTrace:
    """Trace a model in this process.

    Args:
        words: the model (:mod:`smp_core.planner.model_source`).
        tokens: of the longest sequence; of shorter ones the figures are known too.
        given: the fields of a Transformers configuration instead of ``words``.
        split: None: split layers are not run.

    Raises:
        ValueError: a model that is not there, has no repeated blocks, or does not run
            without values; says what to write instead.
    """
    # Models are built in bfloat16, which is what mixed precision computes in; shapes
    # are given the stored dtype afterwards.
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), scores_kept() as dropped:
        torch.set_default_dtype(torch.bfloat16)
        try:
            source = build(words, tokens, given)
            found = _traced(source, tokens, words, split=split)
            return replace(found, dropped_scores=max(dropped, default=0.0))
        finally:
            torch.set_default_dtype(before)


def trace_built(
    model: nn.Module,
    asked: SmpConfig,
    tokens: int,
    dtype: torch.dtype | None,
    entry: Entry,
) -> ModelTrace:
    """Trace a model that is there, in this process: a copy without values runs, the
    model itself is only read.

    Args:
        asked: its `units` name the blocks.
        dtype: what is computed in; None: in each parameter's own.
        entry: what a step calls (:func:`smp_core.plan.units.plan_units`).

    Returns:
        a trace with shapes as the model has them.

    Raises:
        ValueError: as :func:`trace_model`.
    """
    # A run may have switched gradients off, or be inside inference mode; the trace
    # needs a backward pass.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake,
        scores_kept() as dropped,
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            source = copied(model, dtype)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied without its values ({type(error).__name__}: {error})"
            ) from error
        # Names that `units` gives are the whole model's, and mean nothing in an inner
        # one that is traced in its place.
        is_whole = type(source.model) is type(model)

        found = _traced(
            source, tokens, type(model).__name__, asked if is_whole else DEFAULTS
        )
    chain = found.shapes["none"].chain
    shapes = _shapes_by_mode(model, asked, entry)
    # What was traced may be a part of the model: its names get the part's name in
    # front.
    inner = next(
        name
        for name, module in model.named_modules()
        if type(module) is type(source.model)
    )
    if chain is not None:
        shapes = {
            mode: replace(each, chain=chain.inside(inner))
            for mode, each in shapes.items()
        }
    inside = tuple(f"{inner}.{name}" if inner else name for name in found.inside)
    return replace(
        found, shapes=shapes, inside=inside, dropped_scores=max(dropped, default=0.0)
    )


def _shapes_by_mode(
    model: nn.Module, asked: SmpConfig, entry: Entry
) -> dict[str, Shapes]:
    """Return the shapes of each mode of recomputation, which know FP8 layers."""
    found: dict[str, Shapes] = {}
    # Which dim of a weight is that of inputs cannot be seen in its shape.
    dims = fp8_dims(model)
    experts = experts_of(model)  # a planner may deal them
    for mode in MODES:
        shapes = Shapes.of(model, SmpConfig(units=asked.units, activations=mode), entry)
        parameters = (
            replace(each, fp8_dim=dims.get(each.name)) for each in shapes.parameters
        )
        found[mode] = replace(shapes, parameters=tuple(parameters), experts=experts)
    return found


def _chain_of(
    model: nn.Module, lists: list[str], count: int, asked: SmpConfig, entry: Entry
) -> Chain | str:
    """Return the chain of ``count`` blocks from that of the first few, all others being
    cut off; or why there is none."""
    # Following the chain runs the model, and three blocks show how one hands on to the
    # next.
    _keep_first(model, lists, _BLOCKS_OF_CHAIN)
    try:
        units = Shapes.of(model, SmpConfig(units=asked.units), entry).units
        return record_chain(model, units).of_more(lists[0], count)
    except Exception as error:  # a model that is not Transformers' may want anything
        return str(error)


def _traced(
    source: Source,
    tokens: int,
    words: str,
    asked: SmpConfig = DEFAULTS,
    split: Splitting | None = None,
) -> ModelTrace:
    model = source.model
    lists, count = _lists_of_blocks(
        model, Shapes.of(model, SmpConfig(units=asked.units), source.entry)
    )
    parameters = dict(model.named_parameters())  # before blocks are cut off below
    found = _shapes_by_mode(model, asked, source.entry)
    shapes: dict[str, Shapes] = {
        mode: in_dtype(each, torch.float32) for mode, each in found.items()
    }
    # The sizes of matrices outside blocks: a sequence of one of these lengths would
    # give logits the shape of a head's gradient.
    inside = {p for name in lists for p in model.get_submodule(name).parameters()}
    outside = [p for p in model.parameters() if p not in inside and p.ndim > 1]
    tokens = told_apart(
        tokens, {size for parameter in outside for size in parameter.shape}
    )
    # Blocks of another kind in front of the repeated ones are taken to be like them.
    prefixes = tuple(f"{name}." if name else "" for name in lists)
    names = {name for name in found["none"].by_name if name.startswith(prefixes)}
    for name in lists:
        _keep_commonest(model.get_submodule(name))
    chain = _chain_of(model, lists, count, asked, source.entry)
    if isinstance(chain, Chain) and names != {
        name for block in chain.of_blocks for name in block
    }:
        chain = "pipeline_parallel_degree: a model whose blocks have unlike parameters is not planned in stages yet"
    if isinstance(chain, Chain):
        shapes = {mode: replace(each, chain=chain) for mode, each in shapes.items()}

    # Two blocks with each mode of recomputation, also with split layers; then one
    # block.
    two, untraced = _run_two(source, lists, tokens, words)
    # The highest instants of memory are those of two blocks: a backward pass meets both
    # while the first still keeps something.
    instants: dict[str, Instants] = {}
    for mode, runs in two.items():
        instants[mode] = Instants.of(tokens, *(meter.instants for meter in runs))
    product_inputs = _kept_for_products(source, lists, tokens, two["none"][0].kept)
    heads, of_split = two["none"][0].heads, SplitTrace()
    if source.splits and split is not None:
        of_split = _of_split(split, source, lists, heads, tokens, list(two))
    _keep_first(model, lists, 1)
    one = {mode: _run(source, lists, mode, tokens, words) for mode in two}

    block, rest = _block_and_rest(tokens, one, two)
    # Experts are what grouped products read, in any order of dims.
    stacks = {stack for runs in two.values() for stack in runs[0].stacks}
    experts = frozenset(
        name for name, each in parameters.items() if tuple(sorted(each.shape)) in stacks
    )
    early = Curve(tokens, *(meter.early for meter in one["full"]))
    if of_split.dims is not None:
        shapes = {
            mode: _with_dims(each, prefixes, of_split.dims)
            for mode, each in shapes.items()
        }
    return ModelTrace(
        shapes,
        count,
        block,
        rest,
        prefixes,
        instants,
        heads if source.splits else 0,
        _vocabulary(source, outside),
        early,
        chain if isinstance(chain, str) else "",
        of_split,
        experts=experts,
        unpadded=source.unpadded,
        quantized=source.quantized,
        untraced=untraced,
        product_inputs=product_inputs,
    )


def _run_two(
    source: Source, lists: list[str], tokens: int, words: str
) -> tuple[dict[Recomputation, list[TraceMeter]], dict[str, str]]:
    """Run two blocks with each mode of recomputation.

    Returns:
        the meters by mode, and why a mode has none.
    """
    untraced: dict[str, str] = {}
    two: dict[Recomputation, list[TraceMeter]] = {}
    _keep_first(source.model, lists, 2)
    for mode in MODES:
        try:
            two[mode] = _run(source, lists, mode, tokens, words)
        except ValueError as error:
            if mode != "selective":
                raise
            # What it keeps must not be changed in place, which some models do.
            cause = f"{type(error.__cause__).__name__}: {error.__cause__}"
            untraced[mode] = (
                f"activations.checkpoint='selective': {words} does not train with it ({cause}); write none or full"
            )
    return two, untraced


def _block_and_rest(
    tokens: int,
    one: Mapping[Recomputation, list[TraceMeter]],
    two: Mapping[Recomputation, list[TraceMeter]],
) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Return the figures of a block and of the rest by mode, from runs of one block and
    of two."""
    block: dict[str, Curve] = {}
    rest: dict[str, Curve] = {}
    # A block is the difference, and the rest is what is left.
    for mode, runs in two.items():
        blocks, rests = [], []
        for less, more in zip(one[mode], runs, strict=True):
            first, both = less.finish(), more.finish()
            blocks.append(first.combined(both, lambda a, b: b - a))
            rests.append(first.combined(both, lambda a, b: 2 * a - b))
        block[mode] = Curve(tokens, *blocks)
        rest[mode] = Curve(tokens, *rests)
    return block, rest


def _keep_first(model: nn.Module, lists: list[str], count: int) -> None:
    """Cut off all blocks but the first of each list."""
    for name in lists:
        del model.get_submodule(name)[count:]  # type: ignore[operator]


def _run(
    source: Source, lists: list[str], mode: Recomputation, tokens: int, words: str
) -> list[TraceMeter]:
    """Run a step of one sample, of two, and of one of half the tokens."""
    try:
        return [
            measured(source, lists, mode, *each)
            for each in ((1, tokens), (2, tokens), (1, tokens // 2))
        ]
    except Exception as error:
        raise ValueError(
            f"model {words!r} does not run without values ({type(error).__name__}: {error}); leave out of its forward "
            "what depends on values, or write package.module:function with a model that does"
        ) from error


def fp8_dims(model: nn.Module) -> dict[str, int]:
    """Return the dim of inputs of each weight that native FP8 layers would multiply by,
    by name."""
    try:
        # The default recipe takes all layers that native FP8 layers can stand for.
        chosen, _ = choose(model, Fp8Recipe())
    except ValueError:  # none
        return {}
    found: dict[str, int] = {}
    for name, module, weights in chosen:
        # Transformers', which is stored as its transpose.
        dim = 0 if type(module).__name__ == "Conv1D" else -1
        found |= {f"{name}.{weight}".removeprefix("."): dim for weight in weights}
    return found


def _kept_for_products(
    source: Source, lists: list[str], tokens: int, kept: int
) -> float:
    """Return the bytes of a token that a block keeps for its FP8 layers' weights alone:
    what it does not keep where these are frozen, and which their copies in FP8 stand
    for."""
    # Measured twice, with these weights trained and frozen: autograd keeps an input for
    # the gradient of a trained weight alone.
    blocks = tuple(f"{name}." if name else "" for name in lists)
    named = dict(source.model.named_parameters())
    weights = [
        named[name] for name in fp8_dims(source.model) if name.startswith(blocks)
    ]
    trained = [weight for weight in weights if weight.requires_grad]
    if len(trained) == sum(each.requires_grad for each in named.values()):
        return 0.0  # adapters alone are trained: without them there is no backward
    for weight in trained:
        weight.requires_grad_(False)
    try:
        forward = measured(source, lists, "none", 1, tokens, trains=False)
        return (kept - forward.kept) / tokens
    finally:
        for weight in trained:
            weight.requires_grad_(True)


def _keep_commonest(blocks: Any) -> None:
    """Cut off the blocks whose parameters are not those of most: dense ones in front of
    a mixture's."""

    def kind(block: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
        return tuple(
            (name, parameter.shape) for name, parameter in block.named_parameters()
        )

    kinds = [kind(block) for block in blocks]
    commonest = max(kinds, key=kinds.count)
    if kinds.count(commonest) > 1:
        # From the end, so that places in front stay valid.
        for place in reversed(range(len(kinds))):
            if kinds[place] != commonest:
                del blocks[place]


def _vocabulary(source: Source, outside: list[nn.Parameter]) -> int:
    """Return the rows of the embedding; of what is not Transformers', of the largest
    parameter outside of blocks."""
    words = embeddings_of(source.model)[0] if source.splits else None
    if words is not None:
        return len(words.weight)
    return max(
        (p.shape for p in outside), key=lambda shape: shape.numel(), default=(1,)
    )[0]


def _of_split(
    split: Splitting,
    source: Source,
    lists: list[str],
    heads: int,
    tokens: int,
    modes: Sequence[Recomputation],
) -> SplitTrace:
    """Run layers split over what divides ``heads``, if they can be split."""
    try:
        return split(source, lists, heads, tokens, modes) if heads > 1 else SplitTrace()
    except Exception as error:
        # A plan is made all the same, of shares of what unsplit layers keep.
        logger.info(
            "memory of split layers is not traced: %s: %s", type(error).__name__, error
        )
        return SplitTrace()


def _with_dims(
    shapes: Shapes, prefixes: tuple[str, ...], dims: Mapping[str, int]
) -> Shapes:
    """Return shapes that are split in these dims, which are those of two blocks. All
    others are split as the second."""

    def traced(name: str) -> str:
        for prefix in prefixes:
            # Only two blocks ran: all behind the second take its dims.
            number, _, inner = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdigit():
                return f"{prefix}{min(int(number), 1)}.{inner}"
        return name

    parameters = (
        replace(each, split_dim=dims.get(traced(each.name)))
        for each in shapes.parameters
    )
    return replace(shapes, parameters=tuple(parameters))


def told_apart(tokens: int, sizes: set[int], by: int = 2) -> int:
    """Return a length, a little shorter if need be, at which logits do not have the
    shape of a head's gradient."""
    while tokens > 2 * by and sizes & {tokens, 2 * tokens, tokens // 2}:
        tokens -= by
    return tokens


def _lists_of_blocks(model: nn.Module, shapes: Shapes) -> tuple[list[str], int]:
    """Return the names of the lists that hold the model's blocks, and how many blocks
    each has."""
    # Blocks are found as the wrap plan finds them; their lists are what their names
    # have in front.
    names: dict[str, int] = {}
    for block in shapes.units.blocks:
        parent = block.rpartition(".")[0]
        names[parent] = names.get(parent, 0) + 1
    lists = {name: model.get_submodule(name) for name in names}
    sizes = set(names.values())
    # Lists of unlike lengths, as of an encoder and a decoder, have no common number of
    # blocks.
    sliced = all(
        isinstance(each, (nn.ModuleList, nn.Sequential)) for each in lists.values()
    )
    if not names or not sliced or len(sizes) > 1 or sizes == {1}:
        raise ValueError(
            f"{type(model).__name__} has no list of at least two repeated blocks to plan with; put them into an "
            "nn.ModuleList (of several, all of one length)"
        )
    return list(names), sizes.pop()


def measured(
    source: Source,
    lists: list[str],
    mode: Recomputation,
    samples: int,
    tokens: int,
    trains: bool = True,
) -> TraceMeter:
    """Run one step, or its forward alone, and return what counted it."""
    model = source.model
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    of_blocks = {parameter for block in blocks for parameter in block.parameters()}
    own = {p: local_part(p) for p in model.parameters()}
    # Embeddings and heads with more rows than the batch has tokens: no activation has
    # such a shape, and a tensor that does is their gradient.
    of_rest = [
        own[p].shape
        for p in own
        if p not in of_blocks and p.ndim > 1 and len(p) > samples * tokens
    ]
    meter = TraceMeter({*of_rest, *(torch.Size(shape[::-1]) for shape in of_rest)})
    # Parameters and buffers are model states, which are counted elsewhere.
    for tensor in [*own.values(), *model.buffers()]:
        meter.ignore(tensor)
    model.train()

    handles = _follow_backward(model, blocks, meter)
    forwards = [vars(block).get("forward") for block in blocks]  # of split layers
    for block in blocks:
        if mode != "none":
            contexts: dict[str, Any] = (
                {"context_fn": selective_contexts} if mode == "selective" else {}
            )
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, **contexts
            )
    try:
        # One step; its loss and backward run under the meter, which sees every
        # operator.
        with meter:
            loss = source.loss(samples, tokens)
            meter.end_forward()
            if trains:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        # The model runs again for the next batch and mode, and has to be as it was.
        for block, forward in zip(blocks, forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
        for parameter in model.parameters():
            parameter.grad = None
    return meter


def _follow_backward(
    model: nn.Module, blocks: list[nn.Module], meter: TraceMeter
) -> list[Any]:
    """Let the meter know which gradients are there, and how far backward is; return the
    hooks that do."""

    def note_backward(reached: int) -> Callable[[torch.Tensor], None]:
        """Note when backward comes to a block, or has left the last; gradients of
        blocks after it are reduced, and gone, by then."""

        def arrived(gradient: torch.Tensor) -> None:
            meter.blocks_reached = max(meter.blocks_reached, reached)
            for block in blocks[-(reached - 1) :] if reached > 1 else ():
                for parameter in block.parameters():
                    parameter.grad = None

        return arrived

    def of_block(reached: int) -> Callable[..., None]:
        def called(module: nn.Module, args: Any, output: Any) -> None:
            # The gradient of a block's output arrives when backward comes to the block.
            first = next(tensors_in(output))
            meter.note_block(first)
            if first.requires_grad:
                first.register_hook(note_backward(reached))

        return called

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            meter.is_gradient(local_part(parameter.grad))

    def note_end(module: nn.Module, args: Any, kwargs: Any) -> None:
        meter.has_entered = True
        first = next(tensors_in([args, kwargs]), None)
        if first is not None and first.requires_grad:
            first.register_hook(note_backward(LEFT))

    # Backward comes to the last block first. What comes before the blocks is reached
    # when the gradient of the first one's input is there.
    last = blocks[-2:][::-1]
    handles = [
        block.register_forward_hook(of_block(i + 1)) for i, block in enumerate(last)
    ]
    handles.append(last[-1].register_forward_pre_hook(note_end, with_kwargs=True))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
    return handles


def trace(words: str, tokens: int) -> ModelTrace:
    """Trace a model in a child process.

    Raises:
        ValueError: as :func:`trace_model`.
    """
    found = ask_child(CHILD, (words, tokens), f"model {words!r} cannot be traced")
    assert isinstance(found, ModelTrace)
    return found
