"""Parameters that several layers share, in half precision, with float32 weights or
float32 masters, at every layout.

Models, what they share, units, dtypes and knobs are drawn. One process computes with a
copy of the model in half precision, and steps float32 weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.core.scenarios import parallel_model
from tests.core.sharding.optimizer_shard_runs import momentum
from tests.core.sharding.prepared_runs import whole
from tests.harness import run_ranks

WIDTH, STEPS, MICRO = 8, 3, 2
TIES = ("weight", "bias", "norm", "module", "block", "root", "root with bias", "scale")


class Part(nn.Module):
    """A block that reads a parameter of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Sharing(nn.Module):
    def __init__(self, ties: Sequence[str], recomputes: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Part() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH, bias="root with bias" in ties)
        self.recomputes = recomputes
        first, second, third = self.blocks
        if "weight" in ties:
            second.up.weight = first.up.weight
        if "bias" in ties:
            third.up.bias = first.up.bias
        if "norm" in ties:
            third.norm.weight = second.norm.weight
            second.gain = first.gain
        if "module" in ties:
            third.down = first.down
        if "block" in ties:
            self.blocks.append(first)
        if "root" in ties or "root with bias" in ties:
            self.head.weight = self.enter.weight
        if "scale" in ties:
            second.scale = first.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recomputes
                else block(x)
            )
        return self.head(torch.tanh(x))


class Case:
    """What case ``number`` draws."""

    def __init__(self, number: int, ranks: int) -> None:
        draw = random.Random(number)
        self.ties = sorted(draw.sample(TIES, draw.randint(1, 3)))
        self.recomputes = draw.random() < 0.25
        self.half = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        self.masters_of_half = draw.random() < 0.5
        name = str(self.half).removeprefix("torch.")
        dtypes = (
            {"master_dtype": "float32"}
            if self.masters_of_half
            else {"param_dtype": name}
        )
        modules = draw.choice(
            [["Linear"], ["Part"], ["Linear", "Part"], ["LayerNorm", "Part"]]
        )
        degrees = [degree for degree in (1, 2, 4) if degree <= ranks]
        self.knobs = {
            "shard_degree": draw.choice(degrees),
            "units": {"modules": modules},
            **dtypes,
        }
        if not self.recomputes and draw.random() < 0.4:
            self.knobs["activations"] = {
                "checkpoint": {"blocks.?": draw.choice(["full", "selective"])}
            }
        states = [
            {"optimizer_shard": "world"},
            {"state_offload": "all"},
            {"state_offload": "optimizer"},
        ]
        self.knobs.update(draw.choice([{}, {}, *states]))
        if draw.random() < 0.3:
            self.knobs["keep_between_micro_batches"] = draw.choice(
                ["parameters", "gradients"]
            )
        self.frozen = draw.choice(["", "", "enter", "blocks.1.up"])

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        made = Sharing(self.ties, self.recomputes)
        if self.masters_of_half:
            made.to(self.half)
        if self.frozen:
            made.get_submodule(self.frozen).requires_grad_(False)
        return made

    def loss(self, model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        x = torch.randn(3, WIDTH, generator=generator).to(self.half)
        return model(x).float().square().mean() / MICRO

    def together(self) -> dict[str, torch.Tensor]:
        parallel = parallel_model(self.model(), **self.knobs)
        optimizer = momentum(parallel.module.parameters())
        parallel.prepare_optimizer(optimizer)
        for step in range(STEPS):
            for micro in range(MICRO):
                with parallel.window.accumulate(micro < MICRO - 1):
                    self.loss(parallel.module, step, micro, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = parallel.optimizer_state(optimizer)["state"]
        state = parallel.model_state()
        return {
            name: whole(states.get(name, {}).get("smp_master", value)).float()
            for name, value in state.items()
        }

    def alone(self, ranks: int) -> dict[str, torch.Tensor]:
        """Computes in half precision, with sums and steps in float32."""
        masters = self.model().float()
        optimizer = momentum(masters.parameters())
        for step in range(STEPS):
            computing = copy.deepcopy(masters).to(self.half)
            of = list(zip(masters.parameters(), computing.parameters(), strict=True))
            sums = {master: torch.zeros_like(master) for master, _ in of}
            for micro in range(MICRO):
                for rank in range(ranks):
                    computing.zero_grad()
                    self.loss(computing, step, micro, rank).backward()
                    for master, parameter in of:
                        sums[master] += (
                            0 if parameter.grad is None else parameter.grad.float()
                        )
            for master in sums:
                master.grad = sums[master] / ranks if master.requires_grad else None
            optimizer.step()
        return {name: value.detach() for name, value in masters.state_dict().items()}


def drawn(numbers: Sequence[int]) -> list[Any]:
    found: list[Any] = []
    for number in numbers:
        try:
            found.append(Case(number, dist.get_world_size()).together())
        except Exception as error:
            raise RuntimeError(
                f"case {number}: {vars(Case(number, dist.get_world_size()))}"
            ) from error
    return found


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        (2, range(1)),
        *(
            pytest.param(ranks, range(1, 105), marks=pytest.mark.slow)
            for ranks in (2, 4)
        ),
    ],
    ids=str,
)
def test_shared_parameters_train_in_half_precision_as_in_one_process(
    ranks: int, numbers: Sequence[int]
) -> None:
    """A use of a shared parameter adds its gradient in half precision there and in
    float32 here: 2**-8 of a gradient is allowed. A missing or doubled one, or an update
    lost to half precision, is far more."""
    of_ranks = run_ranks(drawn, ranks, numbers, ranks_per_node=2)
    for number, *runs in zip(numbers, *of_ranks, strict=True):
        case = Case(number, ranks)
        expected, begun = case.alone(ranks), case.model().float().state_dict()
        for run in runs:
            for name, _ in case.model().named_parameters():
                value = expected[name]
                moved = (value - begun[name]).abs().max()
                off = (run[name] - value).abs().max()
                assert off <= 0.02 * moved + 1e-6, (
                    f"case {number} {vars(case)}: {name} is {off} off, moved {moved}"
                )
