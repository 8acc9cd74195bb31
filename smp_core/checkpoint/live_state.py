"""The full state of live ranks, gathered one tensor at a time: in memory, or streamed
into one `torch.save` file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.folders.addresses import local_path
from smp_core.checkpoint.folders.leftovers import scratch_path
from smp_core.checkpoint.foreign.torch_file import TorchFile
from smp_core.checkpoint.full_state import discard, put_in_place
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import is_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.save_plan import LazyTensor, agreed_aliases, find_ties, tie_key
from smp_core.checkpoint.tree import map_tensors, name_tensors
from smp_core.outside import long_wait
from smp_core.torch_facts import ABSENT, is_absent, is_rank_0


def full_state_dict(
    model_or_state: nn.Module | Mapping[str, Any],
    rank0_only: bool = True,
    stages: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Gather the full state dict of live ranks on the CPU, one tensor at a time.
    Collective.

    Args:
        model_or_state: a module (its parameters and persistent buffers, by their own
            names) or a flat or nested state with DTensors over any mesh; what is no
            tensor stays as it is.
        rank0_only: the other ranks take part but get an empty dict; False gives every
            rank everything.
        stages: the ranks that hold other pipeline stages of what this rank holds a part
            of; None: none, or the state has nothing of others.

    Returns:
        names -> unsharded CPU tensors; tied tensors stay one tensor.
    """
    if isinstance(model_or_state, nn.Module):
        state: Mapping[str, Any] = get_model_state_dict(model_or_state)
    else:
        state = model_or_state
    keep = not rank0_only or is_rank_0()
    seen: dict[Any, Tensor] = {}
    full_tensor, _ = _over_stages(dict(name_tensors(dict(state)).values()), stages)

    def unsharded(tensor: Tensor) -> Tensor | None:
        key = tie_key(tensor)
        # Every rank takes part in the gather even where it sees a tie: a rank with an
        # empty slice does not see it.
        full = full_tensor(tensor)
        if not keep:
            return None
        if key is not None and key in seen:
            return seen[key]
        # A copy: the live tensor changes with the next step.
        host = full.detach().to("cpu", copy=True).contiguous()
        if key is not None:
            seen[key] = host
        return host

    with long_wait("gathering unsharded weights", here=is_rank_0()):
        result: dict[str, Any] = map_tensors(dict(state), unsharded)
    # map_tensors leaves None where a tensor was, which would look like a state.
    return result if keep else {}


def save_full_state(
    path: str | os.PathLike[str],
    content: Mapping[str, Any],
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Write one ordinary ``torch.save`` file (a Lightning ``.ckpt``) from live ranks,
    streaming. Collective.

    Tensors are gathered and written one at a time, so rank 0 never holds more than one.
    The file appears at its path complete or not at all, and replaces a file or a
    checkpoint folder that is there.

    Args:
        path: a local file.
        content: nested dicts, lists and tuples; DTensors become unsharded tensors, tied
            ones stay tied; the rest is taken from rank 0.
        stages: as of :func:`full_state_dict`.

    Raises:
        CheckpointError: on every rank, when any rank failed.
    """
    ranks = Ranks()
    what = f"{os.fspath(path)} was not saved"
    target = Path(local_path(path)).absolute()
    lazy = _lazy_tensors(content, ranks, what, stages)
    # One entry for each tie, in the same order on all ranks: gathers are collective.
    leaves = {leaf.tie: leaf for leaf in lazy.values()}
    temporary = scratch_path(target)
    file: TorchFile | None = None

    def begin() -> None:
        nonlocal file
        # Only files, checkpoints and empty folders are replaced.
        if target.is_dir() and any(target.iterdir()) and not is_checkpoint(target):
            raise CheckpointError(
                f"{target} is a directory but no checkpoint; remove it, or choose another path"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        file = TorchFile(
            temporary, map_tensors(dict(content), lambda tensor: lazy[id(tensor)])
        )

    try:
        ranks.on_first(what, begin)
        problem: Exception | None = None
        with long_wait(f"writing {os.fspath(path)}", here=ranks.rank == 0):
            for number, leaf in enumerate(leaves.values()):
                # On every rank, also after an error on rank 0: the gather is
                # collective.
                value = leaf.load()
                try:
                    if file is not None and problem is None:
                        file.fill(number, value)
                except Exception as error:
                    problem = error

        # Rank 0's problem is raised here, after all ranks have left the gathers.
        def commit() -> None:
            if problem is not None:
                raise problem
            assert file is not None
            file.close()
            put_in_place(temporary, target)

        ranks.on_first(what, commit)
    finally:
        if file is not None:
            file.abandon()
        discard(temporary)


def _lazy_tensors(
    content: Mapping[str, Any],
    ranks: Ranks,
    what: str,
    stages: dist.ProcessGroup | None,
) -> dict[int, LazyTensor]:
    """Make a lazy tensor, gathered by ``load``, for every tensor of the state, by its
    id. Collective.

    Args:
        what: the beginning of an error's message.

    Raises:
        CheckpointError: the ranks do not bring the same sharded tensors.
    """
    named = name_tensors(dict(content))
    tensors = dict(named.values())
    full_tensor, of_stages = _over_stages(tensors, stages)
    sharded = [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) or name in of_stages
    ]
    # The names travel with the ties, so that one exchange shows both.
    _, reports = ranks.together(
        what, lambda: tensors, lambda own: (find_ties(own), sharded)
    )

    # Every rank has to bring the same sharded tensors.
    sharded_by_rank = [names for _, names in reports]
    if any(names != sharded for names in sharded_by_rank):
        on_any_rank = set().union(*sharded_by_rank)
        on_every_rank = set.intersection(*map(set, sharded_by_rank))
        odd = sorted(on_any_rank - on_every_rank)
        raise CheckpointError(
            f"{what}: not every rank brings the same sharded tensors ({', '.join(odd[:3]) or 'other order'}), and they "
            "are gathered together: add them to the state on every rank, or not at all"
        )

    # Tied tensors have one name on all ranks.
    aliases = agreed_aliases([ties for ties, _ in reports])
    lazy: dict[int, LazyTensor] = {}
    for name, tensor in named.values():
        load = functools.partial(full_tensor, tensor)
        lazy.setdefault(
            id(tensor),
            LazyTensor(
                tuple(tensor.shape), tensor.dtype, load, aliases.get(name, name)
            ),
        )
    return lazy


def _over_stages(
    tensors: Mapping[str, Tensor], stages: dist.ProcessGroup | None
) -> tuple[Callable[[Tensor], Tensor], set[str]]:
    """Return what gathers one of these tensors, and the names of those that some stage
    lacks: the first stage that has one sends it to all. Collective over the stages.

    Args:
        tensors: by name; in one order on all ranks.
    """
    if stages is None:
        return _full_tensor, set()
    # Which stages lack which tensors, from all stages, in one exchange.
    lacking: list[set[str]] = [set()] * dist.get_world_size(stages)
    dist.all_gather_object(
        lacking,
        {name for name, tensor in tensors.items() if is_absent(tensor)},
        group=stages,
    )
    of_stages = set().union(*lacking)
    holders = {}
    for name, tensor in tensors.items():
        if name in of_stages:
            # The first stage that has a tensor sends it; all stages find the same one.
            holders[id(tensor)] = next(
                stage for stage, theirs in enumerate(lacking) if name not in theirs
            )

    def full_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in holders:
            return _full_tensor(tensor)
        # A rank without the tensor takes part in the broadcast with empty memory.
        if is_absent(tensor):
            assert isinstance(tensor, DTensor)
            full = torch.empty(
                tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type
            )
        else:
            full = _full_tensor(tensor).contiguous()
        dist.broadcast(full, group=stages, group_src=holders[id(tensor)])
        return full

    return full_tensor, of_stages


def _full_tensor(tensor: Tensor) -> Tensor:
    """Gather all shards of a DTensor on the device of its mesh; offloaded shards move
    there from the host first."""
    if not isinstance(tensor, DTensor):
        return tensor
    if is_absent(tensor):
        raise CheckpointError(ABSENT % list(tensor.shape))
    mesh, local = tensor.device_mesh, tensor.to_local()
    if local.device.type != mesh.device_type:
        tensor = DTensor.from_local(  # brings the shard to the mesh's device
            local,
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()
