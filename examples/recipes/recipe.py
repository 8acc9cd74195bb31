"""Recipe: one training in two sizes, and what the files of this folder share: flags,
ranks, model, text.

`full` is what a file does by its defaults on the machines it names, `tiny` the same
training on two to four CPU ranks: other shapes and degrees, the same kinds of knobs.
Weights are random. The text is the standard library of this Python, repeated where it
ends, in an order that no number of ranks changes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import calm  # noqa: F401
import torch
from corpus import Corpus, TokenBlocks, build_corpus
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, PreTrainedConfig

from smp_core.cluster import launch_environment

DEGREES = (
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)
"""Knobs whose ranks read the same samples."""
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""The shape of a tiny decoder."""


@dataclass(frozen=True)
class Size:
    """The half of a recipe that differs between the full training and the tiny one.

    Attributes:
        model: fields of a Transformers configuration, as `AutoConfig.for_model` takes
            them.
        tokens: of a sample.
        micro_batch: samples that a rank computes at a time.
        global_batch: samples of an optimizer step.
        knobs: of `SmpConfig`.
        steps: optimizer steps.
    """

    model: Mapping[str, Any]
    tokens: int
    micro_batch: int
    global_batch: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1000


@dataclass(frozen=True)
class Recipe:
    """A training in two sizes.

    Attributes:
        cluster: the machines of `full`, as `smp plan --cluster` takes them.
        lr: the peak learning rate of `full`; `tiny` has 3e-3.
    """

    cluster: str
    full: Size
    tiny: Size
    lr: float = 3e-4

    def flags(self, text: str | None) -> argparse.ArgumentParser:
        """Return the flags that all recipes have.

        Args:
            text: the docstring of the file.
        """
        parser = argparse.ArgumentParser(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--tiny",
            action="store_true",
            help="a small model for two to four CPU ranks",
        )
        parser.add_argument("--steps", type=int, help="optimizer steps")
        parser.add_argument(
            "--data",
            type=Path,
            help="a text file or a folder; default: Python's own library",
        )
        parser.add_argument(
            "--cache-dir",
            type=Path,
            help="of tokenizer and tokens; default: the user's cache folder",
        )
        parser.add_argument(
            "--out", type=Path, help="folder for what is saved at the end"
        )
        return parser


class Run:
    """A recipe at the size that was asked for, on the ranks that a launcher has
    started.

    Args:
        flags: of :meth:`Recipe.flags`.
        size: instead of the recipe's own.

    Attributes:
        world, local_world: ranks of the run, and of this node.
        readers: ranks that read different samples.

    Raises:
        SystemExit: the ranks do not divide the global batch.
    """

    def __init__(
        self, recipe: Recipe, flags: argparse.Namespace, size: Size | None = None
    ) -> None:
        self.flags = flags
        self.size = size or (recipe.tiny if flags.tiny else recipe.full)
        self.lr = 3e-3 if flags.tiny else recipe.lr
        self.steps = flags.steps or self.size.steps
        launched = launch_environment()
        self.world, self.local_world = (
            launched.world_size,
            launched.local_world_size or 1,
        )
        self.is_first = launched.rank == 0
        self.readers = self.world
        for degree in DEGREES:
            self.readers //= self.knobs.get(degree, 1)
        at_once = max(1, self.readers) * self.loaded
        if self.readers < 1 or self.size.global_batch % at_once:
            sys.exit(
                f"{self.world} ranks do not divide the {self.size.global_batch} samples of a step by {self.loaded} at "
                f"a time; start as many as the head of the file says, or add --tiny for two to four CPU ranks"
            )

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the knobs; one rank trains alone, without those that mean several."""
        knobs = dict(self.size.knobs)
        if self.world > 1:
            return knobs
        of_several = {"pipeline", "collectives"}
        return {
            k: value
            for k, value in knobs.items()
            if k not in of_several and not k.endswith("_degree")
        }

    @property
    def loaded(self) -> int:
        """Return the samples of a loader's batch: those of all micro-batches that go
        through stages together."""
        in_stages = self.knobs.get("pipeline", {}).get("microbatches", 1)
        return self.size.micro_batch * in_stages

    @property
    def accumulate(self) -> int:
        """Return the loader's batches of an optimizer step."""
        return self.size.global_batch // (self.readers * self.loaded)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, without dropout: runs on other numbers of ranks
        stay comparable."""
        fields = {"use_cache": False, **self.size.model}
        if fields["model_type"] == "gpt2":
            fields |= {
                "n_positions": self.size.tokens,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
            }
        config = AutoConfig.for_model(**fields)
        if (
            getattr(config, "max_position_embeddings", self.size.tokens)
            < self.size.tokens
        ):
            config.max_position_embeddings = self.size.tokens
        return config

    @cached_property
    def corpus(self) -> Corpus:
        """The text and its tokenizer."""
        small: dict[str, Any] = (
            {"vocab_size": 300, "max_bytes": 300_000}
            if self.flags.tiny
            else {"max_bytes": None}
        )
        return build_corpus(self.flags.data, cache_dir=self.flags.cache_dir, **small)

    def data(self) -> Text:
        """Return the samples of all steps."""
        blocks = TokenBlocks(self.corpus.tokens("train"), self.size.tokens)
        return Text(blocks, self.steps * self.size.global_batch)

    def loader(self, data: Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return the loader of :meth:`data`, or of other samples, which ranks share out
        in order."""
        return DataLoader(data or self.data(), self.loaded)

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what Lightning's Trainer is told: ranks, steps, and that nothing is
        written but what is asked for."""
        return {
            "devices": self.local_world,
            "num_nodes": max(1, self.world // self.local_world),
            "max_steps": self.steps,
            "accumulate_grad_batches": self.accumulate,
            "precision": "32-true" if self.flags.tiny else "bf16-mixed",
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": not self.flags.tiny,
        }

    def learning_rate(self, step: int) -> float:
        """Return the share of the peak: a warm-up of a tenth of the steps, then a
        cosine to a tenth."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return min(1.0, (step + 1) / max(1, self.steps // 10)) * (0.1 + 0.9 * cosine)

    def say(self, words: str) -> None:
        """Print on one rank."""
        if self.is_first:
            print(words, flush=True)


class Text(Dataset[dict[str, torch.Tensor]]):
    """Samples of a causal language model, int64 [T] each: blocks of text, from the
    first one again after the last.

    Args:
        blocks: of the text.
        count: samples.
    """

    def __init__(self, blocks: TokenBlocks, count: int) -> None:
        self.blocks, self.count = blocks, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)  # what ends a loop over the samples
        tokens = self.blocks[index % len(self.blocks)]["input_ids"]
        return {"input_ids": tokens, "labels": tokens}  # the model shifts them
