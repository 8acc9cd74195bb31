"""Qwen3-30B-A3B on two p5: 128 experts, 16 on each device of a node, which tokens
travel to; states over both nodes.

torchrun --nnodes 2 --nproc-per-node 8 ... examples/recipes/qwen3_30b_experts.py
torchrun --nproc-per-node 4 examples/recipes/qwen3_30b_experts.py --tiny
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import SMALL, Recipe, Run, Size  # isort: skip
from language_model import LanguageModel, train

from smp_core.planner.known_models import KNOWN_MODELS

RECIPE = Recipe(
    "2xp5",
    full=Size(
        KNOWN_MODELS["qwen3-30b-a3b"],
        tokens=4096,
        micro_batch=1,
        global_batch=128,
        knobs={
            "shard_degree": 16,
            "expert_parallel_degree": 8,
            "activations": "full",
            "delayed_init": True,
        },
    ),
    tiny=Size(
        {
            "model_type": "qwen3_moe",
            **SMALL,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        tokens=64,
        micro_batch=1,
        global_batch=8,
        knobs={
            "shard_degree": 4,
            "expert_parallel_degree": 2,
            "activations": "full",
            "delayed_init": True,
        },
        steps=8,
    ),
)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step."""
    run = Run(RECIPE, RECIPE.flags(__doc__).parse_args(arguments))
    return train(run, LanguageModel(run))


if __name__ == "__main__":
    main()
