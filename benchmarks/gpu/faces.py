"""Part 4: Lightning, Accelerate and Transformers' Trainer over two NCCL ranks on the
one device (:mod:`nccl_ranks` says how), against two gloo ranks on the CPU: losses of
four steps, a checkpoint between the second and the third."""

from __future__ import annotations

import faulthandler
import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp

from benchmarks.gpu.items import Rows
from benchmarks.gpu.nccl_ranks import HOST

if TYPE_CHECKING:
    from benchmarks.gpu.device import Device  # it loads the core

WORLD, STEPS, SAVED, SAMPLES, TOKENS = 2, 4, 2, 4, 32
KNOBS: dict[str, dict[str, Any]] = {
    "sharded": {"shard_degree": "world"},
    "replicas": {"shard_degree": 1},
    "tensor": {"tensor_parallel_degree": 2},
    "context": {"context_parallel_degree": 2, "shard_degree": 2},
    "stages": {"pipeline_parallel_degree": 2},
}
FACES = ("lightning", "accelerate", "trainer")
REHEARSED = (("lightning", "sharded"), ("accelerate", "tensor"), ("trainer", "context"))
AT_ONCE = 3  # cases, which take longer to start than to train
EXACT = 1e-4  # float32, sums and products in another order


def rows(on: Device) -> Rows:
    cases = (
        REHEARSED
        if on.rehearsal
        else [(face, name) for name in KNOBS for face in FACES]
    )
    with ThreadPoolExecutor(1 if on.rehearsal else AT_ONCE) as pool:
        found = [pool.submit(_compared, on, face, name) for face, name in cases]
        for (face, name), each in zip(cases, found, strict=True):
            yield f"{face}, {name}", each.result


def _compared(on: Device, face: str, name: str) -> dict[str, Any]:
    expected, seen = (_losses(kind, face, name) for kind in ("cpu", on.device.type))
    off = max(abs(a - b) / abs(b) for a, b in zip(seen, expected, strict=True))
    return {
        "ok": len(seen) == STEPS and off <= EXACT,
        "losses off": off,
        "losses": seen,
    }


def _losses(kind: str, face: str, name: str) -> list[float]:
    """Return the losses of a training of two ranks, of which each ends by itself within
    a minute and a half."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, kind, face, name), nprocs=WORLD)
        return list(torch.load(Path(folder, "losses"), weights_only=True))


def _rank(rank: int, folder: str, kind: str, face: str, name: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(90, exit=True)
    # As torchrun sets it on two hosts of one device each.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
    )
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_port(folder)),
        TORCHELASTIC_RUN_ID="gpu-check",
    )
    os.environ.update(
        {**HOST, "NCCL_HOSTID": f"host-{rank}", "SMP_RANKS_PER_NODE": str(WORLD)}
    )
    losses = TRAININGS[face](kind, KNOBS[name], Path(folder))
    if rank == 0:
        torch.save(losses, Path(folder, "losses"))


def _port(folder: str) -> int:
    return 20000 + zlib.crc32(folder.encode()) % 20000


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (STEPS * SAMPLES, TOKENS), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def _lightning(kind: str, knobs: dict[str, Any], folder: Path) -> list[float]:
    import lightning as L

    from lightning_smp import SmpShardedStrategy

    losses: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def trained(steps: int, resume: Path | None) -> L.Trainer:
        trainer = L.Trainer(
            accelerator="gpu" if kind == "cuda" else "cpu", devices=1, num_nodes=WORLD, max_steps=steps,
            strategy=SmpShardedStrategy(**knobs), logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, gradient_clip_val=1.0,
        )  # fmt: skip
        n_readers = 1 if any(axis in knobs for axis in _SHARE_A_BATCH) else WORLD
        loader = torch.utils.data.DataLoader(_data(), batch_size=SAMPLES // n_readers)  # type: ignore[arg-type]
        trainer.fit(Module(), loader, ckpt_path=resume)
        return trainer

    trained(SAVED, None).save_checkpoint(folder / "saved")
    trained(STEPS, folder / "saved")
    return losses


_SHARE_A_BATCH = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
)


def _accelerate(kind: str, knobs: dict[str, Any], folder: Path) -> list[float]:
    from accelerate_smp import SmpAccelerator

    accelerator = SmpAccelerator(cpu=kind == "cpu", **knobs)
    n_readers = 1 if any(axis in knobs for axis in _SHARE_A_BATCH) else WORLD

    def prepared() -> tuple[Any, Any, Any]:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(_data(), batch_size=SAMPLES // n_readers)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        return model, optimizer, loader

    def steps(
        model: Any, optimizer: Any, batches: Iterator[Any], count: int
    ) -> list[float]:
        @accelerator.pipeline_step  # type: ignore[untyped-decorator]
        def loss_of(batch: Any) -> torch.Tensor:
            found: torch.Tensor = model(**batch).loss
            return found

        losses = []
        for batch in itertools.islice(batches, count):
            loss = loss_of(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        return losses

    model, optimizer, loader = prepared()
    losses = steps(model, optimizer, iter(loader), SAVED)
    accelerator.save_state(str(folder / "saved"))
    steps(model, optimizer, iter(loader), 1)  # which is taken back
    accelerator.load_state(str(folder / "saved"))
    rest = accelerator.skip_first_batches(loader, SAVED)
    return losses + steps(model, optimizer, iter(rest), STEPS - SAVED)


def _trainer(kind: str, knobs: dict[str, Any], folder: Path) -> list[float]:
    import transformers

    from accelerate_smp import SmpTrainer

    n_readers = 1 if any(axis in knobs for axis in _SHARE_A_BATCH) else WORLD

    def trained(steps: int, resume: Path | None) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=SAMPLES // n_readers,
            learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, save_strategy="steps", save_steps=SAVED,
            report_to="none", disable_tqdm=True, use_cpu=kind == "cpu",
        )  # fmt: skip
        trainer = SmpTrainer(
            model=_model(), args=arguments, train_dataset=_data(), smp_config=knobs
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    trained(SAVED, None)
    return trained(STEPS, folder / "out" / f"checkpoint-{SAVED}")


TRAININGS: dict[str, Callable[[str, dict[str, Any], Path], list[float]]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "trainer": _trainer,
}
