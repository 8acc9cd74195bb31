"""The chain of a model's blocks (:class:`smp_core.plan.chain.chain.Chain`), recorded by
running the model once on a few tokens, so that nothing has to be known of its names.

Two forwards. The first records what each block takes and gives: a chain is one where
every block takes, in one place, the very tensor that the block before it gave. The
second cuts the graph of autograd at each of these tensors; what can still be reached
behind a block's output are the parameters that work in this block and nowhere else, and
what no gradient comes to is where operators take it. A later stage that needs anything
else of an earlier one shows like this, also where no module is called. What is still
not seen shows when the stages are rehearsed (:mod:`smp_core.pipeline.rehearsal`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint import iterate_tensors
from smp_core.plan.chain.chain import Chain, Place, given_by, with_argument, with_output
from smp_core.plan.chain.kept import KeptTensors
from smp_core.plan.chain.played import is_played, with_fake_values
from smp_core.plan.chain.saved_buffers import places_of_buffers, state_restored
from smp_core.plan.chain.stand_ins import Early, find_stand_ins
from smp_core.plan.checkpointed import checkpoints_itself
from smp_core.plan.examples import HOW, example_of
from smp_core.plan.experts import without_router_loss
from smp_core.plan.shapes import Shapes
from smp_core.plan.units import WrapPlan
from smp_core.torch_facts import is_compiled, lies_in


def with_chain(shapes: Shapes, model: nn.Module) -> Shapes:
    """Return the shapes of a model with its chain.

    Raises:
        ValueError: as :func:`record_chain`.
    """
    return replace(shapes, chain=record_chain(model, shapes.units))


def record_chain(model: nn.Module, units: WrapPlan) -> Chain:
    """Run the model's blocks once and record their chain. Random numbers, gradients and
    flags stay as they were.

    Args:
        model: with values, or on the meta device: then nothing is computed but shapes.
        units: names its blocks and its root.

    Raises:
        ValueError: nothing to call it with, blocks that are no chain (says where it
            breaks), parameters that several blocks share, something before the blocks
            that cannot be left out on other stages.
    """
    refusal = refusal_of(model)
    _refuse_kinds(model, refusal)
    problems: list[ValueError] = []
    # Several groups of blocks may look like a chain; the first that is one is taken.
    for names_of_blocks in _alike(model, units):
        try:
            root = _root(model, units, names_of_blocks, refusal)
            with (
                with_fake_values(model, refusal),
                state_restored(model),
                without_router_loss(model),
            ):
                return _chain_of(model, root, names_of_blocks, refusal)
        except ValueError as problem:
            problems.append(problem)
    # The likeliest group's problem is the one to tell of.
    raise problems[0]


def refusal_of(model: nn.Module) -> str:
    """Return how errors begin about a model that cannot be cut."""
    return (
        f"pipeline_parallel_degree: {type(model).__name__} cannot be cut into stages: "
    )


def _chain_of(
    model: nn.Module, root: str, names_of_blocks: list[str], refusal: str
) -> Chain:
    # The root runs on its own: what is called around it belongs to no block.
    module = model.get_submodule(root)
    args, kwargs = example_of(model, module, refusal)
    blocks = {model.get_submodule(name): name for name in names_of_blocks}
    _refuse_layerdrop(model, names_of_blocks, refusal)
    with as_in_training(module):
        # What each block takes and gives.
        first = _Calls(module, blocks)
        with first.recorded(), running_the_example(module, refusal):
            module(*args, **kwargs)
        link = _link(first, refusal)
        # Which parameters work where.
        cuts, kept = _Cuts(first, *link), KeptTensors(model)
        with cuts.made(), running_the_example(module, refusal), _Noting(cuts):
            outputs = module(*args, **kwargs)
        _refuse_kept(kept, first, refusal)
        # Before, in each of, and after the blocks.
        segments = cuts.segments(outputs)
        if cuts.early & cuts.visited:
            raise ValueError(
                refusal
                + "what comes behind the blocks uses activations from before them, which other stages have; "
                "only what the blocks hand on is sent"
            )
    names = {
        parameter: name for name, parameter in reversed(list(model.named_parameters()))
    }
    # What this one forward left out (an expert without tokens) is on the stage of the
    # block that holds it.
    reached = set().union(*segments)
    for block, segment in zip(first.order, segments[1:-1], strict=True):
        segment |= set(block.parameters()) - reached
    named = []
    for segment in segments:
        named.append(
            [name for parameter, name in names.items() if parameter in segment]
        )
    before, *of_blocks, after = named
    _require_own(before, of_blocks, after, refusal)
    chain_names = tuple(blocks[block] for block in first.order)
    # Tied parameters are on the last stage too, so nothing has to stand for them alone.
    stand_ins = find_stand_ins(
        model, first.early, set(before) - set(after), names, refusal
    )
    takes, gives = link
    return Chain(
        root,
        chain_names,
        takes,
        gives,
        tuple(before),
        tuple(map(tuple, of_blocks)),
        tuple(after),
        tuple(stand_ins),
        tuple(places_of_buffers(model, first.early, chain_names)),
        first.kind,
    )


def _refuse_kept(kept: KeptTensors, calls: _Calls, refusal: str) -> None:
    """Refuse what a step could take its loss of where it is not: tensors with gradients
    that modules before the last block keep."""
    elsewhere = {module for module, *_ in calls.early}
    elsewhere.update(module for block in calls.order[:-1] for module in block.modules())
    for place, module, tensor in kept.found():
        if module in elsewhere and tensor.requires_grad:
            raise ValueError(
                f"{refusal}its forward keeps a tensor with a gradient in {place}, of which a step on the last stage "
                "has nothing: a loss would leave it out. Keep tensor.detach() where it is only looked at; otherwise "
                "add it to the tensor that blocks hand on, or write pipeline_parallel_degree=1"
            )


def _refuse_layerdrop(
    model: nn.Module, names_of_blocks: list[str], refusal: str
) -> None:
    """Refuse blocks that a forward leaves out at random, by what Transformers' and
    fairseq's models call it."""
    for name, module in model.named_modules():
        if not names_of_blocks[0].startswith(f"{name}." if name else ""):
            continue
        # Models keep the probability on themselves or in their configuration.
        holders = {"": module, "config.": getattr(module, "config", None)}
        share = {
            f"{where}layerdrop": getattr(holder, "layerdrop", None)
            for where, holder in holders.items()
        }
        for attribute, value in share.items():
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{refusal}{type(module).__name__}.{attribute}={value} leaves blocks out at random, through which "
                    f"stages take every batch; write {attribute} = 0.0 before training"
                )


@contextlib.contextmanager
def running_the_example(module: nn.Module, refusal: str) -> Iterator[None]:
    """Refuse a model whose forward fails inside; of one that is played,
    :func:`with_fake_values` says why."""
    try:
        yield
    except Exception as error:
        if is_played(module):
            raise
        raise ValueError(
            f"{refusal}its example cannot be run: {type(error).__name__}: {error}; {HOW}"
        ) from error


def _alike(model: nn.Module, units: WrapPlan) -> list[list[str]]:
    """Return the blocks that may be a chain: first those of the kind that there are
    most of (a Transformers model names its embeddings next to them) or of several kinds
    in one list (state spaces and attention), then the others', then those of one kind
    in one list (an encoder's, where a decoder's are of the same kind)."""
    # By class first: blocks of a chain mostly are of one.
    kinds = {name: type(model.get_submodule(name)) for name in units.blocks}
    by_kind: dict[type, list[str]] = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    of_kinds = list(by_kind.values())
    in_lists: list[list[str]] = []
    # One class may be in several lists, as in an encoder and a decoder.
    for names in of_kinds:
        lists = _in_lists(names)
        if len(lists) > 1:
            in_lists += lists
    numbered = [name for name in kinds if name.rpartition(".")[2].isdecimal()]
    mixed = [
        names
        for names in _in_lists(numbered)
        if len(set(map(kinds.__getitem__, names))) > 1
    ]
    # The longest group first.
    found = [
        *sorted([*mixed, *of_kinds], key=len, reverse=True),
        *sorted(in_lists, key=len, reverse=True),
    ]
    several = [names for names in found if len(names) > 1]
    return several or [found[0] if found else []]


def _in_lists(names: list[str]) -> list[list[str]]:
    """Return the names of modules list by list."""
    lists: dict[str, list[str]] = {}
    for name in names:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    return list(lists.values())


def _root(model: nn.Module, units: WrapPlan, blocks: list[str], refusal: str) -> str:
    """Return the name of the one root that holds all blocks and all parameters."""
    if len(blocks) < 2:
        raise ValueError(
            refusal
            + f"it has no chain of blocks ({units.why}); name them with units=..."
        )
    # One root around all blocks.
    # A trainer's module may have several callable children.
    roots = [unit.name for unit in units.units if unit.is_root]
    holding = []
    for root in roots:
        if all(lies_in(block, root) for block in blocks):
            holding.append(root)
    if len(holding) != 1:
        raise ValueError(
            refusal
            + f"its blocks lie in several modules that are called one by one ({', '.join(roots)})"
        )
    (root,) = holding
    # No unit between it and them.
    # A unit around several blocks would be gathered by several stages together.
    around = [
        unit.name
        for unit in units.units
        if not unit.is_root and blocks[0].startswith(f"{unit.name}.")
    ]
    if around:
        raise ValueError(
            refusal
            + f"the unit {around[0]} holds blocks; write units={{'min_parameters': 0}}"
        )
    # No parameters outside of it.
    inside = set(model.get_submodule(root).parameters())
    outside = [
        name for name, parameter in model.named_parameters() if parameter not in inside
    ]
    if outside:
        raise ValueError(
            refusal
            + f"{', '.join(outside[:5])} would be needed on several stages, outside of the module that runs the "
            f"blocks ({root or 'the model'}); put it into that module"
        )
    return root


def _refuse_kinds(model: nn.Module, refusal: str) -> None:
    """Refuse modules that leave the forward of every stage in another way."""
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            refusal + "it is compiled; write compile=True, which compiles its blocks"
        )
    if checkpoints_itself(model):
        raise ValueError(
            refusal
            + "it checkpoints activations itself; write activations='full' in place of that, and switch it off "
            "(model.gradient_checkpointing_disable(), TrainingArguments(gradient_checkpointing=False))"
        )


@contextlib.contextmanager
def as_in_training(module: nn.Module) -> Iterator[None]:
    """Require a gradient of every parameter inside, so that backward can reach all of
    them; restore random states after."""
    # A frozen parameter would be missing from the graph, and belong to no block.
    frozen = [
        p for p in module.parameters() if not p.requires_grad and p.is_floating_point()
    ]
    device = next(module.parameters()).device
    with torch.inference_mode(False), torch.enable_grad():
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                for parameter in frozen:
                    parameter.requires_grad_(True)
                yield
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(False)


@dataclass(eq=False)
class _Calls:
    """The calls of modules in one forward.

    Attributes:
        order: the blocks as they were called.
        takes, gives: of each block, tensors by their place.
        sizes: how many things each block gave; 0: one tensor.
        kind: what the last block gave several things in.
        early: modules that were called and had returned before the first block.
    """

    module: nn.Module
    blocks: dict[nn.Module, str]
    order: list[nn.Module] = field(default_factory=list)
    takes: list[dict[Place, Tensor]] = field(default_factory=list)
    gives: list[dict[int, Tensor]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kind: type = tuple
    early: list[Early] = field(default_factory=list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        # Blocks show what they take and give; modules outside of them, what runs
        # before.
        handles = [
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            for block in self.blocks
        ]
        handles += [block.register_forward_hook(self._leave) for block in self.blocks]
        inside = {inner for block in self.blocks for inner in block.modules()}
        others = [module for module in self.module.modules() if module not in inside]
        handles += [
            module.register_forward_hook(self._note_early, with_kwargs=True)
            for module in others
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.order.append(block)
        self.takes.append(
            {
                place: value
                for place, value in _places(args, kwargs)
                if isinstance(value, Tensor)
            }
        )

    def _leave(self, block: nn.Module, _: Any, output: Any) -> None:
        # A tensor by itself has place 0.
        several = isinstance(output, (tuple, list))
        self.sizes.append(len(output) if several else 0)
        self.kind = type(output) if several else tuple
        given = enumerate(output if several else [output])
        self.gives.append(
            {place: value for place, value in given if isinstance(value, Tensor)}
        )

    def _note_early(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        # Modules that are called later need no stand-in.
        if not self.order:
            taken = next(
                (
                    value
                    for _, value in _places(args, kwargs)
                    if isinstance(value, Tensor)
                ),
                None,
            )
            self.early.append((module, taken, output))


def _places(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


_ALIKE = "call all blocks alike, or write pipeline_parallel_degree=1"


def _link(calls: _Calls, refusal: str) -> tuple[Place, tuple[int, int] | None]:
    """Find where each block takes what the one before it gave."""
    # Each block is called once.
    # A block that runs twice, or not at all, has no place on one stage.
    named = [calls.blocks[block] for block in calls.order]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice or len(named) < len(calls.blocks):
        never = sorted(set(calls.blocks.values()) - set(named))
        # No example makes a model of recurrent depth call a block once.
        if twice:
            raise ValueError(
                f"{refusal}{twice[0]} is called several times in one forward, and a stage runs each of its blocks "
                "once; write pipeline_parallel_degree=1"
            )
        raise ValueError(
            f"{refusal}{', '.join(never[:3])} is not called in one forward (`block.forward(...)` is no call of a "
            f"block, `block(...)` is); {HOW}, or write pipeline_parallel_degree=1"
        )
    # The places that link all pairs of neighbours.
    # The same tensor object has to go from each block into the next.
    links: set[tuple[Place, int]] | None = None
    for number in range(1, len(named)):
        here = {
            (place, there)
            for place, taken in calls.takes[number].items()
            for there, given in calls.gives[number - 1].items()
            if taken is given
        }
        links = here if links is None else links & here
        if not links:
            raise ValueError(
                f"{refusal}{named[number]} does not take what {named[number - 1]} gives, in the place where the blocks "
                f"before it do; {_ALIKE}"
            )
    # One tensor, in the same place everywhere.
    assert links is not None
    if len(links) > 1:
        raise ValueError(
            f"{refusal}its blocks hand on {len(links)} tensors, and one is sent between stages: let each block "
            "compute the others, or write pipeline_parallel_degree=1"
        )
    ((takes, gives),) = links
    if takes not in calls.takes[0]:
        raise ValueError(
            f"{refusal}{named[0]} is called in another way than {named[1]}; {_ALIKE}"
        )
    if len(set(calls.sizes)) > 1:
        raise ValueError(
            f"{refusal}its blocks do not all give the same number of things; {_ALIKE}"
        )
    return takes, (gives, calls.sizes[0]) if calls.sizes[0] else None


class _Cuts:
    """A forward whose graph is cut where the chain's tensor enters a block and leaves
    the last one.

    Attributes:
        early: nodes of the graph that were made before the first block.
        visited: nodes that can be reached behind the last one.
        taken: the parameters that operators took before, in each of and behind the
            blocks.
    """

    def __init__(
        self, calls: _Calls, takes: Place, gives: tuple[int, int] | None
    ) -> None:
        self._blocks = calls.order
        self._takes = takes
        self._gives = gives
        self._entering: Tensor | None = None
        self._given: list[Tensor] = []
        self.early: set[Any] = set()
        self.visited: set[Any] = set()
        self.taken: list[set[nn.Parameter]] = [
            set() for _ in range(len(self._blocks) + 2)
        ]
        self._place = 0

    def note(self, taken: Any, made: Any) -> None:
        """Note what an operator took, and until the first block is entered what it
        gave."""
        self.taken[self._place] |= {
            tensor
            for _, tensor in iterate_tensors(taken)
            if isinstance(tensor, nn.Parameter)
        }
        # What was made before the first block must not be reached from after the last.
        if self._entering is None:
            self.early |= {
                tensor.grad_fn
                for _, tensor in iterate_tensors(made)
                if tensor.grad_fn is not None
            }

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        handles = [
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            for block in self._blocks
        ]
        handles += [block.register_forward_hook(self._leave) for block in self._blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def segments(self, outputs: Any) -> list[set[nn.Parameter]]:
        """Return the parameters before, in each of and behind the blocks."""
        assert self._entering is not None
        behind = list(_tensors_of(outputs))
        reached = [
            _reached([self._entering]),
            *(_reached([given]) for given in self._given),
            _reached(behind, self.visited),
        ]
        # An unused head, or a teacher: no gradient comes to them. Parameters with a
        # gradient belong where it reaches them, the others where an operator took them.
        trained = set().union(*reached)
        return [
            found | (taken - trained)
            for found, taken in zip(reached, self.taken, strict=True)
        ]

    def _enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Detached: what a gradient of this block's output reaches is then this block's
        # alone.
        taken = (
            args[self._takes] if isinstance(self._takes, int) else kwargs[self._takes]
        )
        if self._entering is None:
            self._entering, self._place = taken, 1
        return with_argument(args, kwargs, self._takes, taken.detach().requires_grad_())

    def _leave(self, block: nn.Module, _: Any, output: Any) -> Any:
        given = given_by(output, self._gives)
        self._given.append(given)
        self._place += 1
        return with_output(output, self._gives, given.detach().requires_grad_())


def _tensors_of(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a model gives, of dataclasses too."""
    if is_dataclass(outputs) and not isinstance(outputs, dict):
        outputs = vars(outputs)
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (dict, list, tuple)):
        inside = outputs.values() if isinstance(outputs, dict) else outputs
        for each in inside:
            yield from _tensors_of(each)


class _Noting(TorchFunctionMode):
    """Shows a recording what every operator takes and gives."""

    def __init__(self, cuts: _Cuts) -> None:
        super().__init__()
        self._cuts = cuts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # Not attributes, which stages know of all parameters.
        if (
            isinstance(made, (Tensor, tuple, list))
            and getattr(func, "__name__", "") != "__get__"
        ):
            self._cuts.note([args, kwargs], made)
        return made


def _reached(
    tensors: Iterable[Tensor], visited: set[Any] | None = None
) -> set[nn.Parameter]:
    """Return the parameters that gradients of these tensors come to.

    Args:
        visited: is given the nodes of the graph on the way.
    """
    # An output may be a parameter itself.
    found: set[nn.Parameter] = {
        tensor for tensor in tensors if isinstance(tensor, nn.Parameter)
    }
    left = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set() if visited is None else visited
    seen.update(left)
    while left:
        node: Any = left.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            found.add(node.variable)
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                left.append(further)
    return found


def _require_own(
    before: list[str],
    of_blocks: list[list[str]],
    after: list[str],
    refusal: str,
) -> None:
    """Require that each parameter works in one block, or around the blocks; before and
    behind them it may be the same one."""
    # Each parameter's places, of which a tied one may have "before" and "behind".
    places: dict[str, list[str]] = {}
    for number, members in enumerate(of_blocks):
        for name in members:
            places.setdefault(name, []).append(f"block {number}")
    for where, members in (
        ("what comes before the blocks", before),
        ("what comes behind them", after),
    ):
        for name in members:
            if name in places:
                places[name].append(where)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    if shared:
        name, two = next(iter(shared.items()))
        raise ValueError(
            f"{refusal}{name} works in {' and in '.join(two[:2])}, which may be on different stages; only what comes "
            "before and behind the blocks can share parameters (tied embeddings), and no loss can read what several "
            "blocks computed, but those of routers that torch-smp knows (output_router_logits)"
        )
