"""Memory of the model states, and the smallest shard degree at which they fit the device.

At shard degree p a device holds ceil(rows / p) x row size elements of a parameter (FSDP2 pads uneven rows), and as many
of its gradient and of each optimizer state; on top come the parameters that are gathered at one time. MiCS
(arXiv 2205.00119) and ZeRO (arXiv 1910.02054, section 3) do the same arithmetic: the smallest partition group that fits
moves the fewest bytes over the slow links. Only shapes and dtypes are read: a model on the meta device will do.

Not counted, and left to `memory_headroom`: activations, temporaries of operators and collectives, the CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_core.planning.optimizers import OPTIMIZERS, OptimizerStates

if TYPE_CHECKING:
    from rich.table import Table

    from smp_core.config import SmpConfig
    from smp_core.topology import Topology

GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at one shard degree.

    Args:
        shard_degree: ranks that hold one copy of the model states together.
        parameters: parameter shards, in the model's own dtypes.
        gradients: gradient shards of trainable parameters, in the same dtypes.
        partial_sums: sums of the accumulation window, where gradients are reduced in another dtype than they have, or
            held whole (`reduce_every_micro_batch=False`).
        optimizer_states: of trainable parameters, in their dtypes; with `optimizer_shard="world"` float32 masters and
            their gradients too (with `state_offload="optimizer"` only these).
        buffers: whole on every device.
        gathered: the root unit and twice the largest other unit (the one that computes and the one fetched ahead), in
            the dtype of gathered parameters; all units if they stay gathered.
        budget: device memory less headroom, None when it is not known.
    """

    shard_degree: int
    parameters: int
    gradients: int
    partial_sums: int
    optimizer_states: int
    buffers: int
    gathered: int
    budget: int | None = None

    @property
    def model_states(self) -> int:
        """Bytes that stay for the whole step."""
        return self.parameters + self.gradients + self.partial_sums + self.optimizer_states + self.buffers

    @property
    def total(self) -> int:
        return self.model_states + self.gathered

    @property
    def fits(self) -> bool:
        return self.budget is None or self.total <= self.budget


def model_state_bytes(
    model: nn.Module,
    config: SmpConfig,
    optimizer: str | OptimizerStates = "adamw",
    *,
    shard_degree: int = 1,
    world_size: int = 1,
    units: Iterable[Iterable[str]] = (),
) -> MemoryEstimate:
    """What `model` holds on one device at `shard_degree`, without asking what the device has.

    Args:
        model: real, sharded or on the meta device.
        config: `param_dtype`, `reduce_dtype`, `reshard_after_forward`, `reduce_every_micro_batch`, `optimizer_shard`
            and `state_offload` count.
        optimizer: one of `smp_core.planning.optimizers.OPTIMIZERS`, or what an optimizer keeps.
        shard_degree: ranks of a partition group.
        world_size: all ranks; `optimizer_shard="world"` divides optimizer states and float32 masters by them.
        units: names of the parameters of each wrapped unit except the root, which owns those named nowhere.

    Raises:
        ValueError: unknown optimizer, or a unit names a parameter that the model does not have.
    """
    kept = _states(optimizer)
    parameters = gradients = partial_sums = states = 0
    for parameter in model.parameters():
        elements = _padded_rows(parameter, shard_degree)
        held = elements * _stored_dtype(parameter, config).itemsize
        # state_offload="all" leaves what FSDP2 shards on the host; sums of gradients are on the device all the same.
        offloaded = config.state_offload == "all" and parameter.ndim > 0
        parameters += 0 if offloaded else held
        if parameter.requires_grad:
            gradients += 0 if offloaded else held
            if config.optimizer_shard == "world" and world_size > shard_degree and parameter.ndim:
                # Masters and their gradients are float32 where parameters are half precision. The sums of the window
                # lie where gradients would.
                part = -(-elements * shard_degree // world_size)
                tensors = 1 if config.state_offload else 2 + kept.whole
                states += part * max(parameter.itemsize, 4) * tensors
            elif config.state_offload is None:
                states += kept.whole * elements * parameter.itemsize
            reduced_in = _reduce_dtype(parameter, config)
            if not config.reduce_every_micro_batch and shard_degree > 1 and parameter.ndim:
                partial_sums += parameter.numel() * reduced_in.itemsize
            elif offloaded or reduced_in != _stored_dtype(parameter, config):
                partial_sums += elements * reduced_in.itemsize
    return MemoryEstimate(
        shard_degree=shard_degree,
        parameters=parameters,
        gradients=gradients,
        partial_sums=partial_sums,
        optimizer_states=states,
        buffers=sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()),
        gathered=_gathered_bytes(model, config, shard_degree, units),
    )


def _states(optimizer: str | OptimizerStates) -> OptimizerStates:
    if isinstance(optimizer, OptimizerStates):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is not known to the planner; allowed: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def assumptions(config: SmpConfig, optimizer: str | OptimizerStates = "adamw") -> str:
    """What an estimate takes for granted, for tables."""
    where = {None: "on the device", "optimizer": "on the host", "all": "on the host, as parameters and gradients are"}
    return f"{_states(optimizer).describe()}, {where[config.state_offload]}; activations come on top"


def device_memory_bytes(device: torch.device, config: SmpConfig) -> int | None:
    """Memory to plan for: `device_memory_gib`, or what a CUDA device has; None: there is none (CPU)."""
    if config.device_memory_gib is not None:
        return int(config.device_memory_gib * GIB)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def smallest_shard_degree(
    model: nn.Module,
    topology: Topology,
    config: SmpConfig,
    device_memory_bytes: int | None,
    *,
    units: Sequence[Iterable[str]] = (),
    optimizer: str | OptimizerStates = "adamw",
) -> tuple[int, str, MemoryEstimate]:
    """The smallest allowed shard degree whose model states and gathered units fit beside the headroom.

    Allowed are the degrees of `topology.allowed_shard_degrees()` (parts of a node, then whole nodes) that hold whole
    context groups.

    Args:
        device_memory_bytes: memory of one device; `config.device_memory_gib` overrides it. None: there is none to plan
            for (CPU), and the ranks of a node are taken.
        units, optimizer: as in `model_state_bytes`.

    Returns:
        (degree, why, estimate at that degree).

    Raises:
        ValueError: too big even for all ranks; gives the figures and what to change.
    """
    estimates = _estimates(model, topology, config, device_memory_bytes, units, optimizer)
    memory = _device_memory(config, device_memory_bytes)
    if memory is None:
        chosen = next((e for e in estimates if e.shard_degree >= topology.ranks_per_node), estimates[-1])
        return chosen.shard_degree, "no device memory to plan for (CPU): the ranks of a node", chosen
    share = f"{_gib(_budget(memory, config))} GiB (memory_headroom={config.memory_headroom:g} of {_gib(memory)} GiB)"
    smaller: MemoryEstimate | None = None
    for estimate in estimates:
        if estimate.fits:
            why = f"needs {_gib(estimate.total)} GiB of {share}"
            if smaller is not None:
                why += f"; degree {smaller.shard_degree} would need {_gib(smaller.total)} GiB"
            return estimate.shard_degree, f"{why}; {assumptions(config, optimizer)}", estimate
        smaller = estimate
    raise ValueError(_does_not_fit(estimates[-1], share, topology))


def plan_table(
    model: nn.Module,
    topology: Topology,
    config: SmpConfig,
    device_memory_bytes: int | None,
    *,
    units: Sequence[Iterable[str]] = (),
    optimizer: str | OptimizerStates = "adamw",
) -> Table:
    """The estimate at every allowed degree, the smallest that fits marked; arguments as in `smallest_shard_degree`."""
    from rich.table import Table

    memory = _device_memory(config, device_memory_bytes)
    count = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{count / 1e9:.2f} billion parameters on {topology.num_nodes} x {topology.ranks_per_node} ranks, "
        f"{_states(optimizer).name}"
    )
    if memory is not None:
        title += f", budget {_gib(_budget(memory, config))} of {_gib(memory)} GiB"
    table = Table(title=title, caption=f"GiB per device; {assumptions(config, optimizer)}")
    columns = ["parameters", "gradients", "optimizer", "gathered", "total"]
    for heading in ["shard degree", "nodes", "replicas", *columns, "fits"]:
        table.add_column(heading, justify="right")
    chosen = False
    for estimate in _estimates(model, topology, config, device_memory_bytes, units, optimizer):
        verdict = "" if memory is None else ("yes" if estimate.fits else "no")
        if memory is not None and estimate.fits and not chosen:
            verdict, chosen = "yes (auto)", True
        degree = estimate.shard_degree
        table.add_row(
            str(degree),
            str(max(1, degree // topology.ranks_per_node)),
            str(topology.world_size // degree),
            _gib(estimate.parameters + estimate.buffers),
            _gib(estimate.gradients + estimate.partial_sums),
            _gib(estimate.optimizer_states),
            _gib(estimate.gathered),
            _gib(estimate.total),
            verdict,
            style="bold" if verdict == "yes (auto)" else None,
        )
    return table


def _estimates(
    model: nn.Module,
    topology: Topology,
    config: SmpConfig,
    device_memory_bytes: int | None,
    units: Sequence[Iterable[str]],
    optimizer: str | OptimizerStates,
) -> list[MemoryEstimate]:
    context = config.context_parallel_degree
    degrees = [degree for degree in topology.allowed_shard_degrees() if degree % context == 0]
    if not degrees:
        raise ValueError(
            f"context_parallel_degree={context} fits no partition group of {topology.num_nodes} x "
            f"{topology.ranks_per_node} ranks; it must divide one of: "
            f"{', '.join(map(str, topology.allowed_shard_degrees()))}"
        )
    memory = _device_memory(config, device_memory_bytes)
    budget = None if memory is None else _budget(memory, config)
    unit_names = [list(names) for names in units]
    return [
        replace(
            model_state_bytes(
                model, config, optimizer, shard_degree=degree, world_size=topology.world_size, units=unit_names
            ),
            budget=budget,
        )
        for degree in degrees
    ]


def _device_memory(config: SmpConfig, device_memory_bytes: int | None) -> int | None:
    return device_memory_bytes if config.device_memory_gib is None else int(config.device_memory_gib * GIB)


def _budget(device_memory_bytes: int, config: SmpConfig) -> int:
    return int(device_memory_bytes * (1 - config.memory_headroom))


def _padded_rows(parameter: torch.Tensor, shard_degree: int) -> int:
    """Elements of one rank's shard; 0-d parameters are whole on every rank."""
    if parameter.ndim == 0 or parameter.numel() == 0:
        return parameter.numel()
    rows = parameter.shape[0]
    return -(-rows // shard_degree) * (parameter.numel() // rows)


def _gathered_bytes(model: nn.Module, config: SmpConfig, shard_degree: int, units: Iterable[Iterable[str]]) -> int:
    named = dict(model.named_parameters(remove_duplicate=False))
    counted: set[nn.Parameter] = set()  # by identity: a tied parameter is gathered once, with the first unit it is in

    def size(names: Iterable[str]) -> int:
        total = 0
        for name in names:
            if name not in named:
                raise ValueError(f"units name the parameter {name!r}, which {type(model).__name__} does not have")
            parameter = named[name]
            if parameter not in counted and parameter.ndim > 0:
                counted.add(parameter)
                total += (
                    _padded_rows(parameter, shard_degree) * shard_degree * _gather_dtype(parameter, config).itemsize
                )
        return total

    sizes = [size(names) for names in units]
    root = size(named)
    if config.reshard_after_forward is False:
        return root + sum(sizes)
    # With a single unit beside the root there is none to fetch ahead
    return root + sum(sorted(sizes)[-1:] * min(2, len(sizes)))


def _stored_dtype(parameter: torch.Tensor, config: SmpConfig) -> torch.dtype:
    """With ``optimizer_shard="world"`` float32 weights are masters and what is stored is what is computed with."""
    gathered = _gather_dtype(parameter, config)
    masters = config.optimizer_shard == "world" and config.fp8 is None and config.state_offload is None
    masters = masters and parameter.requires_grad and parameter.ndim > 0
    return gathered if masters and parameter.dtype == torch.float32 and gathered.itemsize < 4 else parameter.dtype


def _gather_dtype(parameter: torch.Tensor, config: SmpConfig) -> torch.dtype:
    return _named_dtype(config.param_dtype, parameter.dtype)


def _reduce_dtype(parameter: torch.Tensor, config: SmpConfig) -> torch.dtype:
    gathered = _gather_dtype(parameter, config)
    if config.reduce_dtype == "auto":
        return torch.float32 if gathered in (torch.float16, torch.bfloat16) else gathered
    return _named_dtype(config.reduce_dtype, gathered)


def _named_dtype(name: str | None, own: torch.dtype) -> torch.dtype:
    return own if name in (None, "auto") or not own.is_floating_point else getattr(torch, str(name))


def _does_not_fit(largest: MemoryEstimate, share: str, topology: Topology) -> str:
    assert largest.budget is not None
    message = (
        f"shard_degree='auto': the model needs {_gib(largest.total)} GiB per device even sharded over "
        f"{largest.shard_degree} ranks (states {_gib(largest.model_states)}, gathered units {_gib(largest.gathered)}), "
        f"but only {share} may be used. "
    )
    room = largest.budget - largest.gathered - largest.buffers
    if room <= 0:
        return message + "More ranks do not help, the gathered units are too large: wrap smaller modules (wrap=...)."
    spread = (largest.model_states - largest.buffers) * largest.shard_degree
    nodes = -(-spread // (room * topology.ranks_per_node))
    return message + (
        f"Use about {nodes} nodes of {topology.ranks_per_node} ranks, a smaller model, parameters in bfloat16, a lower "
        "memory_headroom, or set shard_degree yourself to try all the same."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2g}" if nbytes < GIB else f"{nbytes / GIB:.1f}"
