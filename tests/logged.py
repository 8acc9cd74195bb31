"""What the logger "smp" is told, also inside of ranks, where pytest's caplog is not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warnings_said() -> Iterator[list[str]]:
    """Yield a list that gets the warnings and errors of this process from here on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
