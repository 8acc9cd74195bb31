"""The memory savers together with FP8, context parallelism and delayed initialisation:
equal to the last bit to the same run without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.config.fp8_recipe import Fp8Recipe
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.activations.models import (
    DroppingGpt,
    assert_equal_bits,
    build,
    observe,
    whole,
)
from tests.core.activations.offloads import OFFLOADED
from tests.core.context_parallel import model_cases
from tests.core.fp8.fp8_runs import runs_of
from tests.harness import run_ranks

SAVERS: list[dict[str, Any]] = [
    {"activations": "full"},
    {"activations": "selective"},
    {"activations": {**OFFLOADED, "loading_horizon": 1}},
    {"activations": {**OFFLOADED, "loading_horizon": 1, "checkpoint": "selective"}},
    {"state_offload": "all"},
    {"state_offload": "optimizer", "activations": "every:2"},
]


def fp8_runs() -> list[str]:
    """What differs from the plain FP8 run: losses, weights, scales and amax
    histories."""
    plain, *others = runs_of(
        [{"shard_degree": 2}, *({"shard_degree": 2, **saver} for saver in SAVERS)],
        steps=3,
    )
    different = []
    for saver, run in zip(SAVERS, others, strict=True):
        same = run.losses == plain.losses and torch.equal(run.scales, plain.scales)
        same = same and all(map(torch.equal, run.histories, plain.histories))
        if not same or any(
            not torch.equal(run.weights[name], value)
            for name, value in plain.weights.items()
        ):
            different.append(str(saver))
    return different


def test_with_fp8() -> None:
    assert run_ranks(fp8_runs, 2) == [[], []]


ON_HOST = {"state_offload": "optimizer"}
# Each beside the same without offload: with and without an FP8 gather, whole (FSDP2 is
# there for offloading alone), and with states over the world. FP8 weights of a bfloat16
# model are quantised from float32 masters wherever those are stepped.
FP8_OFFLOADS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"shard_degree": 4}, {"state_offload": "all"}),
    (
        {
            "shard_degree": 2,
            "collectives": {"hierarchical": False},
            "dtype": torch.bfloat16,
        },
        {"state_offload": "all"},
    ),
    (
        {"shard_degree": 2, "fp8": Fp8Recipe(amax_history_len=4, fp8_all_gather=False)},
        {"state_offload": "all"},
    ),
    ({"shard_degree": 1}, {"state_offload": "all"}),
    *(
        (
            {
                "shard_degree": 2,
                "optimizer_shard": "world",
                "dtype": dtype,
                "micro_batches": 1,
            },
            ON_HOST,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    ({"shard_degree": 2, "dtype": torch.bfloat16, "master_dtype": "float32"}, ON_HOST),
]


def fp8_offloads() -> list[str]:
    different = []
    for layout, offload in FP8_OFFLOADS:
        plain, offloaded = runs_of([layout, {**layout, **offload}], steps=3)
        same = plain.losses == offloaded.losses and torch.equal(
            plain.scales, offloaded.scales
        )
        if not same or any(
            not torch.equal(offloaded.weights[name], value)
            for name, value in plain.weights.items()
        ):
            different.append(str(layout))
        if offloaded.gathered != plain.gathered:
            different.append(
                f"{layout}: {plain.gathered} and {offloaded.gathered} bytes were gathered"
            )
    return different


@pytest.mark.slow
def test_fp8_weights_in_host_memory_travel_in_fp8() -> None:
    assert run_ranks(fp8_offloads, 4, ranks_per_node=2) == [[]] * 4


def context_gradients(
    **knobs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], ParallelModel]:
    config = SmpConfig(shard_degree=2, context_parallel_degree=2, **knobs)
    parallel = parallelize(model_cases.build("llama"), config)
    assert parallel.context is not None
    split = parallel.context.split(
        model_cases.whole_batch(model_cases.Run("llama", 2, 2, "packed"))
    )
    with enabled(split):
        logits = parallel.module(split.batch["input_ids"], use_cache=False).logits
        loss = (
            model_cases.cross_entropy_sum(logits, split.shift_labels)
            / split.tokens_per_rank
        )
        loss.backward()
    gradients = {
        name: whole(parameter.grad)
        for name, parameter in parallel.module.named_parameters()
    }
    return loss.detach(), gradients, parallel


def context_runs() -> list[str]:
    plain_loss, plain, _ = context_gradients()
    different = []
    for saver in SAVERS[:5]:
        loss, gradients, parallel = context_gradients(**saver)
        if not torch.equal(loss, plain_loss) or any(
            not torch.equal(gradients[name], plain[name]) for name in plain
        ):
            different.append(str(saver))
        offloader = parallel.activations.offloader
        if offloader is not None and not offloader.bytes_in:
            different.append(f"{saver}: nothing was offloaded")
    return different


@pytest.mark.slow
def test_with_context_parallelism() -> None:
    assert run_ranks(context_runs, 2) == [[], []]


def as_smp_says() -> list[int]:
    """A block of SMP's parameters, as a job has it: the horizon that took effect, and
    inputs that came back."""
    expected = observe(build(layers=6, dropout=0.1, shard_degree=2))
    block = {
        "sharded_data_parallel_degree": 2,
        "offload_activations": True,
        "activation_loading_horizon": 4,
    }
    torch.manual_seed(0)
    asked = SmpConfig.from_smp_parameters(block)
    config = dataclasses.replace(
        asked, activations=dataclasses.replace(asked.activations, offload_min_bytes=0)
    )
    parallel = parallelize(DroppingGpt(6, 0.1), config)
    assert_equal_bits(observe(parallel), expected, str(block))
    offloader = parallel.activations.offloader
    assert offloader is not None
    return [offloader.horizon, offloader.bytes_in]


@pytest.mark.slow
def test_a_block_of_smp_s_parameters_offloads() -> None:
    for horizon, moved in run_ranks(as_smp_says, 2):
        assert horizon == 4 and moved > 0


def delayed_weights() -> list[dict[str, torch.Tensor]]:
    found = []
    for saver in ({}, *SAVERS[2:5]):
        with torch.device("meta"):
            model = DroppingGpt(2)
        parallel = parallelize(
            model, SmpConfig(shard_degree=2, delayed_init=True, **saver)
        )
        found.append(
            {
                name: whole(parameter)
                for name, parameter in parallel.module.named_parameters()
            }
        )
    return found


def test_with_delayed_initialisation() -> None:
    for plain, *others in run_ranks(delayed_weights, 2):
        for other in others:
            assert all(torch.equal(other[name], value) for name, value in plain.items())
