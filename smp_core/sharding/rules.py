"""Rules for sharding: what is gathered, how often gradients are reduced, where
optimizer states live; the dtypes of all of these. Pre-sharded models have rules of
their own (given_rules)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp_core.cluster import INNER, PARTITION, Axis, SmpMesh
from smp_core.config import SmpConfig
from smp_core.plan import (
    HALF,
    Finding,
    ModelDraft,
    Plan,
    Subject,
    dtype_of,
    keeps_parameters,
    name_of,
)
from smp_core.sharding.given_rules import apart_from_given
from smp_core.torch_facts import is_rank_0

logger = logging.getLogger("smp")


class Sharding(Subject):
    """Sharding, as one of the subjects."""

    name = "sharding"
    page = "sharding.md"
    knobs = (
        "shard_degree",
        "reshard_after_forward",
        "keep_between_micro_batches",
        "units",
        "forward_methods",
        "delayed_init",
        "param_dtype",
        "reduce_dtype",
        "master_dtype",
        "on_nonfinite_grad_norm",
        "optimizer_shard",
        "state_offload",
    )
    apart = tuple(apart_from_given())

    def settle(self, draft: ModelDraft) -> None:
        """Resolve what is stored, gathered and reduced, and in which dtypes.

        Raises:
            ValueError: dtypes that lose gradients, or that a pre-sharded model cannot
                have.
        """
        # In this order: each of them reads what the ones before have resolved.
        parameters = draft.shapes.parameters
        if any(parameter.dtype.is_complex for parameter in parameters):
            _refuse_casts_of_complex(draft)
        draft.masters = _settle_masters(draft)
        draft.gathers = _settle_gathering(draft)
        _settle_reduce_dtype(draft)
        if draft.knobs.optimizer_shard == "world" and draft.layout.replicate == 1:
            why = "there is one replica: optimizer states are sharded over all ranks already"
            draft.settle("optimizer_shard", "shard", why)
        if draft.knobs.units.optional == "auto":
            _settle_optional(draft)
        if draft.knobs.delayed_init and not draft.shapes.on_meta:
            why = "nothing was on the meta device; in Lightning, build the model in configure_model()"
            draft.drop("delayed_init", None, why)
        if draft.knobs.optimizer_shard == "world":
            draft.stored_as_gathered = _settle_stored_dtype(draft)

    def machine(self) -> Iterator[Finding]:
        """Look whether the device computes in bfloat16."""
        if torch.cuda.is_available():
            # bfloat16 in tensor cores came with Ampere (compute capability 8.0).
            capable = torch.cuda.get_device_capability() >= (8, 0)
            found = "yes" if capable else "needs 8.0"
            yield Finding.unless(
                capable, "bfloat16", found, "write param_dtype='float16'"
            )

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return lines about the nodes, the layout, the units, and what is
        replicated."""
        # With pipeline stages the line is of one stage; all have the same layout.
        layout, degree, wrap = plan.layout, plan.shard_degree, plan.shapes.units
        replicas = (
            "1 replica" if layout.replicate == 1 else f"{layout.replicate} replicas"
        )
        in_stages = "in each stage " if layout.pipeline > 1 else ""
        hierarchical = ", collectives in two stages" if plan.hierarchical else ""
        lines = [
            plan.cluster.topology.describe(),
            f"{in_stages}{layout.replicate} x {degree}: {replicas} of the model states, "
            f"each over {degree * layout.size(*INNER)} ranks{hierarchical}",
            f"{plan.shapes.elements:,} parameters, units: {len(wrap.units)} ({wrap.why})",
        ]
        if wrap.replicated:
            lines.append(f"whole on every rank: {', '.join(wrap.replicated)}")
        return lines


SHARDING = Sharding()


def _settle_gathering(draft: ModelDraft) -> bool:
    """Resolve what is gathered and how often gradients are reduced.

    Returns:
        whether units are sharded by FSDP2. A partition group of one has nothing to
        gather, and FSDP2 would copy every parameter for each use; it is still needed
        where it casts or decodes parameters, where it brings them from the host, and
        where it shows split parameters to their layers.
    """
    layout, knobs = draft.layout, draft.knobs
    # Split layers and stages have FSDP2 show their parameters, whatever the degree.
    is_cut = layout.size(*INNER, Axis.PIPELINE) > 1
    if draft.given is not None or is_cut or layout.size(*PARTITION) > 1:
        return True
    # FSDP2 is also what casts parameters and inputs.
    casts = knobs.param_dtype is not None and draft.precision.cast_forward_inputs
    kept = "parameters" if keeps_parameters(knobs) else "shards"
    if knobs.keep_between_micro_batches == "gradients":
        why = "shard_degree=1: nothing is reduced inside a partition group"
        draft.settle("keep_between_micro_batches", kept, why)
    # One of its other services is needed.
    if (
        casts
        or draft.masters
        or knobs.state_offload == "all"
        or knobs.frozen_storage is not None
    ):
        return True
    why = "shard_degree=1: parameters are whole, nothing is gathered"
    draft.settle("param_dtype", None, why)
    draft.settle("reshard_after_forward", False, why)
    if draft.knobs.keep_between_micro_batches != "shards":
        draft.settle("keep_between_micro_batches", "shards", why)
    return False


def _settle_optional(draft: ModelDraft) -> None:
    """Resolve ``units.optional="auto"``: the model alone decides which modules ranks may
    leave out."""
    names = draft.shapes.units.optional
    inside = tuple(f"{name}." for name in names)
    elements = sum(
        each.elements
        for each in draft.shapes.parameters
        if each.name.startswith(inside)
    )
    why = f"no token goes through them: {elements:,} parameters, gathered with the unit around them"
    draft.settle("units.optional", names, why)


def settle_precision(draft: ModelDraft) -> None:
    """Resolve ``param_dtype="auto"`` by the trainer's precision, and leave skipped
    steps to a gradient scaler."""
    precision = draft.precision
    # Complex parameters have no half precision to be computed in.
    if (
        draft.knobs.param_dtype == "auto"
        and precision.param_dtype is not None
        and _complex_names(draft)
    ):
        draft.settle(
            "param_dtype",
            None,
            "complex parameters, which a cast would take the imaginary part of",
        )
    elif draft.knobs.param_dtype == "auto":
        draft.settle("param_dtype", name_of(precision.param_dtype), precision.why)
    if precision.skips_steps:
        draft.settle(
            "on_nonfinite_grad_norm", "ignore", "the gradient scaler skips such steps"
        )


def _complex_names(draft: ModelDraft) -> list[str]:
    return [
        parameter.name
        for parameter in draft.shapes.parameters
        if parameter.dtype.is_complex
    ]


def _refuse_casts_of_complex(draft: ModelDraft) -> None:
    """Refuse what would cast complex parameters or their gradients to real numbers.

    Raises:
        ValueError: knobs that do, or half precision weights beside them, whose
            gradients are added up in float32.
    """
    # Phase 1: what is there to lose.
    names, knobs = _complex_names(draft), draft.knobs
    half = [
        parameter.name
        for parameter in draft.shapes.parameters
        if parameter.dtype in HALF and parameter.trainable
    ]
    # Phase 2: knobs that cast, with what to write instead.
    casts = {
        f"param_dtype={knobs.param_dtype!r}": (
            knobs.param_dtype is not None,
            "param_dtype=None",
        ),
        f"reduce_dtype={knobs.reduce_dtype!r}": (
            knobs.reduce_dtype not in (None, "auto"),
            "reduce_dtype=None",
        ),
        f"compression.reduce={knobs.compression.reduce!r}": (
            knobs.compression.reduce is not None,
            "compression=None",
        ),
        f"{half[:1]} in half precision": (
            bool(half),
            "reduce_dtype=None, or float32 weights",
        ),
    }
    # Phase 3: the first of them is refused.
    for what, (is_there, instead) in casts.items():
        if is_there:
            raise ValueError(
                f"{what} would cast complex numbers to real ones, and {names[0]} ({len(names)} of the parameters) is "
                f"complex: its imaginary part would be lost; write {instead}"
            )


def _settle_reduce_dtype(draft: ModelDraft) -> None:
    """Resolve ``reduce_dtype="auto"``: float32 where gradients would be half precision,
    else the gradients' own.

    Raises:
        ValueError: float16, which sums that are not divided yet would overflow.
    """
    asked = draft.knobs.reduce_dtype
    if asked == "float16":
        raise ValueError(
            "reduce_dtype='float16': gradients are added up before they are divided and would overflow; "
            "allowed: 'auto', 'float32', 'bfloat16'"
        )
    if asked == "auto":
        # Gradients come in the dtype that is computed in.
        gathered = dtype_of(draft.knobs.param_dtype)
        if gathered in HALF or (
            gathered is None and any(p.dtype in HALF for p in draft.shapes.parameters)
        ):
            draft.settle("reduce_dtype", "float32", "gradients are half precision")
        else:
            draft.settle("reduce_dtype", None, "the gradients' own dtype")


def _settle_masters(draft: ModelDraft) -> bool:
    """Resolve ``master_dtype``, and warn where weights in half precision have none.

    Returns:
        whether these weights are stored in float32. (Masters on the host, and of a
        pre-sharded model, are alongside the weights, unless FP8 weights are quantised
        from what is stored.)

    Raises:
        ValueError: masters of half precision weights of a pre-sharded model.
    """
    knobs = draft.knobs
    asked = draft.knobs.master_dtype
    shapes = draft.shapes
    came_sharded, replicas = draft.given is not None, draft.layout.replicate
    half = [
        parameter
        for parameter in shapes.parameters
        if parameter.trainable and parameter.dtype in HALF
    ]
    if not half:
        draft.settle(
            "master_dtype",
            "float32" if asked == "float32" else None,
            "no trainable weight is half precision",
        )
        return False
    if came_sharded and asked == "float32":
        raise ValueError(
            f"master_dtype='float32' and a model that came sharded ({shapes.kind}) with {name_of(half[0].dtype)} "
            "weights; shard it in float32 with MixedPrecisionPolicy(param_dtype=...), or let torch-smp shard it"
        )
    # Knobs with which float32 masters are stepped anyway.
    over_replicas = knobs.optimizer_shard == "world" and (
        replicas > 1 or not came_sharded
    )
    makers = {
        "optimizer_shard='world'": over_replicas,
        "state_offload='optimizer'": knobs.state_offload == "optimizer",
    }
    by = [knob for knob, makes in makers.items() if makes]
    if asked == "auto":
        why = (
            f"{by[0]} steps float32 masters"
            if by
            else "the optimizer steps half precision weights themselves"
        )
        draft.settle("master_dtype", "float32" if by else None, why)
    if asked == "auto" and not by:
        draft.warnings.append(_without_masters(half[0].dtype))
    resolved = draft.knobs.master_dtype == "float32"
    beside = came_sharded or (
        knobs.state_offload == "optimizer" and not _quantises_stored(knobs)
    )
    return resolved and not beside


def _without_masters(dtype: torch.dtype) -> str:
    """Return what it costs that weights in half precision have no masters."""
    steps = round(2 / torch.finfo(dtype).eps)
    return (
        f"weights are {name_of(dtype)} and have no float32 masters: an optimizer step that changes a weight by less "
        f"than 1/{steps} of it is rounded away, at learning rates like 1e-5 most steps; write master_dtype='float32' "
        "(weights, gradients and optimizer states are stored in float32), or train float32 weights in mixed precision "
        "(Lightning: precision='bf16-mixed'); master_dtype=None says that this is meant"
    )


def _settle_stored_dtype(draft: ModelDraft) -> bool:
    """Decide whether parameters with masters over the world are stored in what they
    compute in. Not where that would lose digits: FP8 weights are quantised from stored
    ones, host masters are read from them."""
    # Phase 1: does nothing but masters over the world read the weights?
    knobs, shapes = draft.knobs, draft.shapes
    dtype = dtype_of(knobs.param_dtype)
    is_ours = draft.gathers and draft.given is None
    if not is_ours or _quantises_stored(knobs) or knobs.state_offload == "optimizer":
        return False
    # Phase 2: is there a float32 weight in a unit that is stepped by a master?
    of_units = [
        shapes.of_name(name) for unit in shapes.units.units for name in unit.parameters
    ]
    stepped = (torch.float32, *HALF) if draft.masters else (torch.float32,)
    if dtype not in HALF or not any(
        p.dtype in stepped and p.trainable for p in of_units
    ):
        return False
    why = f"float32 weights are masters over all ranks; parameters are stored in {knobs.param_dtype}, as they compute"
    draft.settle("optimizer_shard", "world", why)
    return True


def _quantises_stored(knobs: SmpConfig) -> bool:
    """Return whether FP8 weights are quantised from the stored ones."""
    return knobs.fp8 is not None and knobs.fp8.backend == "native"


def require_plain_lookups(model: nn.Module, mesh: SmpMesh) -> None:
    """Check embeddings for what torch computes from a rank's own samples alone.

    Raises:
        ValueError: one changes its weights in forward, by rows that this rank looks up,
            or has sparse gradients, which are not added up.
    """
    if mesh.gradient_degree == mesh.tensor_degree == mesh.pipeline_degree == 1:
        return
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        where = f"{type(module).__name__} {path or 'the model'}"
        # Tensor ranks alone look up the same rows.
        has_other_rows = mesh.gradient_degree > 1 or mesh.pipeline_degree > 1
        if module.max_norm is not None and has_other_rows:
            raise ValueError(
                f"{where} has max_norm={module.max_norm}, by which each forward changes the rows of this rank's "
                "samples, and weights would differ from rank to rank; write max_norm=None, and behind the optimizer's "
                "step, without gradients, weight.copy_(torch.renorm(weight, 2, 0, max_norm))"
            )
        if module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{where} has sparse=True, and sparse gradients are not added up over ranks; write sparse=False (and "
                "torch.optim.Adam in the place of SparseAdam)"
            )
        if module.scale_grad_by_freq and is_rank_0():
            logger.warning(
                "%s has scale_grad_by_freq=True, which counts words in a rank's own part of the batch: gradients are "
                "not those of one process",
                where,
            )


def require_shardable(model: nn.Module, plan: Plan) -> None:
    """Check a model for what shards, or masters over the world, cannot stand in for.

    Raises:
        ValueError: a module in TorchScript, or a trainable parameter whose memory
            another tensor of the model has too.
    """
    for path, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted and any(True for _ in module.parameters()):
            raise ValueError(
                f"{path or 'the model'} is TorchScript (torch.jit.script, trace or load), whose parameters cannot be "
                "trained here; prepare the module that it was made of, and script that after training; for one that is "
                "not trained write torch.jit.freeze(scripted.eval()), which makes them constants"
            )
    # Parameters that stay what they are go on sharing memory.
    if not plan.gathers and plan.knobs.optimizer_shard != "world":
        return
    stored: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.numel():
            storage = StorageWeakRef(tensor.untyped_storage()).cdata
            stored[storage].append((name, tensor))
    for together in stored.values():
        if len(together) > 1:
            _require_apart(together)


def _require_apart(together: list[tuple[str, Tensor]]) -> None:
    """Refuse tensors of one storage that have elements in common, where one of two is
    trained."""
    # By where they begin: those that begin behind the end of one are apart from it.
    placed = sorted(together, key=lambda each: _span(each[1]))
    for place, (name, tensor) in enumerate(placed):
        end = _span(tensor)[1]
        for other_name, other in placed[place + 1 :]:
            if _span(other)[0] > end:
                break
            trained = tensor.requires_grad or other.requires_grad
            if trained and _overlap(tensor, other):
                _refuse_shared_memory(name, tensor, other_name, other)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the last byte of a tensor in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + int(last) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, of which neither ends before the other begins, have
    an element in common: columns of a matrix do not."""
    if one.dtype != other.dtype:
        return True
    last = max(_span(one)[1], _span(other)[1]) // one.itemsize
    marks = torch.zeros(last + 1, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    where = marks.as_strided(other.shape, other.stride(), other.storage_offset())
    return bool(where.any())


def _refuse_shared_memory(
    name: str, one: Tensor, other_name: str, other: Tensor
) -> None:
    if isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter):
        raise ValueError(
            f"{name} and {other_name} are two parameters over the same memory, which would go apart as shards; tie "
            "them as one parameter (head.weight = embedding.weight), or give one of them memory of its own before the "
            "model is prepared: parameter.data = parameter.data.clone()"
        )
    parameter, buffer = (
        (name, other_name) if isinstance(one, nn.Parameter) else (other_name, name)
    )
    raise ValueError(
        f"the buffer {buffer} has the memory of the parameter {parameter}, which moves into shards, and would not "
        f"follow it; register a copy, {parameter}.detach().clone(), or read the parameter in forward"
    )
