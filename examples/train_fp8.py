"""bfloat16 and FP8 side by side: the same small GPT-2, text, seed and batches; both
loss curves in one picture.

    python examples/train_fp8.py                        # on a CPU in a few minutes; FP8 products are emulated there
    python examples/train_fp8.py --steps 600 --width 128
    python examples/train_fp8.py --activation-checkpointing full            # the same losses

Writes ``fp8.png`` and ``fp8.json`` into ``--out``. What is shown here in one process,
without a trainer, is ``plugins=[Fp8Precision()]`` under Lightning and ``smp_config:
{fp8: hybrid}`` under Accelerate; see docs/fp8.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import calm  # noqa: F401
import torch
import torch.distributed as dist
from corpus import Corpus, build_corpus
from memory_flags import add_memory_flags, memory_knobs
from rich.progress import track
from transformers import GPT2Config, GPT2LMHeadModel

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.fp8 import Fp8Recipe
from smp_core.outside import how_to_install, is_there
from smp_core.plan import Precision


def train(
    corpus: Corpus, flags: argparse.Namespace, recipe: Fp8Recipe | None
) -> list[float]:
    """The loss of every step, with FP8 linear layers if there is a recipe."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(flags.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=corpus.vocab_size,
            n_positions=flags.seq_len,
            n_embd=flags.width,
            n_layer=flags.layers,
            n_head=4,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            bos_token_id=corpus.end_of_text,
            eos_token_id=corpus.end_of_text,
        )
    ).to(device)
    config = SmpConfig(shard_degree=1, fp8=recipe, **memory_knobs(flags))
    autocast_casts = Precision(cast_forward_inputs=False)
    parallel = parallelize(model, config, device=device, precision=autocast_casts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.1)
    parallel.prepare_optimizer(optimizer)  # new scales after every step
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20)
    )
    print(parallel.describe())
    tokens = torch.from_numpy(corpus.tokens("train").astype("int64"))
    generator = torch.Generator().manual_seed(flags.seed)
    losses = []
    for _ in track(range(flags.steps), "FP8" if recipe else "bfloat16"):
        starts = torch.randint(
            len(tokens) - flags.seq_len, (flags.batch_size, 1), generator=generator
        )
        batch = tokens[starts + torch.arange(flags.seq_len)].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (axis, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), constrained_layout=True
    )
    for name, losses in curves.items():
        axis.plot(losses, label=name, linewidth=1)
    axis.set_ylabel("training loss")
    axis.legend()
    below.plot(
        [a - b for a, b in zip(curves["FP8"], curves["bfloat16"], strict=True)],
        color="gray",
        linewidth=1,
    )
    below.axhline(0, color="black", linewidth=0.5)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/fp8"))
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file or a folder of them; default: Python's own library",
    )
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--max-mb", type=float, default=1.0, help="text to use")
    parser.add_argument(
        "--fp8",
        default="hybrid",
        help="delayed, dynamic, hybrid, e4m3, or JSON of the recipe's fields",
    )
    for name, value in (
        ("steps", 200),
        ("width", 64),
        ("layers", 2),
        ("seq-len", 64),
        ("batch-size", 8),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    add_memory_flags(parser)
    flags = parser.parse_args(arguments)
    if not is_there("matplotlib"):
        parser.error(
            f"matplotlib draws the plot and is not installed; {how_to_install('matplotlib')}"
        )
    return flags


def main(arguments: list[str] | None = None) -> int:
    flags = read_flags(arguments)
    recipe = Fp8Recipe.read(flags.fp8)
    if recipe is None:
        raise SystemExit(
            "--fp8 none leaves nothing to compare; write for example --fp8 dynamic"
        )
    corpus = build_corpus(
        flags.data,
        vocab_size=flags.vocab_size,
        max_bytes=int(flags.max_mb * 1e6),
        cache_dir=flags.cache_dir,
    )
    print(corpus.describe())
    with tempfile.TemporaryDirectory() as folder:  # a process group of one
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        curves = {
            "bfloat16": train(corpus, flags, None),
            "FP8": train(corpus, flags, recipe),
        }
        dist.destroy_process_group()
    flags.out.mkdir(parents=True, exist_ok=True)
    draw(curves, flags.out / "fp8.png")
    last = {name: statistics.fmean(losses[-20:]) for name, losses in curves.items()}
    report: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "loss": curves,
        "last_20": last,
    }
    (flags.out / "fp8.json").write_text(json.dumps(report, indent=2) + "\n")
    difference = last["FP8"] / last["bfloat16"] - 1
    print(
        f"mean loss of the last 20 steps: bfloat16 {last['bfloat16']:.4f}, FP8 {last['FP8']:.4f} ({difference:+.2%})"
    )
    print(f"{flags.out / 'fp8.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
