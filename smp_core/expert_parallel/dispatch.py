"""Dispatches: tokens to the ranks of their experts, and what experts make of them back.
No token is dropped, but those that a capacity leaves out do not travel: their expert is
one beyond the last.

FlatDispatch    a row for each expert of a token, in one all-to-all each way
TwoHopDispatch  a token once to each other node that has experts of it, to the rank with this one's place there; inside
                the node a row for each expert; their weighted sum goes back. For ranks on several nodes
DeepEpDispatch  a token once to each other rank that has experts of it, by the package deep_ep (deep_ep)

The host waits for the device once, for the numbers of rows. A rank whose experts get no
token takes part in all exchanges, forward and backward. Shape letters: E experts of the
layer, D ranks that divide them, N nodes and L ranks on each (D = N * L), T tokens, K
experts of a token, R rows, H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from smp_core.comm import CommMeter
from smp_core.expert_parallel.exchange import Exchange

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [R, H], which of this rank's experts each is for [R]) -> [R, H]."""


class Dispatch(Protocol):
    """A way to the experts and back.

    Attributes:
        degree: D.
        rank: this one's place among the D ranks, whose experts are in the order of
            ranks.
    """

    degree: int
    rank: int

    def __call__(
        self,
        tokens_TH: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        n_experts: int,
        run: Experts,
    ) -> torch.Tensor:
        """Return the sum of what its experts make of each token, each times its weight,
        [T, H].

        Args:
            chosen_TK: int64, 0 to ``n_experts`` - 1; ``n_experts``: none, with a weight
                of 0.
            run: this rank's experts.
        """


class FlatDispatch:
    """Each row by itself. ``group``: the ranks that divide experts, on a communicator
    of its own."""

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._all = Exchange(group, meter)
        self.degree, self.rank = self._all.degree, self._all.rank

    def __call__(
        self,
        tokens_TH: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        n_experts: int,
        run: Experts,
    ) -> torch.Tensor:
        # Phase 1: who sends how many rows to whom.
        chosen_R, of_each = chosen_TK.reshape(-1), chosen_TK.shape[-1]
        order_R = chosen_R.argsort(stable=True)
        own_E = _count(chosen_R, n_experts)
        arriving_E = self._all.equal_parts(own_E)
        by_rank = torch.stack([own_E, arriving_E]).view(2, self.degree, -1)
        leaving, arriving = by_rank.sum(-1).tolist()

        # Phase 2: the rows of this rank's experts, from all ranks, and what these make
        # of them.
        sent_R = order_R[: sum(leaving)]  # those without an expert are the last
        rows_RH = self._all.dispatch(tokens_TH[sent_R // of_each], leaving, arriving)
        made_RH = run(rows_RH, _expert_of_rows(arriving_E, self.degree, sum(arriving)))

        # Phase 3: back to where the tokens are, and there times their weights.
        back_RH = self._all.combine(made_RH, arriving, leaving)
        everywhere = back_RH.new_zeros(len(order_R), *back_RH.shape[1:])
        in_place = everywhere.index_copy(0, sent_R, back_RH).view(*chosen_TK.shape, -1)
        return (in_place * weights_TK.unsqueeze(-1)).sum(1)


class TwoHopDispatch:
    """Each token once to every node.

    Args:
        inside: the ranks on this node.
        across: the ranks with this one's place on their nodes. Both on communicators of
            their own.
    """

    def __init__(
        self, inside: dist.ProcessGroup, across: dist.ProcessGroup, meter: CommMeter
    ) -> None:
        self._inside, self._across = Exchange(inside, meter), Exchange(across, meter)
        self.degree = self._inside.degree * self._across.degree
        self.rank = self._across.rank * self._inside.degree + self._inside.rank

    def __call__(
        self,
        tokens_TH: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        n_experts: int,
        run: Experts,
    ) -> torch.Tensor:
        nodes, ranks = self._across.degree, self._inside.degree
        # Experts lie in the order of ranks, so those of a node are a stretch.
        on_node = n_experts // nodes
        node_TK = chosen_TK // on_node

        # Phase 1: which tokens go to which node, and how many rows there will be on
        # both hops.
        wanted_NT = torch.stack([(node_TK == node).any(1) for node in range(nodes)])
        # Choices without an expert are on no node.
        chosen_NE = _count(chosen_TK.reshape(-1), n_experts).view(nodes, on_node)
        ours = torch.cat([wanted_NT.sum(1, keepdim=True), chosen_NE], 1)
        theirs = self._across.equal_parts(ours.view(-1)).view(nodes, 1 + on_node)
        passed_E = theirs[:, 1:].sum(0)
        arriving_E = self._inside.equal_parts(passed_E)
        across = torch.stack([ours[:, 0], theirs[:, 0]])
        inside = torch.stack([passed_E, arriving_E]).view(2, ranks, -1).sum(-1)
        numbers = torch.cat([across.view(-1), inside.view(-1)]).tolist()
        leaving, coming = numbers[:nodes], numbers[nodes : 2 * nodes]
        passing, arriving = numbers[2 * nodes : -ranks], numbers[-ranks:]

        # Phase 2: tokens between nodes, with their experts there and the weights of
        # these.
        node_M, token_M = places(wanted_NT, sum(leaving))
        rows_MH = self._across.dispatch(tokens_TH[token_M], leaving, coming)
        # Experts on other nodes are marked by -1: the same token has gone there, too.
        is_there = node_TK[token_M] == node_M[:, None]
        experts_MK = torch.where(is_there, chosen_TK[token_M], -1).to(torch.int32)
        experts_MK = self._across.dispatch(experts_MK, leaving, coming).long()
        weights_MK = torch.where(is_there, weights_TK[token_M], 0)
        weights_MK = self._across.dispatch(weights_MK, leaving, coming)

        # Phase 3: inside the node, a row for each expert, and back.
        row_R, place_R = places(experts_MK >= 0, sum(passing))
        expert_R = experts_MK[row_R, place_R] % on_node
        # Sorted by expert, and with that by rank; stable, so that sums have one order
        # in every run.
        order_R = expert_R.argsort(stable=True)
        row_R, place_R = row_R[order_R], place_R[order_R]
        sent_RH = self._inside.dispatch(rows_MH[row_R], passing, arriving)
        made_RH = run(sent_RH, _expert_of_rows(arriving_E, ranks, sum(arriving)))
        back_RH = self._inside.combine(made_RH, arriving, passing)

        # Phase 4: the weighted sum of a token's experts on this node, to where the
        # token is.
        weighted_RH = (back_RH * weights_MK[row_R, place_R].unsqueeze(-1)).to(
            tokens_TH.dtype
        )
        parts_MH = torch.zeros_like(rows_MH).index_add(0, row_R, weighted_RH)
        home_MH = self._across.combine(parts_MH, coming, leaving)
        return torch.zeros_like(tokens_TH).index_add(0, token_M, home_MH)


def _count(chosen_R: torch.Tensor, n_experts: int) -> torch.Tensor:
    """Return how many rows each expert gets, [E]; bincount would wait for the
    device."""
    # One place more for choices that a capacity has left out.
    counts = chosen_R.new_zeros(n_experts + 1).scatter_add_(
        0, chosen_R, torch.ones_like(chosen_R)
    )
    return counts[:n_experts]


def _expert_of_rows(arriving_E: torch.Tensor, ranks: int, n_rows: int) -> torch.Tensor:
    """Return which of this rank's experts each row that arrives is for, [R]: they come
    rank by rank, sorted."""
    own = torch.arange(arriving_E.shape[0] // ranks, device=arriving_E.device)
    return own.repeat(ranks).repeat_interleave(arriving_E, output_size=n_rows)


def places(marks: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns of what is true in a matrix, row by row; how many are is
    known already."""
    flat = marks.reshape(-1)
    # Stable and descending: those that are true come first, in order. (nonzero would
    # wait for the device.)
    places = flat.to(torch.int8).argsort(descending=True, stable=True)[:number]
    return places // marks.shape[1], places % marks.shape[1]
