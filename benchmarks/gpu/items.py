"""The items of the GPU check: what each shows, its limit, and where its rows are made.
Imports no torch.

An item is a function `rows(on)` that yields (row's name, function that measures it and
returns figures). A figure "ok" says whether something is right, "goal" and "met" what
was hoped for; everything else is shown as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PART_SECONDS = 540
"""What the limits of one part's items add up to at most: parts are for machines that
are lent for ten minutes."""

PARTS = {
    1: "Correctness",
    2: "Speed",
    3: "A training step of 1 to 3 billion parameters",
    4: "Several ranks",
    5: "Several devices",
    6: "Several devices at work",
}
Rows = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


@dataclass(frozen=True)
class Item:
    """One process of the check.

    Attributes:
        where: "module:function" in this folder.
        limit: seconds after which the process is ended; rows measured until then count.
    """

    name: str
    part: int
    where: str
    limit: int
    shows: str

    def rows(self, on: Any) -> Rows:
        module, function = self.where.split(":")
        return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(
            on
        )


ITEMS = (
    Item("kernels", 1, "exactness:kernels", 120, "Triton's kernels give the bytes of the eager formulas"),
    Item("casts", 1, "exactness:casts", 30, "FP8 casts bit by bit, scales are powers of two"),
    Item("products", 1, "exactness:products", 30, "FP8 products against float64, the noise floor of a layer"),
    Item("flash", 1, "attention:correctness", 50, "flash, cuDNN and FA3, both ways, against plain products"),
    Item("lifetimes", 1, "lifetimes:rows", 30, "memory that another stream reads is not used again"),
    Item("knobs", 1, "one_process:knobs", 130, "NCCL and FSDP2 units in one process: every knob against the CPU"),
    Item("split groups", 1, "one_process:split_groups", 30, "groups split off a bound NCCL world, as Lightning has it"),
    Item("float16", 1, "one_process:float16", 30, "float16 with loss scaling"),
    Item("resume", 1, "one_process:resume", 30, "asynchronous saves, and a resume with the device's random numbers"),
    Item("auto", 1, "one_process:auto", 30, "shard_degree='auto' plans with the device's memory"),
    Item("fused products", 1, "tensor_products:rows", 20, "torch's fused products, as split layers call them"),
    Item("codecs", 2, "speed:codecs", 60, "payloads and casts against the copy bandwidth"),
    Item("linear layers", 2, "speed:layers", 180, "FP8 linear layers against bfloat16, torchao, Transformer Engine"),
    Item("attention", 2, "attention:speed", 130, "the attention operator against flash, cuDNN, FA3 and torch's"),
    Item("overhead", 2, "steps:overhead", 120, "torch-smp against plain torch and bare FSDP2 in one process"),
    Item("host optimizer", 2, "steps:host_optimizer", 50, "a step of states in host memory"),
    Item("activations", 3, "steps:modes", 270, "recomputation and offloading: time, memory by kind, hidden copies"),
    Item("FP8 step", 3, "steps:fp8", 120, "a training step in FP8 against bfloat16"),
    Item("longest sequence", 3, "steps:longest", 90, "the longest sequence with chunked loss and offloading"),
    Item("profile", 3, "steps:gaps_rows", 60, "what the device waits for in a step"),
    Item("replicas", 4, "nccl_ranks:replicas", 180, "four NCCL ranks on the device equal CPU ranks, with replicas"),
    Item("axes", 4, "nccl_ranks:axes", 160, "the same with tensor ranks, pipeline stages and context ranks"),
    Item("faces", 4, "faces:rows", 200, "Lightning, Accelerate and Trainer on two NCCL ranks equal CPU ranks"),
    Item("experts", 5, "nccl_ranks:experts", 60, "experts on several NCCL ranks equal CPU ranks"),
    Item("communicators", 5, "ranks:memory", 150, "what communicators take of a device, phase by phase"),
    Item("first window", 5, "ranks:first_window", 120, "replicas that differ in the first window equal CPU ranks"),
    Item("endings", 5, "ranks:endings", 150, "a rank that goes apart, is killed or stopped: all end, it is named"),
    Item("symmetric memory", 5, "ranks:symmetric", 60, "NCCL's symmetric memory gives the same losses"),
    Item("8B at 16,384 tokens", 6, "ranks:recipe", 280, "SageMaker SMP's own measurement, by our recipe"),
    Item("scaling", 6, "ranks:scaling", 200, "1, 2, 4, 8 devices beside bare FSDP2"),
)  # fmt: skip

# One device cannot show these.
NOT_SHOWN = (
    "NCCL over NVLink and between hosts: its speed, its memory, symmetric memory",
    "communication behind computation, and the gains on two nodes",
    "layers over several devices: fused products between them, their numbers there and what they hide",
)
