"""Under Trainer, too, a rank that is slow is named with the part of the step in which it is."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch.distributed as dist

from accelerate_smp.callbacks import SmpMonitorCallback
from smp_core.step_times import Part, Straggler
from tests.accelerate.trainers import make_trainer
from tests.harness import run_ranks

# Seconds of each step, which takes some hundredths of one without.
SLOW = 0.3


def found(cases: list[tuple[Part, int]]) -> list[Straggler | None]:
    stragglers = []
    for part, rank in cases:
        with tempfile.TemporaryDirectory() as folder:
            flags: dict[str, Any] = {"max_steps": 6, "logging_steps": 6, "logging_strategy": "steps"}
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


def test_the_slow_rank_and_its_part_are_named() -> None:
    cases: list[tuple[Part, int]] = [("forward", 1), ("data", 0)]
    for stragglers in run_ranks(found, 2, cases):
        named = [None if each is None else (each.part, each.rank) for each in stragglers]
        assert named == cases
