"""States drawn from a seed: tensors of every dtype, shape, view and layout under keys of
every kind, among values that are no tensors; saved one way on some ranks, read back in
another way on others.

A state is drawn as a tree of plain descriptions, the same on all ranks, which
`built` turns into tensors over a mesh. What comes back has the same bits and types, or
saving refuses it in words that name its place.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    load_checkpoint,
    read_rest,
    save_checkpoint,
)

DTYPES = [
    name
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "int16", "int32", "int64", "uint8",
        "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128",
    )
    if hasattr(torch, name)
]  # fmt: skip
USUAL = ("float32", "float32", "bfloat16", "float64", "int64")
SHAPES = (
    (), (0,), (1,), (3,), (5, 2), (0, 3), (3, 0), (2, 3, 4), (1, 1), (7,), (4, 1, 2), (6, 6), (9, 3), (8, 4, 2),
)  # fmt: skip
VIEWS = (
    "plain", "plain", "plain", "transposed", "strided", "expanded", "conj", "negative", "part", "parameter",
    "subclass", "attribute", "buffer",
)  # fmt: skip
KEYS: tuple[Any, ...] = (
    "weight", "a.b", "a", "b", "layers.0", "x/y", "../up", "/root", "$tensor", "$dict", "", " ", "__metadata__",
    "имя", "名\U0001f600", "line\nbreak", 'quo"te', "back\\slash", "weight@0", "weight@0,0", "weight'", "null", "0",
    "1", "['a', 'b']", "[0]", "nan", "states", "%s{}", "*", "[ab]", "\x00", "a" * 3000, 0, 1, -1, 2**70, None, True,
    1.5, -0.0, float("inf"), (), ("a", 1), (("x",), None), ("a.b", 1.5),
)  # fmt: skip


class Kind(enum.Enum):
    ONE = 1


class Number(enum.IntEnum):
    TWO = 2


class Text(str):
    """A text of a class of its own."""


Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Settings:
    rate: float = 0.5


class Own(torch.Tensor):
    """A tensor of a class of its own."""


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**63, -(2**90), 0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1e-320, "",
    "text", "$tensor", "naïve \U0001f600", "\ud800", "\x00", b"\x00\xff", bytearray(b"ab"), 1 + 2j, (), (1,),
    (1, (2.5, "x")), [], [[]], [None, [1, (2,)]], {}, {"a": {}}, {"$x": 1}, {"$tensor": "weight"}, {1: "a", "1": "b"},
    {None: 0, True: 1}, {(1, "a"): [1]}, {1.5: 2}, {b"k": 1}, set(), {1, "a"}, {(1, 2)}, frozenset({1.5, None}),
    {frozenset({1})}, torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cpu"), torch.strided,
    collections.OrderedDict(b=1, a=(2,)), collections.Counter("aab"), numpy.float32(0.1), numpy.int8(-3),
    numpy.bool_(True), numpy.complex64(1j), numpy.float16(2), numpy.arange(6).reshape(2, 3),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.zeros((0, 2)), numpy.array(3.5),
    numpy.array([1, 2], dtype=">i4"), numpy.array([True, False]), numpy.arange(8)[::2], numpy.longdouble(1) / 3,
    numpy.array([1.5], dtype=numpy.longdouble), pathlib.Path("a/b"),
    # What only unrestricted unpickling could read.
    b"", range(3), slice(1, None), torch.contiguous_format, Kind.ONE, Number.TWO, Text("t"), Pair(1, 2), Settings(),
    decimal.Decimal("0.1"), pathlib.PurePosixPath("a"), collections.defaultdict(list, {"a": [1]}),
    collections.deque([1]), numpy.array(["a", "bc"]), numpy.array([1, None], dtype=object),
    numpy.datetime64("2020-01-01"), numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), numpy.str_("s"),
    numpy.dtype("f4"), len, int, Settings, torch.nn.Linear(1, 1), NotImplemented, Ellipsis,
)  # fmt: skip
"""Values that are no tensors. Each comes back as it was, or saving refuses it."""
USUAL_VALUES = next(
    place for place, value in enumerate(VALUES) if type(value) is bytes and not value
)


@dataclass(frozen=True)
class Leaf:
    """A tensor: what it is, and for each axis of a mesh the dim it is cut along there
    (None: replicated); ``cuts`` None: no DTensor."""

    dtype: str
    shape: tuple[int, ...]
    view: str
    cuts: tuple[int | None, ...] | None
    seed: int
    tied: bool = False


@dataclass(frozen=True)
class Value:
    """One of `VALUES`, by its number."""

    number: int


@dataclass(frozen=True)
class Nest:
    """A container and what is in it."""

    kind: str
    entries: tuple[tuple[Any, Any], ...]


def draw_leaf(generator: random.Random, odd: bool) -> Leaf:
    shape = generator.choice(SHAPES)
    dtype = generator.choice(DTYPES if odd else USUAL)
    view = generator.choice(VIEWS)
    cuts: tuple[int | None, ...] | None = None
    if generator.random() < 0.6:
        dims: list[int | None] = [None, *range(len(shape))]
        cuts = (generator.choice(dims), generator.choice(dims))
    return Leaf(dtype, shape, view, cuts, generator.randrange(1 << 30))


def draw_nest(generator: random.Random, depth: int, values: bool) -> Nest:
    kind = generator.choice(("dict", "dict", "dict", "odict", "list", "tuple"))
    count = generator.randrange(0, 6)
    entries: list[tuple[Any, Any]] = []
    keys = generator.sample(KEYS, count)
    for number in range(count):
        chance = generator.random()
        inner: Any
        if chance < 0.25 and depth:
            inner = draw_nest(generator, depth - 1, values)
        elif chance < 0.45 and values:
            # Few that are refused, which would end most cases before they begin.
            usual = generator.random() < 0.98
            inner = Value(generator.randrange(USUAL_VALUES if usual else len(VALUES)))
        else:
            inner = draw_leaf(generator, generator.random() < 0.6)
            if generator.random() < 0.15:
                inner = dataclasses.replace(inner, tied=True)
        key = keys[number] if kind in ("dict", "odict") else number
        entries.append((key, inner))
    return Nest(kind, tuple(entries))


def draw(seed: int) -> Nest:
    """A state: the usual keys at its top, one of them with values only."""
    generator = random.Random(seed)
    parts: list[tuple[Any, Any]] = []
    for key in generator.sample(("state_dict", "model", "optimizer", "rest", 3), 3):
        parts.append((key, draw_nest(generator, 2, key == "rest" or seed % 2 == 0)))
    return Nest("dict", tuple(parts))


def numbers(leaf: Leaf) -> torch.Tensor:
    """A leaf's values, all bits drawn, but for a bool."""
    generator = torch.Generator().manual_seed(leaf.seed)
    dtype = getattr(torch, leaf.dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, leaf.shape, generator=generator).bool()
    count = torch.Size(leaf.shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    values = data.view(dtype).view(leaf.shape)
    if leaf.view == "expanded" and values.ndim and values.shape[0]:
        values = values[:1].expand(values.shape).clone()
    return values


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's values."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    plain = plain.resolve_conj().resolve_neg()
    # `contiguous` keeps odd strides of dims of one element.
    dense = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return dense.flatten().view(torch.uint8)


def viewed(tensor: torch.Tensor, view: str) -> torch.Tensor:
    """The same values in memory of another kind."""
    if view == "transposed" and tensor.ndim > 1:
        return tensor.mT.contiguous().mT
    if view == "strided" and tensor.ndim:
        wide = tensor.repeat_interleave(2, -1)
        return wide[..., ::2]
    if view == "part":
        padded = torch.stack([tensor, tensor, tensor])
        return padded[1]
    if view == "expanded" and tensor.ndim and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    if view == "conj" and tensor.is_complex() and tensor.dtype != torch.complex32:
        return tensor.conj().resolve_conj().conj()
    if view == "negative" and tensor.dtype in (torch.float32, torch.float64):
        return torch._neg_view(-tensor)
    if view == "parameter":
        return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    if view == "buffer":
        return nn.Buffer(tensor)
    if view == "subclass":
        return tensor.as_subclass(Own)
    if view == "attribute":
        tensor.note = "of the user"  # type: ignore[attr-defined]
    return tensor


_MESHES: dict[tuple[Any, tuple[int, int]], DeviceMesh] = {}


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    key = (dist.group.WORLD, shape)
    if key not in _MESHES:
        for old in [old for old in _MESHES if old[0] is not dist.group.WORLD]:
            del _MESHES[old]
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    return _MESHES[key]


def distributed(
    leaf: Leaf, values: torch.Tensor, shape: tuple[int, int] | None
) -> torch.Tensor:
    """A leaf's tensor on this rank."""
    if leaf.cuts is None or shape is None:
        return viewed(values, leaf.view)
    mesh = mesh_of(shape)
    places = [Replicate() if cut is None else Shard(cut) for cut in leaf.cuts]
    # Through bytes: collectives and operators lack the rarer dtypes.
    cut_up = distribute_tensor(
        torch.empty(leaf.shape, dtype=torch.float32).zero_(),
        mesh,
        places,
        src_data_rank=None,
    )
    local = own_box(values, cut_up)
    local = viewed(local.clone(), leaf.view if leaf.view != "expanded" else "plain")
    return DTensor.from_local(
        local.as_subclass(torch.Tensor) if type(local) is Own else local.detach(),
        mesh,
        places,
        run_check=False,
        shape=values.shape,
        stride=values.stride(),
    )


def own_box(values: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of values, laid out as another DTensor."""
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size, rank = (
                like.device_mesh.size(axis),
                like.device_mesh.get_local_rank(axis),
            )
            rows = values.shape[placement.dim]
            chunk = -(-rows // size) if rows else 0
            begin = min(rank * chunk, rows)
            values = values.narrow(placement.dim, begin, min(chunk, rows - begin))
    assert values.shape == like.to_local().shape, (values.shape, like.to_local().shape)
    return values


def built(node: Any, shape: tuple[int, int] | None, *, zero: bool = False) -> Any:
    """Turn a description into a state over a mesh; ``zero``: a template."""
    last: list[tuple[Leaf, torch.Tensor]] = []

    def make(node: Any) -> Any:
        if isinstance(node, Leaf):
            if node.tied and last and not zero:
                return last[-1][1]
            values = numbers(node)
            if zero:
                empty = torch.zeros(bits(values).shape, dtype=torch.uint8)
                values = empty.view(values.dtype).view(values.shape)
                # torch fills no memory that several elements share.
                view = "plain" if node.view == "expanded" else node.view
                node = dataclasses.replace(node, view=view)
            tensor = distributed(node, values, shape)
            last.append((node, tensor))
            return tensor
        if isinstance(node, Value):
            return "template" if zero else VALUES[node.number]
        entries = [(key, make(inner)) for key, inner in node.entries]
        if node.kind in ("list", "tuple"):
            items = [inner for _, inner in entries]
            return items if node.kind == "list" else tuple(items)
        return (
            dict(entries) if node.kind == "dict" else collections.OrderedDict(entries)
        )

    return make(node)


def with_ties(node: Any) -> Any:
    """The description with each tied leaf as the leaf before it: what is saved."""
    last: list[Leaf] = []

    def follow(node: Any) -> Any:
        if isinstance(node, Leaf):
            if node.tied and last:
                return last[-1]
            last.append(dataclasses.replace(node, tied=False))
            return last[-1]
        if isinstance(node, Value):
            return node
        return Nest(
            node.kind, tuple((key, follow(inner)) for key, inner in node.entries)
        )

    return follow(node)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, put together from the boxes of all ranks: gathers lack the rarer
    dtypes. Collective for DTensors."""
    if not isinstance(tensor, DTensor):
        return tensor
    mine = tensor.to_local()
    parts: list[Any] = [None] * dist.get_world_size()
    coordinate = tensor.device_mesh.get_coordinate()
    dist.all_gather_object(parts, (coordinate, bits(mine).tolist(), tuple(mine.shape)))
    result = torch.zeros(tensor.shape, dtype=mine.dtype)
    for where, data, shape in parts:
        part = result
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                rows, size = part.shape[placement.dim], tensor.device_mesh.size(axis)
                chunk = -(-rows // size) if rows else 0
                begin = min(where[axis] * chunk, rows)
                part = part.narrow(placement.dim, begin, min(chunk, rows - begin))
        if part.numel():
            part.copy_(
                torch.tensor(data, dtype=torch.uint8).view(mine.dtype).view(shape)
            )
    return result


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where two states differ in a type, a key, or a bit. Collective with DTensors."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            yield f"{path}: {found!r} instead of a tensor"
            return
        have, want = whole(found), whole(expected)
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            yield f"{path}: {have.dtype} {list(have.shape)} instead of {want.dtype} {list(want.shape)}"
        elif not torch.equal(bits(have), bits(want)):
            yield f"{path}: other bits of {want.dtype} {list(want.shape)}"
    elif type(found) is not type(expected):
        yield f"{path}: {found!r} ({type(found).__name__}) instead of {expected!r} ({type(expected).__name__})"
    elif isinstance(expected, dict):
        if repr(list(found)) != repr(list(expected)):
            yield f"{path}: keys {list(found)} instead of {list(expected)}"
            return
        for key in expected:
            yield from differences(
                found[key], expected[key], f"{path}[{str(key)[:20]!r}]"
            )
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path}: {len(found)} entries instead of {len(expected)}"
            return
        for place, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif isinstance(expected, numpy.ndarray):
        alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if not alike or found.tobytes() != expected.tobytes():
            yield f"{path}: {found!r} instead of {expected!r}"
    elif isinstance(expected, (nn.Module, torch.Generator)):
        return
    elif isinstance(expected, (set, frozenset)):
        if found != expected:
            yield f"{path}: {found!r} instead of {expected!r}"
    elif repr(found) != repr(expected):
        yield f"{path}: {found!r} instead of {expected!r}"


def save_drawn(
    seeds: list[int], folder: str, shape: tuple[int, int], way: str
) -> dict[int, str]:
    """Save drawn states; return by seed the words of those that were refused."""
    background = AsyncCheckpointer() if way == "async" else None
    words = {}
    for seed in seeds:
        state, path = built(draw(seed), shape), f"{folder}/{seed}"
        try:
            if background is None:
                save_checkpoint(path, state)
            else:
                background.save(path, state)
                background.wait()
        except CheckpointError as error:
            words[seed] = str(error)
    return words


def load_drawn(seeds: list[int], folder: str, shape: tuple[int, int]) -> dict[int, Any]:
    """Load drawn states over another mesh, and as one process reads them; return by
    seed what differs."""
    found = {}
    for seed in seeds:
        node, path = with_ties(draw(seed)), f"{folder}/{seed}"
        expected, state = built(node, None), built(node, shape, zero=True)
        load_checkpoint(path, state)
        wrong = list(differences(state, expected))
        wrong += differences(read_rest(path, tensors="*"), expected)
        found[seed] = wrong
    return found
