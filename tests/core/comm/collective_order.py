"""The order of collectives on every communicator, rank by rank on torch's fake process
group.

    python -m tests.core.comm.collective_order CASES(JSON)

Plays every rank of a layout, one after the other, on the way that is taken with NCCL
(`tests.core.stream_sanitizer`), and writes down what is asked of each communicator:
operation, elements, dtype. NCCL matches the collectives of one communicator by their
order alone; two ranks whose sequences differ hang, or take one tensor for another.
Replicas may take different branches of the model: a rank of either branch is played
before, for the one message that a fake group would have to carry, by which ranks tell
each other what they used.

Prints as JSON the mismatches of each case: the communicator's ranks, and what both
sides asked where they first differ.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing as mp
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

# Torch's only way to the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.core.recording import CallRecorder, first_dtype
from tests.core.stream_sanitizer import play_a_device
from tests.core.streamed_operators import place

WIDTH, STEPS = 16, 2


@dataclass
class Case:
    """Steps of a small model on every rank of a world.

    Args:
        knobs: SmpConfig's.
        branches: each replica uses another branch of the model, in each step and
            micro-batch the next one.
        without: one of ``WITHOUT``.
    """

    world: int
    ranks_per_node: int
    knobs: dict[str, Any]
    branches: bool = False
    micro_batches: int = 2
    without: str | None = None

    @property
    def ranks_of_a_replica(self) -> int:
        return self.knobs["shard_degree"] * self.knobs.get("tensor_parallel_degree", 1)


@dataclass(frozen=True)
class Asked:
    """One collective, and where it was asked for."""

    kind: str
    elements: int
    dtype: str
    line: str

    @property
    def signature(self) -> tuple[str, int, str]:
        return self.kind, self.elements, self.dtype

    def __str__(self) -> str:
        return f"{self.kind} of {self.elements} {self.dtype} at {self.line}"


Sequences = dict[tuple[str, tuple[int, ...]], list[Asked]]


class OrderRecorder(CallRecorder):
    """Fills ``asked``: (group's name, its ranks) -> what was asked of it, in order.

    Args:
        answers: what all ranks together used, message by message; None: what this one
            did.

    Attributes:
        told: what this rank used, message by message.
    """

    def __init__(self, answers: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.answers, self.told = answers, list[torch.Tensor]()
        self.asked: Sequences = {}

    def _counting(self, method: str, kind: str, argument: int) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            tensors, dtype = args[argument], first_dtype(args[argument])
            asked = Asked(kind, elements_of(tensors), dtype, place())
            self.asked.setdefault((group.group_name, ranks), []).append(asked)
            work = original(group, *args, **kwargs)
            if kind == "all_reduce" and dtype == "int32":
                self.told.append(tensors[0].clone())
                if self.answers is not None:
                    tensors[0].copy_(self.answers[len(self.told) - 1])
            return work

        return call


def elements_of(tensors: Any) -> int:
    return (
        tensors.numel()
        if isinstance(tensors, torch.Tensor)
        else sum(map(elements_of, tensors))
    )


class Branches(nn.Module):
    """A first and a last layer, and two between them of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.last(self.branches[which](self.first(x)))


def steps_of(
    case: Case, rank: int, answers: Sequence[torch.Tensor] | None = None
) -> OrderRecorder:
    from smp_core.config import SmpConfig
    from smp_core.entry import build_mesh, parallelize
    from smp_core.topology import Topology

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
    torch.manual_seed(0)
    model = Branches()
    knobs = {"units": ["first", "last", "branches.*"], **case.knobs}
    topology = Topology.uniform(case.world, case.ranks_per_node)
    with OrderRecorder(answers) as recorder:
        mesh, config = build_mesh(SmpConfig(**knobs), topology, "cpu")
        parallel = parallelize(model, config, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        parallel.prepare_optimizer(optimizer)
        replica = mesh.replicate_rank if case.branches else 0
        for step in range(STEPS):
            for micro in range(case.micro_batches):
                with parallel.window.accumulate(micro < case.micro_batches - 1):
                    which = (replica + step + micro // 2) % 2
                    parallel.module(torch.randn(4, WIDTH), which).float().pow(
                        2
                    ).sum().backward()
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            # Nothing is received: gradients are what was in memory, and may not be
            # finite.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer.zero_grad()
    return recorder


def played(
    case: Case, rank: int, answers: Sequence[torch.Tensor] | None = None
) -> tuple[Sequences, list[torch.Tensor]]:
    """What a rank asked and told, in a process of its own: torch keeps groups by name
    beyond their end."""
    here, there = mp.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        recorder = steps_of(case, rank, answers)
        there.send((recorder.asked, [message.tolist() for message in recorder.told]))

    process = mp.get_context("fork").Process(target=run)
    process.start()
    there.close()
    asked, told = here.recv()
    process.join()
    return asked, [torch.tensor(message, dtype=torch.int32) for message in told]


def mismatches(by_rank: Sequence[Sequences]) -> list[str]:
    """Compare every communicator's sequences with those of its first rank; the first
    difference of each rank."""
    found = []
    for name, ranks in sorted({key for asked in by_rank for key in asked}):
        first, *others = (by_rank[rank].get((name, ranks), []) for rank in ranks)
        for rank, sequence in zip(ranks[1:], others, strict=True):
            for number in range(max(len(first), len(sequence))):
                sides = [
                    each[number] if number < len(each) else None
                    for each in (first, sequence)
                ]
                if (
                    sides[0] is None
                    or sides[1] is None
                    or sides[0].signature != sides[1].signature
                ):
                    one, other = (str(side or "nothing more") for side in sides)
                    where = f"communicator {name} of ranks {list(ranks)}, call {number}"
                    found.append(
                        f"{where}: rank {ranks[0]} asks {one}; rank {rank} asks {other}"
                    )
                    break
    return found


def _shared(groups: Any, members: Sequence[tuple[int, ...]]) -> Any:
    return (
        groups.own(members)
        if any(ranks in groups._known for ranks in members)
        else _kept["make"](groups, members)
    )


_kept: dict[str, Any] = {}
"""What a mutation calls in the end."""
# Mends, taken out again: what is exchanged for what.
WITHOUT = {
    "sums of replicas have a communicator of their own": (
        "smp_core.cluster.mesh._Groups.make",
        _shared,
    )
}


def main(cases: str) -> None:
    torch.set_num_threads(1)
    play_a_device()
    for module in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "smp_core.entry",
        "smp_core.fp8",
    ):
        importlib.import_module(module)  # once, and not by every rank that is forked
    from smp_core.cluster.mesh import _Groups

    _kept["make"] = _Groups.make
    results = []
    for case in (Case(**each) for each in json.loads(cases)):
        with (
            mock.patch(*WITHOUT[case.without])
            if case.without
            else contextlib.nullcontext()
        ):
            answers = None
            if case.branches:
                both = (played(case, rank)[1] for rank in (0, case.ranks_of_a_replica))
                answers = [
                    torch.maximum(*messages) for messages in zip(*both, strict=True)
                ]
            by_rank = [played(case, rank, answers)[0] for rank in range(case.world)]
        calls = sum(len(sequence) for asked in by_rank for sequence in asked.values())
        results.append({"mismatches": mismatches(by_rank), "calls": calls})
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
