"""Plans: what is held where, what is seen by whom, and how much work that is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_work import visible_pairs
from smp_core.context_parallel.sequence_plan import (
    SequencePlan,
    decode,
    document_starts,
    padded_length,
)

PLANS = [
    SequencePlan(4, 64),
    SequencePlan(2, 64, ((0, 5, 33), (0,), (0, 63)), "contiguous", 3),
    SequencePlan(3, 24, ((0, 1, 2, 23),)),
    SequencePlan(1, 2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_travels_as_a_tensor(plan: SequencePlan) -> None:
    assert decode(plan.encode()) == plan


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_token_is_held_once_and_finds_its_place_again(plan: SequencePlan) -> None:
    pieces = torch.cat([plan.positions(rank) for rank in range(plan.degree)])
    assert sorted(pieces.tolist()) == list(range(plan.length))
    whole = torch.randn(plan.length, 2)
    assert torch.equal(plan.by_rank(whole), whole[pieces])
    assert torch.equal(plan.in_sequence_order(whole[pieces]), whole)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 7), (False, None)])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_rectangles_are_the_mask(
    plan: SequencePlan, causal: bool, window: int | None
) -> None:
    """Every pair that a mask of S x S elements shows is in exactly one rectangle, and
    no other."""
    rows = max(len(plan.documents), 2)
    seen = torch.zeros(rows, plan.length, plan.length, dtype=torch.int)
    for rank in range(plan.degree):
        positions = plan.positions(rank)
        for call in plan.calls(rank, causal, window):
            q, k, row = (
                call.queries[0],
                call.keys[0],
                slice(None) if call.row is None else call.row,
            )
            for n_q, n_k in call.segments:
                rectangle = torch.ones(n_q, n_k, dtype=torch.int)
                if causal:
                    rectangle = rectangle.tril(n_k - n_q)
                if window is not None:
                    rectangle = rectangle.triu(n_k - n_q - window + 1)
                assert rectangle.sum() == visible_pairs(n_q, n_k, causal, window)
                first = positions[q]
                seen[row, first : first + n_q, k : k + n_k] += rectangle
                q, k = q + n_q, k + n_k
            assert (q, k) == (call.queries[1], call.keys[1])
    expected = torch.zeros_like(seen)
    for row in range(rows):
        starts = plan.documents[row % len(plan.documents)]
        for start, end in zip(starts, [*starts[1:], plan.length], strict=True):
            size = end - start
            expected[row, start:end, start:end] = (
                torch.ones(size, size).tril(0 if causal else size).int()
            )
    if window is not None:
        expected = expected.triu(1 - window)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("size", [1, 4, 7, 64])
def test_chunks_end_at_multiples_of_their_size(plan: SequencePlan, size: int) -> None:
    """Counted from each document's first position, whatever that is."""
    first = [
        [3 * row + 5 * i for i in range(len(plan.documents[row % len(plan.documents)]))]
        for row in range(3)
    ]
    for given in ([], first):
        pieces = plan.in_chunks(size, given).documents
        for row in range(3):
            starts = plan.documents[row % len(plan.documents)]
            position, expected = 0, []
            for i in range(plan.length):
                if i in starts:
                    position = given[row][starts.index(i)] if given else 0
                if i in starts or position % size == 0:
                    expected.append(i)
                position += 1
            assert pieces[row % len(pieces)] == tuple(expected)
    with pytest.raises(ValueError, match="chunks of 0 positions"):
        plan.in_chunks(0)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(degree: int) -> None:
    """Exactly the same for one document; contiguous pieces would differ up to (2R -
    1)-fold."""

    def work(order: str) -> list[int]:
        plan = SequencePlan(degree, 256, order=order)
        calls = ([*plan.calls(rank, True, None)] for rank in range(degree))
        return [
            sum(
                visible_pairs(q, k, True, None)
                for call in one
                for q, k in call.segments
            )
            for one in calls
        ]

    assert len(set(work("zigzag"))) == 1
    assert sum(work("zigzag")) == sum(work("contiguous")) == 256 * 257 // 2
    assert max(work("contiguous")) > 1.4 * min(work("contiguous"))


def test_documents_are_runs_of_one_number() -> None:
    assert document_starts(torch.tensor([[4, 4, 7, 4], [1, 1, 1, 1]])) == (
        (0, 2, 3),
        (0,),
    )
    assert document_starts(torch.tensor([[4, 4], [9, 9]])) == ((0,),)
    assert [padded_length(n, 4) for n in (1, 8, 9)] == [8, 8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"length": 60},
            "a sequence of 60 tokens is not a multiple of 2 x 4 ranks; pad it to 64",
        ),
        ({"documents": ((0, 9, 9),)}, "do not rise"),
        ({"documents": ((1,),)}, "do not rise"),
        ({"documents": ((0, 64),)}, "do not rise"),
        ({"order": "striped"}, "order='striped'; allowed: 'zigzag', 'contiguous'"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequencePlan(**{"degree": 4, "length": 64, **arguments})
