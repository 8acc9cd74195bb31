"""parallelize_model(): what was decided about a model is done to it. The one place that
knows the order of all conversions, but for pre-sharded models
(:mod:`smp_core.engine.adoption`).

1.  _leave_out: what other pipeline stages hold, before anything is made of it; rank 0
    sends each stage its own
2.  _to_fp8: linear layers to FP8, whose weights then travel in FP8
3.  _split_layers: layers over tensor ranks, whose parameters are DTensors before FSDP2
    sees them
4.  share_sequences: attention over the ranks that share sequences
5.  chunk_losses: losses in chunks of tokens, for which FSDP2's hooks see one forward of
    the head
6.  balance_where_asked: auxiliary losses and biases of routers, of all ranks' tokens
7.  CastParameters: replicated parameters in what the others are gathered in, also where
    their use is computed again
8.  save_activations: checkpointing, a property of a module's forward, so inside FSDP2's
    hooks
9.  compile_blocks: what a block computes by now, so that gathers stay outside of its
    graph
10. _stand_around_blocks: tokens that tensor ranks share, split and joined outside of
    what is recomputed
11. lay_out_contiguously: shards are stretches of a parameter's rows
12. broadcast_from_rank_0: rank 0's weights for what stays whole; a unit gets them just
    before it is sharded
13. _deal_experts: whole experts to the ranks that divide them, whose parameters are
    DTensors before FSDP2 sees them
14. shard_units: fully_shard of blocks, then roots, with our communication objects;
    frozen ones stored as codes
15. apply_fsdp_options: how far ahead units are gathered
16. materialize: what is on the meta device, shard by shard; frozen ones stored as codes
17. store_masters: float32 values of half precision parameters (`master_dtype`)
18. move_plain_tensors: what FSDP2 does not manage, to the device
19. register_forward_methods: methods besides forward that gather
20. _join_stages: forwards from the stage's one end to the other, outside FSDP2's hooks
21. AccumulationWindow: gradients from here on, with the hop across replicas
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp_core.activations import (
    NO_ACTIVATION_MEMORY_SAVED,
    ActivationMemory,
    save_activations,
)
from smp_core.cluster import (
    Axis,
    SmpMesh,
    broadcast_from_rank_0,
    of_all_ranks,
    send_to_stages,
)
from smp_core.comm import CommMeter, FlatMaxReduce, Traffic
from smp_core.config import DelayedInit, Fp8Recipe
from smp_core.context_parallel import (
    ContextParallel,
    chunk_losses,
    require_lengths,
    share_sequences,
    try_call,
    try_output,
)
from smp_core.engine.parallel_model import ParallelModel
from smp_core.expert_parallel import BalancedRouters, balance_routers, deal_experts
from smp_core.fp8 import Fp8Model, convert_to_fp8, convert_with
from smp_core.pipeline import (
    Pipeline,
    Played,
    TiedGradients,
    leave_out_other_stages,
    played_of,
)
from smp_core.plan import LOSS, Plan, Stages, units_with
from smp_core.sharding import (
    ReplacedParameters,
    change_this_process,
    follow_window,
    require_plain_lookups,
    require_shardable,
    sync_over_samples,
)
from smp_core.sharding.fsdp import (
    Calls,
    ShardedUnit,
    apply_fsdp_options,
    explain_uncalled,
    passing_by,
    shard_units,
)
from smp_core.sharding.gradients import AccumulationWindow
from smp_core.sharding.optimizer import WorldSharding
from smp_core.sharding.weights import (
    CastParameters,
    materialize,
    warn_of_lost_writes,
)
from smp_core.tensor_parallel import (
    Inspected,
    SplitModel,
    TensorAxis,
    WholeGradients,
    apply_tensor_parallel,
    inspect,
)
from smp_core.torch_facts import is_absent, is_compiled, modules_that_look_up

logger = logging.getLogger("smp")

# What Transformers and PEFT call besides forward. In PEFT's `generate` the adapted
# model is called, past the root, in Transformers' the encoder.
KNOWN_METHODS = (
    "generate",
    "generate_batch",
    "get_text_features",
    "get_image_features",
    "get_audio_features",
    "get_video_features",
)


def parallelize_model(
    model: nn.Module,
    mesh: SmpMesh,
    plan: Plan,
    *,
    init_fn: Callable[[nn.Module], None] | None = None,
) -> ParallelModel:
    """Do to a model what was decided about it. In place; collective over the world.

    Args:
        model: on any device or on meta. What is on meta is initialised shard by shard,
            keyed by parameter name and ``delayed_init.seed``; everything else becomes
            what rank 0 holds.
        init_fn: initialises one module in place, for modules on meta that cannot do it
            themselves.

    Returns:
        the handle whose ``window``, ``clip_grad_norm_`` and ``meter`` a training loop
        uses.

    Raises:
        ValueError: a method of ``forward_methods`` that there is not, and what
            conversions refuse.
    """
    knobs = plan.knobs
    # Hooks and parameters are noted before anything replaces them.
    change_this_process(mesh)
    require_plain_lookups(model, mesh)
    require_shardable(model, plan)
    if plan.shapes.on_meta and init_fn is None:
        warn_of_lost_writes(model)
    if mesh.tensor_degree > 1 or mesh.pipeline_degree > 1:
        sync_over_samples(model, mesh)
    replaced = ReplacedParameters(model)
    hooked = _require_same_hooks(replaced, plan)
    # Methods that there are not are refused, also where nothing is gathered.
    for method in knobs.forward_methods:
        units_with(model, plan.shapes.units.units, method)
    meter = CommMeter(
        mesh.topology, mesh.rank, mesh.device.type, enabled=knobs.collectives.meter
    )
    # Descriptions are of the whole model; what is done here is of this rank's stage.
    whole_plan = plan
    if plan.stages is not None:
        plan = plan.of_stage(mesh.stage)
    traffic = Traffic(mesh, meter, plan)

    # Phase 1: what its layers compute.
    layers = _convert_layers(model, plan, whole_plan, traffic)

    # Phase 2: where its parameters live.
    units = _place_parameters(model, plan, traffic, layers, init_fn)
    replaced.settle(model)

    # Phase 3: calls into it, and its gradients from here on.
    calls = Calls(model, mesh.shard_ranks, units, layers.shown)
    if units:
        register_forward_methods(model, units, calls, knobs.forward_methods)
    window, pipeline = _open_window(model, plan, traffic, layers, units, calls, hooked)
    if layers.fp8 is not None:
        _start_scales(layers.fp8, mesh, meter)
    return ParallelModel(
        model,
        tuple(units),
        window,
        calls,
        replaced,
        mesh,
        whole_plan,
        meter,
        traffic,
        layers.saved,
        layers.fp8,
        layers.context,
        layers.fp8_region,
        layers.tensor,
        pipeline,
        layers.routers,
    )


def _open_window(
    model: nn.Module,
    plan: Plan,
    traffic: Traffic,
    layers: _Layers,
    units: Sequence[ShardedUnit],
    calls: Calls,
    hooked: bool,
) -> tuple[AccumulationWindow, Pipeline | None]:
    """Make the window of the model's gradients, and the pipeline that its stage is a
    part of. Some parts need the window, which needs them: they ask for it once it is
    there."""
    mesh = traffic.mesh
    pipeline: Pipeline | None = None
    alike: Callable[[], AbstractContextManager[None]] = nullcontext
    if plan.stages is not None:
        pipeline, alike = _join_stages(
            model, plan, plan.stages, traffic, layers, units, lambda: window
        )
    if layers.tensor is not None:
        alike = _keep_alike(
            model, mesh, plan, layers.tensor, alike, lambda: window.world
        )
    # A gradient that FP8 overflowed drops the whole window.
    veto = None if layers.fp8 is None else layers.fp8.state.nonfinite
    window = AccumulationWindow(
        model,
        units,
        traffic,
        plan,
        calls,
        veto,
        alike,
        hooked,
    )
    follow_window(model, window)
    return window, pipeline


@dataclass(frozen=True, eq=False)
class _Layers:
    """Results of the conversions of a model's layers; None where there was none."""

    fp8: Fp8Model | None
    fp8_region: Callable[[], AbstractContextManager[Any]]
    tensor: SplitModel | None
    context: ContextParallel | None
    routers: BalancedRouters | None
    saved: ActivationMemory
    shown: Callable[[object], AbstractContextManager[Any]]
    played: dict[str, Played]


def _convert_layers(
    model: nn.Module, plan: Plan, whole_plan: Plan, traffic: Traffic
) -> _Layers:
    """Change what the model computes: layers in FP8, in parts, over shared sequences,
    losses in chunks, again in backward."""
    knobs, mesh, meter = plan.knobs, traffic.mesh, traffic.meter
    played: dict[str, Played] = {}
    inspected: Inspected | None = None
    if plan.stages is not None:
        # What has to see the whole model runs before parts of it are left out.
        recipe = knobs.tensor_parallel
        if mesh.tensor_degree > 1 and recipe.plan == "infer":
            whole = whole_plan.shapes.units.replicated
            inspected = inspect(
                model, mesh.tensor_degree, recipe.sequence_parallel, whole
            )
        played = played_of(model, plan.stages.chain)
        _leave_out(model, mesh, plan.stages)
    fp8, fp8_region = (
        (None, nullcontext) if knobs.fp8 is None else _to_fp8(model, mesh, knobs.fp8)
    )
    tensor = (
        None
        if mesh.tensor_degree == 1
        else _split_layers(model, traffic, plan, inspected)
    )
    # Only a model with tables of something may have one of positions.
    has_tables = any(isinstance(each, nn.Embedding) for each in model.modules())
    learned = require_lengths(model) if has_tables else None
    context = (
        None
        if mesh.context_degree == 1
        else share_sequences(model, mesh, plan, meter, learned)
    )
    if knobs.chunked_cross_entropy is not None:
        chunk_losses(
            model,
            knobs.chunked_cross_entropy,
            None if tensor is None else tensor.split_vocabulary,
        )
    routers = balance_where_asked(model, mesh, whole_plan, meter)
    # From here on forwards are wrapped, by each conversion around the ones before.
    recomputed = [
        model.get_submodule(each.name) for each in plan.activations.checkpointed
    ]
    shown: Callable[[object], AbstractContextManager[Any]] = nullcontext
    if plan.shapes.units.replicated and plan.replicated_casts:
        shown = CastParameters(model, plan.replicated_casts, recomputed).shown
    saved = (
        save_activations(model, plan, mesh.device)
        if plan.activations.checkpointed
        else NO_ACTIVATION_MEMORY_SAVED
    )
    if knobs.compile is not None:
        compile_blocks(model, plan)
    if tensor is not None:
        _stand_around_blocks(tensor, plan)
    return _Layers(fp8, fp8_region, tensor, context, routers, saved, shown, played)


def _place_parameters(
    model: nn.Module,
    plan: Plan,
    traffic: Traffic,
    layers: _Layers,
    init_fn: Callable[[nn.Module], None] | None,
) -> list[ShardedUnit]:
    """Shard, initialise and move what the model holds; return its units."""
    knobs, mesh = plan.knobs, traffic.mesh
    if plan.gathers or knobs.optimizer_shard == "world":
        lay_out_contiguously(model)
    # Rank 0's weights for what stays whole, and all buffers; a unit gets them just
    # before it is sharded.
    by_name = dict(model.named_parameters())
    whole = [by_name[name] for names in plan.replicated_parameters for name in names]
    broadcast_from_rank_0([*whole, *model.buffers()], mesh.device, mesh.model_group)
    meshes: dict[str, DeviceMesh] = {}
    if knobs.expert_parallel_degree != 1:
        meshes = _deal_experts(model, mesh, plan, traffic.meter)
    gather_of = None if layers.fp8 is None else layers.fp8.gather_of
    units = shard_units(
        model, plan, mesh, traffic, layers.saved.recomputed_units, gather_of, meshes
    )
    apply_fsdp_options(model, knobs, mesh.device)
    explain_uncalled(units)
    # What has no values yet gets those of this rank's shards alone.
    if plan.shapes.on_meta:
        states_on = torch.device("cpu") if knobs.state_offload == "all" else mesh.device
        seed = (knobs.delayed_init or DelayedInit()).seed
        materialize(model, states_on, seed=seed, init_fn=init_fn)
        for unit in units if knobs.frozen_storage is not None else ():
            unit.store_coded(plan)
    if plan.dtypes.masters:
        store_masters(model, plan, units)
    move_plain_tensors(model, mesh.device)
    return units


def _require_same_hooks(replaced: ReplacedParameters, plan: Plan) -> bool:
    """Return whether any parameter has hooks, on all ranks alike. Collective over the
    world.

    Raises:
        ValueError: on some ranks only, or of a parameter of which two pipeline stages
            have a part of the gradient each.
    """
    hooked = sorted(replaced.hooked)
    by_rank = of_all_ranks(hooked)
    # Rank 0 is the measure; all ranks raise the same error.
    for rank, names in enumerate(by_rank):
        differing = sorted(set(names).symmetric_difference(by_rank[0]))
        if differing:
            raise ValueError(
                f"{differing[0]} has a hook (register_hook, register_post_accumulate_grad_hook) on one of the ranks 0 "
                f"and {rank} only; all ranks take part in what it sees: register it on all, and let it write on rank 0"
            )
    of_ends = () if plan.stages is None else plan.stages.tied
    tied = [name for name in hooked if name in of_ends]
    if tied:
        raise ValueError(
            f"pipeline_parallel_degree={plan.knobs.pipeline_parallel_degree}: {tied[0]} is tied between the first and "
            "the last stage, and a hook would see one stage's part of its gradient; untie the weights, leave out the "
            "hook, or write pipeline_parallel_degree=1"
        )
    return bool(hooked)


def _leave_out(model: nn.Module, mesh: SmpMesh, stages: Stages) -> None:
    """Keep this rank's pipeline stage of the model. The stage's first rank gets rank
    0's values of it, which the others get from that one like those of a model without
    stages."""
    sent = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sent.append((tensor, stages.owners.get(name, range(stages.count))))
    send_to_stages(sent, mesh)
    leave_out_other_stages(model, mesh, stages)


def _join_stages(
    model: nn.Module,
    plan: Plan,
    stages: Stages,
    traffic: Traffic,
    layers: _Layers,
    units: Sequence[ShardedUnit],
    window: Callable[[], AccumulationWindow],
) -> tuple[Pipeline, Callable[[], AbstractContextManager[None]]]:
    """Make this rank's stage a part of a pipeline, with what travels beside
    activations; return what adds up gradients of parameters on two stages."""
    mesh = traffic.mesh
    # Stages behind the first see no other sequences than the parts that they receive.
    replaced = (lambda _: None) if layers.tensor is None else layers.tensor.axis.begin
    pipeline = Pipeline(
        model,
        mesh,
        stages,
        layers.played,
        plan.knobs.pipeline,
        traffic.meter,
        plan.dtypes.gathered,
        window,
        functools.partial(passing_by, units),
        replaced,
        try_call,
        try_output,
        None if layers.routers is None else layers.routers.stages,
    )
    if not stages.tied:
        return pipeline, nullcontext
    ends = mesh.between_stages((0, stages.count - 1))
    if ends is None:
        return pipeline, nullcontext
    # Only the two ends of the pipeline get here.
    by_name = dict(model.named_parameters())
    tied = [by_name[name] for name in stages.tied]
    return pipeline, TiedGradients(
        tied, ends, mesh.group(Axis.REPLICATE), lambda: window().world
    ).added_up


def _keep_alike(
    model: nn.Module,
    mesh: SmpMesh,
    plan: Plan,
    tensor: SplitModel,
    finishing: Callable[[], AbstractContextManager[None]],
    world: Callable[[], WorldSharding | None],
) -> Callable[[], AbstractContextManager[None]]:
    """Return what is entered around setting gradients: it keeps those of parameters
    that tensor ranks hold whole equal on all of them, where sums travel in codes, and
    has tensor ranks learn between which blocks tokens stay split."""
    whole = [model.get_parameter(name) for name in tensor.whole]

    # Masters have the gradients, once an optimizer was prepared.
    def stepped() -> Sequence[Tensor]:
        masters = world()
        return whole if masters is None else masters.stepped(whole)

    gradients = None
    if plan.knobs.compression.reduce_codes is not None:
        gradients = WholeGradients(tensor.axis, mesh.device, stepped)

    @contextlib.contextmanager
    def alike() -> Iterator[None]:
        with finishing():
            yield
        if gradients is not None:
            gradients.take_the_first_ranks()
        tensor.learn()

    return alike


def balance_where_asked(
    model: nn.Module, mesh: SmpMesh, plan: Plan, meter: CommMeter
) -> BalancedRouters | None:
    """Balance the model's routers; None where it has none that anything was asked
    of."""
    knobs = plan.knobs
    numbers = (knobs.router_bias_update_rate, knobs.expert_capacity_factor)
    is_asked = (
        any(each is not None for each in numbers)
        or knobs.asked("router_balance") == "global"
    )
    if not is_asked and not modules_that_look_up(model, LOSS):
        return None
    return balance_routers(model, plan, mesh.gradient_group, meter, mesh.device)


def _deal_experts(
    model: nn.Module, mesh: SmpMesh, plan: Plan, meter: CommMeter
) -> dict[str, DeviceMesh]:
    """Give each rank its experts, of rank 0's; return what each unit of experts is
    sharded over."""
    # Afterwards each rank has its own experts alone.
    for site in plan.shapes.experts:
        broadcast_from_rank_0(
            model.get_submodule(site.name).parameters(), mesh.device, mesh.model_group
        )
    return deal_experts(model, mesh, plan, meter)


def _split_layers(
    model: nn.Module, traffic: Traffic, plan: Plan, inspected: Inspected | None
) -> SplitModel:
    """Split layers over tensor ranks, from rank 0's weights."""
    # Every rank cuts its part out of rank 0's weights.
    mesh = traffic.mesh
    broadcast_from_rank_0(model.parameters(), mesh.device, mesh.model_group)
    recipe = plan.knobs.tensor_parallel
    axis = TensorAxis(mesh.group(Axis.TENSOR), traffic.meter, recipe.overlap)
    split = apply_tensor_parallel(
        model,
        mesh.tensor_mesh,
        axis,
        plan=inspected or recipe.plan,
        sequence_parallel=recipe.sequence_parallel,
        whole=plan.shapes.units.replicated,  # by all units that share it
        chunked_loss=plan.knobs.chunked_cross_entropy is not None,
    )
    by_name = dict(model.named_parameters())
    shared = [
        name
        for name in plan.shapes.units.replicated
        if isinstance(by_name[name], DTensor)
    ]
    if shared:
        raise ValueError(
            f"tensor_parallel: {', '.join(shared)} belongs to several units and would be split over tensor ranks; "
            "write units={'min_parameters': 0}, or a tensor_parallel.plan that leaves its layers whole"
        )
    # Equal on tensor ranks, and not so any more if codes were made of them together
    # with weights that differ.
    traffic.gather_exactly(split.whole)
    return split


def _stand_around_blocks(tensor: SplitModel, plan: Plan) -> None:
    tensor.stand_around_blocks(in_stages=plan.stages is not None)


def _to_fp8(
    model: nn.Module, mesh: SmpMesh, recipe: Fp8Recipe
) -> tuple[Fp8Model | None, Callable[[], AbstractContextManager[Any]]]:
    if recipe.backend == "native":
        return _converted_on_every_stage(model, mesh, recipe), nullcontext
    other = convert_with(model, recipe, mesh.device, mesh.gradient_group)
    for name, reason in other.left_out.items():
        logger.info("fp8: left out: %s (%s)", name, reason)
    return None, other.region


def _converted_on_every_stage(
    model: nn.Module, mesh: SmpMesh, recipe: Fp8Recipe
) -> Fp8Model | None:
    """Convert layers to FP8; a pipeline stage that has none to convert is an error on
    all ranks."""
    if mesh.pipeline_degree == 1:
        return convert_to_fp8(model, recipe, parts=mesh.tensor_degree)
    # The error of any stage is raised on all ranks: others would wait in the next
    # collective.
    fp8, problem = None, ""
    try:
        fp8 = convert_to_fp8(model, recipe, parts=mesh.tensor_degree)
    except ValueError as error:
        problem = f"pipeline stage {mesh.stage}: {error}"
    for told in filter(None, of_all_ranks(problem)):
        raise ValueError(told)
    return fp8


def _start_scales(fp8: Fp8Model, mesh: SmpMesh, meter: CommMeter) -> None:
    """Find scales over all ranks, every one of which holds a part of the weights or
    sees a part of the tokens or features."""

    def maximum_by(metered: CommMeter) -> Callable[[Tensor], None]:
        reduce = FlatMaxReduce(metered)

        def all_reduce_max(amax: Tensor) -> None:
            if mesh.model_degree > 1:
                reduce(amax, mesh.model_group)

        return all_reduce_max

    fp8.device, fp8.group = mesh.device, mesh.model_group
    if mesh.pipeline_degree > 1:
        fp8.stages = mesh.group(Axis.PIPELINE)
    # What is sent before the first step belongs to none.
    fp8.all_reduce_max = maximum_by(CommMeter(mesh.topology, mesh.rank, enabled=False))
    fp8.refresh_weights()
    fp8.all_reduce_max = maximum_by(meter)


def register_forward_methods(
    model: nn.Module,
    units: Collection[ShardedUnit],
    calls: Calls,
    methods: Collection[str],
) -> None:
    """Let methods gather parameters as forward does: ``"decode"`` of every root that
    has it, ``"encoder.encode"`` of the named unit, and of roots those that are known.

    Also marks modules so that Transformers knows forward to be collective
    (``_is_fsdp_managed_module``, as its own sharding does; Dynamo wants
    ``_fsdp_use_orig_params`` with it): ranks then generate as long as any of them needs
    to, and none leaves out a layer by chance.

    Raises:
        ValueError: no unit has the method.
    """
    # Both marks are read on every module.
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    found = [
        (unit, name)
        for unit in units
        if unit.is_root
        for name in KNOWN_METHODS
        if name not in methods
    ]
    for entry in methods:
        found += [
            (unit, entry.rpartition(".")[2]) for unit in units_with(model, units, entry)
        ]
    for unit, method in found:
        own = getattr(unit.module, method, None)
        if callable(own):
            setattr(unit.module, method, _as_forward(unit, calls, own))


def _as_forward(
    unit: ShardedUnit, calls: Calls, method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        return calls.run_as_forward(unit, method, *args, **kwargs)

    return as_forward


@torch.no_grad()
def lay_out_contiguously(model: nn.Module) -> None:
    """Make parameters contiguous that are transposed or in ``channels_last``: shards
    are stretches of a parameter's rows."""
    others = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.is_contiguous()
    }
    for parameter in others.values():
        parameter.data = parameter.data.contiguous()
    if others:
        logger.info("made contiguous, as shards are: %s", ", ".join(others))


@torch.no_grad()
def store_masters(model: nn.Module, plan: Plan, units: Sequence[ShardedUnit]) -> None:
    """Store trainable half precision parameters in float32: the weights that the
    optimizer steps. They are computed with in their own dtype
    (:meth:`Plan.computed_in`, :attr:`Plan.replicated_casts`)."""
    for unit in units:
        unit.store_masters()
    # Replicated parameters keep a plain tensor, in another dtype.
    for name in plan.shapes.units.replicated:
        parameter = model.get_parameter(name)
        stepped = plan.dtypes.of_stepped(plan.shapes.of_name(name))
        if not is_absent(parameter) and stepped != parameter.dtype:
            parameter.data = parameter.data.float()


@torch.no_grad()
def move_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """Move replicated parameters, and buffers of modules outside every unit, to
    ``device``: FSDP2 moves what it manages."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device.type != device.type and not isinstance(
                parameter, DTensor
            ):
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(module, name, buffer.to(device))


def compile_blocks(model: nn.Module, plan: Plan) -> None:
    """Compile the plan's blocks, in place; compiled ones stay as they are.

    A graph of a whole sharded model would have the hooks that gather in it. Blocks are
    compiled after they were told to recompute, so that the compiler sees which values
    to keep, and before they are sharded, so that gathers stay outside.
    """
    asked = plan.knobs.compile
    assert asked is not None
    for name in plan.shapes.units.blocks:
        block = model.get_submodule(name)
        if is_compiled(block):
            continue
        try:
            block.compile(**asked.items())
        except RuntimeError as error:
            # torch names the mode, backend or option, and those that there are.
            raise ValueError(f"compile: torch.compile refuses it: {error}") from error
