"""The ``load_from_checkpoint`` of LightningModules and data modules, for checkpoint folders too."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from smp_core.checkpoint import consolidate, is_checkpoint
from smp_core.checkpoint.folders import is_address


class LoadFromCheckpoint:
    """A replacement of Lightning's classmethod ``load_from_checkpoint``, which reads one file; it makes such a file of
    a folder.

    Args:
        stock: Lightning's own, as it stands in the class.
    """

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        load = self.stock.__get__(instance, owner)

        @functools.wraps(load)
        def load_from_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            with _as_file(checkpoint_path) as file:
                return load(file, *args, **kwargs)

        return load_from_checkpoint


def read_folders(kind: type) -> None:
    """Let ``kind.load_from_checkpoint`` and its subclasses' read folders."""
    stock = vars(kind)["load_from_checkpoint"]
    if not isinstance(stock, LoadFromCheckpoint):
        kind.load_from_checkpoint = LoadFromCheckpoint(stock)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _as_file(path: Any) -> Iterator[Any]:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    stored = is_address(text) and not text.startswith("http") and is_checkpoint(text)
    if not os.path.isdir(text) and not stored:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "whole.ckpt")
        consolidate(text, file)
        yield file
