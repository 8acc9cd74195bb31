"""The ranks of a run under Lightning's Trainer: launched, joined in a process group,
watched, and taken down.

And the checkpoints that callbacks save when an exception ends the run: Lightning's
``OnExceptionCheckpoint`` and ``ModelCheckpoint(save_on_exception=True)``. A save needs
all ranks. Where an exception is raised on all of them, they meet and save. Where it is
raised on one, the others wait for that rank in a collective of training: a save of its
own would hang, and hide the error until the timeout. So an instance of these callbacks,
or of a user's subclass, becomes an instance of a derived class that saves when all
ranks have come.

Private names: Lightning has no public launcher of scripts
(``_SubprocessScriptLauncher``), and does not say in public whether an epoch is over
(``_is_training_done``), whether ``min_epochs`` let training stop (``_can_stop_early``)
and whether a validation is due (``_should_check_val_epoch``, ``_should_check_val_fx``);
nor the seconds that ``val_check_interval`` was given as (``_val_check_time_interval``)
and their beginning (``_last_val_time``).
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_smp.environment import PlatformEnvironment
from smp_core.cluster import launch_environment
from smp_core.outside import changed
from smp_core.sharding import explain
from smp_core.topology import Topology
from smp_core.torch_facts import mixin_before
from smp_core.watch import (
    ENDING,
    Preempted,
    RankWatch,
    looks_like_a_lost_peer,
    report,
    watch_ranks,
)

logger = logging.getLogger("smp")


class ProcessGroupStrategy(ParallelStrategy):
    """A strategy of one process per device, in one process group; subclasses shard and
    step the module.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin: Lightning's own; by default the environment is what the
            launcher of this process has left.
        process_group_backend: default ``"nccl"`` on CUDA, ``"gloo"`` on CPU.
        timeout: of collectives; a rank that dies is noticed within it.
    """

    is_distributed = True
    counting_group: Any = None
    """The ranks over which numbers are added up where no group is given; None: all. A
    subclass leaves copies out."""
    _module: LightningModule
    _trainer: Trainer

    def __init__(
        self,
        accelerator: Any,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        # mpirun and SageMaker, which Lightning does not look for.
        cluster_environment = cluster_environment or PlatformEnvironment.detected()
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._topology: Topology | None = None
        self._watch: RankWatch | None = None
        self._failed = False
        self._passed_barrier: str | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._require_a_device_for_each_process()
        # Started by hand: Lightning's launcher runs the script once for each further
        # device.
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def _require_a_device_for_each_process(self) -> None:
        """Refuse other numbers of devices than torchrun has started processes on a
        node, on all of them alike.

        Lightning does not compare them under torchrun: too few devices end in an
        IndexError, too many train on fewer ranks than the script counts with.

        Raises:
            ValueError: with both numbers and what to write.
        """
        # Lightning itself starts the processes, or has started this one.
        if "RANK" not in os.environ:
            return
        started = launch_environment()
        here = started.local_world_size
        if here is None or here == self.num_processes:
            return
        nodes = max(1, started.world_size // here)
        raise ValueError(
            f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}), but the launcher has started {here} "
            f"processes on this node and {started.world_size} in all; write Trainer(devices={here}, "
            f"num_nodes={nodes}), or start {self.num_processes} a node (torchrun --nproc-per-node "
            f"{self.num_processes}). Processes of one machine pose as several nodes with SMP_RANKS_PER_NODE"
        )

    @override
    def setup_environment(self) -> None:
        self._failed = False
        super().setup_environment()
        # Processes that Lightning launched take the seed of the one that launched them.
        reset_seed()
        self.set_world_ranks()
        self._init_process_group()
        # Once a process: a second run of it has the same nodes.
        if self._topology is None:
            self._topology = Topology.discover()
        self._watch = watch_ranks(self._timeout)
        if self._watch is not None:
            assert self._trainer.state.fn is not None
            self._watch.begin_run(f"trainer.{self._trainer.state.fn.value}(...)")

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _init_process_group(self) -> None:
        if self._process_group_backend == "nccl" and self.root_device.type == "cpu":
            raise ValueError(
                "process_group_backend='nccl' sends between GPUs and this run is on CPU; allowed there: 'gloo', 'mpi'; "
                "write process_group_backend='gloo' or leave it out"
            )
        # An earlier run, or the user, has made the process group.
        if dist.is_initialized():
            return
        environment = self.cluster_environment
        assert environment is not None
        device = self.root_device
        backend = self._process_group_backend or (
            "nccl" if device.type == "cuda" else "gloo"
        )
        self._process_group_backend = backend
        os.environ["MASTER_ADDR"] = str(environment.main_address)
        os.environ["MASTER_PORT"] = str(environment.main_port)
        dist.init_process_group(
            backend,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        if backend == "nccl":
            # torch warns, and may hang, when NCCL's groups are still there at exit.
            atexit.register(
                lambda: dist.destroy_process_group() if dist.is_initialized() else None
            )

    # Collectives on behalf of the Trainer

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and (name is None or name != self._passed_barrier):
            # NCCL's barrier has to know the device, or it takes the wrong one.
            on_cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_cuda else None)

    def without_barrier(self, name: str) -> AbstractContextManager[None]:
        """Pass the Trainer's barrier of a name, where ranks need not wait for one
        another."""
        return changed(self, _passed_barrier=name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        carried = [obj]
        dist.broadcast_object_list(carried, src)
        return carried[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over :attr:`counting_group` or ``group``: ``"mean"``,
        ``"sum"``, ... or a ``ReduceOp``; other objects stay.
        """
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        group = self.counting_group if group is None else group
        # gloo has no mean: a sum, divided.
        mean = reduce_op is None or (
            isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        )
        mean = mean or reduce_op == dist.ReduceOp.AVG
        if mean:
            op = dist.ReduceOp.SUM
        else:
            op = (
                getattr(dist.ReduceOp, reduce_op.upper())
                if isinstance(reduce_op, str)
                else reduce_op
            )
        # The caller's tensor stays as it is.
        tensor = tensor.clone()
        if mean and not torch.is_floating_point(tensor):
            tensor = tensor.float()
        dist.all_reduce(tensor, op=op, group=group)
        return tensor / dist.get_world_size(group) if mean else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes decided so, or with ``all=False`` any."""
        if not dist.is_initialized():
            return decision
        number = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(number)

    # The end

    def all_come(self, place: str, limit: float) -> bool:
        """Return whether all ranks come to a place within ``limit`` seconds, outside of
        collectives."""
        if self._watch is None:
            return True
        try:
            self._watch.meetings.meet(place, limit=limit)
        except RuntimeError:
            return False
        return True

    def watch_stops(self, trainer: Trainer) -> None:
        """Compare all ranks where a batch ends and ``trainer.should_stop`` is set; and
        let rank 0's clock tell all of them when ``val_check_interval``, given as a
        time, has passed.

        Without it a rank that stops alone goes to the end of its epoch, and what it
        sums up there would meet what the others do in their next step; and by clocks of
        their own some ranks would validate where others train on, and wait for them
        forever.
        """
        loop: Any = trainer.fit_loop.epoch_loop
        loop.advance = functools.partial(self._begin_batch, loop)
        loop.on_advance_end = functools.partial(self._end_batch, loop)
        if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
            loop._should_check_val_fx = functools.partial(
                self._is_due_by_rank_0, loop, {}
            )

    def _is_due_by_rank_0(
        self, loop: Any, answers: dict[tuple[int, float], bool], fetcher: Any
    ) -> bool:
        trainer = loop.trainer
        interval = trainer._val_check_time_interval
        # A batch and the validation before it have one answer, whoever asks: a
        # checkpoint of this batch, or Lightning at its end.
        now = (loop.total_batch_idx, trainer._last_val_time)
        if now not in answers:
            passed = time.monotonic() - trainer._last_val_time >= interval
            answers.clear()
            answers[now] = self.broadcast(passed)
        # Lightning's other rules, with an interval that has passed, or never does.
        interval = -math.inf if answers[now] else math.inf
        with changed(trainer, _val_check_time_interval=interval):
            due: bool = type(loop)._should_check_val_fx(loop, fetcher)
        return due

    def _begin_batch(self, loop: Any, fetcher: Any) -> None:
        # Lightning broadcasts at once whether rank 0 was told to end.
        if self._watch is not None:
            # One that has stopped alone at the end of an epoch fails on all ranks.
            if loop.batch_progress.current.ready == 0:
                self._meet("the next batch")
            self._watch.meetings.batches += 1
        type(loop).advance(loop, fetcher)

    def _end_batch(self, loop: Any, fetcher: Any) -> None:
        # Hooks of the batch may have set it, or those of the validation that may follow
        # in Lightning's own method. An epoch that ends here ends on all ranks.
        if loop._is_training_done:
            self._meet_before_extra_validation(loop, fetcher)
        stops = not loop._is_training_done and self._meet_to_stop(loop.trainer)
        type(loop).on_advance_end(loop, fetcher)
        if not loop._is_training_done and not stops:
            self._meet_to_stop(loop.trainer)

    def _meet_before_extra_validation(self, loop: Any, fetcher: Any) -> None:
        """Meet the other ranks at the end of an epoch without a validation: one that
        stops has one, and would wait in it for the others.
        """
        trainer, watch = loop.trainer, self._watch
        if watch is None or not loop._should_check_val_epoch():
            return
        # What the rule gives where nobody stops is the same on all ranks.
        with changed(trainer, should_stop=False):
            is_due = loop._should_check_val_fx(fetcher)
        if not is_due and not self._meet_to_stop(trainer):
            self._meet("the end of an epoch")

    @override
    def on_train_end(self) -> None:
        trainer = self._trainer
        loop: Any = trainer.fit_loop
        epochs, most = loop.epoch_progress.current.processed, trainer.max_epochs
        by_epochs = most is not None and 0 <= most <= epochs
        by_steps = 0 <= trainer.max_steps <= trainer.global_step
        # Set at the end of an epoch that is not the last.
        if loop.epoch_loop._is_training_done and not by_epochs and not by_steps:
            self._meet_to_stop(trainer)

    def _meet_to_stop(self, trainer: Trainer) -> bool:
        """Meet the other ranks if training stops here; return whether it does."""
        if not (trainer.should_stop and trainer.fit_loop._can_stop_early):
            return False
        self._meet("trainer.should_stop = True")
        return True

    def _meet(self, place: str) -> None:
        if self._watch is None:
            return
        try:
            self._watch.meetings.meet(place)
        except RuntimeError as error:
            if "should_stop" not in str(error):
                raise
            raise RuntimeError(
                f"{error}. Where ranks decide by numbers of their own, write trainer.should_stop = "
                "trainer.strategy.reduce_boolean_decision(this_rank_stops, all=False)"
            ) from error

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        # What an error of torch's means for sharded models, and which rank was lost.
        explain(exception)
        report(exception)

    @override
    def teardown(self) -> None:
        """Tear the run down, and leave the module on its device.

        The module can be evaluated, saved or trained on by a next call of all ranks,
        which the watch goes on to look after.
        """
        assert self.cluster_environment is not None and self.accelerator is not None
        if self._watch is not None:
            self._watch.end_run()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def take_over_exception_saves(trainer: Trainer) -> None:
    """Make the callbacks that save at an exception do it on all ranks or on none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # A user's subclass counts too: what it does is asked, and not its class.
        at_exceptions = isinstance(callback, OnExceptionCheckpoint) or getattr(
            callback, "save_on_exception", False
        )
        if at_exceptions and not isinstance(callback, _SavesTogether):
            kind: Any = type(callback)
            callback.__class__ = _derived(kind)


def exception_checkpoints(trainer: Trainer) -> list[str]:
    """List the paths of ``OnExceptionCheckpoint``, which ``ckpt_path="last"`` looks at
    too."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback.ckpt_path
        for callback in callbacks
        if isinstance(callback, OnExceptionCheckpoint)
    ]


@functools.cache
def _derived(kind: Any) -> Any:
    # The name is part of the key of ModelCheckpoint's state.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin_before(_SavesTogether, kind), kind), names)


class _SavesTogether(Callback):
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        strategy = trainer.strategy
        if isinstance(exception, Preempted):
            return  # all ranks have saved
        if isinstance(strategy, ProcessGroupStrategy):
            # An error of a collective is another rank's: that one is gone, and cannot
            # save.
            alone = looks_like_a_lost_peer(exception) or not strategy.all_come(
                "a save at an exception", ENDING
            )
            if alone:
                logger.error(
                    "%s saves no checkpoint: a save needs all ranks, and not all of them have raised an exception of "
                    "their own. The last checkpoint that was saved is the one to go on from",
                    type(self).__name__,
                )
                return
        super().on_exception(trainer, pl_module, exception)
