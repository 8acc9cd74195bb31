"""What dispatch sends is what the routers chose, to the byte, and recomputation sends
nothing again."""

from __future__ import annotations

import torch

from tests.core.expert_parallel.cases import CHOICES, HIDDEN, WIDE, Case, bytes_of, sent
from tests.core.expert_parallel.models import EXPERTS
from tests.core.tensor_parallel.model_cases import Wide, batches, loss_of
from tests.harness import run_ranks


def in_one_hop(
    rank: int, degree: int, choices: list[list[torch.Tensor]]
) -> dict[str, int]:
    """The bytes of both directions by kind. Counts, [E] of int64, go forward only."""
    total = {"dispatch": 0, "combine": 0}
    peers = range(rank // degree * degree, (rank // degree + 1) * degree)
    on_rank = EXPERTS // degree
    for layer in range(len(choices[0])):
        owners = {peer: choices[peer][layer] // on_rank + peers[0] for peer in peers}
        leaving = int((owners[rank] != rank).sum())
        arriving = sum(
            int((owners[peer] == rank).sum()) for peer in peers if peer != rank
        )
        rows = (leaving + arriving) * HIDDEN * WIDE
        total["dispatch"] += rows + (degree - 1) * on_rank * 8
        total["combine"] += rows
    return total


def test_bytes_are_those_of_the_routers_choices_also_where_all_is_computed_again() -> (
    None
):
    cases = [
        Case("Mixtral", 4, 2),
        Case("Mixtral", 4, 2, knobs=(("activations", "full"),)),
        Case("Mixtral", 4, 1),
    ]
    for rank, (plain, again, sharded) in enumerate(
        run_ranks(sent, 4, cases, ranks_per_node=2)
    ):
        expected = in_one_hop(rank, 2, plain["choices"])
        for kind, total in expected.items():
            assert bytes_of(plain, kind) == {"intra": total, "inter": 0}, kind
            assert bytes_of(again, kind) == {"intra": total, "inter": 0}, (
                f"{kind}, computed again"
            )
            assert bytes_of(sharded, kind) == {"intra": 0, "inter": 0}
        whole = 3 * EXPERTS * 32 * 48
        assert plain["gathered"] == [whole / 2, whole / 2]


def test_in_two_hops_a_token_crosses_once_for_each_other_node() -> None:
    """4 ranks on 2 nodes, an expert each."""
    figures = run_ranks(sent, 4, [Case("Mixtral", 4, 4)], ranks_per_node=2)
    for rank, (seen,) in enumerate(figures):
        dispatch = combine = 0
        peer = (rank + 2) % 4
        for layer in range(len(seen["choices"][0])):
            nodes = {each: seen["choices"][each][layer] // 2 for each in (rank, peer)}
            leaving = int((nodes[rank] == peer // 2).any(1).sum())
            arriving = int((nodes[peer] == rank // 2).any(1).sum())
            rows = (leaving + arriving) * HIDDEN * WIDE
            weights, experts = (
                (leaving + arriving) * CHOICES * WIDE,
                leaving * CHOICES * 4,
            )
            # And how many rows, and rows of each of two experts.
            dispatch += rows + weights + experts + 3 * 8
            combine += rows
        assert (
            bytes_of(seen, "dispatch")["inter"],
            bytes_of(seen, "combine")["inter"],
        ) == (dispatch, combine)


def test_in_one_hop_a_token_crosses_for_each_expert() -> None:
    case = Case("Mixtral", 4, 4, knobs=(("collectives", {"hierarchical": False}),))
    for rank, (seen,) in enumerate(run_ranks(sent, 4, [case], ranks_per_node=2)):
        expected = in_one_hop(rank, 4, seen["choices"])
        for kind, total in expected.items():
            assert sum(bytes_of(seen, kind).values()) == total


def issued(case: Case) -> list[str]:
    """The gathers and reductions of a backward pass in words, in order."""
    parallel = case.parallel()
    tokens = batches(1, 1)[0, 0].chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
    with parallel.window.accumulate(), Wide():
        loss_of(parallel.module, tokens).backward()
    told = [
        parallel.traffic.issued.describe(number)
        for number in parallel.traffic.issued.numbers
    ]
    parallel.window.abandon()
    return [
        each.removesuffix(" in backward")
        for each in told
        if each.endswith(" in backward")
    ]


def test_backward_gathers_the_experts_of_the_layer_before_while_experts_compute() -> (
    None
):
    for told in run_ranks(issued, 4, Case("Mixtral", 4, 2), ranks_per_node=2):
        first, last = ("'model.layers.0.mlp.experts'", "'model.layers.1.mlp.experts'")
        assert told.index(f"all_gather of {first}") < told.index(
            f"reduce_scatter of {last}"
        ), told
        assert told.index(f"all_gather of {last}") < told.index(
            f"all_gather of {first}"
        ), told
        assert len(set(told)) == len(told), "each unit is gathered and reduced once"
