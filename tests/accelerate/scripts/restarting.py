"""A run that goes on by itself, as docs/restarts.md shows it, and whose ranks are
killed meanwhile.

    torchrun --max-restarts N ... restarting.py KIND FOLDER PLAN

KIND is "trainer" or "loop". PLAN is JSON: so many ``steps``, ``every`` so many a
checkpoint, how (``checkpoint``), and ``kills``: [step, rank]. Each kill happens once,
however often the run comes there. Ranks write their losses to files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.accelerate.trainers import make_dataset, make_model

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAMPLES = 8  # of a step, over all ranks


def come_to(folder: Path, plan: dict[str, Any], step: int) -> None:
    for number, (at, killed) in enumerate(plan["kills"]):
        if killed != RANK or step < at:
            continue
        try:
            (folder / f"killed-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


def note(folder: Path, step: int, loss: float) -> None:
    with open(folder / f"losses-{WORLD}-{RANK}", "a") as file:
        file.write(f"{step} {step} {loss.hex()}\n")


def trainer(folder: Path, plan: dict[str, Any]) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from accelerate_smp import SmpTrainer

    class Watches(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            come_to(folder, plan, state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
        ) -> None:
            if "grad_norm" in logs:
                note(folder, state.global_step, float(logs["loss"]))

    model = make_model(RANK)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=SAMPLES // 2,
        max_steps=plan["steps"],
        logging_steps=1,
        save_strategy="steps",
        save_steps=plan["every"],
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=2 * plan["every"],
    )
    knobs = {"shard_degree": WORLD, "checkpoint": plan["checkpoint"]}
    made = SmpTrainer(
        model=model,
        args=arguments,
        train_dataset=make_dataset(),
        eval_dataset=make_dataset(8, seed=5),
        smp_config=knobs,
        callbacks=[Watches()],
    )
    made.train(resume_from_checkpoint="last")


def loop(folder: Path, plan: dict[str, Any]) -> None:
    from accelerate_smp import SmpAccelerator

    accelerator = SmpAccelerator(shard_degree=WORLD, checkpoint=plan["checkpoint"])
    torch.manual_seed(RANK)
    model = make_model(RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    data = torch.stack(
        [sample["input_ids"] for sample in make_dataset(plan["steps"] * SAMPLES)]
    )
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES // WORLD)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    accelerator.load_newest_state(folder / "checkpoints")
    done = accelerator.optimizer_steps
    for step, batch in enumerate(accelerator.skip_first_batches(loader, done), done):
        come_to(folder, plan, step)
        loss = model(input_ids=batch, labels=batch).loss * (1 + 0.1 * torch.rand(()))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        note(folder, step, float(loss.detach()))
        accelerator.keep_state()
        if (step + 1) % plan["every"] == 0:
            accelerator.save_state(str(folder / "checkpoints" / f"step-{step + 1:08d}"))
    accelerator.end_training()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    place.mkdir(exist_ok=True)
    {"trainer": trainer, "loop": loop}[sys.argv[1]](place, json.loads(sys.argv[3]))
    (place / f"ended-{RANK}").touch()
