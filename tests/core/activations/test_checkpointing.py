"""Activation checkpointing changes what is kept, never what comes out: equal to the last bit, because the same kernels
run again on the same numbers."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_core.activations.checkpointing import NotDeterministicError, apply_checkpointing
from smp_core.activations.selective import keep_outputs_of
from smp_core.config import SmpConfig
from smp_core.engine import build_mesh, parallelize
from smp_core.planning.checkpointed import CheckpointedModule, plan_checkpointing
from smp_core.topology import Topology
from tests.core.activations.models import DroppingGpt, assert_equal_bits, build, observe, tokens
from tests.harness import run_ranks

MODES: dict[str, Any] = {
    "full": "full",
    "every second block": "every:2",
    "selective": "selective",
    "parts of blocks": {"blocks.[01]": "selective", "blocks.2": "none", "*.up": "full"},
}
UNITS = {
    "blocks": {},
    "units inside blocks": {"units": {"modules": ["DroppingBlock", "*.down"], "min_parameters": 500}},
}
DEGREES = (2, 1)
BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
Case = tuple[str, float, str, int]


def compare_modes(cases: list[Case]) -> int:
    """On ranks: every case against the same run without checkpointing."""
    for mode, dropout, units, degree in cases:
        layout = {"shard_degree": degree, **UNITS[units]}
        expected = observe(build(dropout=dropout, **layout))
        parallel = build(dropout=dropout, activations={"checkpoint": MODES[mode]}, **layout)
        assert_equal_bits(observe(parallel), expected, f"{mode}, dropout {dropout}, {layout}")
        calls = [block.calls for block in parallel.module.blocks]
        once, twice = 4, 8  # two steps of two micro-batches
        assert (
            calls
            == {
                "full": [twice] * 4,
                "every second block": [twice, once] * 2,
                "selective": [twice] * 4,
                "parts of blocks": [twice, twice, once, once],
            }[mode]
        ), f"{mode}: the blocks' forwards ran {calls} times"
    return len(cases)


ALL: list[Case] = list(itertools.product(MODES, (0.0, 0.1), UNITS, DEGREES))
SAMPLE = random.Random(5).sample(ALL, 3)


def test_losses_and_gradients_are_equal_to_the_last_bit() -> None:
    assert run_ranks(compare_modes, 2, SAMPLE) == [len(SAMPLE)] * 2


@pytest.mark.slow
def test_losses_and_gradients_are_equal_to_the_last_bit_everywhere() -> None:
    run_ranks(compare_modes, 2, ALL)
    run_ranks(compare_modes, 4, ALL, ranks_per_node=2, timeout=600)


def one_block(mode: str, check: bool = False, dropout: float = 0.0) -> DroppingGpt:
    torch.manual_seed(0)
    model = DroppingGpt(1, dropout)
    for chosen in plan_checkpointing(model, ["blocks.0"], mode):
        apply_checkpointing(model, chosen, check=check)
    return model


def test_evaluation_computes_once() -> None:
    model = one_block("full")
    with torch.no_grad():
        model(tokens(0))
    assert model.blocks[0].calls == 1
    model(tokens(0)).backward()
    assert model.blocks[0].calls == 3


@torch.library.custom_op("smp_tests::costly", mutates_args=())
def costly(x: torch.Tensor) -> torch.Tensor:
    costly_calls.append(1)
    return x * 2


costly_calls: list[int] = []
costly.register_fake(torch.empty_like)
costly.register_autograd(lambda context, gradient: gradient * 2)


class CallsCostly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return costly(self.linear(x)).sin()


def test_an_operator_can_join_those_whose_outputs_are_kept() -> None:
    def calls_of_a_step(mode: str) -> int:
        model = nn.Sequential(CallsCostly())
        apply_checkpointing(model, CheckpointedModule("0", mode))
        costly_calls.clear()
        model(torch.ones(2, 4)).sum().backward()
        return len(costly_calls)

    assert calls_of_a_step("full") == calls_of_a_step("selective") == 2
    keep_outputs_of(torch.ops.smp_tests.costly)
    assert calls_of_a_step("selective") == 1
    assert calls_of_a_step("full") == 2


def test_selective_repeats_no_matrix_product_and_no_attention() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(mode: str) -> int:
        model = one_block(mode)
        counter = FlopCounterMode(display=False)
        with counter:
            model(tokens(0)).backward()
        return counter.get_total_flops()

    plain = flops("none")
    assert flops("selective") == plain
    assert flops("full") > plain


class Restless(nn.Module):
    """Draws from Python's own generator, whose state nobody restores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * random.random()


def test_a_recomputation_that_differs_is_found_on_request() -> None:
    def step(check: bool) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Restless())
        apply_checkpointing(model, CheckpointedModule("1", "full"), check=check)
        model(torch.ones(2, 4)).sum().backward()

    step(check=False)
    with pytest.raises(NotDeterministicError, match=r'"1": "none"'):
        step(check=True)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_check_finds_nothing_in_dropout_however_often_it_is_computed_again(mode: str) -> None:
    checked, plain = one_block(mode, check=True, dropout=0.3), one_block("none", dropout=0.3)
    for model in (checked, plain):
        torch.manual_seed(3)
        loss = model(tokens(0))
        if mode == "full":  # torch's selective checkpointing takes one backward pass
            loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(checked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class TakesMask(nn.Module):
    """Random numbers, and tensors by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return F.dropout(self.linear(hidden), 0.5) * (1.0 if scale is None else scale)


def test_tensors_given_by_name() -> None:
    def gradient(mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(TakesMask())
        for chosen in plan_checkpointing(model, ["0"], mode):
            apply_checkpointing(model, chosen)
        hidden = torch.randn(3, 8, requires_grad=True)
        model[0](hidden=hidden, scale=torch.full((8,), 3.0)).square().sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    assert torch.equal(gradient("full"), gradient("none"))


def compiled_gradients(mode: str, backend: str | None, whole_model: bool) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DroppingGpt(2)
    if backend is not None and not whole_model:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    for chosen in plan_checkpointing(model, ["blocks.0", "blocks.1"], mode):
        apply_checkpointing(model, chosen)
    run = model if backend is None or not whole_model else torch.compile(model, backend=backend, fullgraph=True)
    run(tokens(0)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("whole_model", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["blocks", "model"])
def test_compiled(whole_model: bool) -> None:
    """``aot_eager`` traces and partitions forward and backward as inductor has them, with eager kernels."""
    expected = compiled_gradients("none", None, whole_model)
    for mode in ("none", "full", "selective"):
        found = compiled_gradients(mode, "aot_eager", whole_model)
        # What the compiler decomposes is added up in another order: a few float32 roundings of gradients of order 0.1.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-7, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("whole_model", [False, True], ids=["blocks", "model"])
def test_compiled_by_inductor(whole_model: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With generated kernels, and nothing taken from an earlier run's cache."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = compiled_gradients("none", None, whole_model)
    for mode in ("none", "full", "selective"):
        found = compiled_gradients(mode, "inductor", whole_model)
        # Fused kernels keep intermediate values in registers and add up in vectors: another few roundings.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_inductor_recomputes_what_checkpointing_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Matrix products of a compiled block: twice its forward's in backward without checkpointing; once more with
    "full"; not with "selective". Counted in the graphs that inductor is given."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    counts: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        counts.append(sum(node.target in products for node in graph.graph.nodes))
        return compile_fx_inner(graph, inputs, **options)

    def products(mode: str) -> int:
        torch._dynamo.reset()
        counts.clear()
        torch.manual_seed(0)
        model = DroppingGpt(1)
        for chosen in plan_checkpointing(model, ["blocks.0"], mode):
            apply_checkpointing(model, chosen)
        block = torch.compile(
            model.blocks[0], backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=counting)
        )
        block(torch.randn(2, 6, 20, requires_grad=True)).sum().backward()
        return sum(counts)

    plain = products("none")
    assert plain > 0
    assert products("selective") == plain
    assert products("full") > plain


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5))
        self.head = nn.Linear(2, 2)


def planned(setting: Any, blocks: tuple[str, ...] = BLOCKS) -> dict[str, str]:
    return {each.name: each.mode for each in plan_checkpointing(Tower(), blocks, setting)}


def test_which_modules_are_chosen() -> None:
    assert planned("none") == {}
    assert planned("full") == dict.fromkeys(BLOCKS, "full")
    assert planned("selective") == dict.fromkeys(BLOCKS, "selective")
    assert planned("every:3") == {"blocks.0": "full", "blocks.3": "full"}
    assert planned("every:9") == {"blocks.0": "full"}
    assert planned({"head": "full", "blocks.*": "every:2"}) == dict.fromkeys(
        ("blocks.0", "blocks.2", "blocks.4", "head"), "full"
    )
    # "blocks.*" matches blocks.1.0 too, which is inside of one that was decided about.
    assert planned({"blocks.1": "none", "blocks.*": "selective"}) == dict.fromkeys(
        ("blocks.0", "blocks.2", "blocks.3", "blocks.4"), "selective"
    )
    assert planned({"Sequential": "full"}) == {f"blocks.{i}": "full" for i in range(5)}


def test_patterns_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'Sequential'"):
        planned({"Sequentail": "full"})
    with pytest.raises(ValueError, match=r"blocks\.0\.0 and all else that it matches lie inside"):
        planned({"blocks.[0-9]": "full", "*.[0-9].0": "full"})
    with pytest.raises(ValueError, match="has no repeated blocks"):
        planned("full", blocks=())


def test_what_the_knob_accepts() -> None:
    assert SmpConfig.from_env({"SMP_ACTIVATIONS": "every:2"}).activations.checkpoint == "every:2"
    by_glob = SmpConfig.from_env({"SMP_ACTIVATIONS": '{"checkpoint": {"*.mlp": "full", "Attention": "selective"}}'})
    assert by_glob.activations.checkpoint == {"*.mlp": "full", "Attention": "selective"}
    assert SmpConfig.from_dict(by_glob.to_dict()) == by_glob
    assert by_glob.effective()["activations.checkpoint"] == {"*.mlp": "full", "Attention": "selective"}
    for wrong in ("ful", "every:0", "every:x", {}, {"a": "ful"}, {"": "full"}, {1: "full"}, ["full"]):
        with pytest.raises(ValueError, match=r"activations\.checkpoint"):
            SmpConfig(activations={"checkpoint": wrong})


class Llama(nn.Module):
    """Its own checkpointing on or off; a cache where Transformers makes one by itself."""

    def __init__(self, own: bool, use_cache: bool = True) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=use_cache,
        )
        self.model = LlamaForCausalLM(config)
        if own:
            self.model.activation_checkpointing_enable()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train_llamas() -> dict[str, Any]:
    """On ranks: gradients of a Llama under each setting, the knob in effect, and what was said."""
    found: dict[str, Any] = {}
    heard = Messages()
    logging.getLogger("smp").addHandler(heard)
    for name, own, setting in (
        ("plain", False, "none"),
        ("own", True, "none"),
        ("full", False, "full"),
        ("selective", False, "selective"),
        ("both", True, "full"),
    ):
        torch.manual_seed(0)
        mesh, config = build_mesh(
            SmpConfig(shard_degree=2, activations={"checkpoint": setting}), Topology.discover(), "cpu"
        )
        heard.lines.clear()
        parallel = parallelize(Llama(own), config, mesh=mesh)
        parallel.module.train()
        parallel.module(tokens(mesh.rank)).backward()
        gradients = [p.grad.full_tensor() for p in parallel.module.parameters()]
        said = [line for line in heard.lines if "checkpointing" in line]
        found[name] = (gradients, parallel.config.activations.checkpoint, said)
    logging.getLogger("smp").removeHandler(heard)
    return found


def test_a_transformers_model_with_a_cache_or_its_own_checkpointing() -> None:
    for rank, found in enumerate(run_ranks(train_llamas, 2)):
        expected = found["plain"][0]
        for name, (gradients, _, _) in found.items():
            assert all(map(torch.equal, gradients, expected)), name
        assert {name: setting for name, (_, setting, _) in found.items()} == {
            "plain": "none",
            "own": "none",
            "full": "full",
            "selective": "selective",
            "both": "none",
        }
        assert found["full"][2] == []
        said = found["both"][2]  # by rank 0 for all
        assert [True] * (rank == 0) == ["own gradient checkpointing is on" in line for line in said]
