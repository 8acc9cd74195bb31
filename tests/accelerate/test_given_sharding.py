"""Models that Transformers sharded when it loaded them train like one process, with our
window where possible.

float32, as Transformers loads: losses and norms to 1e-6 + 2e-7 per step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

from smp_core.cluster.links import Collectives, LinkFit, Links
from smp_core.sharding.fsdp.internals import generation
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.accelerate.trainers import (
    Run,
    assert_close,
    make_dataset,
    make_trainer,
    whole_weights,
)
from tests.harness import run_ranks
from tests.older_transformers import needs_dealt_experts, needs_sharding

BATCH, STEPS = 8, 3


def save_tiny(folder: Path, tied: bool, has_experts: bool = False) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    config = (
        MixtralConfig(**sizes, num_local_experts=4)
        if has_experts
        else LlamaConfig(**sizes)
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> dict[str, Any]:
    losses, norms, held = [], [], []
    total = 0.0
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += accelerator.reduce(loss.detach(), "mean").item() / 2
            if accelerator.sync_gradients:
                norms.append(
                    float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                )
                losses.append(total)
                total = 0.0
            else:
                held.append(
                    [name for name, p in model.named_parameters() if p.grad is not None]
                )
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == 2 * STEPS:
            break
    return {
        "losses": losses,
        "norms": norms,
        "held": held,
        "weights": full_weights(model),
    }


def alone(folder: Path) -> dict[str, Any]:
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(whole_labels(), batch_size=BATCH))
    losses, norms = [], []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(2):
            loss = model(**next(batches)).loss / 2
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": full_weights(model)}


def whole_labels() -> list[dict[str, torch.Tensor]]:
    """All labels count, so that the mean over ranks is the mean over tokens."""
    return [
        {"input_ids": sample["input_ids"], "labels": sample["input_ids"]}
        for sample in make_dataset()
    ]


def train_given(folder: Path, sizes: dict[str, int], **knobs: Any) -> dict[str, Any]:
    from transformers.distributed import DistributedConfig

    accelerator = fresh_accelerator(gradient_accumulation_steps=2, **knobs)
    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(whole_labels(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = loop(accelerator, model, optimizer, loader)
    handle = accelerator.parallel
    seen["bytes"] = sum(
        v for name, v in handle.meter.totals().items() if name.endswith("_bytes")
    )
    seen["reductions"] = (
        handle.meter.per_step().get("reduce_scatter/calls", 0),
        sum(bool(unit.parameters()) for unit in handle.units),
    )
    seen["stages"] = handle.plan.hierarchical and handle.config.collectives.hierarchical
    seen["in effect"] = (
        handle.plan.hierarchical,
        handle.config.collectives.hierarchical,
    )
    seen["layout"] = (accelerator.mesh.replicate_degree, accelerator.mesh.shard_degree)
    seen["state"] = accelerator.get_state_dict(model)
    return seen


CASES = {
    "one dimension": (False, {"fsdp_size": 4}),
    "one dimension, tied": (True, {"fsdp_size": 4}),
    "two dimensions": (False, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "two dimensions, tied": (True, {"fsdp_size": 2, "dp_replicate_size": 2}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("one dimension", marks=pytest.mark.slow),
        pytest.param("one dimension, tied", marks=pytest.mark.slow),
        pytest.param("two dimensions", marks=pytest.mark.slow),
        pytest.param("two dimensions, tied", marks=pytest.mark.slow),
        "one dimension, held",
    ],
)
@needs_sharding
def test_a_model_that_came_sharded_trains_like_one_process(
    tmp_path: Path, case: str
) -> None:
    tied, sizes = CASES[case.removesuffix(", held")]
    save_tiny(tmp_path / "model", tied)
    expected = alone(tmp_path / "model")
    knobs = {
        "keep_between_micro_batches": "gradients" if case.endswith("held") else "shards"
    }
    results = run_ranks(
        train_given, 4, tmp_path / "model", sizes, ranks_per_node=2, **knobs
    )
    for rank, seen in enumerate(results):
        for what in ("losses", "norms"):
            for step, (a, b) in enumerate(zip(seen[what], expected[what], strict=True)):
                assert abs(a - b) <= 1e-6 + 2e-7 * step, (
                    f"{what} of step {step}: {a} against {b}"
                )
        for name, value in expected["weights"].items():
            # Adam divides by the gradient's size: a gradient of noise moves a weight by
            # a part of lr = 1e-3.
            assert (seen["weights"][name] - value).abs().max().item() <= 2e-5, name
        assert seen["held"] == [[]] * STEPS, "between micro-batches .grad is as it was"
        assert seen["layout"] == (4 // sizes["fsdp_size"], sizes["fsdp_size"])
        one = "dp_replicate_size" not in sizes
        assert (seen["bytes"] > 0) == one and seen["stages"] == one
        reduced, units = seen["reductions"]
        # It comes twice through norm and head, which were sharded together.
        units += generation() == "2.11"
        assert reduced == (
            0 if not one else units if case.endswith("held") else 2 * units
        )
        assert set(seen["state"]) == (set(expected["weights"]) if rank == 0 else set())


@needs_sharding
def test_measured_links_decide_about_its_stages_too(tmp_path: Path) -> None:
    """Slow inside the node: one stage, with the same losses."""
    save_tiny(tmp_path / "model", False)
    slow, fast = (
        Collectives(2, *[LinkFit(1e-6, bandwidth)] * 3) for bandwidth in (1e6, 1e10)
    )
    Links(2, 2, slow, fast, fast).save(tmp_path / "links.json")
    env = {"SMP_LINKS": str(tmp_path / "links.json")}
    expected = alone(tmp_path / "model")
    for seen in run_ranks(
        train_given, 4, tmp_path / "model", {"fsdp_size": 4}, ranks_per_node=2, env=env
    ):
        assert seen["in effect"] == (False, False)
        for step, (a, b) in enumerate(
            zip(seen["losses"], expected["losses"], strict=True)
        ):
            assert abs(a - b) <= 1e-6 + 2e-7 * step


def trainer_given(
    folder: Path, source: Path, sizes: dict[str, int] | None, resume: str | None
) -> Run:
    options: dict[str, Any] = {}
    if sizes is not None:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**sizes)
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    flags = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer, recorder = make_trainer(
        folder, BATCH, 2, None if sizes is None else {}, model=model, **flags
    )
    recorder.run.extra["before"] = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp_size": 4}, id="1-D", marks=pytest.mark.slow),
        pytest.param(
            {"fsdp_size": 2, "dp_replicate_size": 2}, id="2-D", marks=pytest.mark.slow
        ),
        pytest.param(
            {"fsdp_size": 4, "ep_size": 2},
            id="dealt experts",
            marks=needs_dealt_experts,
        ),
    ],
)
@needs_sharding
def test_trainer_trains_saves_and_resumes_a_model_that_came_sharded(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Stock Trainer refuses to save the training state of such a model."""
    save_tiny(tmp_path / "model", True, "ep_size" in sizes)
    expected = trainer_given(tmp_path / "alone", tmp_path / "model", None, None)
    first = run_ranks(
        trainer_given,
        4,
        tmp_path / "ranks",
        tmp_path / "model",
        sizes,
        None,
        ranks_per_node=2,
    )
    checkpoint = str(tmp_path / "ranks" / "checkpoint-2")
    again = run_ranks(
        trainer_given,
        4,
        tmp_path / "again",
        tmp_path / "model",
        sizes,
        checkpoint,
        ranks_per_node=2,
    )
    for seen, skipped in [(first[0], 0), (again[0], 2)]:
        assert_close(seen, expected, 4e-6, first_step=skipped)
        assert seen.extra["before"] == pytest.approx(expected.extra["before"], abs=1e-6)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks" / "final")
    for name, value in first[0].weights.items():
        assert torch.equal(loaded.state_dict()[name], value), name


def sharded_by_hand() -> dict[str, Any]:
    """``fully_shard`` on half the world: nobody but us would make the two halves
    agree."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))[
        "shard"
    ]
    torch.manual_seed(dist.get_rank() // 2)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    accelerator = fresh_accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(
        8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    for micro_batch in inputs.chunk(2):
        mine = micro_batch[dist.get_rank() : dist.get_rank() + 1]
        with accelerator.no_sync(model):
            accelerator.backward(model(mine).square().mean() / 2)
    optimizer.step()
    return full_weights(model)


def test_replicas_of_a_hand_sharded_model_agree() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).double()
    inputs = torch.randn(
        8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    model(inputs).square().mean().backward()
    expected = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()}
    for seen in run_ranks(sharded_by_hand, 4, ranks_per_node=2):
        for name, value in expected.items():
            assert (seen[name] - value).abs().max().item() <= 1e-12, name


def refusals(folder: Path) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, distribute_tensor
    from transformers.distributed import DistributedConfig

    said = {}

    def refused(name: str, model: torch.nn.Module, **knobs: Any) -> None:
        accelerator = fresh_accelerator(**knobs)
        with pytest.raises(ValueError) as error:
            accelerator.prepare(model)
        said[name] = str(error.value)

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    refused("degree", fully_shard(torch.nn.Linear(4, 4), mesh=mesh), shard_degree=2)
    refused(
        "too late", fully_shard(torch.nn.Linear(4, 4), mesh=mesh), activations="full"
    )
    plain = torch.nn.Linear(4, 4)
    plain.weight = torch.nn.Parameter(
        distribute_tensor(plain.weight.data, mesh, [Replicate()])
    )
    refused("not fsdp", plain)
    apart = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(apart[0], mesh=mesh)
    fully_shard(
        apart[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    )
    refused("several", apart)
    strided = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    refused("strided", fully_shard(torch.nn.Linear(4, 4), mesh=strided))
    assert isinstance(next(apart.parameters()), DTensor)
    for name, sizes in (
        ("split", {"tp_size": 4}),
        ("split and sharded", {"tp_size": 2, "fsdp_size": 2}),
    ):
        model = LlamaForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**sizes)
        )
        refused(name, model)
    return said


@needs_sharding
def test_what_cannot_be_taken_over_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, True)
    for said in run_ranks(refusals, 4, tmp_path, ranks_per_node=2):
        assert (
            "came with its layers split over 4 ranks (DistributedConfig(tp_size=4), or tp_plan=)"
            in said["split"]
        )
        assert (
            "write tensor_parallel_degree=2: torch-smp splits it"
            in said["split and sharded"]
        )
        assert (
            "shard_degree=2, but the model came sharded over ranks [0, 1, 2, 3]"
            in said["degree"]
        )
        assert (
            "activations.checkpoint='full' has to be applied before" in said["too late"]
        )
        assert "not FSDP2's" in said["not fsdp"]
        assert "over several meshes" in said["several"]
        assert "consecutive ranks" in said["strided"]
