"""Steps of a LightningModule that goes through pipeline stages.

``training_step`` runs once for each micro-batch on every stage, and leaves at the call
of the model on all but the last. What the last stage returned and logged is then what
all ranks return and log: the mean over micro-batches, as of one batch. Lightning calls
training_step, zero_grad and backward in this order, and backward passes are over when
the first of them returns: so gradients are zeroed before, and the later zero_grad is
passed over.

Private names of torchmetrics: ``_forward_cache``, what a metric gave for the present
batch, which Lightning reads; ``_update_count`` and ``_computed``, by which a metric
knows whether there is something to compute.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_smp.module_changes import Kept
from lightning_smp.sequences import SharedSequences
from smp_core.checkpoint import map_tensors
from smp_core.engine import ParallelModel
from smp_core.outside import changed
from smp_core.pipeline import is_number, loss_of, mean_of, split_batch
from smp_core.sharding.optimizer import scale_in_stages

logger = logging.getLogger("smp")

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def check_module(module: LightningModule) -> None:
    """Refuse what a pipelined module cannot have.

    Raises:
        ValueError: manual optimization, a hook of its own in the place of ``zero_grad``
            or ``backward``, a callback that adds parameters to the optimizer by their
            values.
    """
    trainer: Any = module.trainer
    # Other stages' parameters are without values here.
    for callback in trainer.callbacks if trainer.training else ():
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"pipeline_parallel_degree: {type(callback).__name__} compares the values of parameters with those in "
                "the optimizer, and a stage has none of other stages' parameters; leave the callback out, or write "
                "pipeline_parallel_degree=1"
            )
    if not module.automatic_optimization:
        raise ValueError(
            "pipeline_parallel_degree is not built yet together with manual optimization, in which backward is called "
            "in the middle of training_step; write automatic_optimization=True"
        )
    # Overridden in the module's class: what it does would come too late.
    for name in ("optimizer_zero_grad", "backward"):
        if getattr(type(module), name) is not getattr(LightningModule, name):
            raise ValueError(
                f"pipeline_parallel_degree: {name} of the LightningModule would be called behind the backward passes, "
                "which are over when training_step returns; leave it out"
            )


class PipelinedSteps:
    """The steps of one run.

    Args:
        parallel: the model, with a pipeline.
        module: that logs.
        sequences: splits micro-batches where ranks share sequences.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        module: LightningModule,
        sequences: SharedSequences,
    ) -> None:
        # Lightning's plugin for "16-mixed" has one.
        self._scaled = scale_in_stages(
            getattr(module.trainer.strategy.precision_plugin, "scaler", None)
        )
        assert parallel.pipeline is not None
        self._sequences = sequences
        self._parallel, self._module, self._pipeline = (
            parallel,
            module,
            parallel.pipeline,
        )
        self._zero_grads: list[Optimizer] = []
        self._has_warned = False

    def train(
        self,
        run: Callable[..., Any],
        optimizers: Sequence[Optimizer],
        windows: int,
        args: tuple[Any, ...],
        weight: float = 1.0,
    ) -> Any:
        """Take a batch through all stages, forward and backward.

        Args:
            run: runs the module's training_step.
            optimizers: zeroed before the first batch of a window.
            windows: batches of an optimizer step.
            args: of training_step; the batch first.
            weight: of the batch's loss.

        Returns:
            what training_step returns of an unsplit batch: the loss, or the mapping
            that it was in. The loss is a leaf that requires a gradient, for Lightning's
            own call of backward.

        Raises:
            ValueError: a batch that cannot be cut, a step that returns no loss.
        """
        # Cut into micro-batches; where ranks share sequences each of them is split
        # again.
        batch, *rest = args
        count = self._pipeline.micro_batches
        parts, splits = self._sequences.split_each(split_batch(batch, count))
        self._let_zero()
        # Before the first batch of a window: when Lightning zeroes, gradients of this
        # batch are there already.
        if not self._parallel.window.is_open:
            for optimizer in optimizers:
                optimizer.zero_grad()
        logged, kept = _Logged(self._module), Kept(self._module)
        # What the step logs is noted instead of logged, micro-batch by micro-batch.
        calls = [
            functools.partial(logged.during, functools.partial(run, part, *rest))
            for part in parts
        ]
        results = self._pipeline.train(
            calls,
            lambda result: self._scaled(
                self._sequences.weighted(_loss_of(result)) * weight
            ),
            1.0 / (count * windows),
            batch,
            lambda number: self._sequences.during(splits[number]),
        )
        returned, log, changes = self._pipeline.share_made(
            lambda: (
                mean_of(results, "training_step"),
                logged.combined(),
                (kept.changes(), logged.updates()),
            )
        )
        self._warn_of_kept(changes[0])
        # All ranks go on with what the last stage has: its loss, what it logged, and
        # what its step left on the module.
        self._take(kept, logged, *changes)
        logged.replay(log, self._device)
        for optimizer in optimizers:
            # For one call, on this instance: the gradients of this step are there.
            optimizer.zero_grad = _passed_over  # type: ignore[method-assign]
            self._zero_grads.append(optimizer)
        # Lightning calls backward on it, which finds a leaf and computes nothing.
        _loss_of(returned).requires_grad_()
        return returned

    def before_backward(self, last: bool) -> None:
        """Show gradients, where Lightning believes them to come: the window closes with
        its last batch."""
        self._let_zero()
        if last:
            self._parallel.window.close()

    def evaluate(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take a batch forward through all stages; return what the last one's step
        returned, on all ranks."""
        logged, kept = _Logged(self._module), Kept(self._module)
        batch, *rest = args
        parts, splits = self._sequences.split_each([batch])
        # The batch is one micro-batch here: nothing is kept for a backward pass.
        call = functools.partial(
            logged.during, functools.partial(run, *parts, *rest, **kwargs)
        )
        with self._sequences.during(splits[0]):
            result = self._pipeline.evaluate(call, [*args, *kwargs.values()])
            returned, log, changes = self._pipeline.share_made(
                lambda: (result, logged.combined(), (kept.changes(), logged.updates()))
            )
            self._take(kept, logged, *changes)
            logged.replay(log, self._device)
            return self._sequences.outputs(returned)

    def require_whole_batches(self, what: str) -> None:
        """Refuse what compares the samples of a batch with one another where steps see
        micro-batches.

        Raises:
            ValueError: a batch has several.
        """
        if self._pipeline.micro_batches > 1:
            raise ValueError(
                f"{what} in a step in pipeline stages sees micro-batches: a loss that compares samples with one "
                f"another would leave out those of the other {self._pipeline.micro_batches - 1}; write "
                "pipeline={'microbatches': 1}, or pipeline_parallel_degree=1"
            )

    def _warn_of_kept(self, changes: dict[str, Any]) -> None:
        """Say once what a step has changed for each micro-batch."""
        count = self._pipeline.micro_batches
        if changes and count > 1 and not self._has_warned:
            self._has_warned = True
            if self._parallel.mesh.rank == 0:
                logger.warning(
                    "pipeline.microbatches=%s: training_step changes what the LightningModule keeps (%s), here once "
                    "for each micro-batch and on the last stage; numbers are not those of one process; count in "
                    "on_train_batch_start or on_train_batch_end, or write pipeline={'microbatches': 1}",
                    count,
                    ", ".join(sorted(changes)[:3]),
                )

    def _take(
        self,
        kept: Kept,
        logged: _Logged,
        changes: dict[str, Any],
        updates: dict[str, int],
    ) -> None:
        # The last stage has them itself.
        if self._parallel.mesh.stage < self._pipeline.stages.count - 1:
            kept.take(changes)
            logged.take_updates(updates)

    @property
    def _device(self) -> torch.device:
        return self._parallel.mesh.device

    def _let_zero(self) -> None:
        for optimizer in self._zero_grads:
            vars(optimizer).pop("zero_grad", None)
        self._zero_grads.clear()


def _loss_of(result: Any) -> Tensor:
    return loss_of(result, "training_step")


def _passed_over(*_: Any, **__: Any) -> None:
    pass


@dataclass(frozen=True)
class _MetricOf:
    """Stands for a metric of the module: its name, and what its last call gave."""

    name: str
    last: Any = None


@dataclass(frozen=True)
class _Call:
    """A call of ``self.log``: its arguments by name, ``value`` among them."""

    arguments: dict[str, Any]


class _Logged:
    """The values that a module logs in the micro-batches of one step."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        # The class's, since the instance's may be replaced by an outer call.
        self._log = type(module).log
        self._signature = inspect.signature(self._log)
        # By their ids: the hash of a metric depends on its state.
        self._metrics = {
            name: inner
            for name, inner in module.named_modules()
            if isinstance(inner, Metric)
        }
        self._names = {id(metric): name for name, metric in self._metrics.items()}
        self._micro_batches: list[list[_Call]] = []

    def during(self, run: Callable[[], Any]) -> Any:
        """Run a micro-batch's step; what it logs is kept."""
        calls: list[_Call] = []

        def note(*args: Any, **kwargs: Any) -> None:
            arguments = dict(
                self._signature.bind(self._module, *args, **kwargs).arguments
            )
            arguments.pop("self")
            value = arguments["value"]
            # Metrics are noted by name: the other stages have metrics of their own.
            if isinstance(value, Metric):
                if id(value) not in self._names:
                    raise ValueError(
                        f"self.log({arguments['name']!r}, ...) was given a {type(value).__name__} that is no attribute "
                        "of the LightningModule; make it one in __init__"
                    )
                arguments["value"] = _MetricOf(self._names[id(value)])
            elif not is_number(value):
                raise ValueError(
                    f"self.log({arguments['name']!r}, ...) was given a {type(value).__name__}; with "
                    "pipeline_parallel_degree numbers and torchmetrics can be logged, which the last stage sends to "
                    "the others"
                )
            if isinstance(value, Tensor):
                arguments["value"] = value.detach().cpu()
            calls.append(_Call(arguments))

        # The module logs into this list while the step runs.
        with changed(self._module, log=note):
            result = run()
        self._micro_batches.append(calls)
        return result

    def combined(self) -> list[_Call]:
        """Return one call for the calls of all micro-batches, each name's by the
        reduction that it was logged with."""
        # One call of each micro-batch goes into one: they have to be the same ones in
        # the same order.
        names = []
        for calls in self._micro_batches:
            names.append([call.arguments["name"] for call in calls])
        differing = [each for each in names if each != names[0]]
        if differing:
            raise ValueError(
                f"self.log was called for {names[0]} in one micro-batch of a batch and for {differing[0]} in another; "
                "log the same in each"
            )
        return [
            self._with_last(_combine(list(calls)))
            for calls in zip(*self._micro_batches, strict=True)
        ]

    def _with_last(self, call: _Call) -> _Call:
        """Return a call with what a metric gave last, which Lightning logs for a
        step."""
        value, name = call.arguments["value"], call.arguments["name"]
        # Lightning's defaults: on_step in training, on_epoch in evaluation.
        on_step = call.arguments.get("on_step")
        in_training = self._module.trainer.training
        if not isinstance(value, _MetricOf) or not (
            in_training if on_step is None else on_step
        ):
            return call
        if len(self._micro_batches) > 1:
            raise ValueError(
                f"self.log({name!r}, ...) was given a {type(self._metrics[value.name]).__name__} for each "
                f"step, which sees pipeline.microbatches={len(self._micro_batches)} parts of its batch one by one; "
                "write on_step=False, on_epoch=True, or pipeline={'microbatches': 1}"
            )
        last = self._metrics[value.name]._forward_cache
        return _Call({**call.arguments, "value": replace(value, last=last)})

    def updates(self) -> dict[str, int]:
        """Return how often each metric of the module was updated."""
        return {name: metric.update_count for name, metric in self._metrics.items()}

    def take_updates(self, updates: dict[str, int]) -> None:
        """Count the last stage's updates here, so that a metric is computed again
        behind them, with its state."""
        # torchmetrics warns of a compute without updates, and keeps what it computed:
        # both would be wrong here.
        for name, metric in self._metrics.items():
            if metric.update_count != updates[name]:
                metric._update_count, metric._computed = updates[name], None

    def replay(self, calls: list[_Call], device: torch.device) -> None:
        """Log on this rank what the last stage logged."""
        # Through the module's own log, so that Lightning's checks and reductions apply.
        for call in calls:
            arguments = dict(call.arguments)
            value = arguments["value"]
            if isinstance(value, Tensor):
                arguments["value"] = value.to(device)
            elif isinstance(value, _MetricOf):
                metric: Any = self._metrics[value.name]
                if value.last is not None:
                    metric._forward_cache = map_tensors(
                        value.last, lambda tensor: tensor.to(device)
                    )
                arguments["value"] = metric
            self._module.log(**arguments)


def _combine(calls: list[_Call]) -> _Call:
    first = calls[0].arguments
    if isinstance(first["value"], _MetricOf):
        return calls[0]
    reduction = first.get("reduce_fx", "mean")
    name = (
        reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    )
    # A reduction of the user's own may need all values at once.
    if len(calls) > 1 and name not in _REDUCTIONS:
        raise ValueError(
            f"self.log({first['name']!r}, reduce_fx={reduction!r}): allowed with pipeline_parallel_degree are "
            f"{', '.join(map(repr, _REDUCTIONS))}"
        )
    if len(calls) == 1:
        return calls[0]
    # One number of several micro-batches: with their sizes, if all have one.
    values = torch.stack(
        [torch.as_tensor(call.arguments["value"]).reshape(()) for call in calls]
    )
    if name == "mean" and not values.is_floating_point():
        values = values.float()
    sizes = [call.arguments.get("batch_size") for call in calls]
    combined = {**first, "value": _REDUCTIONS[name](values)}
    if all(size is not None for size in sizes):
        combined["batch_size"] = sum(sizes)
        if name == "mean":
            weights = torch.tensor(sizes, dtype=values.dtype)
            combined["value"] = (values * weights).sum() / weights.sum()
    return _Call(combined)
