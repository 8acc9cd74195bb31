"""Llama 3.1 8B at 16,384 tokens on one p5: context parallelism, then FP8. The walk that
users of SageMaker SMP know.

torchrun --nproc-per-node 8 examples/recipes/llama_8b_16k.py --walk whole     # without context: out of memory
torchrun --nproc-per-node 8 examples/recipes/llama_8b_16k.py --walk context   # each sequence on eight devices
torchrun --nproc-per-node 8 examples/recipes/llama_8b_16k.py                  # and products in FP8
torchrun --nproc-per-node 2 examples/recipes/llama_8b_16k.py --tiny           # the same on two CPU ranks
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import SMALL, Recipe, Run, Size  # isort: skip
from language_model import LanguageModel, train

from smp_core.planner.known_models import KNOWN_MODELS

RECIPE = Recipe(
    "1xp5",
    full=Size(
        KNOWN_MODELS["llama-3.1-8b"],
        tokens=16384,
        micro_batch=1,
        global_batch=8,
        knobs={
            "shard_degree": 8,
            "context_parallel_degree": 8,
            "delayed_init": True,
            "fp8": "hybrid",
        },
    ),
    tiny=Size(
        {"model_type": "llama", **SMALL},
        tokens=128,
        micro_batch=1,
        global_batch=4,
        knobs={
            "shard_degree": 2,
            "context_parallel_degree": 2,
            "delayed_init": True,
            "fp8": "hybrid",
        },
        steps=8,
    ),
)
LEFT_OUT = {"whole": ("context_parallel_degree", "fp8"), "context": ("fp8",), "fp8": ()}
"""Knobs that a step of the walk goes without."""


def walked(size: Size, step: str) -> Size:
    """Return the size at a step of the walk."""
    return dataclasses.replace(
        size, knobs={k: v for k, v in size.knobs.items() if k not in LEFT_OUT[step]}
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step."""
    parser = RECIPE.flags(__doc__)
    parser.add_argument(
        "--walk",
        choices=LEFT_OUT,
        default="fp8",
        help="the step of the walk (%(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="samples of a step, computed at once; default: one after the other",
    )
    flags = parser.parse_args(arguments)
    size = walked(RECIPE.tiny if flags.tiny else RECIPE.full, flags.walk)
    if flags.batch:
        size = dataclasses.replace(
            size, micro_batch=flags.batch, global_batch=flags.batch
        )
    run = Run(RECIPE, flags, size)
    return train(run, LanguageModel(run))


if __name__ == "__main__":
    main()
