"""The check of files against the manifest: sizes (cheap), digests (reads
everything)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from smp_core.checkpoint.folders.storage import PIECE_BYTES, Folder
from smp_core.checkpoint.layout import CheckpointError, Manifest, new_digest
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.tensor_file import TensorFile
from smp_core.outside import StrPath

logger = logging.getLogger("smp")

# Tries until all ranks see the same save at a path that is overwritten meanwhile.
_OPENINGS = 5


def open_checked(
    path: StrPath, verify: str | None, ranks: Ranks, what: str
) -> OpenCheckpoint:
    """Open a checkpoint and check its files, each rank some of them; all ranks open the
    same save. Collective.

    Args:
        path: checkpoint folder or address.
        verify: ``"sizes"``, ``"digests"``, None, or ``"auto"``: sizes, and each byte of
            a tensor while it is read; all digests before, when an interrupted save lies
            alongside the folder.
        ranks: the ranks that check together.
        what: how the message of an error begins.

    Raises:
        CheckpointError: on every rank: missing, half, damaged or foreign.
    """

    # Ranks agreed on it before (open_first_undamaged): nothing is checked twice.
    if isinstance(path, OpenCheckpoint) and path.agreed:
        return path

    def opened_here() -> OpenCheckpoint:
        if verify not in ("auto", "sizes", "digests", None):
            raise CheckpointError(
                f"verify={verify!r} is not known; allowed: 'auto', 'sizes', 'digests', None"
            )
        return open_checkpoint(path)

    # One save on all ranks, also where the folder is being written over.
    for _ in range(_OPENINGS):
        # The id of the save and a sign of a crash, from every rank.
        opened, seen = ranks.together(
            what, opened_here, lambda it: (it.manifest.id, it.folder.signs_of_crash())
        )
        if len({save for save, _ in seen}) == 1:
            break
    else:
        raise CheckpointError(
            f"{what}: it is overwritten again and again; load from a path that stays"
        )
    # One rank that saw the sign is enough: all ranks check alike.
    crashed = any(crash for _, crash in seen)
    if crashed and verify == "auto" and ranks.rank == 0:
        logger.warning(
            "an interrupted save lies beside %s: checking all digests", opened.address
        )

    def check() -> str | None:
        mode = verify
        if verify == "auto":
            # Without digests of blocks nothing could be checked while tensors are read.
            without_blocks = not opened.index.blocks and opened.index.tensors
            mode = "digests" if crashed or without_blocks else "sizes"
        check_files(opened, mode, ranks.rank, ranks.size)
        return mode

    mode, _ = ranks.together(what, check)
    # A checkpoint that the caller opened keeps the caller's choice.
    if opened is not path:
        opened.check_bytes = verify == "auto" and mode == "sizes"
    return opened


def check_files(
    opened: OpenCheckpoint, mode: str | None, rank: int = 0, size: int = 1
) -> None:
    """Check this rank's share of the files.

    Args:
        opened: the checkpoint.
        mode: ``"sizes"``, ``"digests"`` or None.
        rank, size: each of ``size`` ranks checks every ``size``-th file.

    Raises:
        CheckpointError: names every broken file; another mode.
    """
    if mode is None:
        return
    if mode not in ("sizes", "digests"):
        raise CheckpointError(
            f"verify={mode!r} is not known; allowed here: 'digests', 'sizes', 'none'"
        )
    # The digests of a large checkpoint are shared among ranks.
    names = sorted(opened.manifest.files)[rank::size]
    problems = _problems(opened.folder, opened.manifest, names, mode)
    if problems:
        # A path that another save has taken explains everything else.
        opened.same_save()
        raise CheckpointError("; ".join(problems))


def check_written(folder: Folder, manifest: Manifest) -> None:
    """Look at the files of a save before it is committed: each is there, with its size
    and its own header.

    Their content was hashed while it was written. It is not read again: that would only
    show what memory still holds. In an object store one listing tells the sizes.

    Raises:
        CheckpointError: names every file that is not what was written.
    """
    # On a store one request lists all sizes; a request for each file would take longer
    # than the save.
    listed = folder.listing()
    names = sorted(manifest.files)
    problems: list[str] = []
    if listed is None:
        problems = _problems(folder, manifest, names, "sizes")
    else:
        for name in names:
            where, size = f"{folder.address}/{name}", listed.get(name)
            problem = manifest.files[name].size_problem(where, size)
            problems += [problem] if problem else []
    if problems:
        raise CheckpointError(f"before the commit: {'; '.join(problems[:4])}")


def _problems(
    folder: Folder, manifest: Manifest, names: Sequence[str], mode: str
) -> list[str]:
    """Describe the problems of files."""
    found = [_file_problem(folder, manifest, name, mode) for name in names]
    return [problem for problem in found if problem is not None]


def _file_problem(
    folder: Folder, manifest: Manifest, name: str, mode: str
) -> str | None:
    """Describe the problem of a file; None for a file without one."""
    where, record = f"{folder.address}/{name}", manifest.files[name]
    try:
        problem = record.size_problem(where, folder.size(name))
    except FileNotFoundError:
        problem = record.size_problem(where, None)
    except CheckpointError as error:
        return str(error)
    if problem is not None:
        return problem
    try:
        # The header's digest is cheap, and shows a file that was exchanged.
        if record.header_bytes:
            TensorFile(folder, manifest, name).close()
        if (
            mode == "digests"
            and _digest_file(folder, name, record.bytes, manifest.algorithm)
            != record.digest
        ):
            return f"{where} is damaged: its {manifest.algorithm} digest does not fit the manifest"
    except CheckpointError as error:
        return str(error)
    return None


def _digest_file(folder: Folder, name: str, size: int, algorithm: str) -> str:
    digest = new_digest(algorithm)
    # One buffer for all pieces.
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
    try:
        file = folder.open(name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder.address}/{name} is missing") from None
    try:
        for begin in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - begin)]
            file.read_into(begin, piece)
            digest.update(piece)
    finally:
        file.close()
    return digest.hexdigest()


def verify_checkpoint(path: StrPath, deep: bool = False) -> list[str]:
    """List every problem of a checkpoint; none when it is complete.

    Args:
        path: checkpoint folder or address.
        deep: also compute every digest (reads all bytes).

    Returns:
        one line per problem, each naming a file.
    """
    try:
        opened = open_checkpoint(path)
    except CheckpointError as error:
        return [str(error)]
    mode, names = "digests" if deep else "sizes", sorted(opened.manifest.files)
    problems = _problems(opened.folder, opened.manifest, names, mode)
    if problems:
        return problems
    try:
        # Parsed as well: an index that does not fit its files is a problem of no file.
        _ = opened.index, opened.tree, opened.plain_entries
    except CheckpointError as error:
        return [str(error)]
    return []
