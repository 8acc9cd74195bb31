"""A rank that dies while tokens are sent does not leave the others waiting."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from smp_core.expert_parallel.exchange import COMBINE, DISPATCH, Exchange
from tests.core.expert_parallel.cases import Case
from tests.core.tensor_parallel.model_cases import batches, loss_of
from tests.harness import run_ranks
from tests.rank_pool import RanksFailed

LOST, STATUS = 1, 7


def lose_a_rank(in_backward: bool, kind: str) -> None:
    """Two steps, in the second of which a rank ends without a word, when it would take
    part in an exchange."""
    parallel = Case("own experts", 4, 2).parallel()
    dies, send = [False], Exchange.run

    def run(exchange: Exchange, rows: object, *rest: object) -> object:
        if dies[0] and dist.get_rank() == LOST and rest[-1] == kind:
            os._exit(STATUS)
        return send(exchange, rows, *rest)  # type: ignore[arg-type]

    Exchange.run = run  # type: ignore[method-assign,assignment]
    try:
        for step in range(2):
            own = batches(1, 2)[step, 0].chunk(parallel.mesh.data_size)[
                parallel.mesh.data_rank
            ]
            dies[0] = step == 1 and not in_backward
            loss = loss_of(parallel.module, own)
            dies[0] = step == 1
            loss.backward()
            parallel.window.close()
    finally:
        Exchange.run = send  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("in_backward", "kind"),
    [
        (False, COMBINE),
        pytest.param(True, COMBINE, marks=pytest.mark.slow),
        pytest.param(True, DISPATCH, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_among_tokens_ends_the_others(
    in_backward: bool, kind: str
) -> None:
    """The others raise by themselves within the harness's grace; those that hang it
    would have to kill."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(lose_a_rank, 4, in_backward, kind, ranks_per_node=4, timeout=300)
    said = str(failed.value)
    assert f"--- rank {LOST}: exited with status {STATUS}" in said
    for rank in {0, 1, 2, 3} - {LOST}:
        assert f"--- rank {rank}: raised" in said, said[:2000]
