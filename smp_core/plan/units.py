"""Which modules become FSDP units, and which parameters cannot live in one.

A unit's parameters are gathered in one collective and its gradients reduced in one. The
plan is made before anything is sharded, so that what FSDP2 would refuse later (a
parameter tied across units, two trainable dtypes in one unit, 0-d parameters) is
settled here:

- blocks: classes a Transformers model lists in ``_no_split_modules``, else the repeated
  members of ``nn.ModuleList`` and ``nn.Sequential``; or class names, globs over module
  names, a callable; plus every module whose own parameters reach
  ``units.min_parameters``, and the experts of each layer where ranks divide them;
- roots: the model itself, or, for a module whose own forward is not what a step calls
  (a LightningModule), its callable children, and itself only where it owns parameters,
  or where these children share a unit;
- optional modules, which some ranks leave out in some micro-batches, are no units, nor
  is anything inside them: their parameters belong to the unit around them, a root if
  there is no other. FSDP2 gathers that one on all ranks, and reduces it when the pass
  is over, whichever rank used it. ``units.optional="auto"`` finds the towers of a
  Transformers model, which are called where a sample has an image or sound: its config
  has one of its own for text, and of the sub-models (each a ``PreTrainedModel``) those
  for text hold the model's input embeddings;
- a leaf layer whose trainable parameters have another dtype than the rest of its unit
  becomes a unit of its own;
- replicated: 0-d and empty parameters, and those tied across units; they stay plain
  tensors, equal on all ranks.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from smp_core.config import SmpConfig, did_you_mean
from smp_core.plan.experts import experts_of
from smp_core.torch_facts import (
    embeddings_of,
    transformers_models,
    uncompiled,
)

logger = logging.getLogger("smp")

# Their forward computes with parameters of modules inside without calling these (an
# attention's out_proj; all of an encoder layer on its fast path), so that none of them
# can be a unit of its own.
_READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, ParametrizationList)

Entry = Literal["forward", "steps", "children"]


@dataclass(frozen=True)
class PlannedUnit:
    """A module to be wrapped: its name in the model ("" for the model itself) and the
    names of its parameters. Names, because conversions between planning and sharding
    exchange modules."""

    name: str
    parameters: tuple[str, ...]
    is_root: bool


@dataclass(frozen=True)
class WrapPlan:
    """Units, innermost first; names of replicated parameters; for the log, how the
    blocks were chosen; names of the outermost blocks in the model's order, for
    activation checkpointing; and names of the optional modules."""

    units: tuple[PlannedUnit, ...]
    replicated: tuple[str, ...]
    why: str
    blocks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def plan_units(
    model: nn.Module, config: SmpConfig, *, entry: Entry = "forward"
) -> WrapPlan:
    """Decide the units of ``model``.

    Args:
        entry: what a step calls. ``"forward"``: the model itself, which is the root.
            ``"steps"``: methods of it (``training_step``, run through
            ``run_as_forward`` of its unit): each callable child is a root, unless the
            model owns parameters itself; then it is the root above them.
            ``"children"``: the same, but the model's own parameters are replicated,
            because backward runs in the middle of a step (manual optimization).

    Raises:
        ValueError: ``units`` or ``units.optional`` name what matches nothing, or
            ``"auto"`` finds nothing; the model has no parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    # What is chosen by rule or by the user, before what else a unit needs is looked at.
    blocks, why = _blocks(model, config)
    left_out = _optional(model, config) if config.units.optional else []
    optional = {inner for module in left_out for inner in module.modules()}
    children: list[nn.Module] = []
    roots = [model]
    # Steps that call methods make the model's children roots, or the model where it
    # owns parameters.
    if entry != "forward":
        children = [each for each in _callable_children(model) if each not in optional]
        inside = {parameter for child in children for parameter in child.parameters()}
        owns = any(p.ndim > 0 and p not in inside for p in model.parameters())
        if entry != "steps" or not owns:
            roots = children
    chosen = {
        module
        for module in [*blocks, *children, *roots]
        if _callable(module) or module is model
    }
    # Experts are sharded over fewer ranks than the rest of their layer.
    if config.expert_parallel_degree != 1:
        chosen |= {
            model.get_submodule(site.name)
            for site in experts_of(model)
            if not site.problem
        }
    # Large modules outside of blocks (embeddings, heads) would make the root large.
    if config.units.min_parameters > 0:
        chosen |= _by_size(model, chosen, config.units.min_parameters, within=roots)
    chosen -= optional

    # From here on: what FSDP2 would refuse becomes a unit of its own, or is replicated.
    owner, replicated, tied = _divided(model, chosen, set(roots), optional)

    # Every parameter belongs to its unit, or stays plain.
    members: dict[nn.Module, list[str]] = defaultdict(list)
    plain: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter in replicated or not owner[parameter]:
            plain.append(name)
        else:
            members[next(iter(owner[parameter]))].append(name)
    if not members and not plain:
        raise ValueError(
            f"{type(model).__name__} has no parameters: there is nothing to shard"
        )
    # Roots that share a unit cannot be sharded apart: the model is the root of all of
    # them.
    # Counted once for each root: more than there are means that two have one in common.
    held = [chosen.intersection(root.modules()) for root in roots]
    if sum(map(len, held)) > len(set().union(*held)):
        roots = [model]
        chosen.add(model)
    ordered: dict[nn.Module, None] = {}
    kept = {module for module in chosen if module in members or module in roots}
    _children_first(model, kept, ordered)
    units = tuple(
        PlannedUnit(names[module], tuple(members[module]), module in roots)
        for module in ordered
    )
    if tied:
        shown = [
            name for name, parameter in model.named_parameters() if parameter in tied
        ]
        logger.info(
            "parameters shared by several units stay whole on every rank: %s",
            ", ".join(shown),
        )
    optional_names = tuple(names[module] for module in left_out)
    return WrapPlan(
        units, tuple(plain), why, tuple(_outermost(names, blocks)), optional_names
    )


def _children_first(
    module: nn.Module, chosen: set[nn.Module], ordered: dict[nn.Module, None]
) -> None:
    """Add the chosen modules in a module to ``ordered``, the last one first, and each
    behind all chosen ones inside it, as FSDP2 wants it: a layer that several units
    share comes before the first of these."""
    # Units inside come first, in whatever order the model lists its modules.
    for inner in reversed(list(module.modules())):
        if inner in chosen and inner not in ordered and inner is not module:
            _children_first(inner, chosen, ordered)
    if module in chosen:
        ordered[module] = None


def _outermost(names: dict[nn.Module, str], blocks: list[nn.Module]) -> Iterator[str]:
    """Yield the names of the blocks that are more than one layer of torch's own and lie
    in no other block."""
    inside: set[nn.Module] = set()
    # Torch's own single layers are units, and no blocks to recompute.
    wanted: set[nn.Module] = set()
    for block in blocks:
        has_children = next(block.children(), None) is not None
        if has_children or not type(block).__module__.startswith("torch."):
            wanted.add(block)
    for module, name in names.items():
        if module in wanted and module not in inside:
            inside.update(module.modules())
            yield name


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _callable(module: nn.Module) -> bool:
    """Return whether the module has a forward of its own; FSDP2's hooks sit there.
    (What torch.compile returns has it as an attribute of the instance.)"""
    # Containers have no forward to put hooks on.
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(
        module
    )
    return has_forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    # Children that are only containers are looked into.
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        if _callable(child):
            yield child
        else:
            yield from _callable_children(child)


def _class_name(module: nn.Module) -> str:
    return type(uncompiled(module)).__name__


def _blocks(model: nn.Module, config: SmpConfig) -> tuple[list[nn.Module], str]:
    """Return the blocks, and in words how they were chosen."""
    choose = config.units.modules
    # A rule of the library, a function of the user, or names.
    if choose == "auto":
        found, why = _auto_blocks(model)
    elif callable(choose):
        named = list(model.named_modules())[1:]
        found = [module for name, module in named if choose(name, module)]
        why = "units: a function"
    else:
        found, why = [], f"units: {', '.join(choose)}"
        for pattern in choose:
            found += _matching(model, "units", pattern)
    # A block that torch.compile wraps gives way to its wrapper: FSDP2's hooks inside
    # would break its graph.
    wrapper: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules())[1:]:
        if uncompiled(module) is not module:
            wrapper[uncompiled(module)] = module
    return [wrapper.get(block, block) for block in found], why


def _optional(model: nn.Module, config: SmpConfig) -> list[nn.Module]:
    """Return the modules that ``units.optional`` names."""
    asked = config.units.optional
    if asked != "auto":
        return [
            module
            for pattern in asked
            for module in _matching(model, "units.optional", pattern)
        ]
    found = towers(model)
    if not found:
        children = ", ".join(repr(name) for name, _ in model.named_children())
        raise ValueError(
            f"units.optional='auto' finds nothing in {type(model).__name__}: it means sub-models of a Transformers "
            "model that no token goes through, such as a vision tower. Name what ranks leave out: "
            f"units={{'optional': ['visual', '*.adapter_*']}}, or leave it away. Its children: {children}"
        )
    return [model.get_submodule(name) for name in found]


def _matching(model: nn.Module, knob: str, pattern: str) -> list[nn.Module]:
    """Return the modules inside the model of a class name, or by a glob over their
    names."""
    matching = [
        module
        for name, module in model.named_modules()
        if module is not model
        and (_class_name(module) == pattern or fnmatch.fnmatchcase(name, pattern))
    ]
    if not matching:
        classes = sorted({_class_name(module) for module in model.modules()})
        raise ValueError(
            f"{knob}={pattern!r} matches no class name and no module name of {type(model).__name__}"
            f"{did_you_mean(pattern, classes) or '.'} Its classes: {', '.join(classes)}"
        )
    return matching


def _auto_blocks(model: nn.Module) -> tuple[list[nn.Module], str]:
    # Transformers' own word for blocks that belong on one device.
    declared = {
        name
        for module in model.modules()
        for name in (getattr(module, "_no_split_modules", None) or ())
    }
    found = [module for module in model.modules() if _class_name(module) in declared]
    if found:
        return (
            found,
            f"_no_split_modules: {', '.join(sorted({_class_name(m) for m in found}))}",
        )
    # Otherwise: several children of one class in a list, each with parts of its own.
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = defaultdict(list)
        for child in module:
            # An nn.ModuleList may have gaps.
            if child is not None and any(True for _ in child.parameters()):
                kinds[_class_name(child)].append(child)
        for alike in kinds.values():
            # A repeated leaf (two Linear in a Sequential) is not a block: units of one
            # small layer only add latency.
            if len(alike) < 2 or any(_is_leaf(child) for child in alike):
                continue
            found += alike
            for child in alike:
                inside.update(child.modules())
    if found:
        return (
            found,
            f"repeated blocks: {', '.join(sorted({_class_name(m) for m in found}))}",
        )
    return [], "no repeated blocks found: roots only"


def _by_size(
    model: nn.Module, chosen: set[nn.Module], threshold: int, within: list[nn.Module]
) -> set[nn.Module]:
    """Return the modules, innermost first, whose parameters outside smaller units reach
    the threshold."""
    added: set[nn.Module] = set()

    # The size of what no smaller unit has taken; returned upwards.
    def visit(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, _READS_INSIDE):
            own = sum(p.numel() for p in module.parameters())
        else:
            own += sum(visit(child) for child in module.children())
        if module in chosen:
            return 0
        if own >= threshold and _callable(module) and module is not model:
            added.add(module)
            return 0
        return own

    for root in within:
        visit(root)
    return added


Owners = dict[nn.Parameter, dict[nn.Module, None]]


def _divided(
    model: nn.Module,
    chosen: set[nn.Module],
    roots: set[nn.Module],
    optional: set[nn.Module],
) -> tuple[Owners, set[nn.Parameter], set[nn.Parameter]]:
    """Divide the parameters among the chosen modules, which become those that FSDP2
    takes as units.

    Returns:
        the units of each parameter, those that stay whole, and of these the tied ones.
    """
    owner, tied = _owners(model, chosen)
    # A unit with nothing of its own would only gather what its neighbour has: the unit
    # around it can own that.
    needless = {
        module for module in chosen - roots if tied.issuperset(module.parameters())
    }
    if needless:
        chosen -= needless
        owner, tied = _owners(model, chosen)
    # There is nothing to divide of 0-d parameters and those without elements.
    replicated = {p for p in owner if p.ndim == 0 or p.numel() == 0} | tied
    # FSDP2 wants one trainable dtype in a unit.
    if len({p.dtype for p in owner if p.requires_grad}) > 1:
        chosen |= _other_dtype_leaves(model, owner, replicated) - optional
        # The new units may have cut a tie inside of one.
        owner, cut = _owners(model, chosen)
        tied |= cut
        replicated |= tied
        replicated |= _second_dtypes(owner, replicated)
    return owner, replicated, tied


def _owners(
    model: nn.Module, chosen: set[nn.Module]
) -> tuple[Owners, set[nn.Parameter]]:
    """Map each parameter to the innermost chosen modules that hold it; return with it
    those that several do, which are tied across units."""
    owner: Owners = {parameter: {} for parameter in model.parameters()}
    # Each module with the innermost chosen one around it, which gathers its parameters.
    left: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while left:
        module, unit = left.pop()
        unit = module if module in chosen else unit
        for parameter in module.parameters(recurse=False):
            if unit is not None:
                owner[parameter][unit] = None
        left += [(child, unit) for child in reversed(list(module.children()))]
    return owner, {parameter for parameter, units in owner.items() if len(units) > 1}


def _other_dtype_leaves(
    model: nn.Module,
    owner: Owners,
    replicated: set[nn.Parameter],
) -> set[nn.Module]:
    """Return the leaves whose trainable dtype is not the most common one of their
    unit."""
    # FSDP2 wants one trainable dtype in a unit.
    dtype_of = _main_dtypes(owner, replicated)
    leaves: set[nn.Module] = set()
    readers = [
        module for module in model.modules() if isinstance(module, _READS_INSIDE)
    ]
    # Layers inside of these are not called, so they cannot gather by themselves.
    read = {
        inner for outer in readers for inner in outer.modules() if inner is not outer
    }
    for module in model.modules():
        if module in read:
            continue
        own = [
            p
            for p in module.parameters(recurse=False)
            if p.requires_grad and p not in replicated
        ]
        if not own or not _callable(module):
            continue
        # All of a leaf's parameters, so that none of them is left in the unit around.
        if all(owner[p] and p.dtype != dtype_of[next(iter(owner[p]))] for p in own):
            leaves.add(module)
    return leaves


def _second_dtypes(owner: Owners, replicated: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return what is left of two trainable dtypes in one module."""
    dtype_of = _main_dtypes(owner, replicated)
    left = set()
    for parameter, units in owner.items():
        if not parameter.requires_grad or parameter in replicated:
            continue
        if any(parameter.dtype != dtype_of[unit] for unit in units):
            left.add(parameter)
    return left


def _main_dtypes(
    owner: Owners, replicated: set[nn.Parameter]
) -> dict[nn.Module, torch.dtype]:
    # By elements: the most common dtype is that of most memory.
    counts: dict[nn.Module, dict[torch.dtype, int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for parameter, units in owner.items():
        for unit in units:
            if parameter.requires_grad and parameter not in replicated:
                counts[unit][parameter.dtype] += parameter.numel()
    return {
        unit: max(by_dtype, key=lambda dtype: by_dtype[dtype])
        for unit, by_dtype in counts.items()
    }


class _Unit(Protocol):
    """A planned unit or a sharded one."""

    @property
    def name(self) -> str: ...
    @property
    def is_root(self) -> bool: ...


AnyUnit = TypeVar("AnyUnit", bound=_Unit)


def units_with(model: nn.Module, units: Iterable[AnyUnit], entry: str) -> list[AnyUnit]:
    """Return the units that an entry of ``forward_methods`` means: ``"generate"`` every
    root that has it, ``"encoder.encode"`` the named unit.

    Raises:
        ValueError: none has the method.
    """
    # "encoder.encode" is a unit and its method, "generate" any root's method.
    owner, _, method = entry.rpartition(".")
    candidates = [unit for unit in units if unit.name == owner]
    if not owner:
        candidates = [unit for unit in units if unit.is_root]
    found = [
        unit
        for unit in candidates
        if callable(getattr(model.get_submodule(unit.name), method, None))
    ]
    if not found:
        names = ", ".join(repr(unit.name) for unit in units if unit.name)
        raise ValueError(
            f"forward_methods={entry!r}: no unit has this method; write 'method' for a root's or 'unit.method', units "
            f"are: {names}"
        )
    return found


def towers(model: nn.Module) -> list[str]:
    """Return the names of all towers in ``model``, outermost modules only; their
    projectors are no sub-models."""
    # Outermost models first; what lies inside of a tower is part of it.
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, None] = {}
    for outer in transformers_models(model):
        is_inside = any(outer in tower.modules() for tower in found)
        if not is_inside and outer.config.get_text_config() is not outer.config:
            found.update(dict.fromkeys(_beside_text(outer)))
    return [names[module] for module in found]


def _beside_text(model: Any) -> Iterator[nn.Module]:
    """Yield the outermost sub-models without the input embeddings."""
    # The model of text holds the embeddings of the words that come in.
    words, _ = embeddings_of(model)
    if words is None:
        return
    embeddings = set(words.parameters())
    skipped: set[nn.Module] = set()
    for module in transformers_models(model):
        if module is not model and module not in skipped:
            if embeddings.isdisjoint(module.parameters()):
                yield module
                skipped.update(module.modules())
