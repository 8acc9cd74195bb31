"""Shards outside of their model's forward, as operands, numbers, random values and pickles: what whole tensors give.

Operations on sharded and unsharded tensors together: an average of weights, a teacher, a target network that was
copied before its model was sharded, a distance to first weights, a term of the loss that is made of parameters.

torch refuses them ("got mixed torch.Tensor and DTensor"). Here a sharded operand is gathered, and the result is a plain
tensor, as one process has it; what is written into a sharded tensor is this rank's part of an unsharded one, without
messages. All ranks have to take part, as in every use of a DTensor. Each operation costs a gather: a copy that is made
after sharding needs none.

A gradient comes back to the sharded operand as the mean over the ranks whose gradients are averaged, because a rank
has that of its own part of the batch.

What matrix products, convolutions and lookups make of weights is gathered outside of a model's forward only: inside, a
unit that was not called is a mistake with a message of its own (:mod:`smp_core.sharding.fsdp.units`).

torch has no public name for whether its ``implicit_replication()`` is on (``_allow_implicit_replication`` of
``_op_dispatcher``): inside it a plain tensor is a replicated DTensor, and results are DTensors.

``float(p.norm())``, ``p.mean().item()`` and ``if p.isnan().any():`` are numbers of whole tensors too: torch's
``DTensor.item()`` gives this rank's part of a result that is not added up yet; here it adds up first, over the ranks
that hold the parameter together, as every other operation on such a result does; so they all have to ask.

Random numbers in sharded tensors (``nn.init``, ``p.normal_()``, ``torch.randn_like(p)``) are those that one process
draws for the whole tensor, at every degree. torch draws for this rank's part: on CPU ranks with equal seeds draw equal
numbers then, so that rows repeat; on CUDA numbers differ by rank, and with the number of ranks. Here every rank draws
the whole tensor and keeps its part, from the state that rank 0's generator has, so that replicas agree, too. It takes
the memory of the whole tensor while it draws, and all ranks have to ask. Dropout of a DTensor is left to torch: it
belongs to a computation and not to a value.

No shard is pickled in silence: `torch.save(model.state_dict())` on one rank would write that rank's part. Gathering it
would need all ranks, and a script that saves calls `torch.save` on one of them. The reducer is registered for the type
with `copyreg`, which every pickler reads (also cloudpickle, dill and `all_gather_object`); safetensors and numpy refuse
DTensors by themselves.

Errors of torch's and of others that come from places that are not ours (an operator that meets a shard, a copy of a
module) cannot be refused before. They get a note with what they mean for a sharded model and what to type, which is
printed with the traceback wherever the error is printed.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import logging
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from smp_core.checkpoint import map_tensors, own_part, shard_like
from smp_core.cluster import SmpMesh
from smp_core.sharding.fsdp import backward_pass, in_a_call
from smp_core.sharding.gradients.parameter_hooks import hooks_of, unsharded_value
from smp_core.sharding.optimizer.shards import local_of
from smp_core.torch_facts import ABSENT, is_absent
from smp_core.watch import here, meet_between_calls

logger = logging.getLogger("smp")

# Names of torch.ops.aten. Of each that has one, the variant in place ("add_") and that of lists ("_foreach_add") too.
_ELEMENTWISE = (
    "add sub rsub mul div pow lerp addcmul addcdiv copy maximum minimum fmax fmin fmod remainder floor_divide atan2 "
    "hypot copysign xlogy logaddexp where masked_fill clamp clamp_min clamp_max eq ne lt le gt ge equal isclose "
    "allclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor dist cat stack "
    "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward"
)
_PRODUCTS = (
    "mm addmm bmm baddbmm addbmm mv addmv addr dot vdot matmul linear _cdist_forward _cdist_backward embedding "
    "embedding_dense_backward index index_select gather convolution convolution_backward native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm "
    "native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward _prelu_kernel _prelu_kernel_backward"
)
_LOOKED_AT = 64
_looks = itertools.count()  # unsharded tensors of a parameter's shape
_followed = WeakIdKeyDictionary()  # sharded operands whose gradients are brought into their layout


@functools.cache
def compute_with_unsharded_tensors() -> None:
    """Let DTensors of sharded models and plain tensors be operands of one operation, in this process."""
    for name in _ELEMENTWISE.split():
        for variant in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_"):
            _register(variant, _compute)
    for name in _PRODUCTS.split():
        _register(name, _compute_outside_of_forward)


def _register(name: str, rule: Callable[..., Any]) -> None:
    packet = getattr(torch.ops.aten, name, None)
    for overload in [] if packet is None else packet.overloads():
        if "out" not in overload:
            torch.library.register_torch_dispatch(getattr(packet, overload), DTensor, rule)


def _compute_outside_of_forward(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    if in_a_call() and backward_pass() == -1:
        return NotImplemented
    return _compute(kind, function, types, args, kwargs)


def _compute(kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """Return the result of an operation with sharded and plain operands; NotImplemented: torch computes it."""
    values = (*args, *(kwargs or {}).values())
    if not _has_plain(values) or DTensor._op_dispatcher._allow_implicit_replication:
        return NotImplemented
    operands = list(_tensors(values))
    sharded = [each for each in operands if isinstance(each, DTensor)]
    plain = [each for each in operands if not isinstance(each, DTensor)]
    if not any(map(_counts, plain)) and any(each.ndim for each in sharded):
        return NotImplemented  # a number that all ranks have
    absent = next(filter(is_absent, sharded), None)
    if absent is not None:
        raise RuntimeError(ABSENT % list(absent.shape))
    mesh = mesh_on(sharded[0].device_mesh)
    if mesh is None:
        return NotImplemented

    # Phase 1: lists are taken place by place; ranks make sure that they are all here, with equal tensors.
    name = function.overloadpacket.__name__
    written = next(_tensors(args)) if name.endswith("_") else None
    if name.startswith("_foreach_") and len(args[0]) > 1:
        return _each_alone(function, args, kwargs or {})
    if backward_pass() == -1:
        ranks = sharded[0].device_mesh.mesh.flatten().tolist()
        meet_between_calls(f"{name} of a sharded parameter and an unsharded tensor", ranks)
        for each in plain:
            if each.shape == sharded[0].shape and each.ndim:
                _look_for_differences(each, mesh)

    # Phase 2: this rank's part is written, or what is sharded is gathered.
    if isinstance(written, DTensor):
        placed = functools.partial(_own_part, written=written)
        return function(*map_tensors(args, placed), **map_tensors(kwargs or {}, placed))
    if mesh.rank == 0 and any(each.ndim for each in sharded):
        _say_once()
    for operand in sharded:
        if torch.is_grad_enabled() and operand.requires_grad:
            _bring_back_gradient(operand)
    gathered = functools.partial(_gathered, mesh=mesh, name=name)
    with torch.no_grad():
        return function(*map_tensors(args, gathered), **map_tensors(kwargs or {}, gathered))


def _has_plain(values: Any) -> bool:
    """Return whether any of the tensors is a plain one. Asked for every operation of optimizers on lists of shards."""
    for value in values:
        if type(value) is DTensor:
            continue
        if isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and _has_plain(value)):
            return True
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _counts(plain: Tensor) -> bool:
    """Return whether an unsharded operand may have other values on other ranks, or is as large as a sharded one."""
    return plain.ndim > 0 or (torch.is_grad_enabled() and plain.requires_grad)


def _gathered(operand: Tensor, mesh: SmpMesh, name: str) -> Tensor:
    if not isinstance(operand, DTensor):
        return operand
    with here.waiting(f"{name} of a parameter and an unsharded tensor, which all ranks have to compute"):
        return unsharded_value(operand.detach(), mesh).to(local_of(operand).device)


def _own_part(operand: Tensor, written: DTensor) -> Tensor:
    """Return this rank's part of an unsharded operand, beside a tensor that is written into."""
    if isinstance(operand, DTensor) or operand.ndim == 0:
        return operand
    return shard_like(written, operand.expand(written.shape))


def _each_alone(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with lists of tensors place by place: a place may have plain tensors only, or sharded ones only."""
    results = []
    for place in range(len(args[0])):
        own = [[value[place]] if isinstance(value, (list, tuple)) else value for value in args]
        results.append(function(*own, **kwargs))
    return None if results[0] is None else [each for result in results for each in result]


def _bring_back_gradient(operand: DTensor) -> None:
    """Let the plain gradient of a sharded operand become one of its layout. Parameters of units do that themselves
    (:class:`smp_core.sharding.gradients.unit_window.UnitWindow`), because hooks of theirs are a user's."""
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
        placements: of a gradient of it: what is still to be added up has a gradient that all ranks have.
    """

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Placed:
        """Return the layout of a gradient of the tensor."""
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return cls(tensor.device_mesh, tuple(placements))


@torch.no_grad()
def sharded_mean(gradient: Tensor, layout: Placed) -> Tensor | None:
    """Return the mean of an unsharded gradient over the ranks whose gradients are averaged, in the layout of its
    tensor; None for one that is sharded. Collective over these ranks."""
    mesh = None if isinstance(gradient, DTensor) else mesh_on(layout.device_mesh)
    if mesh is None:
        return None
    mean = gradient.to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    with here.waiting("the gradient of a parameter that was computed with outside of its unit"):
        dist.all_reduce(mean, group=mesh.gradient_group)
    mean /= mesh.gradient_degree
    everywhere = [Replicate()] * layout.device_mesh.ndim
    replicated = DTensor.from_local(mean, layout.device_mesh, everywhere, run_check=False)
    return replicated.redistribute(placements=layout.placements)


def _look_for_differences(plain: Tensor, mesh: SmpMesh) -> None:
    """Warn once if an unsharded tensor of a parameter's shape differs between ranks, among the first of them."""
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
    """Let a sharded parameter's ``.grad`` that was assigned whole (``p.grad = p.grad * mask``) be this rank's part of
    it. Local."""
    if isinstance(parameter, DTensor) and parameter.grad is not None and not isinstance(parameter.grad, DTensor):
        parameter.grad = shard_like(parameter, parameter.grad)


@functools.cache
def _say_once() -> None:
    logger.info(
        "an unsharded tensor, as of a copy of weights that was made before the model was sharded, is an operand beside "
        "a sharded parameter, which is gathered for it each time, on all ranks; a copy of shards needs no messages"
    )


@functools.cache
def reduce_scalars() -> None:
    """Make ``item()`` of a DTensor collective over its mesh, wherever its ranks hold parts, and with it what calls it
    (``float``, ``bool``, ``int``, ``tolist``)."""
    torch.library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _item)


def _item(kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None) -> Any:
    if is_absent(args[0]):
        raise RuntimeError(ABSENT % list(args[0].shape))
    return function(args[0].full_tensor())


def refuse_to_pickle_shards() -> None:
    """Make it an error, from here on, to pickle a DTensor of which this process holds a part. One that is unsharded
    here (replicated, or on a mesh of one rank) is pickled as a plain tensor."""
    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]


def is_a_part(tensor: object) -> bool:
    """Return whether it is a tensor of which this process holds a part, or (other pipeline stages') nothing."""
    if is_absent(tensor):
        return True
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def _reduce(tensor: DTensor) -> tuple[Any, ...]:
    if not is_a_part(tensor):
        plain: tuple[Any, ...] = tensor.to_local().detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return plain
    raise pickle.PicklingError(
        f"torch.save or pickle of a sharded tensor {tuple(tensor.shape)} would write this rank's part alone, which is "
        f"{tuple(tensor.to_local().shape)}; to get whole tensors on rank 0 call on every rank "
        "accelerator.get_state_dict(model), or smp_core.checkpoint.full_state_dict(state) for any state; for a "
        "checkpoint that any number of ranks loads: accelerator.save_state, trainer.save_checkpoint or fabric.save; to "
        "save this part on purpose: tensor.to_local()"
    )


_aten = torch.ops.aten
_IN_PLACE = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.log_normal_.default, _aten.cauchy_.default),
    *(_aten.exponential_.default, _aten.geometric_.default, _aten.bernoulli_.float, _aten.bernoulli_.Tensor),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
)
_LIKE = (_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype)
_OF_VALUES = (
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.poisson.default),
    *(_aten.normal.Tensor_float, _aten.normal.Tensor_Tensor),
)
_meshes: list[weakref.ref[SmpMesh]] = []


def draw_whole_tensors(mesh: SmpMesh) -> None:
    """Make random numbers in DTensors of this mesh those of whole tensors."""
    _meshes[:] = [each for each in _meshes if each() not in (None, mesh)]
    _meshes.append(weakref.ref(mesh))
    _register_random()


@functools.cache
def _register_random() -> None:
    for function in (*_IN_PLACE, *_LIKE, *_OF_VALUES):
        torch.library.register_torch_dispatch(function, DTensor, _draw)


def _draw(kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    target: DTensor = args[0]
    if is_absent(target):
        raise RuntimeError(ABSENT % list(target.shape))
    # What is drawn in the place of values, or like them, needs their shape alone.
    first = _whole(target) if function in _OF_VALUES else _like_whole(target)
    others, named = map(_whole, args[1:]), {name: _whole(value) for name, value in (kwargs or {}).items()}
    with _state_of_rank_0(target, named.get("generator")):
        drawn = function(first, *others, **named)
    own = own_part(drawn, target)
    if function in _IN_PLACE:
        local_of(target).copy_(own)
        return target
    made = torch.empty_like(target, dtype=drawn.dtype)
    local_of(made).copy_(own)
    return made


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like_whole(target: DTensor) -> Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device=local_of(target).device)


@contextmanager
def _state_of_rank_0(target: DTensor, generator: torch.Generator | None) -> Iterator[None]:
    """Draw from the state that the generator has on the first rank that holds a part of the model. A rank whose own is
    another one goes on with that afterwards."""
    device = local_of(target).device
    if generator is None:
        generator = torch.default_generator
        if device.type != "cpu":
            generator = torch.get_device_module(device).default_generators[device.index]
    mesh = mesh_on(target.device_mesh)
    if mesh is None:
        yield
        return
    own = generator.get_state()
    sent = own.to(mesh.device, copy=True)
    dist.broadcast(sent, group_src=0, group=mesh.model_group)
    state = sent.to(own.device)
    generator.set_state(state)
    try:
        yield
    finally:
        if not torch.equal(state, own):
            generator.set_state(own)


def mesh_on(device_mesh: DeviceMesh) -> SmpMesh | None:
    """Return the mesh of a sharded model that the ranks of a DTensor's mesh belong to."""
    ranks = set(device_mesh.mesh.flatten().tolist())
    meshes = [mesh for each in _meshes if (mesh := each()) is not None]
    return next((each for each in meshes if ranks <= _ranks_of(each)), None)


def _ranks_of(mesh: SmpMesh) -> set[int]:
    """Return the ranks that hold parts of the mesh's models; none once its groups were destroyed."""
    try:
        return set(dist.get_process_group_ranks(mesh.model_group))
    except KeyError:
        return set()


_MIXED = (
    "parameters are shards outside of the model's forward, and this operation was given one with a plain tensor. Write "
    "parameter.full_tensor(), on all ranks, to compute with a whole weight. Where it happened in a method of the model "
    "name that, forward_methods=['sample']; or, in Lightning, write trainer.strategy.parallel.call(submodule, x), on "
    "all ranks."
)
_NOT_IN_GRAPH = (
    "parameters of a sharded model are shards outside of its forward, and a graph holds what was gathered for it. For "
    "gradients of parameters call loss.backward() and read parameter.grad when the window is closed; "
    "torch.autograd.grad works for inputs and activations, also with create_graph=True."
)
_TWICE = (
    "gradients of gradients go through layers of plain torch only, not through layers split over tensor ranks, FP8 "
    "layers or SyncBatchNorm on CPU: write tensor_parallel_degree=1, fp8=None, or leave those layers out."
)
_COPY = (
    "a sharded model cannot be copied. Copy it before it is prepared (in Lightning: in __init__ or configure_model), "
    "and prepare the copy with it; for an average of weights use Lightning's EMAWeightAveraging, or "
    "smp_core.engine.averaging.ShardedAverage(parallel); for the weights alone, {name: p.detach().clone() for name, "
    "p in model.named_parameters()}, which are shards as well."
)
_NO_SYNC = (
    "no_sync is DistributedDataParallel's. To hold gradients back write `with accelerator.no_sync(model):`, or in "
    "Lightning `with trainer.strategy.block_backward_sync():`. LocalSGD, which lets replicas drift apart, has no "
    "counterpart: leave it out; gradient accumulation saves as many messages with one process's numbers."
)
_NOT_TOGETHER = (
    "another rank did not come to this collective, or has ended. Every rank has to make each call into a sharded "
    "model, equally often: take it out of `if rank == 0:`, give all ranks as many batches. Where a rank failed, its "
    "own error or a line of torch-smp names it."
)
_FREED = (
    "backward came to a unit whose parameters were freed behind its forward and not gathered again: FSDP2 gathers when "
    "a tensor that forward returned gets its gradient, and loses sight of a returned view (of a transpose, a slice) "
    "that is written into afterwards. Write x = x + y for x += y behind the module, return x.clone() from it, or keep "
    "parameters gathered: reshard_after_forward=False."
)
_NO_MEMORY = (
    "a number that is made of a shard (its norm, its mean) is a DTensor, and torch.tensor([...]) reads the memory of "
    "what it is given, which a DTensor lacks: write float(x) for each x, on all ranks. For Lightning's grad_norm(module, "
    "2) write {name: float(p.grad.norm()) for name, p in module.named_parameters() if p.grad is not None}."
)
# The first that is found in an error's text.
_NOTES = {
    "got mixed torch.Tensor and DTensor": _MIXED,
    "appears to not have been used in the graph": _NOT_IN_GRAPH,
    "trying to differentiate twice": _TWICE,
    "FSDP does not support deepcopy": _COPY,
    "object has no attribute 'no_sync'": _NO_SYNC,
    "are out of bounds for storage of size 0": _FREED,
    "its data is not allocated yet": _NO_MEMORY,
    "Connection closed by peer": _NOT_TOGETHER,
    "Timed out waiting": _NOT_TOGETHER,
}


def explain(error: BaseException) -> None:
    """Add the note that belongs to an error, if there is one and it has not got it."""
    text = str(error)
    note = next((note for sign, note in _NOTES.items() if re.search(sign, text)), None)
    said = f"torch-smp: {note}"
    add_note = getattr(error, "add_note", None)  # Python >= 3.11
    if note is not None and add_note is not None and said not in getattr(error, "__notes__", []):
        add_note(said)


def explain_uncaught_errors() -> None:
    """Add the notes to uncaught errors of this process, too."""
    if not isinstance(sys.excepthook, _Explaining):
        sys.excepthook = _Explaining(sys.excepthook)


class _Explaining:
    """The interpreter's hook for uncaught exceptions, with notes."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        self._before(kind, error, trace)
