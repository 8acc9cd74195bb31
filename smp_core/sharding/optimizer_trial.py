"""Which optimizers can step what sharding gives them, found out before training by stepping small tensors.

torch's elementwise optimizers are known. Of any other class an optimizer like the one at hand is made and stepped:

- on parts of a tensor, each alone in an optimizer of its own, for ``optimizer_shard="world"``: it has to do what it
  does to the whole tensor. What it reduces over all its parameters shows like this, too.
- on two tensors, each alone and both together, where pipeline stages hold other parameters each
- on likenesses of its sharded parameters, a shard of no elements included, in the place of this rank. Collectives go
  to torch's fake process group, which does nothing, so that an optimizer that fails on some ranks only cannot leave the
  others waiting; whether it failed anywhere is asked afterwards.

The fake backend has no public name: ``torch.testing._internal.distributed.fake_pg`` registers it when it is imported.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp_core.absent import is_absent
from smp_core.agreement import of_all_ranks
from smp_core.checkpoint.tree import iterate_tensors

logger = logging.getLogger("smp")

KNOWN = frozenset(
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
"""Optimizers that step elements by themselves and sharded parameters like whole ones. The classes and no others: a
class derived from one of them, or of the same name, may do something else."""

# Beginnings and ends of names, in small letters. A few steps on a small tensor do not show that all of these look
# across tensors: some begin to only after a number of steps.
_ACROSS = (
    *("adafactor", "came", "dadapt", "galore", "kfac", "kron", "lamb", "lars", "lbfgs", "muon", "prodigy", "sara"),
    *("shampoo", "soap"),
)
_ACROSS_TENSORS = ("dadapt", "kfac", "lbfgs", "mechanic", "prodigy")
_TORCHAO = "torchao"
# The lengths of the parts are multiples of every processor's vectors, which would round what is left over differently.
_WHOLE, _PARTS = (12, 8), (32, 64)
_EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
_GRADIENT_SCALES = (1e-4, 1.0, 1e4)


def refuse_unsaveable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose states checkpoints cannot hold.

    Raises:
        ValueError: it is one of torchao's, whose states are tensors of kinds of their own.
    """
    kind = type(optimizer)
    if any(base.__module__.split(".")[0] == _TORCHAO for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} is torchao's, whose states are tensors of a kind of its own that checkpoints cannot hold "
            "yet; write torch.optim.AdamW, with optimizer_shard='world' or state_offload='optimizer' for less memory"
        )


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on others, and warn that one that was only tried could.
    Collective over the world for what is not known.

    Raises:
        ValueError: it does, its name says that it does, or it cannot be made to find out. On all ranks.
    """
    refusal = (
        f"optimizer_shard='world' gives each rank a part of every tensor, but {type(optimizer).__name__} %s; write "
        "optimizer_shard='shard', or use an elementwise optimizer such as AdamW"
    )
    warning = (
        "optimizer_shard='world': %s is not known here. It stepped small tensors in parts as it stepped them whole; if "
        "later steps look across a tensor, or across several, they are other ones than in one process, without an "
        "error. In doubt write optimizer_shard='shard'"
    )
    _require(optimizer, _ACROSS, refusal, "looks across a tensor", _difference, warning)


def require_tensorwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a tensor depends on other tensors, and warn that one that was only tried
    could. Collective over the world for what is not known.

    Raises:
        ValueError: it does, its name says that it does, or it cannot be made to find out. On all ranks.
    """
    refusal = (
        "with pipeline_parallel_degree each stage's optimizer steps the parameters of its blocks, but "
        f"{type(optimizer).__name__} %s; use one that looks at one tensor at a time, such as AdamW"
    )
    warning = (
        "pipeline_parallel_degree: %s is not known here. It stepped two small tensors together as it stepped each "
        "alone; if later steps look across tensors, they are other ones than in one process, without an error"
    )
    _require(optimizer, _ACROSS_TENSORS, refusal, "looks across all its parameters", _difference_together, warning)


def _require(
    optimizer: torch.optim.Optimizer,
    names: tuple[str, ...],
    refusal: str,
    reason: str,
    difference: Callable[[torch.optim.Optimizer], str | None],
    warning: str,
) -> None:
    """Refuse an optimizer by its name, or by a trial on small tensors; warn of one that was only tried.

    Args:
        names: beginnings and ends of the names of those that are refused for ``reason``.
        refusal: takes the reason.
        difference: the trial.
        warning: takes the optimizer's name.
    """
    kind = type(optimizer)
    if kind in KNOWN:
        return
    classes = [base.__name__.lower() for base in kind.__mro__]
    if any(name.startswith(names) or name.endswith(names) for name in classes):
        raise ValueError(refusal % reason)
    _on_all_ranks(lambda: difference(optimizer), refusal)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(warning, kind.__name__)


def require_steps_shards(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that fails on sharded parameters, before the first step does. Collective over the world for
    what is not known.

    Raises:
        ValueError: it fails on some rank. On all ranks.
    """
    kind = type(optimizer)
    sharded = [p for group in optimizer.param_groups for p in held(group) if isinstance(p, DTensor)]
    meshes = dict.fromkeys(parameter.device_mesh for parameter in sharded)  # in one order on all ranks
    if kind in KNOWN or not meshes:
        return
    refusal = (
        f"{kind.__name__} cannot step sharded parameters: a step on small ones %s; use another optimizer, such as "
        "AdamW, or shard_degree=1 without tensor ranks, where parameters are whole"
    )
    _on_all_ranks(lambda: _failure_on_shards(optimizer, meshes), refusal)


def held(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the parameters of an optimizer's group but those of other pipeline stages, which it passes over: they have
    no gradients."""
    return [parameter for parameter in group["params"] if not is_absent(parameter)]


def _on_all_ranks(find_problem: Callable[[], str | None], refusal: str) -> None:
    """Raise what any rank has found on all of them."""
    for problem in of_all_ranks(find_problem()):
        if problem is not None:
            raise ValueError(refusal % problem)


# Elements by themselves


def _difference(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what an optimizer does to a tensor and not to its parts; None: nothing was found."""
    values = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64).view(_WHOLE)
    for group in optimizer.param_groups:
        for scale in _GRADIENT_SCALES:
            gradients = [scale * gradient for gradient in _gradients(values)]
            try:
                with _without_traces(values.device):
                    whole = _stepped(optimizer, group, values, gradients)
                    pieces = [tensor.view(-1).split(_PARTS) for tensor in (values, *gradients)]
                    parts = [_stepped(optimizer, group, value, each) for value, *each in zip(*pieces, strict=True)]
            except Exception as error:
                return f"could not be tried on a part ({type(error).__name__}: {error})"
            if any(each is None for each in (whole, *parts)):
                return "keeps states that are not shaped like their parameter"
            if not torch.allclose(whole.view(-1), torch.cat(parts), **_EXACT):
                return "looks across a tensor, or across all its parameters"
    return None


def _difference_together(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what an optimizer does to two tensors and not to each of them; None: nothing was found."""
    values = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64).view(_WHOLE)
    two = [values, 3.0 * values.flip(0)]
    for group in optimizer.param_groups:
        for scale in _GRADIENT_SCALES:
            gradients = [scale * gradient for gradient in _gradients(values)]
            of_two = [gradients, [7.0 * gradient.flip(1) for gradient in gradients]]
            try:
                with _without_traces(values.device):
                    together = [p.detach() for p, _ in _stepped_together(optimizer, group, two, of_two)]
                    alone = [
                        _stepped_together(optimizer, group, [value], [each])[0][0].detach()
                        for value, each in zip(two, of_two, strict=True)
                    ]
            except Exception as error:
                return f"could not be tried on two tensors ({type(error).__name__}: {error})"
            if not all(torch.allclose(a, b, **_EXACT) for a, b in zip(together, alone, strict=True)):
                return "looks across all its parameters"
    return None


def _gradients(values: torch.Tensor) -> list[torch.Tensor]:
    """Make gradients for the trial: falling ones at right angles to the weights, which is where some optimizers begin
    to project, then four of no pattern."""
    waves = torch.sin(torch.arange(4 * values.numel(), dtype=values.dtype)).view(4, *values.shape)
    across = torch.cos(torch.arange(values.numel(), dtype=values.dtype)).view_as(values)
    across -= (across * values).sum() / (values * values).sum() * values
    return [*(factor * across for factor in (8.0, 2.0, 0.5, 0.1, 0.02)), *waves]


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: torch.Tensor, gradients: list[torch.Tensor]
) -> Any:
    """Return what becomes of a tensor, alone in an optimizer; None: that keeps states of another shape."""
    ((parameter, state),) = _stepped_together(optimizer, group, [values], [gradients])
    states = [tensor for _, tensor in iterate_tensors(state)]
    fits = all(state.ndim == 0 or state.shape == values.shape for state in states)
    return parameter.detach() if fits else None


def _stepped_together(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Return what becomes of tensors in one optimizer, each with its state."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    tried = _made_like(optimizer, [(group, parameters)])
    for of_step in zip(*gradients, strict=True):
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        tried.step()
    return [(parameter, dict(tried.state[parameter])) for parameter in parameters]


# Sharded parameters


def _failure_on_shards(optimizer: torch.optim.Optimizer, meshes: Collection[DeviceMesh]) -> str | None:
    """Return what goes wrong when likenesses of the optimizer's parameters are stepped; None: nothing, or an optimizer
    like this one cannot be made."""
    device = next(iter(meshes)).device_type
    degree = max(mesh.size() for mesh in meshes)
    with _fake_meshes(meshes) as fakes, _without_traces(torch.device(device)):
        groups = []
        for group in optimizer.param_groups:
            alike = {_likeness_key(parameter, degree): parameter for parameter in held(group)}
            groups.append((group, [_likeness(parameter, degree, fakes) for parameter in alike.values()]))
        parameters = [parameter for _, members in groups for parameter in members]
        try:
            tried = _made_like(optimizer, groups)
        except Exception as error:
            logger.info("%s was not tried on shards: %s: %s", type(optimizer).__name__, type(error).__name__, error)
            return None

        def closure() -> torch.Tensor:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return torch.ones((), device=device)

        try:
            needs_closure = inspect.signature(tried.step).parameters.get("closure")
            for _ in range(2):
                if needs_closure is not None and needs_closure.default is inspect.Parameter.empty:
                    tried.step(closure)
                else:
                    closure()
                    tried.step()
        except Exception as error:
            return f"failed ({type(error).__name__}: {error})"
    return None


def _likeness_key(parameter: torch.Tensor, degree: int) -> Any:
    sharded = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
    return sharded, _small_shape(parameter.shape, degree), parameter.dtype, parameter.requires_grad


def _small_shape(shape: torch.Size, degree: int) -> tuple[int, ...]:
    """Return rows as many as there are ranks twice over, fewer than ranks, or uneven, as the parameter has them; and
    columns more or fewer than rows."""
    if not shape:
        return ()
    rows = min(shape[0], 2 * degree + (shape[0] % degree != 0))
    return (rows, *(min(size, 4 * degree if size > shape[0] else degree) for size in shape[1:]))


def _likeness(parameter: torch.Tensor, degree: int, meshes: Mapping[DeviceMesh, DeviceMesh]) -> nn.Parameter:
    shape = _small_shape(parameter.shape, degree)
    device = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).device
    values = torch.linspace(-1.0, 1.0, torch.Size(shape).numel(), device=device).to(parameter.dtype).view(shape)
    if isinstance(parameter, DTensor):
        mesh, own = meshes[parameter.device_mesh], values
        for axis, placement in enumerate(parameter.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                step = -(-own.shape[dim] // mesh.size(axis))
                start = min(mesh.get_local_rank(axis) * step, own.shape[dim])
                own = own.narrow(dim, start, min(step, own.shape[dim] - start))
        values = DTensor.from_local(
            own.contiguous(), mesh, parameter.placements, run_check=False, shape=values.shape, stride=values.stride()
        )
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


@contextmanager
def _fake_meshes(meshes: Collection[DeviceMesh]) -> Iterator[dict[DeviceMesh, DeviceMesh]]:
    """Make meshes of the same ranks, whose collectives do nothing. They have names of their own: DTensor remembers what
    it found out for one mesh and uses it for all that are equal."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    groups: list[dist.ProcessGroup] = []
    made = {}
    try:
        for mesh in meshes:
            for axis in range(mesh.ndim):
                ranks = dist.get_process_group_ranks(mesh.get_group(axis))
                groups.append(dist.new_group(ranks, backend="fake", use_local_synchronization=True))
            of_mesh: Any = groups[-mesh.ndim :]
            names = tuple(f"trial {group.group_name}" for group in of_mesh)
            given = (of_mesh, mesh.mesh) if mesh.ndim > 1 else (of_mesh[0], None)
            made[mesh] = DeviceMesh.from_group(given[0], mesh.device_type, mesh=given[1], mesh_dim_names=names)
        yield made
    finally:
        for group in groups:
            dist.destroy_process_group(group)


# Optimizers like the one at hand


def _made_like(optimizer: torch.optim.Optimizer, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]) -> Any:
    """Return an optimizer of the same class with the same options over other parameters, ready to step."""
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    made = kind([{**_options(group), "params": parameters} for group, parameters in groups], **copy.deepcopy(options))
    if callable(getattr(made, "train", None)):
        made.train()  # schedule-free ones refuse to step before
    return made


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options as they were before schedulers, which may have begun with a rate of 0."""
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    rate = options.pop("initial_lr", options.get("lr"))
    if "lr" in options:
        options["lr"] = rate if rate != 0 else 1e-3
    return options


@contextmanager
def _without_traces(device: torch.device) -> Iterator[None]:
    """Leave the random states as they were; what there is to warn of comes with the first real step."""
    devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
