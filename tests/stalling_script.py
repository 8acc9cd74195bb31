"""A training script, as a user would write one, in which a rank goes its own way in the
third step.

    python -m tests.stalling_script FACE EVENT RANK UNTIL

FACE is "lightning" or "accelerate", EVENT a key of ``EVENTS`` or ``GIVEN``,
"validation" or "none", RANK who it happens to. Any rank ends the run as soon as it has
written a line to stderr that matches UNTIL: what hangs would go on for minutes
otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, STRIKES = 16, 2
STEPS = int(os.environ.get("STEPS", 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class TwoTowers(nn.Module):
    """Text, to which samples with an image add what the vision tower makes of it."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Block() for _ in range(2))
        self.text = nn.ModuleList(Block() for _ in range(layers))

    def forward(
        self, x: torch.Tensor, image: torch.Tensor | None = None, layers: int = 2
    ) -> torch.Tensor:
        if image is not None:
            for block in self.vision:
                image = block(image)
            x = x + image
        for block in [*self.text, *self.text][:layers]:
            x = block(x)
        return x


class Step:
    """What a step on this rank is made of; an event changes it."""

    def __init__(self) -> None:
        self.image: torch.Tensor | None = None
        self.layers, self.swallows, self.detaches, self.nothing, self.micro_batches = (
            2,
            False,
            False,
            False,
            1,
        )
        self.freezes = self.evaluates = self.ends = False

    def loss(self, model: nn.Module) -> torch.Tensor | None:
        x = torch.randn(4, WIDTH)
        if self.freezes:
            for parameter in model.text[0].parameters():  # type: ignore[union-attr, index]
                parameter.requires_grad_(False)
        if self.evaluates:
            with torch.no_grad():
                model(x)
        if self.swallows:
            try:
                return model(x, torch.randn(4, WIDTH + 1)).square().mean()
            except RuntimeError:
                pass  # a user who prints it and goes on
        loss = model(x, self.image, self.layers).square().mean()
        if self.nothing:
            return None
        return (
            (loss.detach() * torch.ones((), requires_grad=True))
            if self.detaches
            else loss
        )


def sleep_in_user_code(_: Step) -> None:
    time.sleep(600)


def wait_for_a_lock(_: Step) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_input(_: Step) -> None:
    read, _write = os.pipe()
    os.read(read, 1)


def load_data(_: Step) -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            while True:
                time.sleep(0.01)
                if not dist.is_initialized():
                    yield 0

    next(iter(torch.utils.data.DataLoader(Endless())))


def save(_: Step) -> None:
    with open(os.devnull, "wb") as file:
        while file:
            torch.save(torch.zeros(1000), file)
            time.sleep(0.1)


def barrier(_: Step) -> None:
    dist.barrier()


def stop(_: Step) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def swap_out(_: Step) -> None:
    """As on a machine without memory: the process gets a turn now and then."""
    if os.fork():
        return
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() != 1:
            for number, seconds in ((signal.SIGSTOP, 9.0), (signal.SIGCONT, 0.1)):
                os.kill(os.getppid(), number)
                time.sleep(seconds)
    os._exit(0)


def kill(_: Step) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_: Step) -> None:
    sys.exit("enough")


def fail(_: Step) -> None:
    raise ArithmeticError("the user's own mistake")


def setting(**fields: Any) -> Callable[[Step], None]:
    def change(step: Step) -> None:
        vars(step).update(fields)

    return change


# Events at the beginning: what the rank is given.
GIVEN = {"knobs": {"reshard_after_forward": False}, "model": {"layers": 3}}
EVENTS: dict[str, Callable[[Step], None]] = {
    "image": setting(image=torch.randn(4, WIDTH)),
    "fewer layers": setting(layers=1),
    "more layers": setting(layers=4),
    "swallowed": setting(swallows=True, image=torch.randn(4, WIDTH)),
    "no gradient": setting(detaches=True),
    "nothing": setting(nothing=True),
    "micro-batches": setting(micro_batches=2),
    "frozen": setting(freezes=True),
    "evaluation": setting(evaluates=True),
    "end": setting(ends=True),
    "sleep": sleep_in_user_code,
    "lock": wait_for_a_lock,
    "input": wait_for_input,
    "loader": load_data,
    "save": save,
    "barrier": barrier,
    "stop": stop,
    "swap": swap_out,
    "kill": kill,
    "leave": leave,
    "fail": fail,
}


class Until:
    """stderr, until a line matches."""

    def __init__(self, pattern: str) -> None:
        self._stderr, self._pattern = sys.stderr, re.compile(pattern)

    def write(self, text: str) -> int:
        written = self._stderr.write(text)
        if self._pattern.search(text):
            self._stderr.write(f"seen at {time.time():.1f}\n")
            self._stderr.flush()
            os._exit(3)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)


def struck(step: Step, index: int, event: str, rank: int) -> Step:
    if index == STRIKES and dist.get_rank() == rank and event in EVENTS:
        sys.stderr.write(f"struck at {time.time():.1f}\n")
        EVENTS[event](step)
    return step


def with_accelerate(event: str, rank: int) -> None:
    from accelerate import InitProcessGroupKwargs

    from accelerate_smp import SmpAccelerator

    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=120))
    knobs = {"shard_degree": "world", **given("knobs", event, rank)}
    accelerator = SmpAccelerator(smp_config=knobs, kwargs_handlers=[limit])
    model = TwoTowers(**given("model", event, rank))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for index in range(STEPS):
        step = struck(Step(), index, event, rank)
        for micro in range(step.micro_batches):
            with (
                accelerator.no_sync(model)
                if micro < step.micro_batches - 1
                else torch.enable_grad()
            ):
                loss = step.loss(model)
                if loss is not None:
                    accelerator.backward(loss)
        optimizer.step()
        if step.ends:
            break
        optimizer.zero_grad()
    accelerator.end_training()


def with_lightning(event: str, rank: int) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_smp import SmpShardedStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TwoTowers(**given("model", event, rank))

        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            step = struck(Step(), index, event, rank)
            self.trainer.should_stop = step.ends
            return step.loss(self.model)

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(torch.randn(4, WIDTH))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Rows(torch.utils.data.IterableDataset[int]):
        """Batches of an evaluation, of which the rank that is struck has more."""

        def __iter__(self) -> Any:
            return iter(
                range(4 if event == "validation" and dist.get_rank() == rank else 2)
            )

    knobs = given("knobs", event, rank)
    strategy = SmpShardedStrategy(
        shard_degree="world", timeout=timedelta(seconds=120), **knobs
    )
    quiet: dict[str, Any] = dict.fromkeys(
        (
            "logger",
            "enable_progress_bar",
            "enable_model_summary",
            "enable_checkpointing",
        ),
        False,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=dist_ranks(),
        strategy=strategy,
        max_epochs=1,
        **quiet,
    )
    rows = torch.utils.data.DataLoader(torch.arange(STEPS * dist_ranks()), batch_size=1)
    trainer.fit(
        Module(),
        rows,
        torch.utils.data.DataLoader(Rows()) if event == "validation" else None,
    )


def given(what: str, event: str, rank: int) -> dict[str, Any]:
    return GIVEN[what] if event == what and int(os.environ["RANK"]) == rank else {}


def dist_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def main(face: str, event: str, rank: str, until: str) -> None:
    torch.manual_seed(0)
    sys.stderr = Until(until)  # type: ignore[assignment]
    {"accelerate": with_accelerate, "lightning": with_lightning}[face](event, int(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
