"""Random models as people write them: what classes derive from, what is in blocks, how
these are listed, called and hooked, what they take and return."""

from __future__ import annotations

import collections
import copy
import functools
import random
import types
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.core.fuzz.members import MEMBERS, WIDTH

T = TypeVar("T")


# What a block's class derives from.


class Slotted:
    __slots__ = ()


class Counts:
    """A mixin with state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted = 0


class Forwardable(Protocol):
    def forward(self, x: Any) -> Any: ...


class Falsy(nn.Module):
    def __len__(self) -> int:
        return 0


class Indexed(nn.Module):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.members)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.members)


class Delegates(nn.Module):
    """Attributes that are not there are those of a member (as PEFT's and many wrappers
    do)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "members":
                raise
            return getattr(self.members[0], name)


class Raising(nn.Module):
    @property
    def fragile(self) -> Any:
        raise RuntimeError("this property cannot be read")

    def __repr__(self) -> str:
        return "Raising()"


class OwnCall(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnSet(nn.Module):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


BASES: dict[str, tuple[Any, ...]] = {
    "plain": (nn.Module,),
    "abstract": (ABC, nn.Module),
    "generic": (Generic[T], nn.Module),
    "slots": (Slotted, nn.Module),
    "mixin": (Counts, nn.Module),
    "protocol": (nn.Module, Forwardable),
    "falsy": (Falsy,),
    "indexed": (Indexed,),
    "delegates": (Delegates,),
    "raising": (Raising,),
    "own call": (OwnCall,),
    "own set": (OwnSet,),
}


@dataclass
class Returned:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Named(NamedTuple):
    hidden: torch.Tensor
    extra: Any


class Holder:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Result(collections.OrderedDict):
    """A dict with attributes, as `ModelOutput` is."""

    @property
    def hidden(self) -> torch.Tensor:
        return self["hidden"]


OUTPUTS: dict[
    str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
] = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (x, None), lambda out: out[0]),
    "list": (lambda x: [x, 3], lambda out: out[0]),
    "dict": (lambda x: {"hidden": x, "n": 1}, lambda out: out["hidden"]),
    "named tuple": (lambda x: Named(x, "text"), lambda out: out.hidden),
    "dataclass": (Returned, lambda out: out.hidden),
    "object": (Holder, lambda out: out.hidden),
    "result": (lambda x: Result(hidden=x), lambda out: out.hidden),
    "nested": (lambda x: {"a": [(x, 1)]}, lambda out: out["a"][0][0]),
    "closure": (lambda x: lambda: x, lambda out: out()),
    "generator": (lambda x: (part for part in [x]), next),
    "twice": (lambda x: (x, x), lambda out: (out[0] + out[1]) / 2),
    "view": (lambda x: x.transpose(0, 1), lambda out: out.transpose(0, 1)),
    "detached beside": (lambda x: (x, x.detach()), lambda out: out[0] + 0 * out[1]),
}
INPUTS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "position": lambda call, x: call(x),
    "keyword": lambda call, x: call(x=x),
    "dict": lambda call, x: call({"x": x}),
    "tuple": lambda call, x: call((x, None)),
    "dataclass": lambda call, x: call(Returned(x)),
    "object": lambda call, x: call(Holder(x)),
    "list": lambda call, x: call([x]),
}


def _read(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, dict):
        return x["x"]
    if isinstance(x, (tuple, list)):
        return x[0]
    return x.hidden


def made(base: str, number: int, case: dict[str, Any]) -> type[nn.Module]:
    """A class of blocks of its own."""

    def __init__(self: nn.Module, members: list[nn.Module]) -> None:
        if base == "mixin":
            Counts.__init__(self)
        else:
            nn.Module.__init__(self)
        self.members = nn.ModuleList(members)
        if case["style"] == "partial":
            self.forward = functools.partial(type(self).forward, self)
        if case["style"] == "instance":
            self.forward = self._other

    def _other(self: nn.Module, x: Any) -> Any:
        return type(self).forward(self, x)

    def forward(self: nn.Module, x: Any) -> Any:
        x = start = _read(x)
        for member in self.members:
            if member is not None:
                x = x + torch.tanh(member(x.clone() if case["clones"] else x * 1.0))
        if case["style"] == "in place":
            x = x.mul_(0.5) if x is not start else x * 0.5
        return OUTPUTS[case["output"]][0](x)

    own = {"__init__": __init__, "forward": forward, "_other": _other}
    return types.new_class(
        f"Block{number}", BASES[base], exec_body=lambda names: names.update(own)
    )


STYLES = ("usual", "partial", "instance", "in place")
CALLS = (
    "call",
    "checkpoint",
    "reentrant",
    "twice",
    "in place after",
    "dunder",
    "map",
    "grad off and on",
)
HOOKS = ("none", "pre", "post", "backward", "pre with kwargs", "tensor", "backward pre")
LISTS = ("list", "gaps", "dict", "attributes", "nested", "shared", "copied", "tied")


class Root(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH))
        blocks = []
        for number, each in enumerate(case["blocks"]):
            kind = made(each["base"], number, each)
            blocks.append(
                kind(
                    [
                        None if name == "none" else MEMBERS[name]()
                        for name in each["members"]
                    ]
                )
            )
        how = case["list"]
        self.extra = None
        if how == "gaps":
            self.blocks = nn.ModuleList([None, *blocks, None])
        elif how == "dict":
            self.blocks = nn.ModuleDict(
                {f"block-{n}": block for n, block in enumerate(blocks)}
            )
        elif how == "nested":
            self.blocks = nn.ModuleList(nn.ModuleList([block]) for block in blocks)
        elif how == "attributes":
            for n, block in enumerate(blocks):
                setattr(self, f"block_{n}", block)
        elif how == "shared":
            self.blocks = nn.ModuleList([*blocks, blocks[0]])
        elif how == "copied":
            self.blocks = nn.ModuleList([*blocks, copy.deepcopy(blocks[0])])
        else:
            self.blocks = nn.ModuleList(blocks)
        if how == "tied":
            self.leave.weight = self.enter.weight
        for block, each in zip(blocks, case["blocks"], strict=True):
            _hook(block, each["hook"])

    def _blocks(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        cases, how = self.case["blocks"], self.case["list"]
        if how == "attributes":
            found = [getattr(self, f"block_{n}") for n in range(len(cases))]
        elif how == "dict":
            found = list(self.blocks.values())
        elif how == "nested":
            found = [each[0] for each in self.blocks]
        else:
            found = [block for block in self.blocks if block is not None]
        return zip(found, [*cases, cases[0]][: len(found)], strict=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) + self.own
        for block, case in self._blocks():
            x = _called(block, case, x)
        return self.leave(x)


def _hook(block: nn.Module, kind: str) -> None:
    if kind == "pre":
        block.register_forward_pre_hook(lambda module, args: None)
    elif kind == "post":
        block.register_forward_hook(lambda module, args, out: out)
    elif kind == "backward":
        block.register_full_backward_hook(
            lambda module, grads, out: tuple(
                None if g is None else g * 0.5 for g in grads
            )
        )
    elif kind == "backward pre":
        block.register_full_backward_pre_hook(
            lambda module, out: tuple(None if g is None else g * 0.5 for g in out)
        )
    elif kind == "pre with kwargs":
        block.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs), with_kwargs=True
        )
    elif kind == "tensor":
        for parameter in block.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * 0.5)


def _called(block: nn.Module, case: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    how, read = case["call"], OUTPUTS[case["output"]][1]
    give = INPUTS[case["input"]]
    if how == "checkpoint":
        return read(
            give(lambda *a, **k: checkpoint(block, *a, use_reentrant=False, **k), x)
        )
    if how == "reentrant":
        return checkpoint(lambda x: read(give(block, x)), x, use_reentrant=True)
    if how == "twice":
        return read(give(block, torch.tanh(read(give(block, x)))))
    if how == "in place after":
        out = read(give(block, x))
        out += 1.0
        return out
    if how == "dunder":
        return read(give(block.__call__, x))
    if how == "map":
        return (
            sum(read(out) for out in map(lambda part: give(block, part), [x, x.tanh()]))
            / 2
        )
    if how == "grad off and on":
        with torch.no_grad():
            before = read(give(block, x))
        return read(give(block, x)) - 0.3 * before
    return read(give(block, x))


# Cases


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed: everything usual, but for some of it."""
    rng = random.Random(seed)

    def unusual(choices: Any, usual: Any, often: float) -> Any:
        return rng.choice(list(choices)) if rng.random() < often else usual

    blocks = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        members = rng.choices(list(MEMBERS), k=rng.choice((1, 1, 2)))
        output = unusual(OUTPUTS, "tensor", 0.4)
        call, hook = unusual(CALLS, "call", 0.5), unusual(HOOKS, "none", 0.5)
        # Torch itself refuses to write into what a backward hook watches; FSDP2 loses
        # sight of a view, and says so.
        if call == "in place after" and (output == "view" or "backward" in hook):
            call = "call"
        blocks.append(
            block(
                *members,
                *(["none"] if rng.random() < 0.1 else []),
                base=unusual(BASES, "plain", 0.5),
                style=unusual(STYLES, "usual", 0.4),
                call=call,
                hook=hook,
                output=output,
                input=unusual(INPUTS, "position", 0.3),
                clones=rng.random() < 0.3,
            )
        )
    how = unusual(LISTS, "list", 0.6)
    if how == "copied" and not {"pruned", "old weight norm"}.isdisjoint(
        blocks[0]["members"]
    ):
        how = "list"  # torch cannot copy these
    units = rng.choice(("default", "blocks", "blocks", "small", "first", "all"))
    return {
        "seed": seed,
        "blocks": blocks,
        "list": how,
        "knobs": _knobs(rng, units, len(blocks)),
        "micro_batches": rng.choice((1, 1, 2)),
        "optimizer": rng.choice(("AdamW", "SGD", "fused")),
    }


def _knobs(rng: random.Random, units: str, n_blocks: int) -> dict[str, Any]:
    knobs: dict[str, Any] = {"shard_degree": rng.choice((1, 2, 2, 2))}
    chosen = {
        "blocks": {"modules": [f"Block{number}" for number in range(n_blocks)]},
        "small": {"min_parameters": rng.choice((8, 60, 150))},
        "first": {"modules": ["Block0"], "min_parameters": rng.choice((60, 1000))},
        "all": {"min_parameters": 1},
    }
    if units in chosen:
        knobs["units"] = chosen[units]
    if units in ("blocks", "first") and rng.random() < 0.2:
        knobs["activations"] = rng.choice(
            ("full", {"checkpoint": "full", "offload": True})
        )
    more = {
        "optimizer_shard": ("world",),
        "reshard_after_forward": (True, False),
        "state_offload": ("optimizer", "all"),
        "keep_between_micro_batches": ("shards", "parameters", "gradients"),
    }
    return knobs | {
        knob: rng.choice(values) for knob, values in more.items() if rng.random() < 0.13
    }


def block(*members: str, **unusual: Any) -> dict[str, Any]:
    usual = {
        "base": "plain",
        "style": "usual",
        "call": "call",
        "hook": "none",
        "output": "tensor",
        "input": "position",
    }
    return {**usual, "clones": False, "members": list(members), **unusual}


def build(case: dict[str, Any]) -> nn.Module:
    """The case's model, in float64."""
    torch.manual_seed(case["seed"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Root(case)
    finally:
        torch.set_default_dtype(before)
