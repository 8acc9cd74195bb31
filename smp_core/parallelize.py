"""parallelize_model(): the one place that knows the order of all conversions.

1.  plan_units: which modules become units; the model is looked at as the user made it
2.  settle_stages: where links were measured, whether two stages pay for these units
3.  build_context_parallel: attention over the ranks that share sequences
4.  _to_fp8: linear layers to FP8, whose weights then travel in FP8
5.  chunk_losses: losses in chunks of tokens, for which FSDP2's hooks see one forward of the head
6.  save_activations: checkpointing, a property of a module's forward, so inside FSDP2's hooks
7.  broadcast_from_rank_0: rank 0's weights for what stays whole; a unit gets them just before it is sharded
8.  settle_fsdp_options: how far ahead units are gathered
9.  shard_units: fully_shard of blocks, then roots, with our communication objects
10. apply_fsdp_options: what was settled in 8
11. materialize: what is on the meta device, shard by shard
12. move_plain_tensors: what FSDP2 does not manage, to the device
13. register_forward_methods: methods besides forward that gather
14. AccumulationWindow: gradients from here on, with the hop across replicas
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from smp_core.activations.savers import NOTHING_SAVED, ActivationSavers, save_activations
from smp_core.comm.flat import FlatMaxReduce
from smp_core.comm.meter import CommMeter
from smp_core.comm.traffic import Traffic
from smp_core.config import SmpConfig
from smp_core.context_parallel.batch import ContextParallel
from smp_core.context_parallel.build import build_context_parallel
from smp_core.context_parallel.chunked_models import chunk_losses
from smp_core.explanations import explain_uncaught_errors
from smp_core.fp8.backends import convert_with
from smp_core.fp8.convert import Fp8Model, convert_to_fp8
from smp_core.mesh import SmpMesh
from smp_core.module_names import clean_name
from smp_core.planning.auto_degree import AutoDegree
from smp_core.sharding.accumulation import AccumulationWindow
from smp_core.sharding.delayed_init import materialize
from smp_core.sharding.forward_methods import register_forward_methods
from smp_core.sharding.fsdp import Calls, ShardedUnit, explain_uncalled, name_uncalled, reshard, shard_units
from smp_core.sharding.fsdp_options import apply_fsdp_options, settle_fsdp_options
from smp_core.sharding.given import NativeWindow
from smp_core.sharding.grad_norm import clip_grad_norm_, grad_norm
from smp_core.sharding.load_state_dict import load_own_parts
from smp_core.sharding.optimizer import WorldSharding, model_parameter
from smp_core.sharding.pickling import refuse_to_pickle_shards
from smp_core.sharding.prepared_optimizer import prepare_optimizer
from smp_core.sharding.rank_0 import broadcast_from_rank_0
from smp_core.sharding.replaced import ReplacedParameters
from smp_core.sharding.scalars import reduce_scalars
from smp_core.sharding.stages import settle_stages
from smp_core.sharding.wrap import Entry, WrapPlan, plan_units, units_with
from smp_core.sharding.zero_grad import drop_with_zero_grad

logger = logging.getLogger("smp")


@dataclass(frozen=True, eq=False)
class ParallelModel:
    """A parallelized module with what steps it: units, window, meter, traffic, mesh, the parameters of before
    (``replaced``); with ``config.fp8``, scales, or what makes the context that another library's FP8 layers want around
    forward (``fp8_region``); where sequences are shared, what splits its batches (``context``); where its shard degree
    was planned, how (``auto_degree``, which who planned puts there)."""

    module: nn.Module
    mesh: SmpMesh
    config: SmpConfig
    plan: WrapPlan
    units: tuple[ShardedUnit, ...]
    window: AccumulationWindow | NativeWindow
    meter: CommMeter
    traffic: Traffic
    calls: Calls
    replaced: ReplacedParameters
    activations: ActivationSavers = NOTHING_SAVED
    fp8: Fp8Model | None = None
    context: ContextParallel | None = None
    fp8_region: Callable[[], AbstractContextManager[Any]] = nullcontext
    auto_degree: AutoDegree | None = None

    def run_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the module (``training_step``) with the module's own parameters gathered."""
        if self._world is not None:
            self._world.follow_flags()
        with self.fp8_region():
            try:
                for unit in self.units:
                    if unit.module is self.module:
                        return self.calls.run_as_forward(unit, method, *args, **kwargs)
                return method(*args, **kwargs)
            except RuntimeError as error:
                name_uncalled(error, self.units)
                raise

    def call(self, submodule: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a submodule by itself, outside of the model's forward, with the parameters of its unit gathered.
        Collective."""
        name = next(name for name, module in self.module.named_modules() if module is submodule)
        holding = [unit for unit in self.units if f"{name}.".startswith(f"{unit.name}." if unit.name else "")]
        if not holding:
            return submodule(*args, **kwargs)
        unit = max(holding, key=lambda unit: len(unit.name))
        return self.calls.run_as_forward(unit, submodule, *args, **kwargs)

    def reshard(self) -> None:
        """Free gathered parameters, e.g. after an evaluation or before weights are loaded."""
        reshard(self.module.modules())
        self.traffic.weights_changed()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """Clip by the norm over all ranks (see :func:`smp_core.sharding.grad_norm.clip_grad_norm_`); closes the window
        if it is open. ``parameters``: only these, e.g. one optimizer's; default all."""
        self.window.close()
        return clip_grad_norm_(
            self.stepped(parameters),
            max_norm,
            norm_type=norm_type,
            shard_group=self.mesh.shard_group,
            on_nonfinite=self.config.on_nonfinite_grad_norm,
        )

    def grad_norm(self, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        """The gradients' norm over all ranks: a plain 0-d tensor, equal everywhere."""
        return grad_norm(
            self.stepped(parameters),
            shard_group=self.mesh.shard_group,
            norm_type=norm_type,
        )

    def stepped(self, parameters: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What holds the gradients of these parameters (default all; also those of before sharding): with
        ``optimizer_shard="world"`` masters of this rank's part, otherwise they themselves."""
        given = self.module.parameters() if parameters is None else map(self.replaced.current, parameters)
        return list(given) if self._world is None else self._world.stepped(given)

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has any of this model's parameters, those of before sharding included."""
        own = set(map(id, self.module.parameters()))
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(id(model_parameter(self.replaced.current(parameter))) in own for parameter in stepped)

    def model_state(self) -> dict[str, Any]:
        """The module's state dict: sharded parameters as DTensors, the live ones; only where
        ``optimizer_shard="world"`` keeps finer weights than parameters, copies of those. Collective then."""
        state: dict[str, Any] = get_model_state_dict(self.module)
        for name, weight in self._finer_weights().items():
            if name in state:
                state[name] = weight
        return state

    def take_model_state(self, state: Mapping[str, Any]) -> None:
        """Take up what was loaded into the tensors of :meth:`model_state`."""
        world = self._world
        if world is None:
            return
        parameters = self._parameters_by_name()
        world.take_weights({id(p): state[name] for name, p in parameters.items() if name in state})

    @property
    def _world(self) -> WorldSharding | None:
        return self.window.world if isinstance(self.window, AccumulationWindow) else None

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {clean_name(name): p for name, p in self.module.named_parameters(remove_duplicate=False)}

    def _finer_weights(self) -> dict[str, torch.Tensor]:
        finer = {} if self._world is None else self._world.weights()
        return {name: finer[id(p)] for name, p in self._parameters_by_name().items() if id(p) in finer}

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *others: ParallelModel) -> bool:
        """Make an optimizer over this model's parameters right for them
        (:mod:`smp_core.sharding.prepared_optimizer`). Collective over the world.

        One that was made from the parameters of before sharding gets those of now. With ``optimizer_shard="world"`` it
        steps masters of this rank's part from now on; ``state_dict`` and ``load_state_dict`` are collective then. With
        ``state_offload="optimizer"`` it steps on the host. ``step`` closes an open window.

        Args:
            others: further models whose parameters it steps.

        Returns:
            False if it was prepared before, and nothing was to be done.

        Raises:
            ValueError: parameters of no model, an optimizer that cannot step shards, ``optimizer_shard="world"`` and
                one that looks across a tensor or across tensors, states that cannot be saved.
        """
        models = (self, *others)
        prepared = prepare_optimizer(optimizer, models)
        for model in models:
            if prepared and model.fp8 is not None:
                model.fp8.follow(optimizer)
        return prepared

    def describe(self) -> str:
        """A few lines for people: the layout, the units, what is replicated."""
        mesh, total = self.mesh, sum(parameter.numel() for parameter in self.module.parameters())
        lines = [
            mesh.topology.describe(),
            f"{mesh.replicate_degree} x {mesh.shard_degree}: {mesh.replicate_degree} replicas of the model states, "
            f"each over {mesh.shard_degree} ranks" + (", collectives in two stages" if mesh.hierarchical else ""),
            *([f"sequences over {mesh.context_degree} ranks"] if mesh.context_degree > 1 else []),
            f"{total:,} parameters, units: {len(self.plan.units)} ({self.plan.why})",
        ]
        if self.plan.replicated:
            lines.append(f"whole on every rank: {', '.join(self.plan.replicated)}")
        lines += self.activations.describe()
        if self.fp8 is not None:
            lines.append(self.fp8.describe())
        return "\n".join(lines)

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Give every rank rank 0's persistent buffers (BatchNorm statistics), as DDP does: before evaluation and
        saving. What is not saved (``_non_persistent_buffers_set`` is the only list of it) is not state and is left
        alone."""
        for module in self.module.modules():
            passing = module._non_persistent_buffers_set
            own = module.named_buffers(recurse=False)
            broadcast_from_rank_0((buffer for name, buffer in own if name not in passing), self.mesh.device)


def parallelize_model(
    model: nn.Module,
    mesh: SmpMesh,
    config: SmpConfig,
    *,
    entry: Entry = "forward",
    cast_forward_inputs: bool = True,
    init_fn: Callable[[nn.Module], None] | None = None,
) -> ParallelModel:
    """Shard ``model`` over the partition group and synchronise it across replicas. In place; collective over the world.

    Args:
        model: on any device or on meta. What is on meta is initialised shard by shard, keyed by parameter name and
            ``config.init_seed``; everything else becomes what rank 0 holds.
        entry: what a step calls (see :func:`smp_core.sharding.wrap.plan_units`).
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype`` (not under autocast).
        init_fn: initialises one module in place, for modules on meta that cannot do it themselves.

    Returns:
        the handle whose ``window``, ``clip_grad_norm_`` and ``meter`` a training loop uses.

    Raises:
        ValueError: a knob that is not built yet, a wrap or checkpointing rule that matches nothing, a module without
            initialiser.
    """
    config.require_built()
    refuse_to_pickle_shards()
    replaced = ReplacedParameters(model)
    reduce_scalars()
    explain_uncaught_errors()
    plan = plan_units(model, config, entry=entry)
    for method in config.forward_methods:
        units_with(model, plan.units, method)  # also where nothing is gathered and none has to be registered
    by_name = dict(model.named_parameters())
    elements = [sum(by_name[name].numel() for name in unit.parameters) for unit in plan.units if unit.parameters]
    own_dtype = next((p.dtype for p in by_name.values()), torch.float32)
    mesh, config = settle_stages(mesh, config, elements, own_dtype)
    meter = CommMeter(mesh.topology, mesh.rank, mesh.device.type, enabled=config.comm_meter)
    traffic = Traffic(mesh, meter, config)
    config, context = build_context_parallel(model, mesh, traffic.config, meter)
    fp8, fp8_region = _to_fp8(model, mesh, config)
    if config.chunked_cross_entropy is not None:
        chunk_losses(model, config.chunked_cross_entropy)

    def equal_weights(_: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        broadcast_from_rank_0(parameters, mesh.device)

    by_name = dict(model.named_parameters())
    config = _with_reduce_dtype(config, by_name.values())
    on_meta = [name for name, tensor in [*by_name.items(), *model.named_buffers()] if tensor.is_meta]
    # A partition group of one has nothing to gather; FSDP2 would copy every parameter for each use. It is still
    # needed where it casts parameters to another dtype, and where it brings them from the host.
    whole = mesh.shard_degree == 1 and (config.param_dtype in (None, "auto") or not cast_forward_inputs)
    whole = whole and config.state_offload != "all"
    if whole:
        why = "shard_degree=1: parameters are whole, nothing is gathered"
        config = config.with_resolved("param_dtype", None, why).with_resolved("reshard_after_forward", False, why)
        if not config.reshard_after_backward:
            config = config.with_resolved("reshard_after_backward", True, why)
    if mesh.shard_degree == 1 and not config.reduce_every_micro_batch:
        why = "shard_degree=1: nothing is reduced inside a partition group"
        config = config.with_resolved("reduce_every_micro_batch", True, why)
    if not whole or config.optimizer_shard == "world":
        lay_out_contiguously(by_name)
    names = () if whole else tuple(unit.name for unit in plan.units)
    config, savers = save_activations(model, plan.blocks, names, mesh.device, mesh.topology.ranks_per_node, config)
    replicated = [*plan.replicated, *(name for unit in plan.units for name in unit.parameters if whole)]
    broadcast_from_rank_0((by_name[name] for name in replicated), mesh.device)
    broadcast_from_rank_0(model.buffers(), mesh.device)
    gathered_in = _dtype(config.param_dtype) or next((p.dtype for p in by_name.values()), torch.float32)
    config = settle_fsdp_options(config, mesh, [] if whole else elements, gathered_in)
    units: list[ShardedUnit] = []
    if not whole:
        units = shard_units(
            model,
            plan,
            mesh.shard_mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=_dtype(config.param_dtype),
                reduce_dtype=_dtype(config.reduce_dtype),
                cast_forward_inputs=cast_forward_inputs,
            ),
            reshard_after_forward=bool(config.reshard_after_forward),
            secondary_mesh=mesh.secondary_mesh,
            all_gather=traffic.all_gather,
            reduce_scatter=traffic.reduce_scatter,
            before_shard=equal_weights,
            recomputed=savers.recomputed_units,
            offload=config.state_offload == "all",
            gather_of=None if fp8 is None else fp8.gather_of,
            symmetric_memory=config.symmetric_memory,
        )
        apply_fsdp_options(model, config)
        explain_uncalled(units)
    if config.delayed_init and not on_meta:
        why = "nothing was on the meta device; in Lightning, build the model in configure_model()"
        logger.warning("delayed_init=True has no effect: %s", why)
        config = config.with_resolved("delayed_init", False, why)
    if on_meta:
        states_on = torch.device("cpu") if config.state_offload == "all" else mesh.device
        materialize(model, states_on, seed=config.init_seed, init_fn=init_fn)
    move_plain_tensors(model, mesh.device)
    replaced.settle(model)
    calls = Calls(model, mesh.shard_ranks)
    if units:
        register_forward_methods(model, units, calls, config.forward_methods)
    by_name = dict(model.named_parameters())
    groups = [plan.replicated, *(unit.parameters for unit in plan.units if whole)]
    named_groups = [{name: by_name[name] for name in group} for group in groups]
    veto = None if fp8 is None else fp8.state.nonfinite
    config, stored_in = _stored_in(config, units, fp8)
    window = AccumulationWindow(
        units,
        named_groups,
        mesh,
        traffic.hop,
        traffic.world_hop,
        _dtype(config.reduce_dtype),
        veto=veto,
        on_close=traffic.step_done,
        over_world=config.optimizer_shard == "world",
        stored_in=stored_in,
        keep_gathered=not config.reshard_after_backward,
        hold_gradients=not config.reduce_every_micro_batch,
        on_kept=functools.partial(calls.show_shards, kept=True),
    )
    drop_with_zero_grad(model, window.zero_grad)
    load_own_parts(model, lambda: window.world)
    if fp8 is not None:
        fp8.device = mesh.device
        unmetered = CommMeter(mesh.topology, mesh.rank, enabled=False)
        fp8.all_reduce_max = _maximum(mesh, FlatMaxReduce(unmetered))
        fp8.refresh_weights()  # before the first step; what is sent belongs to none
        fp8.all_reduce_max = _maximum(mesh, FlatMaxReduce(meter))
    return ParallelModel(
        model,
        mesh,
        config,
        plan,
        tuple(units),
        window,
        meter,
        traffic,
        calls,
        replaced,
        savers,
        fp8,
        context,
        fp8_region,
    )


def _stored_in(
    config: SmpConfig, units: Iterable[ShardedUnit], fp8: Fp8Model | None
) -> tuple[SmpConfig, torch.dtype | None]:
    """What parameters with masters over the world are stored in, if not in their own dtype: what they are gathered in.
    Weights of FP8 layers are quantised from what is stored."""
    dtype = _dtype(config.param_dtype)
    if config.optimizer_shard != "world" or fp8 is not None or dtype not in (torch.float16, torch.bfloat16):
        return config, None
    if config.state_offload == "optimizer":  # its masters are made of what is stored, step by step
        return config, None
    if not any(p.dtype == torch.float32 and p.requires_grad for unit in units for p in unit.parameters()):
        return config, None
    why = f"float32 weights are masters over all ranks; parameters are stored in {config.param_dtype}, as they compute"
    return config.with_resolved("optimizer_shard", "world", why), dtype


def _to_fp8(
    model: nn.Module, mesh: SmpMesh, config: SmpConfig
) -> tuple[Fp8Model | None, Callable[[], AbstractContextManager[Any]]]:
    if config.fp8 is None:
        return None, nullcontext
    if config.fp8.backend == "native":
        return convert_to_fp8(model, config.fp8), nullcontext
    other = convert_with(model, config.fp8, mesh.device, mesh.world_group)
    for name, reason in other.left_out.items():
        logger.info("fp8: left out: %s (%s)", name, reason)
    return None, other.region


def _maximum(mesh: SmpMesh, reduce: FlatMaxReduce) -> Callable[[torch.Tensor], None]:
    """The maximum over all ranks: every one of them holds a part of the weights or sees a part of the tokens."""

    def all_reduce_max(amax: torch.Tensor) -> None:
        if mesh.gradient_degree > 1:
            reduce(amax, mesh.gradient_group)

    return all_reduce_max


def _with_reduce_dtype(config: SmpConfig, parameters: Iterable[nn.Parameter]) -> SmpConfig:
    """Settle ``reduce_dtype="auto"``: float32 where gradients would be half precision, else the gradients' own."""
    if config.reduce_dtype == "float16":
        raise ValueError(
            "reduce_dtype='float16': gradients are added up before they are divided and would overflow; "
            "allowed: 'auto', 'float32', 'bfloat16'"
        )
    if config.reduce_dtype != "auto":
        return config
    param_dtype = _dtype(config.param_dtype)
    half = (torch.float16, torch.bfloat16)
    if param_dtype in half or (param_dtype is None and any(p.dtype in half for p in parameters)):
        return config.with_resolved("reduce_dtype", "float32", "gradients are half precision")
    return config.with_resolved("reduce_dtype", None, "the gradients' own dtype")


def _dtype(name: str | None) -> torch.dtype | None:
    """``param_dtype="auto"`` has been settled by the trainer's precision, or means the parameters' own dtype here."""
    return None if name in (None, "auto") else getattr(torch, name)


@torch.no_grad()
def lay_out_contiguously(parameters: Mapping[str, nn.Parameter]) -> None:
    """Shards are stretches of a parameter's rows: one that is transposed, or in ``channels_last``, is laid out anew."""
    others = [name for name, parameter in parameters.items() if not parameter.is_contiguous()]
    for name in others:
        parameters[name].data = parameters[name].data.contiguous()
    if others:
        logger.info("made contiguous, as shards are: %s", ", ".join(others))


@torch.no_grad()
def move_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """FSDP2 moves what it manages; replicated parameters and buffers of modules outside every unit are left to us."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device.type != device.type and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(module, name, buffer.to(device))
