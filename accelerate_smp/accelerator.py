"""SmpAccelerator: smp_core under Accelerate's API.

Sharding is done by :func:`smp_core.entry.parallelize`, called from ``prepare_model``
(through :mod:`accelerate_smp.sharding`), and not by Accelerate's own
``fsdp2_prepare_model`` with our objects attached afterwards: one engine for both faces,
with the same units, initial weights and refusals. Accelerate's way (1.15) also

- does nothing on CPU: the FSDP plugin is dropped there and the model wrapped in DDP,
- refuses 0-d parameters and units of several dtypes, and replicas that are not sharded
  (no shard mesh for FSDP),
- makes weights equal on replicas only with ``cpu_ram_efficient_loading``, which sends
  every whole tensor to the world and fails for persistent buffers.

To Accelerate the run is a plain multi-process one: its data loaders, samplers, trackers
and gather functions work as they are, and read the layout from ``parallelism_config``
(:mod:`accelerate_smp.parallelism`). A pre-sharded model (Transformers'
``distributed_config=``) keeps its sharding and gets the other features.

The overridden methods, in this order:

    prepare, prepare_model, prepare_optimizer, prepare_scheduler    shard, swap the optimizer's parameters
    prepare_data_loader, backward, gather_for_metrics               sequences over ranks (accelerate_smp/sequences.py)
    pipeline_step, backward                                         stages (accelerate_smp/pipeline.py)
    no_sync (hence accumulate), clip_grad_norm_, clip_grad_value_   windows and norms (accelerate_smp/gradients.py)
    get_state_dict, save, wait_for_everyone                         unsharded weights (accelerate_smp/full_weights.py)
    save_state, load_state                                          folders (accelerate_smp/saved_states.py)
    load_newest_state, keep_state                                   states in memory (accelerate_smp/memory.py)

A process by itself (no launcher) has nothing to shard: everything but save_state and
load_state is Accelerate's own.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_smp.compiled import compiled_already
from accelerate_smp.config import (
    accelerators_arguments,
    check_degree,
    check_world,
    engines_off,
    refuse_engine_in_effect,
    refuse_engines,
    refuse_precision,
    resolve_config,
)
from accelerate_smp.fp8 import settle_fp8
from accelerate_smp.full_weights import FullWeightsAccelerator, save_full
from accelerate_smp.gradients import GradientsAccelerator
from accelerate_smp.handle import attach, parallel_of
from accelerate_smp.memory import StatesInMemoryAccelerator
from accelerate_smp.parallelism import SmpParallelism
from accelerate_smp.processes import (
    check_backend,
    must_say_cpu,
    other_launch,
    require_all_ranks,
)
from accelerate_smp.scheduler import SmpScheduler
from accelerate_smp.sequences import SharedSequencesAccelerator
from accelerate_smp.sharding import shard
from smp_core.cluster import DATA, SmpMesh
from smp_core.config import DEFAULTS, SmpConfig
from smp_core.context_parallel import BatchLayout
from smp_core.engine import ParallelModel, missed, smallest_layout
from smp_core.entry import build_mesh
from smp_core.outside import console
from smp_core.sharding import change_this_process, of_replaced
from smp_core.sharding.optimizer import ShardedGradScaler, settle_nonfinite
from smp_core.topology import Topology
from smp_core.torch_facts import after_each_step, parameters_of
from smp_core.watch import (
    Preemption,
    RankWatch,
    report,
    stop_watching,
    watch_ranks,
)

logger = logging.getLogger("smp")


class PreemptibleAccelerator(StatesInMemoryAccelerator):
    """An Accelerator that takes notices of the job's end, once a loop asks for them:
    every rank hears of it after the same step, saves and leaves."""

    _preemption: Preemption | None = None

    @property
    def preemption(self) -> Preemption:
        """The notices to all ranks; made, and its signals taken, when it is first asked
        for. Collective then."""
        if self._preemption is None:
            self._preemption = Preemption(self.smp_config.checkpoint.preemption_grace_s)
            self._preemption.install()
        return self._preemption

    def is_preempted(self) -> bool:
        """Return whether some rank was told (SIGTERM, SIGUSR1) that the job is about to
        be ended. Collective.

        Ask after each optimizer step, schedules included. From the first call on
        signals do not end the process by themselves; where the answer is True, it is so
        on every rank::

            if accelerator.is_preempted():
                accelerator.save_state("checkpoints/last")
                accelerator.leave()
        """
        return self.preemption.agreed()

    def leave(self) -> NoReturn:
        """Wait for the save in flight and end the process with 128 + the signal's
        number, 143 for SIGTERM. Collective.

        Raises:
            SystemExit: always.
            CheckpointError: the save in flight failed.
        """
        self.wait_for_save()
        self.preemption.restore()
        self.preemption.leave("its state is saved")


class SmpAccelerator(
    SharedSequencesAccelerator,
    GradientsAccelerator,
    PreemptibleAccelerator,
    FullWeightsAccelerator,
):
    """Drop-in for :class:`accelerate.Accelerator` with MiCS sharding.

    Args:
        smp_config: all knobs in one :class:`SmpConfig`, dict or YAML file; default:
            ``SMP_*`` variables and the file that ``SMP_CONFIG_FILE`` names.
        smp: False: no sharding, Accelerate as it is (DDP).
        schedule_in_optimizer_steps: schedules were counted in optimizer steps of all
            ranks together, and not in batches of the unprepared loader as in
            Accelerate's examples.
        batch_layout: where ranks share sequences, which tensors of a batch are split
            along which dim; by default found out
            (:class:`smp_core.context_parallel.batch.BatchLayout`).
        arguments: Accelerator's own, and single knobs (``shard_degree=8``).
            ``parallelism_config`` and ``fsdp_plugin`` are translated to knobs:
            ``dp_shard_size x cp_size`` is the shard degree.

    Raises:
        ValueError: an unknown keyword (with the nearest knob), degrees that do not
            multiply to the number of processes, fp8 or fp16 where they cannot run, a
            process group that cannot send from this device, DeepSpeed or Megatron-LM.
    """

    counts_ranks_itself = False
    """True while Trainer computes with ``num_processes``, in which ranks of one batch
    count once."""

    def __init__(
        self,
        *args: Any,
        smp_config: SmpConfig
        | Mapping[str, Any]
        | str
        | os.PathLike[str]
        | None = None,
        smp: bool = True,
        batch_layout: BatchLayout | None = None,
        schedule_in_optimizer_steps: bool = False,
        **arguments: Any,
    ) -> None:
        knobs = {
            name: arguments.pop(name)
            for name in tuple(arguments)
            if name in SmpConfig.knobs()
        }
        # Knobs come out of the keywords first: all others are Accelerate's, or
        # misspelt.
        arguments = accelerators_arguments(self, args, arguments)
        self.smp = smp
        self.batch_layout = batch_layout
        self.schedule_in_optimizer_steps = schedule_in_optimizer_steps
        self.smp_mesh: SmpMesh | None = None
        self._topology: Topology | None = None
        self._parallelism: SmpParallelism | None = None
        self._prepared_together: list[Optimizer] = []
        self._watch: RankWatch | None = None
        # Before Accelerate's own state is made, which every later accelerator shares.
        launch = other_launch()
        if must_say_cpu():
            arguments["cpu"] = True
        if not smp:
            super().__init__(**arguments)
            require_all_ranks(launch, self.num_processes)
            return

        # The knobs; Accelerate's own options for sharding become knobs.
        refuse_precision(arguments)
        refuse_engines(arguments)
        parallelism = arguments.pop("parallelism_config", None)
        fsdp = arguments.pop("fsdp_plugin", None)
        self.smp_config = settle_fp8(
            arguments, resolve_config(smp_config, knobs, parallelism, fsdp)
        )
        # A knob of Lightning's face, which a shared file may have.
        if self.smp_config.checkpoint.full_state_dict:
            why = "save_state writes folders; unsharded weights: save_model, or `smp checkpoint consolidate`"
            self.smp_config = self.smp_config.with_resolved(
                "checkpoint.full_state_dict", False, why
            )
        # What was asked stays apart from what took effect: a second model is sharded by
        # the same wishes.
        self._asked = self.smp_config

        # Accelerate, without a sharding engine of its own.
        with engines_off():
            super().__init__(**arguments)
        refuse_engine_in_effect(self.distributed_type)
        require_all_ranks(launch, self.num_processes)
        check_world(parallelism, self.num_processes)

        self._sizes = parallelism
        self._find_ranks()
        if type(self.scaler) is torch.amp.GradScaler:
            # The same state; it also unscales plain and sharded together.
            self.scaler.__class__ = ShardedGradScaler
        if self.ddp_handler is not None:
            _refuse_hook(self.ddp_handler)
            logger.debug(
                "DistributedDataParallelKwargs has no effect: nothing is wrapped in DDP"
            )

    def _find_ranks(self) -> None:
        """Discover the topology, watch the ranks, and make the mesh unless its degrees
        wait for the model."""
        if self.use_distributed and dist.is_initialized():
            check_backend(self.device, self.init_handler)
            self._topology = Topology.discover()
            self._watch = watch_ranks()
            # A degree or a plan that depends on the model's size waits for the first
            # one; who reads which samples is known before.
            if self.smp_config.shard_degree != "auto" and self.smp_config.plan is None:
                mesh, self.smp_config = build_mesh(
                    self._asked, self._topology, self.device
                )
                self._adopt_mesh(mesh)
            else:
                self.layout = smallest_layout(self._asked, self._topology)
        # One process shards nothing; what is lost by that is said.
        elif self.smp_config != DEFAULTS:
            knobs = self.smp_config
            also = {
                " or computed in FP8": knobs.fp8 is not None,
                ", no loss is chunked": knobs.chunked_cross_entropy is not None,
                ", no frozen weight is stored as codes": knobs.frozen_storage
                is not None,
                ", no state is kept in memory": knobs.checkpoint.memory_every_n_steps,
            }
            lost = "".join(words for words, is_asked in also.items() if is_asked)
            logger.warning(
                "one process: nothing is sharded%s; start with torchrun or `accelerate-smp launch`",
                lost,
            )

    def take_over(self, other: SmpAccelerator) -> None:
        """Take what another accelerator has in hand: states in memory, the save in
        flight, notices of the job's end."""
        for name in ("memory", "_phases_before", "background_saves", "_preemption"):
            setattr(self, name, getattr(other, name))

    @property
    def sharding(self) -> bool:
        """Return whether models are sharded here: ``smp`` is on and there is a process
        group."""
        return self._topology is not None

    @property
    def parallel(self) -> ParallelModel:
        """The handle of the first prepared model: units, window, meter, mesh."""
        for model in self._models:
            handle = parallel_of(model)
            if handle is not None:
                return handle
        raise RuntimeError(
            "no model is sharded yet; accelerator.parallel is there after prepare(model)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for other processes, such as a tokenizing function that asks for
        ``process_index``.

        Groups, threads and prepared objects are left out.
        """
        own = (
            "smp_mesh",
            "layout",
            "background_saves",
            "memory",
            "_topology",
            "_parallelism",
            "_watch",
            "_preemption",
        )
        prepared = ("_models", "_optimizers", "_schedulers", "_dataloaders")
        left_out: dict[str, Any] = {
            **dict.fromkeys(own),
            **{name: [] for name in prepared},
        }
        return {
            **self.__dict__,
            **{
                name: value for name, value in left_out.items() if name in self.__dict__
            },
        }

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, models first, so that optimizers may stand before
        them."""
        if self.smp_mesh is not None:
            # Torchmetrics may have been imported since.
            change_this_process(self.smp_mesh)
        if self.sharding:
            # Memory is planned for the optimizers that come in the same call.
            self._prepared_together = [
                obj for obj in args if isinstance(obj, Optimizer)
            ]
            prepared = list(args)
            try:
                for place, obj in enumerate(args):
                    if isinstance(obj, nn.Module):
                        prepared[place] = self.prepare_model(obj)
            finally:
                self._prepared_together = []
            args = tuple(prepared)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard the model, also for evaluation alone: a model that is trained later is
        ready for it."""
        if self.sharding and any(model is each for each in self._models):
            # Accelerate marks it after prepare, and before 1.15 it would note it a
            # second time.
            return model
        if not self.sharding or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        # A model that was prepared by another accelerator of this process has its
        # handle already.
        if parallel_of(model) is None and not self.verify_device_map(model):
            handle = self._parallelize(model)
            watch_for_unprepared()
            attach(model, handle)
            save_full(model, handle)
            if handle.context is not None:
                self.run_over_ranks(model)
        with compiled_already(model, self):  # Accelerate still adds autocast
            return super().prepare_model(
                model, device_placement=False, evaluation_mode=True
            )

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        """Unwrap as Accelerate does; a sharded model stays in autocast, without which
        the parameters that it gathers would meet inputs of another dtype."""
        sharded = self.native_amp and parallel_of(model) is not None
        if sharded and not keep_fp32_wrapper:
            logger.warning(
                "unwrap_model(keep_fp32_wrapper=False): the model stays in autocast, because its parameters are "
                "gathered in %s; leave it out, or write mixed_precision='no'",
                self.mixed_precision,
            )
            keep_fp32_wrapper = True
        return super().unwrap_model(model, keep_fp32_wrapper, *args, **kwargs)

    def _parallelize(self, model: nn.Module) -> ParallelModel:
        """Shard a model; the first one decides the mesh and prints the table of
        knobs."""
        assert self._topology is not None
        first = all(parallel_of(prepared) is None for prepared in self._models)
        if not first and self.stages > 1:
            raise ValueError(
                f"pipeline_parallel_degree={self.stages}: a second model ({type(model).__name__}) is not built yet; "
                "prepare one. One that is not trained needs no preparing: model.to(accelerator.device). Or write "
                "pipeline_parallel_degree=1"
            )
        handle = shard(
            model,
            self._asked,
            self._topology,
            self,
            self.smp_mesh,
            self._prepared_together,
        )
        if self.smp_mesh is None:
            self._require_same_readers(handle.mesh)
            self._adopt_mesh(handle.mesh)
        if first:
            self.smp_config = handle.config
            if self.is_main_process:
                print(handle.report(), file=sys.stderr, flush=True)
        return handle

    def _require_same_readers(self, mesh: SmpMesh) -> None:
        """Refuse degrees that a plan chose after a loader was prepared for others."""
        # Loaders deal samples out by the degrees of the smallest layout, which a plan
        # may change.
        assumed = mesh.data_size if self.layout is None else self.layout.size(*DATA)
        if self._dataloaders and mesh.data_size != assumed:
            raise ValueError(
                f"plan='auto' chose context_parallel_degree={mesh.context_degree} and tensor_parallel_degree="
                f"{mesh.tensor_degree} after a data loader was prepared; prepare the model first or together with it"
            )

    def _adopt_mesh(self, mesh: SmpMesh) -> None:
        check_degree(self._sizes, mesh.shard_degree)
        self.smp_mesh, self.layout, self._parallelism = (
            mesh,
            mesh.layout,
            SmpParallelism.of(mesh),
        )
        change_this_process(mesh)

    @property
    def mesh(self) -> SmpMesh:
        """The axes and groups; with ``shard_degree="auto"`` available once the first
        model has been prepared."""
        if self.smp_mesh is None:
            raise RuntimeError(
                "shard_degree='auto' is settled when the first model is prepared; call prepare(model) before"
            )
        return self.smp_mesh

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The layout in Accelerate's terms; None while ``shard_degree="auto"`` waits
        for the first model."""
        if self.counts_ranks_itself:
            return None
        return self._parallelism if self.sharding else super().parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """A mesh with the axes of :attr:`parallelism_config`; those of one rank are
        left out. Loaders, which are told who reads what, see none.
        """
        if not self.sharding:
            return super().torch_device_mesh
        return (
            None
            if self._parallelism is None or self._counted == DATA
            else self._parallelism.device_mesh
        )

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Give an optimizer made from the unsharded parameters the sharded ones, in the
        same groups."""
        if self.sharding and not getattr(optimizer, "_is_accelerate_prepared", False):
            self._adopt(optimizer)
            is_prepared(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Give the optimizer the sharded parameters of the models that it steps, and
        hook its steps."""
        handles = [
            handle for handle in map(parallel_of, self._models) if handle is not None
        ]
        if not handles:
            raise ValueError(
                "the optimizer steps parameters of no prepared model; call prepare(model, optimizer), or prepare the "
                "model first"
            )
        # An optimizer without any of their parameters yet belongs to the first model:
        # its groups may be filled later.
        stepped = [handle for handle in handles if handle.steps(optimizer)]
        first, *others = stepped or handles
        # Prepared before, by another accelerator: its hooks are there.
        if not first.prepare_optimizer(optimizer, *others):
            return
        for handle in stepped:
            warning = missed(handle.plan, [optimizer])
            if warning is not None and self.is_main_process:
                logger.warning("%s", warning)
            optimizer.register_step_pre_hook(self._before_step(handle))
        after_each_step(optimizer, self._after_step(stepped))

    def _before_step(self, handle: ParallelModel) -> Any:
        def before_step(optimizer: Optimizer, *_: Any) -> None:
            # Before each step: the sum over replicas is over, states in memory are
            # copied, and no step is taken with inf or nan unless it was asked for.
            handle.window.close()
            if self.memory is not None:
                self.memory.before_update()
            on_nonfinite = handle.config.on_nonfinite_grad_norm
            if on_nonfinite != "ignore":
                parameters = handle.stepped(parameters_of(optimizer))
                settle_nonfinite(
                    parameters, handle.grad_norm(parameters=parameters), on_nonfinite
                )

        return before_step

    def _after_step(self, handles: list[ParallelModel]) -> Any:
        def after_step() -> None:
            for handle in handles:
                handle.meter.close_step()
            if self._watch is not None:
                self._watch.step += 1
            self.settle_save()

        return after_step

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule that ends where it ends on one process
        (:class:`SmpScheduler`)."""
        known = len(self._schedulers)
        prepared = super().prepare_scheduler(scheduler)
        # By ranks that read different samples: copies of a batch use up none.
        batches = self.num_processes if self.layout is None else self.data_size
        if not self.sharding or self.split_batches or len(self._schedulers) == known:
            return prepared
        # Accelerate's own counts processes, also copies.
        # `split_batches` is Accelerate's way to say that one step is one step.
        if self.schedule_in_optimizer_steps or batches == 1:
            prepared.split_batches = True
            return prepared
        if known == 0 and self.step_scheduler_with_optimizer and self.is_main_process:
            console(stderr=True).print(
                f"schedules advance {batches} steps with each optimizer step, which uses up {batches} batches; for one "
                "that is counted in optimizer steps write SmpAccelerator(schedule_in_optimizer_steps=True)"
            )
        self._schedulers[-1] = SmpScheduler(prepared, batches)
        return self._schedulers[-1]

    def end_training(self) -> None:
        """End training as Accelerate does, after the save in flight: free the states in
        memory, take no more notices by signals, and stop the watch over the ranks.

        While an error is handled, in ``finally:`` or ``except:``, it is told to the other
        ranks, and states in memory stay for a restart.
        """
        error = sys.exc_info()[1]
        if error is not None:
            report(error)
        self.wait_for_save()
        # What the script does from here on asks for no notices, so SIGTERM ends it.
        if self._preemption is not None:
            self._preemption.restore()
        self.close_memory(ended_well=error is None)
        if self.sharding:
            stop_watching()
        super().end_training()


def _refuse_hook(asked: DistributedDataParallelKwargs) -> None:
    """Refuse a hook of DDP that would send gradients in fewer bits."""
    for name in ("comm_hook", "comm_wrapper"):
        hook = getattr(asked, name)
        if hook != DDPCommunicationHookType.NO:
            raise ValueError(
                f"DistributedDataParallelKwargs({name}={hook}): nothing is wrapped in DDP; leave it out, and write "
                "compression={'reduce': 'bf16'} or {'reduce': 'int8'}"
            )


_prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


def watch_for_unprepared() -> None:
    """Look at every optimizer's first step from now on, and refuse one that was not
    prepared with its model.

    Made before the model was sharded it would train nothing: it steps tensors that the
    model does not use any more and that never receive a gradient. A prepared optimizer
    has been given the model's present parameters.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))


def is_prepared(optimizer: Optimizer) -> None:
    """Record that ``optimizer`` has been given the model's present parameters."""
    _prepared.add(optimizer)


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _prepared:
        return
    # Parameters of before sharding are remembered with the model's name.
    model, n = of_replaced(parameters_of(optimizer))
    if model is not None:
        raise ValueError(
            f"{type(optimizer).__name__} steps {n} parameters that {model} had before it was sharded, "
            "which would train nothing; write model, optimizer = accelerator.prepare(model, optimizer), or make the "
            "optimizer after prepare(model) and prepare it too"
        )
