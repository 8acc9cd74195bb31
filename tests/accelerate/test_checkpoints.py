"""save_state and load_state: other numbers of ranks, Lightning's folders, whole models.

Steps after a resume are those of the run that was not interrupted (float64, 1e-12).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from smp_core.checkpoint import CheckpointError, read_manifest
from smp_core.checkpoint.reader import read_index
from tests.accelerate.running import (
    SAMPLES,
    STEPS,
    full_weights,
    make_loader,
    prepared,
    train,
    train_alone,
)
from tests.core.equivalence import assert_close
from tests.core.models import Trajectory, TroubledModel, loss_of
from tests.harness import run_ranks

MICRO = 2


def first_half(folder: str, **arguments: Any) -> Trajectory:
    """Train half of the steps and save."""
    accelerator, optimizer, model, loader, scheduler = prepared(
        torch.float64, MICRO, **arguments
    )
    half = accelerator.skip_first_batches(loader, 0)
    batches = [batch for batch, _ in zip(half, range(STEPS // 2 * MICRO), strict=False)]
    accelerator.gradient_state._remove_dataloader(half)
    seen = train(accelerator, optimizer, model, batches, scheduler)
    accelerator.save_state(folder)
    return seen


def second_half(folder: str, **arguments: Any) -> Trajectory:
    """Load and train the other half."""
    accelerator, optimizer, model, loader, scheduler = prepared(
        torch.float64, MICRO, **arguments
    )
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, STEPS // 2 * MICRO)
    return train(accelerator, optimizer, model, rest, scheduler)


def rest_of(expected: Trajectory) -> Trajectory:
    return Trajectory(
        expected.losses[STEPS // 2 :], expected.norms[STEPS // 2 :], expected.weights
    )


def test_two_ranks_then_four_then_one(tmp_path: Path) -> None:
    expected = train_alone(torch.float64, MICRO)
    folder = str(tmp_path / "half")
    run_ranks(first_half, 2, folder, shard_degree=2)
    results = run_ranks(second_half, 4, folder, ranks_per_node=2, shard_degree=2)
    results += run_ranks(second_half, 4, folder, ranks_per_node=2, shard_degree=4)
    results.append(second_half(folder))  # this process, nothing sharded
    for seen in results:
        assert_close(seen, rest_of(expected), lambda step: 1e-12, 1e-12)


MIXED: dict[str, Any] = {
    "shard_degree": 2,
    "optimizer_shard": "world",
    "mixed_precision": "bf16",
}


def in_mixed_precision(folder: str) -> dict[str, Any]:
    """One run to its end; another one interrupted in the middle; what is stored, and
    what is saved."""
    found: dict[str, Any] = {}
    for name in ("whole", "first", "second"):
        accelerator, optimizer, model, loader, scheduler = prepared(
            torch.float32, MICRO, **MIXED
        )
        if name == "second":
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, STEPS // 2 * MICRO)
        batches = loader
        if name == "first":
            batches = [
                batch
                for batch, _ in zip(loader, range(STEPS // 2 * MICRO), strict=False)
            ]
        seen = train(accelerator, optimizer, model, batches, scheduler)
        if name == "first":
            accelerator.save_state(folder)
        found[name] = (seen.losses, seen.weights)
    found["stored"] = {
        p.dtype for p in model.parameters() if p.requires_grad and p.ndim
    }
    found["whole model"] = {
        v.dtype
        for v in accelerator.get_state_dict(model).values()
        if v.is_floating_point()
    }
    return found


@pytest.mark.slow
def test_mixed_precision_weights_over_the_world_are_saved_in_float32(
    tmp_path: Path,
) -> None:
    """Stored and sent in bfloat16; the resumed run is the uninterrupted one to the last
    bit, which it is only from weights that were not rounded."""
    for rank, found in enumerate(
        run_ranks(in_mixed_precision, 4, str(tmp_path / "half"), ranks_per_node=2)
    ):
        (losses, weights), (rest, resumed) = found["whole"], found["second"]
        assert rest == losses[STEPS // 2 :]
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())
        assert torch.bfloat16 in found["stored"]
        assert found["whole model"] == ({torch.float32} if rank == 0 else set())
    index = read_index(tmp_path / "half")
    saved = {
        index.record(name).dtype
        for place, name in index.by_path().items()
        if place[0] == "state_dict"
    }
    assert torch.bfloat16 not in saved and torch.float32 in saved


def save_and_load_everything(folder: str) -> dict[str, Any]:
    """Registered objects, random states, numbered folders; and a folder that does not
    fit."""

    class Counter:
        def __init__(self) -> None:
            self.state = {"seen": 0, "history": torch.zeros(2)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator, *_ = prepared(torch.float64, 1, shard_degree=2, project_config=project)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for number in range(3):
        counter.state = {"seen": number, "history": torch.full((2,), float(number))}
        accelerator.save_state()
    drawn = torch.rand(3)
    counter.state = {}
    accelerator.load_state()
    report = {"seen": counter.state, "drawn again": torch.equal(torch.rand(3), drawn)}
    report["folders"] = sorted(
        path.name for path in Path(folder, "checkpoints").iterdir()
    )
    accelerator._custom_objects.clear()
    with pytest.raises(CheckpointError, match="1 registered objects but there are 0"):
        accelerator.load_state()
    with pytest.raises(CheckpointError, match="nowhere"):
        accelerator.load_state(str(Path(folder, "nowhere")))
    return report


def test_objects_random_states_and_numbered_folders(tmp_path: Path) -> None:
    for report in run_ranks(
        save_and_load_everything, 2, str(tmp_path), ranks_per_node=2
    ):
        assert report["seen"]["seen"] == 2 and report["seen"]["history"].tolist() == [
            2.0,
            2.0,
        ]
        assert report["drawn again"]
        assert report["folders"] == ["checkpoint_1", "checkpoint_2"]


def whole_model(
    folder: str, **arguments: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    accelerator, _, model, _, _ = prepared(torch.float64, 1, **arguments)
    accelerator.save_model(model, folder)
    return full_weights(model), sorted(accelerator.get_state_dict(model))


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_save_model_writes_safetensors_that_plain_torch_loads(
    tmp_path: Path, degree: int
) -> None:
    results = run_ranks(
        whole_model, 4, str(tmp_path), ranks_per_node=2, shard_degree=degree
    )
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model = TroubledModel().double()
    missing, unexpected = model.load_state_dict(saved, strict=False)
    # Tied: written once.
    assert not unexpected and set(missing) <= {"head.weight", "embed.weight"}
    for name, value in results[0][0].items():
        assert torch.equal(model.state_dict()[name], value), name
    assert set(results[0][1]) == set(model.state_dict())
    assert all(names == [] for _, names in results[1:]) or degree == 1


def train_in_lightning(
    folder: str | None, load: str | None, steps: int
) -> dict[str, torch.Tensor]:
    """Lightning on the samples of this folder's loop: plain AdamW, one batch a step."""
    from lightning.pytorch import LightningModule

    from tests.lightning.running import make_trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(dist.get_rank())
            self.model = TroubledModel().double()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return loss_of(self.model, batch["tokens"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    module = Module()
    trainer = make_trainer(
        {"shard_degree": 2},
        max_epochs=1,
        max_steps=steps,
        use_distributed_sampler=False,
    )
    trainer.fit(
        module, DataLoader(batches_of_this_rank(), batch_size=None), ckpt_path=load
    )
    if folder is not None:
        trainer.save_checkpoint(folder)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in module.model.state_dict().items()
    }


def batches_of_this_rank() -> list[dict[str, torch.Tensor]]:
    """Every step sees the same global batch, so that it does not matter which face
    counts the batches."""
    batch = next(iter(make_loader(1, 1, SAMPLES)))["tokens"]
    return [{"tokens": batch.chunk(dist.get_world_size())[dist.get_rank()]}] * 4


def train_in_accelerate(
    folder: str | None, load: str | None, steps: int
) -> dict[str, torch.Tensor]:
    from tests.accelerate.running import fresh_accelerator

    accelerator = fresh_accelerator(shard_degree=4)
    torch.manual_seed(accelerator.process_index)
    model = TroubledModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if load is not None:
        accelerator.load_state(load)
    for batch in batches_of_this_rank()[:steps]:
        accelerator.backward(loss_of(model, batch["tokens"]))
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
    return full_weights(model)


def expected_weights(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TroubledModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    batch = next(iter(make_loader(1, 1, SAMPLES)))["tokens"]
    for _ in range(steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("Lightning to Accelerate", marks=pytest.mark.slow),
        "Accelerate to Lightning",
    ],
)
def test_checkpoints_cross_over_between_the_faces(tmp_path: Path, way: str) -> None:
    """Two steps under one face, saved; two more under the other: weights (hence
    optimizer states) of four steps."""
    pytest.importorskip("lightning")
    folder = str(tmp_path / "crossing")
    first, second, prefix = train_in_lightning, train_in_accelerate, "model."
    if way == "Accelerate to Lightning":
        first, second, prefix = second, first, ""
    run_ranks(first, 4, folder, None, 2, ranks_per_node=2)
    assert read_manifest(folder).metadata["module_prefix"] == prefix
    results = run_ranks(second, 4, None, folder, 2, ranks_per_node=2)
    expected = expected_weights(4)
    for seen in results:
        for name, value in expected.items():
            assert (seen[name] - value).abs().max().item() <= 1e-12, name
