"""Blocks that take caches of keys and values, by position as GPT-2's do: a block that
is run twice, to be tried out or computed again, appends to none twice. The loss is
float32, as Transformers computes it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks

KNOBS: list[dict[str, Any]] = [
    {"tensor_parallel_degree": 2},
    {"activations": "full"},
    {"activations": "selective"},
]


def loss_and_norm(knobs: dict[str, Any] | None) -> tuple[float, float]:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
    off = {
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, **off)).double()
    assert model.config.use_cache
    tokens = torch.arange(32).view(2, 16)
    parallel = (
        None
        if knobs is None
        else parallelize(model, SmpConfig(shard_degree=1, **knobs))
    )
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if parallel is None:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
    else:
        norm = parallel.clip_grad_norm_(1e9)
    return loss.item(), float(norm)


def each() -> list[tuple[float, float]]:
    return [loss_and_norm(knobs) for knobs in KNOBS]


def test_a_model_with_its_cache_on_trains_like_one_process() -> None:
    expected = loss_and_norm(None)
    for seen in run_ranks(each, 2):
        for knobs, found in zip(KNOBS, seen, strict=True):
            assert all(
                abs(a - b) <= 1e-6 * abs(b)
                for a, b in zip(found, expected, strict=True)
            ), knobs
