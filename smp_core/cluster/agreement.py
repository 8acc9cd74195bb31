"""Checks that all ranks have the same knobs, measured links and model, and decide the
same from them; rank 0's values of tensors on every rank; and the group on which hosts
agree while they train.

The checks come before the first other process group: a rank with another degree makes
other groups, one with another payload sends other bytes, and then all wait for one
another in different collectives until a timeout ends them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from smp_core.cluster.layout import Axis
from smp_core.cluster.links import LINKS_VARIABLE
from smp_core.cluster.mesh import SmpMesh, collective_timeout
from smp_core.config import SmpConfig
from smp_core.topology import by_rank

# A host's own affair: what does not fit there stays on the device.
_OF_A_HOST = "activations.offload_host_gib"

T = TypeVar("T")
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def of_all_ranks(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather what every rank of a group gives, in rank order; default: of the world.
    Collective over it; without one there is one rank."""
    # A dry run has one rank only.
    if not dist.is_initialized() or dist.get_backend(group) == "fake":
        return [own]
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def lists_of_all_ranks(own: Sequence[T]) -> list[list[T]] | None:
    """Gather a list of every rank, in rank order; None where all ranks have the same
    one, which is found out by digests. Collective over the world.

    Args:
        own: values whose ``repr`` is equal for equal ones.
    """
    # Lists may be long; digests show whether they are needed.
    digests = of_all_ranks(xxhash.xxh3_64_hexdigest(repr(list(own)).encode()))
    return None if len(set(digests)) == 1 else of_all_ranks(list(own))


def host_group(use: str) -> dist.ProcessGroup:
    """Return the group of all ranks on which hosts exchange numbers for one use. The
    first call is collective.

    Runs of a process share it: each group keeps connections and threads until the
    process ends.
    """
    world = dist.group.WORLD
    assert world is not None
    # Kept by group, so that another default group gets others.
    made = _host_groups.setdefault(world, {})
    if use not in made:
        made[use] = dist.new_group(
            backend="gloo", timeout=collective_timeout(), group_desc=f"smp {use}"
        )
    return made[use]


def of_rank_0(decide: Callable[[], T]) -> T:
    """Let rank 0 decide, and send its decision or refusal to all ranks. Collective over
    the world.

    Raises:
        ValueError: what ``decide`` raised on rank 0; on all ranks.
    """
    # A fake group has no other ranks to tell.
    alone = not dist.is_initialized() or dist.get_backend() == "fake"
    told: list[Any] = [None]
    if alone or dist.get_rank() == 0:
        try:
            told = [decide()]
        except ValueError as error:
            told = [ValueError(str(error))]  # of a class that every rank can read
        except Exception as error:  # the others wait; they end with it too
            if not alone:
                dist.broadcast_object_list(
                    [ValueError(f"rank 0: {type(error).__name__}: {error}")], src=0
                )
            raise
    if not alone:
        dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], ValueError):
        raise told[0]
    return told[0]


def agreed(
    asked: SmpConfig,
    decide: Callable[[], T],
    model: Callable[[T], str] = lambda _: "",
    parts: Callable[[T], Sequence[str]] = lambda _: (),
) -> T:
    """Decide on every rank, and require that all were given the same and came to the
    same. Collective over the world.

    Args:
        asked: the knobs that it decides by; the file that ``SMP_LINKS`` names is
            compared too.
        decide: no collective in it. What fails on one rank is an error on all of them.
        model: a word for the model that was decided about, equal for equal models.
        parts: its parameters and buffers in words, in its order; the first that differs
            is named where models do.

    Raises:
        ValueError: something differs, which is named with its values and the ranks that
            have them; or ``decide`` failed on another rank.
        Exception: what ``decide`` raised on this rank.
    """
    own = {
        knob: value for knob, value in asked.effective().items() if knob != _OF_A_HOST
    }
    # A callable cannot be compared; its name can.
    rule = asked.units.modules
    if callable(rule):  # the text of an object may have its address
        own["units.modules"] = getattr(rule, "__qualname__", type(rule).__qualname__)
    links = os.environ.get(LINKS_VARIABLE)
    own[LINKS_VARIABLE] = _digest_of(links) if links else None
    refusal: Exception | None = None
    decided = None
    try:
        decided = decide()
        own["the model"] = model(decided)
    except Exception as error:  # any: the other ranks wait for this one below
        refusal = error
    # One exchange for knobs and refusals: no rank leaves before it.
    everyone = of_all_ranks((own, None if refusal is None else _in_words(refusal)))
    # The model is compared last: other knobs make other models.
    knobs = [name for name in own if name != "the model"]
    differences = _differences([said for said, _ in everyone], knobs)
    if (
        not differences
        and refusal is None
        and all(theirs is None for _, theirs in everyone)
    ):
        differences = _differences([said for said, _ in everyone], ["the model"])
        if differences and decided is not None:  # on all ranks: none refuses
            # Only where models differ are all parameters exchanged.
            differences += _first_difference(of_all_ranks(list(parts(decided))))
        if differences:
            raise ValueError(
                f"{'; '.join(differences)}; build the model in the same way on all ranks"
            )
    # Other knobs are the cause of whatever else differs.
    if differences:
        raise ValueError(
            f"{'; '.join(differences)}; start every rank with the same configuration"
        ) from refusal
    # The same refusal everywhere is raised as it is; another rank's names the rank.
    if refusal is not None:
        raise refusal
    for rank, (_, theirs) in enumerate(everyone):
        if theirs is not None:
            raise ValueError(f"rank {rank}: {theirs}")
    assert decided is not None
    return decided


def _in_words(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _differences(everyone: list[dict[str, object]], names: list[str]) -> list[str]:
    # In the order of the knobs, each with the ranks that have a value.
    found = []
    for name in names:
        values = [said[name] for said in everyone]
        if any(value != values[0] for value in values):
            found.append(f"{name} differs between ranks ({by_rank(values)})")
    return found


def _first_difference(everyone: list[list[str]]) -> list[str]:
    """Name the first parameter or buffer that is not the same on all ranks, [] where
    all are."""
    for number in range(max(map(len, everyone))):
        here = [own[number] if number < len(own) else "none" for own in everyone]
        if any(part != here[0] for part in here):
            return [
                f"the first parameter or buffer that differs is number {number} ({by_rank(here)})"
            ]
    return []


def _digest_of(path: str) -> str:
    try:
        return f"a file with the digest {xxhash.xxh3_64_hexdigest(Path(path).read_bytes())}"
    except OSError as error:
        return f"{path}: {error.strerror}"


@torch.no_grad()
def broadcast_from_rank_0(
    tensors: Iterable[Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    source: int = 0,
) -> None:
    """Give all ranks of a group the values of its first one, one tensor at a time.

    Args:
        group: the ranks that hold the same tensors; default the world. Collective over
            it.
        source: the place in the group of another rank than its first, whose values they
            get.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        if not _has_values(tensor):
            continue
        # A strided or host tensor is sent as a copy, and copied back.
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, group_src=source, group=group)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)


@torch.no_grad()
def send_to_stages(
    tensors: Iterable[tuple[Tensor, Sequence[int]]], mesh: SmpMesh
) -> None:
    """Give the first rank of each pipeline stage the values that rank 0 has of what the
    stage holds, one tensor at a time. Collective over these ranks; the others do
    nothing.

    Args:
        tensors: with the stages that hold each; the same on all ranks.
    """
    firsts = mesh.layout.ranks(0, Axis.PIPELINE)
    # Ranks behind the first of a stage get the values from that one, when units are
    # sharded.
    if mesh.rank not in firsts:
        return
    group = mesh.group(Axis.PIPELINE)
    for tensor, stages in tensors:
        if not _has_values(tensor):
            continue
        # One after another, in the same order on both sides: messages carry no names.
        if mesh.rank == 0:
            there = tensor.detach().to(mesh.device).contiguous()
            for stage in stages:
                if stage > 0:
                    dist.send(there, firsts[stage], group)
        elif mesh.stage in stages:
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
            dist.recv(arrived, 0, group)
            tensor.copy_(arrived)


def _has_values(tensor: Tensor) -> bool:
    """Return whether there is something to send: meta tensors have no values yet, and
    DTensors, which layers that are split over ranks have, were cut from rank 0's."""
    return not tensor.is_meta and tensor.numel() > 0 and not isinstance(tensor, DTensor)
