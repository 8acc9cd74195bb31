"""Activation checkpointing changes what is kept, never what comes out: equal to the
last bit, because the same kernels run again on the same numbers."""

from __future__ import annotations

import copy
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_core.activations.buffers import SMALL, ForwardWithBuffers, buffer_places
from smp_core.activations.checkpointing import (
    NotDeterministicError,
    apply_checkpointing,
)
from smp_core.activations.selective import keep_outputs_of
from smp_core.plan.checkpointed import CheckpointedModule, plan_checkpointing
from tests.core.activations.models import (
    DroppingGpt,
    assert_equal_bits,
    build,
    observe,
    tokens,
)
from tests.harness import run_ranks

MODES: dict[str, Any] = {
    "full": "full",
    "every second block": "every:2",
    "selective": "selective",
    "parts of blocks": {"blocks.[01]": "selective", "blocks.2": "none", "*.up": "full"},
}
UNITS = {
    "blocks": {},
    "units inside blocks": {
        "units": {"modules": ["DroppingBlock", "*.down"], "min_parameters": 500}
    },
}
DEGREES = (2, 1)
Case = tuple[str, float, str, int]


def compare_modes(cases: list[Case]) -> int:
    """On ranks: every case against the same run without checkpointing."""
    for mode, dropout, units, degree in cases:
        layout = {"shard_degree": degree, **UNITS[units]}
        expected = observe(build(dropout=dropout, **layout))
        parallel = build(
            dropout=dropout, activations={"checkpoint": MODES[mode]}, **layout
        )
        assert_equal_bits(
            observe(parallel), expected, f"{mode}, dropout {dropout}, {layout}"
        )
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
SAMPLE = random.Random(5).sample(ALL, 2)


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


@pytest.mark.parametrize(
    "mode", ["full", pytest.param("selective", marks=pytest.mark.slow)]
)
def test_the_check_finds_nothing_in_dropout_however_often_it_is_computed_again(
    mode: str,
) -> None:
    checked, plain = (
        one_block(mode, check=True, dropout=0.3),
        one_block("none", dropout=0.3),
    )
    for model in (checked, plain):
        torch.manual_seed(3)
        loss = model(tokens(0))
        if mode == "full":  # torch's selective checkpointing takes one backward pass
            loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(checked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Statistics(nn.Module):
    """Buffers of all kinds that a forward changes: by batch norm, which counts no
    version, into ``.data`` as codebooks are, in place, by another tensor, and a large
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("codes", torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("large", torch.ones(SMALL + 1))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) * self.codes * self.large[0]
        seen = x.detach().mean(0)
        self.codes.data.mul_(0.9).add_(seen, alpha=0.1)
        self.large.data[0] += 1.0
        self.calls += 1.0
        self.last = seen + self.last
        return x.tanh()


def test_a_rehearsal_without_values_compares_no_large_buffers() -> None:
    with FakeTensorMode():
        module = nn.Module()
        module.register_buffer("mask", torch.ones(SMALL + 1))
        forward = ForwardWithBuffers(
            lambda x: x * module.mask.sum(), buffer_places(module), None
        )
        assert forward(torch.ones(2)).shape == (2,)
    assert forward.written() == set()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_buffers_change_once_in_each_forward(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Statistics(), nn.Linear(8, 8))
    recomputed = copy.deepcopy(plain)
    apply_checkpointing(recomputed, CheckpointedModule("0", mode))
    for _ in range(3):
        x = torch.randn(4, 8)
        for model in (plain, recomputed):
            model(x).square().mean().backward()
    for name, value in recomputed.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def compiled_gradients(
    mode: str, backend: str | None, whole_model: bool
) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DroppingGpt(2)
    if backend is not None and not whole_model:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    for chosen in plan_checkpointing(model, ["blocks.0", "blocks.1"], mode):
        apply_checkpointing(model, chosen)
    run = (
        model
        if backend is None or not whole_model
        else torch.compile(model, backend=backend, fullgraph=True)
    )
    run(tokens(0)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole_model",
    [False, True],
    ids=["blocks", "model"],
)
def test_compiled(whole_model: bool) -> None:
    """``aot_eager`` traces and partitions forward and backward as inductor has them,
    with eager kernels."""
    expected = compiled_gradients("none", None, whole_model)
    for mode in ("none", "full", "selective"):
        found = compiled_gradients(mode, "aot_eager", whole_model)
        # What the compiler decomposes is added up in another order: a few float32
        # roundings of gradients of order 0.1.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-7, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("whole_model", [False, True], ids=["blocks", "model"])
def test_compiled_by_inductor(
    whole_model: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With generated kernels, and nothing taken from an earlier run's cache."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = compiled_gradients("none", None, whole_model)
    for mode in ("none", "full", "selective"):
        found = compiled_gradients(mode, "inductor", whole_model)
        # Fused kernels keep intermediate values in registers and add up in vectors:
        # another few roundings.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_inductor_recomputes_what_checkpointing_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Matrix products of a compiled block: twice its forward's in backward without
    checkpointing; once more with "full"; not with "selective". Counted in the graphs
    that inductor is given."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    counts: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        products = (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        )
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
            model.blocks[0],
            backend=lambda graph, inputs: compile_fx(
                graph, inputs, inner_compile=counting
            ),
        )
        block(torch.randn(2, 6, 20, requires_grad=True)).sum().backward()
        return sum(counts)

    plain = products("none")
    assert plain > 0
    assert products("selective") == plain
    assert products("full") > plain
