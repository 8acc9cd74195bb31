"""gather, reduce, num_processes and metrics count every batch once, whoever holds
copies or parts of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from tests.accelerate.running import fresh_accelerator, full_weights
from tests.accelerate.trainers import make_dataset, make_trainer
from tests.core.blocks import PLAN, Blocks, rows
from tests.harness import run_ranks


@dataclass(frozen=True)
class Case:
    """Ranks, and their knobs; samples of a batch of all ranks, and of all batches; what
    is split between ranks."""

    world: int
    knobs: dict[str, Any]
    batch: int
    samples: int
    to_split: int


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    world = draw.choice([2, 2, 4])
    tensor = draw.choice([degree for degree in (1, 2, 2, 4) if degree <= world])
    data = world // tensor
    knobs: dict[str, Any] = {
        "shard_degree": draw.choice(
            [degree for degree in (1, 2, 4) if data % degree == 0]
        )
    }
    if tensor > 1:
        # Nodes have two ranks.
        plan = {
            **PLAN,
            "sequence_parallel": draw.random() < 0.5,
            "across_nodes": tensor > 2,
        }
        knobs |= {"tensor_parallel_degree": tensor, "tensor_parallel": plan}
    batch = data * draw.randint(1, 3)
    return Case(world, knobs, batch, batch * draw.randint(1, 3), draw.randint(1, 9))


def counted(case: Case, alone: bool = False) -> dict[str, Any]:
    """Train with losses that are weighted by hand, and count by every way that scripts
    have."""
    if alone:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator: Any = Accelerator(cpu=True)
    else:
        accelerator = fresh_accelerator(**case.knobs)
    ranks = accelerator.num_processes
    model: Any = Blocks().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(case.samples, 1), batch_size=case.batch // ranks)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen, metric = (
        torchmetrics.SumMetric().set_dtype(torch.float64),
        torchmetrics.ConfusionMatrix("binary"),
    )
    found: dict[str, Any] = {
        "samples": [],
        "sums": [],
        "means": [],
        "gathered": [],
        "metrics": [],
        "largest": [],
    }
    for batch in loader:
        losses = model(batch).square().mean((1, 2))
        samples = accelerator.reduce(
            torch.tensor(float(len(batch)), dtype=torch.float64)
        )
        accelerator.backward(losses.sum() * accelerator.num_processes / samples)
        optimizer.step()
        optimizer.zero_grad()
        values = losses.detach()
        found["samples"].append(
            float(accelerator.gather(torch.tensor(len(batch))).sum())
        )
        found["sums"].append(float(accelerator.reduce({"sum": values.sum()})["sum"]))
        found["means"].append(float(accelerator.reduce(values.mean(), "mean")))
        found["largest"].append(float(accelerator.gather(values).max()))
        gathered = accelerator.gather(values)
        own = gathered[
            accelerator.process_index * len(values) : (accelerator.process_index + 1)
            * len(values)
        ]
        assert torch.equal(own, values), "slices by process_index are this rank's"
        found["gathered"].append(gathered.tolist())
        found["metrics"] += accelerator.gather_for_metrics(values).tolist()
        seen.update(values.sum())
        metric.update(
            (values > values.mean()).int(), torch.ones(len(values), dtype=torch.int)
        )
    found["seen"], found["confusion"] = (
        float(seen.compute()),
        float(metric.compute().sum()),
    )
    with accelerator.split_between_processes(list(range(case.to_split))) as part:
        found["split"] = float(accelerator.reduce(torch.tensor(float(sum(part)))))
    if not alone:
        number = torch.tensor(float(len(part)))
        dist.all_reduce(number, group=accelerator.data_group)
        assert number == case.to_split
        assert (
            accelerator.data_size == ranks
            and accelerator.data_rank == accelerator.process_index
        )
    lasts = accelerator.gather(torch.tensor([int(accelerator.is_last_process)]))
    assert int(lasts.sum()) <= 1
    found["weights"] = {
        name: value.tolist() for name, value in full_weights(model).items()
    }
    return found


def several(cases: list[Case]) -> list[dict[str, Any]]:
    return [counted(case) for case in cases]


def check(seeds: Sequence[int]) -> None:
    """float64, to rounding."""
    drawn_cases = [drawn(seed) for seed in seeds]
    for world in (2, 4):
        cases = [case for case in drawn_cases if case.world == world]
        expected = [counted(case, alone=True) for case in cases]
        for found in run_ranks(several, world, cases, ranks_per_node=2):
            for case, ours, theirs in zip(cases, found, expected, strict=True):
                assert ours.keys() == theirs.keys()
                for name, value in theirs.items():
                    assert flat(ours[name]) == pytest.approx(
                        flat(value), rel=0, abs=1e-12
                    ), (case, name)


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in flat(value[name])]
    return (
        [number for each in value for number in flat(each)]
        if isinstance(value, list)
        else [value]
    )


def test_every_batch_counts_once() -> None:
    check(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 204, 50))
def test_every_batch_counts_once_in_all_cases(first: int) -> None:
    check(range(first, first + 50))


def tokens_seen(
    folder: Path, ranks: int, knobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Trainer's own counts, with batches of different numbers of targets."""
    flags = {
        "include_num_input_tokens_seen": "all",
        "average_tokens_across_devices": True,
        "max_steps": 3,
    }
    trainer, recorder = make_trainer(
        folder, 8, 2, knobs, per_device_train_batch_size=8 // ranks, **flags
    )
    rows_of_train, rows_of_test = make_dataset(), make_dataset(21, seed=6)
    for row in (*rows_of_train, *rows_of_test):
        # The stock Trainer counts it as a target of GPT-2, which it is not.
        row["labels"][0] = -100
    trainer.train_dataset = rows_of_train
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    trainer.train()
    metrics = trainer.evaluate(rows_of_test)
    return {
        "tokens": trainer.state.num_input_tokens_seen,
        "losses": recorder.run.losses,
        "rows": metrics["eval_rows"],
        "eval_loss": metrics["eval_loss"],
    }


def test_trainer_counts_the_tokens_and_samples_of_one_process(tmp_path: Path) -> None:
    """float32: losses to 1e-5."""
    expected = tokens_seen(tmp_path / "alone", 1)
    cases = [
        {"tensor_parallel_degree": 2, "tensor_parallel": {"sequence_parallel": False}},
        {"context_parallel_degree": 2, "shard_degree": 2},
    ]
    for found in run_ranks(all_seen, 2, tmp_path, cases):
        for each in found:
            assert (each["tokens"], each["rows"]) == (
                expected["tokens"],
                expected["rows"],
            )
            assert each["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert each["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)


def all_seen(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        tokens_seen(folder / str(place), 1, knobs) for place, knobs in enumerate(cases)
    ]


def samples_of_a_step(
    folder: Path, cases: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """What Trainer takes for it, before the model is prepared, which a resume compares;
    and the tensor ranks by which Transformers before 5.20 divides ``num_processes`` and
    counts of targets."""
    found = []
    for place, knobs in enumerate(cases):
        trainer, _ = make_trainer(
            folder / str(place), 8, 2, knobs, per_device_train_batch_size=8
        )
        with trainer._counting_ranks_once():
            divisor = getattr(trainer.accelerator.parallelism_config, "tp_size", 1)
        found.append((trainer.get_total_train_batch_size(trainer.args), divisor))
    return found


def test_ranks_that_share_a_batch_read_its_samples_once(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"tensor_parallel_degree": 2},
        {"context_parallel_degree": 2, "shard_degree": 2},
        {"pipeline_parallel_degree": 2},
    ]
    assert (
        run_ranks(samples_of_a_step, 2, tmp_path, cases) == [[(16, 1)] * len(cases)] * 2
    )
