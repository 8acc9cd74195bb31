"""SmpShardedStrategy: smp_core under Lightning's Trainer.

Each hook calls the core. The work that Lightning leaves to a strategy, and the places
where it is done:

    setup_environment     process group, topology, watch over the ranks (lightning_smp/processes.py)
    setup                 precision, parallelize (lightning_smp/sharding.py), optimizers
    *_step                run with the LightningModule's own parameters gathered, if it has any
    batch_to_device       where sequences are shared: this rank's part (lightning_smp/sequences.py)
    block_backward_sync   a micro-batch that is not its window's last
    optimizer_step        the window is closed before clipping; non-finite norms; the meter's step
    save_checkpoint       one folder of sharded tensors, or one ordinary .ckpt (lightning_smp/checkpoints.py)
    load_checkpoint       either, before setup; read when the module is sharded (lightning_smp/loading.py)
    on_exception          the report of the rank that was lost (lightning_smp/processes.py)

Private names: ``_LRCallback``, Lightning's learning rate finder, which looks at the
losses of rank 0 alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smp import checkpoints
from lightning_smp.averaging import (
    averaging_keys,
    make_averages,
    take_over_callbacks,
)
from lightning_smp.background import BackgroundSaves
from lightning_smp.callback_states import give_shards, let_wait, note_shards
from lightning_smp.due_validation import begin_with_it, is_lacking
from lightning_smp.knobs import list_knobs, read_config
from lightning_smp.loading import FP8_STATE, Loading, NothingSaved, nothing_saved
from lightning_smp.memory import IN_MEMORY, KeepsInMemory, finding_memory
from lightning_smp.pipeline import PipelinedSteps, check_module
from lightning_smp.precision import Fp8Precision
from lightning_smp.preemption import LeavesWhenTold
from lightning_smp.processes import take_over_exception_saves
from lightning_smp.resume import (
    Resume,
    WindowStart,
    begin_batch,
    describe_place,
    loader_state,
    metrics_of,
    training_loaders,
)
from lightning_smp.sequences import SharedSequences
from lightning_smp.sharding import (
    ATTACHED,
    check_layer_sync,
    check_loggers,
    keeping_what_is_sharded,
    reattach,
    shard,
    with_recipe,
)
from lightning_smp.steps import SteppingStrategy, hooks_before_steps
from lightning_smp.uneven import (
    Evaluations,
    require_equal_training,
)
from smp_core.checkpoint import CheckpointError
from smp_core.config import SmpConfig
from smp_core.context_parallel import BatchLayout
from smp_core.engine import missed
from smp_core.sharding import change_this_process
from smp_core.sharding.optimizer import say_where_gradients_are
from smp_core.watch import Preemption, meet_between_runs

logger = logging.getLogger("smp")


NOT_FOR_FABRIC = (
    "Fabric is not supported: for a loop of your own write accelerate_smp.SmpAccelerator(), or "
    "smp_core.entry.parallelize(model, SmpConfig(...))"
)


class SmpShardedStrategy(SteppingStrategy):
    """A strategy of MiCS sharding for ``Trainer(strategy=SmpShardedStrategy(...))``.

    By name it is ``"smp_sharded"``, or that with ``_node``, ``_world``, ``_auto`` or
    ``_fp8`` behind it.

    Args:
        config: all knobs in one :class:`smp_core.config.SmpConfig` or mapping; or give
            them as keywords.
        accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin: Lightning's own. ``checkpoint_io`` is used for ordinary
            ``.ckpt`` files (``checkpoint="full"``); sharded folders have a writer of
            their own.
        process_group_backend: default ``"nccl"`` on CUDA, ``"gloo"`` on CPU.
        timeout: the limit of collectives; a rank that dies is noticed within it.
        init_fn: gives one module its initial values in place; for modules built on the
            meta device that have no initialiser of their own (see
            docs/delayed-init.md).
        batch_layout: with ``context_parallel_degree`` above 1, the tensors of a batch
            to split, and their dims
            (:class:`smp_core.context_parallel.batch.BatchLayout`); by default found in
            the batch.
        full_outputs: with ``context_parallel_degree`` above 1, whether tensors [batch,
            tokens, ...] that validation, test and predict steps return are gathered
            over the ranks that share the sequences.
        knobs: the fields of :class:`smp_core.config.SmpConfig` (``shard_degree=8``,
            ...). The signature lists them (LightningCLI reads it).

    Raises:
        ValueError: an unknown knob (with the nearest known one), a bad value, or both
            ``config`` and knobs.
    """

    strategy_name = "smp_sharded"

    def __init__(
        self,
        config: SmpConfig | Mapping[str, Any] | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        init_fn: Callable[[nn.Module], None] | None = None,
        batch_layout: BatchLayout | None = None,
        full_outputs: bool = False,
        **knobs: Any,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
        )
        # `config` becomes what took effect once a module is sharded; `_asked` stays
        # what was written, for what is needed before that.
        self.config = self._asked = read_config(config, knobs, _ARGUMENTS)
        self._init_fn = init_fn
        self._sequences = SharedSequences(batch_layout, full_outputs)
        self._loaders: dict[str, Any] = {}
        # How the data go on from the checkpoint that the run begins with, and that
        # checkpoint itself until it is read.
        self.resume: Resume | None = None
        self.loading: Loading | None = None
        self._is_set_up = self._has_averages = False
        self._run = contextlib.ExitStack()
        self.background_saves: BackgroundSaves | None = None
        self._leaves: LeavesWhenTold | None = None
        self._memory: KeepsInMemory | None = None

    def __repr__(self) -> str:
        # Fabric refuses whatever is no strategy of its own, and shows only this of it.
        return f"{type(self).__name__}(), which is for Lightning's Trainer; {NOT_FOR_FABRIC}"

    # Model and optimizers

    @override
    def connect(self, model: LightningModule) -> None:
        """Begin a run, outside of inference mode: FSDP2 cannot train tensors that were
        made in it."""
        self.loading, self._is_set_up = None, False
        self._run = contextlib.ExitStack()
        if torch.is_inference_mode_enabled():
            self._run.enter_context(torch.inference_mode(False))
            self._run.enter_context(torch.no_grad())
        super().connect(model)
        self._module, self._trainer = model, model.trainer

    @contextlib.contextmanager
    @override
    def tensor_init_context(
        self, empty_init: bool | None = None
    ) -> Generator[None, None, None]:
        # With delayed initialisation the model is built without memory, and gets its
        # values as shards.
        on_meta = bool(empty_init) or self.config.delayed_init is not None
        with (
            torch.device("meta") if on_meta else contextlib.nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @contextlib.contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with keeping_what_is_sharded(self._module):
            yield

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # "last" may be in shared memory alone, where Lightning would find nothing and
        # forget that it was asked.
        if self._asked.checkpoint.memory_every_n_steps:
            self._launcher = finding_memory(self._launcher)

    @override
    def setup_environment(self) -> None:
        # Before the setup of callbacks, in which Lightning's own would copy the
        # unsharded module.
        trainer = self._trainer
        self._has_averages = False
        if trainer.callbacks:  # type: ignore[attr-defined]
            self._has_averages = take_over_callbacks(trainer)
            take_over_exception_saves(trainer)
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.evaluations = Evaluations(trainer, self._leave_if_told)
        self.watch_stops(trainer)

        # The sharded module.
        module = self._module
        precision = self.precision_plugin
        if isinstance(precision, Fp8Precision):
            self.config = with_recipe(self.config, precision, self.root_device)
        # Refused before anything is sharded: a module that is sharded stays it.
        if self.config.pipeline_parallel_degree > 1:
            check_module(module)
        check_loggers(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
            checkpoints.check_before_training(trainer, self.config)
        if not hasattr(module, ATTACHED):
            assert self._topology is not None
            self._parallel = shard(
                module,
                self.config,
                self._topology,
                self.root_device,
                precision=precision,
                layer_sync=self._layer_sync,
                init_fn=self._init_fn,
            )
            self.config = self._parallel.plan.knobs
            if self.global_rank == 0:
                print(self.parallel.report(), file=sys.stderr, flush=True)
        else:
            if trainer.state.fn == TrainerFn.FITTING:
                check_layer_sync(module, self._layer_sync)
            self._parallel, self.config = reattach(module, self.config, precision)

        # torchmetrics are added up over ranks that hold different samples, not over the
        # world.
        mesh = self._parallel.mesh
        change_this_process(mesh)
        self.counting_group = mesh.gradient_group

        # Its collaborators: checkpoints, the watch, shared sequences, saves in the
        # background.
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            checkpoints.check_plugin(self.checkpoint_io, self.config)
        # The watch learns which ranks make calls together: where one does not come, the
        # others are told where it is.
        if self._watch is not None:
            self._watch.meetings.add_group(mesh.shard_ranks)
        in_stages = self._parallel.pipeline is not None
        context = self._parallel.context
        if context is not None or self._sequences.context is not None:
            self._sequences.attach(context, module, in_stages)
        self._pipelined = (
            PipelinedSteps(self._parallel, module, self._sequences)
            if in_stages
            else None
        )
        self.model = module
        self.model_to_device()
        if self.config.checkpoint.async_save and self.background_saves is None:
            self.background_saves = BackgroundSaves(self.is_global_zero, trainer)
        if self.config.checkpoint.memory_every_n_steps and self.memory is not None:
            self.memory.begin_run(trainer)
        # The last of the callbacks: it saves behind all others' hooks of the batch.
        grace = self.config.checkpoint.preemption_grace_s
        if trainer.state.fn == TrainerFn.FITTING and grace:
            self._leaves = self._leaves or LeavesWhenTold(grace)
            if self._leaves not in trainer.callbacks:  # type: ignore[attr-defined]
                trainer.callbacks.append(self._leaves)  # type: ignore[attr-defined]

        # Weights, optimizers, averages.
        self.resume = None
        if self.loading is not None:
            self.loading.load_weights(self._parallel)
            give_shards(trainer, self.loading.content, self._parallel.module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self._has_averages:
                make_averages(trainer, self.parallel, self.loading)
        self.setup_precision_plugin()
        self._is_set_up = True

    @Strategy.optimizers.setter  # type: ignore[attr-defined,untyped-decorator]
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        # Those of `configure_optimizers` are prepared by `setup_optimizers`; later ones
        # are a user's, who gives the Trainer others while it trains.
        for optimizer in optimizers if self._is_set_up else []:
            self.parallel.prepare_optimizer(getattr(optimizer, "optimizer", optimizer))
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # A second fit wants optimizers made from today's parameters.
        self._reset_optimizers_and_schedulers()
        self.parallel.reshard()
        super().setup_optimizers(trainer)
        # The shard degree was chosen for optimizers that were not made then; now they
        # can be looked at.
        if self.parallel.plan.optimizer is not None:
            warning = missed(self.parallel.plan, self.optimizers)
            if warning is not None and self.global_rank == 0:
                logger.warning("%s", warning)
        for optimizer in self.optimizers:
            self.parallel.prepare_optimizer(optimizer)
        # In these layouts some parameters have no `.grad` before the step: hooks whose
        # code reads it are named once.
        in_stages = self.parallel.window.world is None
        if not in_stages or self._pipelined is not None:
            say_where_gradients_are(hooks_before_steps(trainer), in_stages=in_stages)
        # The assignment makes new wrappers of Lightning, from the prepared optimizers.
        self.optimizers = self.optimizers

    @override
    def model_to_device(self) -> None:
        """Move the children without parameters, such as torchmetrics; the others are
        where sharding has put them."""
        for child in self.parallel.module.modules():
            if (
                not any(True for _ in child.parameters())
                and child is not self.parallel.module
            ):
                child.to(self.root_device)

    # The place in the data, and the save in flight

    @override
    def on_train_start(self) -> None:
        require_equal_training(self._trainer, self.parallel.mesh)
        # Lightning's learning rate finder sees the loss of all ranks' samples, by which
        # the rate that it suggests does not depend on the layout.
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, _LRCallback):
                callback.on_train_batch_end = functools.partial(  # type: ignore[method-assign]
                    self._note_mean_loss, callback
                )
        if self.resume is not None:
            self.resume.on_train_start(self._trainer)
        self._has_stepped = True
        self._remember_loaders()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.resume is not None:
            self.resume.on_train_batch_start(self._trainer)
            self.resume = None
        # Manual optimization may leave a window open at the end of an epoch.
        goes_on_in_window = batch_idx == 0 and self.open_window is not None
        if goes_on_in_window:
            self._remember_loaders()
        if self.joined is not None:
            self.joined.begin_batch()
        for loader in training_loaders(self._trainer):
            begin_batch(loader)
        # A window begins with this batch: what a checkpoint inside it goes back to.
        if goes_on_in_window or self.open_window is None:
            self._has_stepped = False
            self._window_start = WindowStart.here(
                self._trainer, self._loaders, is_whole=not goes_on_in_window
            )

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.before_validation.step_has_ended(self._trainer)
        if self.background_saves is not None:
            self.background_saves.settle()
        self._remember_loaders()
        return result

    @override
    def _before_update(self) -> None:
        if self._memory is not None:
            self._memory.tier.before_update()

    def _remember_loaders(self) -> None:
        """Remember the data loaders' state between windows; a save inside the next one
        resumes from it."""
        trainer = self._trainer
        if (
            trainer.accumulate_grad_batches > 1
            or not self._module.automatic_optimization
        ):
            self._loaders = loader_state(trainer)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Every rank has to call it: one that did not is named, in the place of a hang.
        meet_between_runs("trainer.save_checkpoint(...)")
        self.parallel.reshard()
        self.parallel.broadcast_buffers()
        return self.parallel.model_state()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return checkpoints.optimizer_state(self, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        trainer = self._trainer
        # Counters first: what the checkpoint says about its place, before that place is
        # described.
        if self.open_window is not None:
            self.open_window.rewind(checkpoint)
        elif is_lacking(trainer):
            begin_with_it(checkpoint, in_progress=trainer.validating)
        place = describe_place(trainer, checkpoint, self.mesh.data_size)
        if place is not None:
            checkpoint["smp_data"] = place
            checkpoint["smp_metrics"] = metrics_of(trainer)
        # Shards in callbacks' states are noted, and scales of FP8 added, which are no
        # parameters.
        note_shards(checkpoint)
        if self.parallel.fp8 is not None:
            checkpoint[FP8_STATE] = self.parallel.fp8.state_dict()
        # By identity: no path of a user's is meant.
        if filepath is IN_MEMORY:
            assert self._memory is not None
            checkpoints.save_in_memory(self, checkpoint, self._memory.tier)
            return
        checkpoints.save(
            self,
            checkpoint,
            self.broadcast(filepath),
            storage_options,
            self.background_saves,
        )
        if self.background_saves is not None and not self._is_running():
            self.background_saves.wait()

    @property
    def memory(self) -> KeepsInMemory | None:
        """The keeper of the newest state in shared memory; None outside of fit and
        without the knob. Collective."""
        trainer = self._trainer
        every = self.config.checkpoint.memory_every_n_steps
        if self._memory is None and every and trainer.state.fn == TrainerFn.FITTING:
            assert self._topology is not None
            self._memory = KeepsInMemory(trainer, self._asked, self._topology)
        return self._memory

    def _is_running(self) -> bool:
        """Return whether training hides a save; after training, a save has to be
        complete when it returns."""
        state = self._trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Rank 0's path counts: clocks and views of a shared file system differ.
        path = self.broadcast(checkpoint_path)
        if nothing_saved(self, path, self.memory):
            return NothingSaved()
        self.loading = Loading(self, path, weights_only, self.memory)
        let_wait(self.loading.content, averaging_keys(self._trainer))
        return self.loading.content

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        assert self.loading is not None
        self.loading.take_model_state(checkpoint["state_dict"], strict)
        # In the middle of a run: the learning rate finder restores the state from
        # before its trial.
        if self._is_set_up:
            self.loading.load_weights(self.parallel)
            give_shards(self._trainer, self.loading.content, self.parallel.module)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.loading is not None
        self.resume = self.loading.load_training(self, checkpoint)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoints.remove(self, filepath, self.background_saves)

    # The end

    @property
    def preemption(self) -> Preemption | None:
        """The notices to all ranks that the job is about to be ended; None outside of
        fit, and with no grace."""
        return None if self._leaves is None else self._leaves.preemption

    def _leave_if_told(self) -> None:
        """Agree with ranks that are behind a batch of a validation, where this one has
        none."""
        if self._leaves is not None:
            self._leaves.on_validation_batch_end(
                self._trainer, self._trainer.lightning_module
            )

    @override
    def teardown(self) -> None:
        """Tear the run down after the save in flight. The module stays sharded."""
        if self._leaves is not None:
            self._leaves.restore()
        # An error of the save in flight is raised, unless one of training is on its way
        # already. Memory is freed only where all ended well.
        memory, self._memory = self._memory, None
        saved = False
        try:
            if self.background_saves is not None:
                self.background_saves.wait()
            saved = True
        except CheckpointError as error:
            if not self._failed:  # else it would hide the first error
                raise
            logger.error("%s", error)
        finally:
            if memory is not None:
                memory.close(self._trainer, ended_well=saved and not self._failed)
            super().teardown()
            self._run.close()


_ARGUMENTS = list_knobs(SmpShardedStrategy.__init__)
