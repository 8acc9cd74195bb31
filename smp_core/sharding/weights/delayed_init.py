"""Delayed initialisation: a model built on the meta device gets its numbers shard by
shard.

The model is constructed under `torch.device("meta")` and sharded before any storage
exists. `materialize` then walks over the modules, children before parents, and for each
one

1. lends its initialiser full-size host tensors, created when the initialiser first
   touches them and filled with NaN,
2. seeds the generators from sha256(seed / module name / initialiser), so that the
   numbers depend on names only and are bit-identical for every world size, shard
   degree, wrap plan and order of construction,
3. copies this rank's slices into storage on the target device, and frees the full
   tensors.

Peak host memory is what one initialiser touches (one module, usually), not the model.
Why not `to_empty()` followed by `reset_parameters()`: on a CPU mesh every shard of a
DTensor draws the same random numbers, so the shards of a Linear come out as copies of
one another, and non-persistent buffers (RoPE frequencies) stay uninitialised memory.

Which initialiser. There are three levels, and a module's values come from the highest
level that writes them, as in a plain construction (constructor, then the model's own
scheme, then `model.apply(init_fn)`):

- `reset_parameters()` (or `_reset_parameters()`, torch's spelling in
  MultiheadAttention) of the module's class,
- `_init_weights(module)` of the nearest ancestor that has one: Transformers' own
  initialiser, found by its signature,
- the user's `init_fn(module)`.

Within a level a parent runs after its children and may overwrite them: GPT-2's residual
projections are rescaled when the initialiser sees the attention or MLP block that holds
`c_proj`. A parent that reads what it overwrites (`child.weight *= 0.5`) is run again
with the child's values gathered from their shards.

What a constructor does by itself can not be seen. A parameter or buffer that none of
the levels writes is an error that names it; it is never left as uninitialised memory.
One that a constructor wrote after them is named in a warning, by autograd's count of
writes, which tensors on meta have too (`warn_of_lost_writes`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from smp_core.sharding.weights.delayed_tensors import (
    Slot,
    classes_before_sharding,
    holds_values,
    is_meta,
)
from smp_core.torch_facts import clean_name

logger = logging.getLogger("smp")

InitFn = Callable[[nn.Module], None]

_RESET = 0
_MODEL = 1
_USER = 2


def materialize(
    model: nn.Module, device: torch.device, *, seed: int, init_fn: InitFn | None = None
) -> None:
    """Give every meta parameter and buffer of `model` storage on `device` and its
    initial value, in place.

    Args:
        model: built (wholly or partly) on the meta device; its parameters may be
            DTensors on any 1-D shard mesh (`fully_shard`), plain tensors, or both.
            Modules that already hold real values keep them; they are moved to `device`.
            Every rank of the mesh must make this call.
        device: where the shards and buffers go.
        seed: the seed of the whole model; ranks must agree on it.
        init_fn: called with each module, children first, like `model.apply(init_fn)`;
            what it writes wins over the model's own initialisers.

    Parameter objects, ties between them, `requires_grad` flags and attributes set on
    them survive. The generators of torch, numpy and `random` are left as they were
    found.

    Raises:
        ValueError: tensors that no initialiser fills, or that have NaN left (named,
            with what to do).
        RuntimeError: an initialiser raised; names the module.
    """
    device = torch.device(device)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.device("cpu"),
        _generators_restored(),
        classes_before_sharding(model),
    ):
        _Materialization(model, device, seed, init_fn).run()
    # Moves what was real before, and makes every FSDP unit adopt (and pad, for uneven
    # rows) its new local tensors now instead of in the first forward: references taken
    # by optimizers in between stay valid.
    model.to(device)


@dataclass(eq=False)
class _Attempt:
    """The full-size tensors lent to the initialisers of one module."""

    with_values: bool  # lend foreign tensors with their present values instead of NaN
    level: int = _RESET
    lent: dict[Slot, Tensor] = field(default_factory=dict)
    # Read, but may not be written from here.
    scratch: dict[Slot, Tensor] = field(default_factory=dict)
    # Counts of writes into lent tensors, as last looked at.
    versions: dict[Slot, int] = field(default_factory=dict)
    # Levels at which a tensor was written, and last looked at.
    written_at: dict[Slot, int] = field(default_factory=dict)
    seen_at: dict[Slot, int] = field(default_factory=dict)
    # What is complete after the attempt: no NaN is left, or an integer was written.
    filled: set[Slot] = field(default_factory=set)

    def note_writes(self) -> None:
        """Note in-place writes since the last call as made at the present level.
        ``_version`` is autograd's count of them, and the only one."""
        for slot, tensor in self.lent.items():
            if tensor._version != self.versions[slot]:
                self.versions[slot] = tensor._version
                self.written_at[slot] = self.level

    def has_filled(self, slot: Slot, full: Tensor) -> bool:
        # Integers have no NaN: a write that was seen counts.
        booked = (
            slot in self.written_at
            and not full.is_floating_point()
            and not full.is_complex()
        )
        return booked or holds_values(full)

    def level_of(self, slot: Slot) -> int:
        # Writes through `.data` do not count versions; then the last level that looked
        # at the tensor is taken.
        return self.written_at.get(
            slot, slot.level if slot.level >= 0 else self.seen_at[slot]
        )


@dataclass(frozen=True)
class _Step:
    level: int
    label: str
    call: Callable[[], object]


class _LentEntries(MutableMapping[str, Any]):
    """Stands in for a module's `_parameters` or `_buffers` while an initialiser runs:
    lends what is touched."""

    def __init__(
        self,
        real: dict[str, Any],
        lend: Callable[[str], Any],
        assign: Callable[[str, Any], None],
    ) -> None:
        self._real = real
        self._lend = lend
        self._assign = assign

    def __getitem__(self, name: str) -> Any:
        # Absent entries (bias=None) stay absent.
        return None if self._real[name] is None else self._lend(name)

    def __setitem__(self, name: str, value: Any) -> None:
        # A name that holds nothing may be set to None again, and to nothing else.
        if self._real.get(name) is None:
            if value is None and name in self._real:
                return
            raise TypeError(
                f"an initialiser may not add {name!r}: the model is sharded already"
            )
        self._assign(name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(
            f"an initialiser may not delete {name!r}: the model is sharded already"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._real

    def __iter__(self) -> Iterator[str]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)


class _Materialization:
    def __init__(
        self, model: nn.Module, device: torch.device, seed: int, init_fn: InitFn | None
    ) -> None:
        self.model = model
        self.device = device
        self.seed = seed
        self.init_fn = init_fn
        # One slot for a tensor, whichever modules share it; ties stay ties.
        self.slots: dict[Tensor, Slot] = {}  # tensors hash by identity
        for fqn, module in model.named_modules():
            for name, tensor in _own_tensors(module):
                if tensor in self.slots:
                    self.slots[tensor].places.append((module, name))
                else:
                    full_name = f"{fqn}.{name}" if fqn else name
                    is_parameter = name in module._parameters
                    self.slots[tensor] = Slot(
                        tensor,
                        full_name,
                        [(module, name)],
                        is_parameter,
                        is_meta(tensor),
                    )

    def run(self) -> None:
        # Children first, as a constructor runs.
        for fqn, module, model_init_owner in _children_first(self.model):
            self._initialize(fqn, module, model_init_owner)
        _warn_of_unused_initialisers(self.model)
        self._check_complete()

    def _initialize(
        self, fqn: str, module: nn.Module, model_init_owner: nn.Module | None
    ) -> None:
        # An initialiser of this module may write into any module below.
        holders = [m for m in module.modules() if m._parameters or m._buffers]
        reachable = {
            self.slots[tensor]
            for holder in holders
            for _, tensor in _own_tensors(holder)
        }
        own = {slot for slot in reachable if slot.delayed and slot.owner is module}
        leaf = all(holder is module for holder in holders)
        # Nothing to fill here. A parent without tensors of its own may still rescale
        # those of its children.
        if not own and (leaf or not any(slot.delayed for slot in reachable)):
            return
        # Initialise on lent tensors, and keep this rank's part of what was filled.
        steps = self._steps(module, model_init_owner)
        # For a leaf the highest level is usually enough by itself; the lower ones run
        # only if it leaves something out.
        attempt = self._attempt(
            fqn, module, holders, steps[-1:] if leaf else steps, with_values=False
        )
        if (
            attempt is None
            or not own <= attempt.filled
            or attempt.lent.keys() - attempt.filled
        ):
            attempt = None  # frees its tensors before the second attempt makes its own
            attempt = self._attempt(fqn, module, holders, steps, with_values=True)
        assert attempt is not None  # the second attempt raises instead
        # This rank's part goes into the shard; the full tensors are freed with the
        # attempt.
        for slot in attempt.filled:
            slot.store(attempt.lent.pop(slot), attempt.level_of(slot), self.device)
            self.slots[slot.tensor] = slot

    def _steps(
        self, module: nn.Module, model_init_owner: nn.Module | None
    ) -> list[_Step]:
        # Methods are looked up on classes: wrappers forward unknown attributes to the
        # module inside, which would run its initialiser a second time under another
        # name.
        steps = []
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(type(module), name, None)
            if _accepts(method, module):
                # One of the two spellings: a class with both calls one from the other.
                steps.append(
                    _Step(_RESET, f"{name}()", lambda method=method: method(module))  # type: ignore[misc]
                )
                break
        # Transformers' scheme is a method of the model, called with each module.
        if model_init_owner is not None:
            own = type(model_init_owner)._init_weights  # type: ignore[attr-defined]
            label = f"{type(model_init_owner).__name__}._init_weights(module)"
            steps.append(_Step(_MODEL, label, lambda: own(model_init_owner, module)))
        if self.init_fn is not None:
            init_fn = self.init_fn
            steps.append(_Step(_USER, "init_fn(module)", lambda: init_fn(module)))
        return steps

    def _attempt(
        self,
        fqn: str,
        module: nn.Module,
        holders: list[nn.Module],
        steps: list[_Step],
        with_values: bool,
    ) -> _Attempt | None:
        """Run `steps` on a module. Returns None if one of them raised, perhaps because
        of the NaN it was lent."""
        attempt = _Attempt(with_values)
        # The modules' own dicts give way to lending ones, and come back whatever
        # happens.
        originals = [
            (m, m.__dict__["_parameters"], m.__dict__["_buffers"]) for m in holders
        ]
        try:
            for m, parameters, buffers in originals:
                m.__dict__["_parameters"] = self._lent_entries(m, parameters, attempt)
                m.__dict__["_buffers"] = self._lent_entries(m, buffers, attempt)
            for step in steps:
                attempt.level = step.level
                # The same seed for a name and a level: nothing else may change the
                # numbers.
                _seed_generators(f"{self.seed}/{clean_name(fqn)}/{step.level}")
                try:
                    step.call()
                except Exception as error:
                    # NaN may be the reason: the second attempt lends values.
                    if not with_values:
                        return None
                    where = f"module {fqn!r}" if fqn else "the root module"
                    raise RuntimeError(
                        f"delayed_init=True: {step.label} failed on {where} ({type(module).__name__}): "
                        f"{type(error).__name__}: {error}"
                    ) from error
                attempt.note_writes()
        finally:
            for m, parameters, buffers in originals:
                m.__dict__["_parameters"], m.__dict__["_buffers"] = parameters, buffers
        attempt.filled = {
            slot
            for slot, full in attempt.lent.items()
            if attempt.has_filled(slot, full)
        }
        return attempt

    def _lent_entries(
        self, module: nn.Module, real: dict[str, Any], attempt: _Attempt
    ) -> _LentEntries:
        def store_of(name: str) -> tuple[Slot, dict[Slot, Tensor]]:
            slot = self.slots[real[name]]
            # A tied tensor is written under its first name, and not by a level below
            # the one that has written it.
            first_name = slot.places[0] == (module, name)
            level = max(slot.level, attempt.written_at.get(slot, -1))
            if slot.delayed and first_name and attempt.level >= level:
                attempt.seen_at[slot] = attempt.level
                return slot, attempt.lent
            return slot, attempt.scratch

        def lend(name: str) -> Tensor:
            slot, store = store_of(name)
            if slot not in store:
                # Made when it is first touched, so that an untouched tensor costs
                # nothing.
                store[slot] = slot.full_copy(attempt.with_values)
                attempt.versions.setdefault(slot, store[slot]._version)
            return store[slot]

        def assign(name: str, value: Any) -> None:
            slot, store = store_of(name)
            if not isinstance(value, Tensor) or value.shape != slot.tensor.shape:
                got = (
                    tuple(value.shape)
                    if isinstance(value, Tensor)
                    else type(value).__name__
                )
                raise ValueError(
                    f"{slot.fqn} was built as {tuple(slot.tensor.shape)}, its initialiser assigns {got}"
                )
            store[slot] = value
            # Assigning is writing, too.
            if store is attempt.lent:
                attempt.versions[slot] = value._version
                attempt.written_at[slot] = attempt.level

        return _LentEntries(real, lend, assign)

    def _check_complete(self) -> None:
        # What has no values would be whatever memory held.
        problems = []
        for slot in self.slots.values():
            if slot.delayed and slot.level < 0:
                kind = "parameter" if slot.is_parameter else "buffer"
                problems.append(f"{kind} {slot.fqn!r} of {type(slot.owner).__name__}")
        problems += [
            f"tensor attribute {name!r}" for name in _meta_attributes(self.model)
        ]
        if problems:
            shown = "; ".join(problems[:8]) + (
                f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            )
            raise ValueError(
                f"delayed_init=True: no initialiser fills all of {shown}. Either give the class a reset_parameters() "
                "that does, or pass init_fn, or build the tensor with device='cpu' in its constructor (it then keeps "
                "its value), or use delayed_init=False."
            )


def _children_first(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield (name, module, nearest module at or above it with an
    `_init_weights(module)`), children first, each module once."""
    seen: set[nn.Module] = set()

    def walk(
        fqn: str, module: nn.Module, owner: nn.Module | None
    ) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
        if module in seen:
            return
        seen.add(module)
        if _accepts(getattr(type(module), "_init_weights", None), module, module):
            owner = module
        for name, child in module.named_children():
            yield from walk(f"{fqn}.{name}" if fqn else name, child, owner)
        yield fqn, module, owner

    return walk("", model, None)


def _accepts(function: object, *args: object) -> bool:
    if not callable(function):
        return False
    try:
        # An argument that is missing or too many raises here, before anything is run.
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for entries in (module._parameters, module._buffers):
        yield from (
            (name, tensor) for name, tensor in entries.items() if tensor is not None
        )


def _meta_attributes(model: nn.Module) -> Iterator[str]:
    """Yield the names of meta tensors kept as plain attributes (also inside a list,
    tuple or dict): nothing can fill those."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                values = list(value.values())
            else:
                values = list(value) if isinstance(value, (list, tuple)) else [value]
            registered = name in ("_parameters", "_buffers", "_modules")
            if not registered and any(
                isinstance(v, Tensor) and is_meta(v) for v in values
            ):
                yield f"{fqn}.{name}" if fqn else name


def _seed_generators(key: str) -> None:
    # Any text gives a seed that is the same on every rank and platform.
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    random.seed(number)
    # Only where numpy was imported: no initialiser has drawn from it otherwise.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = (
        torch.default_generator.get_state(),
        random.getstate(),
        numpy.random.get_state() if numpy else None,
    )
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])


def warn_of_lost_writes(model: nn.Module) -> None:
    """Name the weights that a constructor wrote again after the initialisers that
    `materialize` runs, in a warning: what it wrote (zeros for a gate, a smaller spread)
    is lost.

    Args:
        model: as it was built on meta, before anything replaces its parameters. It is
            not changed. Writes into ``.data`` are not counted, and those into modules
            that were copied afterwards neither.
    """
    built = {
        tensor: tensor._version for tensor in model.parameters() if is_meta(tensor)
    }
    # What fails on meta, where there are no values to read, is not known.
    unknown: set[Tensor] = set()
    resets: dict[Tensor, int] = {}
    with torch.no_grad(), torch.device("meta"), _generators_restored():
        run = _Materialization(model, torch.device("meta"), 0, None)
        for _, module, owner in _children_first(model):
            # Initialisers may also assign parameters: each module gets its own back.
            holders: list[tuple[dict[str, Any], dict[str, Any]]] = [
                (entries, dict(entries))
                for each in module.modules()
                for entries in (each._parameters, each._buffers)
            ]
            before: dict[Tensor, int] = {
                tensor: tensor._version for tensor in module.parameters()
            }
            try:
                for step in run._steps(module, owner):
                    step.call()
                    if step.level == _RESET:
                        for _, tensor in _own_tensors(module):
                            resets[tensor] = tensor._version - before.get(tensor, 0)
            except Exception:
                unknown.update(before)
            finally:
                for entries, own in holders:
                    entries.clear()
                    entries.update(own)
    lost = []
    for name, module in model.named_modules():
        # What a parametrization writes is made from what was there.
        if isinstance(module, ParametrizationList):
            continue
        for own_name, tensor in module._parameters.items():
            if tensor is None or tensor not in built or tensor in unknown:
                continue
            made = tensor._version - built[tensor]
            extra = built.pop(tensor) - made
            # A class of the user's own may reset itself twice, torch's do it once.
            of_torch = type(module).__module__.startswith("torch.nn.")
            once_more = not of_torch and extra % max(resets.get(tensor, 0), 1) == 0
            if extra > 0 and not once_more:
                lost.append(f"{name}.{own_name}" if name else own_name)
    if lost:
        shown = ", ".join(lost[:8]) + (
            f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        )
        logger.warning(
            "delayed_init: a constructor wrote into %s after reset_parameters() and _init_weights(module), which alone "
            "are run again for shards; if initial values depend on it, write them there, pass init_fn, or use "
            "delayed_init=False.",
            shown,
        )


def _warn_of_unused_initialisers(model: nn.Module) -> None:
    names = set()
    for module in model.modules():
        # Called by the walk over modules already.
        if _accepts(getattr(type(module), "_init_weights", None), module, module):
            continue
        for name in ("init_weights", "_init_weights"):
            if _accepts(getattr(type(module), name, None), module):
                names.add(f"{type(module).__name__}.{name}()")
    if names:
        logger.warning(
            "delayed_init: not called: %s. Only reset_parameters(), _init_weights(module) and init_fn are; if initial "
            "values depend on it, call it from reset_parameters() or pass init_fn.",
            ", ".join(sorted(names)),
        )
