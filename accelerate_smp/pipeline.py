"""Steps through pipeline stages under Accelerate.

A function under ``@accelerator.pipeline_step`` runs once for each micro-batch of its
batch on every stage, and leaves at the call of the model on all but the last. Backward
passes are over when it returns; ``accelerator.backward(loss)`` closes the window then,
and refuses a loss that was changed in between. Without stages the function is called as
it is.

    num_processes         ranks that hold different tokens, and not those of one batch that hold copies
    prepare_data_loader   ranks that share a batch read the same samples
    pipeline_step         forward and backward of a batch, in micro-batches
    backward, gather      what is refused around and inside of such a step
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from torch import Tensor

from smp_core.cluster import DATA, GRADIENTS, Axis, Layout
from smp_core.context_parallel import part_of_mean
from smp_core.engine import ParallelModel
from smp_core.outside import changed
from smp_core.pipeline import Within, loss_of, mean_of, split_batch
from smp_core.sharding.optimizer import scale_in_stages

_NAME = "a function under @accelerator.pipeline_step"
INSIDE_STEP = (
    "ranks cannot gather inside a step in pipeline stages: the others wait for this rank's part of it, or have left "
    "it; return numbers from the step and gather them behind it"
)


class PipelinedAccelerator(Accelerator):
    """An Accelerator for ranks that hold stages of a model. With one stage it is
    Accelerate's own.

    Attributes:
        layout: the axes of the run; None: nothing is sharded. While
            ``shard_degree="auto"`` waits for the first model, with the smallest
            partition groups: who shares a batch does not depend on them.
    """

    layout: Layout | None = None
    _counted: tuple[Axis, ...] | None = GRADIENTS
    _stepped: ParallelModel | None = None
    _is_inside_step = False

    @property
    def stages(self) -> int:
        """The pipeline stages of this run."""
        return 1 if self.layout is None else self.layout.pipeline

    # What Accelerate calls processes are ranks that hold something of their own; those
    # of one batch hold copies.

    @property
    def num_processes(self) -> int:
        """The ranks that hold different tokens, which ``gather`` and ``reduce`` go over
        and gradients are divided by; inside ``prepare_data_loader`` those that read
        different samples. ``dist.get_world_size()`` counts processes.
        """
        if self.layout is None or self._counted is None:
            return super().num_processes
        return self.layout.size(*self._counted)

    @property
    def process_index(self) -> int:
        """The place of this rank among :attr:`num_processes`. ``dist.get_rank()`` tells
        processes apart."""
        rank: int = super().process_index
        if self.layout is None or self._counted is None:
            return rank
        return self.layout.coordinate(rank, *self._counted)

    @property
    def is_last_process(self) -> bool:
        """The flag of the last of all processes."""
        return self.state.is_last_process

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as Accelerate does; ranks that share a batch read the same
        samples."""
        with changed(self, _counted=DATA):
            return super().prepare_data_loader(*args, **kwargs)

    @contextlib.contextmanager
    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> Iterator[Any]:
        """Split inputs as Accelerate does, between ranks that read different
        samples."""
        with changed(self, _counted=DATA):
            reader: Any = SimpleNamespace(
                num_processes=self.num_processes,
                process_index=self.process_index,
                device=self.device,
            )
        with PartialState.split_between_processes(
            reader, inputs, apply_padding
        ) as part:
            yield part

    @contextlib.contextmanager
    def profile(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Profile as Accelerate does; each process writes a file."""
        with (
            contextlib.ExitStack() as files,
            super().profile(*args, **kwargs) as profiler,
        ):
            yield profiler
            files.enter_context(changed(self, _counted=None))

    def pipeline_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function take its batch through the pipeline stages, forward and
        backward.

        Args:
            function: takes a batch first, calls the model once, and returns the loss,
                or a dict with it under "loss" and numbers beside it. It must not
                communicate.

        Returns:
            a function of the same arguments. It returns the means over micro-batches,
            on all ranks; the loss is for ``accelerator.backward``, which has nothing
            left to compute. Without gradients the batch goes forward as one, and what
            the function returned on the last stage is returned on all ranks.
        """

        @functools.wraps(function)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            handle = self._pipelined_model()
            if handle is None:
                return function(batch, *args, **kwargs)

            def of(part: Any) -> Any:
                return function(part, *args, **kwargs)

            if not torch.is_grad_enabled():
                return self.evaluate_in_stages(handle, of, batch)
            return self.train_in_stages(
                handle, of, batch, self.gradient_accumulation_steps
            )

        return step

    def _pipelined_model(self) -> ParallelModel | None:
        if self.stages == 1:
            return None
        return self.parallel  # type: ignore[attr-defined]

    def train_in_stages(
        self,
        handle: ParallelModel,
        of: Callable[[Any], Any],
        batch: Any,
        divisor: float,
        *,
        adds_up: Callable[[], bool] = lambda: False,
        name: str = _NAME,
    ) -> Any:
        """Take a batch forward and backward. Collective over the stages.

        Args:
            of: computes what a micro-batch returns.
            divisor: of the loss, in ``backward`` or before it.
            adds_up: whether losses of micro-batches are parts of the batch's; it is
                their mean otherwise. Asked on the last stage, behind ``of``.

        Returns:
            what the whole batch returned, on all ranks.
        """
        pipeline = handle.pipeline
        assert pipeline is not None
        # Parts of the batch, each of which is split again where ranks share sequences.
        count = pipeline.micro_batches
        parts, within = self.split_micro_batches(split_batch(batch, count))
        scaled = scale_in_stages(self.scaler)

        def loss_in(result: Any) -> Tensor:
            return loss_of(result, name)

        # Losses that Trainer has divided by all targets are added up; means are
        # averaged.
        def weighted(result: Any) -> Tensor:
            loss: Tensor = scaled(part_of_mean(loss_in(result)))
            return loss if adds_up() else loss / count

        def returned_by_all() -> Any:
            mean = mean_of(results, name)
            if adds_up():
                loss_in(mean).mul_(count)
            return mean

        with changed(self, _is_inside_step=True):
            calls = [functools.partial(of, part) for part in parts]
            results = pipeline.train(
                calls,
                weighted,
                1.0 / divisor,
                batch,
                within,
            )
        # What the last stage has comes to all: the mean over micro-batches, and over
        # ranks that share sequences.
        returned = self.over_shared_sequences(pipeline.share_made(returned_by_all))
        loss = loss_in(returned)
        # Backward will scale it, too.
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        # The gradient that arrives says by what the user has multiplied the loss, which
        # came too late.
        loss.requires_grad_().register_hook(
            functools.partial(_require_unchanged, divisor / scale)
        )
        self._stepped = handle
        return returned

    def evaluate_in_stages(
        self, handle: ParallelModel, of: Callable[[Any], Any], batch: Any
    ) -> Any:
        """Take a batch forward; return what the last stage's call returned, on all
        ranks. Collective over stages."""
        assert handle.pipeline is not None
        parts, within = self.split_micro_batches([batch])
        with changed(self, _is_inside_step=True), within(0):
            result = handle.pipeline.evaluate(functools.partial(of, parts[0]), batch)
            return self.over_shared_sequences(handle.pipeline.share(result))

    def split_micro_batches(self, parts: list[Any]) -> tuple[list[Any], Within]:
        """Return this rank's parts of micro-batches, and what each of them runs in:
        they as they are, where no ranks share sequences."""
        return parts, lambda _: contextlib.nullcontext()

    def over_shared_sequences(self, returned: Any) -> Any:
        """Return what a step returned of the sequences that this rank shares with
        others: it as it is, where there are none."""
        return returned

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does; the loss of a step in stages has been
        through it, and its window is closed.

        Raises:
            ValueError: a loss that was changed since, gradients that were zeroed since,
                a loss of no such step.
        """
        if self.stages == 1:
            super().backward(loss, **kwargs)
            return
        if self._is_inside_step or self._stepped is None:
            raise ValueError(
                "accelerator.backward(loss): with pipeline_parallel_degree backward passes are a part of the step; "
                f"compute the loss in {_NAME}, and call backward with what it returns"
            )
        # One backward call for each step.
        handle, self._stepped = self._stepped, None
        if not handle.window.is_open:
            raise ValueError(
                "gradients were zeroed between the step in pipeline stages, which has computed them, and "
                "accelerator.backward(loss); call zero_grad() before the step or behind optimizer.step()"
            )
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            handle.window.close()

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerate does.

        Raises:
            ValueError: inside a step in pipeline stages, which come to it one after the
                other.
        """
        if self._is_inside_step:
            raise ValueError(INSIDE_STEP)
        return super().gather(tensor)


def _require_unchanged(divisor: float, gradient: Tensor) -> None:
    if abs(gradient.item() * divisor - 1.0) > 1e-3:
        raise ValueError(
            f"the loss of a step in pipeline stages was multiplied by {gradient.item() * divisor:.6g} before backward, "
            "when its gradients were computed already; do so inside the step"
        )
