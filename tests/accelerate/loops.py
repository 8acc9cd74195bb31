"""Random bare loops of Accelerate: drawn from a seed, and played by SmpAccelerator on
ranks, or by the plain Accelerator in one process that sees the same global batches.

A loop is a plain dict, which prints and pickles; a fixed one is ``{**USUAL, ...}``.
"""

from __future__ import annotations

import contextlib
import gc
import random
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate_smp import SmpAccelerator
from tests.accelerate.program_parts import (
    MORE_KNOBS,
    Aging,
    EveryOther,
    OwnBatches,
    Stream,
    filled,
    make_model,
    make_rows,
    whole,
)

Loop = dict[str, Any]

USUAL: Loop = {
    "seed": 1,
    "world": 2,
    "batch": 4,
    "micro_batches": 1,
    "samples": 16,
    "epochs": 2,
    "data": "seedable",
    "how": {},
    "drop_last": False,
    "tells_epoch": True,
    "models": 1,
    "kind": "dict",
    "optimizer": "AdamW",
    "schedule": None,
    "clip": None,
    "window": "accumulate",
    "eval_samples": 8,
    "extras": [],
    "knobs": {"shard_degree": 2},
    "save_after": None,
    "resume": None,
}
EXTRAS = [
    "trigger",
    "reduce",
    "pad",
    "split",
    "objects",
    "first",
    "registered",
    "norms",
    "frozen later",
]


def draw(seed: int) -> Loop:
    rng = random.Random(seed)
    loop: Loop = {**USUAL, "seed": seed}
    loop["world"] = rng.choice([2, 2, 4])
    loop["batch"], loop["micro_batches"] = rng.choice([4, 8]), rng.choice([1, 1, 2, 3])
    loop["samples"] = rng.choice(
        [
            loop["batch"] * rng.randint(2, 5),
            rng.randint(loop["batch"], 5 * loop["batch"]),
        ]
    )
    loop["epochs"] = rng.choice([1, 2, 2, 3])
    loop["data"] = rng.choice(
        [
            "seedable",
            "seedable",
            "generator",
            "order",
            "own sampler",
            "own batches",
            "aging",
            "stream",
        ]
    )
    loop["how"] = rng.choice(
        [
            {},
            {},
            {},
            {"split_batches": True},
            {"dispatch_batches": True},
            {"join": True},
        ]
    )
    if loop["data"] == "own batches":
        loop["samples"] -= loop["samples"] % loop["batch"]
    if loop["data"] in ("own batches", "aging"):
        loop["how"] = {}
    if loop["data"] == "stream" or loop["how"] == {"dispatch_batches": True}:
        # Rank 0 fills a last batch until ranks divide it, which is another number of
        # samples.
        loop["samples"] -= loop["samples"] % 4
        loop["how"] = {} if loop["how"] == {"join": True} else loop["how"]
        if loop["how"] == {"split_batches": True}:
            loop["samples"] -= loop["samples"] % loop["batch"]
    loop["drop_last"] = rng.random() < 0.2 and loop["how"] != {"join": True}
    loop["tells_epoch"] = rng.random() < 0.5
    loop["kind"] = rng.choice(["dict", "tuple", "output"])
    loop["models"] = rng.choice([1, 1, 1, 2])
    loop["optimizer"] = rng.choice(["AdamW", "SGD", "groups", "Adagrad"])
    loop["schedule"] = rng.choice([None, "linear", "cosine", "plateau", "epoch"])
    loop["clip"] = rng.choice([None, None, 0.1, 5.0, "value", "inf"])
    loop["window"] = rng.choice(["accumulate", "accumulate", "no_sync", "by hand"])
    if loop["how"] == {"join": True}:
        loop["window"] = "accumulate"
    # Whoever reads an epoch to its end before training has to say which one that is.
    loop["tells_epoch"] |= loop["window"] == "by hand"
    loop["eval_samples"] = rng.choice([8, 3, 11, 13])
    loop["extras"] = [name for name in EXTRAS if rng.random() < 0.25]
    degrees = [degree for degree in (1, 2, 4) if degree <= loop["world"]]
    loop["knobs"] = {"shard_degree": rng.choice(degrees)}
    if rng.random() < 0.5:
        loop["knobs"] |= rng.choice(MORE_KNOBS)
    if (
        loop["data"] not in ("generator",)
        and loop["how"] != {"join": True}
        and rng.random() < 0.5
    ):
        loop["save_after"] = rng.randint(1, 6)
        loop["resume"] = {
            "world": rng.choice([loop["world"], 2, 4]),
            "knobs": {"shard_degree": rng.choice([1, 2])},
        }
    return loop


class Counter:
    """An object of the user's with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


def _accelerator(loop: Loop, alone: bool, knobs: dict[str, Any]) -> Any:
    how = {name: value for name, value in loop["how"].items() if name != "join"}
    loading = DataLoaderConfiguration(
        use_seedable_sampler=loop["data"] in ("seedable", "aging"), data_seed=5, **how
    )
    options: dict[str, Any] = {"dataloader_config": loading, "cpu": True}
    options["gradient_accumulation_steps"] = loop["micro_batches"]
    if alone:
        return Accelerator(**options)
    return SmpAccelerator(schedule_in_optimizer_steps=True, **options, **knobs)


def _loader(loop: Loop, readers: int, alone: bool) -> DataLoader:
    rows = make_rows(loop["kind"], loop["samples"], "fixed", loop["seed"])
    for number, row in enumerate(rows):
        row["number"] = torch.tensor(number)
    batch = (
        loop["batch"] if loop["how"].get("split_batches") else loop["batch"] // readers
    )
    options: dict[str, Any] = {"batch_size": batch, "drop_last": loop["drop_last"]}
    if loop["data"] == "stream":
        return DataLoader(Stream(rows), **options)
    if loop["data"] == "own batches":
        return DataLoader(
            rows, batch_sampler=OwnBatches(len(rows), batch, loop["drop_last"])
        )
    if loop["data"] == "aging":
        return DataLoader(Aging(rows), shuffle=True, **options)
    if loop["data"] == "seedable":
        options["shuffle"] = True
    elif loop["data"] == "generator":
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(9)}
    elif loop["data"] == "own sampler":
        options["sampler"] = EveryOther(len(rows))
    return DataLoader(rows, **options)


def _optimizer(loop: Loop, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if loop["optimizer"] == "SGD":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    if loop["optimizer"] == "Adagrad":
        return torch.optim.Adagrad(trained, lr=0.05)
    if loop["optimizer"] == "AdamW":
        return torch.optim.AdamW(trained, lr=0.01)
    weights, others = (
        [p for p in trained if p.ndim > 1],
        [p for p in trained if p.ndim <= 1],
    )
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}],
        lr=0.01,
    )


def _schedule(loop: Loop, optimizer: torch.optim.Optimizer) -> Any:
    schedules = torch.optim.lr_scheduler
    if loop["schedule"] == "linear":
        return schedules.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 12))
    if loop["schedule"] == "cosine":
        return schedules.CosineAnnealingLR(optimizer, T_max=7)
    if loop["schedule"] == "plateau":
        return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return (
        schedules.StepLR(optimizer, step_size=1, gamma=0.7)
        if loop["schedule"] == "epoch"
        else None
    )


class Player:
    """One run of a loop."""

    def __init__(
        self, loop: Loop, folder: Path, alone: bool, knobs: dict[str, Any]
    ) -> None:
        self.loop, self.folder, self.alone = loop, folder, alone
        self.accelerator = _accelerator(loop, alone, knobs)
        readers = 1 if alone else self.accelerator.num_processes
        models = []
        for number in range(loop["models"]):
            seed = (
                loop["seed"]
                + number
                + (0 if alone else 10 * self.accelerator.process_index)
            )
            models.append(make_model(loop["kind"], seed))
        optimizers = [_optimizer(loop, model) for model in models]
        schedules = [
            each
            for each in (_schedule(loop, optimizer) for optimizer in optimizers)
            if each is not None
        ]
        loader = _loader(loop, readers, alone)
        evaluated = make_rows(loop["kind"], loop["eval_samples"], "fixed", 77)
        evaluation = DataLoader(evaluated, batch_size=max(1, 8 // readers))
        if loop["how"].get("split_batches"):
            evaluation = DataLoader(evaluated, batch_size=8)
        prepared = self.accelerator.prepare(
            *optimizers, *models, loader, evaluation, *schedules
        )
        n = len(models)
        self.optimizers, self.models = list(prepared[:n]), list(prepared[n : 2 * n])
        self.loader, self.evaluation, *self.schedules = prepared[2 * n :]
        if alone and not {"join", "dispatch_batches"} & loop["how"].keys():
            filled(self.loader)
        self.counter = Counter()
        if "registered" in loop["extras"]:
            self.accelerator.register_for_checkpointing(self.counter)
        self.steps = 0
        self.found: dict[str, Any] = {
            name: [] for name in ("losses", "norms", "rates", "numbers", "evals")
        }

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for model in self.models:
            answer = model(x=batch["x"], labels=batch["labels"])
            total = total + (answer["loss"] if isinstance(answer, dict) else answer[0])
        return total

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One micro-batch, in whatever window."""
        loss = self.loss(batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def micro_batch(
        self, number: int, batch: dict[str, torch.Tensor], is_last: bool
    ) -> None:
        accelerator, loop = self.accelerator, self.loop
        if loop["window"] == "accumulate":
            with accelerator.accumulate(*self.models):
                loss = self.backward(batch)
                self.after(loss, batch, accelerator.sync_gradients)
            return
        ends = is_last or (number + 1) % loop["micro_batches"] == 0
        accelerator.gradient_state._set_sync_gradients(ends)
        with contextlib.ExitStack() as stack:
            if not ends and loop["window"] == "no_sync":
                for model in self.models:
                    stack.enter_context(accelerator.no_sync(model))
            loss = self.backward(batch)
        self.after(loss, batch, ends)

    def after(
        self, loss: torch.Tensor, batch: dict[str, torch.Tensor], ends: bool
    ) -> None:
        accelerator, loop = self.accelerator, self.loop
        if not loop["how"].get("join"):
            self.found["losses"].append(float(accelerator.reduce(loss, "mean")))
            self.found["numbers"].append(
                sorted(accelerator.gather(batch["number"].contiguous()).tolist())
            )
        if not ends:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return
        parameters = [p for model in self.models for p in model.parameters()]
        if loop["clip"] == "value":
            accelerator.clip_grad_value_(parameters, 0.01)
        elif loop["clip"] == "inf":
            self.found["norms"].append(
                float(
                    accelerator.clip_grad_norm_(
                        parameters, 0.05, norm_type=float("inf")
                    )
                )
            )
        elif loop["clip"] is not None:
            self.found["norms"].append(
                float(accelerator.clip_grad_norm_(parameters, loop["clip"]))
            )
        if "norms" in loop["extras"]:
            self.found.setdefault("read", []).append(
                [float(whole(p).norm()) for p in parameters]
            )
        for optimizer in self.optimizers:
            optimizer.step()
        if loop["schedule"] in ("linear", "cosine"):
            for schedule in self.schedules:
                schedule.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.steps += 1
        self.counter.value += 1
        self.found["rates"].append(
            [group["lr"] for each in self.optimizers for group in each.param_groups]
        )

    def evaluate(self) -> float:
        accelerator = self.accelerator
        for model in self.models:
            model.eval()
        logits, labels = [], []
        with torch.no_grad():
            for batch in self.evaluation:
                answer = self.models[0](x=batch["x"])
                logits.append(
                    accelerator.gather_for_metrics(
                        answer["logits"] if isinstance(answer, dict) else answer[0]
                    )
                )
                labels += accelerator.gather_for_metrics(batch["labels"]).tolist()
        for model in self.models:
            model.train()
        seen = torch.cat(logits)
        self.found["evals"].append([seen.clone(), labels])
        return float(seen.square().mean())

    def extras(self) -> None:
        """Calls beside training; each number is of all ranks."""
        accelerator, extras = self.accelerator, self.loop["extras"]
        rank, ranks = accelerator.process_index, accelerator.num_processes
        if "trigger" in extras:
            if rank == ranks - 1:
                accelerator.set_trigger()
            self.note(
                "trigger", [accelerator.check_trigger(), accelerator.check_trigger()]
            )
        share = torch.ones(3, dtype=torch.float64) * 12 / ranks
        if "reduce" in extras:
            reduced = accelerator.reduce({"sum": share, "list": [share]}, "sum")
            self.note(
                "reduce",
                [
                    reduced["sum"],
                    reduced["list"][0],
                    accelerator.reduce(share * ranks, "mean", 0.5),
                ],
            )
        if "pad" in extras:
            own = torch.ones(1, 2 if rank else 3, dtype=torch.float64) / ranks
            padded = accelerator.gather(
                accelerator.pad_across_processes(own, dim=1, pad_index=0)
            )
            self.note("pad", [float(padded[:, :2].sum()), padded.shape[1]])
        if "split" in extras:
            with accelerator.split_between_processes(list(range(7))) as mine:
                self.note(
                    "split",
                    float(
                        accelerator.reduce(
                            torch.tensor(float(sum(mine)), dtype=torch.float64)
                        )
                    ),
                )
            with accelerator.split_between_processes(
                torch.arange(8), apply_padding=True
            ) as mine:
                self.note("split", sorted(accelerator.gather(mine.clone()).tolist()))
        if "objects" in extras:
            with accelerator.split_between_processes(["a", "b", "c", "d"]) as words:
                self.note(
                    "objects",
                    accelerator.gather_for_metrics(words, use_gather_object=True),
                )
        if "first" in extras:
            with accelerator.main_process_first():
                self.note("first", True)

    def note(self, name: str, value: Any) -> None:
        self.found.setdefault(name, []).append(value)

    def epoch(self, loader: Any, number: int, skipped: int) -> None:
        """Train an epoch, or what is left of it."""
        batches = (
            list(enumerate(loader))
            if self.loop["window"] == "by hand"
            else enumerate(loader)
        )
        last = len(batches) - 1 if isinstance(batches, list) else None
        for place, batch in batches:
            is_last = (
                place == last
                if last is not None
                else self.accelerator.gradient_state.end_of_dataloader
            )
            before = self.steps
            self.micro_batch(place + skipped, batch, is_last)
            if self.steps > before and self.steps == self.loop["save_after"]:
                self.found["saved in"] = [number, place + 1]
                self.accelerator.save_state(str(self.folder / "state"))

    def freeze(self) -> None:
        for model in self.models:
            model.into.bias.requires_grad_(False)

    def train(self, first_epoch: int = 0, skipped: int = 0) -> None:
        if first_epoch and "frozen later" in self.loop["extras"]:
            self.freeze()  # no state holds flags: a script sets them again
        for number in range(first_epoch, self.loop["epochs"]):
            loader = self.loader
            if self.loop["tells_epoch"]:
                loader.set_epoch(number)
            if number == first_epoch and skipped:
                loader = self.accelerator.skip_first_batches(self.loader, skipped)
            with contextlib.ExitStack() as stack:
                if self.loop["how"].get("join") and not self.alone:
                    stack.enter_context(
                        self.accelerator.join_uneven_inputs(
                            self.models, even_batches=False
                        )
                    )
                self.epoch(loader, number, skipped if number == first_epoch else 0)
            value = self.evaluate()
            for schedule in self.schedules:
                if self.loop["schedule"] == "plateau":
                    schedule.step(value)
                elif self.loop["schedule"] == "epoch":
                    schedule.step()
            self.extras()
            if "frozen later" in self.loop["extras"]:
                self.freeze()

    def end(self) -> dict[str, Any]:
        accelerator, found = self.accelerator, self.found
        if "registered" in self.loop["extras"]:
            found["counter"] = self.counter.value
        found["weights"] = []
        for number, model in enumerate(self.models):
            found["weights"].append(
                {
                    name: whole(value).clone()
                    for name, value in model.state_dict().items()
                }
            )
            state = accelerator.get_state_dict(model)
            accelerator.save_model(model, str(self.folder / f"model-{number}"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                found.setdefault("states", []).append(dict(state))
                found.setdefault("files", []).append(
                    load_file(self.folder / f"model-{number}" / "model.safetensors")
                )
            assert type(accelerator.unwrap_model(model)).__name__.endswith("Own")
        return found


def play(loop: Loop, folder: Path, alone: bool, resume: bool) -> dict[str, Any]:
    _reset()
    torch.manual_seed(3)
    player = Player(
        loop, folder, alone, loop["resume"]["knobs"] if resume else loop["knobs"]
    )
    if not resume:
        player.train()
        return player.end()
    saved = torch.load(folder / "place.pt") if (folder / "place.pt").exists() else None
    assert saved is not None
    player.accelerator.load_state(str(folder / "state"))
    player.steps = loop["save_after"]
    player.train(*saved)
    return player.end()


def play_all(
    loops: list[Loop], folder: Path, alone: bool, resume: bool = False
) -> list[dict[str, Any] | str]:
    """Play several, each in a folder of its own; an error becomes its words. On ranks
    these raise together or not."""
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str] = []
    for loop in loops:
        if dist.is_initialized():
            dist.barrier()
        print(f"loop {loop['seed']}", flush=True)
        own = folder / f"loop-{loop['seed']}"
        own.mkdir(parents=True, exist_ok=True)
        try:
            found.append(play(loop, own, alone, resume))
            place = found[-1].get("saved in")  # type: ignore[union-attr]
            if place is not None and (alone or dist.get_rank() == 0):
                torch.save(place, own / "place.pt")
        except Exception as error:
            found.append("".join(traceback.format_exception(error)))
    _reset()
    return found
