"""The averages of weights by Lightning's callbacks, over sharded weights; and the
callbacks that no sharding allows.

``WeightAveraging``, ``EMAWeightAveraging`` and ``StochasticWeightAveraging`` copy the
LightningModule before it is sharded. Under our strategy an instance of one, or of a
user's subclass, becomes an instance of a derived class whose average is a
:class:`smp_core.engine.averaging.ShardedAverage`, made when the module is sharded. The
same code as ever decides when to average, to swap and to save.

Private names: ``_average_model``, ``_device``, ``_use_buffers``, ``_kwargs``,
``_swap_models`` and ``_copy_average_to_current`` of ``WeightAveraging``, and
``_average_model`` and ``_load_average_model_state`` of ``StochasticWeightAveraging``:
Lightning has no public way to replace the average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_smp.checkpoint_sources import CURRENT_MODEL, FINER_AVERAGE
from lightning_smp.loading import Loading
from lightning_smp.steps import SteppingStrategy
from smp_core.engine import ParallelModel, RankWeights, ShardedAverage, take_written
from smp_core.torch_facts import clean_name


def take_over_callbacks(trainer: Trainer) -> bool:
    """Make the callbacks that average weights do it on shards; return whether there are
    any. Call it before any callback's ``setup``.

    Raises:
        ValueError: a callback that cannot work on a sharded module.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} masks whole weights, and parameters are shards under SmpShardedStrategy: "
                "remove the callback; prune the trained model instead: `smp checkpoint consolidate DIR model.ckpt`, "
                "YourModule.load_from_checkpoint('model.ckpt') and torch.nn.utils.prune"
            )
        # Becoming of another class keeps the user's object, which the script may hold.
        kinds: Any = (
            (WeightAveraging, _Weight),
            (StochasticWeightAveraging, _Stochastic),
        )
        for stock, sharded in kinds:
            if isinstance(callback, stock) and not isinstance(callback, sharded):
                kind: Any = type(callback)
                callback.__class__ = _derived(kind, sharded)
    return any(isinstance(callback, (_Weight, _Stochastic)) for callback in callbacks)


def make_averages(
    trainer: Trainer, parallel: ParallelModel, loading: Loading | None
) -> None:
    """Make the averages, once the module is sharded, its weights are loaded and its
    optimizers are made. Collective."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, (_Weight, _Stochastic)):
            continue
        # A new average begins with the weights that were loaded; a saved one takes its
        # place.
        callback.make_average(parallel)
        if callback.saved is not None:
            assert loading is not None
            _load_average(callback, loading)


def averaging_keys(trainer: Trainer) -> list[str]:
    """Return the keys in checkpoints of the callbacks whose averages are loaded
    here."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback.state_key
        for callback in callbacks
        if isinstance(callback, (_Weight, _Stochastic))
    ]


def _load_average(callback: _Weight | _Stochastic, loading: Loading) -> None:
    average: Any = callback._average_model
    # Shards like those of the model, filled from the checkpoint, and given to the
    # average.
    weights = average.weights()
    assert callback.saved is not None
    loading.load_into(weights, callback.saved, average.parallel.mesh.device)
    average.take_weights(weights)
    callback.saved = None


@functools.cache
def _derived(kind: Any, sharded: Any) -> Any:
    # The user's class first, so that its overrides count. The name is part of the key
    # of the callback's state.
    bases = (sharded,) if issubclass(sharded, kind) else (kind, sharded)
    return type(
        kind.__name__,
        bases,
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "stock": kind,
        },
    )


def _dtypes(module: LightningModule) -> dict[str, torch.dtype]:
    """Return the dtypes that a module is built in, by name: those of the copy that
    Lightning would take of it in ``setup``, before it is converted to the Trainer's
    precision."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {clean_name(name): tensor.dtype for name, tensor in named}


def _load_now(callback: _Weight | _Stochastic, trainer: Trainer) -> None:
    """Load an average in the middle of a run, where the learning rate finder restores
    the state from before its trial.
    """
    average: Any = callback._average_model
    if average is not None:
        strategy: Any = trainer.strategy
        callback.make_average(average.parallel)
        _load_average(callback, strategy.loading)


class _OverShards:
    """The begin of a fit with an average over shards, for both of Lightning's
    callbacks."""

    saved: Mapping[str, Any] | None = None
    """A checkpoint's average that is to be loaded."""
    _built_in: Mapping[str, torch.dtype] = MappingProxyType({})
    _average_model: Any

    def setup(
        self: Any, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Forget the average of an earlier fit when another begins; an evaluation in
        between has it still. With another strategy become Lightning's own callback
        again."""
        # A Trainer of another strategy got the same callback afterwards.
        if not isinstance(trainer.strategy, SteppingStrategy):
            self.__class__ = self.stock
            self.setup(trainer, pl_module, stage)
        elif stage == "fit":
            self._average_model = None
            self._built_in = _dtypes(pl_module)


class _Weight(_OverShards, WeightAveraging):
    """A ``WeightAveraging`` over shards."""

    _average_model: ShardedAverage | None
    _saved_count = 0

    def make_average(self, parallel: ParallelModel) -> None:
        device = None if self._device is None else torch.device(self._device)
        average = ShardedAverage(
            parallel,
            device,
            self._built_in,
            use_buffers=self._use_buffers,
            **self._kwargs,
        )
        # How many weights went into it, by which the next ones are weighed.
        average.n_averaged.fill_(int(self._saved_count))
        self._average_model, self._saved_count = average, 0

    @override
    def _swap_models(self, pl_module: LightningModule) -> None:
        self._write(super()._swap_models)

    @override
    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        self._write(super()._copy_average_to_current)

    def _write(self, into: Callable[[Any], None]) -> None:
        assert self._average_model is not None
        # Lightning's code walks over parameters: it is given this rank's parts of them.
        into(RankWeights(self._average_model.parallel))
        take_written(self._average_model.parallel)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is None:
            return
        # An average may be in float32 where the weights are not: what evaluates takes
        # the weights' dtype, and a resumed run the finer one.
        average, current = checkpoint["state_dict"], checkpoint[CURRENT_MODEL]
        dtypes = {name: value.dtype for name, value in current.items()}
        if any(value.dtype != dtypes[name] for name, value in average.items()):
            checkpoint[FINER_AVERAGE] = average
            checkpoint["state_dict"] = {
                name: value.to(dtypes[name]) for name, value in average.items()
            }

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING and self._average_model is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
        elif "averaging_state" not in checkpoint:
            rank_zero_warn(
                "The checkpoint holds no average of weights: averaging begins with the weights it holds."
            )
        else:
            self.saved = checkpoint[
                FINER_AVERAGE if FINER_AVERAGE in checkpoint else "state_dict"
            ]
            self._saved_count = checkpoint["averaging_state"]["n_averaged"]
            # The checkpoint's `state_dict` is the average; training goes on with the
            # trained weights.
            trained = {"state_dict": checkpoint[CURRENT_MODEL]}
            trainer.strategy.load_model_state_dict(
                trained, strict=pl_module.strict_loading
            )
            _load_now(self, trainer)


class _WholeModel(ShardedAverage):
    """The average as ``StochasticWeightAveraging`` sees it: in the place of a copy of
    the LightningModule."""

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.weights()


class _Stochastic(_OverShards, StochasticWeightAveraging):
    """A ``StochasticWeightAveraging`` over shards."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # Lightning has no start of an epoch where a run goes on inside of one, and the
        # schedule is swapped there.
        if trainer.fit_loop.restarted_mid_epoch:
            self.on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        # The epoch behind the last one takes statistics of BatchNorm for the average,
        # without backward passes.
        strategy: Any = trainer.strategy
        strategy.steps_have_backward = trainer.current_epoch != self.swa_end + 1

    def make_average(self, parallel: ParallelModel) -> None:
        self._average_model = _WholeModel(
            parallel, None, self._built_in, avg_fn=self._avg_fn
        )  # type: ignore[assignment]

    @staticmethod
    @override
    def update_parameters(
        average_model: Any, model: Any, n_averaged: torch.Tensor, avg_fn: Any
    ) -> None:
        weights: Any = RankWeights(average_model.parallel)
        StochasticWeightAveraging.update_parameters(
            average_model, weights, n_averaged, avg_fn
        )

    @staticmethod
    @override
    def transfer_weights(src_pl_module: Any, dst_pl_module: Any) -> None:
        weights: Any = RankWeights(src_pl_module.parallel)
        StochasticWeightAveraging.transfer_weights(src_pl_module, weights)
        take_written(src_pl_module.parallel)

    @override
    def _load_average_model_state(self, model_state: Any) -> None:
        """Do nothing: the strategy loads the average (:func:`make_averages`)."""

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is not None and trainer.state.fn == TrainerFn.FITTING:
            self.saved, state["average_model_state"] = (
                state["average_model_state"],
                None,
            )
            _load_now(self, trainer)
