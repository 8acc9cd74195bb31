"""A script as Accelerate's users write them; `--smp` is the one line that makes it
torch-smp's. Prints its losses."""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smp", action="store_true")
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()
    kind = Accelerator
    if args.smp:
        from accelerate_smp import SmpAccelerator as kind

    accelerator = kind(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(48, 6, dtype=torch.float64)
    samples = [{"x": x, "y": x.sum(0, keepdim=True)} for x in inputs]
    loader = DataLoader(samples, batch_size=args.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    result = json.dumps(
        {"losses": losses, "ranks": accelerator.num_processes, "sharded": sharded}
    )
    # In one piece: the ranks share one stream.
    accelerator.print(f"RESULT {result}\n", end="")
    accelerator.end_training()


if __name__ == "__main__":
    main()
