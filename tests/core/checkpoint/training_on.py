"""A training that is saved in its middle and gone on with: by the version that wrote
`tests/data/checkpoints`, and by this one.

    python -c "from tests.core.checkpoint.training_on import write; write('FOLDER')"

writes a folder for each of `KINDS`, on four ranks that pose as two nodes, and with it
what the training came to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "sharded in nodes": {"shard_degree": 2},
    "states over the world": {
        "shard_degree": 2,
        "optimizer_shard": "world",
        "param_dtype": "bfloat16",
    },
}


def train(kind: str, path: str, resume: bool, **knobs: Any) -> dict[str, list[float]]:
    """Two AdamW steps, a checkpoint, two more; or the last two from the checkpoint.
    Returns the weights."""
    torch.manual_seed(1 if resume else 0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    parallel = parallel_model(model, **{**KINDS[kind], **knobs})
    decayed, plain = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain}],
        lr=0.05,
        amsgrad=True,
    )
    parallel.prepare_optimizer(optimizer)
    if resume:
        state = {"state_dict": parallel.model_state()}
        load_checkpoint(path, state)
        parallel.take_model_state(state["state_dict"])
        load_named_optimizer_state(path, ("optimizer",), parallel.module, optimizer)
    for step in range(2 if resume else 0, 4):
        if step == 2 and not resume:
            states = named_optimizer_state(parallel.module, optimizer)
            save_checkpoint(
                path, {"state_dict": parallel.model_state(), "optimizer": states}
            )
        inputs = torch.linspace(-1, 1, 20).view(4, 5) * (step + 1)
        parallel.module(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = parallel.model_state().items()
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state
    }
    return {name: value.flatten().tolist() for name, value in whole.items()}


def write(folder: str) -> None:
    """Write what `tests/data/checkpoints` holds."""
    for kind in KINDS:
        path = Path(folder) / kind.replace(" ", "-")
        weights = run_ranks(train, 4, kind, str(path), False, ranks_per_node=2)[0]
        path.with_suffix(".json").write_text(json.dumps(weights))
