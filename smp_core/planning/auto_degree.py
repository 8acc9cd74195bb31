"""`shard_degree="auto"`: planned before a model is sharded, compared with the optimizers that are made after it.

Under Accelerate the optimizer stands beside the model in ``prepare`` and is planned with. Lightning makes optimizers in
``configure_optimizers``, from sharded parameters. To ask for them twice would run the user's code twice, with what it
does beside (schedulers, counters, parameter groups by name), so the plan is made with an assumption that the knob
`planned_optimizer` replaces, and whoever it misled is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from smp_core.agreement import of_all_ranks, require_agreement
from smp_core.config import SmpConfig
from smp_core.planning.memory import GIB, MemoryEstimate, device_memory_bytes, smallest_shard_degree
from smp_core.planning.optimizers import OPTIMIZERS, OptimizerStates, planned_states
from smp_core.topology import Topology


@dataclass(frozen=True, eq=False)
class AutoDegree:
    """The choice of a shard degree for one model.

    Attributes:
        model: not sharded yet when :meth:`settle` is called; afterwards its shapes are what they were.
        config: as it is before the choice; later conversions settle more knobs, which would change the figures.
        device: of this rank.
        units: names of the parameters of each unit (`WrapPlan.unit_parameters`).
        optimizers: of this model, where they are known already.
    """

    model: nn.Module
    topology: Topology
    config: SmpConfig
    device: torch.device
    units: Sequence[Sequence[str]]
    optimizers: Sequence[torch.optim.Optimizer] = ()

    def settle(self) -> SmpConfig:
        """The configuration with a number for `shard_degree`, and what it was planned for as `planned_optimizer`.
        Collective over the world.

        Raises:
            ValueError: the model fits no number of ranks that there are, or ranks were given different configurations.
        """
        require_agreement(self.config)  # or some ranks would plan, and others go on without
        kept = self._planned_for()
        degree, why, _ = self._chosen(kept)
        config = self.config.with_resolved("shard_degree", degree, why)
        if config.planned_optimizer == "auto" and self._memory is not None:
            config = config.with_resolved("planned_optimizer", kept.name, kept.describe())
        return config

    def missed(self, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        """A sentence for people if these optimizers, made after the choice, would have led to another one."""
        if self.config.planned_optimizer != "auto" or self.optimizers or not optimizers or self._memory is None:
            return None
        planned, kept = self._planned_for(), planned_states("auto", optimizers)
        before = self._chosen(planned)[0]
        said = f'shard_degree="auto" was planned for {planned.name} and gave {before}; {kept.describe()}: '
        try:
            degree, _, estimate = self._chosen(kept)
        except ValueError as error:
            return said + str(error)
        if degree == before:
            return None
        return (
            f"{said}{degree} would be chosen ({estimate.total / GIB:.2g} GiB on each device). Write "
            f"shard_degree={degree}, or planned_optimizer=... with one of {', '.join(OPTIMIZERS)}"
        )

    @cached_property
    def _memory(self) -> int | None:
        """Of the smallest device, so that all ranks choose alike. Collective at its first use, in :meth:`settle`."""
        everyone = of_all_ranks(device_memory_bytes(self.device, self.config))
        return min((memory for memory in everyone if memory is not None), default=None)

    def _planned_for(self) -> OptimizerStates:
        return planned_states(self.config.planned_optimizer, self.optimizers)

    def _chosen(self, kept: OptimizerStates) -> tuple[int, str, MemoryEstimate]:
        return smallest_shard_degree(
            self.model, self.topology, self.config, self._memory, units=self.units, optimizer=kept
        )
