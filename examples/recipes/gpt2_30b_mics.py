"""GPT-2 of 30 billion parameters on 16 or 32 p4d, as the authors of MiCS measured it:
partition groups of eight nodes, gathers and reductions in two stages, one copy of the
model for each group.

    torchrun --nnodes 16 --nproc-per-node 8 ... examples/recipes/gpt2_30b_mics.py               # 512 tokens
    torchrun --nnodes 32 --nproc-per-node 8 ... examples/recipes/gpt2_30b_mics.py --nodes 32    # 2,048 tokens
    SMP_RANKS_PER_NODE=2 torchrun --nproc-per-node 4 examples/recipes/gpt2_30b_mics.py --tiny   # on a CPU, as two nodes

Groups and batches are those of published rates, which docs/planning.md has beside what
is predicted here.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import Recipe, Run, Size  # isort: skip
from language_model import LanguageModel, train

KNOBS = {
    "shard_degree": 64,
    "collectives": {"hierarchical": True},
    "delayed_init": True,
    "activations": "full",
}
RECIPE = Recipe(
    "16xp4d",
    full=Size(
        {
            "model_type": "gpt2",
            "n_embd": 7168,
            "n_layer": 48,
            "n_head": 56,
            "vocab_size": 50257,
        },
        tokens=512,
        micro_batch=24,
        global_batch=24 * 128,
        knobs=KNOBS,
    ),
    tiny=Size(
        {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 320,
        },
        tokens=64,
        micro_batch=2,
        global_batch=8,
        knobs={**KNOBS, "shard_degree": 4},  # with eight ranks, two replicas
        steps=8,
    ),
    lr=1e-4,
)
ON_32 = dataclasses.replace(
    RECIPE.full, tokens=2048, micro_batch=6, global_batch=6 * 256
)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step."""
    parser = RECIPE.flags(__doc__)
    parser.add_argument(
        "--nodes",
        type=int,
        choices=(16, 32),
        default=16,
        help="of eight A100 (%(default)s)",
    )
    flags = parser.parse_args(arguments)
    run = Run(RECIPE, flags, ON_32 if flags.nodes == 32 and not flags.tiny else None)
    return train(run, LanguageModel(run))


if __name__ == "__main__":
    main()
