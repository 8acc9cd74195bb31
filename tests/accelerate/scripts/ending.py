"""A bare loop, or a Trainer, in which something happens in the third step.

    ending.py KIND EVENT RANK FOLDER

KIND is "loop" or "trainer". RANK raises an exception ("raise"), is killed ("kill") or
stopped ("stop"), leaves by sys.exit ("exit"), or registers a hook of a parameter in the
first of two micro-batches ("hook"). Every rank writes its process id into FOLDER.

The ranks ignore SIGTERM: torchrun sends it within 0.1 s of a loss, and on a busy
machine it would end the survivors before their collective has failed. What they say by
themselves is what is looked at here; torchrun's own report names the rank either way.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from accelerate_smp import SmpAccelerator

kind, event, rank, folder = (
    sys.argv[1],
    sys.argv[2],
    int(sys.argv[3]),
    Path(sys.argv[4]),
)


# Seconds, of collectives: a rank may start this much later than the others on a busy
# machine. A lost one is noticed at once.
TIMEOUT = 20 if event == "stop" else 200


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.forwards += 1
        if self.forwards == 3 and int(os.environ["RANK"]) == rank:
            if event == "raise":
                raise ArithmeticError("the user's own mistake")
            if event == "exit":
                sys.exit("enough")
            if event == "hook":
                self.layer.weight.register_hook(torch.abs)
            else:
                os.kill(
                    os.getpid(), signal.SIGSTOP if event == "stop" else signal.SIGKILL
                )
        time.sleep(0.02)
        return {"loss": self.layer(x).square().mean()}


def loop() -> None:
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT))
    accelerator = SmpAccelerator(
        gradient_accumulation_steps=1 + (event == "hook"), kwargs_handlers=[timeout]
    )
    model = Model()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1)
    )
    write_process_id(accelerator)
    while True:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(2, 4))["loss"])
            optimizer.step()
            optimizer.zero_grad()


def trainer() -> None:
    from transformers import TrainingArguments

    from accelerate_smp import SmpTrainer

    arguments = TrainingArguments(
        output_dir=str(folder.parent / "out"),
        max_steps=100_000,
        save_strategy="no",
        report_to="none",
        ddp_timeout=TIMEOUT,
    )
    samples = [{"x": torch.randn(4)} for _ in range(64)]
    made = SmpTrainer(model=Model(), args=arguments, train_dataset=samples)
    write_process_id(made.accelerator)
    made.train()


def write_process_id(accelerator: SmpAccelerator) -> None:
    (folder / str(accelerator.process_index)).write_text(str(os.getpid()))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loop() if kind == "loop" else trainer()
    print("the run came to its end")
