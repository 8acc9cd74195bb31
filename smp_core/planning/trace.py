"""Trace: what a model's blocks compute, move and keep, found by running it without values.

Two models of n and n + 1 blocks run forward and backward under FakeTensorMode; what the second has more is a block,
what is left is the rest (embeddings, head, loss). Nothing about an architecture is written down here. Counted are

    products     FLOPs of matrix products and convolutions (torch's table, a multiply-add is two)
    attention    FLOPs of attention, those above the diagonal left out where it is causal
    moved        bytes that all other operators read and write
    live         bytes of all storages but parameters, gradients of parameters apart, after each operation: until the
                 loss has gone backward to the last block, in that block's backward, and in the one's before it

for each way of recomputation, which really happens, so that its work is counted in backward. Each figure is measured
for 1 sample of s tokens, 2 of s and 1 of s / 2, and is taken to be s (a + b (c + d s)) for b samples: a of what all
samples share (a table of positions), d of attention.

Runs in a child process: models come from anywhere and take memory and imports with them. :func:`trace_model` is the
part that runs there.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # _subclasses: torch's documentation of fake tensors has it
from torch.utils._python_dispatch import TorchDispatchMode  # _python_dispatch is where torch documents it to be
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from smp_core.config import SmpConfig
from smp_core.planning.kept_operators import is_kept
from smp_core.planning.model_source import Source, build
from smp_core.planning.model_trace import LEFT, Curve, Figures, Instant, Instants, ModelTrace, in_dtype
from smp_core.planning.shapes import Shapes

Recomputation = Literal["none", "selective", "full"]
MODES: tuple[Recomputation, ...] = ("none", "selective", "full")


class _Meter(TorchDispatchMode):
    """Counts what runs inside, by phase, and follows the storages that are made there.

    Args:
        gradients: shapes of gradients of embeddings and heads with more rows than there are tokens, which no
            activation has.

    Attributes:
        instants: after each operation, as :class:`smp_core.planning.model_trace.Instants` takes them.
    """

    def __init__(self, gradients: set[torch.Size]) -> None:
        super().__init__()
        self._gradients = gradients
        self.phase = "forward"
        self.heads = 0
        self.counts: dict[str, float] = {field.name: 0.0 for field in fields(Figures)}
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}
        self._live = {False: 0, True: 0}  # of activations, of gradients
        self._of_gradients: set[int] = set()
        self.instants: list[Instant] = []
        self.blocks_reached = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in _flat(result) if isinstance(each, torch.Tensor)]
        if not func.is_view:
            self._count(func, args, kwargs or {}, result, tensors)
        for tensor in tensors:
            self._follow(tensor)
        if tensors:  # questions about devices are asked, or not, as fake tensors remember the answers
            self.instants.append((self.blocks_reached, self._live[False], self._live[True], str(func)))
        return result

    def finish(self) -> Figures:
        """Return the counts, after backward."""
        self.counts["kept"] = max(live for reached, live, *_ in self.instants if not reached)
        return Figures(**self.counts)

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage with gradients from here on."""
        address = id(tensor.untyped_storage())
        if address in self._sizes and address not in self._of_gradients:
            self._of_gradients.add(address)
            self._live[False] -= self._sizes[address]
            self._live[True] += self._sizes[address]

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[torch.Tensor]) -> None:
        packet = func.overloadpacket
        name = str(packet).removeprefix("aten.")
        if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
            self._count_attention(name, func, args, kwargs)
        elif packet in flop_registry:
            self.counts[f"{self.phase}_products"] += flop_registry[packet](*args, **kwargs, out_val=result)
        elif not name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            read = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
            self.counts[f"{self.phase}_moved"] += sum(each.numel() * each.itemsize for each in [*read, *tensors])

    def _count_attention(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """Count two products in forward, and five in backward, which computes the scores again."""
        is_backward = "backward" in name
        query, key, value = args[1:4] if is_backward else args[:3]
        flops = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        names = [argument.name for argument in func._schema.arguments]  # _schema: no public name for arguments' names
        given = dict(zip(names, args, strict=False)) | kwargs
        share = 0.5 if given.get("is_causal") else 1.0
        self.counts[f"{self.phase}_attention"] += share * flops * (2.5 if is_backward else 1.0)
        if self.phase == "forward":
            self.counts["full_attention"] += flops
            self.heads = math.gcd(self.heads, key.shape[1] if key.ndim == 4 else 0)
            self.counts["keys"] += key.numel() * key.itemsize + value.numel() * value.itemsize

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._sizes:
            return
        size, address = storage.nbytes(), id(storage)
        self._sizes[address] = size
        self._watchers[address] = weakref.ref(storage, lambda _: self._forget(address))
        if tensor.shape in self._gradients:
            self._of_gradients.add(address)
        self._live[address in self._of_gradients] += size

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave the tensor's storage out of what is live."""
        storage = tensor.untyped_storage()
        self._sizes[id(storage)] = 0
        self._watchers[id(storage)] = storage  # held: its address is not given to another one

    def _forget(self, address: int) -> None:
        self._live[address in self._of_gradients] -= self._sizes.pop(address, 0)
        self._of_gradients.discard(address)
        self._watchers.pop(address, None)


@contextlib.contextmanager
def scores_kept() -> Iterator[None]:
    """Let attention drop no scores. Dropping them has no flash kernel on a CPU, where runs without values are; on a GPU
    it keeps nothing. (A TorchFunctionMode would not see what backward computes again.)"""
    real = nn.functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        return real(query, key, value, attn_mask, 0.0, **rest)

    nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = real


def trace_model(words: str, tokens: int, given: Mapping[str, Any] | None = None) -> ModelTrace:
    """Trace a model in this process.

    Args:
        words: the model (:mod:`smp_core.planning.model_source`).
        tokens: of the longest sequence; of shorter ones the figures are known too.
        given: the fields of a Transformers configuration instead of ``words``.

    Raises:
        ValueError: a model that is not there, has no repeated blocks, or does not run without values; says what to
            write instead.
    """
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), scores_kept():
        torch.set_default_dtype(torch.bfloat16)
        try:
            source = build(words, tokens, given)
            return _traced(source, tokens, words)
        finally:
            torch.set_default_dtype(before)


def _traced(source: Source, tokens: int, words: str) -> ModelTrace:
    model = source.model
    lists, count = _lists_of_blocks(model, Shapes.of(model, SmpConfig(), source.entry))
    found = {mode: Shapes.of(model, SmpConfig(activations=mode), source.entry) for mode in MODES}
    shapes: dict[str, Shapes] = {mode: in_dtype(each, torch.float32) for mode, each in found.items()}
    inside = {p for name in lists for p in model.get_submodule(name).parameters()}
    outside = [p for p in model.parameters() if p not in inside and p.ndim > 1]
    tokens = _told_apart(tokens, {size for parameter in outside for size in parameter.shape})
    vocabulary = max((p.shape for p in outside), key=lambda shape: shape.numel(), default=(1,))[0]
    of_blocks = sum(parameter.numel() for parameter in inside)
    counted: dict[int, dict[str, list[Figures]]] = {}
    instants: dict[str, Instants] = {}
    heads = 0
    for blocks in (2, 1):
        for name in lists:
            del model.get_submodule(name)[blocks:]  # type: ignore[operator]
        counted[blocks] = {}
        for mode in MODES:
            at = [(1, tokens), (2, tokens), (1, tokens // 2)]
            try:
                runs = [_counted(source, lists, mode, *each) for each in at]
            except Exception as error:
                raise ValueError(
                    f"model {words!r} does not run without values ({type(error).__name__}: {error}); leave out of its "
                    "forward what depends on values, or write package.module:function with a model that does"
                ) from error
            counted[blocks][mode], heads = [meter.finish() for meter in runs], runs[0].heads
            if blocks == 2:
                instants[mode] = Instants.of(tokens, *(meter.instants for meter in runs))
    block: dict[str, Curve] = {}
    rest: dict[str, Curve] = {}
    for mode in MODES:
        pairs = list(zip(counted[1][mode], counted[2][mode], strict=True))
        block[mode] = Curve(tokens, *(one.combined(two, lambda a, b: b - a) for one, two in pairs))
        rest[mode] = Curve(tokens, *(one.combined(two, lambda a, b: 2 * a - b) for one, two in pairs))
    return ModelTrace(shapes, count, block, rest, of_blocks, instants, heads if source.splits else 0, vocabulary)


def _told_apart(tokens: int, sizes: set[int]) -> int:
    """Return a length, a little shorter if need be, at which logits do not have the shape of a head's gradient."""
    while any(n in sizes for n in (tokens, 2 * tokens, tokens // 2)) and tokens > 4:
        tokens -= 2
    return tokens


def _lists_of_blocks(model: nn.Module, shapes: Shapes) -> tuple[list[str], int]:
    """Return the names of the lists that hold the model's blocks, and how many blocks each has."""
    names: dict[str, int] = {}
    for block in shapes.units.blocks:
        parent = block.rpartition(".")[0]
        names[parent] = names.get(parent, 0) + 1
    lists = {name: model.get_submodule(name) for name in names}
    sizes = set(names.values())
    sliced = all(isinstance(each, (nn.ModuleList, nn.Sequential)) for each in lists.values())
    if not names or not sliced or len(sizes) > 1 or sizes == {1}:
        raise ValueError(
            f"{type(model).__name__} has no list of at least two repeated blocks to plan with; put them into an "
            "nn.ModuleList (of several, all of one length)"
        )
    return list(names), sizes.pop()


def _counted(source: Source, lists: list[str], mode: Recomputation, samples: int, tokens: int) -> _Meter:
    """Run one step and return what counted it."""
    model = source.model
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    of_blocks = {parameter for block in blocks for parameter in block.parameters()}
    of_rest = [p.shape for p in model.parameters() if p not in of_blocks and p.ndim > 1 and len(p) > samples * tokens]
    meter = _Meter({*of_rest, *(torch.Size(shape[::-1]) for shape in of_rest)})
    for tensor in [*model.parameters(), *model.buffers()]:
        meter.ignore(tensor)
    model.train()

    handles = _follow_backward(model, blocks, meter)
    for block in blocks:
        if mode != "none":
            contexts: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **contexts)
    try:
        with meter:
            loss = source.loss(samples, tokens)
            meter.phase = "backward"
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            vars(block).pop("forward", None)
        for parameter in model.parameters():
            parameter.grad = None
    return meter


def _follow_backward(model: nn.Module, blocks: list[nn.Module], meter: _Meter) -> list[Any]:
    """Let the meter know which gradients are there, and how far backward is; return the hooks that do."""

    def note_backward(reached: int) -> Callable[[torch.Tensor], None]:
        """Note when backward comes to a block, or has left the last; gradients of blocks after it are reduced, and
        gone, by then."""

        def arrived(gradient: torch.Tensor) -> None:
            meter.blocks_reached = max(meter.blocks_reached, reached)
            for block in blocks[-(reached - 1) :] if reached > 1 else ():
                for parameter in block.parameters():
                    parameter.grad = None

        return arrived

    def of_block(reached: int) -> Callable[..., None]:
        def called(module: nn.Module, args: Any, output: Any) -> None:
            first = next(each for each in _flat(output) if isinstance(each, torch.Tensor))
            if first.requires_grad:
                first.register_hook(note_backward(reached))

        return called

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            meter.is_gradient(parameter.grad)

    def note_end(module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((each for each in _flat([args, kwargs]) if isinstance(each, torch.Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(note_backward(LEFT))

    last = blocks[-2:][::-1]
    handles = [block.register_forward_hook(of_block(i + 1)) for i, block in enumerate(last)]
    handles.append(last[-1].register_forward_pre_hook(note_end, with_kwargs=True))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
    return handles


def _selective() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [inner for each in value for inner in _flat(each)]
    if isinstance(value, Mapping):
        return [inner for each in value.values() for inner in _flat(each)]
    return [value]


def trace(words: str, tokens: int) -> ModelTrace:
    """Trace a model in a child process.

    Raises:
        ValueError: as :func:`trace_model`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace"
        command = [sys.executable, "-W", "ignore", "-m", __name__, words, str(tokens), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise ValueError(f"model {words!r} cannot be traced: {last[0]}")
        found = pickle.loads(out.read_bytes())  # our own child's
    if isinstance(found, ValueError):
        raise found
    assert isinstance(found, ModelTrace)
    return found


def _main(words: str, tokens: str, out: str) -> None:
    torch.set_num_threads(1)
    found: ModelTrace | ValueError
    try:
        from smp_core.planning import trace as here  # under its own name, by which its classes are pickled

        found = here.trace_model(words, int(tokens))
    except ValueError as error:
        found = ValueError(str(error))
    Path(out).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
