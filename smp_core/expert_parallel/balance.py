"""balance_routers(): auxiliary losses of routers over all ranks' tokens, and biases from all ranks' choices.

An auxiliary loss (Switch Transformer, arXiv 2101.03961, 2.2) is ``E * sum_e f_e P_e``, where f is the share of choices
that go to an expert and P its mean probability: a product of means, so the mean of ranks' losses is not that of all
tokens. It is linear in P, though, and f has no gradient: with f of all ranks, and P of this rank's tokens divided by
the number of all, the mean of ranks' losses is the loss of the global micro-batch, and that of gradients its gradient.

A bias (DeepSeek-V3, arXiv 2412.19437, 2.1.2) is added to an expert's score where experts are chosen and has no
gradient: a step raises it by a fixed rate where the expert got fewer tokens than the mean, and lowers it where it got
more.

Shape letters: T tokens, E experts of a layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.comm import CommMeter, FlatAllReduce
from smp_core.plan import Plan
from smp_core.torch_facts import after_each_step, is_absent, lies_in
from smp_core.watch import here

logger = logging.getLogger("smp")

_LOSS = "load_balancing_loss_func"
"""Transformers' name for the loss, in the module of each model that has one."""

_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]

_BIAS, _COUNTS = "e_score_correction_bias", "_smp_choices_of_step"


class Sums:
    """Sums over the ranks that hold different tokens, metered as "router_all_reduce"."""

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._group, self._reduce = group, FlatAllReduce(meter, prefix="router_")
        self.ranks = dist.get_world_size(group)

    def __call__(self, numbers: torch.Tensor) -> None:
        """Add up in place. Collective."""
        with here.waiting("choices of routers"):
            self._reduce(numbers, self._group)


_SUMS: ContextVar[Sums | None] = ContextVar("sums of the model whose forward runs", default=None)
_MULTIPLIED: ContextVar[int] = ContextVar("what the trainer multiplies losses by", default=1)


@contextlib.contextmanager
def losses_multiplied_by(factor: int) -> Iterator[None]:
    """Divide auxiliary losses of all ranks' tokens by what a trainer multiplies a model's loss by afterwards: Trainer
    does so by ranks, for a loss over the targets of all of them."""
    before = _MULTIPLIED.set(factor)
    try:
        yield
    finally:
        _MULTIPLIED.reset(before)


def auxiliary_loss(
    logits: Sequence[torch.Tensor], experts: int, top_k: int, mask: torch.Tensor | None, sums: Sums
) -> torch.Tensor:
    """Compute this rank's part of the auxiliary loss of all ranks' tokens; the mean over ranks is that loss.

    Args:
        logits: of each layer's router, [T, E].
        mask: nonzero for tokens that count, of T elements; None: all of them.

    Returns:
        a 0-d tensor, of float32 or the logits' dtype if that is wider. As Transformers does, probabilities are
        computed in the logits' dtype, and added up over layers.
    """
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    device = logits[0].device
    counts_E = torch.zeros(experts, dtype=torch.float64, device=device)
    rows = torch.zeros(1, dtype=torch.float64, device=device)
    probabilities_E = torch.zeros(experts, dtype=dtype, device=device)
    for layer in logits:
        shares_TE = layer.to(device).softmax(-1)
        chosen_TK = shares_TE.topk(top_k, -1).indices
        counted_T = rows.new_ones(len(layer)) if mask is None else mask.reshape(-1).to(rows)
        counts_E.scatter_add_(0, chosen_TK.reshape(-1), counted_T.repeat_interleave(top_k))
        rows += counted_T.sum()
        probabilities_E = probabilities_E + (shares_TE.to(dtype) * counted_T[:, None].to(dtype)).sum(0)
    everyones = torch.cat([counts_E, rows])
    sums(everyones)
    counts_E, rows = everyones[:-1], everyones[-1]
    return experts * sums.ranks * (probabilities_E * (counts_E / rows**2).to(dtype)).sum()


class _Switched:
    """Transformers' function, which takes other ranks' tokens in while a model that asks for it computes."""

    def __init__(self, own: Any) -> None:
        functools.update_wrapper(self, own)
        self._own = own

    def __call__(
        self, gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        sums = _SUMS.get()
        if sums is None or not isinstance(gate_logits, tuple) or num_experts is None:
            return self._own(gate_logits, num_experts, top_k, attention_mask)
        return auxiliary_loss(gate_logits, num_experts, top_k, attention_mask, sums) / _MULTIPLIED.get()


class BalancedRouters:
    """The sums and biases that balance a model's routers.

    Args:
        shares_losses: whether there are auxiliary losses, and they are those of all ranks' tokens.
        biases: those that are updated; None: none.
    """

    def __init__(self, shares_losses: bool, biases: Biases | None) -> None:
        self._shares_losses, self._biases = shares_losses, biases

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update biases after each step of the model's first optimizer."""
        if self._biases is not None:
            self._biases.follow(optimizer)

    def describe(self) -> str:
        """Describe it for people; empty where it does nothing."""
        lines = []
        if self._shares_losses:
            lines.append("auxiliary losses of routers over all ranks' tokens")
        if self._biases is not None:
            lines.append(f"biases of {len(self._biases.names)} routers move by {self._biases.rate:g} in a step")
        return "\n".join(lines)


def balance_routers(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup, meter: CommMeter, device: torch.device
) -> BalancedRouters:
    """Do what ``router_balance`` and ``router_bias_update_rate`` ask, in place, before anything is sharded.

    Args:
        plan: of all pipeline stages.
        group: the ranks whose gradients are added up.

    Raises:
        ValueError: the model has no loss, or no biases, of the kind that was asked for.
    """
    knobs, sums = plan.knobs, Sums(group, meter)
    shared, others = [], []
    for module in model.modules():
        known = _globals_with_loss(module)
        if known is None:
            continue
        is_on = bool(getattr(getattr(module, "config", None), "output_router_logits", False))
        if knobs.router_balance == "global" and _is_known(known[_LOSS]):
            _share(module, known, sums)
            shared.append(is_on)
        elif is_on:
            others.append(type(module).__name__)
    if knobs.asked("router_balance") == "global" and not shared:
        raise ValueError(
            f"router_balance='global': {plan.shapes.kind} holds no Transformers model whose auxiliary loss torch-smp "
            "knows; leave it out, and compute a loss of your own with smp_core.expert_parallel.auxiliary_loss"
        )
    is_first = dist.get_rank() == 0
    if is_first and others and sums.ranks > 1 and knobs.asked("router_balance") != "rank":
        logger.warning(
            "the auxiliary loss of %s is that of each rank's own tokens, whose mean is not the loss of all tokens (%s)",
            ", ".join(others),
            knobs.why("router_balance") if knobs.router_balance == "rank" else "it has another form than most",
        )
    rate = knobs.router_bias_update_rate
    biases = None if rate is None else Biases(model, plan, rate, sums, device)
    return BalancedRouters(any(shared), biases)


def _globals_with_loss(module: nn.Module) -> dict[str, Any] | None:
    """Return where a model's forward finds its auxiliary loss; None: it has none."""
    forward: Any = inspect.unwrap(type(module).forward)
    known = getattr(forward, "__globals__", {})
    has_loss = _LOSS in known and _LOSS in forward.__code__.co_names
    return known if has_loss else None


def _is_known(loss: Any) -> bool:
    return list(inspect.signature(loss).parameters) == _PARAMETERS


def _share(module: nn.Module, known: dict[str, Any], sums: Sums) -> None:
    """Let a model's forward add up choices over ranks, in training. An evaluation has the loss of a rank's tokens."""
    if not isinstance(known[_LOSS], _Switched):
        known[_LOSS] = _Switched(known[_LOSS])
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        before = _SUMS.set(sums)
        try:
            return inner(*args, **kwargs)
        finally:
            _SUMS.reset(before)

    module.forward = forward


class Biases:
    """Biases of routers that are updated once a step.

    Attributes:
        names: of the modules that hold them.
        rate: how far one moves in a step.
    """

    def __init__(self, model: nn.Module, plan: Plan, rate: float, sums: Sums, device: torch.device) -> None:
        self.rate, self._sums, self._followed = rate, sums, False
        self._pairs: list[tuple[Any, Any]] = []  # the module with the bias, and that with the experts
        named = dict(model.named_modules())
        self.names = tuple(name for name, module in named.items() if isinstance(_bias_of(module), torch.Tensor))
        if not self.names:
            raise ValueError(
                f"router_bias_update_rate={rate}: no router of {plan.shapes.kind} has a bias ({_BIAS}); leave it out"
            )
        for name in self.names:
            bias: Any = _bias_of(named[name])
            if bias.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"router_bias_update_rate={rate}: {name}.{_BIAS} is {bias.dtype}, in which small steps are lost; "
                    "keep it in float32 (module.float() of the router's bias), or leave the rate out"
                )
            experts = named[_experts_near(name, plan, bias.numel(), rate)]
            if any(map(is_absent, experts.parameters())):
                continue  # another pipeline stage counts its choices
            setattr(experts, _COUNTS, torch.zeros(bias.numel(), dtype=torch.int64, device=device))
            experts.register_forward_pre_hook(_count, with_kwargs=True)
            self._pairs.append((named[name], experts))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update after each step of the first optimizer that is given; others step the same model in the same step."""
        if not self._followed:
            self._followed = True
            after_each_step(optimizer, self.update)

    @torch.no_grad()
    def update(self) -> None:
        """Move all biases by the choices since the last time. Collective."""
        if not self._pairs:
            return
        counts = [getattr(experts, _COUNTS) for _, experts in self._pairs]
        everyones = torch.cat(counts)
        self._sums(everyones)
        parts = everyones.split([len(count) for count in counts])
        for (router, _), count_E in zip(self._pairs, parts, strict=True):
            bias = _bias_of(router)
            # Of whole numbers: the sign is that of mean - count, exactly.
            direction_E = (count_E.sum() - count_E * len(count_E)).sign()
            bias.add_(direction_E.to(bias).view(bias.shape), alpha=self.rate)
        for count_E in counts:
            count_E.zero_()


def _bias_of(module: Any) -> Any:
    return getattr(module, _BIAS, None)


def _experts_near(name: str, plan: Plan, size: int, rate: float) -> str:
    """Return the experts that a bias is for: those in the smallest part of the model that holds both."""
    around = name
    while True:
        inside = [site for site in plan.shapes.experts if lies_in(site.name, around)]
        if inside:
            break
        if not around:
            raise ValueError(f"router_bias_update_rate={rate}: torch-smp knows no experts near {name}; leave it out")
        around = around.rpartition(".")[0]
    if len(inside) > 1 or inside[0].experts != size:
        raise ValueError(
            f"router_bias_update_rate={rate}: {name} has a bias of {size} experts, and near it are "
            f"{', '.join(f'{site.name} ({site.experts})' for site in inside)}; leave it out"
        )
    return inside[0].name


def _count(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the choices of tokens that arrive. A recomputation counts again, in each micro-batch of a step alike, and
    only the sign of what is counted is used."""
    if not (experts.training and torch.is_grad_enabled()):
        return
    chosen = (*args, *kwargs.values())[1].reshape(-1)
    getattr(experts, _COUNTS).scatter_add_(0, chosen, torch.ones_like(chosen))
