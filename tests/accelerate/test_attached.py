"""Adapters attached to a prepared model, under SmpAccelerator: PEFT's second one, and
one that only a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.integrations.peft import MIN_PEFT_VERSION

from smp_core.sharding.gradients import RanksDiverged
from tests.accelerate.program_parts import make_model as make_lora_base, with_lora
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import make_dataset, make_model, whole_weights
from tests.core.sharding.attached_nets import WIDTH, attach, net
from tests.harness import RanksFailed, run_ranks

# Sums of float64 gradients in another order.
EXACT = 1e-12


def on_one_rank(case: str, degree: int) -> str:
    """Train an adapter; rank 1 attaches another one."""
    accelerator, model = (
        fresh_accelerator(smp_config={"shard_degree": degree, "units": ["Block"]}),
        net(),
    )
    attach(model, 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained))
    if dist.get_rank() == 1:
        attach(model, 0, names=["late"])
        if case == "in a group":
            late = [
                parameter
                for name, parameter in model.named_parameters()
                if "late" in name
            ]
            optimizer.add_param_group({"params": late})
    with pytest.raises(RanksDiverged) as caught:
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, WIDTH, dtype=torch.float64)))
            optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_adapter_of_one_rank_is_refused_on_all(degree: int) -> None:
    for said in run_ranks(on_one_rank, 2, "attached", degree):
        assert "only on rank 1 'blocks.0.late.0.bias' was attached" in said


@pytest.mark.parametrize(
    ("degree", "there"),
    [
        pytest.param(1, "the end of a backward pass", marks=pytest.mark.slow),
        (2, "the model's next forward pass"),
    ],
)
def test_a_rank_that_adds_a_group_alone_does_not_wait(degree: int, there: str) -> None:
    """Which would end with collectives, and other words."""
    group = r"optimizer\.add_param_group\(blocks\.0\.late\.0\.weight, blocks\.0\.late\.0\.bias, \.\.\.\)"
    with pytest.raises(
        RanksFailed,
        match=f"rank 1 is at {group} and rank 0 at {there}: every rank has to make",
    ):
        run_ranks(on_one_rank, 2, "in a group", degree)


def other_order() -> str:
    """Adapters that ranks attach in another order, before the model is prepared."""
    model = net()
    attach(model, 0, swapped=dist.get_rank() == 1)
    with pytest.raises(ValueError) as caught:
        fresh_accelerator().prepare(model, torch.optim.AdamW(model.parameters()))
    return str(caught.value)


def test_adapters_in_another_order_before_prepare_are_refused_by_name() -> None:
    for said in run_ranks(other_order, 2):
        assert (
            "number 2 ('blocks.0.adapter.0.weight [2, 16] torch.float64' on rank 0; 'blocks.0.other.0.weight"
            in said
        )


def second_adapter(
    taken_in: str, knobs: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    """Train PEFT's first adapter, then its second one, which each rank makes of other
    values."""
    from peft import LoraConfig

    rank, ranks = (
        (dist.get_rank(), dist.get_world_size()) if knobs is not None else (0, 1)
    )
    model: Any = make_model(0).double()
    options = LoraConfig(
        r=3,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights="gaussian",
    )
    torch.manual_seed(rank)
    model.add_adapter(options, "first")
    optimizer: Any = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    if knobs is not None:
        accelerator = fresh_accelerator(smp_config=knobs)
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        if step == 2:
            torch.manual_seed(7 + rank)
            model.add_adapter(options, "second")
            model.set_adapter("second")
            late = [p for name, p in model.named_parameters() if "second" in name]
            if taken_in == "in a group":
                optimizer.add_param_group({"params": late})
            else:
                optimizer = torch.optim.AdamW(late, lr=1e-2)
                optimizer = (
                    optimizer if knobs is None else accelerator.prepare(optimizer)
                )
        rows = make_dataset()[8 * step + 8 // ranks * rank :][: 8 // ranks]
        inputs, labels = (
            torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")
        )
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward() if knobs is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: value for name, value in whole_weights(model).items() if "lora" in name
    }


@pytest.mark.parametrize(
    ("taken_in", "knobs"),
    [
        ("in a group", {"shard_degree": 2}),
        ("by a new optimizer", {"shard_degree": 1, "optimizer_shard": "world"}),
        pytest.param("by a new optimizer", {"shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param(
            "in a group",
            {"shard_degree": 2, "state_offload": "optimizer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_pefts_second_adapter_trains_as_in_one_process(
    taken_in: str, knobs: dict[str, Any]
) -> None:
    # Transformers adds adapters itself from some release of PEFT on.
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    expected = second_adapter(taken_in, None)
    for seen in run_ranks(second_adapter, 2, taken_in, knobs):
        assert seen.keys() == expected.keys()
        assert any("second" in name for name in seen)
        for name, value in expected.items():
            assert (seen[name] - value).abs().max() <= EXACT, name


def later_than_the_split() -> str:
    import peft

    torch.manual_seed(0)
    model = with_lora(make_lora_base("llama", 0))
    accelerator: Any = fresh_accelerator(tensor_parallel_degree=2)
    model = accelerator.prepare(model)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        model(input_ids=tokens)
        model.add_adapter("late", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        model(input_ids=tokens)
        model.set_adapter("late")
        try:
            model(input_ids=tokens)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_an_adapter_that_comes_behind_the_split_is_refused_where_it_is_used() -> None:
    pytest.importorskip("peft")
    for words in run_ranks(later_than_the_split, 2):
        assert "adapter 'late' was added to" in words and "q_proj" in words
        assert "before prepare(model)" in words
