"""Auxiliary losses of routers over all ranks' tokens, and over the layers of all
pipeline stages.

The loss (Switch Transformer, arXiv 2101.03961, 2.2) is ``E * sum_e f_e P_e``, where f
is the share of choices that go to an expert and P its mean probability: a product of
means, so the mean of ranks' losses is not that of all tokens. It is linear in P,
though, and f has no gradient: with f of all ranks, and P of this rank's tokens divided
by the number of all, the mean of ranks' losses is the loss of the global micro-batch,
and that of gradients its gradient.

It is made of totals: of probabilities and of choices by expert, and of rows. Those of
layers add up, so that with pipeline stages they go forward beside the activations, and
each stage adds those of its own layers. The last one makes the loss of them; the
gradient that comes back for the sums of probabilities is all that the routers of a
stage need.

Shape letters: T tokens, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.comm import CommMeter, FlatAllReduce
from smp_core.outside import changed
from smp_core.plan import LOSS, RouterLoss
from smp_core.watch import here


class Sums:
    """Sums over the ranks that hold different tokens, metered as
    "router_all_reduce"."""

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._group, self._reduce = group, FlatAllReduce(meter, prefix="router_")
        self.ranks = dist.get_world_size(group)

    def __call__(self, numbers: torch.Tensor) -> None:
        """Add up in place. Collective."""
        with here.waiting("choices of routers"):
            self._reduce(numbers, self._group)


_MULTIPLIED: ContextVar[int] = ContextVar(
    "what the trainer multiplies losses by", default=1
)


@contextlib.contextmanager
def losses_multiplied_by(factor: int) -> Iterator[None]:
    """Divide auxiliary losses of all ranks' tokens by what a trainer multiplies a
    model's loss by afterwards: Trainer does so by ranks, for a loss over the targets of
    all of them."""
    before = _MULTIPLIED.set(factor)
    try:
        yield
    finally:
        _MULTIPLIED.reset(before)


def auxiliary_loss(
    logits: Sequence[torch.Tensor],
    experts: int,
    top_k: int,
    mask: torch.Tensor | None,
    sums: Sums,
) -> torch.Tensor:
    """Compute this rank's part of the auxiliary loss of all ranks' tokens; the mean
    over ranks is that loss.

    Args:
        logits: of each layer's router, [T, E].
        mask: nonzero for tokens that count, of T elements; None: all of them.

    Returns:
        a 0-d tensor, of float32 or the logits' dtype if that is wider. As Transformers
        does, probabilities are computed in the logits' dtype, and added up over layers.
    """
    # Sums are of float64, so that their order over layers and ranks does not show.
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    totals = torch.zeros(2 * experts + 1, dtype=torch.float64, device=logits[0].device)
    for layer in logits:
        totals = totals + _totals(layer.to(totals.device), top_k, mask)
    return _loss_of(totals, sums).to(dtype)


def _totals(
    logits_TE: torch.Tensor, top_k: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the sums of probabilities [E] and of choices [E], and the number of rows,
    of one layer: [2E + 1], float64. Those of probabilities have a gradient."""
    shares_TE = logits_TE.softmax(-1)
    chosen_TK = shares_TE.topk(top_k, -1).indices
    # Padding counts neither as a row nor as a choice.
    counted_T = shares_TE.new_ones(len(shares_TE), dtype=torch.float64)
    if mask is not None:
        counted_T = mask.reshape(-1).to(counted_T)
    choices_E = counted_T.new_zeros(shares_TE.shape[-1])
    choices_E.scatter_add_(0, chosen_TK.reshape(-1), counted_T.repeat_interleave(top_k))
    probabilities_E = (shares_TE.double() * counted_T[:, None]).sum(0)
    return torch.cat([probabilities_E, choices_E, counted_T.sum()[None]])


def _loss_of(totals: torch.Tensor, sums: Sums | None) -> torch.Tensor:
    """Return this rank's part of the loss of all ranks' tokens; of its own tokens
    without ``sums``."""
    experts = len(totals) // 2
    # Probabilities stay this rank's; choices and rows are those of all ranks, without a
    # gradient.
    probabilities_E = totals[:experts]
    counted = totals[experts:].detach().clone()
    ranks = 1
    if sums is not None:
        sums(counted)
        ranks = sums.ranks
    choices_E, rows = counted[:-1], counted[-1]
    # Times the ranks: the mean over ranks, which is taken later, is then the sum.
    return experts * ranks * (probabilities_E * choices_E / rows**2).sum()


class TotalsOfStages:
    """Totals of a model's routers that go through pipeline stages beside activations.

    Args:
        loss: that is made of them.
        device: of those of stages without routers.

    Attributes:
        arrived: those of the chunks before; None of the first one.
        sizes: experts of a layer, and of a token.
    """

    def __init__(self, loss: RouterLoss, device: torch.device) -> None:
        assert loss.experts is not None and loss.top_k is not None
        self.arrived: torch.Tensor | None = None
        self.sizes = [loss.experts, loss.top_k]
        self._none = torch.zeros(
            2 * loss.experts + 1, dtype=torch.float64, device=device
        )
        self._is_collecting = False
        self._logits: list[torch.Tensor] = []
        self._mask: torch.Tensor | None = None
        routers = loss.routers()
        self._dtype = torch.promote_types(
            next(routers[0][0].parameters()).dtype, torch.float32
        )
        # Blocks hand on one tensor, so logits are taken where they are made.
        for router, place in routers:
            router.register_forward_hook(functools.partial(self._note, place))

    @torch.compiler.disable
    def _note(self, place: int, router: nn.Module, _: Any, output: Any) -> None:
        # A recomputation in backward makes them once more.
        if self._is_collecting:
            self._logits.append(output[place] if isinstance(output, tuple) else output)

    @contextlib.contextmanager
    def collecting(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Collect logits inside, of a forward whose tokens count by ``mask``. Not in
        backward, which may compute them again."""
        self._logits = []
        self._mask = mask
        with changed(self, _is_collecting=True):
            yield

    def given(self) -> torch.Tensor:
        """Return the totals that arrived with those of what was collected."""
        # The chunk before has sent its sums; the first chunk begins with zeros.
        totals = self._none if self.arrived is None else self.arrived
        for layer in self._logits:
            totals = totals + _totals(layer, self.sizes[1], self._mask)
        # They would keep a graph beyond its backward pass.
        self._logits, self._mask = [], None
        return totals

    def loss(self, sums: Sums | None) -> torch.Tensor:
        """Return this rank's part of the loss of all stages' layers, on the last
        stage."""
        return _loss_of(self.given(), sums).to(self._dtype)


@dataclass(frozen=True)
class _Across:
    """The ranks and stages that a model's loss is added up across.

    Attributes:
        sums: over ranks; None: it is of this rank's tokens.
        stages: totals of other pipeline stages; None: there are none.
        is_cut: whether there are pipeline stages.
    """

    sums: Sums | None = None
    stages: TotalsOfStages | None = None
    is_cut: bool = False


_NOTHING = _Across()
_ACROSS: ContextVar[_Across] = ContextVar(
    "of the model whose forward runs", default=_NOTHING
)


class _Switched:
    """Transformers' function, which takes other ranks' tokens and other stages' layers
    in while a model that asks for it computes."""

    def __init__(self, own: Any) -> None:
        functools.update_wrapper(self, own)
        self._own, self._parameters = own, inspect.signature(own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        across, asked = _ACROSS.get(), self._parameters.bind(*args, **kwargs)
        # Bound by name: models call it by place or by keyword.
        asked.apply_defaults()
        divisor = 1 if across.sums is None else _MULTIPLIED.get()
        # A cut model: the totals of all stages have arrived here, on the last one.
        if across.stages is not None:
            _, *sizes, _ = asked.args
            assert across.stages.sizes == sizes, (
                f"read {across.stages.sizes}, and the loss is of {sizes}"
            )
            return across.stages.loss(across.sums) / divisor
        if across.is_cut:
            raise ValueError(
                "the auxiliary loss of routers reads those of all pipeline stages, and this model was cut without it: "
                "set model.config.output_router_logits = True before the model is prepared, and not in a call"
            )
        if (
            # Without ranks to share with, or without logits or experts, the loss stays
            # Transformers' own.
            across.sums is None
            or not isinstance(asked.args[0], tuple)
            or asked.args[1] is None
        ):
            return self._own(*args, **kwargs)
        logits, experts, top_k, mask = asked.args
        return auxiliary_loss(logits, experts, top_k, mask, across.sums) / divisor


def add_up(
    loss: RouterLoss, sums: Sums | None, stages: TotalsOfStages | None, is_cut: bool
) -> None:
    """Let a model's forward add up its loss over ranks, in training, and over stages.
    An evaluation has the loss of a rank's tokens.

    Args:
        sums: over ranks; None: it stays that of a rank's tokens.
        stages: totals of other pipeline stages.
        is_cut: whether there are stages; without totals of theirs, the loss is refused
            where it is computed.
    """
    # Several models of one file share its function; it is exchanged once.
    if not isinstance(loss.names[LOSS], _Switched):
        loss.names[LOSS] = _Switched(loss.names[LOSS])
    module = loss.model
    inner, parameters = module.forward, inspect.signature(type(module).forward)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Evaluation may have other numbers of batches on each rank: no collective in
        # it.
        is_trained = module.training and torch.is_grad_enabled()
        collecting: AbstractContextManager[None] = nullcontext()
        if stages is not None:
            collecting = stages.collecting(
                parameters.bind(module, *args, **kwargs).arguments.get("attention_mask")
            )
        before = _ACROSS.set(_Across(sums if is_trained else None, stages, is_cut))
        try:
            with collecting:
                return inner(*args, **kwargs)
        finally:
            _ACROSS.reset(before)

    module.forward = forward
