"""Shapes and Cluster: the facts that decisions use.

Of a model, names, shapes and dtypes, and which modules its units are: no tensors, no
modules; the same on every rank. Of the machines, nodes, devices, memory, links, and
what this torch can do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from smp_core.cluster import LINKS_VARIABLE, Links, of_all_ranks
from smp_core.config import DEFAULTS, SmpConfig
from smp_core.plan.chain.chain import Chain
from smp_core.plan.checkpointed import (
    CheckpointedModule,
    checkpoints_itself,
    plan_checkpointing,
)
from smp_core.plan.experts import ExpertShape, experts_of
from smp_core.plan.units import Entry, PlannedUnit, WrapPlan, plan_units
from smp_core.topology import Topology
from smp_core.torch_facts import FSDP_METHODS, fsdp_has

GIB = 2**30

_ABOUT_EXPERTS = (
    "expert_parallel_degree",
    "expert_capacity_factor",
    "router_bias_update_rate",
)


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: its first in the model.
        shape: of the whole tensor.
        split_dim: in which tensor ranks split it, if they divide it; None: each holds
            all of it. A trace of split layers knows; without one, matrices are taken to
            be split.
        fp8_dim: that of the inputs, of a weight that FP8 layers would multiply by;
            None: it is none, or no trace of the model is known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    split_dim: int | None = None
    fp8_dim: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_divided(self) -> bool:
        """Return whether ranks hold rows of it; 0-d and empty parameters are
        replicated."""
        return self.elements > 0 and bool(self.shape)

    def over(self, degree: int) -> ParameterShape:
        """Return what one of so many tensor ranks holds of it."""
        dim = self.split_dim
        if dim is None or self.shape[dim] % degree:
            return self
        return replace(
            self,
            shape=(
                *self.shape[:dim],
                self.shape[dim] // degree,
                *self.shape[dim + 1 :],
            ),
        )


@dataclass(frozen=True)
class Shapes:
    """A model as :func:`smp_core.engine.decide.decide` sees it.

    Attributes:
        kind: the model's class, for messages.
        parameters: each once, in the model's order.
        units: which modules become FSDP units, and what stays replicated.
        checkpointed: modules that ``activations.checkpoint`` names.
        units_recomputed: names of units inside a checkpointed module, by the name of
            that module.
        checkpoints_itself: the model has recomputation of its own switched on.
        on_meta: something of it is on the meta device.
        buffer_bytes: of all buffers.
        buffers: name, shape and dtype of each in words, in the model's order.
        aliases: further names of parameters -> their first name.
        chain: the blocks in the order they run in; recorded where there are pipeline
            stages.
        experts: the modules that hold experts; looked for where a knob is about them.
    """

    kind: str
    parameters: tuple[ParameterShape, ...]
    units: WrapPlan
    checkpointed: tuple[CheckpointedModule, ...] = ()
    checkpoints_itself: bool = False
    on_meta: bool = False
    buffer_bytes: int = 0
    buffers: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    chain: Chain | None = None
    experts: tuple[ExpertShape, ...] = ()

    def __post_init__(self) -> None:
        # A rule may name parameters by any of their names.
        for unit in self.units.units:
            for name in unit.parameters:
                if self.aliases.get(name, name) not in self.by_name:
                    raise ValueError(
                        f"units name the parameter {name!r}, which {self.kind} does not have"
                    )

    @classmethod
    def of(cls, model: nn.Module, asked: SmpConfig, entry: Entry = "forward") -> Shapes:
        """Read a model that is not sharded yet; its tensors may be on the meta device.

        Args:
            asked: ``units`` and ``activations.checkpoint`` choose modules.
            entry: what a step calls (:func:`smp_core.plan.units.plan_units`).

        Raises:
            ValueError: a rule of units or checkpointing that matches nothing, a model
                without parameters.
        """
        units = plan_units(model, asked, entry=entry)
        is_about_experts = any(
            getattr(asked, knob) != getattr(DEFAULTS, knob) for knob in _ABOUT_EXPERTS
        )
        experts = experts_of(model) if is_about_experts else ()
        # What is recomputed is a choice about modules, and so decided with the units.
        setting = asked.activations.checkpoint
        if setting == "none":
            return cls.with_units(model, units, experts)
        if checkpoints_itself(model):
            return cls.with_units(model, units, experts, checkpoints_itself=True)
        checkpointed = plan_checkpointing(model, units.blocks, setting)
        return cls.with_units(model, units, experts, tuple(checkpointed))

    @classmethod
    def with_units(
        cls,
        model: nn.Module,
        units: WrapPlan,
        experts: tuple[ExpertShape, ...] = (),
        checkpointed: Sequence[CheckpointedModule] = (),
        checkpoints_itself: bool = False,
    ) -> Shapes:
        """Read a model whose units are known.

        Args:
            experts, checkpointed, checkpoints_itself: as the attributes.

        Raises:
            ValueError: torchao's quantised weights.
        """
        # Tied parameters count once, by their first name.
        first: dict[nn.Parameter, str] = {}
        aliases: dict[str, str] = {}
        parameters: list[ParameterShape] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in first:
                aliases[name] = first[parameter]
                continue
            first[parameter] = name
            # A tensor of several tensors, which cannot be sharded or sent to other
            # ranks, is refused before anything is decided about it.
            kind = type(parameter)
            if kind.__module__.split(".")[0] == "torchao":
                raise ValueError(
                    f"{name} is a {kind.__name__} of torchao, and quantised weights can be neither sharded nor sent "
                    "between ranks; prepare the model with its weights in bfloat16 and write frozen_storage='int4' (or "
                    "'int8'), which stores and gathers frozen ones as codes, or quantise what was trained"
                )
            # A matrix is taken to be split by rows.
            rows = parameter.ndim - 2 if parameter.ndim > 1 else None
            shape = tuple(parameter.shape)
            trained = parameter.requires_grad
            parameters.append(
                ParameterShape(name, shape, parameter.dtype, trained, rows)
            )
        buffers = tuple(
            f"{name} {list(buffer.shape)} {buffer.dtype}"
            for name, buffer in model.named_buffers()
        )
        buffer_bytes = sum(
            buffer.numel() * buffer.itemsize for buffer in model.buffers()
        )
        return cls(
            type(model).__name__,
            tuple(parameters),
            units,
            tuple(checkpointed),
            checkpoints_itself,
            on_meta=any(
                tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]
            ),
            buffer_bytes=buffer_bytes,
            buffers=buffers,
            aliases=aliases,
            experts=experts,
        )

    @cached_property
    def by_name(self) -> dict[str, ParameterShape]:
        return {parameter.name: parameter for parameter in self.parameters}

    def over(self, degree: int) -> Shapes:
        """Return what one of so many tensor ranks holds."""
        if degree == 1:
            return self
        if degree not in self._over:
            held = tuple(parameter.over(degree) for parameter in self.parameters)
            self._over[degree] = replace(self, parameters=held)
        return self._over[degree]

    @cached_property
    def _over(self) -> dict[int, Shapes]:
        return {}

    @cached_property
    def expert_names(self) -> frozenset[str]:
        """Names of the modules that hold experts."""
        return frozenset(site.name for site in self.experts)

    def with_experts_apart(self) -> Shapes:
        """Return the shapes with units of experts as :func:`plan_units` makes them
        where ranks divide these."""
        units: list[PlannedUnit] = []
        # Each unit is cut into one for each site of experts in it, and the rest.
        for unit in self.units.units:
            own: dict[str, list[str]] = {unit.name: []}
            for name in unit.parameters:
                site = name.rpartition(".")[0]
                own.setdefault(
                    site if site in self.expert_names else unit.name, []
                ).append(name)
            inside = [
                PlannedUnit(site, tuple(names), False)
                for site, names in own.items()
                if site != unit.name
            ]
            units += [*inside, replace(unit, parameters=tuple(own[unit.name]))]
        return replace(self, units=replace(self.units, units=tuple(units)))

    @cached_property
    def first_trained(self) -> ParameterShape:
        """The first parameter that is trained; of a frozen model the first one."""
        return next(
            (each for each in self.parameters if each.trainable), self.parameters[0]
        )

    @cached_property
    def elements(self) -> int:
        """Count those of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def unit_elements(self) -> list[int]:
        """Elements of each unit that has parameters."""
        sizes = []
        for unit in self.units.units:
            size = sum(self.of_name(name).elements for name in unit.parameters)
            if size:
                sizes.append(size)
        return sizes

    @cached_property
    def alike(self) -> list[tuple[ParameterShape, bool, int]]:
        """Parameters of one shape, dtype and kind together: the first of them, whether
        they are of a unit, how many. A planner asks for their bytes thousands of
        times."""
        # Names alone differ between alike parameters.
        of_units = {name for unit in self.units.units for name in unit.parameters}
        found: dict[tuple[Any, ...], list[ParameterShape]] = {}
        for each in self.parameters:
            kind = (each.shape, each.dtype, each.trainable, each.name in of_units)
            found.setdefault(kind, []).append(each)
        return [(same[0], kind[-1], len(same)) for kind, same in found.items()]

    @cached_property
    def alike_units(self) -> list[tuple[bool, tuple[ParameterShape, ...], int]]:
        """Units whose parameters are alike: whether they are roots, what one of them
        gathers, how many. A tied parameter is gathered once, with the first unit that
        it is in; 0-d ones are not gathered."""
        counted: set[str] = set()
        found: dict[tuple[Any, ...], list[tuple[ParameterShape, ...]]] = {}
        # Roots last: they hold what no other unit holds.
        for unit in sorted(self.units.units, key=lambda unit: unit.is_root):
            own = [
                each
                for each in map(self.of_name, unit.parameters)
                if each.name not in counted and each.shape
            ]
            counted.update(each.name for each in own)
            kind = (
                unit.is_root,
                tuple((each.shape, each.dtype, each.fp8_dim) for each in own),
            )
            found.setdefault(kind, []).append(tuple(own))
        return [(kind[0], same[0], len(same)) for kind, same in found.items()]

    @cached_property
    def stages(self) -> dict[Any, Any]:
        """Figures of pipeline stages of this model: a planner asks for the same ones
        thousands of times (:mod:`smp_core.pipeline.rules`)."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter, which most others have too."""
        return next((parameter.dtype for parameter in self.parameters), torch.float32)

    def of_name(self, name: str) -> ParameterShape:
        return self.by_name[self.aliases.get(name, name)]


@dataclass(frozen=True)
class Cluster:
    """The machines of one run, the same on every rank but for `host_memory`.

    Attributes:
        topology: nodes and their ranks.
        device: type of the devices: "cpu", "cuda".
        device_memory: bytes of the smallest device; None: there is none to plan for.
        host_memory: bytes that this rank's node has available now.
        links: measured on a cluster of this shape.
        fsdp_methods: those named in `smp_core.torch_facts.compat.FSDP_METHODS` that
            this torch has.
    """

    topology: Topology
    device: str = "cpu"
    device_memory: int | None = None
    host_memory: int = 0
    links: Links | None = None
    fsdp_methods: frozenset[str] = frozenset(FSDP_METHODS.values())

    def of_stage(self, stages: int) -> Cluster:
        """Return the machines of one pipeline stage, as decisions about its ranks see
        them. Links were measured with all nodes at work, and are left out where a stage
        has some of them."""
        if stages == 1:
            return self
        return replace(self, topology=self.topology.of_stage(stages), links=None)

    def of_groups(self, degree: int) -> Cluster:
        """Return the machines with every ``degree`` neighbours for one rank, as
        decisions about partition groups see them. Links were measured between ranks,
        and are left out where several count as one."""
        if degree == 1:
            return self
        return replace(self, topology=self.topology.of_groups(degree), links=None)

    @classmethod
    def observer(
        cls, topology: Topology, device: torch.device
    ) -> Callable[[], Cluster]:
        """Ask all ranks for the memory of their devices: collective. The function that
        comes back reads local files only, and may raise `ValueError` (a file of links
        that is none)."""
        # Asked once, when all ranks are here; decisions then need no collective.
        own: int | None = None
        if device.type == "cuda":
            own = torch.cuda.get_device_properties(device).total_memory
        sizes = of_all_ranks(own)
        smallest = min((size for size in sizes if size is not None), default=None)

        def observe() -> Cluster:
            return cls(
                topology,
                device.type,
                smallest,
                available_host_bytes(),
                Links.stored(topology) if LINKS_VARIABLE in os.environ else None,
                frozenset(filter(fsdp_has, FSDP_METHODS.values())),
            )

        return observe


def available_host_bytes() -> int:
    """Return what the machine could give to new allocations now (Linux: MemAvailable;
    elsewhere all memory there is)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
