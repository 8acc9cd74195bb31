"""Ranks with different numbers of batches: refused in training, and in evaluation and
prediction each sample once.

A rank that has run out of batches cannot leave before the others, which gather its
parameters in each step. Lightning's loop sees this rank's own batches alone, so hooks,
callbacks, prediction writers and results are those of its samples. Behind the last one
its loader runs the steps in which others have batches still, with its last batch again
(another rank's where it had none): what such a step returns is dropped, what it logs
has no weight, and what it leaves on the module is undone.

Lightning's samplers would repeat samples to make ranks even. They are told to deal to
one rank, and dealt anew through their public attributes.

Private names: a step outside of Lightning's loop has to be what the loop makes of it.
``_on_before_batch_transfer``, ``_build_kwargs`` and
``_build_step_args_from_hook_kwargs`` give its arguments, ``call._call_strategy_hook``
the name of the hook that logs, ``_logger_connector`` the loader and batch that are
logged of; ``_store_dataloader_outputs`` ends what was logged of the loader before.
``_combined_loader`` has the mode in which loaders are combined (``_mode``),
``_evaluation_loop`` is the one that runs, and ``_results`` what it has logged.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lightning_smp.dealt import DealtLoader
from lightning_smp.resume import training_loaders
from smp_core.cluster import SmpMesh, of_all_ranks
from smp_core.watch import JoinedLoader, join, length_of

_NEUTRAL = {"max": -torch.inf, "min": torch.inf}
_CONTAINERS = (list, dict, set, collections.deque)
# What every module has; buffers may be counters. What a metric has computed is out of
# date: others have updated theirs, and compute it again together (torchmetrics' name,
# which has no public one).
_LEFT_ALONE = vars(nn.Module()).keys() - {"_buffers", "training"} | {"_computed"}


class UnevenLoader:
    """A loader whose ranks have different numbers of batches, or do not tell;
    everything else is the loader's own.

    Args:
        loader: of this rank's batches.
        longest: the most batches of any rank; None: unknown.
        limit: returns the steps of the evaluation that begins.
        repeat: runs a step in which this rank has no batch, of (batch, number of the
            step).
    """

    def __init__(
        self,
        loader: Any,
        longest: int | None,
        limit: Callable[[], float],
        repeat: Callable[[Any, int], None],
    ) -> None:
        self.loader = loader
        self._longest = longest
        self._limit = limit
        self._repeat = repeat

    def __len__(self) -> int:
        if self._longest is None:
            raise TypeError("some rank's batches have no length")
        return self._longest

    def __iter__(self) -> Iterator[Any]:
        # limit_val_batches counts steps, also repeated ones.
        limit = self._limit()
        # join() asks all ranks in each step whether any has a batch; this rank's last
        # one comes again with weight 0 as long as one has.
        for number, (batch, weight) in enumerate(join(self.loader)):
            if weight:
                yield batch
            else:
                self._repeat(batch, number)
            if number + 1 >= limit:
                return

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # a copy that is being made
        return getattr(self.loader, name)


class Evaluations:
    """The evaluations of one run.

    Args:
        after_repeated: called behind each step in which this rank has no batch.

    Attributes:
        prepares: whether loaders of an evaluation are made, and not of training.
        weight: 0.0 in a step in which this rank has no batch of its own.
    """

    def __init__(self, trainer: Trainer, after_repeated: Callable[[], None]) -> None:
        self._trainer, self._after_repeated = trainer, after_repeated
        self.prepares = self.sets_up = False
        self.weight = 1.0
        self._loaders: list[Any] = []
        # Each loop's own method is called inside, between a mark and a check.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.setup_data = functools.partial(self._set_up, loop)  # type: ignore[method-assign]
            # FSDP2 cannot train on tensors that it gathered under inference mode.
            loop.inference_mode = False

    def _set_up(self, loop: Any) -> None:
        self.sets_up, self._loaders = True, []
        try:
            type(loop).setup_data(loop)
        finally:
            self.sets_up = self.prepares = False
        # Other modes read several loaders in one step, so that a repeated step of one
        # would be a step of all.
        uneven = any(isinstance(loader, UnevenLoader) for loader in self._loaders)
        if uneven and loop._combined_loader._mode != "sequential":
            raise ValueError(
                f"CombinedLoader(mode={loop._combined_loader._mode!r}) of loaders in which ranks have different "
                "numbers of batches: the others would wait for the ranks that run out. Give all ranks as many batches "
                "(drop_last=True), or combine them with mode='sequential'"
            )

    def process(self, loader: Any) -> Any:
        """Return a loader of an evaluation as Lightning's loop iterates it. Collective
        over the world."""
        # A JoinedLoader is for training: here repeated batches count nothing already.
        if isinstance(loader, JoinedLoader):
            loader = loader.loader
        # A loader without a length on any rank is treated as if ranks differed.
        lengths: list[Any] = of_all_ranks(length_of(loader))
        is_uneven = (
            None in lengths or len(set(lengths)) > 1 or isinstance(loader, DealtLoader)
        )
        # A step that takes batches itself cannot be repeated from outside.
        if is_uneven and self._fetches_itself:
            if None not in lengths and len(set(lengths)) > 1:
                raise ValueError(
                    f"{self._step_name}(dataloader_iter) takes batches by itself, and ranks have different numbers of "
                    f"them: the others would wait for the ranks that run out; write {self._step_name}(batch, "
                    "batch_idx), or give all ranks as many batches (drop_last=True)"
                )
        elif is_uneven:
            # The number of the loader, as Lightning counts them.
            place = len(self._loaders)
            longest = None if None in lengths else max(lengths)
            repeat = functools.partial(self._repeat, place)
            loader = UnevenLoader(
                loader, longest, lambda: self._loop.max_batches[place], repeat
            )
        self._loaders.append(loader)
        return loader

    @property
    def is_uneven(self) -> bool:
        """The flag of an evaluation in which ranks may run out of batches."""
        trainer = self._trainer
        if not (trainer.evaluating or trainer.sanity_checking or trainer.predicting):
            return False
        combined = self._loop._combined_loader
        return combined is not None and any(
            isinstance(loader, UnevenLoader) for loader in combined.flattened
        )

    @property
    def _fetches_itself(self) -> bool:
        step = getattr(self._trainer.lightning_module, self._step_name)
        return "dataloader_iter" in inspect.signature(step).parameters

    @property
    def _step_name(self) -> str:
        if self._trainer.predicting:
            return "predict_step"
        return "test_step" if self._trainer.testing else "validation_step"

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def _repeat(self, place: int, batch: Any, number: int) -> None:
        """Run a step in which this rank has no batch of its own."""
        trainer = self._trainer
        loop = self._loop
        name = self._step_name
        module: Any = trainer.lightning_module
        # With one loader steps get no dataloader_idx.
        shown = place if loop.num_dataloaders > 1 else None
        if number == 0 and place > 0 and not trainer.predicting:
            # Ends what was logged for the loader before: the loop sees no batch of this
            # one.
            loop._store_dataloader_outputs()
        with self._counting_nothing(module):
            # The same way as in Lightning's loop: converted, moved, and given to the
            # step under the logger's eyes.
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=place)
            batch = call._call_strategy_hook(
                trainer, "batch_to_device", batch, dataloader_idx=place
            )
            kwargs = loop._build_kwargs(batch, number, shown)
            if trainer._results is not None:
                trainer._logger_connector.on_batch_start(batch, shown)
            call._call_strategy_hook(
                trainer, name, *loop._build_step_args_from_hook_kwargs(kwargs, name)
            )
            if trainer._results is not None:
                trainer._logger_connector.on_batch_end()
        self._after_repeated()
        # The loop ends its epoch by this mark, which only a batch of its own would set.
        loop.batch_progress.is_last_batch = place == loop.num_dataloaders - 1

    @contextlib.contextmanager
    def _counting_nothing(self, module: LightningModule) -> Iterator[None]:
        # The step may change attributes and metrics of the module: all of it is put
        # back.
        restore = list(_restorers(module))
        vars(module)["log"] = functools.partial(_log_neutral, module, type(module).log)
        self.weight = 0.0
        try:
            yield
        finally:
            self.weight = 1.0
            vars(module).pop("log", None)
            for each in restore:
                each()


def deal(loader: Any, size: int, rank: int) -> None:
    """Let Lightning's sampler of a loader, which deals to one rank, deal every
    ``size``-th sample to this one.

    Raises:
        ValueError: the loader's batch sampler hides it.
    """
    # Batch samplers keep their sampler under various names.
    sampler = _distributed_sampler(loader, depth=4)
    if sampler is None:
        raise ValueError(
            f"the samples of {type(loader.batch_sampler).__name__} cannot be dealt out to {size} ranks: it keeps no "
            "sampler in an attribute; write use_distributed_sampler=False, and deal them out with "
            "trainer.strategy.data_size and data_rank"
        )
    # What it computes from its arguments when it is made; total_size without padding,
    # so that no sample comes twice.
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.num_replicas, sampler.rank = size, rank
    sampler.total_size, sampler.num_samples = samples, len(range(rank, samples, size))


def _distributed_sampler(holder: Any, depth: int) -> DistributedSampler[Any] | None:
    # The usual names first, then whatever the object has; only samplers are looked
    # into.
    for name in ("batch_sampler", "sampler", *getattr(holder, "__dict__", {})):
        value = getattr(holder, name, None)
        if isinstance(value, DistributedSampler):
            return value
        found = (
            _distributed_sampler(value, depth - 1)
            if depth and "ampler" in name
            else None
        )
        if found is not None:
            return found
    return None


def _log_neutral(module: LightningModule, log: Any, *args: Any, **kwargs: Any) -> None:
    """Log as ``self.log``, but a number that leaves the others' result as it is."""
    arguments = inspect.signature(log).bind(module, *args, **kwargs).arguments
    arguments.pop("self")
    # A metric object has counted nothing new: logging it is neutral by itself.
    value, reduction = arguments["value"], arguments.get("reduce_fx", "mean")
    if not isinstance(value, Metric):
        name = (
            reduction
            if isinstance(reduction, str)
            else getattr(reduction, "__name__", "")
        )
        dtype = (
            value.dtype
            if torch.is_tensor(value) and value.is_floating_point()
            else torch.get_default_dtype()
        )
        # The sum of 0, the mean of 0 with no samples, the largest of -inf.
        neutral = _NEUTRAL.get(name.lower(), 0.0)
        arguments["value"] = torch.tensor(neutral, dtype=dtype, device=module.device)
        arguments["batch_size"] = 0
    log(module, **arguments)


def _restorers(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield what undoes a step's changes of a LightningModule's own attributes and
    buffers, and of metrics."""
    seen: set[int] = set()
    for holder in (
        module,
        *(each for each in module.modules() if isinstance(each, Metric)),
    ):
        yield from _restorers_of_attributes(holder, seen)


def _restorers_of_attributes(
    holder: nn.Module, seen: set[int]
) -> Iterator[Callable[[], Any]]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    # Attributes that are replaced are put back by name, containers and tensors that are
    # changed in place by their contents.
    kept = {
        name: value for name, value in vars(holder).items() if name not in _LEFT_ALONE
    }
    for value in kept.values():
        yield from _restorers_of_value(value, seen)
    yield functools.partial(_set_attributes, vars(holder), kept)


def _set_attributes(attributes: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in [
        name for name in attributes if name not in kept and name not in _LEFT_ALONE
    ]:
        del attributes[name]
    attributes.update(kept)


def _restorers_of_value(value: Any, seen: set[int]) -> Iterator[Callable[[], Any]]:
    if isinstance(value, Metric):  # in a list
        for each in value.modules():
            yield from _restorers_of_attributes(each, seen)
        return
    if (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and type(value) is Tensor
    ):
        yield functools.partial(_copy_back, value, value.detach().clone())
        return
    if not isinstance(value, _CONTAINERS) or id(value) in seen:
        return
    seen.add(id(value))
    elements = list(value.items()) if isinstance(value, dict) else list(value)
    yield functools.partial(_fill, value, elements)
    for element in value.values() if isinstance(value, dict) else elements:
        if isinstance(element, (Metric, *_CONTAINERS)) or (
            isinstance(value, dict) and torch.is_tensor(element)
        ):
            yield from _restorers_of_value(element, seen)


def _copy_back(tensor: Tensor, kept: Tensor) -> None:
    if not torch.equal(tensor, kept):
        with torch.no_grad():
            tensor.copy_(kept)


def _fill(container: Any, elements: list[Any]) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(elements)


def require_equal_training(trainer: Trainer, mesh: SmpMesh) -> None:
    """Check the numbers of batches before training, and that a
    :class:`~smp_core.watch.joined.JoinedLoader` has the weights of what is trained on.
    Collective.

    Raises:
        ValueError: an epoch has more batches on one rank than on another, and more than
            one of them are trained on; or a JoinedLoader is one of several training
            loaders, ranks share its batches, or steps fetch batches themselves.
    """
    counts = of_all_ranks(trainer.num_training_batches)
    # More batches on a rank do no harm where max_steps ends training before any rank
    # has run out.
    windows = min(counts) // (trainer.accumulate_grad_batches or 1)
    if len(set(counts)) > 1 and not 0 <= trainer.max_steps <= windows:
        raise _uneven("limit_train_batches", dict(enumerate(counts)))
    loaders = training_loaders(trainer)
    if not any(isinstance(loader, JoinedLoader) for loader in loaders):
        return
    if not isinstance(trainer.train_dataloader, JoinedLoader):
        raise ValueError(
            "JoinedLoader is one of several training loaders, which all may end at different batches; zip them to one "
            "iterable and give train_dataloader a JoinedLoader of that"
        )
    if mesh.data_size < mesh.topology.world_size:
        raise ValueError(
            "JoinedLoader where ranks share a batch (context, tensor or pipeline degree above 1) is not built yet; "
            "give all ranks as many batches (drop_last=True)"
        )
    if (
        "dataloader_iter"
        in inspect.signature(trainer.lightning_module.training_step).parameters
    ):
        raise ValueError(
            "JoinedLoader: training_step(dataloader_iter) takes batches by itself, so that which one is the present "
            "one is not known; write training_step(batch, batch_idx)"
        )


def require_equal_evaluation(limit: str, batches: Any, mesh: SmpMesh) -> None:
    """Check the numbers of batches before an evaluation, among ranks that gather
    parameters together. Collective.

    Args:
        limit: the Trainer's argument that bounds the number of batches.
        batches: of each of this rank's data loaders.

    Raises:
        ValueError: they differ.
    """
    # Pipeline stages take every batch together, and any two partition groups share one
    # with some stage.
    # Ranks that gather parameters, or share layers, have to take as many steps;
    # replicas need not.
    stage = mesh.shard_degree * mesh.tensor_degree
    together = mesh.topology.world_size if mesh.pipeline_degree > 1 else stage
    if together == 1:
        return
    counts = of_all_ranks(batches)
    for first in range(0, len(counts), together):
        group = counts[first : first + together]
        if any(each != group[0] for each in group):
            raise _uneven(limit, dict(enumerate(group, first)))


def _uneven(limit: str, counts: dict[int, Any]) -> ValueError:
    shown = ", ".join(
        f"rank {rank}: {count}" for rank, count in list(counts.items())[:8]
    )
    return ValueError(
        f"ranks have different numbers of batches ({shown}), and those that have more would wait for the others. Leave "
        f"use_distributed_sampler at True, use drop_last=True, or write {limit}={min(counts.values())}"
    )
