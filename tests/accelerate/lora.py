"""peft's LoRA adapters on a small model, and a bare loop's step with them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import make_dataset, make_model


def adapted(seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = make_model(0)
    torch.manual_seed(seed)
    return get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True),
    )


def split_adapter(knobs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """A bare loop's step on rows with other numbers of targets; loss over all ranks and
    the adapter's gradients."""
    accelerator = fresh_accelerator(**knobs)
    model = accelerator.prepare(adapted())
    ranks, degree = accelerator.num_processes, accelerator.context_degree
    data = accelerator.prepare(
        DataLoader(make_dataset(8), batch_size=8 * degree // ranks)
    )
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
    accelerator.parallel.window.close()
    gradients = {
        name: p.grad.full_tensor()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return accelerator.reduce(loss.detach(), "mean").item(), gradients
