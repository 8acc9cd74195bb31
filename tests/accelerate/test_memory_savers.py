"""The memory knobs under SmpAccelerator: the same losses and weights as without, to the last bit."""

from __future__ import annotations

from typing import Any

import torch

from tests.accelerate.running import fresh_accelerator
from tests.core.activations.models import DroppingGpt, tokens, whole
from tests.core.activations.test_offloading import OFFLOADED
from tests.harness import run_ranks

SAVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "inputs offloaded": OFFLOADED,
    "optimizer offloaded": {"state_offload": "optimizer"},
    "all offloaded": {"state_offload": "all"},
}


def train(**knobs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    accelerator = fresh_accelerator(shard_degree=2, gradient_accumulation_steps=2, **knobs)
    model = DroppingGpt(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(tokens(10 * step + accelerator.process_index))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    offloader = accelerator.parallel.activations.offloader
    fetched = 0 if offloader is None else offloader.bytes_in
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}, fetched


def train_all() -> dict[str, Any]:
    return {name: train(**knobs) for name, knobs in SAVERS.items()}


def test_every_saver_trains_the_same() -> None:
    for found in run_ranks(train_all, 2, timeout=120):
        losses, weights, _ = found["none"]
        for name, (its_losses, its_weights, _) in found.items():
            assert all(map(torch.equal, its_losses, losses)), name
            assert all(torch.equal(its_weights[key], value) for key, value in weights.items()), name
        assert found["inputs offloaded"][2] > 0
