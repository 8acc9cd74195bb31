"""The optimizer states of a checkpoint, keyed by parameter name, so that any sharding
and any mesh reads them.

torch numbers an optimizer's parameters; a checkpoint names them, ``{"state": {name:
{"exp_avg": ...}}, "param_groups": [{"params": [names], "lr": ...}]}``, as
``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` does. The
difference is in loading: only parameters with a saved state get one, so that a
parameter that was never stepped (frozen, unused) is as fresh after a resume as before
it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from smp_core.checkpoint.layout import CheckpointError, TensorRecord
from smp_core.checkpoint.lazy_state import Unread, as_it_lies
from smp_core.checkpoint.opening import open_checkpoint
from smp_core.checkpoint.reader import load_checkpoint, read_rest, read_template
from smp_core.checkpoint.tree import Path, iterate_tensors, map_tensors
from smp_core.outside import StrPath
from smp_core.torch_facts import (
    StepsOnHost,
    clean_name,
    is_absent,
    model_parameter,
    parameters_of,
)


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter name; tensors are the live ones
    (DTensors where sharded).

    Raises:
        CheckpointError: the optimizer steps a parameter that is not the model's.
    """
    names = parameter_names(model, optimizer)
    numbered = optimizer.state_dict()
    groups = []
    # Every other entry of a group (lr, betas) stays as it is.
    for group in numbered["param_groups"]:
        named = [names[i] for i in group["params"]]
        groups.append({**group, "params": named})
    # A value that an optimizer keeps for none of its parameters has a key of its own.
    state = {
        names[key] if isinstance(key, int) else key: entry
        for key, entry in numbered["state"].items()
    }
    return {"state": state, "param_groups": groups}


def numbered(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of :func:`named_optimizer_state` keyed by torch's own numbers."""
    # torch numbers parameters through all groups, in order.
    names = [name for group in named["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = []
    for group in named["param_groups"]:
        groups.append({**group, "params": [number[name] for name in group["params"]]})
    # A value that is kept for no parameter keeps its key.
    state = {number.get(name, name): entry for name, entry in named["state"].items()}
    return {"state": state, "param_groups": groups}


def stepped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the model's parameters that the optimizer steps, itself or
    (``optimizer_shard="world"``) masters of."""
    return [model_parameter(stepped) for stepped in parameters_of(optimizer)]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """List the names of the optimizer's parameters, in the order in which torch numbers
    them."""
    # Wrappers (compile, checkpointing) put their own parts into names; clean names are
    # the same with and without them.
    by_parameter: dict[Tensor, str] = {
        p: clean_name(name) for name, p in model.named_parameters()
    }
    parameters = stepped_parameters(optimizer)
    strangers = [
        tuple(parameter.shape)
        for parameter in parameters
        if parameter not in by_parameter
    ]
    if strangers:
        raise CheckpointError(
            f"the optimizer has {len(strangers)} parameters that the model does not have (shapes {strangers[:3]}); it "
            "was probably made before the model was sharded: make it in configure_optimizers, from self.parameters()"
        )
    return [by_parameter[parameter] for parameter in parameters]


def load_named_optimizer_state(
    path: StrPath,
    prefix: tuple[Any, ...],
    model: nn.Module,
    optimizer: Optimizer,
    name_there: Callable[[str], str] = str,
    verify: str | None = "auto",
    given: Mapping[str, Any] | None = None,
) -> None:
    """Read the optimizer state saved under ``prefix`` of a checkpoint folder into
    ``optimizer``. Collective.

    Args:
        prefix: path of the state inside the checkpoint, e.g. ``("optimizer_states",
            0)``.
        name_there: a parameter's name here -> its name in the checkpoint
            (:func:`names_between`).
        verify: as in :func:`smp_core.checkpoint.load_checkpoint`.
        given: a state to load in the place of the saved one: groups, and for each
            parameter either an :class:`smp_core.checkpoint.lazy_state.Unread`, which
            stands for the saved entry, or an entry with unsharded tensors.

    Raises:
        CheckpointError: parameters that the checkpoint has and the optimizer lacks or
            the other way round.
    """
    # The same parameters here and there. The folder is opened once for all reads below.
    path = open_checkpoint(path)
    names = [name_there(name) for name in parameter_names(model, optimizer)]
    parameters = stepped_parameters(optimizer)
    by_name = dict(zip(names, parameters, strict=True))
    groups: list[dict[str, Any]]
    groups = (
        read_rest(path, (*prefix, "param_groups"))
        if given is None
        else given["param_groups"]
    )
    saved_names = [name for group in groups for name in group["params"]]
    # The order may differ, since states are found by name.
    if sorted(saved_names) != sorted(names):
        lacking = sorted(set(names) - set(saved_names))
        foreign = sorted(set(saved_names) - set(names))
        raise CheckpointError(
            f"the optimizer saved in {os.fspath(path)} steps other parameters; only here: {lacking[:5]}, only there: "
            f"{foreign[:5]}. Build configure_optimizers as it was, or load the weights alone"
        )
    on_host = isinstance(optimizer, StepsOnHost)
    by_rows: Collection[str] = getattr(optimizer, "states_by_rows", ())
    saved = _read_sharded_like(path, prefix, by_name, on_host, by_rows, verify)
    state: dict[str, Any] = saved.get("state", {})
    # A given state decides what is there; entries marked as unread are the saved ones.
    if given is None:
        groups = saved["param_groups"]
    else:
        read, state = state, {}
        for owner, entry in as_it_lies(given["state"]).items():
            state[owner] = (
                read[owner]
                if isinstance(entry, Unread)
                else _entry_like(by_name.get(owner), entry)
            )
    # Back to torch's numbers, which load_state_dict of any optimizer understands.
    number = {name: i for i, name in enumerate(names)}
    numbered = {number.get(name, name): entry for name, entry in state.items()}
    optimizer.load_state_dict(
        {"state": numbered, "param_groups": _groups_like(optimizer, groups, names)}
    )


def _read_sharded_like(
    path: StrPath,
    prefix: tuple[Any, ...],
    by_name: Mapping[str, Tensor],
    on_host: bool,
    by_rows: Collection[str],
    verify: str | None,
) -> dict[str, Any]:
    """Read the optimizer state under ``prefix``, each tensor sharded like its
    parameter. Collective.

    Args:
        by_name: parameters by their names in the checkpoint.
        on_host: keep the state on the host.
        by_rows: names of states that are of another shape than their parameter, and
            sharded all the same.
    """
    filled: list[str] = []

    def empty(place: Path, name: str, record: TensorRecord) -> Tensor:
        # Only what the template has is loaded; the names go to `only` below.
        filled.append(name)
        # The path below the prefix is "state", the parameter's name, the value's name.
        owner = (
            by_name.get(place[len(prefix) + 1])
            if place[len(prefix)] == "state"
            else None
        )
        # A rate of a group, for example, or a value kept for none of the parameters.
        if owner is None:
            return torch.empty(record.shape, dtype=record.dtype)
        return like_parameter(
            owner,
            record.shape,
            record.dtype,
            on_host=on_host,
            by_rows=place[-1] in by_rows,
        )

    # First the structure with empty tensors, then all values in one collective load.
    saved: dict[str, Any] = read_template(path, prefix, empty)
    load_checkpoint(path, _nested(prefix, saved), only=filled, verify=verify)
    return saved


def _entry_like(parameter: Tensor | None, entry: Any) -> Any:
    """Return this rank's part of the unsharded tensors of one parameter's state; all of
    it for no parameter."""
    return (
        entry
        if parameter is None
        else map_tensors(entry, functools.partial(shard_like, parameter))
    )


def names_between(prefix_here: str, prefix_there: str) -> Callable[[str], str]:
    """Return the translation of names in this process to names in the checkpoint.

    A model inside a LightningModule has the prefix ``"model."``, the model by itself
    "".

    Args:
        prefix_here: the prefix of names of the model in this process.
        prefix_there: ``metadata["module_prefix"]`` of the checkpoint.
    """
    if prefix_here == prefix_there:
        return str
    # Only the prefix of the model inside its module differs.
    return lambda name: prefix_there + name.removeprefix(prefix_here)


def _groups_like(
    optimizer: Optimizer, saved: list[dict[str, Any]], names: list[str]
) -> list[dict[str, Any]]:
    """Return the saved groups with this optimizer's numbers: states are found by name,
    whatever the order in a group was.

    Args:
        names: of this optimizer's parameters, through all groups.
    """
    # Names agree already; here, whether groups divide them alike.
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in saved] != sizes:
        raise CheckpointError(
            f"the saved optimizer has parameter groups of {[len(g['params']) for g in saved]} parameters, this one of "
            f"{sizes}; build configure_optimizers as it was"
        )
    # Rates and decays belong to a group's place: parameters that moved to another group
    # would take its values.
    rest = iter(names)
    for place, (group, size) in enumerate(zip(saved, sizes, strict=True)):
        here = set(itertools.islice(rest, size))
        if here != set(group["params"]):
            raise CheckpointError(
                f"parameter group {place} of the saved optimizer has {sorted(set(group['params']) - here)[:3]}, here "
                f"{sorted(here - set(group['params']))[:3]} in their place; build configure_optimizers as it was"
            )
    numbers = itertools.count()
    numbered = [
        {**group, "params": list(itertools.islice(numbers, len(group["params"])))}
        for group in saved
    ]
    # load_state_dict copies groups as they are and would leave their tensors on the
    # CPU.
    return _on_their_devices(optimizer, numbered)


def _on_their_devices(
    optimizer: Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Move tensors of saved groups (a rate, betas) to the devices of the optimizer's
    own; others stay."""
    moved = []
    for number, group in enumerate(saved):
        own = (
            optimizer.param_groups[number]
            if number < len(optimizer.param_groups)
            else {}
        )
        values = {}
        # Only values that are tensors here (a rate under capturable=True) are moved.
        for key, value in group.items():
            device = next(
                (
                    tensor.device
                    for _, tensor in iterate_tensors(own.get(key))
                    if key != "params"
                ),
                None,
            )
            values[key] = (
                value
                if device is None
                else map_tensors(value, operator.methodcaller("to", device))
            )
        moved.append(values)
    return moved


def like_parameter(
    parameter: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    on_host: bool = False,
    by_rows: bool = False,
) -> Tensor:
    """Make zeros, to be filled: sharded like ``parameter`` if of its shape, else plain.

    Plain zeros are on the parameter's device; on the CPU if they are 0-d, or
    ``on_host``.

    Args:
        by_rows: zeros of another shape are sharded like ``parameter`` too: by the dims
            that are its own.
    """
    if isinstance(parameter, DTensor) and tuple(shape) == tuple(parameter.shape):
        # Like the shard, also where that is on the host and the mesh of a GPU
        # (from_local would bring it there).
        return torch.zeros_like(
            parameter, dtype=dtype, device="cpu" if on_host else None
        )
    if isinstance(parameter, DTensor) and by_rows:
        return torch.zeros_like(
            _of_shape(parameter, shape, dtype),
            device="cpu" if on_host else parameter.device,
        )
    # States of 0-d (step) are on the CPU, as torch's optimizers keep them.
    return torch.zeros(
        shape,
        dtype=dtype,
        device=parameter.device if len(shape) and not on_host else "cpu",
    )


def _of_shape(
    parameter: DTensor, shape: tuple[int, ...], dtype: torch.dtype
) -> DTensor:
    """Return a DTensor of another shape, sharded like a parameter, whose shards have no
    memory."""
    # The meta device has shapes without memory: the shard's shape is all that is
    # needed.
    whole = torch.empty(shape, dtype=dtype, device="meta")
    own = whole[:0] if is_absent(parameter) else own_part(whole, parameter)
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def shard_like(parameter: Tensor, whole: Tensor, by_rows: bool = False) -> Tensor:
    """Return this rank's part of an unsharded tensor, as a DTensor like ``parameter``;
    all of it if that is no DTensor, or one of another shape.

    Args:
        by_rows: as of :func:`like_parameter`.
    """
    if not isinstance(parameter, DTensor) or (
        parameter.shape != whole.shape and not by_rows
    ):
        return whole
    made = like_parameter(parameter, tuple(whole.shape), whole.dtype, by_rows=by_rows)
    copy_into(made, whole)
    return made


@torch.no_grad()
def copy_into(target: Tensor, whole: Tensor) -> None:
    """Fill ``target`` (a DTensor, or a plain tensor) from the unsharded tensor; local,
    no collective. Nothing is done to one that lies on other pipeline stages."""
    if is_absent(target):
        return
    if isinstance(target, DTensor):
        target.to_local().copy_(own_part(whole, target))
    else:
        target.copy_(whole)


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of an unsharded tensor: axis by axis ceil(rows / ranks)
    rows, as torch.chunk cuts them.

    The innermost axis first: what is split over tensor ranks was split before FSDP2
    sharded the parts, which is what its placement (``_StridedShard``) of the outer axis
    says.
    """
    for axis in reversed(range(like.device_mesh.ndim)):
        placement: Any = like.placements[axis]
        if placement.is_replicate():
            continue
        rows, ranks = whole.shape[placement.dim], like.device_mesh.size(axis)
        # The last ranks may have fewer rows, or none.
        chunk = -(-rows // ranks)
        start = min(like.device_mesh.get_local_rank(axis) * chunk, rows)
        whole = whole.narrow(placement.dim, start, min(chunk, rows - start))
    return whole


def load_full_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an ordinary numbered optimizer state of unsharded tensors: each rank keeps
    its own part. Local."""
    parameters = stepped_parameters(optimizer)
    state = {
        key: _entry_like(parameters[key] if isinstance(key, int) else None, entry)
        for key, entry in saved["state"].items()
    }
    # Groups and counters are the same on all ranks.
    groups = _on_their_devices(optimizer, saved["param_groups"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _nested(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Put ``value`` at ``path``; integer keys stand for places in a list, filled up
    with empty dicts."""
    # A template is a nest from the root of the saved state down.
    for key in reversed(path):
        if isinstance(key, int):
            value = [*({} for _ in range(key)), value]
        else:
            value = {key: value}
    return value
