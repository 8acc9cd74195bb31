"""`smp verify` under Accelerate and the Trainer of Transformers: what a recorded run
changes, and what it tells.

An Accelerator that is made in such a process is an SmpAccelerator, as under `-m
accelerate_smp.run`; it gets the ranks and the layout that were asked for, starts no
trackers, and a Trainer saves nothing. The one process has Accelerate's own behaviour,
and the schedule and the length of an epoch that the ranks have.

Private names: ``GradientState._set_sync_gradients``, which Accelerator's own
``accumulate`` calls, and Accelerator's lists ``_models`` and ``_schedulers``;
``_present`` is SmpAccelerator's batch that is split at the moment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import data_loader
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from accelerate_smp import accelerator as accelerators
from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.handle import parallel_of
from accelerate_smp.run import replace_accelerator, replace_trainer
from accelerate_smp.scheduler import SmpScheduler
from smp_core.context_parallel import enabled, part_of_mean
from smp_core.torch_facts import after_each_step
from smp_core.verify import (
    Recorder,
    Report,
    Request,
    natural_samples,
    read_record,
    refuse,
    requested,
    sample_hashes,
    tell_degrees,
    verify_call,
)

_UNPREPARED = (
    "the loop trains on batches of a loader that was not prepared, which every rank reads alike; write loader = "
    "accelerator.prepare(loader), or prepare_data_loader(loader)"
)
_COUNTED_BY_HAND = (
    "the loop steps behind every {batches} batches that it counts itself, and the ranks' batches have different "
    "lengths, so that one process cannot take theirs one after another as such a step; write `with "
    "accelerator.accumulate(model):`, or pad all batches to one length"
)
# What Trainer logs about itself.
_OF_THE_RUN = ("runtime", "per_second", "flos", "epoch", "step", "memory")


def install() -> None:
    """Record every accelerator and Trainer of this process, if `smp verify` has started
    it."""
    request = requested()
    if request is None or _Recording.of_process is not None:
        return
    recording = _Recording.of_process = _Recording(request)
    replace_accelerator()
    replace_trainer()
    recording.change_accelerator()
    recording.change_loaders()


class _Recording:
    """A recording of this process's accelerators: of the first model that is prepared.

    Attributes:
        ranks_facts: in one process: what the ranks noted about their run.
        is_trainer: whether a Trainer trains, and not a loop.
        micro_batches: of a Trainer, which divides losses by their number; 1 for a loop.
    """

    of_process: _Recording | None = None

    def __init__(self, request: Request) -> None:
        self.request, self.recorder = request, Recorder(request)
        self.alone = request.role == "one process"
        self.ranks_facts: dict[str, Any] = (
            read_record(request.batches).facts if self.alone else {}
        )
        self.is_trainer, self.micro_batches = False, 1
        self._model: nn.Module | None = None
        self._loaders = 0
        self._latest: tuple[str, list[str]] = ("", [])
        self._training_loader: str | None = None
        self._samples: dict[str, list[str]] = {}
        self._batches_read = 0
        self._batches_of_step: set[int] = set()
        self._gradients_noted = False
        self._logged: dict[str, float] = {}

    @property
    def readers(self) -> int:
        """The ranks that read different samples, which one process stands for; on ranks
        1."""
        return int(self.ranks_facts.get("data_size", 1))

    # The accelerator

    def change_accelerator(self) -> None:
        """Put recording methods in place of SmpAccelerator's."""
        request = self.request
        _around("__init__", self._made)
        _around("prepare_model", self._prepare_model)
        _around("prepare_optimizer", self._prepare_optimizer)
        _around("prepare_data_loader", self._prepare_data_loader)
        _around("backward", self._backward)
        _around("clip_grad_norm_", self._clip)
        _around("accumulate", self._accumulate)
        _around("log", self._log)
        _around("init_trackers", lambda original, accelerator, *args, **kwargs: None)
        if self.alone:
            _around("prepare_scheduler", self._prepare_scheduler)
        if request.role == "ranks":
            resolve = accelerators.resolve_config

            def resolved(*args: Any, **kwargs: Any) -> Any:
                return resolve(*args, **kwargs).with_asked(
                    "smp verify", **request.knobs
                )

            accelerators.resolve_config = resolved
            # These compare the script's own degrees with the run.
            accelerators.check_world = lambda *_: None
            accelerators.check_degree = lambda *_: None

    def _made(
        self, original: Any, accelerator: SmpAccelerator, *args: Any, **kwargs: Any
    ) -> None:
        if self.request.float64:
            kwargs["mixed_precision"] = "no"
        kwargs.pop("log_with", None)
        original(accelerator, *args, **kwargs)
        if not accelerator.smp:
            refuse(
                "SmpAccelerator(smp=False) trains without torch-smp, and there is nothing to verify; leave it out"
            )
        # A first process only looks which degrees the script asks for.
        if self.request.role == "look":
            tell_degrees(self.request, accelerator.smp_config, 0)
        # One process takes the ranks' batches one after another, as more accumulation.
        if self.request.one_by_one and not self.is_trainer:
            accelerator.gradient_accumulation_steps *= self.readers

    def _prepare_model(
        self,
        original: Any,
        accelerator: SmpAccelerator,
        model: nn.Module,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if self.request.float64:
            model.double()
        prepared = original(accelerator, model, *args, **kw)
        # The first model that trains; a frozen reference is none.
        if self._model is None and any(
            parameter.requires_grad for parameter in model.parameters()
        ):
            self._model = model
            self.recorder.record.facts["precision"] = accelerator.mixed_precision
        return prepared

    def _prepare_optimizer(
        self,
        original: Any,
        accelerator: SmpAccelerator,
        optimizer: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        # Hooked once, however often it is prepared.
        new = not getattr(optimizer, "_is_accelerate_prepared", False)
        prepared = original(accelerator, optimizer, *args, **kw)
        if new:
            stepping = getattr(prepared, "optimizer", prepared)
            stepping.register_step_pre_hook(lambda *_: self._before_step(accelerator))
            after_each_step(stepping, self._after_step)
        return prepared

    def _prepare_scheduler(
        self, original: Any, accelerator: SmpAccelerator, scheduler: Any
    ) -> Any:
        """Let the schedule of one process advance by the batches that the ranks'
        would."""
        prepared = original(accelerator, scheduler)
        if (
            accelerator.schedule_in_optimizer_steps
            or accelerator.split_batches
            or self.readers == 1
        ):
            return prepared
        accelerator._schedulers[-1] = SmpScheduler(prepared, self.readers)
        return accelerator._schedulers[-1]

    def _backward(
        self, original: Any, accelerator: SmpAccelerator, loss: Tensor, **kwargs: Any
    ) -> None:
        # The loader whose batch is current at the first backward pass is the one that
        # trains; others evaluate.
        if self._training_loader is None:
            if not self._latest[0]:
                refuse(_UNPREPARED)
            self._training_loader = self._latest[0]
        with enabled(accelerator._present):
            value = part_of_mean(loss.detach()) * accelerator.batch_weight
        self._batches_of_step.add(self._batches_read)
        self.recorder.loss(value * self.micro_batches)
        self.recorder.enter_backward()
        original(accelerator, loss, **kwargs)
        self.recorder.leave_backward()

    def _clip(
        self, original: Any, accelerator: SmpAccelerator, *args: Any, **kwargs: Any
    ) -> Any:
        # Gradients are noted before they are clipped.
        if accelerator.sync_gradients:
            self._note_gradients(accelerator)
        elif self.request.one_by_one:
            return torch.zeros(())
        return original(accelerator, *args, **kwargs)

    def _accumulate(
        self, original: Any, accelerator: SmpAccelerator, *models: Any
    ) -> Any:
        self.recorder.record.facts["accumulates"] = True
        return original(accelerator, *models)

    def _log(
        self,
        original: Any,
        accelerator: SmpAccelerator,
        values: Mapping[str, Any],
        *args: Any,
        **kw: Any,
    ) -> None:
        self.note_logged(values)

    def note_logged(self, values: Mapping[str, Any]) -> None:
        """Note numbers that the script logs."""
        for name, value in values.items():
            if isinstance(value, (int, float, Tensor)) and not any(
                word in name for word in _OF_THE_RUN
            ):
                if not isinstance(value, Tensor) or value.numel() == 1:
                    self._logged[name] = float(value)

    # Steps

    def _before_step(self, accelerator: SmpAccelerator) -> None:
        if not self._gradients_noted:
            self._note_gradients(accelerator)

    def _note_gradients(self, accelerator: SmpAccelerator) -> None:
        for model in accelerator._models:
            handle = parallel_of(model)
            if handle is not None:
                handle.window.close()
        self.recorder.gradients()
        self._gradients_noted = True

    def _after_step(self) -> None:
        self._gradients_noted = False
        for hash_ in self._samples.get(self._training_loader or "", []):
            self.recorder.note_sample(hash_)
        self._samples.clear()
        facts = self.recorder.record.facts
        facts["batches of a step"] = max(
            facts.get("batches of a step", 1), len(self._batches_of_step)
        )
        self._batches_of_step.clear()
        self.recorder.step_ended(self._logged)

    # Loaders

    def change_loaders(self) -> None:
        """Let the recorder see, and in one process replace, every batch of a prepared
        loader."""
        # Both of Accelerate's kinds, by class: loaders are made later.
        for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
            kind.__iter__ = self._iterating(kind.__iter__)  # type: ignore[method-assign, assignment]
            if self.alone:
                kind.__len__ = self._length(kind.__len__)  # type: ignore[method-assign, assignment]

    def _prepare_data_loader(
        self,
        original: Any,
        accelerator: SmpAccelerator,
        loader: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        sampler = getattr(loader, "sampler", None)
        if (
            self.readers > 1
            and isinstance(sampler, RandomSampler)
            and sampler.generator is None
        ):
            # Accelerate gives such a sampler a generator on several ranks.
            if not accelerator.use_seedable_sampler:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(
                    int(torch.empty((), dtype=torch.int64).random_().item())
                )
        prepared = original(accelerator, loader, *args, **kw)
        if not hasattr(prepared, "verify_name"):
            prepared.verify_name = f"loader {self._loaders}"
            self._loaders += 1
        return prepared

    def _length(self, original: Any) -> Any:
        def length(loader: Any) -> int:
            return math.ceil(
                original(loader) / (1 if self.request.one_by_one else self.readers)
            )

        return length

    def _iterating(self, original: Any) -> Any:
        def iterate(loader: Any) -> Iterator[Any]:
            self._begin(loader)
            name = getattr(loader, "verify_name", "")
            for number, batch in enumerate(original(loader)):
                # In one process the ranks' batch comes in the place of its own.
                seen = self.recorder.batch(batch, name)
                if seen is not batch and loader.device is not None:
                    seen = send_to_device(seen, loader.device)
                self._batches_read += 1
                self._latest = (name, sample_hashes(seen))
                self._samples.setdefault(name, []).extend(self._latest[1])
                self._sync(number)
                self.recorder.begins_batch()
                yield seen

        return iterate

    def _sync(self, number: int) -> None:
        """Let a loop without ``accumulate`` step once it has had the batches of all
        ranks, one after another."""
        if self.request.one_by_one and not (
            self.is_trainer or self.ranks_facts.get("accumulates")
        ):
            batches = self.ranks_facts.get("batches of a step", 1)
            if batches > 1:
                refuse(_COUNTED_BY_HAND.format(batches=batches))
            GradientState()._set_sync_gradients((number + 1) % self.readers == 0)

    def _begin(self, loader: Any) -> None:
        """Begin with the model that was prepared, when the first batch is about to be
        read. Collective."""
        if self._model is None or self.recorder.has_begun:
            return
        recorder, handle = self.recorder, parallel_of(self._model)
        recorder.begin(self._model, handle)
        facts = recorder.record.facts
        facts["data_size"] = recorder.record.data_size
        if self.alone:
            wanted = recorder.batches_of_ranks(getattr(loader, "verify_name", ""))
            recorder.record.natural = natural_samples(
                loader.base_dataloader, wanted, recorder.as_computed
            )


def _around(name: str, method: Callable[..., Any]) -> None:
    """Let ``method`` stand around one of SmpAccelerator's: it gets the original, the
    accelerator and the arguments."""
    original = getattr(SmpAccelerator, name)

    @functools.wraps(original)
    def changed(self: SmpAccelerator, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    setattr(SmpAccelerator, name, changed)


def verify(
    train: Callable[..., None],
    arguments: tuple[Any, ...] = (),
    layouts: Sequence[str | Mapping[str, Any]] = ("shard_degree=2",),
    *,
    steps: int = 3,
    float64: bool = False,
) -> Report:
    """Run a function that trains for a few steps in one process and at layouts, and
    compare (docs/verify.md).

    Args:
        train: a function at the top of a module, which makes an accelerator or a
            Trainer and trains.
        arguments: of the function; they are pickled.
        layouts: knobs of each layout, as a mapping or as text ("shard_degree=2
            tensor_parallel_degree=2").
        steps: optimizer steps.
        float64: compute in float64, where layouts agree to rounding.

    Returns:
        the report; ``print(report)`` shows the table, ``report.agrees`` is the verdict.

    Raises:
        ValueError: a run that did not come to its steps, with the end of its output;
            what cannot be pickled.
    """
    return verify_call(
        _train, (train, arguments), layouts, steps=steps, float64=float64
    )


def _train(train: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    install()
    train(*arguments)


def install_trainer() -> None:
    """Record every SmpTrainer of this process, if `smp verify` has started it; behind
    :func:`install`."""
    install()
    recording = _Recording.of_process
    if recording is None:
        return
    from accelerate_smp import trainer

    # By name: under `-m accelerate_smp.run` the module's own name is an empty mixin.
    mixin: Any = next(
        kind
        for kind in trainer.SmpTrainer.__mro__
        if kind.__name__ == "SmpTrainerMixin"
    )
    made, log = mixin.__init__, mixin.log

    @functools.wraps(made)
    def recorded(self: Any, *arguments: Any, **keywords: Any) -> None:
        args = keywords.get("args", arguments[1] if len(arguments) > 1 else None)
        if args is not None:
            _change_arguments(recording, args)
        made(self, *arguments, **keywords)

    @functools.wraps(log)
    def logged(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        recording.note_logged(logs)
        log(self, logs, *args, **kwargs)

    mixin.__init__, mixin.log = recorded, logged


def _change_arguments(recording: _Recording, args: Any) -> None:
    """Let a Trainer log each step, and save and report nothing."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    args.save_strategy, args.report_to = SaveStrategy.NO, []
    args.logging_strategy = IntervalStrategy.STEPS
    args.logging_steps = 1
    args.logging_first_step = True
    args.load_best_model_at_end = args.push_to_hub = False
    args.disable_tqdm, args.output_dir = True, str(recording.request.folder / "files")
    if recording.request.float64:
        args.bf16 = args.fp16 = False
    if recording.request.one_by_one:
        args.gradient_accumulation_steps *= recording.readers
    recording.is_trainer, recording.micro_batches = (
        True,
        args.gradient_accumulation_steps,
    )
