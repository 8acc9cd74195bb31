"""Train a GPT-2 with the Lightning Trainer on SmpShardedStrategy, on real text.

    python examples/train_gpt2.py --demo                            # four ranks that pose as two nodes, on a CPU
    python examples/train_gpt2.py --model-config small --ranks 8 --precision bf16-mixed --steps 2000   # eight GPUs
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/train_gpt2.py --model-config gpt2              # two nodes
    python examples/train_gpt2.py --model-config gpt2-30b           # what 30 billion parameters need
    python examples/train_gpt2.py --data my_texts/ --out runs/mine  # your own text

What is to be learned here is in `LanguageModel` (nothing special: a LightningModule)
and in `train` (one strategy). The rest is text (corpus.py), flags, and what is done
with the trained model (gpt2_results.py).
"""

# ruff: noqa: E402 (threads and Ctrl-C are settled before torch is imported)

from __future__ import annotations

import os
import signal
import sys

# One thread per rank, or the ranks of one machine fight for its cores. Read by torch
# when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Ctrl-C reaches every process of the terminal. The first one ends those that Lightning
# started from it; if each ended by itself, each would print a traceback. While modules
# are imported there is nobody to end.
STARTED_BY_LIGHTNING = "LOCAL_RANK" in os.environ and "RANK" not in os.environ
if __name__ == "__main__":
    signal.signal(
        signal.SIGINT,
        signal.SIG_IGN if STARTED_BY_LIGHTNING else lambda *_: sys.exit(130),
    )

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm  # noqa: F401
import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, TextData, TextError, build_corpus
from gpt2_results import (
    Curves,
    Result,
    TrainingBar,
    bring_back,
    compare,
    draw,
    heading,
    is_rank_zero,
    quiet,
    say,
)
from lightning.pytorch.loggers import CSVLogger
from memory_flags import add_memory_flags, memory_knobs
from rich.console import Console
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_smp import SmpMonitor, SmpShardedStrategy
from smp_core.cluster import launch_environment
from smp_core.config import SmpConfig
from smp_core.engine import plans_of_all_degrees
from smp_core.outside import how_to_install, is_there
from smp_core.plan import GIB, Cluster, Shapes, plan_table
from smp_core.topology import Topology

MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        "n_layer": 2,
        "n_embd": 128,
        "n_head": 4,
        "seq_len": 128,
        "vocab_size": 1024,
    },
    "small": {
        "n_layer": 6,
        "n_embd": 384,
        "n_head": 6,
        "seq_len": 256,
        "vocab_size": 8192,
    },
    "gpt2": {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "seq_len": 1024,
        "vocab_size": 16384,
    },
    "gpt2-30b": {
        "n_layer": 48,
        "n_embd": 7168,
        "n_head": 64,
        "seq_len": 2048,
        "vocab_size": 50257,
    },
}


# They know the processes to end on Ctrl-C.
TRAINERS: list[L.Trainer] = []


class LanguageModel(L.LightningModule):
    """GPT-2 with random weights. Nothing in here knows about sharding.

    Args:
        config: of the Transformers model.
        lr: peak learning rate; warms up over a fifth of the steps, so that the loss
            does not jump, and falls to a tenth as a cosine.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, config: GPT2Config, lr: float, steps: int) -> None:
        super().__init__()
        self.config, self.lr, self.steps = config, lr, steps
        # The mean over all tokens of all ranks, in float64: the plain model has to
        # reproduce it.
        self.validation_loss = MeanMetric().set_dtype(torch.float64)
        self.perplexity = Perplexity()

    def configure_model(self) -> None:
        # Here and not in __init__, so that --delayed-init can build it without memory.
        # Called again for validate().
        if not hasattr(self, "model"):
            self.model = GPT2LMHeadModel(self.config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits.float()

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        loss = self.loss(self(batch["input_ids"]), batch["targets"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(batch["input_ids"])
        self.validation_loss.update(
            self.loss(logits, batch["targets"]).double(),
            weight=batch["targets"].numel(),
        )
        self.perplexity.update(logits, batch["targets"])
        self.log("val_loss", self.validation_loss)
        self.log("val_perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> Any:
        warmup = max(1, self.steps // 5)

        def factor(step: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
            return min(1.0, (step + 1) / warmup) * (0.1 + 0.9 * cosine)

        optimizer = torch.optim.AdamW(
            self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@dataclass(frozen=True)
class Run:
    """One training: what differs between the two of --demo."""

    title: str
    out: Path
    shard_degree: int | str
    batch_size: int
    accumulate: int


def train(
    run: Run, flags: argparse.Namespace, config: GPT2Config, corpus: Corpus
) -> Result:
    """Train and validate on all ranks, save a sharded checkpoint."""
    L.seed_everything(flags.seed, verbose=False)
    devices, nodes = flags.devices
    data = TextData(
        corpus, flags.seq_len, run.batch_size, devices * nodes, flags.validation_blocks
    )
    baseline = data.unigram_perplexity()
    say(
        f"Validation perplexity to beat (unigram: knows only how frequent each token is): {baseline:.1f}"
    )
    model = LanguageModel(config, flags.lr, flags.steps)
    monitor, curves = SmpMonitor(every_n_steps=max(1, flags.steps // 20)), Curves()
    batches = flags.steps * run.accumulate
    trainer = L.Trainer(
        strategy=SmpShardedStrategy(
            shard_degree=run.shard_degree,
            delayed_init=flags.delayed_init,
            **memory_knobs(flags),
        ),
        accelerator=flags.accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=flags.precision,
        max_steps=flags.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=1.0,
        # Once on the way; the end has its own below.
        val_check_interval=batches // 2 + 1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            monitor,
            curves,
            TrainingBar(
                refresh_rate=1 if sys.stdout.isatty() else max(1, batches // 4)
            ),
        ],
        logger=CSVLogger(run.out, name="", version=""),
        log_every_n_steps=10,
        enable_checkpointing=False,  # saved below
        enable_model_summary=False,
    )
    TRAINERS.append(trainer)
    if not STARTED_BY_LIGHTNING:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer.fit(
        model, data.train_dataloader(), data.val_dataloader(), ckpt_path=flags.resume
    )
    trainer.validate(model, data.val_dataloader(), verbose=False)
    loss, perplexity = (
        float(trainer.callback_metrics[name]) for name in ("val_loss", "val_perplexity")
    )
    trainer.save_checkpoint(run.out / "checkpoint", weights_only=False)
    say(
        f"Loss {curves.loss[0]:.3f} -> {curves.loss[-1]:.3f} in {len(curves.loss)} steps"
    )
    say(
        f"Validation: loss {loss:.6f}, perplexity {perplexity:.1f}; unigram baseline {baseline:.1f}"
    )
    say(f"Monitor: {monitor.summary()}")
    say(f"Sharded checkpoint: {run.out / 'checkpoint'}")
    return Result(run.title, run.out, loss, perplexity, baseline, curves, data)


def demo_runs(out: Path, batch_size: int) -> list[Run]:
    """The same global batches twice, so that the two loss curves have to be the same;
    only the traffic differs."""
    return [
        Run(
            "shard degree 4 over both nodes, two-stage collectives",
            out / "degree-4",
            4,
            batch_size,
            1,
        ),
        Run(
            "shard degree 2, one replica per node, two-hop, 2 micro-batches",
            out / "degree-2",
            2,
            batch_size // 2,
            2,
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the plain model does not reproduce the
    validation loss."""
    flags = read_flags(arguments)
    quiet()
    if flags.plan:
        print_plan(flags)
        return 0
    try:
        return train_and_compare(flags)
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train_and_compare(flags: argparse.Namespace) -> int:
    heading("Text")
    max_bytes = int(flags.max_mb * 1e6) if flags.max_mb else None
    corpus = build_corpus(
        flags.data,
        vocab_size=flags.vocab_size,
        max_bytes=max_bytes,
        cache_dir=flags.cache_dir,
    )
    say(corpus.describe())
    say(
        f"Byte-level BPE of {corpus.vocab_size} tokens, trained on the training files, cached in {corpus.folder}"
    )
    if flags.demo:
        runs = demo_runs(flags.out, flags.batch_size)
    else:
        runs = [
            Run(
                "GPT-2",
                flags.out,
                flags.shard_degree,
                flags.batch_size,
                flags.accumulate,
            )
        ]
    results = []
    for run in runs:
        heading(f"Training: {run.title}")
        results.append(
            train(
                run,
                flags,
                gpt2_config(flags, corpus.vocab_size, corpus.end_of_text),
                corpus,
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_rank_zero():
        return 0
    agree = True
    for result in results:
        heading(f"Back in plain Transformers, in one process: {result.title}")
        agree &= bring_back(
            result, corpus, flags.precision, sample=result is results[-1]
        )
        draw([result], result.out / "plot.png")
    heading("Result")
    if len(results) > 1:
        say(compare(*results))
    say(f"Plot of loss and traffic: {draw(results, flags.out / 'plot.png')}")
    return 0 if agree else 1


def print_plan(flags: argparse.Namespace) -> None:
    """Print what each shard degree needs of a device; the model is built on the meta
    device, without memory."""
    config = gpt2_config(flags, flags.vocab_size, 0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    if flags.precision in ("bf16-true", "16-true"):
        model.to(
            dtype=torch.bfloat16 if flags.precision == "bf16-true" else torch.float16
        )  # type: ignore[call-arg]
    gathered = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(flags.precision)
    devices, nodes = flags.devices
    smp_config = SmpConfig.from_dict({"param_dtype": gathered, **memory_knobs(flags)})
    cluster = Cluster(
        Topology.uniform(devices * nodes, devices),
        "cuda",
        int(flags.device_memory_gib * GIB),
    )
    Console().print(
        plan_table(
            plans_of_all_degrees(Shapes.of(model, smp_config), smp_config, cluster)
        )
    )


def gpt2_config(
    flags: argparse.Namespace, vocab_size: int, end_of_text: int
) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=flags.seq_len,
        n_embd=flags.n_embd,
        n_layer=flags.n_layer,
        n_head=flags.n_head,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        # No dropout: less than one epoch is trained, and runs that shard differently
        # stay comparable step by step.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").strip()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--demo",
        action="store_true",
        help="two short runs on four ranks that pose as two nodes; about two minutes",
    )
    add(
        "--out",
        type=Path,
        help="folder for checkpoint, log and plot (runs/gpt2, or runs/demo)",
    )
    add_model_flags(parser)
    add_rank_flags(parser)
    add_training_flags(parser)
    add_memory_flags(parser)
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--plan",
        action=argparse.BooleanOptionalAction,
        help="print the memory plan and end",
    )
    plan.add_argument(
        "--device-memory-gib",
        type=float,
        default=80.0,
        help="of one device, for --plan (%(default)s)",
    )
    flags = parser.parse_args(arguments)
    if flags.plan is None:
        flags.plan = flags.model_config == "gpt2-30b"
    if not flags.plan and not is_there("matplotlib"):
        parser.error(
            f"matplotlib draws the plot and is not installed; {how_to_install('matplotlib')}"
        )
    if flags.demo:
        flags.ranks, flags.nodes, flags.accelerator = 4, 2, "cpu"
        flags.out = flags.out or Path("runs/demo")
    flags.out = flags.out or Path("runs/gpt2")
    for size, value in MODELS[flags.model_config].items():
        if getattr(flags, size) is None:
            setattr(flags, size, value)
    if flags.n_embd % flags.n_head:
        parser.error(
            f"--n-embd {flags.n_embd} is not a multiple of --n-head {flags.n_head}"
        )
    flags.devices = layout(flags, parser)
    return flags


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add what says which model is trained, and on which text."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model-config",
        choices=MODELS,
        default="tiny",
        help="sizes to begin with (%(default)s)",
    )
    for size in MODELS["tiny"]:
        model.add_argument(
            f"--{size.replace('_', '-')}",
            type=int,
            help="instead of the model config's",
        )
    model.add_argument(
        "--delayed-init",
        action="store_true",
        help="build on the meta device, initialise shard by shard",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        type=Path,
        help="a text file or a folder of them; default: Python's own library",
    )
    text.add_argument(
        "--max-mb", type=float, default=4.0, help="text to use, 0 for all (%(default)s)"
    )
    text.add_argument(
        "--cache-dir",
        type=Path,
        help="of tokenizer and tokens; default: the user's cache folder",
    )


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group(
        "ranks (torchrun, SLURM and mpirun say it themselves)"
    )
    ranks.add_argument(
        "--ranks", type=int, help="on this machine; default: all GPUs, or one CPU rank"
    )
    ranks.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="nodes that these ranks pose as (%(default)s)",
    )
    ranks.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    ranks.add_argument(
        "--shard-degree",
        default="auto",
        help="a number, node, world or auto (%(default)s)",
    )


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_argument_group("training")
    # So many that --demo takes about two minutes on two cores.
    steps.add_argument(
        "--steps", type=int, default=160, help="optimizer steps (%(default)s)"
    )
    steps.add_argument(
        "--batch-size",
        type=int,
        default=8,
        help="blocks per rank and micro-batch (%(default)s)",
    )
    steps.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="micro-batches per optimizer step (%(default)s)",
    )
    steps.add_argument(
        "--lr", type=float, default=4e-3, help="peak learning rate (%(default)s)"
    )
    steps.add_argument(
        "--precision",
        default="32-true",
        help="as in Trainer(precision=...) (%(default)s)",
    )
    steps.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of weights and order of the text (%(default)s)",
    )
    steps.add_argument(
        "--validation-blocks",
        type=int,
        default=256,
        help="at most, of --seq-len (%(default)s)",
    )
    steps.add_argument(
        "--resume",
        type=Path,
        help="checkpoint folder of an earlier run, of any number of ranks",
    )


def layout(
    flags: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[int, int]:
    """(ranks per node, nodes) as the Trainer wants them; on one machine, ranks that
    pose as several nodes."""
    if flags.plan:
        ranks, nodes = (
            flags.ranks or 64,
            flags.nodes if flags.nodes > 1 or flags.ranks else 8,
        )
    elif not STARTED_BY_LIGHTNING and (launch := launch_environment()).world_size > 1:
        local = launch.local_world_size or 1
        return local, launch.world_size // local
    else:
        gpus = 0 if flags.accelerator == "cpu" else torch.cuda.device_count()
        ranks, nodes = flags.ranks or gpus or 1, flags.nodes
    if nodes < 1 or ranks % nodes:
        parser.error(f"--ranks {ranks} cannot be dealt out to --nodes {nodes} evenly")
    if flags.plan:
        return ranks // nodes, nodes
    if nodes > 1:
        os.environ["SMP_RANKS_PER_NODE"] = str(ranks // nodes)
    return ranks, 1


def end_ranks() -> None:
    """End the processes that Lightning started from this one."""
    for trainer in TRAINERS:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
            # Or Lightning's watch over them takes their end for a failure, and kills
            # this process before its own.
            trainer.strategy.launcher.procs.clear()


if __name__ == "__main__":
    try:
        status = main()
    except (KeyboardInterrupt, SystemExit) as end:
        # Lightning answers Ctrl-C inside fit itself, ends the other ranks and exits.
        if isinstance(end, SystemExit) and not any(
            trainer.interrupted for trainer in TRAINERS
        ):
            raise
        end_ranks()
        say("\nInterrupted.")
        status = 130
    sys.exit(status)
