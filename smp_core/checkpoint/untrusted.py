"""The gate for the content of a checkpoint: names of files, JSON, the types of its
fields.

A checkpoint may come from a stranger. None of its content is used before it has passed
here: a name is one plain name (or ``extra/`` and one), JSON is bounded in length and
depth, numbers are in range. The files themselves are opened by
smp_core.checkpoint.folders.local_folder, which takes regular files only.
docs/security.md says what this is good for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy

MANIFEST_BYTES = 64 << 20  # a manifest of 100,000 files
JSON_BYTES = 1 << 30  # index.json, rest.json
HEADER_BYTES = 256 << 20  # of one tensor file
JSON_DEPTH = 500
FOLDER_NAMES = 1_000_000  # entries of a folder that are looked at to say what it is
EXTRA = "extra/"
_NAME_BYTES = 255
_RANKS = 1 << 24

T = TypeVar("T")


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint cannot be written, read or trusted. The message names the file or
    tensor and what to do."""


class StoreError(CheckpointError):
    """A store's own library raised: nothing is known of what is there."""


class NoSuchFolder(CheckpointError):
    """A folder of checkpoints that does not exist: no save has been made there, which
    is no damage."""


def is_plain(name: object) -> bool:
    """Return whether a name is that of a file in the folder itself: no separator, no
    control character, not ``..``."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()  # surrogates are not, nor are NUL and line ends
        and not set(name) & set("/\\")
        and len(name.encode()) <= _NAME_BYTES
    )


def file_name(name: object, where: str) -> str:
    """Return the name of a file of a checkpoint: plain, or ``extra/`` and plain.

    Raises:
        CheckpointError: any other name; it could lead out of the folder.
    """
    if isinstance(name, str) and is_plain(name.removeprefix(EXTRA)):
        return name
    raise CheckpointError(
        f"{where} names the file {name!r}: only plain names and {EXTRA}NAME are read; not trusted"
    )


@contextlib.contextmanager
def only_checkpoint_errors(where: str) -> Iterator[None]:
    """Turn whatever a damaged or hostile content leads to into a CheckpointError that
    names it."""
    try:
        yield
    except CheckpointError:
        raise
    # A missing file has a message of its own; the types that parsing raises are all
    # damage.
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is missing: {error}") from error
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"{where} is damaged: it lacks {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{where} is damaged: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def read_json(data: bytes, where: str, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Parse a JSON object of bounded length and depth.

    Raises:
        CheckpointError: not JSON, no object, too long, too deep.
    """
    if len(data) > limit:
        raise CheckpointError(
            f"{where} is too large: {len(data)} bytes, at most {limit} are read"
        )
    # Counted before parsing: json's parser recurses.
    if _depth(data) > JSON_DEPTH:
        raise CheckpointError(
            f"{where} is damaged: JSON nested deeper than {JSON_DEPTH}"
        )
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is damaged: not readable as JSON ({error})"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is damaged: JSON, but no object")
    return content


def _depth(data: bytes) -> int:
    """Return how deep brackets are nested, without the recursion of a parser."""
    # Without what stands in quotes, whose escapes go first; then nothing but brackets
    # is left.
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(None, bytes(set(range(256)) - set(b"[]{}")))
    if not brackets:
        return 0
    # The depth is the largest running sum of openings and closings.
    steps = numpy.where(
        numpy.isin(numpy.frombuffer(brackets, dtype=numpy.uint8), list(b"[{")), 1, -1
    )
    return int(numpy.cumsum(steps).max())


class Fields:
    """The fields of a JSON object, each with the type that it has to have.

    Args:
        content: the object.
        where: its place, for messages.

    Raises:
        CheckpointError: from every method: the field is missing or of another type.
    """

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{where} is damaged: {_shown(content)} instead of an object"
            )
        self.content = content
        self.where = where

    def get(self, key: str, kind: type[T]) -> T:
        """Return a field of this very type (no bool for an int)."""
        value = self.content.get(key)
        # type() and not isinstance: True is an int in Python.
        if type(value) is not kind:
            raise CheckpointError(
                f"{self.where} is damaged: {key} is {_shown(value)}, not {kind.__name__}"
            )
        return value

    def text(self, key: str) -> str:
        """Return a string."""
        return self.get(key, str)

    def count(self, key: str, most: int, least: int = 0) -> int:
        """Return an integer in a range."""
        value = self.get(key, int)
        if not least <= value <= most:
            raise CheckpointError(
                f"{self.where} is damaged: {key} is {value}, allowed: {least} to {most}"
            )
        return value

    def sizes(self, key: str) -> tuple[int, ...]:
        """Return a list of integers from 0."""
        values = self.get(key, list)
        # No tensor has more dims than torch allows, 64.
        if len(values) > 64 or any(
            type(value) is not int or not 0 <= value < 1 << 62 for value in values
        ):
            raise CheckpointError(
                f"{self.where} is damaged: {key} is {_shown(values)}, not a list of sizes"
            )
        return tuple(values)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        values = self.get(key, list)
        if any(type(value) is not str for value in values):
            raise CheckpointError(
                f"{self.where} is damaged: {key} is {_shown(values)}, not a list of strings"
            )
        return values

    def text_map(self, key: str) -> dict[str, str]:
        """Return an object of strings."""
        values = self.get(key, dict)
        if any(type(value) is not str for value in values.values()):
            raise CheckpointError(
                f"{self.where} is damaged: {key} is {_shown(values)}, not an object of strings"
            )
        return values

    def ranks(self, key: str) -> int:
        """Return a number of ranks."""
        return self.count(key, _RANKS, least=1)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
