"""Checks that ranks that share parameters issued the same collectives
(:mod:`smp_core.comm.traffic`), and the error where they did not.

Each rank sends two numbers for its replica: the checksum of what it issued, and the
difference of that to 2^31 - 1. The maxima of both over all ranks add up to 2^31 - 1
only where all ranks of the replica have the same checksum. So one MAX all-reduce, which
carries other flags too, compares any number of groups. In the same way all replicas
compare which window runs: one that gave a window up alone would add its gradients to
those of another window. And all compare which parameters they train, whose gradients
lie side by side in what is added up. Only where ranks differ do they exchange what they
issued, or what they train.

The host of an accelerator does not wait for the comparison: the device itself stops,
with an assertion behind which no collective can be issued. What the host sent is then
exchanged by the watch over the ranks.
"""

from __future__ import annotations

import operator
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import PARTITION, Axis, Layout, SmpMesh, of_all_ranks
from smp_core.comm import IssuedCollectives, first_to_differ
from smp_core.torch_facts import streams
from smp_core.watch import here, ranks_in_words

_GREATEST = 2**31 - 1  # of a checksum, which has 31 bits
_UNTOLD = 0  # torch's fake groups carry nothing
_DIVERGED = "ranks that share parameters issued different collectives"
_WHAT_TO_DO = (
    "They took different ways through the model and took each other's parameters for their own, so that what was "
    "computed is wrong; an open window's gradients are dropped, weights and optimizer states are as before it. Let "
    "these ranks call the same units in the same order, or name those that some of them leave out: "
    "units={'optional': ['visual', '*.adapter_*']}"
)


_OTHER_WINDOWS = (
    "ranks close different accumulation windows: {}. What some of them gave up (window.abandon()) the others did not. "
    "Gradients of the window are dropped, weights and optimizer states are as before it. Where a micro-batch fails on "
    "one rank let the others know, and give the window up on all ranks or on none"
)


_OTHER_PARAMETERS = (
    "ranks train different parameters: only on {} {!r} has {}. Gradients of the window are dropped, "
    "weights and optimizer states are as before it. Call requires_grad_() on all ranks alike"
)


_OTHER_ATTACHED = (
    "ranks train different parameters: only on {} {!r} was attached to the model "
    "after it was sharded. Gradients of the window are dropped, weights and optimizer "
    "states are as before it. Attach the same adapters on all ranks, and then let all ranks prepare the optimizer that "
    "steps them: parallel.prepare_optimizer(optimizer), accelerator.prepare(optimizer), or optimizer.add_param_group"
)


HOOK = " (hook)"
"""Behind the name of a trained parameter: its hooks, in which all ranks take part."""
ATTACHED = " (attached)"
"""Behind the name of a trained parameter that was attached to the model, and whose
gradients no rank adds up yet."""


class RanksDiverged(RuntimeError):
    """Ranks that share parameters issued different collectives, or ranks close
    different windows or train different parameters; raised on all ranks, before the
    optimizer steps."""


def told_by(
    issued: IssuedCollectives, mesh: SmpMesh, trained: Iterable[str] = ()
) -> list[int]:
    """Return the numbers that this rank sends: two for each replica, those of the
    others 0, two of the window, and two of what is trained."""
    # Only the slots of this rank's own replica are filled: the maximum over all ranks
    # puts the others in.
    told, checksum = [0] * (2 * mesh.replicate_degree), issued.checksum()
    told[2 * mesh.replicate_rank : 2 * mesh.replicate_rank + 2] = (
        checksum,
        _GREATEST - checksum,
    )
    # 31 bits, so that the number and its complement fit into int32.
    parameters = zlib.crc32("\n".join(trained).encode()) >> 1
    return [
        *told,
        issued.windows,
        _GREATEST - issued.windows,
        parameters,
        _GREATEST - parameters,
    ]


def differing(told: Sequence[int]) -> list[bool]:
    """Return for each replica whether its ranks differ, and last whether any two ranks
    are in different windows, and whether they train different parameters; from the
    maxima of all ranks' numbers."""
    # Pairs of a checksum's maximum and its complement's.
    totals = map(operator.add, told[::2], told[1::2])
    return [total not in (_GREATEST, _UNTOLD) for total in totals]


def any_differs(told: Tensor) -> Tensor:
    """Return whether :func:`differing` finds any: a 0-d bool tensor, for which the host
    does not wait."""
    totals = told.view(-1, 2).sum(1)
    return ((totals != _GREATEST) & (totals != _UNTOLD)).any()


def stop_device_where_differing(differs: Tensor) -> None:
    """Let the device itself go no further where ranks differ, so that nothing is
    stepped; the host does not wait."""
    # torch._assert_async: the only check that a device makes by itself. torch has no
    # public one.
    torch._assert_async(~differs, _DIVERGED)


def on_any_stage(flags: Sequence[Tensor | bool], mesh: SmpMesh) -> Tensor:
    """Return which of the flags hold on any pipeline stage, int32. Collective over the
    stages.

    Args:
        flags: each on the host or on the mesh's device, for which the host does not
            wait.
    """
    # Flags may be on the host or on the device; one collective takes them together.
    numbers = [torch.as_tensor(flag, dtype=torch.int32) for flag in flags]
    on_device = [
        streams.moved_to(mesh.device, each) if each.device.type == "cpu" else each
        for each in numbers
    ]
    told = torch.stack(on_device)
    if mesh.pipeline_degree > 1:
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=mesh.group(Axis.PIPELINE))
    return told


def require_same_collectives(issued: IssuedCollectives, mesh: SmpMesh) -> None:
    """Compare at once, for example after an evaluation, which no window follows.
    Collective over the mesh's ``model_group``; the host waits.

    Raises:
        RanksDiverged: ranks of one replica differ; on all ranks.
    """
    if mesh.shard_degree > 1:
        told = torch.tensor(
            told_by(issued, mesh), dtype=torch.int32, device=mesh.device
        )
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=mesh.model_group)
        if on_any_stage([any(differing(told.tolist()))], mesh):
            raise RanksDiverged(difference_in_words(issued, mesh, told))
    issued.forget()


class WindowRecord(NamedTuple):
    """A rank's part of a window, for the others once ranks differ, in numbers and
    strings only.

    Args:
        window: its number.
        replica: that the rank is of.
        older: the checksum of what is not kept of what it issued.
        numbers: the rest of what it issued.
        trained: names of what it trains.
    """

    window: int
    replica: int
    older: int
    numbers: Sequence[int]
    trained: Sequence[str]


@dataclass(frozen=True, eq=False)
class LeftToDevice:
    """A window whose comparison only the device knows
    (:class:`smp_core.watch.compared_windows.Compared`). Nothing is made of it unless
    the device stops there: each step leaves one."""

    issued: IssuedCollectives
    layout: Layout
    rank: int
    record: WindowRecord

    def told(self) -> Sequence[object]:
        window, replica, older, numbers, trained = self.record
        return window, replica, older, list(numbers), trained

    def summary(self) -> Sequence[int]:
        window, replica, older, numbers, trained = self.record
        # Checksums are made on demand: each step leaves a record, and almost none is
        # read.
        return (
            window,
            replica,
            zlib.crc32(array("i", numbers), older),
            zlib.crc32("\n".join(trained).encode()),
        )

    def sides(
        self, summaries: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Sequence[int]]:
        # Ranks of one replica issue the same; all ranks are in the same window and
        # train the same.
        in_replica = {
            rank: each
            for rank, each in summaries.items()
            if each[1] == self.record.replica
        }
        # Of other replicas collectives may differ: only the window and what is trained
        # are compared with them.
        of_all = {
            rank: (window, trained)
            for rank, (window, _, _, trained) in summaries.items()
        }
        # Collectives differ within the replica, or windows and parameters anywhere.
        found = _alike(in_replica)
        return found if len(found) > 1 else _alike(of_all)

    def ranks(self) -> Iterable[int]:
        # Where any two ranks differ, some rank differs from one of its replica or from
        # one in its place in another.
        beside, in_place = (*PARTITION, Axis.TENSOR), (Axis.REPLICATE,)
        return {
            *self.layout.ranks(self.rank, *beside),
            *self.layout.ranks(self.rank, *in_place),
        }

    def difference(self, by_rank: Mapping[int, Sequence[object]]) -> str:
        told = {rank: WindowRecord(*fields) for rank, fields in by_rank.items()}  # type: ignore[arg-type]
        return _difference(self.issued, told)


def _alike(by_rank: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the ranks with the same numbers, by the first of them."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in by_rank.items():
        ranks.setdefault(tuple(numbers), []).append(rank)
    return {alike[0]: alike for alike in ranks.values()}


def leave_to_device(
    issued: IssuedCollectives, mesh: SmpMesh, trained: Sequence[str]
) -> None:
    """Keep what this rank would say of the window, in case the device stops at it."""
    record = WindowRecord(
        issued.windows, mesh.replicate_rank, *issued.recent(), trained
    )
    here.keep_window(LeftToDevice(issued, mesh.layout, mesh.rank, record))


def difference_in_words(
    issued: IssuedCollectives, mesh: SmpMesh, told: Tensor, trained: Sequence[str] = ()
) -> str:
    """Ask the ranks what they issued, or train; say where they differ, and which, on
    all ranks alike. Collective over the world.

    Args:
        told: the maxima of all ranks' numbers.
    """
    differs, found = differing(told.tolist()), ""
    if any(differs):
        # What is sent is as much as the difference needs: lists may be long.
        issues_other, trains_other = differs[mesh.replicate_rank], differs[-1]
        older, numbers = issued.recent() if issues_other else (0, ())
        names = trained if trains_other else ()
        own = WindowRecord(issued.windows, mesh.replicate_rank, older, numbers, names)
        # Of the ranks that hold the same layers, one after another in the group's
        # order.
        everyone = of_all_ranks(own, mesh.model_group)
        found = _difference(
            issued,
            dict(
                zip(
                    dist.get_process_group_ranks(mesh.model_group),
                    everyone,
                    strict=True,
                )
            ),
        )
        # The counter goes on from the largest, so that later windows compare equal
        # again.
        issued.windows = max(each.window for each in everyone)
        issued.forget()
    if mesh.pipeline_degree == 1:
        return found
    # The other stages may have found a difference of their own; all ranks raise the
    # same words.
    of_stages = of_all_ranks(found, mesh.column.host)
    return " ".join(dict.fromkeys(filter(None, of_stages)))


def _difference(issued: IssuedCollectives, told: Mapping[int, WindowRecord]) -> str:
    """Return where ranks differ, in words; "" if nowhere.

    Args:
        issued: of this rank, for the names of units.
        told: by rank.
    """
    # Windows of other numbers have other collectives.
    by_window: dict[int, list[int]] = {}
    for rank, each in told.items():
        by_window.setdefault(each.window, []).append(rank)
    if len(by_window) > 1:
        numbers = (
            f"{ranks_in_words(ranks)} window {window + 1}"
            for window, ranks in sorted(by_window.items())
        )
        return _OTHER_WINDOWS.format("; ".join(numbers))
    # Ranks of a replica issue the same.
    by_replica: dict[int, dict[int, tuple[int, Sequence[int]]]] = {}
    for rank, each in told.items():
        by_replica.setdefault(each.replica, {})[rank] = each.older, each.numbers
    found = [
        text for its in by_replica.values() if (text := first_to_differ(issued, its))
    ]
    if found:
        return f"{_DIVERGED}: {'; '.join(found)}. {_WHAT_TO_DO}"
    # All ranks train the same.
    return _first_other_parameter({rank: each.trained for rank, each in told.items()})


def _first_other_parameter(by_rank: Mapping[int, Sequence[str]]) -> str:
    """Return a parameter that some ranks train and others do not, in words; "" if there
    is none."""
    # In the order of the first rank that trains it.
    names = dict.fromkeys(name for theirs in by_rank.values() for name in theirs)
    for name in names:
        ranks = [rank for rank, theirs in by_rank.items() if name in theirs]
        if len(ranks) == len(by_rank):
            continue
        # Attached adapters have another remedy than a flag.
        if name.endswith(ATTACHED):
            return _OTHER_ATTACHED.format(
                ranks_in_words(ranks), name.removesuffix(ATTACHED)
            )
        bare = name.removesuffix(HOOK)
        what = "requires_grad=True" if bare == name else "a hook"
        return _OTHER_PARAMETERS.format(ranks_in_words(ranks), bare, what)
    return ""
