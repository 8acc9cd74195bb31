"""`smp verify` under Lightning: Trainers of a recorded run, and the callback that tells
the recorder what happens.

A Trainer that is made in such a process gets the ranks, the device and the layout that
were asked for, and writes no logs and no checkpoints. Everything else stays the
script's. The one process trains under Lightning's own single-device strategy, without
torch-smp.

Private names: ``Trainer._results``, the only place of values that ``self.log`` has
collected in an epoch that goes on; ``Trainer._accelerator_connector``, because
``use_distributed_sampler`` is not public.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from lightning_smp.strategy import SmpShardedStrategy
from smp_core.verify import (
    Recorder,
    Report,
    Request,
    natural_samples,
    read_record,
    refuse,
    requested,
    tell_degrees,
    verify_call,
)

_FORGOTTEN = (
    "the script makes a Trainer(strategy={asked!r}), which trains without torch-smp; write `import lightning_smp` and "
    'Trainer(strategy="smp_sharded", ...), or strategy=SmpShardedStrategy(shard_degree="node")'
)


def install() -> None:
    """Let every Trainer of this process be a recorded one, if `smp verify` has started
    it."""
    request = requested()
    if request is None or getattr(Trainer.__init__, "is_recorded", False):
        return
    original = Trainer.__init__

    @functools.wraps(original)
    def recorded(self: Trainer, *args: Any, **kwargs: Any) -> None:
        # Before anything is made: the script would train without torch-smp, and all
        # would agree.
        asked = kwargs.get("strategy", "auto")
        if not _is_ours(asked):
            refuse(_FORGOTTEN.format(asked=asked))
        # A first process only looks which degrees and how many ranks the script asks
        # for; it trains nothing.
        if request.role == "look":
            here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "logger": False}
            original(self, *args, **{**kwargs, **here})
            strategy = self.strategy
            assert isinstance(strategy, SmpShardedStrategy)
            tell_degrees(request, strategy.config, _ranks_asked(kwargs))
        original(self, *args, **_changed(kwargs, request))
        if request.role == "ranks":
            strategy = self.strategy
            assert isinstance(strategy, SmpShardedStrategy)
            # The layout to be tried wins over what the script says.
            strategy.config = strategy._asked = strategy.config.with_asked(
                "smp verify", **request.knobs
            )

    recorded.is_recorded = True  # type: ignore[attr-defined]
    Trainer.__init__ = recorded  # type: ignore[method-assign]


def _is_ours(strategy: Any) -> bool:
    return isinstance(strategy, SmpShardedStrategy) or str(strategy).startswith(
        "smp_sharded"
    )


def _ranks_asked(kwargs: Mapping[str, Any]) -> int:
    """Return how many ranks a Trainer would have; 0: it leaves that to its launcher or
    to the machine."""
    devices = kwargs.get("devices", "auto")
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    return (
        devices * int(kwargs.get("num_nodes", 1))
        if isinstance(devices, int) and devices > 0
        else 0
    )


def _changed(kwargs: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the arguments of a Trainer of a recorded run."""
    # Callbacks that write files or draw on the terminal are left out, and all others
    # stay.
    given = kwargs.get("callbacks") or []
    callbacks = [given] if isinstance(given, Callback) else list(given)
    unwanted = (Checkpoint, ProgressBar, ModelSummary)
    callbacks = [each for each in callbacks if not isinstance(each, unwanted)]
    recorder = Recorder(request)
    changed = {
        **kwargs,
        "callbacks": [*callbacks, RecordingCallback(recorder)],
        "accelerator": "cpu" if request.cpu else "auto",
        "devices": request.ranks if request.role == "ranks" else 1,
        "num_nodes": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(request.folder / "files"),
    }
    # A precision plugin would say something else.
    if request.float64:
        changed["precision"] = "64-true"
        changed.pop("plugins", None)
    # The one process takes the same steps: with the ranks' batches one by one as more
    # accumulation, or as one large batch.
    if request.role == "one process":
        facts = read_record(request.batches).facts
        changed["strategy"] = OneProcess(torch.device("cpu" if request.cpu else "cuda"))
        size = facts["data_size"] if request.one_by_one else 1
        changed["accumulate_grad_batches"] = (
            kwargs.get("accumulate_grad_batches", 1) * size
        )
        if math.isfinite(facts["batches of an epoch"]):  # a stream may not know
            changed["limit_train_batches"] = facts["batches of an epoch"] * size
    return changed


class OneProcess(SingleDeviceStrategy):
    """Lightning's strategy of one device, for the process that the ranks are compared
    with."""

    data_size = 1
    data_rank = 0
    data_group = None

    def full_sequence(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the tensor: sequences are not shared."""
        return tensor


class RecordingCallback(Callback):
    """A callback that tells the recorder of this process what Lightning does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        recorder, strategy = self._recorder, trainer.strategy
        self._step = trainer.global_step
        self._read_batches_of(trainer)
        parallel = (
            strategy.parallel if isinstance(strategy, SmpShardedStrategy) else None
        )
        recorder.begin(pl_module, parallel)
        facts = recorder.record.facts
        facts["batches of an epoch"] = trainer.num_training_batches
        facts["data_size"] = recorder.record.data_size
        facts["precision"] = str(trainer.precision)
        # Which samples one process would have read by itself, to be compared with what
        # the ranks read.
        if parallel is None:
            wanted = recorder.batches_of_ranks()
            recorder.record.natural = _natural_samples(trainer, wanted, recorder)
        if recorder.request.one_by_one and not pl_module.automatic_optimization:
            refuse(
                "manual optimization steps by itself, and cannot take the ranks' batches one after another"
            )

    def _read_batches_of(self, trainer: Trainer) -> None:
        """Let the recorder see each training batch before it is moved or split."""
        # All of Lightning's ways to a batch go through this method of the instance.
        strategy, recorder = trainer.strategy, self._recorder
        original = strategy.batch_to_device

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.training:
                batch = recorder.batch(batch)
                recorder.reads(batch)
            return original(batch, *args, **kwargs)

        strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        recorder, strategy = self._recorder, trainer.strategy
        recorder.enter_backward()
        # Where ranks share sequences: this rank's part of the mean, as backward starts
        # from it.
        value = loss.detach()
        if isinstance(strategy, SmpShardedStrategy):
            value = strategy.weighted_loss(value)
        batches = (
            trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        )
        recorder.loss(value * batches)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.leave_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self._recorder.gradients()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        metrics = _logged(trainer) if self._recorder.is_last_step else None
        self._recorder.step_ended(metrics)


def _logged(trainer: Trainer) -> dict[str, float]:
    """Return what the module has logged up to here, each name as it would be at an
    epoch's end. Collective.

    Without the step values of torchmetrics' objects: those are each rank's own, unless
    ``dist_sync_on_step`` is set; only the value of an epoch is reduced.
    """
    results = trainer._results
    if results is None:
        return {}
    of_a_rank = set()
    for result in results.values():
        if (
            not result.is_tensor
            and result.meta.on_step
            and not result.value.dist_sync_on_step
        ):
            of_a_rank.add(
                f"{result.meta.name}_step" if result.meta.on_epoch else result.meta.name
            )
    found: Mapping[str, Tensor] = {**results.metrics(on_step=True)["callback"]}
    found = {**found, **results.metrics(on_step=False)["callback"]}
    return {
        name: float(value)
        for name, value in found.items()
        if value.numel() == 1 and name not in of_a_rank
    }


def _natural_samples(
    trainer: Trainer, batches: int, recorder: Recorder
) -> list[str] | None:
    """Return hashes of the samples that one process would read, in order.

    Returns:
        None where they are not known: several loaders, a sampler that Lightning wraps,
        or samples that are made again each time they are read.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        return None
    # Samplers of Lightning's own depend on the ranks; two of torch's have a known one
    # in their place.
    sampler: Any = loader.sampler
    is_dealt = (
        trainer._accelerator_connector.use_distributed_sampler
        and not isinstance(sampler, DistributedSampler)
    )
    if is_dealt and not isinstance(loader.dataset, IterableDataset):
        if not isinstance(sampler, (RandomSampler, SequentialSampler)):
            return None
        # What Lightning puts in its place on ranks; it shuffles training data, also
        # where the loader does not.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        shuffle = not getattr(trainer, "overfit_batches", 0)
        dataset: Any = loader.dataset
        loader = DataLoader(
            dataset,
            loader.batch_size,
            sampler=DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=seed),
            collate_fn=loader.collate_fn,
        )
    return natural_samples(loader, batches, recorder.as_computed)


def verify(
    module: LightningModule | Callable[[], LightningModule],
    data: Any,
    layouts: Sequence[str | Mapping[str, Any]] = ("shard_degree=2",),
    *,
    steps: int = 3,
    float64: bool = False,
    **trainer_arguments: Any,
) -> Report:
    """Train a module for a few steps in one process and at layouts, and compare
    (docs/verify.md).

    Args:
        module: or a function that makes it. It is pickled, so that its class has to be
            importable.
        data: what ``Trainer.fit`` takes: a DataLoader or a LightningDataModule, also a
            function that makes it.
        layouts: knobs of each layout, as a mapping or as text ("shard_degree=2
            tensor_parallel_degree=2").
        steps: optimizer steps.
        float64: compute in float64, where layouts agree to rounding.
        trainer_arguments: of the Trainer (``accumulate_grad_batches``,
            ``gradient_clip_val``, ``precision``, ...).

    Returns:
        the report; ``print(report)`` shows the table, ``report.agrees`` is the verdict.

    Raises:
        ValueError: a run that did not come to its steps, with the end of its output; a
            module that cannot be pickled.
    """
    arguments = {"max_steps": steps + 1, "strategy": "smp_sharded", **trainer_arguments}
    return verify_call(
        _fit, (module, data, arguments), layouts, steps=steps, float64=float64
    )


def _fit(module: Any, data: Any, arguments: dict[str, Any]) -> None:
    install()
    made = module if isinstance(module, LightningModule) else module()
    read = data() if callable(data) else data
    Trainer(**arguments).fit(made, read)
