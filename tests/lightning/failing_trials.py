"""Random failures of a training run under Lightning's Trainer, and the run that goes on
afterwards. Run as a script; prints one JSON line for each trial.

    python -m tests.lightning.failing_trials FOLDER TRIALS SEED

A process that has imported everything forks the ranks, and ends none of them: what no
launcher ends has to end by itself. At a drawn place of a drawn rank, or of all ranks,
something drawn happens. Then all ranks must end, the texts must name the rank that was
struck and no other, nothing may stay in memory, and the newest checkpoint must load at
another layout and lead to one process's weights.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_smp import SmpCheckpoint, SmpShardedStrategy
from smp_core.checkpoint import consolidate, is_checkpoint, read_manifest
from tests.failing_ranks import (
    OF_FILES,
    Mistake,
    Strike,
    fork_rank,
    play,
    run_world,
)

# Samples of a global batch, batches of an epoch, epochs.
BATCH, BATCHES, EPOCHS = 8, 6, 2
# Seconds: collectives' where that is what ends a run.
TIMEOUT = 30.0
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    ranks: [
        {"shard_degree": ranks},
        {"shard_degree": ranks // 2},
        {
            "shard_degree": ranks // 2,
            "pipeline_parallel_degree": 2,
            "pipeline": "1f1b",
        },
        {
            "shard_degree": ranks // 2,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"plan": {"*.up": "column", "*.down": "row"}},
        },
    ]
    for ranks in (2, 4)
}
IN_BATCHES = (
    "forward",
    "backward",
    "optimizer_step",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "getitem",
)
ELSEWHERE = (
    "setup",
    "configure_optimizers",
    "on_train_start",
    "on_train_epoch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_end",
    "on_save_checkpoint",
    "state_dict",
    "close",
    "commit",
    "on_train_end",
    "on_fit_end",
    "after",
)
WHATS = ("raise", "raise", "exit", "interrupt", "os_exit", "kill", "kill", "term")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Module(LightningModule):
    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self.strike = strike
        torch.manual_seed(5)
        self.net = Layers()
        self.example_input_array = torch.zeros(BATCH, 4)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.strike("forward")
        out = self.net(batch)
        if out.requires_grad and out.grad_fn is not None:
            out.register_hook(lambda gradient: self.strike("backward"))
        loss = (out - batch.sum(1, keepdim=True).sin()).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.strike("validation_step")
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.strike("configure_optimizers")
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        optimizer.register_step_pre_hook(lambda *a: self.strike("optimizer_step"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Places(Callback):
    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def state_dict(self) -> dict[str, Any]:
        self.strike("state_dict")
        return {}


def _place(name: str) -> Callable[..., None]:
    def hook(self: Places, *arguments: Any, **keywords: Any) -> None:
        self.strike(name)

    return hook


for _name in (*IN_BATCHES, *ELSEWHERE):
    if _name.startswith("on_") or _name == "setup":
        setattr(Places, _name, _place(_name))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.rows = torch.randn(
            BATCH * BATCHES, 4, generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.strike("getitem")
        return self.rows[index]


def savers(trial: dict[str, Any], folder: Path) -> list[Callback]:
    at_exceptions = trial["on_exception"] == "ModelCheckpoint"
    saver: Callback
    if trial["saver"] == "SmpCheckpoint":
        saver = SmpCheckpoint(
            folder / "saved",
            checkpoint_interval=trial["every"],
            keep_last=2,
            save_on_exception=at_exceptions,
        )
    else:
        last: Any = trial["last"]
        saver = ModelCheckpoint(
            folder / "saved",
            filename="{step}",
            every_n_train_steps=trial["every"],
            save_top_k=-1,
            save_last="link" if last and trial["saver"] == "link" else last,
            save_on_exception=at_exceptions,
        )
    callbacks: list[Callback] = [saver]
    if trial["on_exception"] == "OnExceptionCheckpoint":
        callbacks.append(OnExceptionCheckpoint(folder / "saved"))
    return callbacks


def train(
    trial: dict[str, Any], folder: Path, ranks: int, knobs: Any, going_on: bool
) -> None:
    """Train to the end, and write the whole weights on rank 0."""
    rank = int(os.environ.get("RANK", 0))
    strike = Strike(None if going_on else trial, rank)
    checkpoint: Any = trial["checkpoint"]
    if trial["memory"]:
        asynchronous = trial["checkpoint"] == "async"
        checkpoint = {"async_save": asynchronous, "memory_every_n_steps": 1}
    strategy: Any = "auto"
    if knobs is not None:
        strategy = SmpShardedStrategy(
            **knobs,
            units=["Block"],
            checkpoint=checkpoint,
            timeout=timedelta(seconds=TIMEOUT if is_waited_for(trial) else 300),
        )
    accumulate = trial["accumulate"]
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
        callbacks=[Places(strike), *savers(trial, folder)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    knobs = knobs or {}
    alike = knobs.get("pipeline_parallel_degree", 1) * knobs.get(
        "tensor_parallel_degree", 1
    )
    module = Module(strike)
    size = BATCH * alike // ranks
    workers = trial["workers"]

    rows = Rows(strike)
    # Lightning's own, which shuffles, in one process too.
    sampler = None
    if strategy == "auto":
        sampler = DistributedSampler(rows, num_replicas=1, rank=0)

    def loader(sampler: Any = None) -> Any:
        return DataLoader(rows, size, num_workers=workers, sampler=sampler)

    path: Any = None
    if going_on:
        path = newest(folder / "saved", trial)
    print(f"GOES ON FROM {path}", flush=True)
    for attempt in range(2):
        try:
            trainer.fit(
                module, loader(sampler), loader(), ckpt_path=path, weights_only=False
            )
            break
        except BaseException as error:
            # A script that goes on by itself, where all ranks have failed.
            again = trial["again"] and not going_on and not attempt
            if not again or not isinstance(error, (Mistake, SystemExit)):
                raise
            path = newest(folder / "saved", trial)
            if path is None:
                raise
            print(f"AGAIN FROM {path}", flush=True)
    strike("after")
    trainer.save_checkpoint(folder / ("end.ckpt" if going_on else "first.ckpt"))
    print("CAME TO ITS END", flush=True)


def is_waited_for(trial: dict[str, Any]) -> bool:
    """Whether a rank may be waited for until collectives' time is over: one that is
    stopped, or begins another run by itself."""
    return trial["what"] == "stop" or trial["again"]


def newest(saved: Path, trial: dict[str, Any]) -> Any:
    if trial["by_last"] and (trial["memory"] or any(saved.glob("last*"))):
        return "last"
    found = []
    for path in saved.glob("*.ckpt") if saved.exists() else ():
        if trial["checkpoint"] == "full" or is_checkpoint(path):
            found.append((step_of(path), str(path)))
    return max(found)[1] if found else None


def step_of(path: Path) -> int:
    if path.is_file():
        return int(torch.load(path, weights_only=False)["global_step"])
    return int(read_manifest(path).metadata["step"])


def draw(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    world = rng.choice((2, 2, 4))
    place = rng.choice((*IN_BATCHES, *ELSEWHERE))
    what = rng.choice(WHATS) if rng.random() < 0.93 else "stop"
    if place in OF_FILES:
        what = rng.choice(("kill", "disk", "disk", "os_exit"))
    ranks = [rng.randrange(world)]
    if rng.random() < 0.3:
        ranks = list(range(world))
    elif world == 4 and rng.random() < 0.3:
        ranks = sorted(rng.sample(range(4), 2))
    if what == "stop":
        ranks = ranks[:1]
    checkpoint = rng.choice(("sharded", "async", "full"))
    other = rng.choice((2, 2, 4))
    if place == "commit":
        ranks = [0]
    trial = {
        "seed": seed,
        "world": world,
        "layout": rng.randrange(4),
        "nodes": rng.random() < 0.5,
        "place": place,
        "what": what,
        "ranks": ranks,
        "call": rng.randint(1, BATCHES * EPOCHS)
        if place in IN_BATCHES
        else rng.randint(1, 8 if place in OF_FILES else 2),
        "saver": rng.choice(("ModelCheckpoint", "link", "SmpCheckpoint")),
        "checkpoint": checkpoint,
        "memory": checkpoint != "full" and rng.random() < 0.3,
        "every": rng.choice((1, 2, 3)),
        "last": rng.random() < 0.5,
        "by_last": rng.random() < 0.5,
        "on_exception": rng.choice((None, "ModelCheckpoint", "OnExceptionCheckpoint")),
        "accumulate": rng.choice((1, 2)),
        "workers": rng.choice((0, 0, 1)),
        "again": len(ranks) == world and rng.random() < 0.6,
        "other_world": other,
        "other_layout": rng.randrange(4),
    }
    if place in (
        "on_train_start",
        "setup",
        "configure_optimizers",
        "on_train_end",
        "on_fit_end",
        "after",
    ):
        trial["call"] = 1
    if trial["memory"]:  # kept for runs of the same shape
        trial |= {"other_world": world, "other_layout": trial["layout"]}
    return trial


def conduct(trial: dict[str, Any], top: Path) -> dict[str, Any]:
    folder = top / str(trial["seed"])
    folder.mkdir(parents=True)
    (folder / "shm").mkdir()
    world, other = trial["world"], trial["other_world"]
    before = set(os.listdir("/dev/shm"))
    first = run_world(
        train, trial, folder, world, LAYOUTS[world][trial["layout"]], False
    )
    steps = {}
    if (folder / "saved").exists():
        steps = {
            path.name: step_of(path)
            for path in (folder / "saved").glob("*.ckpt")
            if trial["checkpoint"] == "full" or is_checkpoint(path)
        }
    second = run_world(
        train, trial, folder, other, LAYOUTS[other][trial["other_layout"]], True
    )
    found: dict[str, Any] = {"first": first, "second": second, "steps": steps}
    found["shm"] = sorted(set(os.listdir("/dev/shm")) - before)
    found["memory_left"] = [
        str(path.relative_to(folder)) for path in (folder / "shm").glob("*/*")
    ]
    texts = [(folder / f"first-{rank}.2").read_text() for rank in range(world)]
    found["said"] = [
        line
        for text in texts
        for line in text.splitlines()
        if "torch-smp, rank" in line or re.search(r"Error: .*rank \d", line)
    ]
    return found


def reference(trial: dict[str, Any], top: Path) -> dict[str, torch.Tensor]:
    place = top / f"whole-{trial['accumulate']}"
    if not (place / "end.ckpt").exists():
        place.mkdir(parents=True)
        quiet = {
            **trial,
            "checkpoint": "full",
            "memory": False,
            "workers": 0,
            "what": "",
            "on_exception": None,
            "by_last": False,
        }
        pid = fork_rank(lambda: train(quiet, place, 1, None, True), {}, place / "alone")
        os.waitpid(pid, 0)
    return weights_in(place / "end.ckpt")


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    file = path
    if path.is_dir():
        file = path.with_suffix(".whole.ckpt")
        consolidate(path, file)
    return torch.load(file, weights_only=False)["state_dict"]


def judge(trial: dict[str, Any], found: dict[str, Any], top: Path) -> list[str]:
    """What is wrong, in words."""
    folder = top / str(trial["seed"])
    wrong = []
    first, second = found["first"], found["second"]
    for name, world in (("first", first), ("second", second)):
        if world["hung"]:
            wrong.append(f"{name}: ranks {world['hung']} hang")
        if world["left"]:
            wrong.append(f"{name}: {world['left']} processes left")
    if any(second["statuses"]):
        wrong.append(f"second run: statuses {second['statuses']}")
    if found["shm"] or found["memory_left"]:
        wrong.append(f"left in memory: {found['shm']} {found['memory_left']}")
    expected = reference(trial, top)
    for name in ("end.ckpt", "first.ckpt"):
        path = folder / name
        if not path.exists():
            if name == "end.ckpt":
                wrong.append("the run that goes on has no weights")
            continue
        got = weights_in(path)
        if set(got) != set(expected):
            wrong.append(f"{name}: other names {sorted(set(got) ^ set(expected))}")
        worst = max(
            ((got[key] - value).abs().max().item(), key)
            for key, value in expected.items()
            if key in got
        )
        if not worst[0] < 1e-5:
            wrong.append(f"{name}: {worst[1]} differs by {worst[0]}")
    struck = set(trial["ranks"])
    strays = []
    for line in found["said"]:
        for rank in range(trial["world"]):
            if rank not in struck and (
                f"rank {rank} failed" in line or f": rank {rank} was lost" in line
            ):
                strays.append(line)
    if strays:
        wrong.append(f"names another: {strays}")
    happened = any(first["statuses"]) or first["hung"]
    others = [rank for rank in range(trial["world"]) if rank not in struck]
    if (
        trial["what"] != "term"
        and happened
        and others
        and trial["place"] not in ("after", "on_fit_end")
    ):
        named = any(
            re.search(rf"rank {rank}\b", line)
            for line in found["said"]
            for rank in struck
        )
        if not named:
            wrong.append("no text names the struck rank")
        if any(first["statuses"][rank] == 0 for rank in others):
            wrong.append(f"others ended well: {first['statuses']}")
    return wrong


if __name__ == "__main__":
    play(draw, conduct, judge)
