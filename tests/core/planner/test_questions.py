"""What people ask of `smp plan`: adapters, deadlines and budgets, batches in tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from smp_core.cli import app
from smp_core.planner import NothingFits, Workload, commands, plan, planner
from smp_core.planner.devices import Device
from smp_core.planner.dry_run import Question, dry_run
from smp_core.planner.explain import table
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_source import build
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.planner import within
from smp_core.planner.search import Found, nothing_allowed
from smp_core.planner.search_space import require_degrees
from smp_core.planner.time import model_flops
from smp_core.planner.trace import trace_model

TOKENS, WIDTH, LAYERS, WORDS, RANK = 64, 64, 3, 96, 4
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
ALONE: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1}
# Of a block: attention, and gate, up and down.
MATRICES = 4 * WIDTH**2 + 3 * 2 * WIDTH**2
ADAPTERS = RANK * (4 * 2 * WIDTH + 3 * 3 * WIDTH)


@pytest.fixture(scope="module")
def full() -> ModelTrace:
    return trace_model("tiny", TOKENS, LLAMA)


@pytest.fixture(scope="module")
def adapted() -> ModelTrace:
    return trace_model(f"tiny+lora:{RANK}", TOKENS, LLAMA)


def test_adapters_are_trained_and_nothing_else(
    full: ModelTrace, adapted: ModelTrace
) -> None:
    """Frozen matrices have a product forward and one backward, adapters two; 2 %: norms
    are parameters, no products."""
    assert adapted.parameters == full.parameters + LAYERS * ADAPTERS
    assert adapted.trained == (
        pytest.approx(ADAPTERS / (MATRICES + ADAPTERS), rel=0.02),
        0.0,
    )
    frozen, trained = LAYERS * MATRICES + WORDS * WIDTH, LAYERS * ADAPTERS
    attention = 12 * LAYERS * TOKENS**2 * WIDTH
    expected = TOKENS * (4 * frozen + 6 * trained) + attention
    assert model_flops(adapted, 1, TOKENS) == pytest.approx(expected, rel=0.02)


def test_what_is_frozen_has_no_gradients_and_states_and_is_not_reduced(
    full: ModelTrace, adapted: ModelTrace
) -> None:
    """Frozen parameters stay in bfloat16; AdamW keeps two float32 states for each
    trained one."""
    hardware, work, fixed = (
        Hardware.parse("2x4:a100-40g@10gbps"),
        Workload(TOKENS, 16),
        {"shard": 4, "pipeline": 1},
    )
    chosen = plan(adapted, hardware, work, fixed=fixed).chosen
    assert chosen.memory.optimizer == pytest.approx(LAYERS * ADAPTERS * 8 / 4, rel=0.01)
    assert chosen.memory.parameters == pytest.approx(
        (2 * full.parameters + 4 * LAYERS * ADAPTERS) / 4, rel=0.02
    )
    assert (
        chosen.time.replicas
        < plan(full, hardware, work, fixed=fixed).chosen.time.replicas / 2
    )


@pytest.mark.slow
def test_memory_of_adapters_is_that_of_a_run_without_values(
    adapted: ModelTrace,
) -> None:
    """3 %: a trace of two blocks rounds."""
    found = plan(
        adapted,
        Hardware.parse("1x4:a100-40g"),
        Workload(TOKENS, 16),
        fixed={"shard": 4, "tensor": 1},
    ).chosen
    words = f"tiny+lora:{RANK}"
    question = Question(
        words,
        Hardware.parse("1x4:a100-40g"),
        found.knobs,
        TOKENS,
        found.micro_batch,
        found.count,
        fields=LLAMA,
    )
    ran = dry_run(question)[0]
    assert ran.total == pytest.approx(
        found.memory.total - found.memory.margin, rel=0.03
    )


def test_a_rank_of_adapters_is_a_number() -> None:
    with pytest.raises(ValueError, match=r"\+lora:16"), FakeTensorMode():
        build("gpt2+lora:many", 16, LLAMA)


def test_what_does_not_fit_a_small_card_fits_with_adapters(
    full: ModelTrace, adapted: ModelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before more nodes are offered. The host's memory is fixed to be left alone."""
    monkeypatch.setattr(
        planner, "trace", lambda words, tokens: adapted if "+lora" in words else full
    )
    # Of all states a part.
    room = FITTED.context_gib + 0.85 * 16 * full.parameters / 2**30
    hardware = Hardware(
        1, 1, Device("small", room, 1e12, 1e11, 1e10, "no data sheet", 1e13), 0.0
    )
    with pytest.raises(
        NothingFits, match="adapters of rank 16 alone are trained"
    ) as error:
        plan(
            "tiny",
            hardware,
            Workload(TOKENS, 1),
            fixed={"state_offload": None, "chunked_cross_entropy": 8},
        )
    words = [said for said, _ in error.value.changes]
    adapters = next(place for place, said in enumerate(words) if "adapters" in said)
    assert not any("nodes" in said for said in words[:adapters])


def test_models_without_layers_for_adapters_fit_by_other_changes(
    full: ModelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(words: str, tokens: int) -> ModelTrace:
        if "+lora" in words:
            raise ValueError(f"{words}: no nn.Linear that could get adapters")
        return full

    monkeypatch.setattr(planner, "trace", without)
    room = FITTED.context_gib + 0.85 * 16 * full.parameters / 2**30
    device = Device("small", room, 1e12, 1e11, 1e10, "no data sheet", 1e13)
    fixed = {"state_offload": None, "chunked_cross_entropy": 8}
    with pytest.raises(NothingFits, match="what would fit") as error:
        plan("tiny", Hardware(1, 1, device, 0.0), Workload(TOKENS, 1), fixed=fixed)
    assert not any("adapters" in said for said, _ in error.value.changes)


def test_a_deadline_takes_the_fewest_nodes_that_keep_it(full: ModelTrace) -> None:
    # Computing is all of a step.
    slow = Device("slow", 80.0, 1e10, 1e11, 1e10, "no data sheet", 1e9)
    found = plan(
        full,
        Hardware(4, 4, slow, 1600.0, price=10.0),
        Workload(TOKENS, 256, tokens=1e12),
        fixed=ALONE,
    )
    days = found.days()
    assert days is not None
    fewer, same, more = (
        within(found, share * days, None) for share in (1e3, 1.001, 0.7)
    )
    assert (
        fewer.hardware.nodes == 1
        and same.hardware.nodes == 4
        and more.hardware.nodes > 4
    )
    for each, limit in ((same, 1.001 * days), (more, 0.7 * days)):
        planned = each.days()
        assert planned is not None and planned <= limit
    with pytest.raises(ValueError, match="no number of nodes trains as asked"):
        within(found, None, 1e-3)


def test_a_deadline_and_a_budget_say_what_they_need(full: ModelTrace) -> None:
    found = plan(full, "1x4:h100", Workload(TOKENS, 8))
    with pytest.raises(ValueError, match="--tokens"):
        within(found, 7, None)
    with pytest.raises(ValueError, match="--price"):
        within(replace(found, workload=replace(found.workload, tokens=1e9)), None, 100)


def test_the_command_takes_tokens_of_a_step_a_price_and_days(
    full: ModelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "trace", lambda words, tokens: full)
    typed = [
        "plan",
        "tiny",
        "--cluster",
        "2x4:h100@400gbps",
        "--seq",
        "64",
        "--json",
        "--tokens",
        "1e9",
    ]
    done = CliRunner().invoke(
        app, [*typed, "--batch-tokens", "1024", "--price", "10", "--days", "1000"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["global_batch"] == 16 and told["cluster"].startswith("1 x 4")
    assert told["chosen"]["cost"] == pytest.approx(told["chosen"]["days"] * 24 * 10)
    for wrong in (
        [],
        ["--global-batch", "8", "--batch-tokens", "512"],
        ["--batch-tokens", "-5"],
        ["--batch-tokens", "nan"],
        ["--batch-tokens", "63"],  # less than one sample
    ):
        refused = CliRunner().invoke(app, [*typed, *wrong])
        assert refused.exit_code == 1 and "--batch-tokens" in refused.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--days", "7"], "--tokens 2e12"),
        (["--days", "-7", "--tokens", "1e9"], "days=-7"),
        (["--budget", "7", "--tokens", "1e9"], "--price 98"),
        (["--tokens", "nan"], "tokens=nan"),
        (["--from-log", "nowhere"], "nowhere"),
        (["--out", "nowhere/plan.yaml"], "--out=nowhere"),
        (["--picture", "nowhere/plan.svg"], "--picture=nowhere"),
        (["--picture", "plan.xyz"], "allowed: .svg, .png, .pdf"),
        (["--links", "nowhere.json"], "--links=nowhere.json: no measurement"),
        (["--fix", "tensor=3"], "allowed: 1, 2, 4"),
        (["--fix", "pipeline=3"], "pipeline_parallel_degree=3"),
        (["--fix", "shard=2", "--fix", "context=4"], "context_parallel_degree=4"),
        (["--fix", "fp8={include: [mlp]}"], "is not planned with"),
        (["--cluster", "1x4:a100-80g", "--fix", "fp8=true"], "tensor cores"),
        (["--why-not", "tensr=8"], "tensr"),
        (["--why-not", "micro_batch=0"], "micro_batch=0"),
    ],
)
def test_what_is_written_wrongly_is_said_before_the_trace(
    wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (planner, commands):
        monkeypatch.setattr(module, "trace", Mock(side_effect=AssertionError))
    typed = ["plan", "tiny", "--cluster", "1x4:h100", "--seq", "64"]
    refused = CliRunner().invoke(app, [*typed, "--global-batch", "8", *wrong])
    assert refused.exit_code == 1 and said in refused.stderr


def test_a_group_that_only_tensor_ranks_allow_is_not_refused() -> None:
    """Twelve of 3 x 8 ranks are one and a half nodes, and with two tensor ranks each
    all."""
    hardware = Hardware.parse("3x8:h100@400gbps")
    require_degrees({"shard_degree": 12}, hardware)
    with pytest.raises(ValueError, match="shard_degree=12"):
        require_degrees({"shard_degree": 12, "tensor_parallel_degree": 1}, hardware)


def test_weights_that_a_configuration_quantizes_are_noted(full: ModelTrace) -> None:
    quantized = replace(full, quantized="mxfp4")
    asked = "1x4:h100", Workload(TOKENS, 8)
    notes = [table(plan(each, *asked)).caption for each in (quantized, full)]
    told = ["not quantized (mxfp4)" in str(note) for note in notes]
    assert told == [True, False]


def test_micro_batches_that_fill_no_round_are_named() -> None:
    """Nothing was refused, and nothing does not divide."""
    hardware = Hardware.parse("1x4:h100")
    said = nothing_allowed(Found(), Workload(TOKENS, 6), hardware, None)
    assert "global_batch=6" in said and "pipeline=1f1b" in said


def test_of_refusals_that_of_the_fewest_axes_is_said(full: ModelTrace) -> None:
    with pytest.raises(ValueError, match=r"world of 4 ranks; allowed: 1, 2, 4"):
        plan(full, "1x4:h100", Workload(TOKENS, 8), fixed={"shard": 3})
