"""Trainings with experts on several ranks, beside those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.checkpoint.live_state import full_state_dict
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.checkpoint.reader import load_checkpoint
from smp_core.checkpoint.writer import save_checkpoint
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.plan import Cluster, Plan, Shapes
from smp_core.topology import Topology
from tests.core.expert_parallel import models as models  # makes its models known
from tests.core.expert_parallel.models import EXPERTS
from tests.core.sharding.prepared_runs import difference, weights
from tests.core.tensor_parallel.model_cases import (
    STEPS,
    Wide,
    alone,
    batches,
    build,
    differences,
    everything,
    full,
    loss_of,
    optimizer_of,
    together,
    trained,
    wide_when_computed_again,
)
from tests.harness import run_ranks

RATE, BIAS = 0.05, "e_score_correction_bias"
# Of the tiny models: features, experts of a token, bytes of a number.
HIDDEN, CHOICES, WIDE = 32, 2, 8


@dataclass(frozen=True)
class Case:
    """What one training over ranks is like; the world is shard x replicas."""

    kind: str
    shard: int = 4
    expert: int | str = 2
    micro_batches: int = 1
    knobs: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS

    def parallel(
        self, device: torch.device | None = None, **more: Any
    ) -> ParallelModel:
        delayed = bool(dict(self.knobs).get("delayed_init"))
        model = build(self.kind, seed=dist.get_rank(), delayed=delayed)
        if "activations" in dict(self.knobs):
            model = wide_when_computed_again(model)
        knobs = {
            "shard_degree": self.shard,
            "expert_parallel_degree": self.expert,
            **dict(self.knobs),
            **more,
        }
        return parallelize(model, SmpConfig(**knobs), device=device or "cpu")


def plan_of(model: nn.Module, world: int = 8, per_node: int = 4, **knobs: Any) -> Plan:
    asked = SmpConfig(**{"shard_degree": 8, **knobs})
    return decide(
        Shapes.of(model, asked),
        asked,
        Cluster(Topology.uniform(world, per_node), "cpu"),
    )


def problems(cases: list[Case]) -> list[list[str]]:
    """What is further off than 1e-12 from one process, by case; run by each rank."""
    found = []
    for case in cases:
        seen = together(case)  # type: ignore[arg-type]
        expected = alone(
            case.kind,
            case.micro_batches,
            case.steps,
            delayed="delayed_init" in dict(case.knobs),
        )
        found.append([f"{case}: {line}" for line in differences(seen, expected)])
    return found


def assert_like_one_process(cases: list[Case], world: int = 4) -> None:
    for found in run_ranks(problems, world, cases, ranks_per_node=2, timeout=900):
        assert [line for lines in found for line in lines] == []


def beside_experts(
    make: Callable[[nn.Module], torch.optim.Optimizer], shard: int, expert: int
) -> float:
    """How far an optimizer's weights of a Mixtral are off, from those of one process,
    where ranks divide experts; run by each rank."""
    found = []
    for knobs in ({}, {"shard_degree": shard, "expert_parallel_degree": expert}):
        model: Any = build("Mixtral")
        parallel = parallelize(model, SmpConfig(**knobs)) if knobs else None
        optimizer = make(model)
        if parallel is not None:
            parallel.prepare_optimizer(optimizer)
        for (tokens,) in batches(1, 3):
            optimizer.zero_grad()
            own = (
                tokens
                if parallel is None
                else tokens.chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
            )
            loss_of(model, own).backward()
            optimizer.step()
        found.append(weights(model))
    return difference(found[1], found[0])


def saved_and_loaded(folder: Path, cases: Sequence[Case]) -> list[str]:
    """Save in each layout, load in each; return what is not equal to the bit."""
    problems = []
    for number, case in enumerate(cases):
        parallel, optimizer = trained(case, 2)  # type: ignore[arg-type]
        place = folder / f"{number}"
        save_checkpoint(
            place,
            {
                "model": parallel.model_state(),
                "optimizer": named_optimizer_state(parallel.module, optimizer),
            },
        )
        expected = everything(parallel, optimizer)
        whole = full_state_dict(parallel.module, rank0_only=False)
        problems += [
            f"full {name}"
            for name, value in whole.items()
            if not torch.equal(value, expected[name])
        ]
        for other in cases:
            parallel, optimizer = trained(other, 1)  # type: ignore[arg-type]
            states: dict[str, Any] = {"model": parallel.model_state()}
            load_checkpoint(place, states)
            parallel.take_model_state(states["model"])
            load_named_optimizer_state(
                place, ("optimizer",), parallel.module, optimizer
            )
            parallel.reshard()
            found = everything(parallel, optimizer)
            assert found.keys() == expected.keys()
            differing = [
                name
                for name, value in found.items()
                if not torch.equal(value, expected[name])
            ]
            problems += [f"{case} -> {other}: {name}" for name in differing]
    return problems


def with_biases(micro_batches: int, steps: int) -> dict[str, torch.Tensor]:
    """Weights and biases of one process that counts what its routers return."""
    model: Any = build("DeepseekV3")
    optimizer = optimizer_of(model)
    chosen: dict[str, list[torch.Tensor]] = {}
    gates = {
        name: module for name, module in model.named_modules() if hasattr(module, BIAS)
    }
    for name, gate in gates.items():
        chosen[name] = []
        gate.register_forward_hook(
            lambda _, args, output, kept=chosen[name]: kept.append(output[2])
        )
    for micro in batches(micro_batches, steps):
        for tokens in micro:
            with Wide():
                (loss_of(model, tokens) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for name, gate in gates.items():
            counts = (
                torch.cat([each.flatten() for each in chosen[name]])
                .bincount(minlength=EXPERTS)
                .double()
            )
            getattr(gate, BIAS).add_(RATE * (counts.mean() - counts).sign())
            chosen[name].clear()
    return {name: full(value) for name, value in model.state_dict().items()}


def sent(cases: list[Case]) -> list[dict[str, Any]]:
    """One step of each case: the bytes that this rank sent, the choices of all ranks by
    layer, the size of a unit of experts while it is gathered."""
    found = []
    for case in cases:
        parallel = case.parallel()
        chosen: list[torch.Tensor] = []
        sites = [
            parallel.module.get_submodule(site.name)
            for site in parallel.plan.shapes.experts
        ]
        for site in sites:
            site.register_forward_pre_hook(functools.partial(_keep, chosen))
        tokens = batches(1, 1)[0, 0].chunk(parallel.mesh.data_size)[
            parallel.mesh.data_rank
        ]
        with Wide():
            loss_of(parallel.module, tokens).backward()
        parallel.window.close()
        parallel.meter.close_step()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, chosen[: len(sites)])
        units = [unit for unit in parallel.units if unit.name.endswith("experts")]
        gathered = [sum(each.numel() for each in unit.unsharded()) for unit in units]
        found.append(
            {**parallel.meter.per_step(), "choices": everyone, "gathered": gathered}
        )
    return found


def _keep(chosen: list[torch.Tensor], _: Any, args: tuple[torch.Tensor, ...]) -> None:
    chosen.append(args[1])


def bytes_of(figures: dict[str, Any], kind: str) -> dict[str, float]:
    return {
        link: figures.get(f"expert_{kind}/{link}_bytes", 0.0)
        for link in ("intra", "inter")
    }
