"""Every refusal names the knob, what was found and what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from accelerate_smp import SmpAccelerator
from accelerate_smp.config import resolve_config
from smp_core.cluster import collective_timeout
from tests.accelerate.running import fresh_accelerator, make_loader
from tests.accelerate.trainers import LENGTH, make_model, make_trainer
from tests.core.models import TroubledModel
from tests.harness import run_ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shard_degre": 2}, ["shard_degre", "shard_degree"]),
        (
            {"mixed_precison": "bf16"},
            ["unknown argument 'mixed_precison'; did you mean 'mixed_precision'?"],
        ),
        ({"smp_config": {"colectives": {}}}, ["colectives", "collectives"]),
        (
            {"smp_config": {"shard_degree": 2}, "shard_degree": 4},
            ["smp_config", "shard_degree"],
        ),
        ({"mixed_precision": "fp8"}, ["FP8 plugin", "bf16"]),
        (
            {
                "parallelism_config": ParallelismConfig(dp_shard_size=2),
                "shard_degree": 4,
            },
            ["shard_degree=4", "=2"],
        ),
    ],
    ids=[
        "unknown",
        "misspelt argument",
        "unknown in config",
        "both",
        "fp8",
        "contradiction",
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        SmpAccelerator(**arguments)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_another_engine_is_refused_by_name(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain `accelerate launch` asks for it, which is lost in silence where there is
    no GPU."""
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ValueError, match=rf"distributed_type: {engine}.*MULTI_GPU"):
        SmpAccelerator()


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="fp16 runs on this machine"
)
def test_fp16_on_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp16.*cannot run on CPU; write 'bf16'"):
        SmpAccelerator(mixed_precision="fp16")


@pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="Trainer sets fp16 up for the device of this machine",
)
def test_fp16_of_training_arguments_on_cpu_is_refused_in_their_words(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ValueError,
        match=r"fp16=True.*cannot run on CPU; allowed there: bf16=True.*write",
    ):
        make_trainer(tmp_path, 8, 1, {}, fp16=True)


def test_smoothed_labels_are_refused_where_trainer_does_not_count_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate_smp.transformers_names.SMOOTHS_BY_COUNT", False)
    with pytest.raises(
        ValueError, match=r"label_smoothing_factor=0.1: .*write 0, or type: pip install"
    ):
        make_trainer(tmp_path, 8, 1, {}, label_smoothing_factor=0.1)


def test_accelerates_own_settings_become_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins and the variables of `accelerate launch`."""
    config = resolve_config(
        None, {}, ParallelismConfig(dp_replicate_size=2, dp_shard_size=4), None
    )
    assert config.shard_degree == 4
    # "auto" leaves it to Accelerate's settings.
    knobs = {"shard_degree": "auto"}
    config = resolve_config(None, knobs, ParallelismConfig(dp_shard_size=4), None)
    assert config.shard_degree == 4
    config = resolve_config(
        None, {}, ParallelismConfig(dp_shard_size=2, tp_size=4), None
    )
    assert (config.shard_degree, config.tensor_parallel_degree) == (2, 4)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
        cpu_offload=True,
    )
    config = resolve_config(None, {}, None, plugin)
    assert (
        config.shard_degree,
        config.reshard_after_forward,
        config.units.modules,
    ) == ("world", False, ("Block",))
    assert (config.activations.checkpoint, config.state_offload) == ("full", "all")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    monkeypatch.setenv("SMP_UNITS", '{"min_parameters": 100}')
    config = resolve_config(None, {}, None, None)
    assert (config.shard_degree, config.units.min_parameters) == (8, 100)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ignored_modules": ["head"]}, ["ignored_modules", "leave it out"]),
        ({"param_init_fn": torch.nn.init.zeros_}, ["param_init_fn", "leave it out"]),
        (
            {"auto_wrap_policy": lambda *a, **k: False},
            ["auto_wrap_policy", "write units="],
        ),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
            ["cast_forward_inputs=False", "allowed: True"],
        ),
        (
            {
                "mixed_precision_policy": MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, output_dtype=torch.float32
                )
            },
            ["output_dtype=torch.float32", "leave it out"],
        ),
    ],
    ids=["ignored", "init", "wrap", "inputs", "outputs"],
)
def test_fsdp_settings_without_counterpart_are_refused(
    settings: dict[str, Any], words: list[str]
) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    with pytest.raises(ValueError) as refused:
        resolve_config(None, {}, None, plugin)
    for word in words:
        assert word in str(refused.value)


def test_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `accelerate launch` says it by variables, of which Accelerate's plugin
    would make an error of torch's on a CPU."""
    with pytest.raises(ValueError, match=r"fsdp_version=1.*write fsdp_version: 2"):
        resolve_config(None, {}, None, FullyShardedDataParallelPlugin(fsdp_version=1))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"fsdp_version=1.*write fsdp_version: 2"):
        resolve_config(None, {}, None, None)


def refusals(folder: Path) -> dict[str, str]:
    """What four ranks refuse."""
    said = {}

    def refused(name: str, action: Any) -> None:
        try:
            action()
        except ValueError as error:
            said[name] = str(error)

    refused(
        "searched batch",
        lambda: make_trainer(folder, 8, 1, {}, auto_find_batch_size=True),
    )
    # Where Transformers itself leaves it out.
    make_trainer(folder, 8, 1, {"shard_degree": 2}, use_cpu=True, ddp_timeout=77)
    said["timeout"] = str(collective_timeout())
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    refused("product", lambda: fresh_accelerator(parallelism_config=sizes))
    refused("degree", lambda: fresh_accelerator(shard_degree=3))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    refused("hook", lambda: fresh_accelerator(kwargs_handlers=[hook]))
    refused(
        "word",
        lambda: fresh_accelerator(
            shard_degree="world",
            parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        ),
    )
    fresh_accelerator(
        shard_degree="node",
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        refused("backend", lambda: fresh_accelerator(shard_degree=2))
    accelerator = fresh_accelerator(shard_degree=2)
    model = TroubledModel()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    refused("stranger", lambda: accelerator.prepare(model, stranger))
    model = TroubledModel()
    forgotten, listed = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        list(model.parameters()),
    )
    accelerator.prepare(model)
    refused("forgotten", forgotten.step)
    refused("made of a list", torch.optim.SGD(listed, lr=0.1).step)
    accelerator.prepare(forgotten).step()
    refused(
        "before its model",
        lambda: accelerator.prepare(
            torch.optim.SGD(TroubledModel().parameters(), lr=0.1)
        ),
    )
    accelerator.prepare(make_loader(1, 1, 2))
    with accelerator.join_uneven_inputs([model]):
        dist.barrier()
    accelerator.even_batches = False
    refused(
        "one batch more",
        lambda: accelerator.prepare(DataLoader(range(9), batch_size=1)),
    )
    accelerator.prepare(
        DataLoader(range(8), batch_size=1),
        DataLoader(range(9), batch_size=2, drop_last=True),
    )
    # Its gathered weights are bfloat16, and its inputs are not.
    accelerator = fresh_accelerator(shard_degree=2, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    said["unwrapped"] = str(bare(torch.ones(2, 4)).dtype)
    return said


def test_refusals_on_ranks(tmp_path: Path) -> None:
    for said in run_ranks(refusals, 4, tmp_path, ranks_per_node=2):
        assert (
            "auto_find_batch_size=True" in said["searched batch"]
            and "per_device_train_batch_size" in said["searched batch"]
        )
        assert said["timeout"] == "0:01:17"
        assert said["unwrapped"] == "torch.float32"
        assert (
            "dp_replicate_size=2 x dp_shard_size=4 makes 8, but 4 processes"
            in said["product"]
        )
        assert "shard_degree=3 does not divide the world of 4 ranks" in said["degree"]
        assert (
            "comm_hook=bf16" in said["hook"]
            and "write compression={'reduce': 'bf16'}" in said["hook"]
        )
        assert (
            "shard_degree is 4 here, but Accelerate's own settings say 2"
            in said["word"]
        )
        assert "1 parameters of no prepared model" in said["stranger"]
        assert "of no prepared model" in said["before its model"]
        for name in ("forgotten", "made of a list"):
            assert (
                "TroubledModel had before it was sharded" in said[name]
                and "accelerator.prepare(" in said[name]
            )
        assert (
            "even_batches=False deals 9 batches out to 4 ranks: 1 of them would"
            in said["one batch more"]
        )
        assert (
            "'cuda:nccl' sends nothing from cpu; allowed there: 'gloo', 'mpi'; write"
            in said["backend"]
        )


def train_beyond_positions(folder: str, knobs: dict[str, Any]) -> str:
    model = make_model()
    model.transformer.wpe = torch.nn.Embedding(LENGTH - 1, model.config.n_embd)
    model.config.n_positions = LENGTH - 1
    trainer, _ = make_trainer(folder, 4, 1, knobs, model=model)
    with pytest.raises(ValueError) as refused:
        trainer.train()
    return str(refused.value)


@pytest.mark.parametrize(
    "knobs",
    [{"shard_degree": 2}, {"context_parallel_degree": 2}],
    ids=["usual", "context"],
)
def test_sequences_beyond_learned_positions_are_refused_with_the_limit(
    knobs: dict[str, Any], tmp_path: Path
) -> None:
    """Also where each rank's part would fit."""
    for message in run_ranks(train_beyond_positions, 2, str(tmp_path), knobs):
        assert (
            f"sequences of {LENGTH} tokens: GPT2LMHeadModel has learned {LENGTH - 1} positions"
            in message
        )
        assert (
            f"max_position_embeddings={LENGTH}" in message
            and "context_parallel_degree=1" not in message
        )
