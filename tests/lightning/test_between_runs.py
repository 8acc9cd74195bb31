"""Between a Trainer's runs a call that needs all ranks says so at once where one of
them is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smp_core.watch.rank_watch import stop_watching, watch_ranks
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, token_rows
from tests.lightning.running import make_trainer


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def after_fit() -> dict[str, Any]:
    """What each of four ranks, two of which hold a model together, gets and is told
    after a run."""
    rank, module = dist.get_rank(), LanguageModule(batches=1)
    trainer = make_trainer({"shard_degree": 2})
    trainer.fit(module)
    watch = watch_ranks()
    assert watch is not None
    tokens = token_rows(1)[:2]

    def predict() -> float:
        with torch.no_grad():
            return module.loss(tokens).item()

    def validate() -> None:
        trainer.validate(module, verbose=False)

    seen: dict[str, Any] = {"together": predict()}
    if rank < 2:  # the other two hold a whole model as well
        predict()
        seen["another run"] = said(predict if rank == 0 else validate)
        seen["a save"] = said(
            predict if rank == 0 else lambda: trainer.save_checkpoint("nowhere")
        )
    validate()
    seen["goes on"] = predict() == seen["together"] and watch is watch_ranks()
    if rank == 1:
        watch.meetings.limit = 0.1
        seen["nobody comes"] = said(predict)
    dist.barrier()
    if rank == 0:
        seen["too late"] = said(predict)
    dist.barrier()
    if rank == 1:
        stop_watching()  # as at the end of its process
    if rank == 0:
        seen["the end"] = said(predict)
    return seen


def test_a_call_that_not_all_ranks_make_after_fit_says_where_each_of_them_is() -> None:
    ranks = run_ranks(after_fit, 4)
    assert [seen["goes on"] for seen in ranks] == [True] * 4
    for seen in ranks[:2]:
        for event, call in ("another run", "validate"), ("a save", "save_checkpoint"):
            assert re.search(
                r"rank 0 (is )?at LanguageModule\.model\(\.\.\.\)", seen[event]
            ), seen[event]
            assert re.search(
                rf"rank 1 (is )?at trainer\.{call}\(\.\.\.\)", seen[event]
            ), seen[event]
    assert (
        "rank 1 is at" in ranks[1]["nobody comes"]
        and ranks[0]["too late"] == ranks[1]["nobody comes"]
    )
    assert (
        "rank 1 at the end of its process" in ranks[0]["the end"]
        and "is_global_zero" in ranks[0]["the end"]
    )
