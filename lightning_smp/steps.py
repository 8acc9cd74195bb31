"""The steps of a sharded LightningModule: forward, backward, the accumulation window, the optimizer step,
evaluation.

Private names: ``Trainer._accelerator_connector``, because ``use_distributed_sampler`` is not public.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_smp.batches import refuse_joined_evaluation, require_equal_evaluation
from lightning_smp.dealt import DealtLoader, read_alike
from lightning_smp.due_validation import BeforeValidation
from lightning_smp.pipeline import PipelinedSteps
from lightning_smp.precision import adapt_precision
from lightning_smp.processes import ProcessGroupStrategy
from lightning_smp.resume import WindowStart, place_sampler
from lightning_smp.sequences import SharedSequences
from smp_core.config import SmpConfig
from smp_core.joined import JoinedLoader
from smp_core.mesh import SmpMesh
from smp_core.parallel_model import ParallelModel
from smp_core.sharding.grad_norm import settle_nonfinite


class SteppingStrategy(ProcessGroupStrategy):
    """A strategy that steps a sharded module; a subclass shards it."""

    config: SmpConfig
    _sequences: SharedSequences
    _parallel: ParallelModel | None = None
    _window_start: WindowStart | None = None
    _pipelined: PipelinedSteps | None = None
    _in_window = False
    steps_have_backward = True
    """False: what ``training_step`` returns is not taken backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before_validation = BeforeValidation()

    # The attributes for callbacks and LightningModules

    @property
    def parallel(self) -> ParallelModel:
        """The parallelized LightningModule: units, window, meter, mesh. Available once ``setup`` has run."""
        if self._parallel is None:
            raise RuntimeError("the model is not parallelized yet; strategy.parallel is there from on_fit_start on")
        return self._parallel

    @property
    def mesh(self) -> SmpMesh:
        return self.parallel.mesh

    @property
    def window(self) -> Any:
        """The :class:`smp_core.sharding.accumulation.AccumulationWindow`."""
        return self.parallel.window

    @property
    def open_window(self) -> WindowStart | None:
        """The place where the open window has begun; None between windows."""
        return self._window_start if self.window.is_open else None

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else adapt_precision(plugin, lambda: self.parallel)

    # Steps

    def _run_step(self, method: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
        with context, self._sequences.active():
            return self.parallel.run_as_forward(method, *args, **kwargs)

    def _evaluate(self, method: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
        with self.parallel.meter.outside_steps():
            if self._pipelined is not None:
                with context:
                    run = functools.partial(self.parallel.run_as_forward, method)
                    return self._pipelined.evaluate(run, args, kwargs)
            return self._sequences.outputs(self._run_step(method, context, *args, **kwargs))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        place_sampler(dataloader)
        if isinstance(dataloader, JoinedLoader):
            dataloader.meet()
        if self._is_dealt_out(dataloader):
            read_alike(dataloader)
            places = self.distributed_sampler_kwargs
            need_alike = self.config.context_parallel_degree == 1  # else the first context peer's batch counts
            return DealtLoader(
                dataloader,
                places["num_replicas"],
                places["rank"],
                need_alike,
                cuts=lambda: not self._trainer.training or self.joined is None,
            )
        return dataloader

    def _is_dealt_out(self, loader: object) -> TypeGuard[DataLoader[Any]]:
        # A prediction gives every rank all results; one that is written by a callback is the user's to deal out.
        trainer = self._trainer
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
            return False
        is_asked_for = trainer._accelerator_connector.use_distributed_sampler
        return is_asked_for and self.world_size > 1 and trainer.state.fn != TrainerFn.PREDICTING

    @property
    def joined(self) -> JoinedLoader | DealtLoader | None:
        """The training loader, where its batches have weights: ranks may run out of them before others."""
        loader = self._trainer.train_dataloader
        if isinstance(loader, JoinedLoader):
            return loader
        if not isinstance(loader, DealtLoader) or self.config.context_parallel_degree > 1:
            return None  # where sequences are shared, targets are counted
        assert self.lightning_module is not None
        fetches_itself = "dataloader_iter" in inspect.signature(self.lightning_module.training_step).parameters
        return None if fetches_itself else loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch as Lightning does; where sequences are shared, return this rank's part of the first context
        peer's batch.
        """
        return self._sequences.part_of(super().batch_to_device(batch, device, dataloader_idx))

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._pipelined is not None:
            self._pipelined.before_backward(last=not self._in_window)
        with self._sequences.active():
            loss = self._sequences.weighted(closure_loss)
            if self.joined is not None:
                loss = loss * self.joined.weight
            return super().backward(loss, *args, **kwargs)

    def full_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather the unsplit sequence of a tensor that has this rank's tokens along ``dim``, inside a step. Collective;
        no gradient.
        """
        return self._sequences.full(tensor, dim)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._pipelined is not None and not self.steps_have_backward:
            with torch.no_grad():
                return self._pipelined.evaluate(self._micro_batch, args, kwargs)
        if self._pipelined is not None:
            windows = self._trainer.accumulate_grad_batches
            weight = 1.0 if self.joined is None else self.joined.weight
            batch = (*args, *kwargs.values())
            return self._pipelined.train(self._micro_batch, self.optimizers, windows, batch, weight)
        context = self.precision_plugin.train_step_context()
        return self._run_step(self.lightning_module.training_step, context, *args, **kwargs)

    def _micro_batch(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.train_step_context()
        return self._run_step(self.lightning_module.training_step, context, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.val_step_context()
        return self._evaluate(self.lightning_module.validation_step, context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.test_step_context()
        return self._evaluate(self.lightning_module.test_step, context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.predict_step_context()
        return self._evaluate(self.lightning_module.predict_step, context, *args, **kwargs)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        before, self._in_window = self._in_window, True
        try:
            with self.window.accumulate():
                yield
        finally:
            self._in_window = before

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def closure_and_close() -> Any:
            result = closure()
            # Closed already unless every backward pass ran inside block_backward_sync (manual optimization).
            self.window.close()
            on_nonfinite = self.config.on_nonfinite_grad_norm
            if on_nonfinite != "ignore":
                parameters = self.parallel.stepped(p for group in optimizer.param_groups for p in group["params"])
                settle_nonfinite(parameters, self.parallel.grad_norm(parameters=parameters), on_nonfinite)
            self._before_update()
            return result

        result = super().optimizer_step(optimizer, closure_and_close, model, **kwargs)
        self.parallel.meter.close_step()
        if self._watch is not None:
            self._watch.step += 1
        return result

    def _before_update(self) -> None:
        """Wait for whoever still reads parameters or optimizer states; they are about to change."""

    # An evaluation computes with rank 0's BatchNorm statistics on every rank, and with the weights at its beginning
    # (averages may have replaced them, also in the middle of a window), and leaves no stale unsharded ones.

    def _begin_evaluation(self, limit: str, batches: Any, loaders: Any) -> None:
        refuse_joined_evaluation(loaders)
        require_equal_evaluation(limit, batches, self.mesh)
        self._before_update()
        self.parallel.reshard()
        self.parallel.broadcast_buffers()

    @override
    def on_validation_start(self) -> None:
        trainer = self._trainer
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._begin_evaluation("limit_val_batches", batches, trainer.val_dataloaders)

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation("limit_test_batches", self._trainer.num_test_batches, self._trainer.test_dataloaders)

    @override
    def on_predict_start(self) -> None:
        trainer = self._trainer
        self._begin_evaluation("limit_predict_batches", trainer.num_predict_batches, trainer.predict_dataloaders)

    def _end_evaluation(self) -> None:
        self.parallel.require_same_collectives()
        self.parallel.reshard()

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()
