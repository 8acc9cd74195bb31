"""What a run of train_gpt2.py leaves behind: its curves, a plot, and the model back in
plain Transformers.

`bring_back` is the proof at the end: the sharded checkpoint is consolidated by `smp
checkpoint consolidate`, loaded by `GPT2LMHeadModel.from_pretrained` in one process, and
has to give the validation loss that four ranks measured.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, TextData
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from smp_core.cli import app as smp

# The same float32 weights on the same blocks: sums in another order differ by some
# 1e-7. Half precision computes the sharded model's loss in half precision and the plain
# one's in float32, which is another question.
TOLERANCE = {"32-true": 1e-5, "64-true": 1e-5}
HALF_PRECISION_TOLERANCE = 2e-2

# Known and harmless, each with the reason why it does not matter here.
_HARMLESS = (
    # Tokens are read from a mapped file; worker processes would only take cores from
    # the ranks.
    ".*does not have many workers.*",
    # Lightning 2.6 asks torch 2.13's pytrees a question in an old form and gets the
    # right answer.
    r".*isinstance\(treespec, LeafSpec\).*",
    # Validation takes as many blocks as fill whole batches on every rank, so no sample
    # is repeated.
    ".*`DistributedSampler` with the dataloaders. During .trainer.validate.*",
    # A second run into the same folder replaces the first one's log, checkpoint and
    # plot.
    ".*Experiment logs directory .* exists and is not empty.*",
)

say: Callable[..., None] = rank_zero_only(print)


def is_rank_zero() -> bool:
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]


def heading(text: str) -> None:
    """A headline, on rank 0."""
    say(f"\n\033[1m{text}\033[0m" if os.isatty(1) else f"\n== {text}", flush=True)


def quiet() -> None:
    """Leave out what would only worry a newcomer: hardware lists, tips, and the
    warnings above."""
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    disable_progress_bar()


class TrainingBar(TQDMProgressBar):
    """One bar for training; validation takes seconds here."""

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    @property
    def total_train_batches(self) -> int | float:
        # Lightning counts max_steps as batches, without the micro-batches of a step,
        # and not from where a run resumes.
        trainer = self.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        remaining = (
            trainer.max_steps - trainer.global_step
        ) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, done + remaining)

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class Curves(L.Callback):
    """Loss and bytes of every optimizer step, of the whole job.

    Attributes:
        loss: mean over the step's micro-batches and ranks.
        between_nodes, inside_nodes: bytes sent per step and node (sum over its ranks,
            mean over nodes).
    """

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.between_nodes: list[float] = []
        self.inside_nodes: list[float] = []
        self._parts: list[torch.Tensor] = []
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        # Divided by the number of micro-batches already.
        self._parts.append(outputs["loss"].detach())
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        parallel = trainer.strategy.parallel  # type: ignore[attr-defined]
        sent = parallel.meter.per_step()
        own = [float(sum(self._parts)), sent["inter_bytes"], sent["intra_bytes"]]
        self._parts.clear()
        tensor = torch.tensor(
            own, dtype=torch.float64, device=trainer.strategy.root_device
        )
        loss, between, inside = trainer.strategy.reduce(
            tensor, dist.group.WORLD, "sum"
        ).tolist()
        nodes = parallel.mesh.topology.num_nodes
        self.loss.append(loss / dist.get_world_size())
        self.between_nodes.append(between / nodes)
        self.inside_nodes.append(inside / nodes)


@dataclass(frozen=True)
class Result:
    """The outcome of a training, on rank 0.

    Attributes:
        title: of the run.
        out: its folder; the checkpoint is in ``out/checkpoint``.
        validation_loss: mean over all tokens of ``data.validation_blocks``, measured by
            all ranks together.
        perplexity: torchmetrics' of the same.
        unigram: baseline perplexity.
    """

    title: str
    out: Path
    validation_loss: float
    perplexity: float
    unigram: float
    curves: Curves
    data: TextData


def bring_back(
    result: Result, corpus: Corpus, precision: str, sample: bool = True
) -> bool:
    """Consolidate, compare with plain Transformers in this one process, print a sample;
    writes ``results.json``.

    Returns:
        whether the losses agree within the tolerance of the precision.
    """
    # Only this process is left: it may have all cores.
    torch.set_num_threads(os.cpu_count() or 1)
    folder = result.out / "transformers"
    command = [
        "checkpoint",
        "consolidate",
        str(result.out / "checkpoint"),
        str(folder),
        "--overwrite",
    ]
    say(f"$ smp {' '.join(command)}")
    smp(command, standalone_mode=False)
    corpus.tokenizer().save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    plain = _mean_loss(model, result.data)
    difference = abs(plain - result.validation_loss)
    tolerance = TOLERANCE.get(precision, HALF_PRECISION_TOLERANCE)
    verdict = "equal" if difference <= tolerance else "NOT EQUAL"
    facts = {
        "title": result.title,
        "loss": result.curves.loss,
        "bytes_between_nodes": result.curves.between_nodes,
        "bytes_inside_nodes": result.curves.inside_nodes,
        "validation_loss": result.validation_loss,
        "validation_perplexity": result.perplexity,
        "unigram_perplexity": result.unigram,
        "plain_validation_loss": plain,
    }
    (result.out / "results.json").write_text(json.dumps(facts, indent=1))
    say(f"Validation loss of the ranks       {result.validation_loss:.8f}")
    say(f"GPT2LMHeadModel.from_pretrained    {plain:.8f}")
    say(
        f"Difference                         {difference:.1e} (allowed {tolerance:.0e}): {verdict}"
    )
    if sample:
        say(f"A sample (complete Transformers folder: {folder}):")
        say("\n".join(f"  | {line}" for line in _sample(model, folder).splitlines()))
    return difference <= tolerance


@torch.no_grad()
def _mean_loss(model: GPT2LMHeadModel, data: TextData) -> float:
    """Over all tokens, as `LanguageModel.validation_step` takes it."""
    total, tokens = 0.0, 0
    for batch in DataLoader(data.validation_blocks, data.batch_size):
        logits = model(batch["input_ids"], use_cache=False).logits
        count = batch["targets"].numel()
        total += (
            F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            .double()
            .item()
            * count
        )
        tokens += count
    return total / tokens


@torch.no_grad()
def _sample(
    model: GPT2LMHeadModel, folder: Path, prompt: str = "def ", new_tokens: int = 100
) -> str:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    room = model.config.n_positions - inputs["input_ids"].shape[1]
    written = model.generate(  # type: ignore[misc]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=min(new_tokens, room),
        do_sample=True,
        top_k=50,
        temperature=0.8,
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def compare(first: Result, second: Result) -> str:
    """Two runs over the same global batches, in words."""
    apart = max(
        abs(a - b) for a, b in zip(first.curves.loss, second.curves.loss, strict=True)
    )
    sent = [
        statistics.median(result.curves.between_nodes) / 1e6
        for result in (first, second)
    ]
    return (
        f"Same batches, other sharding: the training losses differ by {apart:.1e} at most, "
        f"and {sent[0]:.2f} against {sent[1]:.2f} MB leave each node per step."
    )


def draw(results: Sequence[Result], path: Path) -> Path:
    """A PNG: loss by step on the left, bytes per step by class of link on the right;
    one colour per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=[3, 2], layout="constrained"
    )
    styles = ["-", (0, (4, 2)), ":"]  # curves that fall on each other stay visible
    for number, result in enumerate(results):
        colour, style = f"C{number}", styles[number % len(styles)]
        steps = range(1, len(result.curves.loss) + 1)
        left.plot(
            steps,
            result.curves.loss,
            color=colour,
            linestyle=style,
            linewidth=1.4,
            label=result.title,
        )
        left.plot(
            len(steps),
            result.validation_loss,
            "o",
            color=colour,
            markersize=5,
            markerfacecolor="none",
        )
    baseline = math.log(results[0].unigram)
    left.axhline(baseline, color="0.5", linewidth=1, linestyle="--")
    left.annotate(
        f"unigram baseline, validation perplexity {results[0].unigram:.0f}",
        (0.98, baseline),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color="0.35",
        fontsize=9,
    )
    left.plot(
        [],
        [],
        "o",
        color="0.35",
        markerfacecolor="none",
        markersize=5,
        label="validation after the last step",
    )
    left.set(
        xlabel="optimizer step",
        ylabel="loss per token (nats)",
        title="Training loss",
        xlim=(0, None),
    )
    left.legend(frameon=False, fontsize=9)

    links = ("between nodes", "inside nodes")
    height = 0.8 / len(results)
    for number, result in enumerate(results):
        sent = [
            statistics.median(result.curves.between_nodes) / 1e6,
            statistics.median(result.curves.inside_nodes) / 1e6,
        ]
        places = [place + number * height for place in range(len(links))]
        bars = right.barh(places, sent, height=height * 0.9, color=f"C{number}")
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    right.set_yticks(
        [place + height * (len(results) - 1) / 2 for place in range(len(links))], links
    )
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set(
        xlabel="MB sent per optimizer step and node", title="Traffic by class of link"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y" if axes is left else "x", color="0.9")
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
