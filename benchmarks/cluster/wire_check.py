#!/usr/bin/env python3
"""What the meter says left a node, against what its network card counted. Runs under
netlab:

    netlab.py run --rate 0 -- python benchmarks/cluster/wire_check.py --json wire.json

Trains a small transformer for a few steps in each layout and prints one table, bytes
per node and step. Compared are `CommMeter` (the payload of collectives, summed over the
ranks of the node) and tx_bytes of eth0 in the node's network namespace. The card counts
more than payload, and the table shows both:

- framing: 66 bytes per frame (Ethernet 14, IPv4 20, TCP 20, time stamps 12). A frame is
  what the kernel hands to the card, up to 64 KiB with segmentation offload, so this is
  far less than on a wire with frames of 1,500 bytes. Frames that only acknowledge what
  was received are part of it. "payload" is tx_bytes without 66 bytes per frame.
- gloo's own message headers, and what the meter leaves out: one flag per parameter and
  window, one norm per step, and here the barriers before and after the measured steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from netlab import counters
from rich.console import Console
from rich.table import Table
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.topology import Topology

FRAME_HEADER = 66
# Acknowledgements of the last bytes may come this much later.
SETTLE_SECONDS = 0.3

LAYOUTS: dict[str, dict[str, object]] = {
    "shard 4, two stages": {"shard_degree": 4},
    "shard 4, flat": {"shard_degree": 4, "collectives": {"hierarchical": False}},
    "shard 2, replica hop": {"shard_degree": 2},
    "shard 1, replicas": {"shard_degree": 1},
}


class Transformer(nn.Module):
    """Next-token loss of a pre-norm encoder with a causal mask."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    vocabulary: int,
) -> None:
    for number in range(micro_batches):
        with parallel.window.accumulate(number < micro_batches - 1):
            parallel.module(torch.randint(vocabulary, (1, 9))).backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def measure(
    asked: argparse.Namespace, knobs: dict[str, object]
) -> list[dict[str, float]]:
    """Measure, per node and step: metered bytes, the card's bytes, and the card's bytes
    without frame headers."""
    topology = Topology.discover()
    model = Transformer(asked.vocabulary, asked.width, asked.layers)
    parallel = parallelize(model, SmpConfig(**knobs), topology=topology)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=1e-3)
    # Connections are made by the first messages.
    train(parallel, optimizer, asked.micro_batches, asked.vocabulary)
    parallel.meter.close_step()
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    before = counters()
    dist.barrier()
    metered = 0.0
    for _ in range(asked.steps):
        train(parallel, optimizer, asked.micro_batches, asked.vocabulary)
        parallel.meter.close_step()
        metered += parallel.meter.per_step()["inter_bytes"]
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    after = counters()
    card = after["tx_bytes"] - before["tx_bytes"]
    payload = card - FRAME_HEADER * (after["tx_packets"] - before["tx_packets"])
    figures = torch.tensor([metered, card, payload], dtype=torch.float64) / asked.steps
    everyone = [torch.empty_like(figures) for _ in range(topology.world_size)]
    dist.all_gather(everyone, figures)
    nodes = []
    for ranks in topology.nodes:
        sent = sum(everyone[rank][0].item() for rank in ranks)
        _, of_card, of_payload = everyone[ranks[0]].tolist()
        nodes.append({"metered": sent, "card": of_card, "payload": of_payload})
    return nodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: measure(asked, knobs) for name, knobs in LAYOUTS.items()}
    if dist.get_rank() == 0:
        table = Table(
            "layout",
            "node",
            "metered MB",
            "eth0 MB",
            "eth0 payload MB",
            "eth0 / metered",
            title="per step",
        )
        for name, nodes in found.items():
            for number, node in enumerate(nodes):
                megabytes = [
                    f"{node[key] / 1e6:.3f}" for key in ("metered", "card", "payload")
                ]
                table.add_row(
                    name,
                    str(number),
                    *megabytes,
                    f"{node['card'] / node['metered']:.4f}",
                )
        Console(width=100).print(table)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
