"""The memory tier of checkpoints on an emulated cluster: a lost node's way back, and
what keeping a state costs a step.

    python benchmarks/memory_tier.py [--rate 1gbit] [--only lost|cost] [--out
    benchmarks/results/memory_tier.json]

Two nodes of two ranks (benchmarks/cluster/netlab.py: network namespaces, so root), each
with a folder of its own in /dev/shm.

lost: a run of 12 steps; the same run, in which both processes of a node kill themselves
with SIGKILL in step 9 and the node's folder is removed; new processes that go on with
``ckpt_path="last"``. Reported: seconds from the start of main() (imports are done) and
from the start of the process to the end of the next step, files of the disk's
checkpoints that a rank of the node that stayed has opened (``sys.addaudithook``), and
whether losses, weights and optimizer states are those of the uninterrupted run, bit by
bit. Shards in the node (the other one has the same) and over both nodes (a copy goes to
the next one).

cost: blocks whose forward and backward sleep as long as a device would compute; 1 s and
5 s in a step. A state is kept after every fourth step. It is in flight from there until
the thread that writes it has ended, which may be some steps later, because a copy on
another node is sent with rests. The cost of a state is what the steps in which it is in
flight take longer than the steps around them with no state in flight: the median over
all states. A step ends when its last rank does. Reported beside it: bytes that a node
sends in a step without a state, those that a state adds (counters of the node's
interface), and the seconds of the link that each takes. The copy fits beside compute
where both together are much shorter than the steps in which it is in flight.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from cluster.lab_model import Sleep
from cluster.netlab import parse_rate
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SmpShardedStrategy
from smp_core.checkpoint.memory.save import WRITER

HERE = Path(__file__).resolve().parent
STEPS, KILLED_IN, LOST_NODE = 12, 9, 1
SECONDS_GOAL, COST_GOAL = 15.0, 0.01
EVERY = 4  # steps between two states whose cost is measured
# Where shards lie, seconds of emulated compute in a step, and the share of --steps:
# long steps scatter less.
COSTS = (("node", 1.0, 1.0), ("world", 1.0, 1.0), ("world", 5.0, 0.5))
# Of this node, in its network namespace.
SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)
        )
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(Sleep.apply(x, self.seconds))


class Model(LightningModule):
    """Blocks on random rows.

    Args:
        seconds: of emulated compute in a step.
        kills: whether this rank kills itself in step KILLED_IN.
    """

    def __init__(
        self, blocks: int, width: int, seconds: float = 0.0, kills: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            Block(width, seconds / 3 / blocks) for _ in range(blocks)
        )
        self.width, self.kills = width, kills
        self.losses: list[str] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.kills and batch_idx == KILLED_IN:
            time.sleep(2.0)  # the state of the step before is complete by then
            os.kill(os.getpid(), signal.SIGKILL)
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(
            STEPS * 16, self.width, generator=torch.Generator().manual_seed(1)
        )
        return DataLoader(TensorDataset(rows.repeat(20, 1)), batch_size=4)


class Clock(Callback):
    """Notes the end of each optimizer step, before a state of it is kept.

    Attributes:
        ends: seconds since the epoch.
        in_flight: whether the state before was still being written then.
        sent: bytes that the node had sent by then.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.in_flight: list[bool] = []
        self.sent: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.time())
        self.in_flight.append(
            any(thread.name == WRITER for thread in threading.enumerate())
        )
        self.sent.append(int(SENT_BYTES.read_text()))


def digest(trainer: Trainer) -> str:
    """Return the digest of this rank's shards of weights and optimizer states."""
    found = hashlib.sha256()
    tensors = list(trainer.lightning_module.parameters())
    for state in trainer.optimizers[0].state.values():
        tensors += [
            value for value in state.values() if isinstance(value, torch.Tensor)
        ]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def rank_main(asked: argparse.Namespace) -> None:
    """Train on one rank, and write what it saw."""
    begin = time.time()
    # Until the first step has ended: then checkpoints are saved again.
    opened: list[str] = []
    clock = Clock()
    disk = str(Path(asked.folder, "disk"))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        # A folder too: the files of a checkpoint are opened by name in their folder.
        if (
            not clock.ends
            and event == "open"
            and str(arguments[0]).startswith(f"{disk}/")
        ):
            opened.append(str(arguments[0]))

    rank = int(os.environ["RANK"])
    seed_everything(5 + rank, verbose=False)
    kills = asked.run == "lost" and int(os.environ["NODE_RANK"]) == LOST_NODE
    module = Model(asked.blocks, asked.width, asked.compute, kills)
    every = {"lost": 1, "resumed": 1, "cost": EVERY}.get(asked.run, 0)
    checkpoint: dict[str, Any] = {"memory_every_n_steps": every}
    saver = ModelCheckpoint(Path(disk), save_last=True, every_n_train_steps=5)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["NNODES"]),
        strategy=SmpShardedStrategy(shard_degree=asked.shard, checkpoint=checkpoint),
        max_steps=asked.steps,
        callbacks=[clock, *([] if asked.run == "cost" else [saver])],
        enable_checkpointing=asked.run != "cost",
        default_root_dir=asked.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if asked.run == "resumed":
        sys.addaudithook(watch)
    trainer.fit(module, ckpt_path="last" if asked.run == "resumed" else None)
    seen = {
        "losses": module.losses,
        "digest": digest(trainer),
        "steps": len(clock.ends),
        "next_step_s": clock.ends[0] - begin,
        "next_step_since_process_s": clock.ends[0] - psutil.Process().create_time(),
        "opened_on_disk": sorted({os.path.basename(name) for name in opened})
        if asked.run == "resumed"
        else [],
        "ends": clock.ends,
        "in_flight": clock.in_flight,
        "sent": clock.sent,
        "rank_bytes": sum(
            p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes
            for p in module.parameters()
        )
        * 3,
    }
    Path(asked.folder, f"{asked.run}-{rank}.json").write_text(json.dumps(seen))


def launch(
    asked: argparse.Namespace, folder: Path, run: str, shard: str, **sizes: float
) -> list[dict[str, Any]] | None:
    """Run one run on the emulated cluster; None where ranks were killed."""
    options = [
        word for name, value in sizes.items() for word in (f"--{name}", str(value))
    ]
    lab = [
        sys.executable,
        str(HERE / "cluster" / "netlab.py"),
        "run",
        "--nodes",
        "2",
        "--ranks",
        "2",
        "--quiet",
        "--timeout",
        "3600",
    ]
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--rank-of",
        run,
        "--folder",
        str(folder),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "SMP_MEMORY_FOLDER": str(asked.memory),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            *lab,
            "--rate",
            asked.rate,
            "--log-dir",
            str(folder / run),
            "--",
            *command,
            "--shard",
            shard,
            *options,
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    if run == "lost":
        return None
    if done.returncode:
        raise RuntimeError(
            f"{run} ended with status {done.returncode}:\n{done.stderr[-3000:]}"
        )
    for line in done.stderr.splitlines():
        if "GOING ON" in line:
            print(line)
    return [
        json.loads(Path(folder, f"{run}-{rank}.json").read_text()) for rank in range(4)
    ]


def lose_a_node(asked: argparse.Namespace, folder: Path, shard: str) -> dict[str, Any]:
    """Compare a run that lost a node with one that did not."""
    sizes = {"blocks": 8, "width": 256, "steps": STEPS}
    (folder / "plain").mkdir(parents=True)
    (folder / "run").mkdir()
    plain = launch(asked, folder / "plain", "plain", shard, **sizes)
    launch(asked, folder / "run", "lost", shard, **sizes)
    (gone,) = asked.memory.glob(f"torch-smp-*/*-node{LOST_NODE}")
    shutil.rmtree(gone)
    resumed = launch(asked, folder / "run", "resumed", shard, **sizes)
    assert plain is not None and resumed is not None
    survivors = resumed[: 2 * LOST_NODE]
    same = all(
        one["digest"] == other["digest"]
        and one["losses"][-len(other["losses"]) :] == other["losses"]
        for one, other in zip(plain, resumed, strict=True)
    )
    left = [str(path) for path in asked.memory.glob("torch-smp-*/*")]
    return {
        "shard_degree": shard,
        "resumed_at_step": STEPS - resumed[0]["steps"],
        "lost_steps": KILLED_IN - (STEPS - resumed[0]["steps"]),
        "next_step_s": round(max(one["next_step_s"] for one in resumed), 2),
        "next_step_since_process_s": round(
            max(one["next_step_since_process_s"] for one in resumed), 2
        ),
        "survivors_opened_on_disk": sorted(
            {name for one in survivors for name in one["opened_on_disk"]}
        ),
        "bit_equal": same,
        "left_in_memory": left,
    }


def cost(
    asked: argparse.Namespace, folder: Path, shard: str, compute: float, steps: int
) -> dict[str, Any]:
    """Measure steps in which a state is in flight, beside steps without."""
    folder.mkdir(parents=True)
    sizes = {
        "blocks": asked.blocks,
        "width": asked.width,
        "compute": compute,
        "steps": steps,
    }
    seen = launch(asked, folder, "cost", shard, **sizes)
    assert seen is not None
    # Element i is of the step between the ends of steps i and i + 1.
    ends = [max(times) for times in zip(*(one["ends"] for one in seen), strict=True)]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    sent = [after - before for before, after in itertools.pairwise(seen[0]["sent"])]
    in_flight = [
        any(flags) for flags in zip(*(one["in_flight"] for one in seen), strict=True)
    ]
    is_with = [flag or (step + 1) % EVERY == 0 for step, flag in enumerate(in_flight)][
        : len(seconds)
    ]
    # The first states are waited for, and set the pace.
    begins = range(EVERY - 1, len(seconds) - EVERY + 1, EVERY)[2:]

    states, state_bytes = [], []
    for begin in begins:
        own = [step for step in range(begin, begin + EVERY) if is_with[step]]
        around = [
            step for step in range(begin - EVERY, begin + EVERY) if not is_with[step]
        ]
        if len(own) == EVERY or not around:
            raise RuntimeError(
                f"a state was in flight in each of the {EVERY} steps until the next one"
            )
        for found, each in ((states, seconds), (state_bytes, sent)):
            usual = statistics.fmean(each[step] for step in around)
            found.append(sum(each[step] - usual for step in own))
    difference = statistics.median(states)
    without = [step for step in range(begins[0], len(seconds)) if not is_with[step]]
    step = statistics.median(seconds[i] for i in without)
    step_bytes = statistics.median(sent[i] for i in without)
    link = parse_rate(asked.rate) / 8
    return {
        "shard_degree": shard,
        "compute_s": compute,
        "rank_mib": round(seen[0]["rank_bytes"] / 2**20, 1),
        "states": len(states),
        "steps_in_flight": round(
            sum(is_with[begins[0] : begins[-1] + EVERY]) / len(states), 2
        ),
        "step_ms": round(1e3 * step, 1),
        "step_sent_mb": round(step_bytes / 1e6, 1),
        "step_link_ms": round(1e3 * step_bytes / link, 1),
        "state_sent_mb": round(statistics.median(state_bytes) / 1e6, 1),
        "state_link_ms": round(1e3 * statistics.median(state_bytes) / link, 1),
        "state_ms": round(1e3 * difference, 2),
        "uncertainty_ms": round(
            1e3 * 1.25 * statistics.stdev(states) / len(states) ** 0.5, 2
        ),
        "share_of_a_step": round(difference / step, 5),
        "share_every_10_steps": round(difference / step / 10, 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--only", choices=["lost", "cost"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--compute",
        type=float,
        default=0.0,
        help="seconds of emulated compute in a step",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shard", default="node")
    parser.add_argument("--rank-of", dest="run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        rank_main(asked)
        return 0
    result: dict[str, Any] = {}
    if asked.only and asked.out and asked.out.exists():
        result = json.loads(asked.out.read_text())  # the other half
        result.pop(asked.only, None)
    result |= {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rate": asked.rate,
    }
    # Temporary folders are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory() as folder,
    ):
        asked.memory = Path(memory)
        for shard in ("node", "world") if asked.only != "cost" else ():
            result.setdefault("lost", []).append(
                lose_a_node(asked, Path(folder, "lost", shard), shard)
            )
        for shard, compute, share in COSTS if asked.only != "lost" else ():
            place = Path(folder, "cost", f"{shard}-{compute:g}")
            found = cost(asked, place, shard, compute, round(share * asked.steps))
            result.setdefault("cost", []).append(found)
    print(json.dumps(result, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")
    met = all(
        each["next_step_s"] <= SECONDS_GOAL and each["bit_equal"]
        for each in result.get("lost", [])
    )
    return int(
        not met
        or any(each["share_of_a_step"] > COST_GOAL for each in result.get("cost", []))
    )


if __name__ == "__main__":
    sys.exit(main())
