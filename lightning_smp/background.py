"""The asynchronous saves (``checkpoint="async"``) as the Trainer and ModelCheckpoint
see them.

ModelCheckpoint takes a checkpoint for saved when ``save_checkpoint`` returns: it looks
whether a name is taken, links to the checkpoint (``save_last="link"``) and removes
older ones. So while a checkpoint is being written an empty folder holds its place, and
removals wait until it has committed (smp_core.checkpoint.async_save).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer

from smp_core.checkpoint import AsyncCheckpointer, CheckpointError
from smp_core.checkpoint.folders import is_address, local_path


@contextlib.contextmanager
def in_lightning_words() -> Iterator[None]:
    """Translate the core's errors, which name arguments of its functions, to settings
    of a LightningModule."""
    # What users of the core write, and what users of Lightning do.
    words = {
        "strict=False loads": "strict_loading=False on the LightningModule loads",
        "or pass allow_pickle=True to saving and to loading": "or leave them out: save_hyperparameters(ignore=[...])",
    }
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        for core, ours in words.items():
            text = text.replace(core, ours)
        raise CheckpointError(text) from error


def is_held_place(path: Any) -> bool:
    """Return whether a path is an empty folder: the place of a save that has not
    committed."""
    return os.path.isdir(path) and not os.listdir(path)


def _sweep_places(trainer: Trainer) -> None:
    """Remove the places of saves that an earlier run did not come to the end of, and
    links to them: names are free."""
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder is None or is_address(folder) or not os.path.isdir(folder):
            continue
        entries = [
            entry
            for entry in os.scandir(folder)
            if entry.name.endswith(".ckpt") and is_held_place(entry.path)
        ]
        for entry in entries:
            with contextlib.suppress(OSError):  # not empty any more
                if entry.is_symlink():
                    os.unlink(entry.path)
                else:
                    os.rmdir(entry.path)


class BackgroundSaves:
    """A writer with at most one save in flight. Its construction is collective.

    Args:
        is_first: whether this is the rank that names, links and removes checkpoints.
        trainer: the run's.
    """

    def __init__(self, is_first: bool, trainer: Trainer) -> None:
        if is_first:
            _sweep_places(trainer)
        self.checkpointer = AsyncCheckpointer()
        self._is_first = is_first
        self._path: Any = None

    def save(self, path: Any, checkpoint: dict[str, Any], **options: Any) -> None:
        """Stage a checkpoint and return, with arguments as of
        :func:`smp_core.checkpoint.save_checkpoint`. Collective.

        Raises:
            CheckpointError: the save before failed; on all ranks.
        """
        # One save at a time: staging buffers are used again.
        self.wait()
        self._path = path
        self.checkpointer.save(path, checkpoint, **options)
        # The place is held before ModelCheckpoint looks at it, and the writer puts the
        # whole folder there.
        if self._is_first and not is_address(path):
            with contextlib.suppress(FileExistsError):
                os.makedirs(local_path(path))

    def settle(self) -> None:
        """Raise the error of a save that has ended, on all ranks at once. Call it once
        per step."""
        with self._giving_up_the_place():
            self.checkpointer.settle()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: it failed.
        """
        with self._giving_up_the_place():
            self.checkpointer.wait()

    def after_commit(self, what: str, action: Callable[[], object]) -> None:
        """Run an action on older checkpoints once the save in flight has committed. On
        the first rank."""
        self.checkpointer.after_commit(what, action)

    @contextlib.contextmanager
    def _giving_up_the_place(self) -> Iterator[None]:
        try:
            with in_lightning_words():
                yield
        except CheckpointError:
            if self._is_first and not is_address(self._path):
                # A folder that is not empty is the checkpoint to be replaced, and stays.
                with contextlib.suppress(OSError):
                    os.rmdir(local_path(self._path))
            raise
