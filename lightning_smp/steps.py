"""The steps of a sharded LightningModule: forward, backward, the accumulation window,
the optimizer step, evaluation.

Private names: ``Trainer._accelerator_connector``, because ``use_distributed_sampler``
is not public.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_smp.dealt import DealtLoader, read_alike
from lightning_smp.due_validation import BeforeValidation
from lightning_smp.pipeline import PipelinedSteps
from lightning_smp.precision import adapt_precision
from lightning_smp.processes import ProcessGroupStrategy
from lightning_smp.resume import (
    KeepsPlace,
    WindowStart,
    place_sampler,
    tell_place_of_training,
)
from lightning_smp.sequences import SharedSequences
from lightning_smp.uneven import Evaluations, deal, require_equal_evaluation
from smp_core.cluster import SmpMesh
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.outside import changed
from smp_core.sharding.optimizer import settle_nonfinite
from smp_core.torch_facts import parameters_of
from smp_core.watch import JoinedLoader, gather_with_gradient, report_equal_terms


class SteppingStrategy(ProcessGroupStrategy):
    """A strategy that steps a sharded module; a subclass shards it."""

    config: SmpConfig
    _sequences: SharedSequences
    _parallel: ParallelModel | None = None
    _window_start: WindowStart | None = None
    _has_stepped = True  # an optimizer, since then
    _pipelined: PipelinedSteps | None = None
    _in_window = False
    evaluations: Evaluations | None = None
    _deals_as: tuple[int, int] | None = None
    steps_have_backward = True
    """False: what ``training_step`` returns is not taken backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before_validation = BeforeValidation()

    # The attributes for callbacks and LightningModules

    @property
    def parallel(self) -> ParallelModel:
        """The parallelized LightningModule: units, window, meter, mesh. Available once
        ``setup`` has run."""
        if self._parallel is None:
            raise RuntimeError(
                "the model is not parallelized yet; strategy.parallel is there from on_fit_start on"
            )
        return self._parallel

    @property
    def mesh(self) -> SmpMesh:
        return self.parallel.mesh

    # Who counts what (smp_core/watch/counting.py)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples: for collectives of your own, and
        counts of samples."""
        return self.mesh.data_group

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples."""
        return self.mesh.data_size

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that read different samples."""
        return self.mesh.data_rank

    @property
    @override
    def world_size(self) -> int:
        """The number of ranks that hold different tokens: what numbers are added up
        over, and the divisor of gradients. ``dist.get_world_size()`` counts processes.
        """
        # Ranks of one tensor group, and of one pipeline, compute the same samples:
        # their numbers would be counted several times.
        of_one_batch = (
            self.config.tensor_parallel_degree * self.config.pipeline_parallel_degree
        )
        return super().world_size // of_one_batch

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks that hold different tokens, or ``group``:
        ``"mean"``, ``"sum"``, ... or a ``ReduceOp``; other objects stay.
        """
        if self._parallel is None or not torch.is_tensor(tensor):
            return super().reduce(tensor, group, reduce_op)
        # Lightning passes words, users may pass operators.
        is_sum = reduce_op == dist.ReduceOp.SUM or str(reduce_op).lower() == "sum"
        is_mean = reduce_op in (None, dist.ReduceOp.AVG) or str(reduce_op).lower() in (
            "mean",
            "avg",
        )
        # Context ranks have parts of one batch: a number that each of them has in full
        # would be summed too often.
        if group is None and is_sum and tensor.is_floating_point():
            instead = "self.log(..., sync_dist_group=self.trainer.strategy.data_group)"
            report_equal_terms(tensor, self.mesh, "a sum that is logged", instead)
        if (
            (is_sum or is_mean)
            and self.evaluations is not None
            and self.evaluations.is_uneven
        ):
            # Ranks without a batch take part, and count nothing.
            weight = torch.tensor(self.evaluations.weight, device=tensor.device)
            total = super().reduce(tensor * weight, group, "sum")
            if is_sum:
                return total
            # A group may have no batch at all, and its number is shown nowhere.
            return total / super().reduce(weight, group, "sum").clamp(min=1)
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        """Stack a tensor of the ranks that hold different tokens, or of ``group``.
        Collective over them.

        ``LightningModule.all_gather`` gives the world where it was given no group, and
        so means them too.

        Raises:
            ValueError: a loss over samples of all ranks, of which pipeline stages
                compute micro-batches.
        """
        # A gather with gradients means a loss over the samples of all ranks, and a
        # micro-batch has a part of them.
        if self._pipelined is not None and sync_grads and torch.is_grad_enabled():
            self._pipelined.require_whole_batches(
                "self.all_gather(..., sync_grads=True)"
            )
        if group is None or group is dist.group.WORLD:
            group = self.counting_group
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            return gather_with_gradient(tensor, group)

    @property
    def window(self) -> Any:
        """The :class:`smp_core.sharding.gradients.accumulation.AccumulationWindow`."""
        return self.parallel.window

    @property
    def open_window(self) -> WindowStart | None:
        """The place where the open window has begun; None between windows."""
        is_open: bool = self.parallel.window.is_open
        if (
            not is_open
            and not self._module.automatic_optimization
            and not self._has_stepped
        ):
            # Manual optimization without block_backward_sync: gradients wait in .grad.
            is_open = any(
                p.grad is not None for p in self._module.parameters()
            ) or bool(self.window.held())
        return self._window_start if is_open else None

    @ProcessGroupStrategy.precision_plugin.setter  # type: ignore[attr-defined,untyped-decorator]
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if plugin is None else adapt_precision(plugin, lambda: self.parallel)
        )

    # Steps

    def _run_step(
        self,
        method: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # As if it were forward: parameters that belong to no unit of their own are
        # gathered while the method runs.
        shared: AbstractContextManager[None] = contextlib.nullcontext()
        if self._sequences.split is not None:
            shared = self._sequences.active()
        with context(), shared:
            return self.parallel.run_as_forward(method, *args, **kwargs)

    def _evaluate(
        self,
        method: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self.parallel.meter.outside_steps():
            if self._pipelined is not None:
                with context():
                    run = functools.partial(self.parallel.run_as_forward, method)
                    return self._pipelined.evaluate(run, args, kwargs)
            return self._sequences.outputs(
                self._run_step(method, context, *args, **kwargs)
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # In an evaluation Lightning's sampler deals to one rank, without repeating
        # samples, and is dealt again below.
        size, rank = self._reads_as
        if self.evaluations is not None and self.evaluations.prepares:
            self._deals_as = (size, rank)
            size, rank = 1, 0  # see lightning_smp/uneven.py
        return {"num_replicas": size, "rank": rank}

    @override
    def barrier(self, name: str | None = None) -> None:
        # Lightning's barrier behind the hooks that make loaders is the only sign that
        # these are over.
        super().barrier(name)
        if (
            self.evaluations is not None
            and name is not None
            and name.endswith("_dataloader()")
        ):
            self.evaluations.prepares = self.evaluations.sets_up

    @property
    def _reads_as(self) -> tuple[int, int]:
        """The number of ranks that read different samples, and this one's place; before
        there is a mesh, too."""
        # Context and tensor ranks read the same batch, and are neighbours; so do
        # stages, which are far apart.
        tensor = self.config.tensor_parallel_degree
        context = self.config.context_parallel_degree
        of_stage = self.world_size * tensor
        return self.world_size // context, self.global_rank % of_stage // (
            context * tensor
        )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        # Streams are dealt out by batches; other loaders have had a sampler from
        # Lightning.
        deals_as, self._deals_as = self._deals_as, None
        evaluates = self.evaluations is not None and self.evaluations.prepares
        if self._is_dealt_out(dataloader):
            read_alike(dataloader)
            # Context peers may read unlike batches: the first one's counts.
            need_alike = self.config.context_parallel_degree == 1
            dataloader = DealtLoader(
                dataloader,
                *self._reads_as,
                need_alike,
                cuts=lambda: self.joined is None,
                once=evaluates,
            )
        elif (
            int(os.environ.get("PL_SEED_WORKERS", "0"))
            and getattr(dataloader, "worker_init_fn", self) is None
        ):
            # Lightning's would be of the process: ranks of one batch would draw
            # different augmentations.
            dataloader.worker_init_fn = functools.partial(
                pl_worker_init_function, rank=self._reads_as[1]
            )
        if evaluates:
            assert self.evaluations is not None
            if deals_as is not None:
                deal(dataloader, *deals_as)
            return self.evaluations.process(dataloader)
        # Training loaders get samplers that can begin later, or tell the place of
        # training.
        place_sampler(dataloader)
        if isinstance(dataloader, KeepsPlace):
            tell_place_of_training(dataloader)
        if isinstance(dataloader, JoinedLoader):
            dataloader.meet()
        return dataloader

    def _is_dealt_out(self, loader: object) -> TypeGuard[DataLoader[Any]]:
        # A prediction gives every rank all results; one that is written by a callback
        # is the user's to deal out.
        trainer = self._trainer
        if not isinstance(loader, DataLoader) or not isinstance(
            loader.dataset, IterableDataset
        ):
            return False
        is_asked_for = trainer._accelerator_connector.use_distributed_sampler
        return (
            is_asked_for
            and dist.get_world_size() > 1
            and trainer.state.fn != TrainerFn.PREDICTING
        )

    @property
    def joined(self) -> JoinedLoader | DealtLoader | None:
        """The training loader, where its batches have weights: ranks may run out of
        them before others."""
        loader = self._trainer.train_dataloader
        if isinstance(loader, JoinedLoader):
            return loader
        if (
            not isinstance(loader, DealtLoader)
            or self.config.context_parallel_degree > 1
        ):
            return None  # where sequences are shared, targets are counted
        # With `dataloader_iter` a step takes batches when it likes: which one is
        # present is not known.
        fetches_itself = (
            "dataloader_iter"
            in inspect.signature(self._module.training_step).parameters
        )
        return None if fetches_itself else loader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch as Lightning does; where sequences are shared, return this
        rank's part of the first context peer's batch.
        """
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._sequences.context is None:
            return moved
        # In an evaluation the split counts targets, of which a repeated batch has none.
        weight = None
        if self.evaluations is not None and not self._trainer.training:
            weight = self.evaluations.weight
        return self._sequences.part_of(moved, weight)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._pipelined is not None:
            self._pipelined.before_backward(last=not self._in_window)
        with self._sequences.active():
            loss = self._sequences.weighted(closure_loss)
            if self.joined is not None:
                loss = loss * self.joined.weight
            return super().backward(loss, *args, **kwargs)

    def weighted_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the present batch as its backward pass starts from it:
        where ranks share sequences, this rank's part of the mean over all of their
        targets.
        """
        with self._sequences.active():
            return self._sequences.weighted(loss)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean over all samples of what each rank's step returned as the
        loss of the present batch. Collective."""
        loss = loss.detach()
        # Stages return the mean over a whole batch.
        part = loss if self._pipelined is not None else self.weighted_loss(loss)
        weight = 1.0 if self.joined is None else self.joined.weight
        mean: Tensor = self.reduce(part * weight)
        return mean

    def _note_mean_loss(
        self, callback: Any, trainer: Any, module: Any, outputs: Any, *arguments: Any
    ) -> None:
        is_tensor = isinstance(outputs, torch.Tensor)
        loss = outputs if is_tensor else (outputs or {}).get("loss")
        if loss is not None:
            outputs = {"loss": self.mean_loss(loss)}
        type(callback).on_train_batch_end(
            callback, trainer, module, outputs, *arguments
        )

    def full_sequence(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Gather the unsplit sequence of a tensor that has this rank's tokens along
        ``dim``, inside a step. Collective; no gradient.
        """
        return self._sequences.full(tensor, dim)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = functools.partial(
            self._run_step,
            self._module.training_step,
            self.precision_plugin.train_step_context,
        )
        # An epoch that only takes statistics (StochasticWeightAveraging's last) goes
        # forward through the stages.
        if self._pipelined is not None and not self.steps_have_backward:
            with torch.no_grad():
                return self._pipelined.evaluate(step, args, kwargs)
        if self._pipelined is not None:
            windows = self._trainer.accumulate_grad_batches
            weight = 1.0 if self.joined is None else self.joined.weight
            batch = (*args, *kwargs.values())
            return self._pipelined.train(step, self.optimizers, windows, batch, weight)
        return step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self._evaluate(self._module.validation_step, context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self._evaluate(self._module.test_step, context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self._evaluate(self._module.predict_step, context, *args, **kwargs)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with changed(self, _in_window=True), self.window.accumulate():
            yield

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
            # Closed already unless every backward pass ran inside block_backward_sync
            # (manual optimization).
            self.parallel.window.close()
            on_nonfinite = self.config.on_nonfinite_grad_norm
            if on_nonfinite != "ignore":
                # The norm of what this optimizer steps, where its masters have the
                # gradients.
                parameters = self.parallel.stepped(parameters_of(optimizer))
                settle_nonfinite(
                    parameters,
                    self.parallel.grad_norm(parameters=parameters),
                    on_nonfinite,
                )
            self._before_update()
            return result

        # The closure runs forward and backward; Lightning clips behind it, when
        # gradients are complete.
        result = super().optimizer_step(optimizer, closure_and_close, model, **kwargs)
        self._has_stepped = True
        self.parallel.meter.close_step()
        if self._watch is not None:
            self._watch.step += 1
        return result

    def _before_update(self) -> None:
        """Wait for copies of parameters and optimizer states, which are about to
        change."""

    # An evaluation computes with rank 0's BatchNorm statistics on every rank, and with
    # the weights at its beginning (averages may have replaced them, also in the middle
    # of a window), and leaves no stale unsharded ones.

    def _begin_evaluation(self, limit: str, batches: Any) -> None:
        # Ranks that gather parameters together have to take as many steps.
        require_equal_evaluation(limit, batches, self.mesh)
        self._before_update()
        self.parallel.reshard()
        self.parallel.broadcast_buffers()

    @override
    def on_validation_start(self) -> None:
        trainer = self._trainer
        batches = (
            trainer.num_sanity_val_batches
            if trainer.sanity_checking
            else trainer.num_val_batches
        )
        self._begin_evaluation("limit_val_batches", batches)

    @override
    def on_test_start(self) -> None:
        self._begin_evaluation("limit_test_batches", self._trainer.num_test_batches)

    @override
    def on_predict_start(self) -> None:
        self._begin_evaluation(
            "limit_predict_batches", self._trainer.num_predict_batches
        )

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


_HOOKS_BEFORE_STEPS = (
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("configure_gradient_clipping", "optimizer_step"),
)


def hooks_before_steps(trainer: Trainer) -> Iterator[Callable[..., Any]]:
    """Yield what a user's module and callbacks do between backward passes and steps."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (trainer.lightning_module, *callbacks):
        for name in _HOOKS_BEFORE_STEPS:
            hook = getattr(owner, name, None)
            if callable(hook) and getattr(hook, "__module__", "").split(".")[0] not in (
                "lightning",
                "lightning_smp",
            ):
                yield hook
