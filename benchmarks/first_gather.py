"""How much of the product a reader passes through from `Trainer.fit` to the first
gather of parameters.

    python benchmarks/first_gather.py [--list] [--out
    benchmarks/results/first_gather.json]

Two ranks in one node train one step of a small model with all features off; rank 0 is
watched by `sys.setprofile`. Counted are the files of the three packages in which a
function is entered, those functions (comprehensions and bodies of classes are none),
and the lines of those files. The main thread alone is watched: it is the one that is
read. The file keeps two counts: "before", which --reset takes anew, and "after".
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import LightningModule, Trainer
from machine import about
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SmpShardedStrategy
from smp_core.comm.flat import FlatAllGather

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_gather.json"
PRODUCT = tuple(
    f"{ROOT / package}{os.sep}"
    for package in ("smp_core", "lightning_smp", "accelerate_smp")
)
GOAL = {"files": 45, "functions": 300}
WIDTH = 8


class Module(LightningModule):
    """Two linear layers, which are a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Entered:
    """The functions of the product that were entered, and how often, until the first
    gather."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._last = FlatAllGather.__call__.__code__

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        is_named = not code.co_name.startswith("<")
        if is_function and is_named:
            self.calls[code] += 1
        if code is self._last:
            sys.setprofile(None)


def worker() -> dict[str, Any]:
    """Train one step in this rank; return what it entered."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SmpShardedStrategy(shard_degree=2, units=["Linear"]),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.ones(4, WIDTH)), batch_size=1)
    module, entered = Module(), Entered()
    sys.setprofile(entered)
    trainer.fit(module, data)
    sys.setprofile(None)
    assert entered.calls[FlatAllGather.__call__.__code__], "there was no gather"

    files: dict[str, list[tuple[str, int]]] = {}
    for code, calls in entered.calls.items():
        name = os.path.relpath(code.co_filename, ROOT)
        files.setdefault(name, []).append((code.co_name, calls))
    return {"calls": entered.calls.total(), "files": dict(sorted(files.items()))}


def figures() -> dict[str, Any]:
    """Start both ranks and count what rank 0 entered."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, __file__, "--worker"], capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ENTERED ")]
    if done.returncode or not lines:
        raise SystemExit(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
    found = json.loads(lines[0].removeprefix("ENTERED "))
    files: dict[str, list[tuple[str, int]]] = found["files"]
    return {
        "files": len(files),
        "functions": sum(map(len, files.values())),
        "calls": found["calls"],
        "lines": sum(
            len((ROOT / name).read_text(encoding="utf-8").splitlines())
            for name in files
        ),
        "entered": files,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--reset", action="store_true", help="compare with this count from now on"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print every file with its functions, and how often each was entered",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.worker:
        entered = worker()
        if os.environ["RANK"] == "0":
            print("ENTERED " + json.dumps(entered), flush=True)
        return

    known = (
        json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    )
    after = figures()
    entered = after.pop("entered")
    before = after if asked.reset else known.get("before", after)
    per_file = {name: len(names) for name, names in entered.items()}
    result = {
        **about("first_gather"),
        "goal": GOAL,
        "before": before,
        "after": after,
        "functions_entered": per_file,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, functions in entered.items() if asked.list else ():
        shown = " ".join(f"{function} {calls}" for function, calls in functions)
        print(f"{len(functions):4} {name:55} {shown}")
    print(f"{'':10} {'now':>7} {'before':>7} {'goal':>5}")
    for name, now in after.items():
        print(f"{name:10} {now:7,} {before[name]:7,} {GOAL.get(name, ''):>5}")


if __name__ == "__main__":
    main()
