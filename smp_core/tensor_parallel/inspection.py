"""A plan for a model that carries none, found without looking at names
(``tensor_parallel.plan="infer"``).

The model runs once, and the graph of autograd says which linear layers feed which.
Inside a block, layers that read the block's stream and feed nothing but one further
layer or several of these are columns, and what they feed are rows: queries, keys and
values before the output of attention, the halves of an MLP. That is a guess: whether
what lies between can be computed head by head or feature by feature, how many blocks of
a packed weight there are, and which numbers of heads a forward reads, is tried out in
:mod:`smp_core.tensor_parallel.trial`. What does not pass stays whole.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smp_core.cluster import of_all_ranks
from smp_core.plan import example_of
from smp_core.plan.chain import as_in_training, state_restored
from smp_core.tensor_parallel.adapters import around, has_adapters
from smp_core.tensor_parallel.roles import (
    NoPlan,
    Split,
    is_conv1d,
    splits_of,
    transformers_model,
    vocabulary_of,
)
from smp_core.tensor_parallel.token_trial import BATCH_NORMS
from smp_core.tensor_parallel.trial import Block, Group, Trial, mixes_tokens
from smp_core.torch_facts import embeddings_of

logger = logging.getLogger("smp")

_REFUSAL = "tensor_parallel.plan='infer': "


@dataclass(frozen=True)
class Inspected:
    """Findings of an inspection.

    Attributes:
        plan: module -> role.
        divided: (module, attribute) of numbers that forwards read and that count what
            is split.
        attention: modules whose tokens are gathered as a whole: what lies between their
            layers looks at all of them.
        left: linear layers of blocks that stay whole.
    """

    plan: Mapping[str, str]
    divided: tuple[tuple[str, str], ...]
    attention: tuple[str, ...]
    left: tuple[str, ...]

    def describe(self) -> str:
        """Return the plan, with one entry for all blocks, and what stays whole."""
        roles = {_glob(name): role for name, role in self.plan.items()}
        left = ", ".join(dict.fromkeys(map(_glob, self.left)))
        return f"{roles}" + (f"; whole on every rank: {left}" if left else "")


def _glob(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)


def inspect(
    model: nn.Module, degree: int, sequence_parallel: bool, whole: Container[str] = ()
) -> Inspected:
    """Infer a plan and compare it over all ranks: it follows from an example, and each
    rank has its own. Collective.

    Args:
        model: all of it, before pipeline stages leave each other's parts out; and as
            :func:`infer_plan`.

    Raises:
        ValueError: on all ranks, if two found something else; otherwise what
            :func:`infer_plan` raises.
    """
    # A rank that fails still takes part in the exchange; otherwise the others would
    # wait for it.
    inspected: Inspected | None = None
    try:
        inspected = infer_plan(model, degree, sequence_parallel, whole)
        own = inspected.describe()
    except Exception as error:
        own, failed = f"{type(error).__name__}: {error}", error
    everyone = of_all_ranks(own)
    other = next(
        (rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None
    )
    if other is not None:
        raise ValueError(
            f"tensor_parallel.plan='infer': rank 0 found {everyone[0]!r}, rank {other} {everyone[other]!r}; give "
            "all ranks the same example (example_input_array, of one seed), or write the plan as globs"
        )
    if inspected is None:
        raise failed
    return inspected


def settle_splits(
    model: nn.Module,
    plan: str | Mapping[str, str] | Inspected,
    degree: int,
    sequence_parallel: bool,
    whole: Container[str],
) -> tuple[list[Split], Inspected | None]:
    """Return what happens to which modules, and what was found if the model is or was
    inspected.

    Raises:
        ValueError: as :func:`smp_core.tensor_parallel.roles.splits_of`, with what
            inspection proposes where no plan is known; as :func:`infer_plan`.
    """
    if plan == "infer":
        plan = inspect(model, degree, sequence_parallel, whole)
    if isinstance(plan, Inspected):
        return splits_of(model, plan.plan, degree, whole), plan
    try:
        return splits_of(model, plan, degree, whole), None
    except NoPlan as error:
        try:
            proposed = infer_plan(model, degree, sequence_parallel, whole).describe()
        except ValueError:
            raise ValueError(
                f"{error}; or write tensor_parallel={{'plan': 'infer'}}, which runs it once"
            ) from None
        raise ValueError(
            f"{error}; or write tensor_parallel={{'plan': 'infer'}}, which is to split it so: {proposed}"
        ) from None


def infer_plan(
    model: nn.Module, degree: int, sequence_parallel: bool, whole: Container[str] = ()
) -> Inspected:
    """Find which layers can be split, by running the model. Random numbers, flags and
    gradients stay as they were.

    Args:
        model: with values, equal on all ranks.
        sequence_parallel: tokens are split between the layers of blocks.
        whole: names of parameters that stay whole.

    Raises:
        ValueError: nothing to run it with, no layer that can be split.
    """
    with _evaluating(model), state_restored(model):
        return _infer(model, degree, sequence_parallel, whole)


def _infer(
    model: nn.Module, degree: int, sequence_parallel: bool, whole: Container[str]
) -> Inspected:
    blocks = record(model)
    plan: dict[str, str] = {}
    divided: list[tuple[str, str]] = []
    attention: list[str] = []
    # Blocks are mostly alike: what one needed is tried first in the next.
    known: dict[Any, tuple[int, tuple[tuple[str, str], ...]] | None] = {}
    # In each block, the groups of layers that pass their trial are split.
    for block in blocks:
        groups = list(_groups(block))
        trial = Trial(block, degree)
        passed = [
            found
            for group in groups
            if (found := trial.fitted(group, known)) is not None
        ]
        # What passed becomes roles, and attributes to divide.
        for group in passed:
            plan |= dict.fromkeys(
                group.columns,
                "column" if group.pieces == 1 else f"column:{group.pieces}",
            )
            plan |= dict.fromkeys(group.rows, "row")
            plan |= dict.fromkeys(group.between, "sum")
            divided += [
                (name, attribute)
                for name, attribute in group.divided
                if (name, attribute) not in divided
            ]
            attention += [group.gathered] if group.gathered else []
        # Modules beside the groups that look at several tokens keep all of them.
        if sequence_parallel and passed:
            plan |= dict.fromkeys(_mixing_modules(block, passed), "whole")
    if not plan:
        where = "" if blocks else " in a block of an nn.ModuleList"
        raise ValueError(
            f"{_REFUSAL}no layer of {type(model).__name__} was found{where} that {degree} ranks can share; write globs "
            'over module names, for example tensor_parallel={"plan": {"*.q_proj": "column", "*.o_proj": "row"}}'
        )
    # The vocabulary, which stands outside of blocks.
    plan |= {
        split.name: split.role
        for split in vocabulary_of(model, *_ends(model, blocks), degree, whole)
    }
    left = [
        name for block in blocks for name in block.linears.values() if name not in plan
    ]
    return Inspected(plan, tuple(divided), tuple(attention), tuple(left))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Leave dropout out inside; batch norms look at several tokens as in training."""
    training = [each for each in model.modules() if each.training]
    for each in training:
        each.training = isinstance(each, BATCH_NORMS)
    try:
        yield
    finally:
        for each in training:
            each.training = True


def record(model: nn.Module) -> list[Block]:
    """Run the model once; return the blocks of its outermost lists, with the calls of
    their modules.

    Raises:
        ValueError: nothing to run it with.
    """
    refusal = f"{_REFUSAL}{type(model).__name__} cannot be inspected: "
    # Without values there is nothing to run.
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise ValueError(
            refusal
            + "it is on the meta device; build it with values, and write delayed_init=False"
        )
    known = transformers_model(model)
    module = model if known is None else known
    args, kwargs = example_of(model, module, refusal)
    names = {module: name for name, module in model.named_modules()}
    # Hooks note what each module inside takes and returns.
    blocks = {each: Block(names[each], each, names) for each in _blocks(model)}
    cached = getattr(getattr(known, "config", None), "use_cache", None)
    handles = [handle for block in blocks.values() for handle in block.watch()]
    try:
        # A cache of keys and values would be an output of blocks that training does not
        # have.
        if cached:
            known.config.use_cache = False  # type: ignore[union-attr]
        with as_in_training(module):
            module(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"{refusal}its example cannot be run: {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        if cached:
            known.config.use_cache = cached  # type: ignore[union-attr]
    # What one block returns and another takes has to be compared too.
    taken: set[int] = set().union(*(block.taken() for block in blocks.values()))
    for block in blocks.values():
        block.note_handed_on(taken)
    # A block that is called several times (shared weights) has no single record.
    return [block for block in blocks.values() if block.calls == 1]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost lists that hold linear layers."""
    # Lists inside of lists belong to a block of the outer one.
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            inside |= set(module.modules())
            yield from (
                each
                for each in module.children()
                if any(map(is_linear, each.modules()))
            )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that can be split; adapters' base
    layers are not."""
    return (isinstance(module, nn.Linear) or is_conv1d(module)) and not has_adapters(
        module
    )


@dataclass(eq=False)
class _Flow:
    """The layers of one block, and which feed which.

    Attributes:
        others: whether a layer also reads something that gradients come to and that is
            neither the block's stream nor a parameter: a condition, another sequence.
    """

    sources: dict[str, set[str]] = field(default_factory=dict)
    parameters: dict[str, set[nn.Parameter]] = field(default_factory=dict)
    others: dict[str, bool] = field(default_factory=dict)


_STREAM = ""
"""Stands for what enters a block, among the names of layers."""


def _flow(block: Block) -> tuple[_Flow, set[nn.Parameter], set[str]]:
    """Return the flow between the linear layers of a block, and what reaches its output
    around them."""
    # Layers are found in the graph by the node that made their output.
    made = {call.made: block.linears[layer] for layer, call in block.of_linears()}
    flow = _Flow()
    for layer, call in block.of_linears():
        name = block.linears[layer]
        flow.sources[name], flow.parameters[name], flow.others[name] = _reached(
            call.taken, made, block.entered
        )
    # The block's own output: what reaches it without a row layer has to stay whole.
    sources, parameters, _ = _reached(block.output.grad_fn, made, block.entered)
    return flow, parameters, sources


def _reached(
    start: Any, made: Mapping[Any, str], entered: torch.Tensor
) -> tuple[set[str], set[nn.Parameter], bool]:
    """Return the layers whose outputs a node of the graph is computed from, the
    parameters on the way, and whether another leaf is on it; None is the block's stream
    as it came."""
    reads_others = False
    # A tensor without a node is the block's stream itself.
    found: set[str] = {_STREAM} if start is None else set()
    parameters: set[nn.Parameter] = set()
    left = [] if start is None else [start]
    seen = set(left)
    # The walk ends at outputs of other layers, so only direct sources are found.
    while left:
        node: Any = left.pop()
        if node in made:
            found.add(made[node])
            continue
        variable = getattr(node, "variable", None)
        if variable is entered:
            found.add(_STREAM)
        elif isinstance(variable, nn.Parameter):
            parameters.add(variable)
        elif variable is not None:
            reads_others = True
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                left.append(further)
    return found, parameters, reads_others


def _groups(block: Block) -> Iterator[Group]:
    """Yield layers that may be split together: columns, the rows that they feed, and
    nothing else."""
    flow, outside, ends = _flow(block)
    # A row reads only column layers: neither the stream nor another row.
    rows: dict[str, set[str]] = {}
    for name, sources in flow.sources.items():  # in the order of calls
        if sources and not any(
            source == _STREAM or source in rows for source in sources
        ):
            rows[name] = sources
    groups: list[tuple[set[str], set[str]]] = []
    for row, columns in rows.items():
        # One group with those that have any of its columns.
        merged = set(columns), {row}
        apart = []
        for group in groups:
            if group[0] & columns:
                merged[0].update(group[0])
                merged[1].update(group[1])
            else:
                apart.append(group)
        groups = [*apart, merged]
    # Parameters between the layers (a norm of queries, for example) belong to modules
    # whose gradients are added up.
    owners = {
        parameter: name
        for name, module in block.inside.items()
        for parameter in module.parameters(recurse=False)
    }
    for columns, members in groups:
        # Nothing outside of the group may read split features: no other layer, and not
        # the block's output.
        fed = {name for name, sources in flow.sources.items() if sources & columns}
        between = set().union(*(flow.parameters[name] for name in members))
        alone = fed <= members and not ends & columns and not between & outside
        # What comes from elsewhere (an encoder's output, a table of positions) would
        # get a part of its gradient.
        of_stream = all(
            flow.sources[name] and flow.parameters[name] <= owners.keys()
            for name in columns
        )
        of_stream = of_stream and not any(flow.others[name] for name in members)
        # Columns have one parent, whose forward is the code between the layers.
        if (
            alone
            and of_stream
            and len({around(name) for name in columns}) == 1
            and between <= owners.keys()
        ):
            order = list(block.linears.values())
            of_columns = tuple(name for name in order if name in columns)
            of_rows = tuple(name for name in order if name in members)
            owners_between = {owners[parameter] for parameter in between}
            yield Group(of_columns, of_rows, tuple(sorted(owners_between)))


def _mixing_modules(block: Block, groups: list[Group]) -> Iterator[str]:
    """Yield modules with parameters that would see split tokens and look at several."""
    # Layers of groups handle their tokens themselves.
    split = {
        name
        for group in groups
        for name in (*group.columns, *group.rows, *group.between)
    }
    gathered = [group.gathered for group in groups if group.gathered]

    def visit(name: str, module: nn.Module) -> Iterator[str]:
        holds_split = any(each == name or each.startswith(f"{name}.") for each in split)
        call = block.call_of(module)
        if (
            # Modules without parameters get no role: the trial of the whole block
            # covers them.
            name in gathered
            or name in split
            or not any(True for _ in module.parameters())
        ):
            return
        if (
            not holds_split
            and call is not None
            and mixes_tokens(call.hidden, call.output)
        ):
            yield name
            return
        # It may be a part of it that looks at several tokens.
        for child, each in module.named_children():
            yield from visit(f"{name}.{child}", each)

    for child, each in block.module.named_children():
        yield from visit(f"{block.name}.{child}", each)


def _ends(
    model: nn.Module, blocks: list[Block]
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the embedding and the head: a Transformers model names them; of another it
    is the largest embedding outside of the blocks, and the linear layer with as many
    outputs as that has rows."""
    known = transformers_model(model)
    if known is not None:
        return embeddings_of(known)
    # Outside of the blocks: words come in and logits go out.
    inside = {module for block in blocks for module in block.module.modules()}
    outside = [module for module in model.modules() if module not in inside]
    embeddings = [
        each
        for each in outside
        if isinstance(each, nn.Embedding) and each.max_norm is None
    ]
    if not embeddings:
        return None, None
    words = max(embeddings, key=lambda each: each.num_embeddings)
    heads = [
        each
        for each in outside
        if type(each) is nn.Linear and each.out_features == words.num_embeddings
    ]
    # Nothing says which of several candidates is the head.
    return words, heads[0] if len(heads) == 1 else None
