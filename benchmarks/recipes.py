"""What `smp plan` predicts of the recipes: memory of a device and time of a step, at
the knobs that each file sets.

    python benchmarks/recipes.py          # benchmarks/results/recipes.json, minutes on a CPU
    python benchmarks/recipes.py --only llama_70b_3d      # its rows anew, the others as they are
    python benchmarks/recipes.py --page   # writes the table of docs/recipes.md from that file

Nothing is run but the planner. Knobs that a recipe leaves at their defaults are fixed
there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
RESULT = ROOT / "benchmarks" / "results" / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = (
    "<!-- from benchmarks/results/recipes.json -->",
    "<!-- end of predictions -->",
)
sys.path[:0] = [str(ROOT), str(RECIPES)]

from recipe import Size  # noqa: E402

from smp_core.planner import ModelTrace, NothingFits, Workload, plan  # noqa: E402
from smp_core.planner.trace import trace  # noqa: E402

GIB = 2**30
# What is fixed where a recipe says nothing: the defaults of a run.
DEFAULTS = {
    "context_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "keep_between_micro_batches": "shards",
    "reshard_after_forward": "auto",
    "optimizer_shard": "shard",
    "activations": "none",
    "chunked_cross_entropy": None,
    "param_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        model: of the planner; None: the size's own configuration.
        size: (module) -> its Size.
        cluster: instead of the recipe's.
        more: knobs beside those of the size.
    """

    name: str
    file: str
    size: Callable[[Any], Any] = lambda module: module.RECIPE.full
    model: str | None = None
    cluster: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def _of_plain(module: Any) -> Size:
    """Return the size of the script without torch-smp, under
    examples/accelerate/one_node.yaml."""
    tokens, global_batch, micro_batch = module.BATCH
    return Size(
        {"model_type": "llama", **module.FULL},
        tokens,
        micro_batch,
        global_batch,
        {"shard_degree": "node"},
    )


ROWS = (
    Row(
        "Llama 3.1 8B, 16,384 tokens, whole sequences",
        "llama_8b_16k",
        lambda m: m.walked(m.RECIPE.full, "whole"),
    ),
    Row(
        "the same, each sequence on 8 devices",
        "llama_8b_16k",
        lambda m: m.walked(m.RECIPE.full, "context"),
    ),
    Row("the same, and products in FP8", "llama_8b_16k"),
    Row("GPT-2 30B, 512 tokens", "gpt2_30b_mics"),
    Row(
        "GPT-2 30B, 2,048 tokens", "gpt2_30b_mics", lambda m: m.ON_32, cluster="32xp4d"
    ),
    Row("Qwen3 8B, all weights", "qwen3_8b_finetune"),
    Row("Qwen3 8B, adapters of rank 16", "qwen3_8b_finetune", model="qwen3-8b+lora:16"),
    Row("Llama 3 70B in three dimensions", "llama_70b_3d", more={"shard_degree": 4}),
    Row("ViT of 1.1 billion, three views", "vision_ema", model="vision_ema:planned"),
    Row(
        "Llama 3.2 1B, Accelerate and YAML",
        "plain_accelerate",
        _of_plain,
        cluster="1xp5",
    ),
    Row("Qwen3-30B-A3B", "qwen3_30b_experts"),
)


@functools.cache
def traced_once(model: str, tokens: int) -> ModelTrace:
    """Return the trace of a model, given as a module and function or as a configuration
    in JSON."""
    if not model.startswith("{"):
        return trace(model, tokens)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(model)
        return trace(str(config), tokens)


def predict(row: Row) -> dict[str, Any]:
    """Return a row of the result."""
    module = importlib.import_module(row.file)
    size = row.size(module)
    cluster = row.cluster or module.RECIPE.cluster
    knobs = {**size.knobs, **row.more}
    found = {
        "name": row.name,
        "file": row.file,
        "cluster": cluster,
        "tokens": size.tokens,
        "global_batch": size.global_batch,
        "micro_batch": size.micro_batch,
        "knobs": knobs,
    }
    traced = traced_once(row.model or json.dumps(dict(size.model)), size.tokens)
    workload = Workload(size.tokens, size.global_batch)
    try:
        recommended = plan(
            traced,
            cluster,
            workload,
            fixed={**DEFAULTS, **knobs, "micro_batch": size.micro_batch},
        )
    except NothingFits as error:
        needs = re.search(r"needs ([\d.]+) GiB of ([\d.]+)", str(error))
        assert needs is not None
        return {
            **found,
            "gib": float(needs[1]),
            "capacity_gib": float(needs[2]),
            "seconds": None,
        }
    chosen = recommended.chosen
    return {
        **found,
        "parameters": recommended.trace.parameters,
        "gib": chosen.memory.total / GIB,
        "capacity_gib": chosen.memory.capacity / GIB,
        "seconds": chosen.time.total,
        "share": chosen.band.share,
        "tokens_per_second": chosen.tokens_per_second,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    head = [
        "| recipe | machines | tokens x samples a step | GiB of a device | s a step |",
        "|---|---|---|---|---|",
    ]
    lines = []
    for row in rows:
        memory = f"{row['gib']:.1f} of {row['capacity_gib']:.1f}"
        if row["seconds"] is None:
            time, memory = "-", f"**out of memory**: {memory}"
        else:
            time = f"{row['seconds']:.2f} ± {row['share']:.0%}".replace("%", " %")
        name = f"[{row['name']}](../examples/recipes/{row['file']}.py)"
        lines.append(
            f"| {name} | {row['cluster']} | {row['tokens']:,} x {row['global_batch']:,} | {memory} | {time} |"
        )
    return "\n".join([*head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/recipes.md, predict nothing",
    )
    parser.add_argument("--only", help="rows of one file; the others stay as they are")
    flags = parser.parse_args()
    if flags.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        rows = json.loads(RESULT.read_text(encoding="utf-8"))
        PAGE.write_text(
            f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8"
        )
        return
    asked = [row for row in ROWS if flags.only in (None, row.file)]
    found = {row.name: predict(row) for row in asked}
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else []
    found = {**{row["name"]: row for row in known}, **found}
    rows = [found[row.name] for row in ROWS if row.name in found]
    print(table(rows))
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
