"""SmpShardedStrategy: smp_core under Lightning's Trainer.

Thin: each hook calls the core. What Lightning leaves to a strategy and what is done here:

    setup_environment     process group, topology, watch over the ranks
    setup                 precision, mesh, parallelize_model, optimizers
    *_step                run with the LightningModule's own parameters gathered, if it has any
    batch_to_device       where sequences are shared: this rank's part (lightning_smp/sequences.py)
    block_backward_sync   a micro-batch that is not its window's last
    optimizer_step        the window is closed before clipping; non-finite norms; the meter's step
    save/load_checkpoint  one folder of sharded tensors, or one ordinary .ckpt (lightning_smp/checkpoints.py)
    on_exception          says which rank was lost

Private names: Lightning has no public launcher of scripts (``_SubprocessScriptLauncher``), torch no public class over
BatchNorm1d/2d/3d (``_BatchNorm``) and no public access to a module's registries as dicts (``_modules``,
``_parameters``, ``_buffers``).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from rich.console import Console
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_smp import checkpoints
from lightning_smp.background import BackgroundSaves
from lightning_smp.environment import PlatformEnvironment
from lightning_smp.precision import Fp8Precision, adapt_precision, autocast_dtype
from lightning_smp.resume import Resume, WindowStart, describe_place, loader_state, place_sampler
from lightning_smp.sequences import SharedSequences
from smp_core.checkpoint import CheckpointError
from smp_core.config import SmpConfig
from smp_core.context_parallel.batch import BatchLayout
from smp_core.fp8.recipe import Fp8Recipe
from smp_core.liveness import RankWatch
from smp_core.mesh import SmpMesh
from smp_core.parallelize import ParallelModel, parallelize_model
from smp_core.planning.memory import smallest_shard_degree
from smp_core.sharding.batch_norm import CpuSyncBatchNorm, sync_batch_norm_on_cpu
from smp_core.sharding.grad_norm import settle_nonfinite
from smp_core.sharding.wrap import Entry, plan_units
from smp_core.topology import Topology

logger = logging.getLogger("smp")

_ATTACHED = "_smp_parallel"
# Knobs that do not depend on how a module was sharded.
_OF_EACH_RUN = ("save_full_state_dict", "async_save", "verify_checkpoint", "allow_batch_change")


class SmpShardedStrategy(ParallelStrategy):
    """MiCS sharding for ``Trainer(strategy=SmpShardedStrategy(...))``; by name ``"smp_sharded"``,
    ``"smp_sharded_node"``, ``"smp_sharded_world"``, ``"smp_sharded_fp8"``.

    Args:
        config: all knobs in one object; or give them as keywords.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: Lightning's own.
            ``checkpoint_io`` is used for ordinary ``.ckpt`` files (``save_full_state_dict=True``); sharded folders have
            a writer of their own.
        process_group_backend: default ``"nccl"`` on CUDA, ``"gloo"`` on CPU.
        timeout: of collectives; a rank that dies is noticed within it.
        init_fn: gives one module its initial values in place; for modules built on the meta device that have no
            initialiser of their own (see docs/delayed-init.md).
        batch_layout: with ``context_parallel_degree`` above 1, which tensors of a batch are split along which dim
            (:class:`smp_core.context_parallel.batch.BatchLayout`); by default found out.
        full_outputs: with ``context_parallel_degree`` above 1, whether tensors [batch, tokens, ...] that validation,
            test and predict steps return are made whole over the ranks that share the sequences.
        knobs: the fields of :class:`smp_core.config.SmpConfig` (``shard_degree=8``, ...).

    Raises:
        ValueError: an unknown knob (with the nearest known one), a bad value, a knob that is not built yet, or both
            ``config`` and knobs.
    """

    strategy_name = "smp_sharded"
    is_distributed = True

    def __init__(
        self,
        config: SmpConfig | None = None,
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
        cluster_environment = cluster_environment or PlatformEnvironment.detected()
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if config is not None and knobs:
            raise ValueError(
                f"SmpShardedStrategy got config= and also {', '.join(knobs)}; write dataclasses.replace(config, "
                f"{', '.join(f'{k}={v!r}' for k, v in knobs.items())}) or give keywords only"
            )
        self.config = SmpConfig.from_dict(knobs) if config is None else config
        self.config.require_built()
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._init_fn = init_fn
        self._sequences = SharedSequences(batch_layout, full_outputs)
        self._topology: Topology | None = None
        self._watch: RankWatch | None = None
        self._parallel: ParallelModel | None = None
        self._window_start: WindowStart | None = None
        self._loaders: dict[str, Any] = {}
        self.resume: Resume | None = None
        self.background_saves: BackgroundSaves | None = None
        self._failed = False

    # What a callback or a LightningModule may look at

    @property
    def parallel(self) -> ParallelModel:
        """The parallelized LightningModule: units, window, meter, mesh. Known once ``setup`` has run."""
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

    # Processes

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

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        context = self.config.context_parallel_degree
        return {"num_replicas": self.world_size // context, "rank": self.global_rank // context}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._init_process_group()
        if self._topology is None:
            self._topology = Topology.discover()
        if self._watch is None:
            self._watch = RankWatch.start()

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _init_process_group(self) -> None:
        if dist.is_initialized():
            return
        environment = self.cluster_environment
        assert environment is not None
        device = self.root_device
        backend = self._process_group_backend or ("nccl" if device.type == "cuda" else "gloo")
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
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)

    # Model and optimizers

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else adapt_precision(plugin, self)

    @contextlib.contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        on_meta = bool(empty_init) or self.config.delayed_init
        with torch.device("meta") if on_meta else contextlib.nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model``. Lightning calls that hook again for every ``validate`` and ``test``; a module
        that was sharded, and perhaps trained, before keeps its submodules and parameters."""
        module = self.lightning_module
        assert module is not None
        attached = getattr(module, _ATTACHED, None)
        registries: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]  # type: ignore[list-item]
        before = [dict(registry) for registry in registries]
        yield
        if attached is not None:
            for registry, kept in zip(registries, before, strict=True):
                registry.update(kept)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        # FSDP2 cannot train on what it gathered under inference mode.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False
        module = self.lightning_module
        attached: tuple[ParallelModel, str] | None = getattr(module, _ATTACHED, None)
        self._adopt_recipe()
        if attached is None:
            self._parallel = self._parallelize(module)
            object.__setattr__(module, _ATTACHED, (self._parallel, str(self.precision_plugin.precision)))
            self._say_what_took_effect(module)
        else:
            if trainer.state.fn == TrainerFn.FITTING:
                self._check_layer_sync(module)
            self._parallel = self._reattach(*attached)
        self._sequences.attach(self._parallel.context, module)
        self.model = module
        self.model_to_device()
        if self.config.async_save and self.background_saves is None:
            self.background_saves = BackgroundSaves(self.is_global_zero)
        self._failed = False
        self.resume = None
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _adopt_recipe(self) -> None:
        """``plugins=[Fp8Precision(recipe)]`` is the knob ``fp8`` by another name."""
        plugin = self.precision_plugin
        if not isinstance(plugin, Fp8Precision):
            return
        plugin.device_type = self.root_device.type
        if self.config.fp8 not in (None, plugin.recipe, Fp8Recipe()):
            raise ValueError(
                f"fp8={self.config.fp8} was asked of the strategy and {plugin.recipe} of Fp8Precision; write the "
                "recipe in one of the two places"
            )
        if self.config.fp8 != plugin.recipe:
            self.config = dataclasses.replace(self.config, fp8=plugin.recipe)

    def _parallelize(self, module: LightningModule) -> ParallelModel:
        assert self._topology is not None
        if self._layer_sync is not None:
            # For an evaluation too: the module stays as it is sharded now, and a fit may follow.
            # torch's own SyncBatchNorm refuses CPU tensors.
            sync = sync_batch_norm_on_cpu if self.root_device.type == "cpu" else self._layer_sync.apply
            module = sync(module)  # type: ignore[assignment]
        module = self.precision_plugin.convert_module(module)  # type: ignore[assignment]
        entry: Entry = "steps" if module.automatic_optimization else "children"
        config = self._with_precision(self.config)
        if config.shard_degree == "auto":
            config = self._with_shard_degree(config, module, entry)
        mesh, config = SmpMesh.build(config, self._topology, self.root_device)
        parallel = parallelize_model(
            module,
            mesh,
            config,
            entry=entry,
            cast_forward_inputs=autocast_dtype(self.precision_plugin) is None,
            init_fn=self._init_fn,
        )
        self.config = parallel.config
        return parallel

    def _with_precision(self, config: SmpConfig) -> SmpConfig:
        """``param_dtype="auto"``: under autocast parameters are gathered in autocast's dtype, half the bytes; not on
        CPU, whose autocast lets ``layer_norm`` meet a float32 input and a half precision weight, which it refuses."""
        plugin = self.precision_plugin
        if config.param_dtype == "auto":
            gathered, why = None, f"precision={plugin.precision!r}"
            under = autocast_dtype(plugin)
            if under is not None:
                gathered = str(under).removeprefix("torch.")
                if self.root_device.type == "cpu":
                    gathered, why = None, f"{why} on CPU: autocast there does not mix dtypes in norms"
            config = config.with_resolved("param_dtype", gathered, why)
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            config = config.with_resolved(
                "on_nonfinite_grad_norm", "ignore", "the gradient scaler of 16-mixed skips such steps itself"
            )
        return config

    def _with_shard_degree(self, config: SmpConfig, module: LightningModule, entry: Entry) -> SmpConfig:
        assert self._topology is not None
        units = plan_units(module, config, entry=entry).unit_parameters()
        memory = None
        if self.root_device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.root_device).total_memory
        degree, why, _ = smallest_shard_degree(module, self._topology, config, memory, units=units)
        return config.with_resolved("shard_degree", degree, why)

    def _check_layer_sync(self, module: LightningModule) -> None:
        plain = [
            name
            for name, child in module.named_modules()
            if isinstance(child, _BatchNorm) and not isinstance(child, (nn.SyncBatchNorm, CpuSyncBatchNorm))
        ]
        if self._layer_sync is not None and plain:
            raise ValueError(
                f"sync_batchnorm=True: this LightningModule was sharded before without it and {plain[0]} stays as it "
                "is; give the flag to the first Trainer too, or use a new module and trainer.fit(..., ckpt_path=...)"
            )

    def _reattach(self, attached: ParallelModel, precision: str) -> ParallelModel:
        """A module that an earlier run sharded stays as it is; other knobs for it would have no effect."""
        if precision != str(self.precision_plugin.precision):
            raise ValueError(
                f"precision={self.precision_plugin.precision!r}: this LightningModule was sharded before with "
                f"precision={precision!r} and keeps that; use the same, or a new module and ckpt_path=..."
            )
        config = attached.config
        for knob, asked in self.config.to_dict().items():
            default = SmpConfig().to_dict()[knob]
            if knob in _OF_EACH_RUN:
                if asked != default:
                    config = config.with_resolved(knob, asked, "asked by this run")
            elif asked not in (default, getattr(attached.config, knob), attached.config.to_dict()[knob]):
                raise ValueError(
                    f"{knob}={asked!r}: this LightningModule was sharded before with {knob}="
                    f"{getattr(attached.config, knob)!r} and keeps that; use the same value, or a new module and "
                    "trainer.fit(..., ckpt_path=...)"
                )
        self.config = config
        return attached

    def _say_what_took_effect(self, module: LightningModule) -> None:
        if self.global_rank == 0:
            console = Console(stderr=True)
            console.print(self.config.effective_table())
            console.print(self.parallel.describe())

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # A second fit wants optimizers made from today's parameters.
        self._reset_optimizers_and_schedulers()
        self.parallel.reshard()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.parallel.prepare_optimizer(optimizer)
        # Assigning makes Lightning's wrappers anew, from the optimizers as they are now.
        self.optimizers = self.optimizers

    @override
    def model_to_device(self) -> None:
        """parallelize_model has done it; torchmetrics and the like follow here."""
        for child in self.parallel.module.modules():
            if not any(True for _ in child.parameters()) and child is not self.parallel.module:
                child.to(self.root_device)

    # Steps

    def _run_step(self, method: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
        with context, self._sequences.active():
            return self.parallel.run_as_forward(method, *args, **kwargs)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As Lightning's; where sequences are shared it is this rank's part of the first context peer's batch."""
        return self._sequences.part_of(super().batch_to_device(batch, device, dataloader_idx))

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._sequences.active():
            return super().backward(self._sequences.weighted(closure_loss), *args, **kwargs)

    def whole_sequence(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """In a step: a tensor that has this rank's tokens along ``dim``, of all of them. Collective; no gradient."""
        return self._sequences.whole(tensor, dim)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.train_step_context()
        return self._run_step(self.lightning_module.training_step, context, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.val_step_context()
        outputs = self._run_step(self.lightning_module.validation_step, context, *args, **kwargs)
        return self._sequences.outputs(outputs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.test_step_context()
        outputs = self._run_step(self.lightning_module.test_step, context, *args, **kwargs)
        return self._sequences.outputs(outputs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        context = self.precision_plugin.predict_step_context()
        outputs = self._run_step(self.lightning_module.predict_step, context, *args, **kwargs)
        return self._sequences.outputs(outputs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        place_sampler(dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        if self.resume is not None:
            assert self.lightning_module is not None
            self.resume.on_train_start(self.lightning_module.trainer)
        self._remember_loaders()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.resume is not None:
            self.resume.on_train_batch_start()
            self.resume = None
        if not self.window.is_open:
            assert self.lightning_module is not None
            self._window_start = WindowStart.here(self.lightning_module.trainer, self._loaders)

    def _remember_loaders(self) -> None:
        """Between windows; a save inside the next one resumes from here."""
        assert self.lightning_module is not None
        if (
            self.lightning_module.trainer.accumulate_grad_batches > 1
            or not self.lightning_module.automatic_optimization
        ):
            self._loaders = loader_state(self.lightning_module.trainer)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.window.accumulate():
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
            # Closed already unless every backward pass ran inside block_backward_sync (manual optimization).
            self.window.close()
            on_nonfinite = self.config.on_nonfinite_grad_norm
            if on_nonfinite != "ignore":
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                settle_nonfinite(parameters, self.parallel.grad_norm(parameters=parameters), on_nonfinite)
            return result

        result = super().optimizer_step(optimizer, closure_and_close, model, **kwargs)
        self.parallel.meter.close_step()
        if self.background_saves is not None:
            self.background_saves.settle()
        self._remember_loaders()
        if self._watch is not None:
            self._watch.step += 1
        return result

    # Evaluation sees rank 0's BatchNorm statistics on every rank, and leaves no stale gathered parameters behind.

    @override
    def on_validation_start(self) -> None:
        self.parallel.broadcast_buffers()

    @override
    def on_test_start(self) -> None:
        self.parallel.broadcast_buffers()

    @override
    def on_predict_start(self) -> None:
        self.parallel.broadcast_buffers()

    @override
    def on_validation_end(self) -> None:
        self.parallel.reshard()

    @override
    def on_test_end(self) -> None:
        self.parallel.reshard()

    @override
    def on_predict_end(self) -> None:
        self.parallel.reshard()

    # Collectives on behalf of the Trainer

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            on_cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_cuda else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        carried = [obj]
        dist.broadcast_object_list(carried, src)
        return carried[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over all ranks or ``group``: ``"mean"``, ``"sum"``, ... or a ``ReduceOp``; what is no tensor stays."""
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        group = dist.group.WORLD if group is None else group
        mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
        mean = mean or reduce_op == dist.ReduceOp.AVG
        if mean:
            op = dist.ReduceOp.SUM
        else:
            op = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        tensor = tensor.clone()
        if mean and not torch.is_floating_point(tensor):
            tensor = tensor.float()
        dist.all_reduce(tensor, op=op, group=group)
        return tensor / dist.get_world_size(group) if mean else tensor

    # Checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.parallel.reshard()
        self.parallel.broadcast_buffers()
        return checkpoints.model_state(self)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return checkpoints.optimizer_state(self, optimizer)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """``load_checkpoint`` has loaded the weights already."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """``load_checkpoint`` has loaded the states already."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.window.is_open and self._window_start is not None:
            self._window_start.rewind(checkpoint)
        assert self.lightning_module is not None
        place = describe_place(self.lightning_module.trainer, checkpoint, self.mesh.data_size)
        if place is not None:
            checkpoint["smp_data"] = place
        if self.parallel.fp8 is not None:
            checkpoint[checkpoints.FP8_STATE] = self.parallel.fp8.state_dict()
        checkpoints.save(self, checkpoint, self.broadcast(filepath), storage_options)
        if self.background_saves is not None and not self._is_running():
            self.background_saves.wait()

    def _is_running(self) -> bool:
        """Whether there is training for a save to hide behind; after it, who saves wants to find the checkpoint."""
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.parallel.reshard()
        return checkpoints.load(self, self.broadcast(checkpoint_path), weights_only)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoints.remove(self, filepath)

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._watch is not None and isinstance(exception, Exception):
            self._watch.report(exception)

    @override
    def teardown(self) -> None:
        """The module stays sharded and where it is: it can be evaluated, saved or trained on by a next call."""
        assert self.cluster_environment is not None and self.accelerator is not None
        try:
            if self.background_saves is not None:
                self.background_saves.wait()
        except CheckpointError as error:
            if not self._failed:  # else it would hide what went wrong first
                raise
            logger.error("%s", error)
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
