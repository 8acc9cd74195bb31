"""A run whose job is about to be ended saves on all ranks at one step, leaves, and goes
on as if nothing had been."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import smp_core.checkpoint.folders.storage as storage
from smp_core.watch import preemption
from smp_core.watch.preemption import Preempted
from tests.accelerate.running import full_weights, prepared
from tests.accelerate.trainers import Run, make_model, make_trainer, whole_weights
from tests.core.models import loss_of
from tests.harness import run_ranks

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


class Tells(TrainerCallback):
    """Tells ranks that the job is about to be ended when they come to a place from step
    3 on; evaluations come at 6."""

    def __init__(self, place: str, ranks: tuple[int, ...], number: int) -> None:
        self.place, self.number, self.mine = place, number, dist.get_rank() in ranks
        self.predicted = self.step = 0

    def tell(self, place: str) -> None:
        if place == self.place and self.mine and self.step >= 3:
            self.mine = False
            os.kill(os.getpid(), self.number)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        self.tell("step")
        if state.global_step == 5:
            self.tell("step before an evaluation")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("window")

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        self.tell("gradients")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("step end")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("epoch end")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("epoch start")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.predicted += 1
        self.tell("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("evaluation end")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("save")


@contextlib.contextmanager
def telling_while_files_are_written(tells: Tells) -> Iterator[None]:
    close = storage.Sink.close

    def closed(sink: storage.Sink) -> Any:
        tells.tell("writing")
        return close(sink)

    with mock.patch.object(storage.Sink, "close", closed):
        yield


def train(
    folder: Path, case: dict[str, Any] | None = None, resume: bool = False
) -> Run:
    case = dict(case or {})
    tells = Tells(
        case.pop("place", ""), case.pop("ranks", ()), case.pop("number", TERM)
    )
    micro_batches, options = case.pop("micro_batches", 1), case.pop("flags", {})
    model = make_model(dist.get_rank())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    flags = {
        "model": model,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "per_device_eval_batch_size": 1,
        "save_steps": 5,
        **options,
    }
    trainer, recorder = make_trainer(
        folder,
        4,
        micro_batches,
        {"shard_degree": 2, **case},
        save_strategy="steps",
        num_train_epochs=2,
        **flags,
    )
    trainer.add_callback(tells)
    run, code = recorder.run, None
    try:
        with telling_while_files_are_written(tells):
            trainer.train(resume_from_checkpoint="last" if resume else None)
    except Preempted as end:
        code = end.code
    run.weights = whole_weights(trainer.model)
    found = sorted(
        int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")
    )
    run.extra = {
        "code": code,
        "step": trainer.state.global_step,
        "saved": found[-1],
        "predicted": tells.predicted,
        "handler": signal.getsignal(TERM) is signal.SIG_DFL,
        "evaluated": [
            seen["eval_loss"]
            for seen in trainer.state.log_history
            if "eval_loss" in seen
        ],
    }
    return run


def interrupted(folder: str, cases: list[dict[str, Any]]) -> list[tuple[Run, Run, Run]]:
    """For each case an uninterrupted run, one that is told, and the one that goes on
    from it."""
    seen = []
    # Ranks agree at each step, however long the steps take here.
    preemption._EVERY_CALLS = 1
    plain: dict[int, Run] = {}
    for number, case in enumerate(cases):
        rest = {
            key: value
            for key, value in case.items()
            if key not in ("place", "ranks", "number")
        }
        place, window = Path(folder, str(number)), case.get("micro_batches", 1)
        if window not in plain:
            plain[window] = train(Path(folder, f"plain{window}"), rest)
        seen.append(
            (plain[window], train(place, case), train(place, rest, resume=True))
        )
    return seen


def check(case: dict[str, Any], runs: list[tuple[Run, Run, Run]]) -> None:
    assert len({left.extra["step"] for _, left, _ in runs}) == 1
    for plain, left, resumed in runs:
        assert left.extra["code"] == 128 + case.get("number", TERM)
        assert plain.extra["code"] is None and resumed.extra["code"] is None
        assert left.extra["handler"] and resumed.extra["handler"]
        step = left.extra["step"]
        assert (
            3
            <= step
            == left.extra["saved"]
            < plain.extra["step"]
            == resumed.extra["step"]
        )
        if case["place"] == "step before an evaluation":
            assert step == 6 and not left.extra["evaluated"]
        if case["place"] == "evaluation":
            in_time = (
                case["checkpoint"] == "sharded"
                or case["checkpoint"]["preemption_grace_s"] > 1
            )
            assert (
                (step > 6)
                if in_time
                else (step == 6 and 0 < left.extra["predicted"] < 16)
            )
        assert left.losses + resumed.losses == plain.losses
        assert resumed.extra["evaluated"] == plain.extra["evaluated"]
        for name, value in plain.weights.items():
            assert torch.equal(value, resumed.weights[name]), name


HASTE = {"async_save": True, "preemption_grace_s": 0.01}
FIRST: list[dict[str, Any]] = [
    {"place": "evaluation", "ranks": (1,), "checkpoint": HASTE},
    {"place": "step before an evaluation", "ranks": (0,), "checkpoint": "sharded"},
]
INSTANTS = (
    *(
        "step",
        "window",
        "gradients",
        "optimizer",
        "step end",
        "epoch end",
        "epoch start",
    ),
    *("evaluation", "evaluation end", "save", "writing"),
)


def cases_at(place: str) -> list[dict[str, Any]]:
    """Both signals, one rank or all, saves in training or behind it: eight cases, some
    in haste."""
    cases = []
    for number, (sent, everyone, behind) in enumerate(
        itertools.product((TERM, USR1), (False, True), (False, True))
    ):
        one = ((INSTANTS.index(place) + number) % 2,)
        grace = 0.01 if number % 3 == 0 else 30.0
        cases.append(
            {
                "place": place,
                "ranks": (0, 1) if everyone else one,
                "number": sent,
                "micro_batches": 2 if place == "window" or number % 4 == 3 else 1,
                "checkpoint": {"async_save": behind, "preemption_grace_s": grace},
            }
        )
    return cases


@pytest.mark.slow  # in the normal run: tests/lightning/test_preemption.py
def test_a_trainer_that_is_told_to_end_saves_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    """To the last bit, evaluations included; rank 1 alone is told."""
    by_rank = run_ranks(interrupted, 2, str(tmp_path), FIRST)
    for number, case in enumerate(FIRST):
        check(case, [seen[number] for seen in by_rank])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", INSTANTS)
def test_a_trainer_that_is_told_at_any_instant(place: str, tmp_path: Path) -> None:
    """11 instants x 2 signals x one rank or all x saves in training or behind it."""
    cases = cases_at(place)
    by_rank = run_ranks(interrupted, 2, str(tmp_path), cases, timeout=1000.0)
    for number, case in enumerate(cases):
        check(case, [seen[number] for seen in by_rank])


def from_the_end_of_an_epoch(folder: str) -> tuple[Run, Run]:
    """An uninterrupted run, and one from the checkpoint of an epoch's last step, which
    came before the evaluation."""
    case = {
        "checkpoint": {"preemption_grace_s": 0},
        "flags": {"eval_strategy": "epoch", "save_steps": 12},
    }
    plain = train(Path(folder), case)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder, "checkpoint-24"))
    dist.barrier()
    return plain, train(Path(folder), case, resume=True)


@pytest.mark.slow
def test_without_a_grace_a_checkpoint_says_too_that_it_lacks_an_evaluation(
    tmp_path: Path,
) -> None:
    for plain, resumed in run_ranks(from_the_end_of_an_epoch, 2, str(tmp_path)):
        assert plain.losses[12:] == resumed.losses
        assert (
            len(plain.extra["evaluated"]) == 2
            and resumed.extra["evaluated"] == plain.extra["evaluated"]
        )


def loop(
    folder: str | None, told: int, resume: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """A bare loop that asks after each step."""
    accelerator, optimizer, model, loader, scheduler = prepared(
        torch.float64, 1, steps=24, shard_degree=2
    )
    losses: list[float] = []
    done = 0
    if resume:
        accelerator.load_state(folder)
        done = scheduler.scheduler.last_epoch
    try:
        for step, batch in enumerate(
            accelerator.skip_first_batches(loader, done), done
        ):
            if step == told and dist.get_rank() == 1:
                os.kill(os.getpid(), TERM)
            loss = loss_of(model, batch["tokens"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.is_preempted():
                accelerator.save_state(folder)
                accelerator.leave()
    except Preempted as end:
        return losses, full_weights(model), end.code
    finally:
        accelerator.preemption.restore()
    return losses, full_weights(model), None


def handlers_of_a_loop() -> list[bool]:
    """Whether SIGTERM is handled while a loop asks for notices, and at its end."""
    accelerator = prepared(torch.float64, 1, steps=1, shard_degree=2)[0]
    before = signal.getsignal(TERM)
    accelerator.is_preempted()
    taken = [signal.getsignal(TERM) is not before]
    accelerator.end_training()
    return [*taken, signal.getsignal(TERM) is not before]


def test_a_loop_that_has_ended_leaves_sigterm_to_the_script() -> None:
    assert run_ranks(handlers_of_a_loop, 2) == [[True, False]] * 2


def loops(folder: str) -> tuple[Any, Any, Any]:
    return loop(None, -1), loop(folder, 3), loop(folder, -1, resume=True)


def test_a_loop_that_asks_after_each_step_hears_it_on_all_ranks_at_once(
    tmp_path: Path,
) -> None:
    by_rank = run_ranks(loops, 2, str(tmp_path / "state"))
    assert len({len(left[0]) for _, left, _ in by_rank}) == 1
    for plain, left, resumed in by_rank:
        assert plain[2] is None and resumed[2] is None and left[2] == 143
        assert 4 <= len(left[0]) < 24
        assert left[0] + resumed[0] == plain[0]
        assert all(
            torch.equal(value, resumed[1][name]) for name, value in plain[1].items()
        )
