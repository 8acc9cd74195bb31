"""The leftovers of interrupted saves in a folder, and the rules for their removal.

.tmp-<name>-<host>-<random>        a save being written; locked while it lives
.partial-<name>-<host>-<random>    an export or a single file being written
.new-<host>-<random>               a temporary in the microseconds before it is locked
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

from smp_core.checkpoint.folders.file_system import (
    fsync_directory,
    host_id,
    new_save_id,
    release,
    remove_tree,
    try_lock,
)
from smp_core.checkpoint.layout import TEMPORARY_PREFIX

logger = logging.getLogger("smp")

# An unlocked temporary of another host may belong to a live save where locks do not
# cross the network.
_STALE_SECONDS = 3600.0
_OWN_ENTRY = re.compile(r"\.tmp-.+-[0-9a-f]{8}-[0-9a-f]{12}")
_SCRATCH_ENTRY = re.compile(r"\.(new|partial-.+)-[0-9a-f]{8}-[0-9a-f]{12}")


def scratch_path(target: Path) -> Path:
    """Return a temporary path for something other than a checkpoint, to be renamed to
    ``target``."""
    return target.parent / f".partial-{target.name}-{new_save_id()}"


def temporaries_of(path: str) -> list[str]:
    """List the temporaries that belong to a path."""
    parent = os.path.dirname(os.path.abspath(path))
    start = f"{TEMPORARY_PREFIX}{os.path.basename(path)}-"
    # A save's identity, "<8 hex>-<12 hex>", has 21 characters: "a-b" must not claim the
    # temporaries of "a-b-c".
    return _entries(parent, re.compile(re.escape(start) + ".{21}", re.DOTALL))


def sweep(path: str) -> list[str]:
    """Remove the leftovers of dead saves next to this path, under whatever name; never
    the files of a live save.

    Returns:
        the removed directories.
    """
    removed: list[str] = []
    parent = os.path.dirname(os.path.abspath(path))
    left_behind = _entries(parent, _OWN_ENTRY)
    try:
        if left_behind:
            # A temporary may be the checkpoint that a rename has just replaced: the
            # rename has to be durable before that one is removed.
            fsync_directory(parent)
    except OSError as error:
        logger.error(
            "%s cannot be made durable, so nothing in it is removed: %s", parent, error
        )
        return removed
    for entry in left_behind:
        try:
            lock = try_lock(entry)
        except OSError:
            continue  # gone, or not a directory
        if lock is None:
            continue
        try:
            # A lock is proof on one machine. Elsewhere it may not be seen, so age is
            # asked as well.
            same_host = f"-{host_id()}-" in os.path.basename(entry)
            if same_host or time.time() - _newest_change(entry) > _STALE_SECONDS:
                removed += [entry] if remove_tree(entry) else []
        except OSError:
            continue  # its age cannot be told: it may be a live save's
        finally:
            release(lock)
    removed += [entry for entry in _scratch_left_behind(parent) if remove_tree(entry)]
    if removed:
        logger.warning("removed what interrupted saves left: %s", ", ".join(removed))
    return removed


def _scratch_left_behind(parent: str) -> list[str]:
    """List the entries that have not changed for long: half exports, and folders of a
    crash before they were locked.

    They are never locked, but the process that makes them writes all the time, or takes
    no time at all.
    """
    now, found = time.time(), _entries(parent, _SCRATCH_ENTRY)
    try:
        return [
            entry for entry in found if now - _newest_change(entry) > _STALE_SECONDS
        ]
    except OSError:
        return []


def _entries(parent: str, names: re.Pattern[str]) -> list[str]:
    """List the entries of a directory with such names; none of one that cannot be
    listed."""
    try:
        found = os.listdir(parent)
    except OSError:
        return []
    return [os.path.join(parent, name) for name in found if names.fullmatch(name)]


def _newest_change(directory: str) -> float:
    """Return the time of the newest change in a directory, or of a file.

    Raises:
        OSError: the directory, or one inside it, cannot be listed.
    """

    def failed(error: OSError) -> None:
        # A single file is walked too: its own time is all there is.
        if not isinstance(error, NotADirectoryError):
            raise error

    times = [os.path.getmtime(directory)]
    for where, _, names in os.walk(directory, onerror=failed):
        for name in names:
            try:
                times.append(os.path.getmtime(os.path.join(where, name)))
            except OSError:
                continue
    return max(times)
