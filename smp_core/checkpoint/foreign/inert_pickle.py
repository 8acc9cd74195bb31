"""A reader of pickles that knows no classes: what a pickle asks for is noted down,
never called or even looked up.

Python's unpickler hands out the objects that a pickle names, and a pickle can set
attributes on them for the whole process, also when nothing is called. Here a global is
a :class:`Global`, a call or an object a :class:`Made`, and memory is of the order of
the file: sizes are checked against what is there; keys that would take forever to hash
are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smp_core.checkpoint.untrusted import CheckpointError, only_checkpoint_errors

_KEY_DEPTH = 4


@dataclass(frozen=True, eq=False)
class Global:
    """A stand-in for what a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """A stand-in for an object: what the pickle would call, with which arguments, and
    what it would put into it."""

    by: Global
    arguments: tuple[Any, ...]
    state: Any = None
    # (key, value) of a mapping, values of others.
    entries: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Persistent:
    """A stand-in for data outside of the pickle: a tensor's storage."""

    identity: Any


class _Machine:
    """The stack machine of the pickle format (pickletools describes each operation)."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        # genops only splits the pickle into operations and their arguments.
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _IGNORED:
                continue
            if name in _PUSHES_ARGUMENT:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _ACTIONS:
                _ACTIONS[name](self, argument)
            else:
                raise CheckpointError(f"its operation {name} is not read")
        raise CheckpointError("it has no end")

    def mark(self, _: Any) -> None:
        # A mark keeps what is below it; what follows is counted from here.
        self.marks.append(self.stack)
        self.stack = []

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def tuple_of(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)][::-1]
        self.stack.append(tuple(items))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            # Members are hashed, so they have to be quick to hash, like keys.
            target.update(_key(item) for item in items)
        elif isinstance(target, Made):
            target.entries.extend(items)
        else:
            raise CheckpointError("it adds to something that is no list")

    def dict_of(self, items: list[Any]) -> None:
        self.stack.append({})
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = [
            (_key(key), value)
            for key, value in zip(items[::2], items[1::2], strict=True)
        ]
        if isinstance(target, dict):
            target.update(pairs)
        elif isinstance(target, Made):
            target.entries.extend(pairs)
        else:
            raise CheckpointError("it sets an entry of something that is no dict")

    def global_of(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise CheckpointError("it imports something without a name")
        self.stack.append(Global(module, name))

    def make(self, count: int) -> None:
        arguments = [self.stack.pop() for _ in range(count)][::-1]
        by = self.stack.pop()
        # Anything else would be a call of what a call returned.
        if not isinstance(by, Global) or not isinstance(arguments[0], tuple):
            raise CheckpointError("it calls something that it did not import")
        self.stack.append(
            Made(by, arguments[0], state=arguments[1] if count > 1 else None)
        )

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        # Attributes of what the pickle imported would be changed for the whole process.
        if not isinstance(target, Made):
            raise CheckpointError(
                f"it changes {target if isinstance(target, Global) else type(target).__name__}"
            )
        target.state = state


def _key(key: Any, depth: int = _KEY_DEPTH) -> Any:
    """Return a key of a dict, if it is quick to hash."""
    # Tuples inside tuples are hashed again and again: nesting is bounded.
    if isinstance(key, (tuple, frozenset)):
        if depth == 0 or len(key) > 64:
            raise CheckpointError("it has a key that is nested too deep")
        for part in key:
            _key(part, depth - 1)
    elif not isinstance(
        key, (str, bytes, int, float, type(None), Global, Made, Persistent)
    ):
        raise CheckpointError(f"it has a {type(key).__name__} as a key")
    return key


_IGNORED = {"PROTO", "FRAME"}
# Operations whose argument is the value itself.
_PUSHES_ARGUMENT = {
    "INT",
    "LONG",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": _Machine.mark,
    "POP": lambda m, _: m.stack.pop() if m.stack else m.to_mark(),
    "POP_MARK": lambda m, _: m.to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.to_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.to_mark()),
    "LIST": lambda m, _: m.push(m.to_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.to_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "FROZENSET": lambda m, _: m.push(frozenset(_key(item) for item in m.to_mark())),
    "DICT": lambda m, _: m.dict_of(m.to_mark()),
    "SETITEM": lambda m, _: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.to_mark()),
    "GLOBAL": lambda m, names: m.global_of(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.global_of(*[m.stack.pop(), m.stack.pop()][::-1]),
    "REDUCE": lambda m, _: m.make(1),
    "NEWOBJ": lambda m, _: m.make(1),
    "NEWOBJ_EX": lambda m, _: m.make(2),
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.stack.append(Persistent(m.stack.pop())),
    **dict.fromkeys(
        ("PUT", "BINPUT", "LONG_BINPUT"),
        lambda m, number: m.memo.__setitem__(number, m.stack[-1]),
    ),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"),
        lambda m, number: m.stack.append(m.memo[number]),
    ),
}


def read_inert(data: bytes, where: str) -> Any:
    """Read a pickle as plain values and stand-ins.

    Args:
        where: its place, for messages.

    Raises:
        CheckpointError: not a pickle, cut short, or one with operations that are not
            read here.
    """
    with only_checkpoint_errors(where):
        # Whatever goes wrong on the way is a damaged file.
        return _Machine().run(data)
