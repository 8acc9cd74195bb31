"""Files that somebody else may have made: logs, measurements, configurations; and files
written beside them.

Read: regular files only, whatever a name or a link leads to, of bounded size, bounded
in nesting and number of values. Whatever such a file makes a parser raise becomes one
ValueError that names the file. Written: a new file that takes the place of what is
there, in a folder that is no link, so that nothing is written through a link.
docs/security.md says what this is good for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml

T = TypeVar("T")
StrPath = str | os.PathLike[str]
"""A path, as open() takes it."""

FILE_BYTES = 16 << 20  # a configuration or a measurement
LOG_BYTES = 512 << 20
LINE_BYTES = 8 << 20  # of a log: figures of 10,000 modules
_VALUES = 200_000  # in one document, aliases of YAML counted as often as they are used
_DEPTH = 64
_LARGEST = 1e30  # what is drawn has to stay finite when it is added up


def read_text(path: StrPath) -> str:
    """Return the text of a regular file; bytes that are no UTF-8 are replaced.

    Raises:
        ValueError: it cannot be read, is no regular file, or is larger than
            ``FILE_BYTES``.
    """
    with _open_regular(path, FILE_BYTES) as file:
        return file.read(FILE_BYTES).decode("utf-8", errors="replace")


def read_json(path: StrPath) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: as :func:`read_text`, or no JSON, nested too deeply, with too many
            values.
    """
    return _parsed(
        json.loads, read_text(path), f"{os.fspath(path)} is not a valid JSON file"
    )


def read_yaml(path: StrPath, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the content of a YAML file.

    Raises:
        ValueError: as :func:`read_text`, or no YAML, nested too deeply, with too many
            values.
    """
    return parse_yaml(
        read_text(path), f"{os.fspath(path)} is not a valid YAML file", loader
    )


def parse_yaml(
    text: str, what: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader
) -> Any:
    """Return what YAML text holds.

    Args:
        what: the beginning of the error's message.

    Raises:
        ValueError: no YAML, nested too deeply, with too many values.
    """
    return _parsed(lambda text: yaml.load(text, Loader=loader), text, what)


def lines_of_log(path: StrPath) -> Iterator[Mapping[str, Any] | None]:
    """Return the objects of a file of JSON lines; None for a line that is none, or is
    too long.

    Raises:
        ValueError: the file cannot be read, is no regular file, or is larger than 512
            MiB.
    """
    with _open_regular(path, LOG_BYTES) as file:
        while line := file.readline(LINE_BYTES):
            # A line that fills the limit is read to its end and passed over.
            begun = line
            while not begun.endswith(b"\n") and (begun := file.readline(LINE_BYTES)):
                line = b"too long"
            if line.strip():
                yield _object(line)


def records_of_log(
    path: StrPath,
    read: Callable[[Mapping[str, Any]], T | None],
    log: str,
) -> Iterator[T]:
    """Return what ``read`` makes of the lines of a log. The last line may be half of
    one: of a run that was killed.

    Args:
        read: returns None for an object that is no line of such a log.
        log: what the file should be, for the message.

    Raises:
        ValueError: as :func:`lines_of_log`, or a line that is none of such a log.
    """
    unreadable = 0
    # One unreadable line is allowed, if it is the last: the run may have been killed.
    for position, line in enumerate(lines_of_log(path), 1):
        if unreadable:
            raise ValueError(
                f"{os.fspath(path)}, line {unreadable}: not a line of {log}"
            )
        record = None if line is None else read(line)
        if record is None:
            unreadable = position
        else:
            yield record


def write_new(path: StrPath, content: bytes) -> None:
    """Write a file that takes the place of what is there. A link there is replaced, not
    followed.

    Raises:
        ValueError: the folder is a link, or is not there, or cannot be written to.
    """
    target = Path(path)
    try:
        # The folder is opened once, and everything below happens in that very folder.
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        is_link = (
            error.errno in (errno.ELOOP, errno.ENOTDIR) and target.parent.is_symlink()
        )
        reason = (
            "is a link: name the folder that it leads to"
            if is_link
            else f"cannot be used: {error.strerror}"
        )
        raise ValueError(
            f"cannot write {target}: the folder {target.parent} {reason}"
        ) from None
    # A random name in the same folder, so that the rename is one step.
    temporary = f".{target.name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.rename(temporary, target.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise ValueError(f"cannot write {target}: {error.strerror}") from None
    finally:
        os.close(folder)


def printable(text: str) -> str:
    """Return text without what a terminal would take for a command: control characters
    become ``?``."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?"
        for character in text
    )


def number(value: Any) -> float | None:
    """Return a number as such; None for anything else, also for one beyond all figures
    that a run has."""
    # bool is an int in Python, and no figure.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and -_LARGEST < value < _LARGEST else None


def numbers(value: Any) -> dict[str, float]:
    """Return the numbers of an object by printable name; empty for anything else."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {
        printable(str(name)): found
        for name, item in items
        if (found := number(item)) is not None
    }


def _open_regular(path: StrPath, limit: int) -> BinaryIO:
    where = os.fspath(path)
    try:
        # A pipe without a writer would block.
        descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read {where}: {getattr(error, 'strerror', None) or error}"
        ) from None
    # Asked of the descriptor: a path could lead elsewhere by now.
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "it is no regular file but a directory, a pipe or a device"
    elif status.st_size > limit:
        problem = f"it has {status.st_size} bytes, and at most {limit} are read"
    if problem:
        os.close(descriptor)
        raise ValueError(f"cannot read {where}: {problem}")
    return os.fdopen(descriptor, "rb")


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parsed(parse: Callable[[str], Any], text: str, what: str) -> Any:
    # Whatever the parser raises becomes one error that names the file.
    try:
        content = parse(text)
    except RecursionError:
        raise ValueError(f"{what}: it is nested too deeply") from None
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:
        raise ValueError(f"{what}: {error}") from None
    _require_bounded(content, what)
    return content


def _require_bounded(content: Any, what: str) -> None:
    """Refuse what is small as text and large or endless as values: aliases of aliases,
    an alias inside of itself."""
    # Without recursion, and each alias counted as often as it is used.
    waiting, count = [(content, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > _DEPTH or count > _VALUES:
            raise ValueError(
                f"{what}: it is nested deeper than {_DEPTH}, or has more than {_VALUES} values"
            )
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
