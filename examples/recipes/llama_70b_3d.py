"""Llama 3 70B on eight p5 in three dimensions: layers over the eight devices of a node,
blocks over two stages of four nodes, states over the four nodes of a stage.

    torchrun --nnodes 8 --nproc-per-node 8 ... examples/recipes/llama_70b_3d.py
    torchrun --nproc-per-node 4 examples/recipes/llama_70b_3d.py --tiny     # 2 x 2; with eight ranks 2 x 2 x 2
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import SMALL, Recipe, Run, Size  # isort: skip
from language_model import LanguageModel, train

from smp_core.planner.known_models import KNOWN_MODELS

RECIPE = Recipe(
    "8xp5",
    full=Size(
        KNOWN_MODELS["llama-3-70b"],
        tokens=8192,
        micro_batch=1,
        global_batch=256,
        knobs={
            # All ranks of a stage that are not tensor ranks: 64 / 8 / 2 = 4.
            "shard_degree": "world",
            "tensor_parallel_degree": 8,
            "pipeline_parallel_degree": 2,
            "pipeline": {"microbatches": 64, "schedule": "1f1b"},
            "activations": "selective",
            "delayed_init": True,
        },
    ),
    tiny=Size(
        {"model_type": "llama", **SMALL, "num_hidden_layers": 4},
        tokens=64,
        micro_batch=1,
        global_batch=8,
        knobs={
            "shard_degree": "world",
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "pipeline": {"microbatches": 4, "schedule": "1f1b"},
            "activations": "selective",
            "delayed_init": True,
        },
        steps=8,
    ),
    lr=1.5e-4,
)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step."""
    run = Run(RECIPE, RECIPE.flags(__doc__).parse_args(arguments))
    return train(run, LanguageModel(run))


if __name__ == "__main__":
    main()
