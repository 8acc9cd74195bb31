"""A plan that is picked fits: its own dry run never takes more memory than the device
has. Over models, clusters, batches and precisions drawn from a seed, on devices with so
little memory that it decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from smp_core.dry_run import split_trace
from smp_core.planner import NothingFits, Workload, plan, trace
from smp_core.planner.candidate import Candidate
from smp_core.planner.devices import Device
from smp_core.planner.dry_run import Question, dry_run
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware

QUICK = (0,)  # parameters that stay gathered for the next micro-batch
SLOW = 24
# Memory of stages is planned up to a quarter too high: test_dry_run.py compares it.
# Every fourth seed has context ranks.
FIXED = {"pipeline": 1}


def drawn_model(seeded: random.Random) -> dict[str, Any]:
    heads = seeded.choice([4, 6, 8])
    width, layers, words = (
        heads * seeded.choice([16, 32, 48]),
        seeded.randint(2, 5),
        seeded.randint(200, 4000),
    )
    if seeded.random() < 0.5:
        sizes = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": words,
        }
        # Context ranks cannot drop scores.
        return {"model_type": "gpt2", "attn_pdrop": 0.0, **sizes}
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": seeded.choice([2, 3]) * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": seeded.choice([heads, heads // 2]),
        "vocab_size": words,
        "tie_word_embeddings": seeded.random() < 0.5,
    }


def drawn_pick(seed: int, splits: bool) -> tuple[Candidate, Question]:
    """Draw a model, and machines and batches until a plan fits; memory grows with each
    that does not.

    Args:
        splits: with tensor ranks where they are best; without them the trace takes half
            the time.
    """
    seeded = random.Random(seed)
    fields, tokens = drawn_model(seeded), seeded.choice([64, 128, 192])
    traced = (
        split_trace.trace_model("drawn", tokens, fields)
        if splits
        else trace.trace_model("drawn", tokens, fields)
    )
    fixed = (
        FIXED
        | {"context": 2 if seed % 4 == 3 else 1}
        | ({} if splits else {"tensor": 1})
    )
    room = 0.005
    while True:
        room *= seeded.uniform(1.2, 2.0)
        # Communicators would weigh more than all of a small model.
        fitted = replace(FITTED, communicator_gib=0.0)
        device = Device(
            "small", fitted.context_gib + room, 1e12, 1e11, 1e10, "no data sheet", 1e13
        )
        hardware = Hardware(seeded.choice([1, 2, 4]), 4, device, 100.0, fitted=fitted)
        batch = hardware.devices * seeded.choice([1, 2, 3])
        work = Workload(
            tokens,
            batch,
            seeded.choice(["mixed", "bfloat16"]),
            seeded.choice(["adamw", "sgd"]),
        )
        try:
            pick = plan(traced, hardware, work, fixed=fixed).chosen
        except NothingFits as error:
            assert all(each.memory.fits for _, each in error.changes)
            continue
        asked = (
            pick.knobs,
            tokens,
            pick.micro_batch,
            pick.count,
            work.precision,
            work.optimizer,
        )
        return pick, Question("drawn", hardware, *asked, fields=fields)


def check(seeds: Sequence[int], splits: bool) -> None:
    drawn = [drawn_pick(seed, splits) for seed in seeds]
    too_large = []
    for (pick, question), ran in zip(
        drawn, dry_run(*(question for _, question in drawn)), strict=True
    ):
        planned = pick.memory.total - pick.memory.margin
        # Also without the margin, but for what a trace of two blocks rounds.
        if ran.total > min(pick.memory.capacity, 1.03 * planned):
            too_large.append((question, ran.total / planned))
    assert not too_large


@pytest.mark.slow
def test_picks_fit_in_their_own_dry_runs() -> None:
    check(QUICK, splits=False)


@pytest.mark.slow
def test_many_picks_fit_in_their_own_dry_runs() -> None:
    check([seed for seed in range(SLOW) if seed not in QUICK], splits=True)
