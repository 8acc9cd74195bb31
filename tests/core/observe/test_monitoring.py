"""FLOPs, rates and MFU with exact arithmetic; the clock is injected."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smp_core.observe.monitoring import (
    FlopMeasurement,
    StepMeter,
    count_model_flops,
    device_peak_flops,
    peak_memory_gib,
)
from smp_core.planner.devices import peak_flops
from tests.harness import run_ranks

BATCH, TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 2, 12, 32, 4, 3, 50

# Per token and layer: qkv 3, projection 1, MLP 8 products of width x width; the head
# width x vocabulary; attention scores and their product with the values, each heads x
# tokens^2 x width/heads. Two operations per multiply-add.
LINEAR = 2 * BATCH * TOKENS * (LAYERS * 12 * WIDTH * WIDTH + WIDTH * VOCABULARY)
ATTENTION = LAYERS * 2 * 2 * BATCH * TOKENS * TOKENS * WIDTH


def gpt2(attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "vocab_size": VOCABULARY,
        "n_positions": TOKENS,
    }
    return GPT2LMHeadModel(
        GPT2Config(
            **sizes, bos_token_id=0, eos_token_id=0, attn_implementation=attention
        )
    )


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.zeros(BATCH, TOKENS, dtype=torch.long)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_a_transformer_without_computing_it(attention: str) -> None:
    model = gpt2(attention)
    flops = count_model_flops(model, tokens())
    assert flops.forward == LINEAR + ATTENTION
    assert flops.training == 3 * (LINEAR + ATTENTION)
    assert {p.device.type for p in model.parameters()} == {"cpu"}, (
        "the model must be left as it was"
    )


def test_flops_of_a_meta_model_and_of_a_custom_forward() -> None:
    with torch.device("meta"):
        model = gpt2()
    flops = count_model_flops(
        model,
        [tokens()],
        forward=lambda m, batch: m(**batch[0], labels=batch[0]["input_ids"]),
    )
    assert flops.forward == LINEAR + ATTENTION


def test_flops_of_a_real_forward_are_the_same() -> None:
    """Attention on CPU is a fused operator that torch's counter does not know."""
    model = gpt2()
    with FlopMeasurement() as measured:
        loss = model(**tokens()).logits.sum()
    assert measured.flops.forward == LINEAR + ATTENTION
    loss.backward()
    assert measured.flops.forward == LINEAR + ATTENTION, (
        "what runs after the measurement does not count"
    )


def sharded_flops() -> int:
    model = gpt2()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="before it is sharded"):
        count_model_flops(model, tokens())
    with FlopMeasurement() as measured:
        loss = model(**tokens()).logits.sum()
    loss.backward()
    return measured.flops.forward


def test_flops_of_a_sharded_forward_are_those_of_the_whole_model() -> None:
    assert run_ranks(sharded_flops, 2) == [LINEAR + ATTENTION] * 2


def test_grouped_products_of_experts_count_each_token_once() -> None:
    tokens_, inner, outer, experts = 6, 16, 8, 3
    a, b = (
        torch.randn(tokens_, inner).bfloat16(),
        torch.randn(experts, inner, outer).bfloat16(),
    )
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    with FlopMeasurement() as measured:
        torch._grouped_mm(a, b, offs=ends)
    assert measured.flops.forward == 2 * tokens_ * inner * outer


def test_forward_that_looks_at_values_is_an_error_with_the_way_out() -> None:
    class Peeking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(
        RuntimeError,
        match=r"Peeking does not run on the meta device.*FlopMeasurement\(\)",
    ):
        count_model_flops(Peeking(2, 2), torch.ones(1, 2))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_of_the_whole_job_count_shared_samples_once() -> None:
    clock = Clock()
    # 8 devices, pairs of which share their samples: 4 data ranks
    meter = StepMeter(
        data_size=4, world_size=8, peak_flops_per_device=200e12, clock=clock
    )
    assert meter.throughput() is None
    meter.start()
    for _ in range(2):
        clock.now += 2.0
        meter.step(samples=3, tokens=300, flops=400e12)
    rates = meter.throughput()
    assert rates is not None
    # 2 steps x 3 samples x 4 data ranks in 4 s; 2 x 400 x 4 TFLOP in 4 s on 8 devices:
    # 100 of 200 TFLOPS
    assert rates.as_dict() == {
        "samples_per_second": 6.0,
        "tokens_per_second": 600.0,
        "tflops_per_device": 100.0,
        "mfu": 0.5,
    }
    assert meter.samples == 24


def test_window_forgets_old_steps_and_pauses_do_not_count() -> None:
    clock = Clock()
    meter = StepMeter(window=2, clock=clock)
    meter.start()
    for seconds in (100.0, 1.0, 3.0):
        clock.now += seconds
        meter.step(samples=8)
    rates = meter.throughput()
    assert rates is not None and rates.samples_per_second == 16 / 4
    meter.pause()
    clock.now += 1000.0
    meter.pause()  # validation inside a checkpoint: one pause
    clock.now += 1000.0
    assert meter.throughput() == rates
    meter.resume()
    clock.now += 1.0
    meter.step(samples=8)
    rates = meter.throughput()
    assert rates is not None and rates.samples_per_second == 16 / 4


def test_what_is_not_known_is_not_reported() -> None:
    clock = Clock()
    meter = StepMeter(clock=clock)
    with pytest.raises(RuntimeError, match="start"):
        meter.step(samples=1)
    meter.start()
    clock.now += 0.5
    meter.step(samples=1, flops=3e12)
    rates = meter.throughput()
    assert rates is not None
    assert rates.as_dict() == {"samples_per_second": 2.0, "tflops_per_device": 6.0}
    clock.now += 0.5
    meter.step(samples=1)  # a step whose FLOPs are not known
    rates = meter.throughput()
    assert rates is not None and rates.as_dict() == {"samples_per_second": 2.0}


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError, match="data_size=4 must be between 1 and world_size=2"
    ):
        StepMeter(data_size=4, world_size=2)
    with pytest.raises(ValueError, match="window=0"):
        StepMeter(window=0)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.1),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_of_known_devices(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "Tesla T4",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Some new device",
        "",
    ],
)
def test_peak_of_other_devices_is_not_guessed(name: str) -> None:
    assert peak_flops(name) is None
    assert device_peak_flops(torch.device("cpu")) is None


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the independent figure comes from Linux' /proc",
)
def test_host_memory_is_labelled_as_such_and_in_gib() -> None:
    reported = peak_memory_gib(torch.device("cpu"))
    kib = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmHWM" in line
    )
    # Two marks of the kernel, moved at different moments from counts that are kept per
    # core and added up now and then: enough to tell KiB from bytes and a peak from
    # nothing.
    assert reported == {"peak_host_rss_gib": pytest.approx(int(kib) / 2**20, rel=0.5)}


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems count in other units"
)
def test_host_memory_in_gib_is_kib_over_two_to_the_twentieth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**19)
    )
    assert peak_memory_gib(torch.device("cpu")) == {"peak_host_rss_gib": 1.5}
