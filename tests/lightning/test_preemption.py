"""A run whose job is about to be ended saves on all ranks at one step, leaves, and goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from smp_core.checkpoint import read_manifest
from smp_core.preemption import Preempted
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import Run, make_trainer, report

VALIDATION = 12
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


class ToldModule(LanguageModule):
    """Tells ``ranks`` that the job is about to be ended when it comes to ``place`` for the first time in batch ``at``
    or later; computes with numbers of each rank's own generator."""

    place, at, ranks, number = "", 3, (0,), TERM
    told_at: int | None = None
    validated = 0
    in_validation = False

    def come_to(self, place: str, batch: int) -> None:
        if place == self.place and batch >= self.at and self.told_at is None:
            self.told_at = self.trainer.global_step
            if rank() in self.ranks:
                os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.come_to("step", batch_idx)
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.come_to("optimizer", args[1])
        super().optimizer_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        self.validated, self.in_validation = 0, True

    def on_validation_end(self) -> None:
        self.in_validation = False

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.validated += 1
        self.come_to("validation", batch_idx + 3)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.come_to("save", self.trainer.global_step)


def train(
    folder: Path, resume: bool = False, accumulate: int = 1, told: dict[str, Any] | None = None, **knobs: Any
) -> Run:
    """One run of 24 batches, with checkpoints and validations in between; its end is in ``extra``."""
    seed_everything(3 + rank(), verbose=False)
    module = ToldModule(24, VALIDATION)
    for name, value in (told or {}).items():
        setattr(module, name, value)
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=5 if accumulate == 1 else 2)
    flags = {"enable_checkpointing": True, "callbacks": [saver], "accumulate_grad_batches": accumulate}
    trainer = make_trainer({"shard_degree": 2, **knobs}, val_check_interval=12, **flags)
    code: Any = None
    try:
        trainer.fit(module, ckpt_path="last" if resume else None)
    except Preempted as end:
        code = end.code
    saved = folder / "last-preempted.ckpt"
    step = read_manifest(saved).metadata["step"] if code is not None else None
    handlers = [signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler) for number in (TERM, USR1)]
    seen = {"code": code, "told_at": module.told_at, "step": step, "handlers": handlers}
    left_in = module.validated if module.in_validation else 0
    return report(trainer, module, validated=left_in, reached=trainer.global_step, **seen)


def interrupted(folder: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[Run, Run, Run]]:
    """For each case an uninterrupted run, one that is told, and the one that goes on from it."""
    seen = []
    plain: dict[int, Run] = {}
    for number, (told, options) in enumerate(cases):
        steps = options.get("accumulate", 1)
        if steps not in plain:
            plain[steps] = train(Path(folder, f"plain{steps}"), accumulate=steps)
        place = Path(folder, str(number))
        seen.append((plain[steps], train(place, told=told, **options), train(place, resume=True, **options)))
    return seen


def check(case: tuple[dict[str, Any], dict[str, Any]], runs: list[tuple[Run, Run, Run]]) -> None:
    """What all ranks saw in one case."""
    told, options = case
    codes = {left.extra["code"] for _, left, _ in runs}
    assert codes == {128 + told.get("number", TERM)}
    steps = {left.extra["step"] for _, left, _ in runs}
    assert len(steps) == 1
    step = steps.pop()
    for plain, left, resumed in runs:
        assert plain.extra["code"] is None and resumed.extra["code"] is None
        assert left.extra["handlers"] == resumed.extra["handlers"] == [True, True]
        assert (
            left.extra["told_at"] <= step == left.extra["reached"] < plain.extra["reached"] == resumed.extra["reached"]
        )
        if told["place"] == "validation" and options["checkpoint"] == {"preemption_grace_s": 0.01}:
            assert 0 < left.extra["validated"] < VALIDATION
        done = step * options.get("accumulate", 1)
        assert left.losses[:done] + resumed.losses == plain.losses
        for name, value in plain.weights.items():
            assert torch.equal(value, resumed.weights[name]), name


FIRST = [
    ({"place": "step", "ranks": (0, 1), "number": USR1}, {"accumulate": 4, "checkpoint": "async"}),
    ({"place": "step", "ranks": (1,)}, {}),
    ({"place": "validation", "ranks": (1,), "at": 4}, {"checkpoint": {"preemption_grace_s": 0.01}}),
]
MORE = [
    *(
        ({"place": place, "ranks": ranks, "number": number}, {"accumulate": accumulate, "checkpoint": checkpoint})
        for place in ("step", "optimizer", "validation", "save")
        for ranks, number in (((0,), TERM), ((1,), USR1), ((0, 1), TERM))
        for accumulate, checkpoint in ((1, "sharded"), (1, "async"), (3, "sharded"), (3, {"preemption_grace_s": 0.01}))
    ),
]


def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """One rank is told or all are, in a step, in a window, in a validation; to the last bit."""
    by_rank = run_ranks(interrupted, 2, str(tmp_path), FIRST)
    for number, case in enumerate(FIRST):
        check(case, [seen[number] for seen in by_rank])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step", "optimizer", "validation", "save"])
def test_at_every_instant_and_for_every_kind_of_save(place: str, tmp_path: Path) -> None:
    cases = [case for case in MORE if case[0]["place"] == place]
    by_rank = run_ranks(interrupted, 2, str(tmp_path), cases, timeout=900.0)
    for number, case in enumerate(cases):
        check(case, [seen[number] for seen in by_rank])
