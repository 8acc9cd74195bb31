"""The accumulation window's sums: what is reduced when, how often and in which
dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.comm.exchange import GATHER, REDUCE
from smp_core.sharding.fsdp.internals import generation
from tests.core.equivalence import BOTH, HELD, KEPT, full_weights
from tests.core.gpt import SmallGpt
from tests.core.recording import Call, CallRecorder
from tests.core.scenarios import (
    SCENARIOS,
    Gradients,
    Net,
    allowed,
    alone,
    gradients,
    parallel_model,
    samples,
    together,
)
from tests.harness import run_ranks


def test_half_precision_replicas_train_like_one_process_within_bfloat16() -> None:
    """Also where replicas use other cells, so that sums of one are sent at the end of
    the pass and of the other in its middle. Two roundings of 2**-9 each, relative to
    the largest gradient on the way: 2**-7 leaves room for the sum."""
    names = [
        name for name in allowed(2) if SCENARIOS[name].per_replica or "input" in name
    ]
    expected = {name: alone(SCENARIOS[name], 4) for name in names}
    ranks = run_ranks(
        together,
        4,
        names,
        ranks_per_node=2,
        timeout=600,
        shard_degree=2,
        compression="bf16",
    )
    for seen in ranks:
        for name in names:
            for parameter, value in expected[name].items():
                mine, first = seen[name][parameter], ranks[0][name][parameter]
                assert (mine is None) == (value is None), f"{name}, {parameter}"
                if mine is not None and value is not None and first is not None:
                    bound = 2**-7 * max(value.abs().max().item(), 0.5)
                    assert (mine - value).abs().max() <= bound, f"{name}, {parameter}"
                    assert torch.equal(mine, first), (
                        f"{name}, {parameter}: replicas differ"
                    )


Backward = Callable[..., None]


def two_passes(
    model: nn.Module, rank: int, backward: Backward, *, retained: bool
) -> None:
    """Two backward passes after all forwards; the first replica uses cell 1 twice."""
    path = "0lr 1lr 2l 1r" if rank < 2 else "0lr 1lr 2l"
    outputs = [
        model(samples(micro, rank), path) for micro in range(1 if retained else 2)
    ]
    backward(outputs[0].square().mean(), last=False, retain_graph=retained)
    backward(outputs[-1].abs().mean(), last=True)


def two_passes_alone(retained: bool) -> Gradients:
    torch.manual_seed(0)
    model = Net().double()
    for rank in range(4):
        two_passes(
            model,
            rank,
            lambda loss, last, **given: (loss / 4).backward(**given),
            retained=retained,
        )
    return {
        name: p.detach() - (0 if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }


def two_passes_together(cases: list[tuple[bool, dict[str, Any]]]) -> list[Gradients]:
    """Weights after a step of SGD, whose rate is 1."""
    found = []
    for retained, knobs in cases:
        torch.manual_seed(0)
        parallel = parallel_model(Net().double(), units=("Cell",), **knobs)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=1.0)
        parallel.prepare_optimizer(optimizer)

        def backward(
            loss: torch.Tensor, last: bool, parallel: Any = parallel, **given: bool
        ) -> None:
            with parallel.window.accumulate(not last):
                loss.backward(**given)

        two_passes(parallel.module, dist.get_rank(), backward, retained=retained)
        optimizer.step()
        found.append(full_weights(parallel.module))
    return found


# Four bits of the largest term, once from each replica and once from the owner of the
# sum, and what the rest of the block rounds to.
NEAR = 2 / 14
TWO_PASSES: list[tuple[dict[str, Any], float]] = [
    ({"shard_degree": 1}, 1e-12),
    ({"shard_degree": 2}, 1e-12),
    ({"shard_degree": 2, "activations": "full"}, 1e-12),
    ({"shard_degree": 2, "optimizer_shard": "world"}, 1e-12),
    ({"shard_degree": 1, "optimizer_shard": "world"}, 1e-12),
    (
        {"shard_degree": 2, "compression": {"reduce": "int4", "error_feedback": True}},
        NEAR,
    ),
    ({"shard_degree": 2, "compression": "int4", "optimizer_shard": "world"}, NEAR),
]
EVERY = [(retained, knobs) for retained in (True, False) for knobs, _ in TWO_PASSES]


@pytest.mark.parametrize(
    "cases",
    [EVERY[::2], pytest.param(EVERY[1::2], marks=pytest.mark.slow)],
    ids=["half", "rest"],
)
def test_a_second_use_after_another_pass_is_sent_once(
    cases: list[tuple[bool, dict[str, Any]]],
) -> None:
    """A cell used twice waits for its second use also where an earlier backward pass of
    the same graph, or of a graph made before, lies in between; replicas that use it
    once wait for nobody's second message."""
    bounds = {str(knobs): bound for knobs, bound in TWO_PASSES}
    ranks = run_ranks(two_passes_together, 4, cases, ranks_per_node=2)
    for number, (retained, knobs) in enumerate(cases):
        expected, bound = two_passes_alone(retained), bounds[str(knobs)]
        for seen in ranks:
            for name, value in expected.items():
                assert value is not None
                assert (seen[number][name] - value).abs().max() <= bound, (
                    knobs,
                    retained,
                    name,
                )
                assert torch.equal(seen[number][name], ranks[0][number][name]), (
                    "replicas are equal"
                )


@dataclass
class Window:
    """What one rank sent in one window, what ``.grad`` was after each micro-batch but
    the last, and bytes that were gathered and held as sums after each."""

    calls: list[Call]
    before_last: int
    gathered: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    seen_between: list[str] = field(default_factory=list)


LAYERS = 3
UNITS = LAYERS + 1


def record_window(micro_batches: int, **knobs) -> Window:
    torch.manual_seed(0)
    parallel = parallel_model(SmallGpt(layers=LAYERS), **knobs)
    window = Window([], 0)
    with CallRecorder() as recorder:
        for number in range(micro_batches):
            window.before_last = len(recorder.calls)
            with parallel.window.accumulate(number < micro_batches - 1):
                parallel.module(torch.randint(101, (2, 9))).backward()
            window.gathered.append(
                sum(unit.gathered_bytes() for unit in parallel.units)
            )
            window.held.append(parallel.window.held_bytes())
            if number < micro_batches - 1:
                named = list(parallel.module.named_parameters())
                assert (
                    all(isinstance(parameter, DTensor) for _, parameter in named)
                    or not parallel.units
                )
                window.seen_between += [
                    name for name, parameter in named if parameter.grad is not None
                ]
    assert all(parameter.grad is not None for parameter in parallel.module.parameters())
    window.calls = recorder.calls
    return window


def shard_bytes(p: int) -> Counter[int]:
    """Bytes of one rank's padded shard of each unit of the model, float32."""
    model = SmallGpt(layers=LAYERS)
    inside = {id(q) for q in model.blocks.parameters()}
    units = [
        [q for q in model.parameters() if id(q) not in inside],
        *(list(b.parameters()) for b in model.blocks),
    ]
    return Counter(
        sum(-(-len(q) // p) * (q.numel() // len(q)) * 4 for q in unit) for unit in units
    )


def gathers(window: Window) -> list[Call]:
    """Inside a node a gather between two ranks is one message too."""
    return [call for call in window.calls if (call.kind, call.tag) == ("send", GATHER)]


def reductions_inside(window: Window) -> list[Call]:
    return [call for call in window.calls if (call.kind, call.tag) == ("send", REDUCE)]


def replica_reductions(window: Window) -> list[Call]:
    return [
        call
        for call in window.calls
        if call.kind == "all_reduce" and call.dtype == "float32"
    ]


def test_every_micro_batch_is_reduced_in_its_partition_and_once_across_replicas() -> (
    None
):
    """4 micro-batches, U = 4 units, 2 replicas x 2 ranks: 4U reductions in the
    partition group, U across replicas."""
    for rank, window in enumerate(
        run_ranks(record_window, 4, 4, ranks_per_node=2, shard_degree=2)
    ):
        partition, replicas = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        # A reduce-scatter between two ranks is one message with the other's half.
        sent = reductions_inside(window)
        assert len(sent) == 4 * UNITS
        assert {call.ranks for call in sent} == {partition}
        assert Counter(call.n_bytes for call in sent) == Counter(
            {n: 4 * k for n, k in shard_bytes(2).items()}
        )
        reductions = replica_reductions(window)
        assert len(reductions) == UNITS
        assert {call.ranks for call in reductions} == {replicas}
        assert Counter(call.n_bytes for call in reductions) == shard_bytes(2)
        assert all(call in window.calls[window.before_last :] for call in reductions)
        others = [
            call
            for call in window.calls
            if call.kind != "send" and call not in reductions
        ]
        assert [(call.kind, call.dtype) for call in others] == [("all_reduce", "int32")]
        assert window.seen_between == []


def record_gathers(micro_batches: int, cases: list[dict[str, Any]]) -> list[Window]:
    return [record_window(micro_batches, **knobs) for knobs in cases]


def test_parameters_that_stay_gathered_are_gathered_once_in_a_window() -> None:
    """M = 3 micro-batches, U = 4 units: M(2U - 1) gathers (the root once in each), MU
    when they stay until backward, U when they stay until the window's end; MU
    reductions, or U of whole gradients."""
    cases = [
        {"shard_degree": 2, **case}
        for case in ({}, {"reshard_after_forward": False}, KEPT, BOTH)
    ]
    whole = sum(
        parameter.numel() * 4 for parameter in SmallGpt(layers=LAYERS).parameters()
    )
    for windows in run_ranks(record_gathers, 4, 3, cases, ranks_per_node=2):
        assert [len(gathers(window)) for window in windows] == [
            3 * (2 * UNITS - 1),
            3 * UNITS,
            UNITS,
            UNITS,
        ]
        assert [len(reductions_inside(window)) for window in windows] == [
            3 * UNITS
        ] * 3 + [UNITS]
        assert [len(replica_reductions(window)) for window in windows] == [UNITS] * 4
        assert [window.gathered for window in windows[:2]] == [[0, 0, 0]] * 2
        for between in (window.gathered for window in windows[2:]):
            assert between[0] == between[1] >= whole and between[2] == 0
        # Half of what is not held is this rank's sum of it.
        held = [window.held for window in windows]
        assert (
            held[0] == held[1] == held[2]
            and held[3][:2] == [whole, whole]
            and held[3][2] == 0
        )
        assert whole / 2 <= held[0][0] == held[0][1] < 0.6 * whole and held[0][2] == 0


def test_replicas_without_partitions_are_reduced_once_per_unit() -> None:
    for window in run_ranks(
        record_window,
        4,
        4,
        ranks_per_node=2,
        shard_degree=1,
        collectives={"hierarchical": False},
    ):
        assert Counter(
            call.n_bytes for call in replica_reductions(window)
        ) == shard_bytes(1)
        assert window.before_last == 0, (
            "nothing at all is sent before the last micro-batch"
        )
        assert window.seen_between == []


@pytest.mark.slow
def test_two_stage_reductions_of_every_micro_batch_and_one_across_replicas() -> None:
    """2 replicas x (2 nodes x 2 ranks). Gathers are bfloat16 here, so that float32
    messages are reductions: per reduce-scatter one to the other local rank for each
    node, and one to the other node."""
    windows = run_ranks(
        record_window, 8, 4, ranks_per_node=2, shard_degree=4, param_dtype="bfloat16"
    )
    for rank, window in enumerate(windows):
        sent = [
            call
            for call in window.calls
            if call.kind == "send" and call.dtype == "float32"
        ]
        between = [
            call for call in sent if call.to is not None and call.to // 2 != rank // 2
        ]
        assert Counter(call.n_bytes for call in between) == Counter(
            {n: 4 * k for n, k in shard_bytes(4).items()}
        )
        assert len(sent) - len(between) == 2 * 4 * UNITS
        assert Counter(
            call.n_bytes for call in replica_reductions(window)
        ) == shard_bytes(4)
        assert window.seen_between == []


class Scale(nn.Module):
    """The gradient of its weights is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.scalar * x[0, 0]


SMALL = 2.0**-9


def accumulate_half(reduce_dtype: str, **knobs) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parallel = parallel_model(Scale().bfloat16(), reduce_dtype=reduce_dtype, **knobs)
    for micro in range(9):
        with parallel.window.accumulate(micro < 8):
            value = 1.0 if micro == 0 else SMALL
            parallel.module(torch.full((5, 3), value, dtype=torch.bfloat16)).backward()
    weight, scalar = gradients(parallel.module).values()
    assert weight is not None and scalar is not None
    return weight, scalar


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
        {"shard_degree": 2},
        pytest.param({"shard_degree": 4}, marks=pytest.mark.slow),
        pytest.param({"shard_degree": 2, **HELD}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bfloat16_gradients_add_up_in_float32(knobs: dict[str, Any]) -> None:
    """1 + 8 x 2**-9 is 1.015625, a bfloat16 number; added up in bfloat16 every 2**-9
    would be rounded away."""
    for gradient in run_ranks(accumulate_half, 4, "auto", ranks_per_node=2, **knobs):
        for value in gradient:
            assert value.dtype == torch.bfloat16
            assert value.unique().tolist() == [1 + 8 * SMALL]


def test_reduce_dtype_bfloat16_rounds_as_asked() -> None:
    """The counter-proof: with the sum in bfloat16 the small ones are lost."""
    for gradient in run_ranks(
        accumulate_half, 4, "bfloat16", shard_degree=2, ranks_per_node=2
    ):
        assert gradient[0].unique().tolist() == [1.0]


def memory_of_cast_gradients() -> tuple[int, int]:
    """Bytes that gradients keep alive, and those that they have."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).bfloat16()
    parallel = parallel_model(layers, shard_degree=2, reduce_dtype="float32")
    parallel.module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    local = [
        p.grad.to_local()
        for p in parallel.module.parameters()
        if isinstance(p.grad, DTensor)
    ]
    assert len(local) == 8
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in local
    }
    return sum(storages.values()), sum(
        each.numel() * each.element_size() for each in local
    )


def test_gradients_of_another_dtype_than_their_sum_keep_no_more_than_themselves_alive() -> (
    None
):
    for kept, own in run_ranks(memory_of_cast_gradients, 2):
        assert kept == own


def gradients_of_dtypes(
    cases: list[tuple[tuple[str, ...], dict[str, Any]]],
) -> list[dict[str, torch.Tensor]]:
    """Of a bfloat16 model of which some parameters ask for gradients in float32."""
    found = []
    for asking, knobs in cases:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)
        ).bfloat16()
        for name in asking:
            model.get_parameter(name).grad_dtype = torch.float32
        parallel = parallel_model(
            model, shard_degree=2, reduce_dtype="float32", **knobs
        )
        for micro in range(2):
            with parallel.window.accumulate(micro < 1):
                inputs = torch.full((2, 4), 1.0 + micro, dtype=torch.bfloat16)
                parallel.module(inputs).float().square().sum().backward()
        found.append(
            {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        )
    return found


@pytest.mark.skipif(
    generation() != "newest", reason="FSDP2 looks at grad_dtype from torch 2.15 on"
)
def test_gradients_have_the_dtype_that_their_parameter_asks_for() -> None:
    """Sums hold the parameters of one dtype together then, in another order."""
    asking = ("0.weight", "2.weight")
    for plain, reduced, held in run_ranks(
        gradients_of_dtypes, 2, [((), {}), (asking, {}), (asking, HELD)]
    ):
        assert {
            name
            for name, gradient in reduced.items()
            if gradient.dtype == torch.float32
        } == set(asking)
        for name, gradient in reduced.items():
            assert torch.equal(held[name], gradient) and torch.equal(
                plain[name], gradient.bfloat16()
            ), name
