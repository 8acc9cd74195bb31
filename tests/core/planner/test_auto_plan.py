"""`plan="auto"`: what a run plans for itself. Runs on ranks:
tests/lightning/test_fit.py (by name) and tests/accelerate/test_tensor_parallel.py
(around degrees that were given)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.cluster.agreement import of_rank_0
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.plan.plan import Precision
from smp_core.plan.shapes import GIB, Cluster
from smp_core.planner import auto_plan
from smp_core.planner.auto_plan import RunningStep, hardware_of_run, plan_run
from smp_core.planner.trace import trace_built, trace_model
from smp_core.topology import Topology
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks

FIELDS = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64}
NODES = Cluster(Topology.uniform(4, 2), "cpu", None, 8 * GIB)
STEP = RunningStep(torch.device("cpu"), "forward", Precision(), 2)
MARGIN = 1.5  # GiB that a plan leaves to the CUDA context


@pytest.fixture(scope="module")
def model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**FIELDS, bos_token_id=0, eos_token_id=0))


@pytest.fixture(scope="module")
def traced_once() -> Any:
    """The trace of the model, which takes seconds and is the same for each of its
    plans."""

    @functools.cache
    def trace(of: nn.Module, *work: Any) -> Any:
        return trace_built(of, SmpConfig(), *work)

    return lambda of, asked, *work: trace(of, *work)


class Around(nn.Module):
    """A module whose steps call a Transformers model, as LightningModules do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.slow
def test_a_built_model_is_traced_as_its_configuration_is(model: nn.Module) -> None:
    made = trace_model("gpt2", 64, {"model_type": "gpt2", **FIELDS})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = trace_built(Around(model), SmpConfig(), 64, torch.bfloat16, "forward")
    assert (found.block, found.rest, found.instants) == (
        made.block,
        made.rest,
        made.instants,
    )
    assert (found.blocks, found.heads, found.vocabulary) == (
        made.blocks,
        made.heads,
        made.vocabulary,
    )
    assert found.shapes["none"].parameters[0].name == "model.transformer.wte.weight"
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_what_is_given_stays_and_what_is_open_is_chosen_within_memory(
    model: nn.Module, traced_once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has 4 MiB less than the plan without recomputation needs, then room
    for all."""
    monkeypatch.setattr(auto_plan, "trace_built", traced_once)

    def planned(**knobs: Any) -> dict[str, Any]:
        asked = SmpConfig(plan={"sequence": 64, "micro_batch": 8}, **knobs)
        return dict(plan_run(model, asked, NODES, STEP).knobs)

    plenty, tight = ({"device_memory_gib": MARGIN + mib / 1024} for mib in (500, 29))
    free = planned(planner=plenty)
    assert free["activations"].checkpoint == "none" and "optimizer_shard" not in free
    assert planned(planner=tight)["activations"].checkpoint != "none"
    kept = planned(
        planner=plenty,
        shard_degree=4,
        activations="none",
        keep_between_micro_batches="shards",
    )
    assert list(kept) == ["reshard_after_forward"]
    with pytest.raises(
        ValueError, match=r"nothing fits.*a smaller batch, or start more ranks"
    ):
        planned(planner={"device_memory_gib": MARGIN + 4 / 1024}, activations="none")


def test_degrees_that_change_the_batch_are_chosen_where_it_is_given(
    model: nn.Module, traced_once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two micro-batches of 4: 32 samples without them, 16 need two ranks
    for each sample."""
    monkeypatch.setattr(auto_plan, "trace_built", traced_once)
    step = {"sequence": 64, "micro_batch": 4}
    decided = plan_run(model, SmpConfig(plan={**step, "global_batch": 16}), NODES, STEP)
    assert (
        decided.knobs["tensor_parallel_degree"] == 2
        and "planned for 16 x 64 tokens" in decided.why
    )
    assert (
        "tensor_parallel_degree"
        not in plan_run(model, SmpConfig(plan=step), NODES, STEP).knobs
    )
    with pytest.raises(ValueError, match="global_batch=12"):
        plan_run(model, SmpConfig(plan={**step, "global_batch": 12}), NODES, STEP)


@pytest.mark.slow
def test_the_example_of_a_model_says_what_a_batch_is() -> None:
    small = SmallGpt()
    small.example_input_array = torch.zeros(2, 8, dtype=torch.long)
    assert (
        "planned for 16 x 8 tokens"
        in plan_run(small, SmpConfig(plan="auto"), NODES, STEP).why
    )


class LooksAtValues(SmallGpt):
    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_BL) * float(tokens_BL.sum().item())


@pytest.mark.parametrize(
    ("kind", "knobs", "said"),
    [
        (
            SmallGpt,
            {"plan": "auto"},
            r"plan=\{'sequence': tokens of a sample.*or write shard_degree='auto'",
        ),
        (
            SmallGpt,
            {"plan": {"sequence": 8, "micro_batch": 2}},
            "set example_input_array.*write shard_degree",
        ),
        (
            LooksAtValues,
            {"plan": "auto"},
            "does not run without values.*or write shard_degree='auto'",
        ),
        (
            SmallGpt,
            {"plan": {"sequence": 8, "micro_batch": 2, "cluster": "4x8:h200@1gbps"}},
            "4 x 8 devices, and this",
        ),
    ],
)
def test_what_cannot_be_planned_says_what_to_write(
    kind: type[nn.Module], knobs: dict[str, Any], said: str
) -> None:
    small = kind()
    if kind is LooksAtValues:
        small.example_input_array = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match=said):
        plan_run(small, SmpConfig(**knobs), NODES, STEP)


def test_machines_are_found_by_the_device_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(Topology.uniform(16, 8), "cuda", int(39.5 * GIB), 8 * GIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB"
    )
    found = hardware_of_run(SmpConfig(plan="auto"), cluster, torch.device("cuda", 0))
    assert (found.nodes, found.gbit, found.device.hbm, found.device.memory_gib) == (
        2,
        400,
        1555e9,
        39.5,
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ValueError, match=r"does not know the device 'Tesla T4'.*plan=\{'cluster'"
    ):
        hardware_of_run(SmpConfig(plan="auto"), cluster, torch.device("cuda", 0))


def of_one_rank(refuses: bool) -> Any:
    def decide() -> str:
        if refuses:
            raise ValueError("nothing fits")
        return f"rank {dist.get_rank()}"

    try:
        return of_rank_0(decide)
    except ValueError as error:
        return str(error)


def decisions() -> list[Any]:
    only_here: dict[str, Any] = (
        {"keep_between_micro_batches": "gradients"} if dist.get_rank() else {}
    )
    with pytest.raises(
        ValueError, match="keep_between_micro_batches differs between ranks"
    ):
        parallelize(
            SmallGpt(), SmpConfig(plan={"sequence": 8, "micro_batch": 2}, **only_here)
        )
    return [of_one_rank(False), of_one_rank(True)]


def test_all_ranks_do_what_rank_0_decides_or_refuse_together() -> None:
    assert run_ranks(decisions, 2) == [["rank 0", "nothing fits"]] * 2
