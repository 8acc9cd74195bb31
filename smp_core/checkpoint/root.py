"""A folder of checkpoints: ``root/step-00001000/``, the file ``LATEST``, keep-last-k
and the newest whole one.

LATEST is a convenience for people and other programs. What counts is what lies in the
folders: a crash between the commit of a checkpoint and the writing of LATEST must not
hide the checkpoint, so the newest one is found by the sequence numbers in the manifests
(a run that was set back to an earlier step is newer with a smaller step, and clocks are
set back too).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp_core.checkpoint.folders.addresses import (
    is_address,
    local_path,
    open_folder,
    remove_checkpoint,
)
from smp_core.checkpoint.folders.file_system import fsync_directory, new_save_id
from smp_core.checkpoint.foreign.torch_file import check_torch_file
from smp_core.checkpoint.layout import MANIFEST, TEMPORARY_PREFIX, CheckpointError
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.untrusted import NoSuchFolder, is_plain
from smp_core.checkpoint.verify import open_checked, verify_checkpoint
from smp_core.checkpoint.writer import save_checkpoint
from smp_core.outside import StrPath

logger = logging.getLogger("smp")

LATEST = "LATEST"
_LATEST_BYTES = 4096


def step_name(step: int) -> str:
    """Return the name of a step's folder: ``"step-00001000"`` for 1000."""
    if step < 0:
        raise CheckpointError(f"step={step} must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, None for other names."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def find_checkpoints(
    root: StrPath, broken_too: bool = False, inside: str = ""
) -> list[str]:
    """List the names of the checkpoints in a folder, the one saved last at the end;
    broken ones before all others.

    Args:
        root: the folder.
        broken_too: also folders that only look like a checkpoint: half ones, damaged
            ones.
        inside: the name of the checkpoint in each folder there (``smp_state`` in
            ``checkpoint-*``); "": the folders are checkpoints themselves.

    Raises:
        CheckpointError: no such folder (``NoSuchFolder``), or it cannot be listed.
    """
    found: list[tuple[tuple[int, int, str], str]] = []
    for name in sorted(list_entries(root)):
        # A save that is being written, or that was interrupted.
        if name.startswith(TEMPORARY_PREFIX):
            continue
        address = join(root, f"{name}/{inside}" if inside else name)
        # Opening reads the manifest only.
        try:
            manifest = open_checkpoint(address).manifest
        except CheckpointError:
            if broken_too and _looks_like_one(address, name):
                found.append(((-1, step_of(name) or 0, ""), name))
        # By age, not by name: see the top of the file.
        else:
            found.append((manifest.age, name))
    return [name for _, name in sorted(found)]


def join(root: StrPath, name: str) -> str:
    """Return the path or address of an entry of a folder."""
    return f"{os.fspath(root).rstrip('/')}/{name}"


def _looks_like_one(address: str, name: str) -> bool:
    # A name like ours is one even without a manifest: its save may have been
    # interrupted where folders cannot be renamed.
    if step_of(name) is not None:
        return True
    return not is_address(address) and os.path.lexists(os.path.join(address, MANIFEST))


def list_entries(root: StrPath) -> list[str]:
    """List the names of the directories in a folder.

    Raises:
        CheckpointError: no such folder (``NoSuchFolder``), or it cannot be listed.
    """
    # fsspec is only imported where an address is used.
    if is_address(root):
        from smp_core.checkpoint.folders.object_folder import list_objects

        return list_objects(os.fspath(root))
    path = Path(local_path(root))
    if not path.is_dir():
        raise NoSuchFolder(f"there is no folder of checkpoints at {path}")
    try:
        return [entry.name for entry in path.iterdir() if entry.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed: {error}") from error


def read_latest(root: StrPath) -> str | None:
    """Read the name in the file LATEST; None where there is no file, or one that holds
    no name (a warning says so)."""
    try:
        # A stranger's file may have any size: few bytes are read.
        data = open_folder(root).read(LATEST, _LATEST_BYTES)
        name = data.decode().strip()
    except FileNotFoundError:
        return None
    except (CheckpointError, UnicodeDecodeError) as error:
        logger.warning("%s is not used: %s", join(root, LATEST), error)
        return None
    # A name with "/" would lead out of the folder.
    if not is_plain(name):
        logger.warning(
            "%s is not used: it holds no name of a folder but %r",
            join(root, LATEST),
            name,
        )
        return None
    return name


def write_latest(root: StrPath, name: str) -> None:
    """Write a name to LATEST, in one step."""
    data = f"{name}\n".encode()
    if is_address(root):
        from smp_core.checkpoint.folders.object_folder import write_object

        write_object(join(root, LATEST), data)
        return
    # Readers see the old name or the new one, never half of it.
    path = Path(local_path(root), LATEST)
    temporary = path.with_name(f".{LATEST}-{new_save_id()}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def readable_checkpoints(root: StrPath) -> list[str]:
    """List the names of the checkpoints whose manifests can be read, the one saved last
    at the end; the others are named in a warning. Not collective.

    Raises:
        CheckpointError: as :func:`find_checkpoints`.
    """
    names = find_checkpoints(root)
    # Broken ones are named, so that none vanishes in silence.
    for name in sorted(set(find_checkpoints(root, broken_too=True)) - set(names)):
        logger.warning(
            "BROKEN CHECKPOINT SKIPPED: %s",
            "; ".join(verify_checkpoint(join(root, name))),
        )
    return names


def newest_checkpoint(root: StrPath, verify: str | None = "sizes") -> str | None:
    """Find the newest unbroken checkpoint in a folder; None where there is none. Not
    collective.

    Broken checkpoints are skipped, with a warning that names them and their problems.

    Args:
        root: the folder; one that does not exist holds no checkpoint.
        verify: ``"sizes"``, ``"digests"`` or None (only a readable manifest).

    Raises:
        CheckpointError: the folder is there and cannot be listed.
    """
    try:
        names = readable_checkpoints(root)
    except NoSuchFolder:
        return None
    # The newest first; one that is unbroken ends the search.
    for name in reversed(names):
        problems = (
            []
            if verify is None
            else verify_checkpoint(join(root, name), deep=verify == "digests")
        )
        if not problems:
            return join(root, name)
        logger.warning("BROKEN CHECKPOINT SKIPPED: %s", "; ".join(problems[:3]))
    return None


def first_undamaged(paths: Sequence[StrPath], verify: str | None = "auto") -> str:
    """Return the first unbroken checkpoint of several, the most wanted one in front.
    Collective.

    Broken checkpoints are skipped, with a warning that names them and their problems;
    ranks share the reading.

    Args:
        paths: checkpoint folders, or single files as ``checkpoint="full"`` writes them;
            the same on all ranks.
        verify: as in :func:`smp_core.checkpoint.load_checkpoint`; of a single file the
            checksums are always read.

    Raises:
        CheckpointError: none of them is complete; the message says what is wrong with
            the first.
    """
    return os.fspath(open_first_undamaged(paths, verify))


def open_first_undamaged(
    paths: Sequence[StrPath], verify: str | None = "auto"
) -> OpenCheckpoint | str:
    """Return what :func:`first_undamaged` finds, open, so that it is what is loaded
    then, and is not checked again; the path of a single file. Collective.
    """
    ranks = Ranks()
    problems: list[str] = []
    # All ranks open and check together, so that all take the same path.
    for path in paths:
        where = os.fspath(path)
        try:
            found: OpenCheckpoint | str = where
            if is_address(where) or not os.path.isfile(where):
                found = open_checked(where, verify, ranks, "BROKEN CHECKPOINT SKIPPED")
                # Loading can skip the agreement that was just reached.
                found.agreed = True
            else:
                # A single file is checked by one rank: its checksums need all of its
                # bytes.
                ranks.on_first(
                    "BROKEN CHECKPOINT SKIPPED",
                    lambda where=where: check_torch_file(where),  # type: ignore[misc]
                )
        except CheckpointError as error:
            problems.append(str(error).removeprefix("BROKEN CHECKPOINT SKIPPED: "))
            if ranks.rank == 0:
                logger.warning("%s", error)
            continue
        if problems and ranks.rank == 0:
            logger.warning("GOING ON FROM %s INSTEAD, which is older", where)
        return found
    raise CheckpointError(
        f"no whole checkpoint is left of {len(paths)}: {problems[0] if problems else 'none given'}"
    )


def save_step(
    root: StrPath,
    step: int,
    state: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> str:
    """Save ``root/step-<step>``, write LATEST, and remove all but the newest
    checkpoints. Collective.

    Args:
        root: the folder, made when missing.
        step: the optimizer step; also goes into the manifest.
        keep_last: the number of checkpoints that stay, the new one included; None: all.
            Only ``step-*`` count.
        overwrite: replace a checkpoint of the same step instead of refusing.
        state, process_group, metadata, **options: as in
            :func:`smp_core.checkpoint.save_checkpoint`.

    Returns:
        the path of the checkpoint.

    Raises:
        CheckpointError: on every rank when any rank failed; nothing is removed then.
    """
    # Before anything is saved.
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(
            f"keep_last={keep_last} must be 1 or more, or None to keep all"
        )
    path = join(root, step_name(step))
    facts = {**(metadata or {}), "step": step}
    save_checkpoint(
        path,
        state,
        process_group=process_group,
        metadata=facts,
        overwrite=overwrite,
        **options,
    )
    # Only after the commit on all ranks may anything older go.
    ranks = Ranks(process_group)
    ranks.on_first(
        f"{path} was saved, but the folder was not tidied",
        lambda: tidy(root, step_name(step), keep_last),
    )
    return path


def tidy(root: StrPath, newest: str, keep_last: int | None) -> None:
    """Write LATEST after a commit, and remove the oldest ``step-*`` checkpoints.

    The newest ``keep_last`` that are complete stay, and everything since the oldest of
    them. Broken ones are not counted, and where ``newest`` is not complete itself,
    nothing is removed.
    """
    try:
        write_latest(root, newest)
    except OSError:
        # A full disk would stay full without the removals below.
        _remove_older(root, newest, keep_last)
        write_latest(root, newest)
    else:
        _remove_older(root, newest, keep_last)


def _remove_older(root: StrPath, newest: str, keep_last: int | None) -> None:
    if keep_last is None:
        return
    others = [
        name
        for name in find_checkpoints(root)
        if step_of(name) is not None and name != newest
    ]
    # Tidying counts complete checkpoints only, the newest of all at the end.
    for name in surplus([join(root, name) for name in [*others, newest]], keep_last):
        remove_checkpoint(name)


def surplus(paths: Sequence[str], keep: int) -> list[str]:
    """Return the oldest checkpoints, which may go so that the newest ``keep`` complete
    ones stay.

    Args:
        paths: checkpoints, the newest one at the end.
        keep: the number of complete ones that stay, 1 or more.

    Returns:
        paths older than the oldest that stays; none if the newest is broken, because
        then something is wrong with the disk or the store, and what is left is not
        thrown away.
    """
    kept = 0
    # From the newest to the oldest.
    for number in range(len(paths) - 1, -1, -1):
        problems = verify_checkpoint(paths[number])
        if problems and number == len(paths) - 1:
            logger.error(
                "no older checkpoint is removed, because the newest is broken: %s",
                problems[0],
            )
            return []
        kept += not problems
        if kept == keep:
            return list(paths[:number])
    return []
