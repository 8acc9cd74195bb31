"""Stages over a backend that connects two ranks, each way apart, in the first message
that goes it, and holds both hosts until the other one has begun that message: NCCL. An
H100 hung in the interleaved schedule for it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.core.pipeline.cases import Case, together
from tests.core.tensor_parallel.model_cases import Training
from tests.harness import run_ranks

HELD = timedelta(seconds=60)  # for what surely comes


@contextlib.contextmanager
def held_by_first_messages(run: str) -> Iterator[None]:
    """Let the first message of each direction between two ranks wait for its other side
    before it begins."""
    store, connected = dist.distributed_c10d._get_default_store(), set[str]()

    def held(message: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        def call(tensor: Any, other: int, *args: Any) -> Any:
            ends = (dist.get_rank(), other) if sends else (other, dist.get_rank())
            way = f"{run} {ends[0]} to {ends[1]}"
            if way not in connected:
                connected.add(way)
                store.set(f"{way}, {'sent' if sends else 'awaited'}", "")
                store.wait([f"{way}, {'awaited' if sends else 'sent'}"], HELD)
            return message(tensor, other, *args)

        return call

    with (
        mock.patch.object(dist, "isend", held(dist.isend, True)),
        mock.patch.object(dist, "irecv", held(dist.irecv, False)),
    ):
        yield


def held(case: Case, run: str) -> Training:
    with held_by_first_messages(run):
        return together(case)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, "interleaved:2"),
        (4, "1f1b"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((2, "1f1b"), (2, "gpipe"), (4, "gpipe"))
        ),
        pytest.param(4, "interleaved:2", marks=pytest.mark.slow),
    ],
)
def test_no_stage_is_held_by_a_message_that_waits_for_it(
    stages: int, schedule: str
) -> None:
    kind = "llama_deeper" if schedule == "interleaved:2" else "llama_deep"
    case = Case(kind, stages, micro_batches=4, schedule=schedule)
    trained = run_ranks(held, stages, case, uuid.uuid4().hex)
    assert all(each.losses == trained[0].losses for each in trained)
