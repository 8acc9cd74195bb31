"""The steps that all ranks of a process group take together: an error on any rank is
raised on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from smp_core.checkpoint.layout import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class Ranks:
    """The ranks that save or load together; one rank without torch.distributed.

    Args:
        group: process group, None for the default one.
        alone: this process alone, whether or not torch.distributed is initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, alone: bool = False
    ) -> None:
        is_set_up = dist.is_available() and dist.is_initialized()
        self.distributed = is_set_up and not alone
        self.group = group
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1
        if self.rank < 0:
            raise CheckpointError(
                "this rank is not in the process_group that saves or loads the checkpoint"
            )

    def gather(self, value: T) -> list[T]:
        """Gather every rank's value on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def together(
        self,
        what: str,
        action: Callable[[], T],
        share: Callable[[T], Any] = lambda result: None,
    ) -> tuple[T, list[Any]]:
        """Run an action on every rank.

        Args:
            what: the beginning of the error message.
            action: the function to run.
            share: this rank's result -> the part that every rank receives.

        Returns:
            this rank's result, and what every rank shares.

        Raises:
            CheckpointError: it failed somewhere; the message names the ranks. The local
                error is the cause.
        """
        # Nothing is raised before the exchange: every rank has to reach it.
        result, error = _attempt(action)
        shared: Any = None
        if error is None:
            shared, error = _attempt(lambda: share(cast(T, result)))
        gathered = self.gather((shared, None if error is None else _describe(error)))
        raise_any(what, [message for _, message in gathered], error)
        return cast(T, result), [part for part, _ in gathered]

    def on_first(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on rank 0 and return its result on every rank.

        Raises:
            CheckpointError: it failed.
        """
        outcome: list[Any] = [None, None]
        # Ranks other than 0 wait in the broadcast, whatever happens on rank 0.
        error: BaseException | None = None
        if self.rank == 0:
            result, error = _attempt(action)
            outcome = [result, None if error is None else _describe(error)]
        if self.size > 1:
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(outcome, src=source, group=self.group)
        raise_any(what, [outcome[1]], error)
        return cast(T, outcome[0])


def _attempt(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        # A rank that leaves a collective alone would hang the others.
        return None, error


def _describe(error: BaseException) -> str:
    return (
        str(error)
        if isinstance(error, CheckpointError)
        else f"{type(error).__name__}: {error}"
    )


def failures_in_words(error: CheckpointException) -> dict[int, str]:
    """Return the errors of the ranks that failed inside of DCP, in words.

    Raises:
        KeyboardInterrupt, SystemExit: one of them is such; DCP wraps these, too.
    """
    words = {}
    for rank, wrapped in sorted(error.failures.items()):
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        if not isinstance(cause, Exception):
            raise cause from error
        words[rank] = _describe(cause)
    return words


def raise_any(
    what: str, messages: list[str | None], local: BaseException | None = None
) -> None:
    """Raise one error from the messages of all ranks (None: no error there)."""
    # Usually many ranks have the same message: it is shown once, with their numbers.
    failed: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            failed.setdefault(message, []).append(rank)
    if local is not None and not isinstance(local, Exception):
        raise local  # KeyboardInterrupt and SystemExit stay what they are
    if not failed:
        return
    # All ranks alike: numbers would say nothing.
    if len(failed) == 1 and (
        len(messages) == 1 or len(next(iter(failed.values()))) == len(messages)
    ):
        raise CheckpointError(f"{what}: {next(iter(failed))}") from local
    parts = [
        f"rank {','.join(map(str, ranks))}: {message}"
        for message, ranks in list(failed.items())[:4]
    ]
    raise CheckpointError(f"{what}: {'; '.join(parts)}") from local
