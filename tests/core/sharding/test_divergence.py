"""Ranks that take different ways through units of equal shapes are told before the
optimizer steps.

What is compared after an error is equal to the last bit: nothing was to be computed.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.comm import IssuedCollectives
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.sharding.gradients import received_gradients
from smp_core.sharding.gradients.divergence import RanksDiverged, leave_to_device
from smp_core.torch_facts import streams
from smp_core.watch import RankWatch, compared_windows
from tests.core.branching import Branching, batch_of, loss_of
from tests.harness import run_ranks


def prepared(**knobs: Any) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parallel = parallelize(Branching(), SmpConfig(units=["Block"], **knobs))
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    return parallel, optimizer


def window(parallel: ParallelModel, ways: list[str], step: int = 0) -> None:
    for micro, way in enumerate(ways):
        with parallel.window.accumulate(micro < len(ways) - 1):
            loss_of(
                parallel.module, batch_of(dist.get_rank(), step, micro), way
            ).backward()


def state_of(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*parallel.module.parameters(), *states]
    return [
        getattr(tensor, "to_local", lambda t=tensor: t)().detach().clone()
        for tensor in tensors
    ]


def diverges(ways: list[list[str]], knobs: dict[str, Any]) -> str:
    """A step together, one apart, one together: the error, and nothing else of the one
    apart."""
    parallel, optimizer = prepared(**knobs)
    fresh, its_optimizer = prepared(**knobs)
    for each, stepped in ((parallel, optimizer), (fresh, its_optimizer)):
        window(each, ["l", "r"])
        stepped.step()
        stepped.zero_grad()
    before = copy.deepcopy(state_of(parallel, optimizer))
    with pytest.raises(RanksDiverged) as error:
        window(parallel, ways[dist.get_rank()], step=1)
    assert all(map(torch.equal, before, state_of(parallel, optimizer)))
    assert not parallel.window.is_open and all(
        p.grad is None for p in parallel.module.parameters()
    )
    loss_of(parallel.module, batch_of(0, 0, 0), "lr"[dist.get_rank()])
    parallel.window.abandon()  # what is given up is not compared
    for each, stepped in ((parallel, optimizer), (fresh, its_optimizer)):
        window(each, ["lr", "rl"], step=2)
        stepped.step()
    assert all(
        map(torch.equal, state_of(parallel, optimizer), state_of(fresh, its_optimizer))
    )
    return str(error.value)


def several(cases: list[tuple[list[list[str]], dict[str, Any]]]) -> list[str]:
    return [diverges(ways, knobs) for ways, knobs in cases]


def test_ranks_that_go_apart_are_named_on_all_ranks_before_the_step() -> None:
    cases: list[Any] = [
        ([["l"], ["r"]], {"shard_degree": 2}),
        # Every rank has gradients of all parameters.
        ([["lr"], ["rl"]], {"shard_degree": 2}),
        ([["l", "l", "r"], ["l", "r", "l"]], {"shard_degree": 2}),
        ([["l", "lr"], ["l", "rl"]], {"shard_degree": 2, "activations": "full"}),
    ]
    texts, others = run_ranks(several, 2, cases)
    assert texts == others  # of both ranks
    for text, micro in zip(texts, (1, 1, 2, 2), strict=True):
        where = f"in micro-batch {micro}, rank 0: all_gather of 'left.0' in forward; rank 1: all_gather of 'right.0' in"
        assert where in text, text


def of_replicas() -> tuple[str, bool]:
    """Ranks 0, 1 and ranks 2, 3 share parameters; replicas may go apart, and the last
    two do."""
    parallel, optimizer = prepared(shard_degree=2)
    ways = [["l", "r"], ["l", "r"], ["r", "l"], ["r", "l"]]
    window(parallel, ways[dist.get_rank()])
    optimizer.step()
    # An evaluation that goes apart is told with the next window.
    with torch.no_grad():
        parallel.module(batch_of(0, 0, 0), "llrl"[dist.get_rank()])
    with pytest.raises(RanksDiverged) as error:
        window(parallel, ["lr"], step=1)
    return str(error.value), all(
        parameter.grad is None for parameter in parallel.module.parameters()
    )


def test_replicas_may_go_apart_and_a_diverging_one_stops_all() -> None:
    results = run_ranks(of_replicas, 4)
    assert len(set(results)) == 1, results
    text, dropped = results[0]
    assert dropped
    assert (
        "rank 2: all_gather of 'right.0' in forward; rank 3: all_gather of 'left.0' in forward"
        in text
    )


def given_up_by_one(knobs: dict[str, Any]) -> str:
    """Rank 0 gives a window up that rank 1 closes, and goes on."""
    parallel, optimizer = prepared(**knobs)
    window(parallel, ["l", "r"])
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(state_of(parallel, optimizer))
    if dist.get_rank() == 0:
        parallel.window.abandon()
    with pytest.raises(RanksDiverged) as error:
        window(parallel, ["l", "r"], step=1)
    assert all(map(torch.equal, before, state_of(parallel, optimizer)))
    assert not parallel.window.is_open and all(
        p.grad is None for p in parallel.module.parameters()
    )
    window(parallel, ["l", "r"], step=2)  # in the same window again
    optimizer.step()
    return str(error.value)


def test_a_window_that_one_replica_gives_up_alone_is_no_step_of_the_others() -> None:
    for text in run_ranks(given_up_by_one, 2, {"shard_degree": 1}):
        assert "rank 1 window 2; rank 0 window 3" in text, text


def frozen_apart(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The last rank freezes what the others train: the error, and the next step, in
    which all train the same."""
    found = []
    for frozen, knobs in cases:
        parallel, optimizer = prepared(**knobs)
        fresh, its_optimizer = prepared(**knobs)
        is_last = parallel.mesh.replicate_rank == parallel.mesh.replicate_degree - 1
        for name, parameter in parallel.module.named_parameters():
            parameter.requires_grad_(not (is_last and name.startswith(frozen)))
        with pytest.raises(RanksDiverged) as error:
            window(parallel, ["lr"])
        assert not parallel.window.is_open and all(
            p.grad is None for p in parallel.module.parameters()
        )
        parallel.module.requires_grad_(True)
        window(fresh, ["lr"])
        fresh.window.abandon()
        for each, stepped in ((parallel, optimizer), (fresh, its_optimizer)):
            window(each, ["lr", "rl"], step=1)
            stepped.step()
        assert all(
            map(
                torch.equal,
                state_of(parallel, optimizer),
                state_of(fresh, its_optimizer),
            )
        )
        found.append(str(error.value))
    return found


def test_ranks_that_train_different_parameters_are_named_on_all_ranks() -> None:
    """Sums of replicas that freeze other parameters hold other gradients in one place,
    or are of other sizes."""
    cases: list[Any] = [
        ("left.0.linear.bias", {"shard_degree": 1}),
        ("left.0", {"shard_degree": 2}),
        ("left.0", {"shard_degree": 2, "keep_between_micro_batches": "gradients"}),
    ]
    results = run_ranks(frozen_apart, 4, cases)
    assert all(texts == results[0] for texts in results)
    for text, ranks in zip(
        results[0], ("ranks 0-2", "ranks 0-1", "ranks 0-1"), strict=True
    ):
        assert (
            f"only on {ranks} 'left.0.linear." in text
            and "requires_grad_() on all ranks alike" in text
        ), text


DEVICE_STOPPED = RuntimeError("CUDA error: device-side assert triggered")


def go_apart(parallel: ParallelModel) -> None:
    window(parallel, ["l", "lr"] if dist.get_rank() < 3 else ["l", "rl"], step=1)


def freeze_apart(parallel: ParallelModel) -> None:
    parallel.module.right[0].requires_grad_(parallel.mesh.replicate_rank > 0)
    window(parallel, ["lr"], step=1)


def give_up_apart(parallel: ParallelModel) -> None:
    if parallel.mesh.replicate_rank == 0:
        parallel.window.abandon()
    window(parallel, ["lr"], step=1)


def stay_together(parallel: ParallelModel) -> None:
    window(parallel, ["lr"], step=1)


def stopped_by_device(
    apart: Callable[[ParallelModel], None], knobs: dict[str, Any]
) -> tuple[str | None, str]:
    """What is found, and written, where hosts do not wait for the comparison. They
    close another window before they meet the device's error, unless what their ranks
    send does not match."""
    parallel, _ = prepared(**knobs)
    watching = RankWatch.start(interval=0.1)
    assert watching is not None
    behind = SimpleNamespace(on_device=streams.on_device, run_behind=lambda _: True)
    stopped: list[bool] = []

    def stop(differs: torch.Tensor) -> None:
        stopped.append(bool(differs))
        if differs and apart is freeze_apart:
            raise DEVICE_STOPPED

    with (
        mock.patch.object(received_gradients, "streams", behind),
        mock.patch.object(received_gradients, "stop_device_where_differing", stop),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        window(parallel, ["lr"])
        with (
            contextlib.suppress(RuntimeError)
            if apart is freeze_apart
            else contextlib.nullcontext()
        ):
            apart(parallel)
            window(parallel, ["lr"], step=2)
        assert stopped[:2] == [False, apart is not stay_together]
        found = watching.report(DEVICE_STOPPED)
    dist.barrier()
    watching.stop()
    return found, stderr.getvalue()


def stopped_beside_silent_rank() -> tuple[str | None, str | None]:
    """What is found where rank 3 says nothing, and where no window was closed; nobody
    would stop waiting by itself."""
    parallel, _ = prepared(shard_degree=1)
    watching = RankWatch.start(interval=0.1)
    assert watching is not None
    found = None
    with (
        mock.patch.object(compared_windows, "_TELLING", 1_000_000),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        nothing = watching.report(DEVICE_STOPPED)
        watching.begin_run("fit()")
        issued = IssuedCollectives([dist.get_rank()])
        issued.windows = int(dist.get_rank() > 0)
        leave_to_device(issued, parallel.mesh, ["weight"])
        dist.barrier()
        if dist.get_rank() < 3:
            found = watching.report(DEVICE_STOPPED)
    dist.barrier()
    watching.stop()
    return found, nothing


def test_where_a_device_stops_nobody_waits_for_a_rank_that_says_nothing() -> None:
    results = run_ranks(stopped_beside_silent_rank, 4)
    assert all(
        "accumulation windows: rank 0 window 1; rank" in str(found)
        for found, _ in results[:3]
    ), results
    assert {nothing for _, nothing in results} == {None}


@pytest.mark.parametrize(
    ("apart", "shard_degree", "words", "finders"),
    [
        (
            go_apart,
            2,
            "in micro-batch 2, rank 2: all_gather of 'left.0' in forward; rank 3: all_gather of 'right.0'",
            {2, 3},
        ),
        (
            freeze_apart,
            2,
            "'right.0.linear.weight' has requires_grad=True",
            {0, 1, 2, 3},
        ),
        (give_up_apart, 1, "close different accumulation windows", {0, 1, 2, 3}),
        (stay_together, 2, "", set()),
    ],
)
def test_where_a_device_stops_ranks_tell_by_the_watch_what_differed(
    apart: Callable[[ParallelModel], None],
    shard_degree: int,
    words: str,
    finders: set[int],
) -> None:
    results = run_ranks(stopped_by_device, 4, apart, {"shard_degree": shard_degree})
    assert {
        rank for rank, (found, _) in enumerate(results) if found and words in found
    } == finders
    assert sum(words in written for _, written in results if written) == bool(finders)
