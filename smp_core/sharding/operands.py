"""Operations on sharded and unsharded tensors together: an average of weights, a
teacher, a target network that was copied before its model was sharded, a distance to
first weights, a term of the loss that is made of parameters.

torch refuses them ("got mixed torch.Tensor and DTensor"), and weights that tensor ranks
split beside those that they do not, which are on other meshes. Here a sharded operand
is gathered, and the result is a plain tensor, as one process has it; what is written
into a sharded tensor is this rank's part of an unsharded one, without messages. All
ranks have to take part, as in every use of a DTensor. Each operation costs a gather: a
copy that is made after sharding needs none.

A row or a slice of a sharded tensor is a copy where torch gathers it, and one that is
written into (``weight[padding].zero_()``) would leave the tensor as it was: refused.

A gradient comes back to the sharded operand as the mean over the ranks whose gradients
are averaged, because a rank has that of its own part of the batch.

What matrix products, convolutions and lookups make of weights is gathered outside of a
model's forward only: inside, a unit that was not called is a mistake with a message of
its own (:mod:`smp_core.sharding.fsdp.units`).

torch has no public name for whether its ``implicit_replication()`` is on
(``_allow_implicit_replication`` of ``_op_dispatcher``): inside it a plain tensor is a
replicated DTensor, and results are DTensors.

Nor for the tensor that another one is a view of (``_base``), which torch keeps whether
or not the memory is the same.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from smp_core.checkpoint import map_tensors, shard_like
from smp_core.cluster import SmpMesh, mesh_on
from smp_core.sharding.fsdp import backward_pass, in_a_call, name_of_shard
from smp_core.sharding.gradients.parameter_hooks import hooks_of, unsharded_value
from smp_core.sharding.optimizer.shards import local_of
from smp_core.torch_facts import ABSENT, is_absent
from smp_core.watch import here, meet_between_calls

logger = logging.getLogger("smp")

_NAMES = (
    "add sub rsub mul div pow lerp addcmul addcdiv copy maximum minimum fmax fmin fmod remainder floor_divide atan2 "
    "hypot copysign xlogy logaddexp where masked_fill clamp clamp_min clamp_max eq ne lt le gt ge equal isclose "
    "allclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor dist cat stack "
    "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward"
)
_VARIANTS = ("{}", "{}_", "_foreach_{}", "_foreach_{}_")
# Of index_copy that in place is left out: its index is of the whole tensor.
ELEMENTWISE = "index_copy " + " ".join(
    kind.format(name) for name in _NAMES.split() for kind in _VARIANTS
)
"""In torch.ops.aten; of each that has one, the variant in place ("add_") and that of
lists ("_foreach_add") too."""
PRODUCTS = (
    "mm addmm bmm baddbmm addbmm mv addmv addr dot vdot matmul linear _cdist_forward _cdist_backward embedding "
    "embedding_dense_backward index index_select gather convolution convolution_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm "
    "native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward _prelu_kernel _prelu_kernel_backward"
)
# What torch refuses of an empty tensor, as a rank's part of a few rows may be. Of norms
# that is the largest element, of order inf; torch.nn.utils.clip_grad_norm_ takes all
# gradients of a dtype in one list.
LARGEST = (
    "max min amax amin aminmax argmax argmin median linalg_vector_norm norm "
    "_foreach_norm"
)
_WRITE_WHOLE = (
    "write whole values on all ranks: values = tensor.full_tensor(), edit them, and tensor.copy_(values) under "
    "torch.no_grad()"
)
_LOOKED_AT = 64
_looks = itertools.count()  # unsharded tensors of a parameter's shape
# Sharded operands whose gradients are brought into their layout.
_followed = WeakIdKeyDictionary()
# Memory of rows and slices that torch copied, which detach() has cut off: of which tensor.
_copied = WeakIdKeyDictionary()


def compute_outside_of_forward(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    # Inside a forward a unit was computed with and not called: torch's error is
    # explained elsewhere.
    if in_a_call() and backward_pass() == -1:
        return NotImplemented
    return compute(kind, function, types, args, kwargs)


def compute_with_empty_parts(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    """Return what has no value on a rank without rows, such as the largest element of a
    tensor of fewer rows than ranks: of whole tensors, on all ranks."""
    name = function.overloadpacket.__name__
    operands = list(_tensors(args))
    order = args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2)
    is_largest = "norm" not in name or order in (math.inf, -math.inf)
    wants_gradient = torch.is_grad_enabled() and any(
        each.requires_grad for each in operands
    )
    if not is_largest or wants_gradient or not any(map(_leaves_out_ranks, operands)):
        return compute(kind, function, types, args, kwargs)
    if name.startswith("_foreach_") and len(args[0]) > 1:
        return _each_alone(function, args, kwargs or {})
    with here.waiting(f"{name} of a parameter of fewer rows than ranks"):
        return function(*map_tensors(args, _whole), **(kwargs or {}))


def write_into(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    """Refuse what torch would do to a copy, or to a shard by an index of the whole."""
    refuse_copies(function, args[0])
    if _has_index_of_whole(function.overloadpacket.__name__, args):
        raise RuntimeError(
            f"{function} got mixed torch.Tensor and DTensor: the index is of the whole tensor, and "
            f"{name_of_shard(args[0]) or 'what is written into'} is sharded; {_WRITE_WHOLE}. What does so by itself "
            "(torch.nn.utils.prune) comes before the model is prepared"
        )
    return NotImplemented


def _has_index_of_whole(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a plain index would be taken for one of a shard. Of ``index_put_``
    torch knows which layouts an index or a mask leaves as they are."""
    if name != "index_put_":
        return name.startswith("index_") and _has_plain(args)
    # What torch takes for replicated: numbers, and all inside implicit_replication().
    return not DTensor._op_dispatcher._allow_implicit_replication and any(
        each.numel() != 1 for each in _tensors(args) if not isinstance(each, DTensor)
    )


def write_out(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    """Refuse a copy as ``out=``."""
    refuse_copies(function, (kwargs or {}).get("out"))
    return NotImplemented


def note_copy(view: DTensor) -> None:
    """Note what a view was copied from, before it is detached: nothing tells of it
    afterwards."""
    name = _copied_from(view)
    if name is not None:
        _copied[local_of(view).untyped_storage()] = name


def refuse_copies(function: Any, written: Any) -> None:
    """Refuse to write into a view of a tensor that torch had to copy for it.

    Args:
        written: a tensor or a list of them.
    """
    for tensor in _tensors([written]):
        name = _copied_from(tensor) if isinstance(tensor, DTensor) else None
        # squeeze_() and its like write nothing.
        if name is not None and torch.Tag.inplace_view not in function.tags:
            raise ValueError(
                f"{function.overloadpacket.__name__} into a row or slice of {name}, which is sharded: the slice is a "
                f"copy, and the tensor would stay as it is; {_WRITE_WHOLE}"
            )


def _copied_from(tensor: DTensor) -> str | None:
    """Return the name of the tensor of which this one was a view, if torch had to copy
    it. In a model's call only parameters: what a forward makes of its activations is
    its own."""
    source = tensor._base
    if not _copied and not isinstance(source, DTensor):
        return None
    storage = local_of(tensor).untyped_storage()
    if isinstance(source, DTensor):
        memory = local_of(source).untyped_storage()
        if memory is not storage:
            return name_of_shard(source, memory) or (
                None if in_a_call() else "a tensor"
            )
    return _copied.get(storage)


def _leaves_out_ranks(tensor: Tensor) -> bool:
    """Return whether some rank has no element of a tensor: the same on all ranks."""
    if not isinstance(tensor, DTensor) or is_absent(tensor) or not tensor.numel():
        return False
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        # torch's chunks: equal ones, the last smaller or empty.
        degree, rows = tensor.device_mesh.size(axis), tensor.shape[dim]
        if -(-rows // degree) * (degree - 1) >= rows:
            return True
    return False


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    """Return the result of an operation with sharded and plain operands, or sharded
    ones of which some are split over tensor ranks and others are not; NotImplemented:
    torch computes it."""
    values = (*args, *(kwargs or {}).values())
    name = function.overloadpacket.__name__
    if name.endswith("_"):
        refuse_copies(function, args[0])
    # Nearly all operations end here: shards with shards, or inside
    # implicit_replication().
    is_mixed = _has_plain(values) or (
        not name.startswith("_foreach_")
        and _is_on_several_meshes(values, by_dims=name == "equal")
    )
    if DTensor._op_dispatcher._allow_implicit_replication:
        return NotImplemented
    if not is_mixed:
        return _written_into_a_row(function, args, kwargs or {})
    operands = list(_tensors(values))
    sharded = [each for each in operands if isinstance(each, DTensor)]
    plain = [each for each in operands if not isinstance(each, DTensor)]
    # A plain number changes nothing about the layout, and torch takes it.
    numbers_alone = plain and not any(map(_counts, plain))
    if numbers_alone and any(each.ndim for each in sharded):
        # A number that all ranks have. Beside a list torch takes it to be on the mesh
        # of the first in it.
        if name.startswith("_foreach_") and _is_on_several_meshes(values):
            return _each_alone(function, args, kwargs or {})
        return NotImplemented
    absent = next(filter(is_absent, sharded), None)
    if absent is not None:
        raise RuntimeError(ABSENT % list(absent.shape))
    # DTensors of no model of ours are left to torch.
    widest = max((each.device_mesh for each in sharded), key=lambda each: each.ndim)
    mesh = mesh_on(widest)
    if mesh is None:
        return NotImplemented

    # Phase 1: lists are taken place by place. For one operation the ranks make sure that
    # all of them are here, with equal tensors.
    # Operations in place end in "_"; their first tensor is the target.
    written = next(_tensors(args)) if name.endswith("_") else None
    if name.startswith("_foreach_") and len(args[0]) > 1:
        return _each_alone(function, args, kwargs or {})
    if backward_pass() == -1:
        ranks = widest.mesh.flatten().tolist()
        meet_between_calls(
            f"{name} of a sharded parameter and an unsharded tensor", ranks
        )
        for each in plain:
            if each.shape == sharded[0].shape and each.ndim:
                _look_for_differences(each, mesh)

    # Phase 2: this rank's part is written, or what is sharded is gathered.
    gathered = functools.partial(_gathered, mesh=mesh, name=name)
    if isinstance(written, DTensor):
        placed = functools.partial(_own_part, written=written, gathered=gathered)
        return function(*map_tensors(args, placed), **map_tensors(kwargs or {}, placed))
    if mesh.rank == 0 and any(each.ndim for each in sharded):
        _say_once()
    # Autograd records the operation itself, so the gradient of a shard arrives as a
    # plain tensor.
    for operand in sharded:
        if torch.is_grad_enabled() and operand.requires_grad:
            _bring_back_gradient(operand)
    # Autograd is above this dispatch: nothing is recorded twice.
    with torch.no_grad():
        return function(
            *map_tensors(args, gathered), **map_tensors(kwargs or {}, gathered)
        )


def _written_into_a_row(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of writing into a tensor with a dim of one element, where
    operands are split along another one: what torch makes of such a tensor and of a
    number is split so, and then it finds no way back. NotImplemented: of others."""
    name, target = function.overloadpacket.__name__, args[0]
    if not name.endswith("_") or not isinstance(target, DTensor):
        return NotImplemented

    def is_split_otherwise(operand: Tensor) -> bool:
        return (
            isinstance(operand, DTensor)
            and operand.shape == target.shape
            and operand.placements != target.placements
            and operand.device_mesh == target.device_mesh
        )

    if 1 not in target.shape or not any(map(is_split_otherwise, _tensors(args[1:]))):
        return NotImplemented

    def placed(operand: Any) -> Any:
        return (
            operand.redistribute(placements=target.placements)
            if is_split_otherwise(operand)
            else operand
        )

    with here.waiting(f"{name} of parameters of one row"):
        return function(target, *map_tensors(args[1:], placed), **kwargs)


def _has_plain(values: Any) -> bool:
    """Return whether any of the tensors is a plain one. Asked for every operation of
    optimizers on lists of shards."""
    for value in values:
        if type(value) is DTensor:
            continue
        if isinstance(value, Tensor) or (
            isinstance(value, (list, tuple)) and _has_plain(value)
        ):
            return True
    return False


def _is_on_several_meshes(values: Any, by_dims: bool = False) -> bool:
    """Return whether some of the DTensors are on other meshes than others.

    Args:
        by_dims: those that are split along other dims count as well: torch has no way
            from a shard of a column layer to that of a row layer.
    """
    first: DTensor | None = None
    for tensor in _tensors(values):
        if type(tensor) is not DTensor:
            continue
        mesh = tensor.device_mesh
        if first is not None and mesh is not first.device_mesh:
            if mesh != first.device_mesh:
                return True
        if first is not None and by_dims and tensor.placements != first.placements:
            return True
        first = tensor
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _counts(plain: Tensor) -> bool:
    """Return whether an unsharded operand may have other values on other ranks, or is
    as large as a sharded one."""
    return plain.ndim > 0 or (torch.is_grad_enabled() and plain.requires_grad)


def _gathered(operand: Tensor, mesh: SmpMesh, name: str) -> Tensor:
    if not isinstance(operand, DTensor):
        return operand
    with here.waiting(
        f"{name} of a parameter and an unsharded tensor, which all ranks have to compute"
    ):
        return unsharded_value(operand.detach(), mesh).to(local_of(operand).device)


def _own_part(
    operand: Tensor, written: DTensor, gathered: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return this rank's part of an operand, beside a tensor that is written into."""
    if isinstance(operand, DTensor):
        if operand.device_mesh == written.device_mesh:
            return operand
        operand = gathered(operand)
    if operand.ndim == 0:
        return operand
    return shard_like(written, operand.expand(written.shape))


def _each_alone(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with lists of tensors place by place: a place may have plain tensors
    only, or sharded ones only."""
    results = []
    for place in range(len(args[0])):
        own = [
            [value[place]] if isinstance(value, (list, tuple)) else value
            for value in args
        ]
        results.append(function(*own, **kwargs))
    return (
        None if results[0] is None else [each for result in results for each in result]
    )


def _bring_back_gradient(operand: DTensor) -> None:
    """Let the plain gradient of a sharded operand become one of its layout. Parameters
    of units do that themselves
    (:class:`smp_core.sharding.gradients.unit_window.UnitWindow`), because hooks of
    theirs are a user's."""
    if hooks_of(operand) is not None or operand in _followed:
        return
    _followed[operand] = True
    layout = Placed.of(operand)
    operand.register_hook(lambda gradient: sharded_mean(gradient, layout))


@dataclass(frozen=True)
class Placed:
    """The mesh and the placements of a DTensor, without its values.

    Attributes:
        device_mesh: its ranks.
        placements: of a gradient of it: what is still to be added up has a gradient
            that all ranks have.
    """

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Placed:
        """Return the layout of a gradient of the tensor."""
        placements = [
            Replicate() if placement.is_partial() else placement
            for placement in tensor.placements
        ]
        return cls(tensor.device_mesh, tuple(placements))


@torch.no_grad()
def sharded_mean(gradient: Tensor, layout: Placed) -> Tensor | None:
    """Return the mean of an unsharded gradient over the ranks whose gradients are
    averaged, in the layout of its tensor; None for one that is sharded. Collective over
    these ranks."""
    mesh = None if isinstance(gradient, DTensor) else mesh_on(layout.device_mesh)
    if mesh is None:
        return None
    mean = gradient.to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    with here.waiting(
        "the gradient of a parameter that was computed with outside of its unit"
    ):
        dist.all_reduce(mean, group=mesh.gradient_group)
    mean /= mesh.gradient_degree
    everywhere = [Replicate()] * layout.device_mesh.ndim
    replicated = DTensor.from_local(
        mean, layout.device_mesh, everywhere, run_check=False
    )
    return replicated.redistribute(placements=layout.placements)


def _look_for_differences(plain: Tensor, mesh: SmpMesh) -> None:
    """Warn once if an unsharded tensor of a parameter's shape differs between ranks,
    among the first of them."""
    if next(_looks) >= _LOOKED_AT:
        return
    total = plain.detach().double().sum().to(mesh.device)
    extremes = torch.stack([total, -total])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.model_group)
    if mesh.rank == 0 and bool(extremes.sum() > 0):
        _warn_once()


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "an unsharded tensor of a parameter's shape, which is an operand beside the sharded parameter, differs between "
        "ranks. If it is a copy of weights from before sharding, each rank made its own first weights, of which the "
        "model kept rank 0's: seed all ranks alike before the model is made (torch.manual_seed, seed_everything, "
        "set_seed), or make the copy when the model is sharded"
    )


def take_part_of_gradient(parameter: Tensor) -> None:
    """Let a sharded parameter's ``.grad`` that was assigned whole (``p.grad = p.grad *
    mask``), or in another layout (``p.grad = p.grad.mean(0, keepdim=True).expand_as(p)``),
    be this rank's part of it. Collective over the parameter's ranks in the second case,
    which all of them have."""
    gradient = parameter.grad
    if gradient is None or not isinstance(parameter, DTensor):
        return
    if not isinstance(gradient, DTensor):
        parameter.grad = shard_like(parameter, gradient)
    elif gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


@functools.cache
def _say_once() -> None:
    logger.info(
        "an unsharded tensor, as of a copy of weights that was made before the model was sharded, is an operand beside "
        "a sharded parameter, which is gathered for it each time, on all ranks; a copy of shards needs no messages"
    )
