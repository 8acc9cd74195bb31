"""SmpMonitor counts the job, not the rank: samples, tokens, FLOPs and bytes, on real
Trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_smp import SmpMonitor
from lightning_smp.callbacks import count_samples, count_tokens
from smp_core.comm.meter import LINK_CLASSES
from smp_core.run_log.read import Run
from tests.harness import run_ranks
from tests.lightning.running import make_trainer
from tests.logged import warnings_said
from tests.older_transformers import needs_routers

WIDTH, CLASSES, LENGTH, BATCH = 8, 16, 5, 2
# Two matrix products per token, two operations per multiply-add, a training step is
# three forwards.
FLOPS_PER_TOKEN = 3 * 2 * (WIDTH * WIDTH + WIDTH * CLASSES)


class Model(LightningModule):
    """Token model with two matrix products; batches are dicts with `input_ids` [BATCH,
    LENGTH]."""

    def __init__(self, batches: int = 4) -> None:
        super().__init__()
        self.batches = batches
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.head(self.middle(self.embed(batch["input_ids"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        world = dist.get_world_size() if dist.is_initialized() else 1
        rows = [
            {"input_ids": torch.full((LENGTH,), i % CLASSES)}
            for i in range(self.batches * BATCH * world)
        ]
        return DataLoader(rows, BATCH)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class ManualModel(Model):
    """Two optimizers, and two forward and backward passes per batch."""

    def __init__(self, batches: int = 4) -> None:
        super().__init__(batches)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first = [*self.embed.parameters(), *self.middle.parameters()]
        return torch.optim.SGD(first, 0.1), torch.optim.SGD(self.head.parameters(), 0.1)


class MuonModel(ManualModel):
    """Optimizers that multiply matrices themselves."""

    def configure_optimizers(self) -> Any:
        first = [*self.embed.parameters(), self.middle.weight]
        return torch.optim.Muon(first, 0.1), torch.optim.Muon([self.head.weight], 0.1)


class PerStep(Callback):
    """What the meter says about each single optimizer step of this rank."""

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.strategy.parallel.meter.steps > len(self.sent):
            self.note(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.parallel.meter.steps > len(self.sent):
            self.note(trainer)

    def note(self, trainer: Any) -> None:
        self.sent.append(trainer.strategy.parallel.meter.per_step())


class Reports(Callback):
    """Copies of the monitor's reports, by step."""

    def __init__(self, monitor: SmpMonitor) -> None:
        self.monitor = monitor
        self.seen: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.monitor.latest and self.monitor.latest not in self.seen.values():
            self.seen[trainer.global_step] = dict(self.monitor.latest)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if self.monitor.latest not in self.seen.values():
            self.seen[trainer.global_step] = dict(self.monitor.latest)


def train(
    kind: type[Model] = Model,
    batches: int = 4,
    knobs: dict[str, Any] | None = None,
    monitor: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[dict[int, dict[str, float]], list[dict[str, float]]]:
    """Reports by step, and this rank's bytes of each step."""
    torch.manual_seed(0)
    watched = SmpMonitor(**{"every_n_steps": 2, **(monitor or {})})
    reports, per_step = Reports(watched), PerStep()
    callbacks: list[Callback] = [
        watched,
        reports,
        *([per_step] if "strategy" not in flags else []),
    ]
    flags = {"limit_val_batches": 0, **flags}
    make_trainer(knobs, callbacks=callbacks, **flags).fit(kind(batches))
    return reports.seen, per_step.sent


def without_seconds(figures: dict[str, float]) -> dict[str, float]:
    return {
        name: value for name, value in figures.items() if not name.endswith("_seconds")
    }


def flops_per_sample(report: dict[str, float], world_size: int) -> float:
    return (
        report["tflops_per_device"] * 1e12 * world_size / report["samples_per_second"]
    )


@pytest.mark.parametrize(
    "kind", [Model, pytest.param(ManualModel, marks=pytest.mark.slow)]
)
def test_counts_are_those_of_the_whole_job(kind: type[Model]) -> None:
    """Per batch: 4 ranks x BATCH samples; manual: two optimizer steps per batch, each
    after a pass of its own."""
    steps_per_batch, passes = (1, 1) if kind is Model else (2, 2)
    for reports, _ in run_ranks(
        train, 4, kind, ranks_per_node=2, knobs={"shard_degree": 2}
    ):
        expected = [2, 4] if kind is Model else [2, 4, 6, 8]
        assert list(reports) == expected
        assert [report["samples"] for report in reports.values()] == [
            step // steps_per_batch * 8 for step in expected
        ]
        last = reports[expected[-1]]
        # Rates share one clock, so their ratios are exact but for rounding.
        assert last["tokens_per_second"] / last["samples_per_second"] == pytest.approx(
            LENGTH, rel=1e-12
        )
        assert flops_per_sample(last, 4) == pytest.approx(
            passes * LENGTH * FLOPS_PER_TOKEN, rel=1e-12
        )
        assert "mfu" not in last
        assert last["peak_host_rss_gib"] > 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 4},
        pytest.param(
            {"shard_degree": 4, "collectives": {"hierarchical": False}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_sums_over_a_nodes_ranks_per_step_without_evaluation(
    knobs: dict[str, Any],
) -> None:
    """With a validation after every step and accumulation, the figures are those of a
    run without evaluation."""
    flags: dict[str, Any] = {
        "knobs": knobs,
        "ranks_per_node": 2,
        "accumulate_grad_batches": 2,
        "batches": 8,
    }
    plain = run_ranks(train, 4, **flags)
    evaluated = run_ranks(train, 4, **flags, val_check_interval=1, limit_val_batches=2)
    for step in (2, 4):
        for name, link in zip(
            ("bytes_between_nodes", "bytes_inside_nodes"),
            reversed(LINK_CLASSES),
            strict=True,
        ):
            of_two_steps = [
                sum(s[f"{link}_bytes"] for s in sent[step - 2 : step])
                for _, sent in plain
            ]
            expected = sum(of_two_steps) / 2 / 2  # nodes, steps
            assert expected > 0 or knobs["shard_degree"] != 4
            for reports, _ in [*plain, *evaluated]:
                assert reports[step][name] == pytest.approx(expected, rel=1e-12), (
                    step,
                    name,
                )
    # The meter itself, step by step and rank by rank: seconds aside.
    for (_, alone), (_, between) in zip(plain, evaluated, strict=True):
        assert [without_seconds(step) for step in alone] == [
            without_seconds(step) for step in between
        ]


def test_products_of_an_optimizer_are_none_of_the_models() -> None:
    monitor = SmpMonitor(every_n_steps=2)
    make_trainer(callbacks=[monitor], limit_val_batches=0).fit(MuonModel())
    passes = 2 * LENGTH * FLOPS_PER_TOKEN
    assert flops_per_sample(monitor.latest, 1) == pytest.approx(passes, rel=1e-12)


def test_mfu_is_the_share_of_the_given_peak() -> None:
    for reports, _ in run_ranks(
        train, 2, monitor={"peak_tflops": 2.0}, knobs={"shard_degree": 2}
    ):
        assert reports[4]["mfu"] == pytest.approx(
            reports[4]["tflops_per_device"] / 2, rel=1e-12
        )


class SharedSamples(DDPStrategy):
    """Pairs of ranks read the same samples, as context parallel ranks do."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size // 2, "rank": self.global_rank // 2}


def train_elsewhere(
    shared: bool, **options: Any
) -> tuple[dict[int, dict[str, float]], list[str]]:
    kind = SharedSamples if shared else DDPStrategy
    with warnings_said() as said:
        strategy = kind(cluster_environment=TorchElasticEnvironment())
        reports, _ = train(strategy=strategy, use_distributed_sampler=False, **options)
    return reports, [text for text in said if "SmpMonitor" in text]


@pytest.mark.parametrize("shared", [False, True])
def test_other_strategies_work_without_bytes_and_shared_samples_count_once(
    shared: bool,
) -> None:
    """use_distributed_sampler=False: every rank reads all 4 x 8 rows, 16 batches of
    2."""
    results = run_ranks(train_elsewhere, 4, shared, monitor={"every_n_steps": 5})
    for rank, (reports, said) in enumerate(results):
        assert list(reports) == [5, 10, 15, 16]  # the rest is reported at the end
        assert reports[16]["samples"] == 16 * BATCH * (2 if shared else 4)
        assert not [name for name in reports[16] if "bytes" in name]
        assert len(said) == (1 if rank == 0 else 0)


def train_with_csv(folder: str) -> list[float]:
    losses = []

    class Logs(Model):
        def training_step(
            self, batch: dict[str, torch.Tensor], batch_idx: int
        ) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            self.log("epoch/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            losses.append(float(loss.detach()))
            return loss

        def validation_step(
            self, batch: dict[str, torch.Tensor], batch_idx: int
        ) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)
            self.log("val/batch", float(batch_idx))

    logger = CSVLogger(folder, name="", version="")
    flags = {
        "enable_checkpointing": True,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 1,
    }
    flags |= {"val_check_interval": 4, "limit_val_batches": 2}
    train(Logs, batches=10, logger=logger, default_root_dir=folder, **flags)
    return losses


def test_loggers_and_the_runs_log_get_the_reports_beside_the_losses_of_the_same_steps(
    tmp_path: Path,
) -> None:
    losses = torch.tensor(
        run_ranks(train_with_csv, 2, str(tmp_path), ranks_per_node=1)
    ).mean(0)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    table = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    assert [row["step"] for row in table if row["loss"]] == ["0", "1", "2", "3", "4"]
    reports = [row for row in table if row["smp/samples"]]
    assert [row["step"] for row in reports] == ["1", "3", "4"]
    assert [float(row["smp/samples"]) for row in reports] == [16.0, 32.0, 40.0]

    run = Run.read(tmp_path)
    assert list(run.steps) == [2, 4, 5] and run.unreadable == 0 and run.starts == 1
    for (step, line), row in zip(run.steps.items(), reports, strict=True):
        for name in (
            "samples",
            "samples_per_second",
            "bytes_between_nodes",
            "peak_host_rss_gib",
        ):
            assert not row[f"smp/{name}"] or float(row[f"smp/{name}"]) == line[name], (
                step,
                name,
            )
        of_report = losses[2 * max(step - 2, 0) if step < 5 else 8 : 2 * step]
        # Added up in float32 by the run, and here.
        assert line["loss"] == pytest.approx(float(of_report.mean()), rel=1e-6), step
    # What the module logs, when it is known: validations after 2 and 4 steps, the
    # epoch's mean at the end.
    assert [step for step, _ in run.logged["val/loss"]] == [2, 4]
    assert run.logged["val/batch"] == [(2, 0.5), (4, 0.5)]
    assert run.logged["epoch/loss"] == [
        (5, pytest.approx(float(losses.mean()), rel=1e-6))
    ]
    (last,) = [
        row["val/loss"] for row in table if row["val/loss"] and row["step"] == "3"
    ]
    assert run.logged["val/loss"][-1][1] == pytest.approx(float(last), rel=1e-6)
    of_step = {
        name: value
        for name, value in run.last("sent").items()
        if name.endswith("/inter_bytes")
    }
    assert run.asked["planned_sent"] == {
        name.removesuffix("_bytes"): value for name, value in of_step.items()
    }
    shares = {each["knob"]: each["share"] for each in run.asked["savings"]}
    assert list(shares) == [
        'compression={"reduce": "bf16"}',
        'compression={"reduce": "int8"}',
    ]
    assert (
        shares['compression={"reduce": "bf16"}'] == 0.5
        and 0.25 < shares['compression={"reduce": "int8"}'] < 0.5
    )
    assert {line["behind"] for line in run.checkpoints} == {False} and run.checkpoints[
        0
    ]["stall_seconds"] > 0
    assert (
        run.end is not None and run.end["how"] == "completed" and run.end["step"] == 5
    )


class LogsLosses(Model):
    """Logs the loss of each batch, and of validations; keeps the former."""

    kept: list[float]

    def training_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.kept.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)


def epochs_shorter_than_a_report(folder: str) -> list[float]:
    model = LogsLosses(batches=2)
    model.kept = []
    monitor, logger = SmpMonitor(every_n_steps=50), CSVLogger(folder, "", "")
    flags: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1}
    make_trainer(callbacks=[monitor], logger=logger, **flags).fit(model)
    return model.kept


def test_what_short_epochs_log_is_in_the_runs_log(tmp_path: Path) -> None:
    losses = run_ranks(epochs_shorter_than_a_report, 2, str(tmp_path))[0]
    run = Run.read(tmp_path)
    assert run.logged["loss"] == [
        (2, pytest.approx(losses[1], rel=1e-6)),
        (4, pytest.approx(losses[3], rel=1e-6)),
    ]
    assert [step for step, _ in run.logged["val/loss"]] == [2, 4]


EXPERTS, CHOSEN = 24, 2


class Experts(Model):
    """Two blocks of a mixture of experts, which do not change."""

    def __init__(self, batches: int = 4) -> None:
        super().__init__(batches)
        shape = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": CLASSES,
        }
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = MixtralConfig(
            **shape, **heads, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
        )
        torch.manual_seed(0)
        self.embed = self.middle = self.head = None  # type: ignore[assignment]
        self.model = MixtralForCausalLM(config)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def loads_by_hand(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of each router's experts [routers, experts], of all batches in one
    process."""
    with torch.no_grad():
        routed = (
            Experts().model(input_ids=tokens, output_router_logits=True).router_logits
        )
    chosen = torch.stack(routed).topk(CHOSEN, -1).indices.flatten(1)
    return torch.stack([torch.bincount(each, minlength=EXPERTS) for each in chosen])


def train_experts(
    cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]],
) -> list[dict[str, float]]:
    reports = []
    for log, steps, knobs, flags in cases:
        monitor = {"every_n_steps": steps, "run_log": log}
        reports.append(train(Experts, knobs=knobs, monitor=monitor, **flags)[0][steps])
    return reports


@needs_routers
def test_loads_of_experts_are_those_of_all_ranks_and_of_training_alone(
    tmp_path: Path,
) -> None:
    evaluates = {"val_check_interval": 2, "limit_val_batches": 1}
    stages = {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}}
    logs = [str(tmp_path / name / "run.jsonl") for name in ("shards", "stages")]
    cases = [
        (logs[0], 4, {"shard_degree": 2, "activations": "full"}, evaluates),
        (logs[1], 8, stages, {}),
    ]
    by_rank = run_ranks(train_experts, 2, cases)
    loads = loads_by_hand(
        torch.arange(4 * BATCH * 2)[:, None].expand(-1, LENGTH) % CLASSES
    ).double()
    for place, log in enumerate(logs):
        routers = Run.read(Path(log)).last("routers")
        assert list(routers) == [
            f"model.model.layers.{layer}.mlp.gate" for layer in range(2)
        ], log
        for router, load in zip(routers.values(), loads, strict=True):
            assert router["busiest"] == pytest.approx(
                float(load.max() / load.mean()), rel=1e-12
            )
            assert router["idle"] == (load == 0).double().mean()
        for reports in by_rank:
            highest = (loads.max(1).values / loads.mean(1)).max()
            assert reports[place]["expert_load"] == pytest.approx(
                float(highest), rel=1e-12
            )
            assert reports[place]["idle_experts"] == (loads == 0).double().mean()


def test_given_flops_and_given_counts_are_taken() -> None:
    given = {
        "flops_per_sample": 1000.0,
        "samples": lambda batch: 3,
        "tokens": lambda batch: 7,
    }
    reports, _ = train(strategy="auto", monitor=given)
    assert flops_per_sample(reports[4], 1) == pytest.approx(1000, rel=1e-12)
    assert reports[4]["samples"] == 4 * 3
    assert reports[4]["tokens_per_second"] / reports[4][
        "samples_per_second"
    ] == pytest.approx(7 / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (
            {
                "labels": torch.zeros(3),
                "input_ids": torch.zeros(3, 7, dtype=torch.long),
            },
            3,
            21,
        ),
        (
            (torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)),
            4,
            24,
        ),
        ((torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.long)), 5, None),
        ({"a": "x", "b": [torch.zeros(2, 3)]}, 2, None),
        (torch.zeros(6, dtype=torch.long), 6, None),
    ],
)
def test_samples_and_tokens_of_usual_batches(
    batch: Any, samples: int, tokens: int | None
) -> None:
    assert count_samples(batch) == samples
    assert count_tokens(batch) == tokens


def test_refusals_say_what_to_type() -> None:
    with pytest.raises(
        ValueError,
        match="every_n_steps=0 is not a number of steps; allowed: 1 and more",
    ):
        SmpMonitor(every_n_steps=0)
    with pytest.raises(ValueError, match="peak_tflops=-1"):
        SmpMonitor(peak_tflops=-1)
    with pytest.raises(ValueError, match=r"write SmpMonitor\(samples=lambda batch"):
        count_samples({"text": "words"})
