"""How long pipeline stages are idle, measured by the monitor, beside (p - 1) / (m v + p
- 1).

    python benchmarks/pipeline_bubble.py [--out benchmarks/results/pipeline_bubble.json]
    [--picture timeline.png]

Eight blocks that sleep, in backward twice as long as in forward, under Lightning's
Trainer on p CPU ranks, each of them a stage; m micro-batches in a batch, v chunks of
blocks on each stage. A rank that sleeps takes no processor from the others, so that a
few cores stand for p devices. The shares are those that SmpMonitor reports, of all
steps but the first; the picture is its timeline of the last batch of the last case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from cluster.lab_model import Sleep
from lightning.pytorch import LightningModule, Trainer
from machine import about
from torch import nn
from torch.utils.data import DataLoader

from lightning_smp import SmpMonitor, SmpShardedStrategy
from smp_core.plan.schedules import chunks_of

WITHIN = 0.1
BLOCKS, WIDTH = 8, 8
# stages p, micro-batches m, schedule
CASES = [
    (2, 4, "gpipe"), (2, 4, "1f1b"), (2, 4, "interleaved:2"),
    (4, 8, "gpipe"), (4, 8, "1f1b"), (4, 8, "interleaved:2"),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.linear(x), self.seconds)


class Model(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.dummy_inputs = {"x": torch.zeros(2, WIDTH)}
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Module(LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model(seconds)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def worker(args: argparse.Namespace) -> dict[str, float]:
    """Train on this rank; return the monitor's report."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    stages = dist.get_world_size()
    recipe = {"microbatches": args.micro_batches, "schedule": args.schedule}
    monitor = SmpMonitor(every_n_steps=args.steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=SmpShardedStrategy(
            shard_degree=1, pipeline_parallel_degree=stages, pipeline=recipe
        ),
        max_steps=args.steps,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.randn(
        args.steps * args.micro_batches,
        WIDTH,
        generator=torch.Generator().manual_seed(0),
    )
    trainer.fit(
        Module(args.milliseconds / 1e3),
        DataLoader(samples, batch_size=args.micro_batches),
    )
    if args.picture is not None and dist.get_rank() == 0:
        monitor.save_timeline(args.picture)
    return monitor.latest


def measure(
    args: argparse.Namespace, stages: int, micro_batches: int, schedule: str
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(stages),
        __file__,
        "--worker",
    ]
    command += ["--micro-batches", str(micro_batches), "--schedule", schedule]
    command += ["--steps", str(args.steps), "--milliseconds", str(args.milliseconds)]
    if args.picture is not None:
        command += ["--picture", str(args.picture)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    report = json.loads(lines[0].removeprefix("REPORT "))
    expected = (stages - 1) / (micro_batches * chunks_of(schedule) + stages - 1)
    measured = [report[f"bubble_share_stage_{stage}"] for stage in range(stages)]
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "expected": expected,
        "measured": measured,
        "off": max(abs(share / expected - 1) for share in measured),
        "seconds_of_stages": [
            report[f"seconds_stage_{stage}"] for stage in range(stages)
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="optimizer steps; the first is not counted"
    )
    parser.add_argument(
        "--milliseconds", type=float, default=600.0, help="of a block's forward pass"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--micro-batches", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.worker:
        report = worker(args)
        if dist.get_rank() == 0:
            print("REPORT", json.dumps(report), flush=True)
        return
    result: dict[str, Any] = {
        **about("pipeline_bubble"),
        "emulated": {
            "blocks": BLOCKS,
            "forward_ms": args.milliseconds,
            "backward_ms": 2 * args.milliseconds,
        },
        "steps": args.steps - 1,
        "goal": WITHIN,
        "results": [],
    }
    print(
        f"{'stages':>6}{'micro-batches':>15}{'schedule':>15}{'expected':>10}   measured, stage by stage"
    )
    for stages, micro_batches, schedule in CASES:
        row = measure(args, stages, micro_batches, schedule)
        result["results"].append(row)
        shares = " ".join(f"{share:.3f}" for share in row["measured"])
        verdict = "" if row["off"] <= WITHIN else f"   more than {WITHIN:.0%} off"
        print(
            f"{stages:>6}{micro_batches:>15}{schedule:>15}{row['expected']:>10.3f}   {shares}{verdict}",
            flush=True,
        )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(args.out)


if __name__ == "__main__":
    main()
