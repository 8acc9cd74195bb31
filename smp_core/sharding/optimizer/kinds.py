"""Which optimizers may step parts of tensors, or some tensors without the others, and
with which of torch's kernels.

``optimizer_shard="world"`` steps a part of every tensor on each rank, and a pipeline
stage steps its own tensors only. Whether that gives one process's numbers cannot be
found out by trying a few steps: some optimizers begin to look further only later. So
there are lists, a user adds to them with :func:`register_elementwise` and
:func:`register_tensorwise`, and all others are refused. A class counts as itself only:
one that is derived from it may do something else.

Whether any other class can step sharded parameters at all is found out before training,
by stepping small ones: an optimizer like the one at hand is made and stepped on
likenesses of its sharded parameters, a shard of no elements included, in the place of
this rank. Collectives go to torch's fake process group, which does nothing, so that an
optimizer that fails on some ranks only cannot leave the others waiting; whether it
failed anywhere is asked afterwards.

A fused or foreach kernel takes tensors of one kind: plain ones, or DTensors of one
mesh; torch has fused kernels for DTensors of Adam and AdamW only. Parameters in host
memory are stepped by the host's kernels. What was asked for and cannot run is said in
the log; numbers are the same.

The fake backend has no public name: ``torch.testing._internal.distributed.fake_pg``
registers it when it is imported. A fused optimizer takes the scale of a gradient scaler
into its kernel (``_step_supports_amp_scaling``, which has no public name); one whose
kernels were changed gets unscaled gradients, as every other one.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smp_core.cluster import of_all_ranks
from smp_core.optim import Adafactor, AdamW8bit, StepsTogether
from smp_core.torch_facts import is_absent, local_part

K = TypeVar("K", bound=type[Optimizer])

TORCHS_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
    )
)
"""torch's optimizers that step each element by itself, and sharded parameters like
unsharded ones."""

STEP_SHARDS: frozenset[type[Optimizer]] = TORCHS_ELEMENTWISE | {AdamW8bit}
"""Optimizers that step each sharded parameter like an unsharded one, by itself: without
a trial, in any portions."""

# Of other packages, by name, which are not imported for it.
_ELEMENTWISE = frozenset(
    (
        "torch.optim.rprop.Rprop",
        "lion_pytorch.lion_pytorch.Lion",
        "adan_pytorch.adan.Adan",
        "schedulefree.adamw_schedulefree.AdamWScheduleFree",
        "schedulefree.radam_schedulefree.RAdamScheduleFree",
        "schedulefree.sgd_schedulefree.SGDScheduleFree",
    )
)
# And those made of StepsTogether.
_TENSORWISE = (torch.optim.Muon, torch.optim.Adafactor, AdamW8bit)
# Beginnings and ends of names, in small letters, of kinds that look across a tensor,
# and across all tensors.
_ACROSS_TENSORS = ("dadapt", "kfac", "lbfgs", "mechanic", "prodigy")
_ACROSS = (
    *_ACROSS_TENSORS,
    *(
        "adafactor",
        "came",
        "galore",
        "kron",
        "lamb",
        "lars",
        "muon",
        "sara",
        "shampoo",
        "soap",
    ),
)
_TORCHAO = "torchao"

_registered_elementwise: set[type[Optimizer]] = set()
_registered_tensorwise: set[type[Optimizer]] = set()


def register_elementwise(kind: K) -> K:
    """Register a class of optimizers that step each element by itself: what becomes of
    an element follows from its own value, gradients and states, and from numbers that
    are the same for all (rates, the number of steps).

    Args:
        kind: the class; derived ones are registered by themselves. Returned, so that
            this can be a decorator.

    Raises:
        ValueError: the name is of a kind that is known to look across a tensor.
    """
    if _is_named(kind, _ACROSS):
        raise ValueError(
            f"register_elementwise({kind.__name__}): optimizers of this name look across a tensor"
        )
    _registered_elementwise.add(kind)
    return kind


def register_tensorwise(kind: K) -> K:
    """Register a class of optimizers that step each tensor by itself: pipeline stages
    may have it. Whether it can step shards is tried all the same; for whole matrices
    see :mod:`smp_core.optim.owners`.

    Args:
        kind: as of :func:`register_elementwise`.

    Raises:
        ValueError: the name is of a kind that is known to look across all its
            parameters.
    """
    if _is_named(kind, _ACROSS_TENSORS):
        raise ValueError(
            f"register_tensorwise({kind.__name__}): optimizers of this name look across all parameters"
        )
    _registered_tensorwise.add(kind)
    return kind


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is not known to step each element by itself.

    Raises:
        ValueError: with the line that registers it.
    """
    kind = type(optimizer)
    # The error says what is known: across what it looks, or how to register it.
    if not _steps_elements(kind):
        gives = "optimizer_shard='world' gives each rank a part of every tensor"
        instead = "write optimizer_shard='shard', or use an elementwise optimizer such as AdamW"
        looks_across = "a tensor" if _is_named(kind, _ACROSS) else ""
        if issubclass(kind, AdamW8bit):
            looks_across = "blocks of a row, whose elements share a scale"
        raise _refusal(kind, "element", looks_across, gives, instead)


def require_tensorwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is not known to step each tensor by itself.

    Raises:
        ValueError: with the line that registers it.
    """
    kind = type(optimizer)
    if not _steps_tensors(kind):
        steps = "with pipeline_parallel_degree the optimizer steps a stage's parameters alone"
        instead = "use one that looks at one tensor at a time, such as AdamW"
        looks_across = "all its parameters" if _is_named(kind, _ACROSS_TENSORS) else ""
        raise _refusal(kind, "tensor", looks_across, steps, instead)


def may_read_loss(kind: type[Optimizer]) -> bool:
    """Return whether a step may depend on the loss that its closure returns, as that of
    a line search does: it may in every class that is in no list."""
    return not _steps_tensors(kind)


def refuse_unsaveable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose states checkpoints cannot hold.

    Raises:
        ValueError: it is one of torchao's, whose states are tensors of kinds of their
            own.
    """
    kind = type(optimizer)
    # The class, or one that it is derived from.
    if any(base.__module__.split(".")[0] == _TORCHAO for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} is torchao's, whose states are tensors of a kind of its own that checkpoints cannot hold "
            "and that differ from degree to degree; write smp_core.optim.AdamW8bit for states of 8 bits, or "
            "torch.optim.AdamW, with optimizer_shard='world' or state_offload='optimizer' for less memory"
        )


def _steps_elements(kind: type[Optimizer]) -> bool:
    full_name = f"{kind.__module__}.{kind.__qualname__}"
    # Other packages' classes are known by name, so that they need not be imported.
    return (
        kind in TORCHS_ELEMENTWISE
        or kind in _registered_elementwise
        or full_name in _ELEMENTWISE
    )


def _steps_tensors(kind: type[Optimizer]) -> bool:
    # Only a direct child of StepsTogether: one derived from that may do something else.
    is_ours = StepsTogether in kind.__bases__
    return (
        is_ours
        or _steps_elements(kind)
        or kind in _TENSORWISE
        or kind in _registered_tensorwise
    )


def _is_named(kind: type, names: tuple[str, ...]) -> bool:
    # Names of all bases: a subclass of LAMB is named as its author likes.
    classes = [base.__name__.lower() for base in kind.__mro__]
    return any(name.startswith(names) or name.endswith(names) for name in classes)


def _refusal(
    kind: type, part: str, looks_across: str, why: str, instead: str
) -> ValueError:
    """Make the error for an optimizer that looks further than at one part; "": for one
    of which that is not known."""
    if looks_across:
        return ValueError(
            f"{why}, but {kind.__name__} looks across {looks_across}; {instead}"
        )
    register = f"register_{part}wise"
    return ValueError(
        f"{why}, but {kind.__name__} is not known to step each {part} by itself; {instead}. If it does, register it "
        f"before training: from smp_core.sharding.optimizer import {register}; {register}({kind.__name__})"
    )


def derive(kind: Any, methods: type, base: str) -> Any:
    """Return a class derived from an optimizer's, with methods of another one, which
    find the optimizer's class by the name ``base``.

    Not by ``super()``: with ``methods`` before ``kind`` in the order of bases, an
    optimizer whose class has several bases of its own could not be made one of the
    derived class any more.
    """
    # Special methods stay the optimizer's own: it is pickled and made as before.
    own = {
        name: value
        for name, value in vars(methods).items()
        if callable(value) and not name.startswith("__")
    }
    facts = {base: kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, methods), {**own, **facts})


logger = logging.getLogger("smp")


def require_steps_shards(optimizer: Optimizer) -> None:
    """Refuse an optimizer that fails on sharded parameters, before the first step does.
    Collective over the world for what is not known.

    Raises:
        ValueError: it fails on some rank. On all ranks.
    """
    kind = type(optimizer)
    # Phase 1: is there anything sharded, of a class that is in no list?
    sharded = [
        p
        for group in optimizer.param_groups
        for p in held(group)
        if isinstance(p, DTensor)
    ]
    # In one order on all ranks.
    meshes = dict.fromkeys(parameter.device_mesh for parameter in sharded)
    if kind in STEP_SHARDS or not meshes:
        return
    # Phase 2: a remedy for the classes that users are likely to have.
    named = kind.__name__.lower()
    instead = "another optimizer, such as AdamW"
    if named.endswith("muon"):
        instead = "smp_core.optim.Muon(muon_groups(model))"
    elif named == "adafactor" and kind is not Adafactor:
        instead = "smp_core.optim.Adafactor (which takes torch's arguments), another one such as AdamW"
    refusal = (
        f"{kind.__name__} cannot step sharded parameters: a step on small ones %s; use {instead}, or shard_degree=1 "
        "without tensor ranks, where parameters are whole"
    )
    # Phase 3: the trial on every rank; any rank's failure is raised on all of them.
    for failure in of_all_ranks(_failure_on_shards(optimizer, meshes)):
        if failure is not None:
            raise ValueError(refusal % failure)
    if isinstance(optimizer, torch.optim.Muon):
        _say_what_torchs_muon_sends(sharded)


def _say_what_torchs_muon_sends(matrices: Sequence[DTensor]) -> None:
    """Warn of the collectives inside of each step: DTensor gathers a wide matrix twice
    in each of five iterations and its square once, and adds up the square of a tall one
    twice; in bfloat16."""
    # Bytes of a step, from the elements that each of five iterations sends.
    sent = 0.0
    for matrix in matrices:
        rows, columns = matrix.shape
        share = 1 - 1 / matrix.device_mesh.size()
        elements = 2 * rows * columns + rows**2 if rows <= columns else 4 * columns**2
        sent += 5 * share * elements * torch.bfloat16.itemsize
    if dist.get_rank() == 0:
        logger.warning(
            "torch.optim.Muon works on whole matrices on every rank: each step sends about %.3g GiB from each rank; "
            "smp_core.optim.Muon(muon_groups(model)) sends each matrix to one rank and back",
            sent / 2**30,
        )


def held(group: Mapping[str, Any]) -> list[Tensor]:
    """List the parameters of an optimizer's group but those of other pipeline stages,
    which it passes over: they have no gradients."""
    return [parameter for parameter in group["params"] if not is_absent(parameter)]


def _failure_on_shards(
    optimizer: Optimizer, meshes: Collection[DeviceMesh]
) -> str | None:
    """Return what goes wrong when likenesses of the optimizer's parameters are stepped;
    None: nothing, or an optimizer like this one cannot be made."""
    # A likeness has a few rows for each rank of the largest mesh.
    device = next(iter(meshes)).device_type
    degree = max(mesh.size() for mesh in meshes)
    with _fake_meshes(meshes) as fakes, _without_traces(torch.device(device)):
        # An optimizer like it, over likenesses.
        groups = []
        for group in optimizer.param_groups:
            # One likeness for each kind of shape and layout: a trial of every parameter
            # would take long.
            alike = {
                _likeness_key(parameter, degree): parameter for parameter in held(group)
            }
            groups.append(
                (
                    group,
                    [
                        _likeness(parameter, degree, fakes)
                        for parameter in alike.values()
                    ],
                )
            )
        parameters = [parameter for _, members in groups for parameter in members]
        try:
            tried = made_like(optimizer, groups)
        except Exception as error:
            logger.info(
                "%s was not tried on shards: %s: %s",
                type(optimizer).__name__,
                type(error).__name__,
                error,
            )
            return None

        def closure() -> Tensor:
            # All gradients are ones, on every rank.
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return torch.ones((), device=device)

        # Two steps: states are made in the first.
        try:
            # LBFGS and its like cannot step without a closure.
            needs_closure = inspect.signature(tried.step).parameters.get("closure")
            for _ in range(2):
                if (
                    needs_closure is not None
                    and needs_closure.default is inspect.Parameter.empty
                ):
                    tried.step(closure)
                else:
                    closure()
                    tried.step()
        except Exception as error:
            return f"failed ({type(error).__name__}: {error})"
    return None


def _likeness_key(parameter: Tensor, degree: int) -> Any:
    sharded = (
        (parameter.device_mesh, parameter.placements)
        if isinstance(parameter, DTensor)
        else None
    )
    return (
        sharded,
        _small_shape(parameter.shape, degree),
        parameter.dtype,
        parameter.requires_grad,
    )


def _small_shape(shape: torch.Size, degree: int) -> tuple[int, ...]:
    """Return rows as many as there are ranks twice over, fewer than ranks, or uneven,
    as the parameter has them; and columns more or fewer than rows."""
    # Uneven rows stay uneven, so that some rank's part is smaller or empty.
    if not shape:
        return ()
    rows = min(shape[0], 2 * degree + (shape[0] % degree != 0))
    return (
        rows,
        *(min(size, 4 * degree if size > shape[0] else degree) for size in shape[1:]),
    )


def _likeness(
    parameter: Tensor, degree: int, meshes: Mapping[DeviceMesh, DeviceMesh]
) -> nn.Parameter:
    shape = _small_shape(parameter.shape, degree)
    # Distinct values, which a factorisation can work with.
    device = local_part(parameter).device
    values = (
        torch.linspace(-1.0, 1.0, torch.Size(shape).numel(), device=device)
        .to(parameter.dtype)
        .view(shape)
    )
    if isinstance(parameter, DTensor):
        # This rank's part of the values, cut as DTensor cuts: chunks of equal size, the
        # last ones smaller or empty.
        mesh, own = meshes[parameter.device_mesh], values
        for axis, placement in enumerate(parameter.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                step = -(-own.shape[dim] // mesh.size(axis))
                start = min(mesh.get_local_rank(axis) * step, own.shape[dim])
                own = own.narrow(dim, start, min(step, own.shape[dim] - start))
        values = DTensor.from_local(
            own.contiguous(),
            mesh,
            parameter.placements,
            run_check=False,
            shape=values.shape,
            stride=values.stride(),
        )
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


@contextmanager
def _fake_meshes(
    meshes: Collection[DeviceMesh],
) -> Iterator[dict[DeviceMesh, DeviceMesh]]:
    """Make meshes of the same ranks, whose collectives do nothing. They have names of
    their own: DTensor remembers what it found out for one mesh and uses it for all that
    are equal."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    groups: list[dist.ProcessGroup] = []
    made = {}
    try:
        for mesh in meshes:
            # A group for each axis, of the same ranks, in which this rank has the same
            # place.
            for axis in range(mesh.ndim):
                ranks = dist.get_process_group_ranks(mesh.get_group(axis))
                groups.append(
                    dist.new_group(
                        ranks, backend="fake", use_local_synchronization=True
                    )
                )
            of_mesh: Any = groups[-mesh.ndim :]
            names = tuple(f"trial {group.group_name}" for group in of_mesh)
            given = (of_mesh, mesh.mesh) if mesh.ndim > 1 else (of_mesh[0], None)
            made[mesh] = DeviceMesh.from_group(
                given[0], mesh.device_type, mesh=given[1], mesh_dim_names=names
            )
        yield made
    finally:
        # Nothing of the trial is left among the groups of the process.
        for group in groups:
            dist.destroy_process_group(group)


def made_like(
    optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]
) -> Any:
    """Return an optimizer of the same class with the same options over other
    parameters, ready to step."""
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    # Options that the class takes: defaults may hold more than its arguments.
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    made = kind(
        [{**_options(group), "params": parameters} for group, parameters in groups],
        **copy.deepcopy(options),
    )
    if callable(getattr(made, "train", None)):
        made.train()  # schedule-free ones refuse to step before
    return made


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options as they were before schedulers, which may have begun
    with a rate of 0."""
    options = {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    rate = options.pop("initial_lr", options.get("lr"))
    if "lr" in options:
        options["lr"] = rate if rate != 0 else 1e-3
    return options


@contextmanager
def _without_traces(device: torch.device) -> Iterator[None]:
    """Leave the random states as they were; what there is to warn of comes with the
    first real step."""
    devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_FUSED_FOR_SHARDS = (torch.optim.Adam, torch.optim.AdamW)


def choose_kernels(optimizer: Optimizer, on_host: bool, stepped_there: bool) -> None:
    """Choose kernels that take what is in each group, and in all of them for
    ``zero_grad``, which goes by the defaults.

    Args:
        on_host: parameters live in host memory, where other kernels run than on the
            device.
        stepped_there: an optimizer that steps on the host chooses its kernels itself.
    """
    has_fused = isinstance(optimizer, _FUSED_FOR_SHARDS)
    # One kernel takes plain tensors (None), or DTensors of one mesh.
    of_all: set[Any] = set()
    for group in optimizer.param_groups:
        meshes = {getattr(each, "device_mesh", None) for each in held(group)}
        of_all |= meshes
        if stepped_there:
            continue
        if len(meshes) > 1:
            _leave(
                optimizer,
                group,
                ("fused", "foreach"),
                "where 0-d, shared or tensor parallel parameters are in the group",
            )
        elif on_host:
            group.update(host_kernels(group, group["params"], type(optimizer)))
        elif not has_fused and meshes - {None}:
            _leave(
                optimizer,
                group,
                ("fused",),
                "on sharded parameters, for which torch has the fused kernels of Adam and AdamW alone",
            )
    if len(of_all) > 1:
        optimizer.defaults.update(
            {flag: False for flag in ("fused", "foreach") if flag in optimizer.defaults}
        )


def _leave(
    optimizer: Optimizer, group: dict[str, object], flags: tuple[str, ...], where: str
) -> None:
    """Switch kernels of a group off, and say so of those that were asked for."""
    asked = [flag for flag in flags if group.get(flag)]
    if asked:
        logger.info("%s=True has no effect %s", asked[0], where)
    if "fused" in asked:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    group.update({flag: False for flag in flags if flag in group})


def host_kernels(
    group: Mapping[str, Any], members: Iterable[Tensor], kind: type
) -> dict[str, Any]:
    """Return the options of a group with which its kernels run on the host: fused where
    there is such a kernel (for DTensors, torch has Adam's and AdamW's)."""
    # A differentiable step has no fused kernel.
    options: dict[str, Any] = {"capturable": False} if "capturable" in group else {}
    if "fused" in group and not group.get("differentiable"):
        members = list(members)
        sharded = any(isinstance(member, DTensor) for member in members)
        fused = not sharded or any(base in kind.__mro__ for base in _FUSED_FOR_SHARDS)
        # Complex numbers have no fused kernel.
        fused = fused and all(member.is_floating_point() for member in members)
        # torch's fused SGD has no first step of some parameters beside later steps of
        # others, so with momentum it runs only where it was asked for.
        fused = fused and (bool(group["fused"]) or not group.get("momentum"))
        options |= {"fused": fused, "foreach": False}
    return options
