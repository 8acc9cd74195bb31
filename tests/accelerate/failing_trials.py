"""Random failures of programs under transformers' Trainer and of bare Accelerate loops,
and the run that goes on afterwards. Run as a script; prints one JSON line for each
trial.

    python -m tests.accelerate.failing_trials FOLDER TRIALS SEED

At a drawn place of a drawn rank, or of all ranks, something drawn happens, and the script
may catch it. Then all ranks must end, the texts must name the rank that was struck and
what it met, and the newest checkpoint must load at another layout and lead to one
process's weights.
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
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import InitProcessGroupKwargs
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accelerate_smp import SmpAccelerator, SmpTrainer
from smp_core.checkpoint import is_checkpoint
from tests.accelerate.trainers import make_dataset, make_model
from tests.failing_ranks import (
    OF_FILES,
    Mistake,
    Strike,
    fork_rank,
    play,
    run_world,
)

# Samples of a global batch, batches of an epoch, epochs.
BATCH, BATCHES, EPOCHS = 8, 4, 2
# Seconds: collectives' where that is what ends a run.
TIMEOUT = 25.0
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    ranks: [
        {"shard_degree": ranks},
        {"shard_degree": ranks // 2},
        {"shard_degree": ranks // 2, "pipeline_parallel_degree": 2},
        {
            "shard_degree": ranks // 2,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"sequence_parallel": False, "across_nodes": True},
        },
        {"shard_degree": ranks, "context_parallel_degree": 2},
    ]
    for ranks in (2, 4)
}
# Places, by how often they are come by in a run of each kind.
IN_BATCHES = (
    "getitem",
    "collate",
    "forward",
    "loss",
    "backward",
    "optimizer_step",
    "schedule",
)
EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
)
RARE_EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_epoch_end",
    "on_evaluate",
    "on_save",
    "on_prediction_step",
    "on_train_end",
    "on_predict",
)
OF_TRAINER = ("metrics", "logits", "state_dict", "save_model", "after")
OF_LOOP = (
    "gather",
    "reduce",
    "track",
    "save_hook",
    "state_dict",
    "custom",
    "between",
    "get_state_dict",
    "after",
)
WHATS = ("raise", "raise", "exit", "interrupt", "memory", "os_exit", "kill", "term")
CATCHES = ("", "", "", "save", "end", "skip", "swallow", "again")


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, strike: Strike, rows: int, seed: int) -> None:
        self.strike = strike
        # As many targets in each: a bare loop's loss is a mean of means.
        tokens = [row["input_ids"] for row in make_dataset(rows, seed)]
        self.rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.strike("getitem")
        return self.rows[index]


class Places(TrainerCallback):
    def __init__(self, strike: Strike) -> None:
        self.strike = strike


def _place(name: str) -> Callable[..., None]:
    def event(self: Places, *arguments: Any, **keywords: Any) -> None:
        self.strike(name)

    return event


for _name in (*EVENTS, *RARE_EVENTS):
    setattr(Places, _name, _place(_name))


def collate(strike: Strike) -> Callable[..., dict[str, torch.Tensor]]:
    def collator(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        strike("collate")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return collator


def struck_model(strike: Strike) -> torch.nn.Module:
    model = make_model()

    def before(*_: Any) -> None:
        strike("forward")

    model.register_forward_pre_hook(before)
    return model


def struck_loss(strike: Strike, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, or nan where that is what happens."""
    if strike.trial is not None and strike.trial["what"] == "nan":
        try:
            strike("loss")
        except KeyError:
            return loss * float("nan")
        return loss
    strike("loss")
    if loss.requires_grad and loss.grad_fn is not None:
        loss.register_hook(lambda gradient: strike("backward"))
    return loss


def optimizer_and_schedule(model: torch.nn.Module, strike: Strike) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer.register_step_pre_hook(lambda *_: strike("optimizer_step"))

    def factor(step: int) -> float:
        if step:
            strike("schedule")
        return 0.9**step

    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            strike("state_dict")
            return super().state_dict()

    return optimizer, Schedule(optimizer, factor)


class StruckTrainer(Trainer):
    strike: Strike
    catches = ""

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        result = super().compute_loss(*arguments, **keywords)
        if isinstance(result, tuple):
            return result
        return struck_loss(self.strike, result)

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.catches != "skip":
            return super().training_step(*arguments, **keywords)
        try:
            return super().training_step(*arguments, **keywords)
        except Exception as error:
            print(f"SKIPS A BATCH: {error!r}", flush=True)
            return torch.zeros(())


def readers(ranks: int, knobs: dict[str, Any] | None) -> int:
    knobs = knobs or {}
    for name in ("pipeline", "tensor", "context"):
        ranks //= knobs.get(f"{name}_parallel_degree", 1)
    return ranks


def train(
    trial: dict[str, Any], folder: Path, ranks: int, knobs: Any, going_on: bool
) -> None:
    """Train to the end, and write the whole weights."""
    strike = Strike(None if going_on else trial, int(os.environ.get("RANK", 0)))
    catches = "" if going_on else trial["catches"]
    if knobs is not None:
        knobs = {
            **knobs,
            "checkpoint": "async" if trial["async"] else {},
            "on_nonfinite_grad_norm": "raise",
        }
    run = trainer if trial["kind"] == "trainer" else loop
    run(trial, strike, catches, folder, ranks, knobs, going_on)
    print("CAME TO ITS END", flush=True)


def trainer(
    trial: dict[str, Any],
    strike: Strike,
    catches: str,
    folder: Path,
    ranks: int,
    knobs: Any,
    going_on: bool,
) -> None:
    micro_batches = trial["accumulate"]
    per_device = BATCH // readers(ranks, knobs) // micro_batches
    arguments = TrainingArguments(
        output_dir=str(folder / "saved"),
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=micro_batches,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=trial["every"],
        save_strategy="steps",
        save_steps=trial["every"],
        save_total_limit=trial["limit"],
        load_best_model_at_end=trial["best"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=trial["workers"],
        ddp_timeout=int(TIMEOUT) if is_waited_for(trial) else 300,
    )

    def metrics(prediction: Any) -> dict[str, float]:
        strike("metrics")
        return {"mean": float(prediction.predictions.mean())}

    def preprocess(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        strike("logits")
        return logits

    model = struck_model(strike)
    bases: tuple[type, ...] = (
        (StruckTrainer,) if knobs is None else (StruckTrainer, SmpTrainer)
    )
    kind: Any = type("Struck", bases, {"strike": strike, "catches": catches})
    options = {} if knobs is None else {"smp_config": knobs}
    run = kind(
        model=model,
        args=arguments,
        data_collator=collate(strike),
        train_dataset=Rows(strike, BATCH * BATCHES, 3),
        eval_dataset=Rows(strike, BATCH, 5),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=preprocess,
        optimizers=optimizer_and_schedule(model, strike),
        callbacks=[Places(strike)],
        **options,
    )
    resume: Any = None
    if going_on and knobs is not None:
        resume = "last"
    try:
        try:
            run.train(resume_from_checkpoint=resume)
        except (Mistake, SystemExit, torch.OutOfMemoryError):
            if catches != "again":
                raise
            print("AGAIN", flush=True)
            run.train(resume_from_checkpoint="last")
    except BaseException as error:
        print(f"CAUGHT {error!r}", flush=True)
        if catches == "save":
            run.save_model(str(folder / "interrupted"))
        if catches != "swallow" or not isinstance(error, Exception):
            raise
    finally:
        if catches == "end":
            run.accelerator.end_training()
    if catches == "end":
        return
    run.evaluate()
    run.predict(run.eval_dataset)
    strike("save_model")
    run.save_model(str(folder / ("end" if going_on else "first")))
    strike("after")


class Custom:
    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        self.strike("custom")
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Tracker(GeneralTracker):
    name = "struck"
    requires_logging_directory = False

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self.strike = strike

    @property
    def tracker(self) -> None:
        return None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.strike("track")


def loop(
    trial: dict[str, Any],
    strike: Strike,
    catches: str,
    folder: Path,
    ranks: int,
    knobs: Any,
    going_on: bool,
) -> None:
    seconds = TIMEOUT if is_waited_for(trial) else 300
    options: dict[str, Any] = {
        "gradient_accumulation_steps": trial["accumulate"],
        "cpu": True,
        "log_with": Tracker(strike),
    }
    if knobs is None:
        accelerator = Accelerator(**options)
    else:
        accelerator = SmpAccelerator(
            **options,
            smp_config=knobs,
            schedule_in_optimizer_steps=True,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))
            ],
        )
    try:
        steps(trial, strike, catches, folder, accelerator, knobs, going_on)
    except BaseException as error:
        print(f"CAUGHT {error!r}", flush=True)
        if catches == "save":
            accelerator.save_state(str(folder / "saved" / "interrupted"))
        raise
    finally:
        if catches in ("end", "swallow"):
            accelerator.end_training()


def steps(
    trial: dict[str, Any],
    strike: Strike,
    catches: str,
    folder: Path,
    accelerator: Any,
    knobs: Any,
    going_on: bool,
) -> None:
    model = struck_model(strike)
    optimizer, schedule = optimizer_and_schedule(model, strike)
    ranks = accelerator.state.num_processes
    size = BATCH // readers(ranks, knobs) // trial["accumulate"]
    data = DataLoader(
        Rows(strike, BATCH * BATCHES, 3),
        size,
        collate_fn=collate(strike),
        num_workers=trial["workers"],
    )
    held_out = DataLoader(Rows(strike, BATCH, 5), 4, collate_fn=collate(strike))
    model, optimizer, data, held_out, schedule = accelerator.prepare(
        model, optimizer, data, held_out, schedule
    )
    custom = Custom(strike)
    accelerator.register_for_checkpointing(custom)
    accelerator.register_save_state_pre_hook(lambda *_: strike("save_hook"))
    accelerator.init_trackers("struck")
    done = 0
    saved = newest(folder / "saved") if going_on else None
    if saved is not None:
        accelerator.load_state(str(saved))
        done = custom.seen
    print(f"GOES ON FROM {saved}", flush=True)
    pipelined = (knobs or {}).get("pipeline_parallel_degree", 1) > 1

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return struck_loss(strike, model(**batch).loss)

    if pipelined:
        loss_of = accelerator.pipeline_step(loss_of)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with accelerator.accumulate(model):
            loss = loss_of(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        strike("reduce")
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.log({"loss": mean.item()}, step=custom.seen)

    for epoch in range(done // BATCHES, EPOCHS):
        model.train()
        batches = data
        skipped = done - epoch * BATCHES if epoch == done // BATCHES else 0
        if skipped:
            batches = accelerator.skip_first_batches(
                data, skipped * trial["accumulate"]
            )
        for batch in batches:
            try:
                step(batch)
            except (Mistake, torch.OutOfMemoryError) as error:
                if catches not in ("skip", "again"):
                    raise
                print(f"SKIPS A BATCH: {error!r}", flush=True)
                optimizer.zero_grad()
                continue
            if accelerator.sync_gradients:
                custom.seen += 1
                strike("between")
                if custom.seen % trial["every"] == 0:
                    accelerator.save_state(str(folder / "saved" / f"{custom.seen}"))
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                if pipelined:
                    loss = loss_of(batch)
                else:
                    loss = model(**batch).loss
            strike("gather")
            accelerator.gather_for_metrics(loss.repeat(len(batch["labels"])))
    strike("get_state_dict")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        place = folder / ("end" if going_on else "first")
        place.mkdir()
        whole = {name: value.contiguous().clone() for name, value in state.items()}
        save_file(whole, place / "model.safetensors")
    strike("after")


def newest(saved: Path) -> Path | None:
    found = [
        path
        for path in (saved.iterdir() if saved.exists() else ())
        if path.name.isdecimal() and is_checkpoint(path)
    ]
    return max(found, key=lambda path: int(path.name), default=None)


def is_waited_for(trial: dict[str, Any]) -> bool:
    """Whether a rank may be waited for until collectives' time is over: one that goes
    on by itself, elsewhere than the others."""
    return trial["catches"] in ("skip", "swallow", "again", "save")


def draw(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    kind = rng.choice(("trainer", "trainer", "loop"))
    world = rng.choice((2, 2, 4))
    places: tuple[str, ...] = (*IN_BATCHES, *OF_LOOP, *OF_FILES)
    if kind == "trainer":
        places = (*IN_BATCHES, *EVENTS, *RARE_EVENTS, *OF_TRAINER, *OF_FILES)
    place = rng.choice(places)
    what = rng.choice(WHATS)
    if place == "loss" and rng.random() < 0.5:
        what = "nan"
    if place in OF_FILES:
        what = rng.choice(("kill", "disk", "disk", "os_exit"))
    ranks = [rng.randrange(world)]
    if rng.random() < 0.3:
        ranks = list(range(world))
    elif world == 4 and rng.random() < 0.3:
        ranks = sorted(rng.sample(range(4), 2))
    accumulate = rng.choice((1, 2))
    often = BATCHES * EPOCHS
    if place in ("commit", "track"):
        ranks = [0]
    call = rng.randint(1, 2)
    if place in (*IN_BATCHES, *EVENTS, "reduce", "track", "between"):
        call = rng.randint(1, often)
    elif place in OF_FILES:
        call = rng.randint(1, 6)
    if place in ("on_train_begin", "on_train_end", "save_model", "after", "on_predict"):
        call = 1
    if place == "get_state_dict":
        call = 1
    every = rng.choice((1, 2, 3))
    return {
        "seed": seed,
        "kind": kind,
        "world": world,
        "layout": rng.randrange(5),
        "nodes": rng.random() < 0.5,
        "place": place,
        "what": what,
        "ranks": ranks,
        "call": call,
        "catches": rng.choice(CATCHES),
        "every": every,
        "limit": rng.choice((None, 2)),
        "best": rng.random() < 0.3,
        "async": rng.random() < 0.3,
        "accumulate": accumulate,
        "workers": rng.choice((0, 0, 0, 1)),
        "other_world": rng.choice((2, 2, 4)),
        "other_layout": rng.randrange(5),
    }


def knobs_of(world: int, layout: int, accumulate: int) -> dict[str, Any]:
    knobs = LAYOUTS[world][layout]
    if "pipeline_parallel_degree" in knobs:
        return {**knobs, "pipeline": {"schedule": "1f1b", "microbatches": 2}}
    return knobs


def conduct(trial: dict[str, Any], top: Path) -> dict[str, Any]:
    folder = top / str(trial["seed"])
    (folder / "shm").mkdir(parents=True)
    world, other = trial["world"], trial["other_world"]
    accumulate = trial["accumulate"]
    first = run_world(
        train,
        trial,
        folder,
        world,
        knobs_of(world, trial["layout"], accumulate),
        False,
    )
    second = run_world(
        train,
        trial,
        folder,
        other,
        knobs_of(other, trial["other_layout"], accumulate),
        True,
    )
    texts = [(folder / f"first-{rank}.2").read_text() for rank in range(world)]
    said = [
        line
        for text in texts
        for line in text.splitlines()
        if "torch-smp, rank" in line or re.search(r"Error: .*rank \d", line)
    ]
    printed = [(folder / f"first-{rank}.1").read_text() for rank in range(world)]
    caught = any("CAUGHT" in text or "SKIPS" in text for text in printed)
    return {"first": first, "second": second, "said": said, "caught": caught}


def reference(trial: dict[str, Any], top: Path) -> dict[str, torch.Tensor]:
    parts = ("kind", "accumulate", "every", "best")
    place = top / "-".join(["whole", *(str(trial[part]) for part in parts)])
    if not (place / "end").exists():
        place.mkdir(parents=True)
        quiet = {**trial, "workers": 0, "what": "", "catches": "", "async": False}
        pid = fork_rank(lambda: train(quiet, place, 1, None, True), {}, place / "alone")
        os.waitpid(pid, 0)
    return load_file(place / "end" / "model.safetensors")


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
    expected = reference(trial, top)
    for name in ("end", "first"):
        path = folder / name / "model.safetensors"
        if not path.exists():
            if name == "end":
                wrong.append("the run that goes on has no weights")
            continue
        if name == "first" and found["caught"]:
            continue
        got = load_file(path)
        for key, value in expected.items():
            if not (got[key] - value).abs().max().item() < 1e-4:
                off = (got[key] - value).abs().max().item()
                wrong.append(f"{name}: {key} differs by {off}")
                break
    struck = set(trial["ranks"])
    others = [rank for rank in range(trial["world"]) if rank not in struck]
    happened = any(first["statuses"]) or first["hung"]
    strays = [
        line
        for line in found["said"]
        for rank in others
        if f"rank {rank} failed" in line or f": rank {rank} was lost" in line
        # An error that names the struck one.
        if not any(f"rank {each} was lost" in line for each in struck)
    ]
    if strays and trial["what"] != "nan":
        wrong.append(f"names another: {strays}")
    if (
        trial["what"] not in ("term", "nan")
        and happened
        and others
        and trial["place"] not in ("after", "on_train_end")
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
