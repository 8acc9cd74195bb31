"""The resumption of a run: the window's first batch, the place in the data, the global
batch, random states.

Lightning counts batches and starts an epoch's data from its beginning again, so that
some samples are seen twice and others never. Here the place is counted in samples,
which holds on other numbers of ranks and for other batch sizes:

    in a checkpoint    smp_data: batches of the epoch that were trained on, samples in each over all ranks, accumulation
    while training     the sampler inside each loader's BatchSampler is wrapped, so that an epoch can begin later
    at a resume        on_train_start: accumulation settled, counters and samplers put to the place, generators restored
                       (before the validation that the run begins with: lightning_smp/due_validation.py)

Data loaders that keep their own place (torchdata's StatefulDataLoader and others with a
``state_dict``) are asked for their state when a checkpoint is taken, and Lightning
reads one batch ahead of training where a loader has no length, as one of a stream: that
batch would be lost in a resumed run. So the state from before each batch is kept, and
the one that is told is from before the first batch that no training step has begun
with.

Private names: ``FitLoop._data_fetcher``, because Lightning makes the iterators of an
epoch before ``on_train_start`` and has no public way to make them anew or to leave
batches out; ``_TrainingEpochLoop._batches_that_stepped``, the step that loggers write;
``_should_check_val_fx``, by which Lightning takes the begin of a window for the end of
a batch; ``CombinedLoader._mode``, whether a loader that has come to its end begins
again; ``FitLoop._restarting``, which keeps schedules by metrics from their step at the
end of the epoch.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from lightning_smp.dealt import DealtLoader
from lightning_smp.due_validation import begins_with_it
from smp_core.checkpoint import set_random_state
from smp_core.checkpoint.random_state import random_state
from smp_core.watch import JoinedLoader

logger = logging.getLogger("smp")

_COUNTERS = ("ready", "started", "processed", "completed")


@dataclass(frozen=True)
class WindowStart:
    """The place in the data before the first micro-batch of the open window.

    Attributes:
        batches: batches of this epoch before it.
        total: batches of the whole run before it.
        stepped: the step that loggers write for it.
        loaders: Lightning's state of data loaders that can be resumed, taken when the
            window before was closed.
        random: this rank's random states here; None where a window is one batch.
        is_whole: whether the window begins here. One of an earlier epoch (manual
            optimization) has gradients that are lost with a checkpoint.
    """

    batches: int
    total: int
    stepped: int
    loaders: dict[str, Any]
    random: dict[str, Any] | None
    is_whole: bool = True

    @classmethod
    def here(
        cls, trainer: Trainer, loaders: dict[str, Any], is_whole: bool = True
    ) -> WindowStart:
        """Return the present place. Call it when the window's first batch has been
        fetched and counted as ready, or an epoch's inside of one."""
        # A batch is counted as ready before its step: the window begins one before.
        loop = trainer.fit_loop.epoch_loop
        progress, stepped = loop.batch_progress, loop._batches_that_stepped
        random = None if accumulation(trainer) == 1 else random_state()
        return cls(
            progress.current.ready - 1,
            progress.total.ready - 1,
            stepped,
            loaders,
            random,
            is_whole,
        )

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Make ``checkpoint``, taken inside the window, resume with the window's first
        batch.

        Weights and optimizer are those from before the window; its partial sum of
        gradients is not saved, so its batches have to be seen again.
        """
        if not self.is_whole:
            logger.warning(
                "a checkpoint is taken in a window of manual optimization that began in an earlier epoch, whose "
                "gradients are not in it: a run that resumes there makes other steps; step and zero gradients at the "
                "end of each epoch"
            )
        loop = checkpoint["loops"]["fit_loop"]
        # All counters go back to the window's first batch, those of the run as well.
        progress = loop["epoch_loop.batch_progress"]
        replayed = progress["current"]["processed"] - self.batches
        for part, batches in (("current", self.batches), ("total", self.total)):
            progress[part].update(dict.fromkeys(_COUNTERS, batches))
        progress["is_last_batch"] = False
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = self.stepped
        # Loaders that keep their place go back to where they were between windows.
        if self.loaders:
            loop["state_dict"].update(self.loaders)
        checkpoint["smp_window"] = {
            "first_batch": self.batches,
            "batches_to_replay": replayed,
        }


def loader_state(trainer: Trainer) -> dict[str, Any]:
    """Return the position of training data loaders that can tell it, as Lightning saves
    it; empty otherwise."""
    return copy.deepcopy(trainer.fit_loop.on_save_checkpoint())


class PlacedSampler(Sampler[Any]):
    """A sampler whose next epoch can begin after some of its samples.

    A sampler that draws from the global generators (RandomSampler) gives the same epoch
    again when their state from its start is restored; that state is kept, except for
    DistributedSampler, which has a seed of its own.

    Args:
        sampler: the user's sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.random_at_start: dict[str, Any] | None = None
        self._skip = 0
        self._random: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
        self._keep = False

    def begin_after(
        self,
        samples: int,
        at_start: dict[str, Any] | None,
        then: dict[str, Any] | None,
        keep: bool = False,
    ) -> None:
        """Leave samples out of the next epoch; set random states for its start and
        after the gap (None: no change).

        Args:
            keep: the states after the gap are those from before the epoch's start.
        """
        self._skip, self._random, self._keep = samples, (at_start, then), keep

    def __iter__(self) -> Iterator[Any]:
        # What was set holds for one epoch.
        skip, (at_start, then) = self._skip, self._random
        if self._keep:
            then = random_state()
        self._skip, self._random, self._keep = 0, (None, None), False
        # The same order of samples: the generators as they were when the epoch was
        # first drawn.
        if at_start is not None:
            set_random_state(at_start)
        self.random_at_start = (
            None if isinstance(self.sampler, DistributedSampler) else random_state()
        )
        samples = iter(self.sampler)
        # Drawn and dropped, since a sampler has no other way to come to its place.
        for _ in itertools.islice(samples, skip):
            pass
        if then is not None:
            set_random_state(then)
        yield from samples

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)  # a copy that is being made
        # set_epoch and what else the user's sampler has.
        return getattr(self.sampler, name)


def place_sampler(loader: Any) -> None:
    """Wrap the sampler of a DataLoader, where there is one between it and its
    batches."""
    # A stream has no sampler, and a batch sampler of another kind need not have one
    # inside.
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(
        loader.dataset, IterableDataset
    ):
        return
    if isinstance(batches, BatchSampler) and not isinstance(
        batches.sampler, PlacedSampler
    ):
        batches.sampler = PlacedSampler(batches.sampler)


def sampler_of(loader: Any) -> PlacedSampler | None:
    """Return the wrapped sampler of a loader."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, PlacedSampler) else None


def training_loaders(trainer: Trainer) -> list[Any]:
    """List the data loaders of fit, flat."""
    return (
        []
        if trainer.train_dataloader is None
        else CombinedLoader(trainer.train_dataloader).flattened
    )


def samples_per_batch(loader: Any, data_size: int) -> int | None:
    """Count the samples of one batch over all ranks; None where the loader does not
    tell."""
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    return None if size is None else size * data_size


def describe_place(
    trainer: Trainer, checkpoint: dict[str, Any], data_size: int
) -> dict[str, Any] | None:
    """Return ``smp_data`` of a checkpoint dictionary; None outside of fit.

    Args:
        data_size: ranks that read different samples.
    """
    loaders = training_loaders(trainer)
    if not loaders:
        return None
    # Counted by what was trained on, not by what was fetched: Lightning reads ahead.
    loop = checkpoint["loops"]["fit_loop"]
    progress, epoch = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    # A run that was stopped within an epoch ended it: the next one goes on behind it.
    is_over = epoch["current"]["processed"] == epoch["current"]["ready"]
    batches = progress["current"]["processed"]
    if progress["is_last_batch"] or is_over:
        batches = 0
    sizes = [samples_per_batch(loader, data_size) for loader in loaders]
    samples = [None if size is None else size * batches for size in sizes]
    return {
        "batches": batches,
        "samples_per_batch": sizes,
        "samples_in_epoch": samples,
        "accumulate_grad_batches": accumulation(trainer),
    }


def metrics_of(trainer: Trainer) -> dict[str, Any]:
    """Return what callbacks and schedules find in ``trainer.callback_metrics``, for a
    checkpoint: numbers, and lists of them for a metric with several (one of each class,
    say)."""
    found = trainer.callback_metrics.items()
    return {name: value.double().tolist() for name, value in found}


def accumulation(trainer: Trainer) -> int | None:
    """Return the micro-batches of an optimizer step; None where the module or a
    schedule decides."""
    # Two places may change it from epoch to epoch or step to step.
    scheduled = any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    assert trainer.lightning_module is not None
    if scheduled or not trainer.lightning_module.automatic_optimization:
        return None
    return trainer.accumulate_grad_batches


def random_of_rank(trainer: Trainer, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return a rank's random states for a checkpoint, and those at the start of its
    samplers' epoch.

    Args:
        earlier: the states from where the resumed run begins, if that is not here: at
            the start of an open window, whose batches are seen again, or before a
            validation in progress.
    """
    # One state for each loader, in their order.
    starts = [
        getattr(sampler_of(loader), "random_at_start", None)
        for loader in training_loaders(trainer)
    ]
    states: dict[str, Any] = {"random": earlier or random_state()}
    if any(start is not None for start in starts):
        states["epoch_random"] = starts
    return states


class Resume:
    """A resumption in progress, from loading to the first batch.

    Args:
        place: ``smp_data`` of the checkpoint, None where it has none (another
            program's, or an older one's).
        random: the generators' state to restore; None: they are not changed.
        epoch_random: their states at the start of the samplers' epoch; None where
            samplers do not draw from them.
        data_size: ranks of this run that read different samples.
        allow_batch_change: ``checkpoint.allow_batch_change``.
        in_window: the states to restore are those after the first batch of an open
            window had been fetched.
        loader_states: of the training loaders that keep their own place, in their
            order.
        metrics: what callbacks and schedules found in ``trainer.callback_metrics``, by
            name.
    """

    def __init__(
        self,
        place: dict[str, Any] | None,
        random: dict[str, Any] | None,
        epoch_random: list[dict[str, Any] | None] | None,
        data_size: int,
        allow_batch_change: bool,
        in_window: bool = False,
        loader_states: Sequence[dict[str, Any]] = (),
        metrics: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.place = place
        self.random = random
        self.epoch_random = epoch_random
        self.data_size = data_size
        self.allow_batch_change = allow_batch_change
        self.in_window = in_window
        self.loader_states = loader_states
        self.metrics = metrics

    def on_train_start(self, trainer: Trainer) -> None:
        """Keep or change the global batch, and move the data to their place.

        Raises:
            ValueError: the global batch would change, which is not allowed.
        """
        # ReduceLROnPlateau and ModelCheckpoint look for a metric by its name before the
        # first new one is logged.
        for name, value in self.metrics.items():
            trainer.callback_metrics.setdefault(
                name, torch.tensor(value, dtype=torch.float64)
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # Lightning has no start of an epoch where a run goes on inside of one.
            if isinstance(callback, GradientAccumulationScheduler):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(
                    trainer.current_epoch
                )
        loaders = training_loaders(trainer)
        sizes = [samples_per_batch(loader, self.data_size) for loader in loaders]
        batches = 0
        if self.place is not None:
            self._settle_global_batch(trainer, sizes)
            batches = self._batches_here(trainer, sizes)
        for loader in loaders:
            samplers = (
                (loader.sampler, sampler_of(loader))
                if isinstance(loader, (DataLoader, JoinedLoader))
                else ()
            )
            for sampler in samplers:
                set_epoch = getattr(sampler, "set_epoch", None)
                # Lightning does it later, when workers have begun to fetch.
                if set_epoch is not None:
                    set_epoch(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        # What comes before the next batch draws random numbers of its own: a
        # validation, or the rest of an epoch.
        validates_first = begins_with_it(trainer)
        ends_epoch_first = _ends_epoch_first(trainer)
        if not ends_epoch_first:
            self._go_to(trainer, loaders, batches, validates_first)
        if (validates_first or ends_epoch_first) and self.random is not None:
            set_random_state(self.random)
            self.random = None
        if self.in_window:
            _begin_with_a_batch(trainer)

    def _settle_global_batch(self, trainer: Trainer, sizes: list[int | None]) -> None:
        """Keep the global batch, by another accumulation if needed; warn of a change or
        refuse it."""
        # The loaders.
        assert self.place is not None
        saved = self.place["samples_per_batch"]
        steps = self.place["accumulate_grad_batches"]
        here = accumulation(trainer)
        # All ranks find the same; rank 0 says it.
        say = logger.warning if trainer.is_global_zero else logger.debug
        # Each loader's place is by its number.
        if len(saved) != len(sizes):
            raise ValueError(
                f"the checkpoint was saved with {len(saved)} training data loaders, here are {len(sizes)}; give the "
                "same ones, or load the weights alone"
            )
        # Without sizes there is nothing to compare.
        if None in saved or None in sizes:
            if saved != sizes:
                say(
                    "data loaders without a batch_size: whether the global batch is the same is not known"
                )
            return

        # The samples of an optimizer step.
        before = [size * (steps or 1) for size in saved]
        now = [size * (here or 1) for size in sizes]  # type: ignore[operator]
        if before == now:
            return
        change = f"an optimizer step had {_listed(before)} samples when the checkpoint was saved and has {_listed(now)}"
        if self.allow_batch_change:
            say("%s now (checkpoint.allow_batch_change=True)", change)
            return

        # Another accumulation that keeps them.
        adapted = before[0] // sizes[0] if sizes[0] else 0
        if steps and here and [size * adapted for size in sizes] == before:  # type: ignore[operator]
            say(
                "%s here: accumulate_grad_batches is %d instead of %d, which keeps it at %s",
                change,
                adapted,
                here,
                _listed(before),
            )
            trainer.accumulate_grad_batches = adapted
            return
        raise ValueError(
            f"{change} here (batch_size x {self.data_size} ranks x accumulate_grad_batches={here or 'by the module'}), "
            "and no accumulation keeps it; change batch_size, or write checkpoint={'allow_batch_change': True} to go "
            "on with another global batch"
        )

    def _batches_here(self, trainer: Trainer, sizes: list[int | None]) -> int:
        """Return the place in batches of this run, and set Lightning's counters to
        it."""
        assert self.place is not None
        before: int = self.place["batches"]
        if sizes == self.place["samples_per_batch"]:
            return before
        samples, size = self.place["samples_in_epoch"][0], sizes[0]
        if samples is None or size is None:
            return before
        # Whole optimizer steps of today's size.
        window = size * (accumulation(trainer) or 1)
        batches = samples // window * (accumulation(trainer) or 1)
        if batches * size != samples:
            logger.warning(
                "%d samples of the epoch had been seen; an optimizer step has %d now: the last %d are seen again",
                samples,
                window,
                samples - batches * size,
            )
        progress = trainer.fit_loop.epoch_loop.batch_progress
        for counter in _COUNTERS:
            setattr(
                progress.current,
                counter,
                getattr(progress.current, counter) + batches - before,
            )
        return batches

    def _go_to(
        self, trainer: Trainer, loaders: list[Any], batches: int, validates_first: bool
    ) -> None:
        """Move samplers or fetchers to the place, and restore the generators where no
        sampler does."""
        at_epoch_start = not batches and not self.in_window
        if at_epoch_start and self.random is not None:
            # Making the iterators draws the numbers of the run that saved.
            set_random_state(self.random)
        elif batches:
            warnings.filterwarnings(
                "ignore",
                "You're resuming from a checkpoint that ended before the epoch ended",
            )
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is None:
            return
        # Three kinds: loaders that keep their place, those whose sampler can begin
        # later, and all others, which are read up to the place.
        keeping = [loader for loader in loaders if isinstance(loader, KeepsPlace)]
        self._tell_places(keeping)
        others = [loader for loader in loaders if loader not in keeping]
        samplers = [
            sampler for loader in others if (sampler := sampler_of(loader)) is not None
        ]
        by_sampler = len(samplers) == len(others)
        if others and by_sampler and not at_epoch_start:
            goes_round = fetcher.combined_loader._mode == "max_size_cycle"
            self._skip(others, samplers, batches, validates_first, goes_round)
        iter(fetcher)
        if batches and not by_sampler:
            self._drop(fetcher, loaders, batches, keeping)
        if at_epoch_start and self.random is not None:
            self._hold_until_fetched(others, samplers)

    def _tell_places(self, keeping: list[KeepsPlace]) -> None:
        """Tell loaders the places that they keep. Lightning does where it sets up data,
        which may have been before the checkpoint was loaded: for
        ``configure_optimizers``, where that reads
        ``trainer.estimated_stepping_batches``.

        Raises:
            ValueError: the checkpoint has places of other loaders.
        """
        if self.loader_states and len(self.loader_states) != len(keeping):
            raise ValueError(
                f"the checkpoint has the places of {len(self.loader_states)} training data loaders with a state_dict, "
                f"here are {len(keeping)}; give the same ones, or load the weights alone"
            )
        for loader, state in zip(keeping, self.loader_states, strict=False):
            loader.load_state_dict(copy.deepcopy(state))

    def _drop(
        self, fetcher: Any, loaders: list[Any], batches: int, keeping: list[KeepsPlace]
    ) -> None:
        """Read up to the place."""
        if keeping:
            logger.warning(
                "a data loader without sampler, beside one that keeps its place, begins its epoch again: what is read "
                "up to the place would be read of both; zip the two to one loader with a state_dict"
            )
            return
        logger.warning(
            "%d batches are read and dropped: the data loader has no sampler to begin later",
            batches,
        )
        for _ in range(batches):
            next(fetcher)
            for loader in loaders:
                if isinstance(loader, (JoinedLoader, DealtLoader)):
                    loader.begin_batch()
        fetcher.fetched -= batches  # Lightning adds them

    def _hold_until_fetched(
        self, loaders: list[Any], samplers: list[PlacedSampler]
    ) -> None:
        """Go on with the present random states when the first batch is read: Lightning
        may draw until then, for the iterator of a validation that it takes for past.
        """
        self.random = random_state()
        if samplers and _read_when_needed(loaders):
            samplers[0].begin_after(0, self.random, None)
            self.random = None

    def _skip(
        self,
        loaders: list[Any],
        samplers: list[PlacedSampler],
        batches: int,
        validates_first: bool,
        goes_round: bool,
    ) -> None:
        # Samples that are read just before their step may draw in between; those that
        # workers fetch draw elsewhere.
        starts = self.epoch_random or [None] * len(loaders)
        lazy = _read_when_needed(loaders) and not self.in_window
        for loader, sampler, start in zip(loaders, samplers, starts, strict=True):
            then = self.random if lazy and not validates_first else None
            read = batches % len(loader) if goes_round else min(batches, len(loader))
            sampler.begin_after(
                read * loader.batch_sampler.batch_size,
                start,
                then,
                keep=lazy and validates_first,
            )
        if lazy and not validates_first:
            self.random = None

    def on_train_batch_start(self, trainer: Trainer) -> None:
        """Restore the generators before the first training step, unless fetching the
        batch has done it."""
        if self.random is not None:
            set_random_state(self.random)
        # Lightning leaves a ReduceLROnPlateau out at the end of an epoch in which it
        # restarted, for lack of metrics.
        trainer.fit_loop._restarting = False


def _begin_with_a_batch(trainer: Trainer) -> None:
    """Let Lightning find no validation due where a window is gone back to: it would end
    the batch before the window once more, with a step of its loggers and of a
    ``ReduceLROnPlateau``."""
    loop: Any = trainer.fit_loop.epoch_loop
    rule = loop._should_check_val_fx

    def not_due(_: Any) -> bool:
        loop._should_check_val_fx = rule  # this was Lightning's first look
        return False

    loop._should_check_val_fx = not_due


def _read_when_needed(loaders: list[Any]) -> bool:
    """Return whether samples are read just before the step that needs them, in this
    process; reading may draw."""
    return all(loader.num_workers == 0 for loader in loaders)


def _ends_epoch_first(trainer: Trainer) -> bool:
    """Return whether the rest of an epoch, after its last batch, is to be done; the
    next one makes its iterators then."""
    loop = trainer.fit_loop
    trained = (
        loop.epoch_loop.batch_progress.is_last_batch
        and not loop.epoch_loop.restarted_on_train_batch_end
    )
    return trained and loop.restarted_mid_epoch


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))


# Attributes of a class that is derived here: the loader's own class, and its place.
_KIND, _PLACE = "_smp_kind", "_smp_place"


@runtime_checkable
class KeepsPlace(Protocol):
    """A data loader whose state is its place, as Lightning finds it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def tell_place_of_training(loader: KeepsPlace) -> None:
    """Let a loader that keeps its place tell that of training, in place."""
    _PlaceOfTraining(loader)


def begin_batch(loader: Any) -> None:
    """Note that training begins with the next of the batches that were read of a
    loader."""
    place: _PlaceOfTraining | None = getattr(type(loader), _PLACE, None)
    if place is not None:
        place.begin_batch()


class _PlaceOfTraining:
    """The place of training in a loader that keeps one, told by the loader from now
    on."""

    def __init__(self, loader: KeepsPlace) -> None:
        # A loader of an earlier fit has a derived class already: its own class first,
        # or two of them would stand one on the other.
        kind: Any = getattr(type(loader), _KIND, type(loader))
        object.__setattr__(loader, "__class__", kind)
        self._state_of: Callable[[], dict[str, Any]] = loader.state_dict
        # Batches that were read and that training has not begun with.
        self._before: deque[dict[str, Any]] = deque()

        def iterate(loader: Any) -> Iterator[Any]:
            self._before.clear()
            return self._reading(iter(kind.__iter__(loader)))

        own = {
            "__iter__": iterate,
            "state_dict": lambda _: self._state(),
            "__slots__": (),
            _KIND: kind,
            _PLACE: self,
        }
        # By class, since Python looks up `__iter__` in the class and never in the
        # instance.
        derived = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
        object.__setattr__(loader, "__class__", derived)

    def begin_batch(self) -> None:
        if self._before:
            self._before.popleft()

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            # The state from before this batch, until training begins with it.
            self._before.append(copy.deepcopy(self._state_of()))
            try:
                batch = next(batches)
            except StopIteration:
                self._before.pop()
                return
            yield batch

    def _state(self) -> dict[str, Any]:
        return self._before[0] if self._before else self._state_of()


def places_of_loaders(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the training data loaders, as Lightning puts them into a
    checkpoint; none are in one that Accelerate wrote, which has no loops."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return loop.get("state_dict", {}).get("combined_loader", [])
