"""A stream that every rank reads is dealt out: training and evaluation equal one
process, whatever the layout."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_smp.dealt import DealtLoader
from tests.core.pipeline.cases import of_all_stages
from tests.harness import run_ranks
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    report,
    together,
    worst,
)
from tests.logged import warnings_said

LENGTH, VOCABULARY = 8, 29
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"shard_degree": 4},
    "replicas": {"shard_degree": 2},
    "tensor": {
        "shard_degree": 2,
        "tensor_parallel_degree": 2,
        "tensor_parallel": "auto",
    },
    "context": {"shard_degree": 4, "context_parallel_degree": 2},
    "stages": {
        "shard_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline": {"microbatches": 2},
    },
}
KINDS = ("plain", "sized", "ready", "hf", "workers", "split", "text")
DATA_RANKS = {"shards": 4, "replicas": 4, "tensor": 2, "context": 2, "stages": 2}


@dataclass(frozen=True)
class Case:
    """What is streamed.

    Attributes:
        kind: plain, sized (tells its length), ready (batches), hf (Hugging Face's),
            workers (split among them), split (by data rank, by the dataset itself),
            text (batches of dicts with a list of text beside the tokens).
        rows, val_rows: of the streams.
    """

    layout: str
    kind: str
    rows: int
    val_rows: int
    batch_size: int
    drop_last: bool
    workers: int
    accumulate: int


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(
        VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed)
    )


class Stream(IterableDataset):
    """Items of a tensor, dealt out to workers, and from ``first`` on every
    ``step``-th."""

    def __init__(
        self, items: Any, by_worker: bool = False, first: int = 0, step: int = 1
    ) -> None:
        self.items, self.by_worker, self.first, self.step = (
            items,
            by_worker,
            first,
            step,
        )

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own = self.items[self.first :: self.step]
        return iter(
            own[worker.id :: worker.num_workers]
            if self.by_worker and worker is not None
            else own
        )


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.items[self.first :: self.step])


def loader_of(
    case: Case, rows: int, seed: int, first: int = 0, step: int = 1
) -> DataLoader[Any]:
    data = tokens(rows, seed)
    if case.kind == "ready":
        return DataLoader(
            Stream([as_batch(part) for part in data.split(case.batch_size)]),
            batch_size=None,
        )
    dataset: Any
    if case.kind == "hf":
        columns = {"input_ids": data.tolist(), "labels": data.tolist()}
        dataset = (
            Dataset.from_dict(columns)
            .to_iterable_dataset(num_shards=2)
            .with_format("torch")
        )
    elif case.kind == "text":
        dataset = Stream([{**as_batch(row), "text": str(row.tolist())} for row in data])
    else:
        kind = Sized if case.kind == "sized" else Stream
        dataset = kind(
            [as_batch(row) for row in data], case.kind == "workers", first, step
        )
    return DataLoader(
        dataset, case.batch_size, num_workers=case.workers, drop_last=case.drop_last
    )


def as_batch(rows: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": rows, "labels": rows}


def tokens_of(batch: Any) -> torch.Tensor:
    found = batch["input_ids"]
    if "text" in batch:
        assert batch["text"] == [str(row.tolist()) for row in found], (
            "text stays with its tokens"
        )
    return found


class Streaming(LightningModule):
    """A small Llama on streams; in one process a batch is those of all data ranks of
    the case's layout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        torch.manual_seed(3)
        sizes = {
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        config = LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=16, use_cache=False, **sizes
        )
        self.model: Any = LlamaForCausalLM(config).double()
        self.losses: list[torch.Tensor] = []
        self.rows = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(
            "val_loss",
            self._loss(batch),
            sync_dist=True,
            batch_size=len(batch["input_ids"]),
        )

    def _loss(self, batch: Any) -> torch.Tensor:
        tokens_of(batch)  # looks at the text beside them
        return self.model(
            **{name: value for name, value in batch.items() if name != "text"}
        ).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    def _loader(self, rows: int, seed: int) -> Any:
        ranks, splits = DATA_RANKS[self.case.layout], self.case.kind == "split"
        if dist.is_initialized():
            places = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
            first = (places["rank"], places["num_replicas"]) if splits else (0, 1)
            return loader_of(self.case, rows, seed, *first)
        if splits:
            loaders = [
                loader_of(self.case, rows, seed, rank, ranks) for rank in range(ranks)
            ]
            each = [[tokens_of(batch) for batch in loader] for loader in loaders]
            groups = [list(group) for group in zip(*each, strict=True)]
        else:
            read = [tokens_of(batch) for batch in loader_of(self.case, rows, seed)]
            groups = [
                read[start : start + ranks] for start in range(0, len(read), ranks)
            ]
            if self.case.drop_last and self.case.kind != "ready":
                groups = [group for group in groups if len(group) == ranks]
        return DataLoader(
            Stream([as_batch(torch.cat(group)) for group in groups]), batch_size=None
        )

    def train_dataloader(self) -> Any:
        return self._loader(self.case.rows, 1)

    def val_dataloader(self) -> Any:
        return self._loader(self.case.val_rows, 2)


def fit(case: Case) -> Run:
    flags = {"max_epochs": 2, "accumulate_grad_batches": case.accumulate}
    module = Streaming(case)
    trainer = make_trainer(LAYOUTS[case.layout], **flags)
    trainer.fit(module)
    run = report(trainer, module)
    if case.layout == "stages" and dist.is_initialized():
        run.weights = of_all_stages(
            trainer.strategy.parallel, dict(module.named_parameters())
        )  # type: ignore[attr-defined]
    else:
        run.weights = {name: run.weights[name] for name, _ in module.named_parameters()}
    return replace(
        run, metrics={"val_loss": float(trainer.callback_metrics["val_loss"])}
    )


def fit_each(cases: list[Case]) -> list[Run]:
    return [fit(case) for case in cases]


def draw(seed: int) -> Case:
    """The number of samples is what it may be, but for what the models of the layouts
    cannot take."""
    generator = random.Random(seed)
    layout = generator.choice(list(LAYOUTS))
    kind = generator.choice(KINDS)
    if layout in ("stages", "context") and kind == "text":
        kind = "plain"  # lists are not cut
    ranks, size = DATA_RANKS[layout], generator.choice([2, 3, 4])
    rows, drop_last = (
        generator.randint(ranks * size, 3 * ranks * size),
        generator.random() < 0.3,
    )
    workers = 2 if kind == "workers" else generator.choice([0, 0, 1])
    if layout == "stages":
        size = 4  # micro-batches
        rows = max(rows + rows % 2, ranks * size)
    # Lightning's, too, leaves out or repeats what does not go round; a batch with fewer
    # samples than ranks would be.
    val_rows = ranks * size * generator.randint(1, 2) + (size if size >= ranks else 0)
    if kind == "split":
        rows = val_rows = ranks * size * generator.randint(1, 3)
    if kind == "ready":
        workers, drop_last = 0, False
    if kind in ("workers", "hf") and workers:
        rows = val_rows = 2 * ranks * size * generator.randint(1, 2)
    return Case(
        layout,
        kind,
        rows,
        val_rows,
        size,
        drop_last,
        workers,
        generator.choice([1, 1, 2]),
    )


def assert_like_one_process(cases: list[Case]) -> None:
    for case, *runs in zip(cases, *together(fit_each, cases), strict=True):
        try:
            # Lightning adds up what is logged in float32; a sample that counted twice
            # would be far more.
            assert_same(runs, expected := fit(case), 1e-5)
            for run in runs:
                # Transformers' loss is float32, and so is the weight of a short batch.
                assert worst(run.weights, expected.weights)[0] <= 1e-7
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


# A batch left over for two of four ranks; then at random, every layout and every kind.
STREAMS = [
    Case("shards", "plain", 38, 36, 4, False, 0, 1),
    *map(draw, (1, 5, 16, 19, 22, 27)),
]


def test_every_layout_and_kind_of_stream_is_there() -> None:
    assert {case.layout for case in STREAMS} == set(LAYOUTS) and {
        case.kind for case in STREAMS
    } == set(KINDS)


@pytest.mark.parametrize(
    "cases",
    [STREAMS[::3], pytest.param(STREAMS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_stream_is_dealt_out_as_one_process_reads_it(cases: list[Case]) -> None:
    assert_like_one_process(cases)


class OwnStreams(Streaming):
    """Each rank shuffles for itself."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch["input_ids"])

    def train_dataloader(self) -> Any:
        return loader_of(self.case, self.case.rows, seed=dist.get_rank())


def own_streams() -> tuple[str, int, list[str]]:
    """What is said to tensor ranks; the samples that a data rank sees, and what is said
    to these."""
    case, flags = (
        Case("shards", "plain", 12, 12, 2, False, 0, 1),
        {"limit_val_batches": 0},
    )
    tensor = {"shard_degree": 1, "tensor_parallel_degree": 2, "tensor_parallel": "auto"}
    with pytest.raises(ValueError) as refused:
        make_trainer(tensor, **flags).fit(OwnStreams(case))
    module = OwnStreams(case)
    with warnings_said() as said:
        make_trainer({"shard_degree": 2}, **flags).fit(module)
    return str(refused.value), module.seen, said


class Counted(IterableDataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.samples))


def warnings_of_sizes() -> dict[tuple[int, bool], int]:
    """Return how often rank 0 warns of batches of two samples that cannot be weighed,
    by the samples of the stream and whether it is evaluated."""
    said = {}
    for samples, once in itertools.product((6, 7, 8, 9, 10), (False, True)):
        source: Any = DataLoader(Counted(samples), batch_size=2)
        dealt = DealtLoader(source, 2, dist.get_rank(), True, lambda: True, once)
        with patch.object(logging.getLogger("smp"), "warning") as warned:
            for _ in range(2):
                list(dealt)
        said[samples, once] = warned.call_count
    return said


def test_batches_that_cannot_be_weighed_are_named_once() -> None:
    """7 samples end with a batch of two and one of one; 9 with a single sample that
    both ranks take."""
    first, second = run_ranks(warnings_of_sizes, 2)
    assert {key for key, times in first.items() if times} == {(7, False)}
    assert first[7, False] == 1 and not any(second.values())


def test_streams_that_differ_are_refused_to_tensor_ranks_and_named_to_data_ranks() -> (
    None
):
    for rank, (refused, seen, said) in enumerate(run_ranks(own_streams, 2)):
        assert (
            "ranks 0 and 1 compute the same samples" in refused
            and "distributed_sampler_kwargs" in refused
        )
        assert seen == 12, "all of its own stream"
        about = [
            line
            for line in said
            if "use_distributed_sampler=False" in line and "seed_everything" in line
        ]
        assert len(about) == (1 if rank == 0 else 0)


class Sample:
    """A batch of a class of one's own, on a device of its rank's own."""

    __slots__ = ("device", "next", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values, self.next = values, self
        self.device = torch.device("cuda", dist.get_rank())


BATCHES = {
    "objects": Sample,
    "numbers of NumPy": lambda values: [np.int64(each) for each in values],
    "sets of text": lambda values: {f"item {each}" for each in values},
    "arrays of text": lambda values: np.array([f"item {n}" for n in values], object),
}


def read(kind: str, apart: bool) -> list[Any]:
    """The numbers of a stream that is the same on all ranks, or dealt out by itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = list(range(8))[rank::world] if apart else list(range(8))
    loader = DataLoader(Stream(numbers), batch_size=2, collate_fn=BATCHES[kind])
    dealt = DealtLoader(loader, world, rank, need_alike=True, cuts=lambda: False)
    found: list[int] = []
    for batch in dealt:
        values = batch.values if isinstance(batch, Sample) else batch
        found += [int(str(each).removeprefix("item ")) for each in values]
    return sorted(found)


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_class_are_told_apart(kind: str) -> None:
    """Streams that deal themselves out are not dealt out once more, which would lose
    half of them; those that are the same are."""
    for apart in (True, False):
        of_ranks = run_ranks(read, 2, kind, apart)
        assert sorted([*of_ranks[0], *of_ranks[1]]) == list(range(8)), apart


@pytest.mark.slow
def test_any_stream_is_dealt_out_as_one_process_reads_it() -> None:
    for first in range(100, 300, 20):
        assert_like_one_process([draw(seed) for seed in range(first, first + 20)])
