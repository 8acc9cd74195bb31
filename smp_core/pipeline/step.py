"""Pipeline: a step of all stages, made of calls of the user's own code, one for each
micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_core.checkpoint import map_tensors
from smp_core.cluster import Axis, SmpMesh
from smp_core.comm import CommMeter
from smp_core.config import Pipeline as Recipe
from smp_core.pipeline.batches import BatchKind, SameBatches
from smp_core.pipeline.messages import Activations, Messages, in_words
from smp_core.pipeline.randomness import StepSeeds
from smp_core.pipeline.schedule import run
from smp_core.pipeline.stage import Stage, StageDone, TriesCall
from smp_core.pipeline.stand_ins import Played
from smp_core.pipeline.times import StageTimes
from smp_core.plan import Stages, Step, computations, forward_only, with_messages
from smp_core.torch_facts import caches_in, is_absent, model_parameter
from smp_core.watch import here

Within = Callable[[int], AbstractContextManager[None]]
"""micro-batch -> what its forward and backward computations run in."""


class HoldsGradients(Protocol):
    """The interface of what holds a step's gradients."""

    def batch_in_stages(self) -> AbstractContextManager[None]: ...


class Beside(Protocol):
    """The interface of a tensor that travels beside activations, to which each chunk
    adds.

    Attributes:
        arrived: what the chunk before gave; None of the first one. Set before a chunk's
            forward.
    """

    arrived: Tensor | None

    def given(self) -> Tensor:
        """Return it with this chunk's part, behind its forward."""
        ...


@dataclass(frozen=True)
class _Failed:
    """Stands for what the last stage would have shared."""

    is_refusal: bool
    text: str

    def fail(self, stage: int) -> NoReturn:
        raise (ValueError if self.is_refusal else RuntimeError)(
            f"pipeline stage {stage}: {self.text}"
        )


class Pipeline:
    """The pipeline that this rank has one stage of.

    Attributes:
        stages: what each has of the model.
        micro_batches: parts of each batch.
        times: when this stage computes.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: SmpMesh,
        stages: Stages,
        played: Mapping[str, Played],
        recipe: Recipe,
        meter: CommMeter,
        dtype: torch.dtype | None,
        window: Callable[[], HoldsGradients],
        passing_by: Callable[[Container[str]], AbstractContextManager[None]],
        replaced: Callable[[Tensor], None],
        try_call: TriesCall,
        try_output: Callable[[nn.Module, Any], None],
        beside: Beside | None = None,
    ) -> None:
        self.stages = stages
        self._mesh = mesh
        self._window = window
        self._passing_by = passing_by
        assert isinstance(recipe.microbatches, int)
        self.micro_batches = recipe.microbatches
        self.group = mesh.group(Axis.PIPELINE)
        self.times = StageTimes()
        self._batches, self._seeds = SameBatches(mesh), StepSeeds(mesh.device)
        # Its callbacks seed what is drawn, by micro-batch and chunk.
        self._stage = Stage(
            model,
            stages,
            mesh.stage,
            played,
            dtype=dtype,
            outside=self._outside_of_steps,
            entered=lambda: self._seeds.begin_blocks(*self._place),
            passed=lambda count: self._seeds.begin_again(self._place[0], count),
            replaced=replaced,
            try_call=try_call,
            try_output=try_output,
        )
        self._place = (0, 0)  # micro-batch and chunk at present
        self._beside = beside
        # With several chunks for each stage, the last stage sends to the first.
        goes_around = stages.n_chunks > stages.count
        self._messages = Messages(
            mesh, meter, goes_around, parts=1 if beside is None else 2
        )
        columns = range(stages.count)
        # The order of messages follows from the computations of all stages, so each
        # rank knows all of them.
        training = [
            computations(recipe.schedule, stages.count, stage, self.micro_batches)
            for stage in columns
        ]
        evaluation = [
            forward_only(stages.count, stage, stages.n_chunks) for stage in columns
        ]
        self._training = with_messages(training, stages.n_chunks)[mesh.stage]
        self._evaluation = with_messages(evaluation, stages.n_chunks)[mesh.stage]
        # What only other chunks of this stage use is passed by in a chunk's backward.
        own = stages.chunks(mesh.stage)
        self._used_elsewhere: dict[int, frozenset[str]] = {}
        for chunk in own:
            used = [stages.used(other) for other in own if other != chunk]
            self._used_elsewhere[chunk] = frozenset().union(*used) - stages.used(chunk)
        names = dict(model.named_parameters())
        # Tied parameters count on the first stage.
        self._counted_elsewhere = {
            names[name] for name in stages.tied if mesh.stage > 0
        }

    def train(
        self,
        calls: Sequence[Callable[[], Any]],
        loss_of: Callable[[Any], Tensor],
        scale: float,
        batch: Any,
        within: Within = lambda _: nullcontext(),
    ) -> list[Any]:
        """Take all micro-batches forward and backward, and leave their window open.
        Collective over the stages.

        Args:
            calls: for each micro-batch the user's code, which calls the model once.
            loss_of: of what a call returned; it may raise `ValueError` for what is
                none.
            scale: what each micro-batch's loss is multiplied by before backward.
            batch: the same on all stages.
            within: entered around each micro-batch's forward, its loss and its
                backward.

        Returns:
            what the calls returned, detached; on the last stage, elsewhere an empty
            list.

        Raises:
            ValueError: stages were given different batches or make different calls;
                code that does not call the model once.
        """
        # All stages meet here: the same batch, one seed.
        key, seed = self._batches.begin("a training step", batch, self._seeds.draw())
        results: list[Any] = []

        # On the last stage the user's code comes to its end, and gives a loss.
        def forward(chunk: int, number: int, taken: Activations | None) -> Activations:
            given = self._call(calls[number], chunk, number, taken, results)
            if given is not None:
                return given
            loss = loss_of(results[-1]) * scale
            # Earlier stages wait for a gradient that would never come.
            if taken is not None and taken[0].requires_grad and not loss.requires_grad:
                raise ValueError(
                    "no gradient comes from the loss to what the model gives: compute it with gradients, and from "
                    "outputs that are not detached"
                )
            # What is returned keeps no graph beyond its backward pass.
            results[-1] = map_tensors(results[-1], Tensor.detach)
            return (loss,)

        @contextlib.contextmanager
        # Backward of one chunk must not wait for units of another.
        def around(step: Step) -> Iterator[None]:
            with within(step.micro_batch):
                if step.is_forward:
                    yield
                    return
                with self._passing_by(self._used_elsewhere[step.chunk]):
                    yield

        # Formats depend on shapes; whether stages have met depends on the call alone.
        self._messages.begin((True, key), ("training", _without_shapes(key)))
        with (
            self._window().batch_in_stages(),
            self._seeds.during_step(seed),
            self.times.batch(),
        ):
            run(self._training, forward, self._messages, self.times, around)
        return results

    def evaluate(self, call: Callable[[], Any], batch: Any) -> Any:
        """Take one batch forward. Collective over the stages.

        Returns:
            what the call returned; on the last stage, elsewhere None.

        Raises:
            ValueError: as :meth:`train`.
        """
        key, seed = self._batches.begin("an evaluation step", batch, self._seeds.draw())
        results: list[Any] = []

        def forward(chunk: int, number: int, taken: Activations | None) -> Activations:
            return self._call(call, chunk, number, taken, results) or ()

        # A batch of this kind with and without gradients gives other formats.
        self._messages.begin(
            (torch.is_grad_enabled(), "evaluation", key),
            ("evaluation", _without_shapes(key)),
        )
        with self._seeds.during_step(seed):
            run(self._evaluation, forward, self._messages, self.times)
        return results[0] if results else None

    def _outside_of_steps(self, forward: Callable[[], Any], inputs: Any) -> Any:
        """Take a call of the model without gradients through all stages. Collective
        over them.

        Args:
            forward: of the root, inside of its hooks.

        Returns:
            what the last stage's gave.
        """
        key, _ = self._batches.begin("a call of the model outside of a step", inputs)
        results: list[Any] = []

        # The root's forward runs once for each chunk, inside the hooks of one call.
        def given_by_chunk(
            chunk: int, _: int, taken: Activations | None
        ) -> Activations:
            self._stage.show(chunk)
            self._take(taken)
            try:
                given = forward()
            finally:
                self._stage.incoming = None
            if not self._stage.is_last:
                return self._given(given)
            # A cache of this stage's keys and values would be incomplete.
            if isinstance(given, dict):
                for name in caches_in(given):
                    given[name] = None  # of this stage's blocks alone
            results.append(given)
            return ()

        self._messages.begin(
            ("outside of steps", key), ("outside of steps", _without_shapes(key))
        )
        run(self._evaluation, given_by_chunk, self._messages, self.times)
        return self.share(results[0] if results else None)

    def share(self, value: Any) -> Any:
        """Return the last stage's value on all stages, its tensors detached and on this
        rank's device. Collective over them."""
        return self.share_made(lambda: value)

    def share_made(self, make: Callable[[], Any]) -> Any:
        """Return on all stages what ``make`` gives on the last one, as :meth:`share`
        does. Collective over them.

        Raises:
            Exception: what ``make`` raised; on other stages a ValueError or
                RuntimeError of its text.
        """
        # The last stage makes the value; an error is sent in its place, so that no
        # stage waits.
        carried: list[Any] = [None]
        problem: Exception | None = None

        def send() -> None:
            with here.waiting("what the last pipeline stage returned"):
                dist.broadcast_object_list(
                    carried,
                    group=self._mesh.column.host,
                    group_src=self.stages.count - 1,
                )

        if self._mesh.stage < self.stages.count - 1:
            send()
        else:
            try:
                carried[0] = map_tensors(make(), lambda tensor: tensor.detach().cpu())
                send()  # it pickles before anything is sent
            except (dist.DistBackendError, dist.DistNetworkError):
                raise
            except Exception as error:
                problem, carried[0] = (
                    error,
                    _Failed(isinstance(error, ValueError), in_words(error)),
                )
                send()
        if problem is not None:
            raise problem
        if isinstance(carried[0], _Failed):
            carried[0].fail(self.stages.count - 1)
        return map_tensors(carried[0], lambda tensor: tensor.to(self._mesh.device))

    def counts(self, parameter: Tensor) -> bool:
        """Return whether a parameter counts on this rank where numbers of all stages
        are added up: it is here, and no stage before this one has it too."""
        return (
            not is_absent(parameter)
            and model_parameter(parameter) not in self._counted_elsewhere
        )

    def _take(self, taken: Activations | None) -> None:
        self._stage.incoming = None if taken is None else taken[0]
        if self._beside is not None:
            self._beside.arrived = None if taken is None else taken[1]

    def _given(self, activation: Tensor) -> Activations:
        return (
            (activation,)
            if self._beside is None
            else (activation, self._beside.given())
        )

    def _call(
        self,
        call: Callable[[], Any],
        chunk: int,
        number: int,
        taken: Activations | None,
        results: list[Any],
    ) -> Activations | None:
        """Run the user's code; return what is sent on, or None of the last chunk, where
        the code came to its end."""
        stage, self._place = self._stage, (number, chunk)
        stage.show(chunk)
        self._seeds.begin_call(number)
        self._take(taken)
        stage.calls, stage.is_running, Stage.in_step = 0, True, stage
        # StageDone ends the user's code on all stages but the last.
        try:
            result = call()
        except StageDone as done:
            return self._given(done.given)
        finally:
            stage.incoming, stage.is_running, Stage.in_step = None, False, None
        # Without a call, the other stages would wait for this one's activations.
        if stage.calls != 1:
            raise ValueError(
                f"a step has to call the model once with pipeline_parallel_degree={self.stages.count}; it returned "
                f"{type(result).__name__} without a call"
            )
        results.append(result)
        return None


def _without_shapes(kind: BatchKind) -> Hashable:
    return tuple((path, dtype) for path, _, dtype in kind)
