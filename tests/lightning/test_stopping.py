"""A rank that stops training alone ends with an error that says so, and hangs no
other."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests.harness import RanksFailed, run_ranks
from tests.lightning.modules import LanguageModule
from tests.lightning.running import fit

SAID = (
    r"rank 0 is at trainer.should_stop = True and rank 1 at the next batch[\s\S]*"
    r"reduce_boolean_decision\(this_rank_stops, all=False\)"
)


class Stops(Callback):
    """Sets ``trainer.should_stop`` at a place, on some ranks."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        self.hook, self.ranks = hook, ranks

    def _stop(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.global_rank in self.ranks:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop("batch", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop("epoch", trainer)


def steps(hook: str, ranks: tuple[int, ...], knobs: dict[str, Any]) -> int:
    run = fit(LanguageModule, knobs=knobs, max_epochs=2, callbacks=[Stops(hook, ranks)])
    return len(run.losses)


@pytest.mark.parametrize(("hook", "shard"), [("batch", 1), ("epoch", 2)])
def test_a_rank_that_stops_alone_is_named(hook: str, shard: int) -> None:
    with pytest.raises(RanksFailed, match=SAID):
        run_ranks(steps, 2, hook, (0,), {"shard_degree": shard})


def test_ranks_that_stop_together_stop() -> None:
    at_batch, at_epoch = (
        run_ranks(steps, 2, hook, (0, 1), {"shard_degree": 2})
        for hook in ("batch", "epoch")
    )
    assert at_batch == [1, 1] and len(set(at_epoch)) == 1 and at_epoch[0] > 1
