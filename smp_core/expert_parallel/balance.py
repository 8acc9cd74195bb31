"""balance_routers(): auxiliary losses of all ranks' tokens (losses), biases that move
by their choices (biases), and the most tokens that an expert takes (capacity)."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from smp_core.comm import CommMeter
from smp_core.expert_parallel.biases import Biases
from smp_core.expert_parallel.capacity import Capacity
from smp_core.expert_parallel.losses import Sums, TotalsOfStages, add_up
from smp_core.plan import Plan, loss_over_stages, router_losses

logger = logging.getLogger("smp")


class BalancedRouters:
    """The sums and biases that balance a model's routers.

    Args:
        shares_losses: whether there are auxiliary losses, and they are those of all
            ranks' tokens.
        biases: those that are updated; None: none.
        stages: what auxiliary losses are made of that goes through pipeline stages;
            None: nothing.
        capacity: of experts; None: they take all tokens.
    """

    def __init__(
        self,
        shares_losses: bool,
        biases: Biases | None,
        stages: TotalsOfStages | None,
        capacity: Capacity | None,
    ) -> None:
        self._shares_losses = shares_losses
        self._biases = biases
        self.stages = stages
        self._capacity = capacity

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
            lines.append(
                f"biases of {len(self._biases.names)} routers move by {self._biases.rate:g} in a step"
            )
        if self._capacity is not None:
            lines.append(
                f"experts take at most {self._capacity.factor:g} times an even share of a micro-batch"
            )
        return "\n".join(lines)


def balance_routers(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup,
    meter: CommMeter,
    device: torch.device,
) -> BalancedRouters:
    """Do what ``router_balance``, ``router_bias_update_rate`` and
    ``expert_capacity_factor`` ask, in place, before experts are dealt.

    Args:
        plan: of all pipeline stages.
        group: the ranks whose gradients are added up.

    Raises:
        ValueError: the model has no loss, or no biases, of the kind that was asked for.
    """
    knobs, sums = plan.knobs, Sums(group, meter)
    is_cut = plan.stages is not None
    over_stages = loss_over_stages(model) if is_cut else None
    stages = None if over_stages is None else TotalsOfStages(over_stages, device)
    # Losses: of all ranks' tokens where that is asked for, over all stages where the
    # model is cut.
    # Whether each is in use (is_on), and the classes whose loss could not be shared.
    shared, others = [], []
    for loss in router_losses(model):
        is_shared = knobs.router_balance == "global" and loss.is_known
        if is_shared or is_cut:
            add_up(
                loss,
                sums if is_shared else None,
                stages if loss.is_on else None,
                is_cut,
            )
        if is_shared:
            shared.append(loss.is_on)
        elif loss.is_on:
            others.append(type(loss.model).__name__)
    # What could not be shared is said.
    if knobs.asked("router_balance") == "global" and not shared:
        raise ValueError(
            f"router_balance='global': {plan.shapes.kind} holds no Transformers model whose auxiliary loss torch-smp "
            "knows; leave it out, and compute a loss of your own with smp_core.expert_parallel.auxiliary_loss"
        )
    is_first = dist.get_rank() == 0
    if (
        is_first
        and others
        and sums.ranks > 1
        and knobs.asked("router_balance") != "rank"
    ):
        logger.warning(
            "the auxiliary loss of %s is that of each rank's own tokens, whose mean is not the loss of all tokens (%s)",
            ", ".join(others),
            knobs.why("router_balance")
            if knobs.router_balance == "rank"
            else "it has another form than most",
        )
    # Biases count choices in hooks of the experts, which are registered here.
    rate = knobs.router_bias_update_rate
    biases = None if rate is None else Biases(model, plan, rate, sums, device)
    # Capacity, after biases have counted all choices.
    capacity = (
        None
        if knobs.expert_capacity_factor is None
        else Capacity(knobs.expert_capacity_factor, sums)
    )
    if capacity is not None:
        capacity.limit(model, plan, device)
    return BalancedRouters(any(shared), biases, stages, capacity)
