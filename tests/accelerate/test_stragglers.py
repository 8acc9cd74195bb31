"""Under Trainer and in a bare loop, too, a rank that is slow is named with the part of
the step in which it is."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate_smp import SmpMonitor
from accelerate_smp.callbacks import SmpMonitorCallback
from smp_core.observe.step_times import PARTS, Part, Straggler
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import make_trainer
from tests.harness import run_ranks

# Seconds of each step, which takes some hundredths of one without.
SLOW = 0.3


def found(cases: list[tuple[Part, int]]) -> list[Straggler | None]:
    stragglers = []
    for part, rank in cases:
        with tempfile.TemporaryDirectory() as folder:
            flags: dict[str, Any] = {
                "max_steps": 6,
                "logging_steps": 6,
                "logging_strategy": "steps",
            }
            trainer, _ = make_trainer(folder, 8, 1, {"shard_degree": 2}, **flags)
            monitor = SmpMonitorCallback()
            trainer.add_callback(monitor)
            if dist.get_rank() == rank:
                make_slow(trainer, part)
            trainer.train()
            assert monitor._figures is not None
            stragglers.append(monitor._figures.straggler)
    return stragglers


def make_slow(trainer: Any, part: Part) -> None:
    if part == "forward":
        trainer.model.lm_head.register_forward_hook(lambda *_: time.sleep(SLOW))
    else:
        fetch = trainer.data_collator

        def slowly(rows: Any) -> Any:
            time.sleep(SLOW)
            return fetch(rows)

        trainer.data_collator = slowly


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [[("data", 0)], [("forward", 1)]],
    ids=["data", "forward"],
)
def test_the_slow_rank_and_its_part_are_named(cases: list[tuple[Part, int]]) -> None:
    for stragglers in run_ranks(found, 2, cases):
        named = [
            None if each is None else (each.part, each.rank) for each in stragglers
        ]
        assert named == cases


STEPS = 5


class Late(torch.autograd.Function):
    """Sleeps in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


def loop(part: Part, rank: int, folder: str) -> dict[str, Any]:
    """A loop with accumulation and an evaluation, in which one part of each step takes
    longer on one rank."""
    accelerator = fresh_accelerator(
        smp_config={"shard_degree": 2}, gradient_accumulation_steps=2
    )
    seconds = {
        each: SLOW / 2 * (each == part and dist.get_rank() == rank) for each in PARTS
    }
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(seconds["optimizer"]))
    model, optimizer = accelerator.prepare(net, optimizer)
    monitor = SmpMonitor(
        accelerator,
        model,
        optimizer,
        every_n_steps=STEPS,
        run_log=Path(folder) / "run.jsonl",
    )
    for index in range(2 * STEPS + 2):
        time.sleep(seconds["data"])
        with accelerator.accumulate(model):
            out = Late.apply(
                model(torch.full((4, 8), 0.1 * index)), seconds["backward"]
            )
            time.sleep(seconds["forward"])
            accelerator.backward(out.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if index == 2:
            model.eval()
            model(torch.zeros(4, 8))
            time.sleep(SLOW * dist.get_rank())  # no part of a step
            model.train()
    with pytest.raises(ValueError, match=r"accelerator\.monitor\.end\(\)"):
        SmpMonitor(accelerator, model, optimizer)
    latest, found = monitor.latest, monitor.straggler
    monitor.end()  # what end_training does, which also ends the process group
    return {
        "found": found,
        "latest": latest,
        "step": monitor.step,
        "ended": accelerator.monitor is None,
    }


def loops(cases: list[tuple[Part, int]]) -> list[dict[str, Any]]:
    results = []
    for part, rank in cases:
        with tempfile.TemporaryDirectory() as folder:
            result = loop(part, rank, folder)
            log = Path(folder) / "run.jsonl"
            result["kinds"] = (
                [json.loads(line)["kind"] for line in log.read_text().splitlines()]
                if log.exists()
                else []
            )
            results.append(result)
    return results


@pytest.mark.parametrize(
    "cases",
    [
        [("forward", 1), ("data", 0)],
        pytest.param(
            [("backward", 0), ("data", 1), ("optimizer", 0)], marks=pytest.mark.slow
        ),
    ],
    ids=["some", "more"],
)
def test_a_bare_loop_names_the_slow_rank_and_its_part(
    cases: list[tuple[Part, int]],
) -> None:
    of_ranks = run_ranks(loops, 2, cases)
    for results in of_ranks:
        for (part, rank), result in zip(cases, results, strict=True):
            found, latest = result["found"], result["latest"]
            assert found is not None and (found.part, found.rank) == (part, rank), (
                part,
                rank,
                found,
            )
            assert (
                latest["samples"] == 2 * 2 * 4 * STEPS
                and latest["straggler_rank"] == rank
            )
            assert result["step"] == STEPS + 1 and result["ended"]
    assert [kind for kind in of_ranks[0][0]["kinds"] if kind != "warning"] == [
        "run",
        "step",
        "step",
        "end",
    ]
    assert all(result["kinds"] == [] for result in of_ranks[1])


def test_a_loops_monitor_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0 is not a number of steps"):
        SmpMonitor(None, nn.Linear(1, 1), None, every_n_steps=0)  # type: ignore[arg-type]
