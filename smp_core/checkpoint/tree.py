"""The encoding of a nested state as named tensors, a JSON tree, and the values that
JSON cannot hold.

A state is a nest of dicts, lists and tuples. Tensors are taken out under a name made of
their path; the rest becomes JSON in which values that JSON has no type for carry a tag,
so that every type comes back as it was:

    {"$tensor": name}                a tensor
    {"$tuple": [...]}, {"$set": [...]}, {"$frozenset": [...]}
    {"$dict": [[key, value], ...]}   a dict with keys that are not strings (or begin with "$"); "$odict": OrderedDict
    {"$float": "nan" | "inf" | "-inf"}
    {"$path": "data/train"}         a pathlib.Path
    {"$numpy": dtype, "shape": [...], "data": base64}   a numpy array or scalar ("scalar": true)
    {"$pt": "12"}                    entry 12 of rest.pt (read with weights_only=True)
    {"$pickle": "3"}                 entry 3 of rest-pickle.pt (only with allow_pickle=True)
"""

from __future__ import annotations

import base64
import copy
import io
import math
import os
import pathlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp_core.checkpoint.layout import CheckpointError, path_to_json
from smp_core.checkpoint.save_plan import LazyTensor

Path = tuple[Any, ...]
DROP = object()
_SAME_IN_JSON = frozenset((type(None), bool, int, str))
# Types with nothing inside: most values of a state, so they are passed over early.
_LEAVES = _SAME_IN_JSON | {float}
_PATH = type(pathlib.Path())


@dataclass(frozen=True)
class TensorReference:
    """A placeholder, in a list or tuple, for a tensor that was not asked for."""

    name: str


@dataclass
class EncodedRest:
    """The part of a state that is not tensors: JSON tree, entries of rest.pt, entries
    that need pickle and their paths.
    """

    tree: Any = None
    plain: dict[str, Any] = field(default_factory=dict)
    pickle: dict[str, Any] = field(default_factory=dict)
    pickled_paths: list[str] = field(default_factory=list)


def path_text(path: Path) -> str:
    """Join a path by dots: ``"optimizer_states.0.lr"`` for ``("optimizer_states", 0,
    "lr")``."""
    return ".".join(str(key) for key in path)


def iterate_tensors(
    state: Any, path: Path = (), mapping: Any = dict
) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor (or LazyTensor) of a nested state with its path, in order.

    Args:
        path: the path of ``state`` itself.
        mapping: the class of mappings to look into. A checkpoint stores dicts; a batch
            may be any ``MutableMapping``.
    """
    if isinstance(state, (Tensor, LazyTensor)):
        yield path, state
    elif isinstance(state, mapping):
        # A checkpoint's dicts keep their order, so names come out alike on all ranks.
        for key, value in state.items():
            if type(value) not in _LEAVES:
                yield from iterate_tensors(value, (*path, key), mapping)
    elif isinstance(state, (list, tuple)):
        for position, value in enumerate(state):
            if type(value) not in _LEAVES:
                yield from iterate_tensors(value, (*path, position), mapping)


def name_tensors(state: Any) -> dict[Path, tuple[str, Any]]:
    """Give every tensor a name: its path joined by dots, or the path as JSON where two
    paths would join alike."""
    found = dict(iterate_tensors(state))
    names = names_of(list(found))
    return {path: (names[path], tensor) for path, tensor in found.items()}


def names_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Name the tensors at some paths, as :func:`name_tensors` does."""
    # Paths ("a.b",) and ("a", "b") join alike; both are then named by their JSON.
    joined = [path_text(path) for path in paths]
    count = Counter(joined)
    return {
        path: name if count[name] == 1 else str(path_to_json(path))
        for path, name in zip(paths, joined, strict=True)
    }


def map_tensors(state: Any, replace: Callable[[Any], Any], mapping: Any = dict) -> Any:
    """Return the nest with ``replace(tensor)`` for every tensor (or LazyTensor).

    A container without tensors is not copied. ``mapping``: as in
    :func:`iterate_tensors`.
    """
    if isinstance(state, (Tensor, LazyTensor)):
        return replace(state)
    # Containers without tensors are returned themselves, not copies: callers may hold
    # them.
    if not isinstance(state, (mapping, list, tuple)) or not holds_tensor(
        state, mapping
    ):
        return state
    if isinstance(state, mapping):
        same = copy.copy(state)
        for key, value in state.items():
            same[key] = map_tensors(value, replace, mapping)
        return same
    values = [map_tensors(value, replace, mapping) for value in state]
    return of_kind(type(state), values)


def of_kind(kind: type, values: Sequence[Any]) -> Any:
    """Make a tuple, a named one, or a list of values."""
    # Named tuples take their fields one by one.
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def holds_tensor(state: Any, mapping: Any = dict) -> bool:
    """Return whether any leaf of the nested state is a tensor."""
    return next(iterate_tensors(state, mapping=mapping), None) is not None


def encode_rest(
    state: Any, names: dict[Path, str], allow_pickle: bool = False
) -> EncodedRest:
    """Encode everything but tensors.

    Args:
        state: the nested state.
        names: path -> name of each tensor.
        allow_pickle: keep values that torch.load(weights_only=True) refuses, in a file
            of their own.

    Raises:
        CheckpointError: a value that could only be read back by unrestricted
            unpickling; names every such path.
    """
    # All problems are collected, so that one attempt names every value to change.
    result = EncodedRest()
    refused: list[str] = []

    def encode(value: Any, path: Path) -> Any:
        kind = type(value)
        # Leaves that JSON has.
        if kind in _SAME_IN_JSON:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        # Before containers and rest.pt: a tensor with a name is in a tensor file.
        if path in names:
            return {"$tensor": names[path]}
        # Containers: JSON has dicts of texts; all others carry a tag. A key that begins
        # with "$" could be taken for a tag, so such a dict gets one.
        if kind is dict or kind is OrderedDict:
            if kind is dict and all(
                type(key) is str and not key.startswith("$") for key in value
            ):
                return {
                    key: item
                    if type(item) in _SAME_IN_JSON
                    else encode(item, (*path, key))
                    for key, item in value.items()
                }
            tag = "$dict" if kind is dict else "$odict"
            return {
                tag: [
                    [encode(key, (*path, "<key>")), encode(item, (*path, key))]
                    for key, item in value.items()
                ]
            }
        if kind is list:
            return _encode_items(value, path, encode)
        if kind is tuple:
            return {"$tuple": _encode_items(value, path, encode)}
        if kind is set or kind is frozenset:
            return {
                f"${kind.__name__}": [encode(item, (*path, "<item>")) for item in value]
            }
        if kind is _PATH:
            return {"$path": os.fspath(value)}
        # What JSON lacks: numbers of NumPy, then rest.pt, then a pickle if that is
        # allowed.
        # By name, so that numpy is imported only where a state has something of it.
        if kind.__module__ == "numpy":
            encoded = _encode_numpy(value)
            if encoded is not None:
                return encoded
        problem = _weights_only_problem(value)
        if problem is None:
            key = str(len(result.plain))
            result.plain[key] = value
            return {"$pt": key}
        # A pickle would hold this rank's slice of a sharded tensor as if it were all of
        # it.
        if allow_pickle and holds_tensor(value) is False:
            key = str(len(result.pickle))
            result.pickle[key] = value
            result.pickled_paths.append(path_text(path) or "(the whole value)")
            return {"$pickle": key}
        refused.append(
            f"{path_text(path) or '(the whole value)'} ({kind.__module__}.{kind.__qualname__}: {problem})"
        )
        return None

    result.tree = encode(state, ())
    if refused:
        raise _refusal(refused)
    return result


def _encode_items(
    values: Sequence[Any], path: Path, encode: Callable[[Any, Path], Any]
) -> list[Any]:
    return [
        item if type(item) in _SAME_IN_JSON else encode(item, (*path, position))
        for position, item in enumerate(values)
    ]


def _refusal(refused: Sequence[str]) -> CheckpointError:
    shown = "; ".join(refused[:5]) + (
        f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
    )
    return CheckpointError(
        "these values cannot be saved so that loading needs no unrestricted unpickling: "
        f"{shown}. Turn them into plain values (str, int, dict, dataclasses.asdict(...), ...), or pass "
        "allow_pickle=True to saving and to loading"
    )


def merge_rest(rest: EncodedRest, per_rank: Sequence[EncodedRest]) -> EncodedRest:
    """Merge the state's rest and each rank's own value into one tree ``{"state": ...,
    "per_rank": [...]}``."""
    merged = EncodedRest(
        plain=dict(rest.plain),
        pickle=dict(rest.pickle),
        pickled_paths=list(rest.pickled_paths),
    )
    # Entries of rest.pt were numbered from 0 on each rank: the rank goes before the
    # number.
    for rank, own in enumerate(per_rank):
        merged.plain.update(
            {f"rank{rank}.{key}": value for key, value in own.plain.items()}
        )
        merged.pickle.update(
            {f"rank{rank}.{key}": value for key, value in own.pickle.items()}
        )
        merged.pickled_paths += [
            f"per_rank.{rank}.{path}" for path in own.pickled_paths
        ]
    trees = [_renumbered(own.tree, f"rank{rank}.") for rank, own in enumerate(per_rank)]
    merged.tree = {"state": rest.tree, "per_rank": trees}
    return merged


def _renumbered(node: Any, prefix: str) -> Any:
    if isinstance(node, list):
        return [_renumbered(item, prefix) for item in node]
    if isinstance(node, dict):
        return {
            key: prefix + item
            # A tag's only content is the number of an entry.
            if key in ("$pt", "$pickle")
            else _renumbered(item, prefix)
            for key, item in node.items()
        }
    return node


def decode_rest(
    tree: Any,
    tensor: Callable[[str], Any],
    plain: dict[str, Any] | None,
    pickled: Callable[[str], Any],
) -> Any:
    """Decode the result of :func:`encode_rest`.

    Args:
        tree: the JSON tree.
        tensor: name -> value; ``DROP`` leaves the entry out of its dict (in a list: a
            :class:`TensorReference`).
        plain: entries of rest.pt.
        pickled: key -> entry of the pickle file.
    """

    def decode(node: Any) -> Any:
        # What the JSON tree holds by itself.
        if isinstance(node, list):
            return [keep(item) for item in node]
        if not isinstance(node, dict):
            return node
        # A tag is the first key of its dict; see encode_rest for dicts of others' keys.
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {
                key: value
                for key, item in node.items()
                # An entry of a dict vanishes with its tensor; positions of a list must
                # not shift, so `keep` leaves a reference there.
                if (value := decode(item)) is not DROP
            }
        # What a tag stands for.
        content = node[tag]
        if tag == "$tensor":
            return tensor(content)
        if tag == "$tuple":
            return tuple(keep(item) for item in content)
        if tag in ("$set", "$frozenset"):
            return {"$set": set, "$frozenset": frozenset}[tag](
                decode(item) for item in content
            )
        if tag in ("$dict", "$odict"):
            pairs = [
                (decode(key), value)
                for key, item in content
                if (value := decode(item)) is not DROP
            ]
            return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
        if tag == "$float":
            return float(content)
        if tag == "$path":
            return pathlib.Path(content)
        if tag == "$numpy":
            return _decode_numpy(node)
        if tag == "$pt" and plain is not None:
            return plain[content]
        if tag == "$pickle":
            return pickled(content)
        raise CheckpointError(
            f"rest.json holds a tag this torch-smp does not know: {tag}"
        )

    def keep(item: Any) -> Any:
        # Lists and tuples keep their length.
        value = decode(item)
        return TensorReference(item["$tensor"]) if value is DROP else value

    return decode(tree)


def subtree(tree: Any, path: Path) -> Any:
    """Return the node of the JSON tree at a path of the state.

    Raises:
        KeyError: there is none.
    """
    for key in path:
        if isinstance(tree, dict) and tree and next(iter(tree)).startswith("$"):
            # A tagged dict is a list of pairs, searched for the key. 1 and True are
            # equal keys in Python but not the same path.
            tag, content = next(iter(tree.items()))
            if tag in ("$dict", "$odict"):
                # Keys lie encoded there, a tuple for example as {"$tuple": [...]}.
                wanted = encode_rest(key, {}).tree
                matches = [
                    item
                    for found, item in content
                    if found == wanted and type(found) is type(wanted)
                ]
                if not matches:
                    raise KeyError(key)
                tree = matches[0]
                continue
            # No other tag has anything inside that a path leads to.
            tree = content if tag == "$tuple" else None
        in_list = (
            isinstance(tree, list) and isinstance(key, int) and 0 <= key < len(tree)
        )
        if in_list or (isinstance(tree, dict) and key in tree):
            tree = tree[key]
        else:
            raise KeyError(key)
    return tree


def _weights_only_problem(value: Any) -> str | None:
    """Say why a value cannot be read back with ``weights_only=True``; None if it can,
    which is tried out."""
    # Most tensors need no trial, which would copy all their values twice.
    if type(value) is Tensor and _is_plain(value):
        return None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        return f"torch.save fails: {type(error).__name__}"
    buffer.seek(0)
    try:
        restored = torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        # Some types are read back as their base class; the state would not be what it
        # was.
        return "torch.load(weights_only=True) refuses it"
    return (
        None
        if type(restored) is type(value)
        else f"comes back as {type(restored).__name__}"
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but its values, in the host's memory: such
    ones need not be tried out."""
    is_dense = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )
    return is_dense and not vars(tensor) and not any(getattr(tensor, "names", ()))


def _encode_numpy(value: Any) -> dict[str, Any] | None:
    import numpy

    if (
        # Only numbers: arrays of objects or texts go the way of any other value.
        not isinstance(value, (numpy.ndarray, numpy.generic))
        or value.dtype.kind not in "biufc"
    ):
        return None
    data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
    encoded = {"$numpy": value.dtype.str, "shape": list(value.shape), "data": data}
    return encoded | {"scalar": True} if isinstance(value, numpy.generic) else encoded


def _decode_numpy(node: dict[str, Any]) -> Any:
    import numpy

    # The dtype comes from the file; one of objects would run code.
    if not re.fullmatch(r"[<>=|]?[biufc]\d{1,2}", node["$numpy"]):
        raise CheckpointError(
            f"rest.json holds a numpy array of {node['$numpy']!r}: no number"
        )
    # frombuffer gives a read-only view of the bytes, hence the copy below.
    array = numpy.frombuffer(
        base64.b64decode(node["data"]), dtype=numpy.dtype(node["$numpy"])
    ).reshape(node["shape"])
    return array[()] if node.get("scalar") else array.copy()
