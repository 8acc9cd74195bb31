"""Models that `smp plan` is given by name: one that it traces, and some that it
cannot."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import nn

from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.trace import trace_model

if TYPE_CHECKING:
    import pytest  # not imported by a child process that is given a model of this file

WIDTH = 64
MIXTURE: dict[str, Any] = {
    **{
        "model_type": "mixtral",
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    },
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
"""A Mixtral of four experts a layer, two for each token."""
MIXTURE_TOKENS = 64


def traced_mixture(folders: pytest.TempPathFactory) -> ModelTrace:
    """Return the trace of MIXTURE, which one process of a run of tests makes."""
    # Files of tests run in workers, whose temporary folders lie in one.
    shared = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    path = shared / "trace-of-mixture.pickle"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            found = trace_model("mixture", MIXTURE_TOKENS, MIXTURE)
            path.write_bytes(pickle.dumps(found))
        read = pickle.loads(path.read_bytes())
    assert isinstance(read, ModelTrace)
    return read


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain() -> Any:
    return Plain(), lambda samples, tokens: torch.zeros(
        samples, tokens, WIDTH, dtype=torch.bfloat16
    )


def in_sequence() -> Any:
    return nn.Sequential(*(Block() for _ in range(3))), plain()[1]


def without_batch() -> nn.Module:
    return Plain()


def without_blocks() -> Any:
    return nn.Linear(2, 2), lambda samples, tokens: torch.zeros(samples, tokens, 2)
