"""Offloaded inputs: what is held where between forward and backward, for how long, and
that nothing comes out of it but the same losses and gradients.

Bytes are counted twice: by the offloader, and, independently, by the storages that are
alive on the device.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.activations.checkpointing import apply_checkpointing
from smp_core.activations.host_pool import HostMemoryError, HostPool
from smp_core.activations.offloading import Offloader, park_inputs
from smp_core.config import SmpConfig
from smp_core.plan.checkpointed import plan_checkpointing
from tests.core.activations.models import (
    WIDTH,
    DroppingGpt,
    assert_equal_bits,
    build,
    observe,
    tokens,
)
from tests.core.activations.offloads import LENGTH, OFFLOADED, SAMPLES, LiveStorages
from tests.harness import run_ranks

INPUT_BYTES = SAMPLES * LENGTH * WIDTH * 4


def parked(
    layers: int,
    horizon: int,
    min_bytes: int = 0,
    limit: int = 2**30,
    mode: str = "full",
) -> tuple[DroppingGpt, Offloader]:
    torch.manual_seed(0)
    model = DroppingGpt(layers)
    pool = HostPool(limit, pinned=False, lower="lower the batch size")
    offloader = Offloader(torch.device("cpu"), horizon, pool, min_bytes=min_bytes)
    for chosen in plan_checkpointing(
        model, [f"blocks.{i}" for i in range(layers)], mode
    ):
        apply_checkpointing(model, chosen)
        park_inputs(model, chosen, offloader)
    return model, offloader


def held_after_forward(model: nn.Module) -> tuple[int, torch.Tensor]:
    """Bytes of activations alive between forward and backward: all but parameters, and
    the loss."""
    watch = LiveStorages(ignored=model.parameters())
    with watch:
        loss = model(tokens(0, SAMPLES))
    return watch.alive(), loss


def test_horizon_inputs_are_on_the_device_between_forward_and_backward() -> None:
    layers = 12
    none, _ = held_after_forward(_checkpointed(layers, "none"))
    full, _ = held_after_forward(_checkpointed(layers, "full"))
    outside = full - layers * INPUT_BYTES  # the head, the loss, the embedding's indices
    assert none > 5 * full
    for horizon in (1, 2, 4):
        model, offloader = parked(layers, horizon)
        held, loss = held_after_forward(model)
        assert offloader.on_device() == [INPUT_BYTES] * horizon
        assert offloader.on_host() == [INPUT_BYTES] * (layers - horizon)
        # The oldest of those that stay has its copy already: it would be next to leave.
        on_host = (layers - horizon + 1) * INPUT_BYTES
        assert offloader.pool.n_bytes == offloader.pool.bytes_in_use == on_host
        assert held - on_host == outside + horizon * INPUT_BYTES
        loss.backward()
        assert offloader.pool.bytes_in_use == 0 and offloader.on_device() == []
        assert offloader.bytes_in == (layers - horizon) * INPUT_BYTES


def _checkpointed(layers: int, mode: str) -> DroppingGpt:
    torch.manual_seed(0)
    model = DroppingGpt(layers)
    for chosen in plan_checkpointing(
        model, [f"blocks.{i}" for i in range(layers)], mode
    ):
        apply_checkpointing(model, chosen)
    return model


def test_the_horizon_holds_all_through_backward() -> None:
    for horizon in (1, 2, 3):
        model, offloader = parked(6, horizon)
        seen: list[int] = []

        def note(
            *_: Any, offloader: Offloader = offloader, seen: list[int] = seen
        ) -> None:
            # One more has just been handed to the module that runs.
            seen.append(len(offloader.on_device()) + 1)

        loss = model(tokens(0, SAMPLES))
        for block in model.blocks:
            block.up.register_forward_pre_hook(note)
        loss.backward()
        # At first those that stayed are still tracked beside the one in use.
        assert len(seen) == 6 and max(seen) <= horizon + 1 and seen[-1] == 1


def compare(settings: list[dict[str, Any]], dropout: float) -> list[int]:
    expected = {
        degree: observe(build(dropout=dropout, shard_degree=degree))
        for degree in (1, 2)
    }
    moved = []
    for setting in settings:
        parallel = build(dropout=dropout, **setting)
        assert_equal_bits(
            observe(parallel), expected[setting["shard_degree"]], str(setting)
        )
        assert parallel.activations.offloader is not None
        moved.append(parallel.activations.offloader.bytes_in)
    return moved


SETTINGS: list[dict[str, Any]] = [
    {
        "activations": {**OFFLOADED, "loading_horizon": 2, "checkpoint": "selective"},
        "shard_degree": 2,
    },
    {
        "activations": {**OFFLOADED, "loading_horizon": 2},
        "shard_degree": 1,
        "units": ["DroppingBlock", "*.down"],
    },
    {"activations": {**OFFLOADED, "loading_horizon": 1}, "shard_degree": 2},
    {"activations": {**OFFLOADED, "loading_horizon": 3}, "shard_degree": 2},
    {
        "activations": {
            **OFFLOADED,
            "loading_horizon": 1,
            "checkpoint": {"*.up": "full"},
        },
        "shard_degree": 2,
    },
]


@pytest.mark.parametrize(
    "settings",
    [SETTINGS[:2], pytest.param(SETTINGS[2:], marks=pytest.mark.slow)],
    ids=len,
)
def test_losses_and_gradients_are_equal_to_the_last_bit(
    settings: list[dict[str, Any]],
) -> None:
    for moved in run_ranks(compare, 2, settings, 0.1):
        assert all(moved), f"nothing was fetched back: {moved}"


def long_run(steps: int) -> tuple[list[tuple[int, int, int]], bool]:
    parallel = build(layers=4, shard_degree=2, activations=OFFLOADED)
    offloader, optimizer = (
        parallel.activations.offloader,
        torch.optim.SGD(parallel.module.parameters(), lr=0.1),
    )
    assert offloader is not None
    held = []
    for step in range(steps):
        # Lengths that grow and shrink, a forward whose loss nobody uses, an evaluation,
        # a window of two.
        length = 6 + (7 * step) % 6
        if step % 5 == 3:
            parallel.module(tokens(step, SAMPLES, length))
            parallel.window.abandon()
        with torch.no_grad():
            before = offloader.bytes_out
            parallel.module(tokens(step, SAMPLES, length))
            assert offloader.bytes_out == before
            parallel.reshard()
        for micro in range(2):
            with parallel.window.accumulate(micro == 0):
                parallel.module(tokens(step + micro, SAMPLES, length)).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        assert (
            offloader.pool.bytes_in_use == 0
            and offloader.on_device() == []
            and offloader.on_host() == []
        )
        held.append((offloader.pool.n_bytes, offloader.pool.allocations, tensors))
    return held, len(offloader._parked) < 50


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_grows(steps: int) -> None:
    """Neither the pool nor what Python holds; the first ten steps see every length."""
    for held, short_list in run_ranks(long_run, 2, steps, timeout=600):
        assert short_list
        assert held[10][0] > 0
        assert len({each[:2] for each in held[10:]}) == 1, "the pool still grows"
        assert held[-1][2] <= max(each[2] for each in held[5:15]) + 5, (
            "tensors are left over"
        )


class Decoder(nn.Module):
    """Every block takes the same memory, as a decoder's take the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x.square().sum()


def test_an_input_of_several_modules_leaves_once() -> None:
    torch.manual_seed(0)
    model = Decoder()
    offloader = Offloader(
        torch.device("cpu"), 1, HostPool(2**20, pinned=False, lower=""), min_bytes=0
    )
    x, memory = (
        torch.randn(2, 3, 8, requires_grad=True),
        torch.randn(3, 8, requires_grad=True),
    )

    def gradients() -> list[torch.Tensor]:
        model(x * 1, (memory * 1).expand(2, 3, 8).contiguous()).backward()
        found = [tensor.grad for tensor in (x, memory, *model.parameters())]
        for tensor in (x, memory, *model.parameters()):
            tensor.grad = None
        return found

    expected = gradients()
    for chosen in plan_checkpointing(model, [], {"blocks.*": "full"}):
        apply_checkpointing(model, chosen)
        park_inputs(model, chosen, offloader)
    assert all(map(torch.equal, gradients(), expected))
    assert offloader.bytes_out == (4 + 1) * 2 * 3 * 8 * 4


class Narrowing(nn.Module):
    """Its last blocks see half of the sequence, as an encoder's and a decoder's, or a
    Swin's stages do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        x = x[:, ::2].contiguous()
        for block in self.blocks[2:]:
            x = block(x)
        return x.square().sum()


def test_inputs_of_different_sizes_share_the_pool_from_step_to_step() -> None:
    torch.manual_seed(0)
    model = Narrowing()
    steps = torch.randn(3, 2, 6, 8)
    plain = [torch.autograd.grad(model(x), list(model.parameters())) for x in steps]
    pool = HostPool(2**20, pinned=False, lower="")
    offloader = Offloader(torch.device("cpu"), 1, pool, min_bytes=0)
    for chosen in plan_checkpointing(model, [], {"blocks.*": "full"}):
        apply_checkpointing(model, chosen)
        park_inputs(model, chosen, offloader)
    for x, expected in zip(steps, plain, strict=True):
        found = torch.autograd.grad(model(x.requires_grad_()), list(model.parameters()))
        assert all(map(torch.equal, found, expected))
    assert pool.bytes_in_use == 0


def test_small_inputs_stay() -> None:
    model, offloader = parked(4, 1, min_bytes=INPUT_BYTES + 1)
    model(tokens(0, SAMPLES)).backward()
    assert offloader.bytes_out == 0
    model, offloader = parked(4, 1, min_bytes=INPUT_BYTES)
    model(tokens(0, SAMPLES)).backward()
    assert offloader.bytes_out > 0


def test_a_graph_can_be_used_twice() -> None:
    model, _ = parked(4, 2)
    loss = model(tokens(0, SAMPLES))
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, once in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, once + once)


class InPlace(nn.Module):
    """Changes its input, which checkpointing needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.linear(x).sin())


@pytest.mark.parametrize("horizon", [1, 2])
def test_an_input_changed_in_place_is_an_error_and_no_wrong_gradient(
    horizon: int,
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(InPlace() for _ in range(3)))
    offloader = Offloader(
        torch.device("cpu"),
        horizon,
        HostPool(2**20, pinned=False, lower=""),
        min_bytes=0,
    )
    for chosen in plan_checkpointing(model, [], {"InPlace": "full"}):
        apply_checkpointing(model, chosen)
        park_inputs(model, chosen, offloader)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.randn(2, 8)).sum().backward()


@pytest.mark.slow
def test_compiled_blocks() -> None:
    def gradients(model: DroppingGpt, compiled: bool) -> list[torch.Tensor]:
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(tokens(0, SAMPLES)).backward()
        return [parameter.grad for parameter in model.parameters()]

    torch._dynamo.reset()
    expected = gradients(_checkpointed(3, "none"), compiled=False)
    for mode, layer_by_layer in (("full", True), ("full", False), ("selective", True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DroppingGpt(3)
        if layer_by_layer:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend="aot_eager")
        offloader = Offloader(
            torch.device("cpu"), 1, HostPool(2**20, pinned=False, lower=""), min_bytes=0
        )
        for chosen in plan_checkpointing(
            model, ["blocks.0", "blocks.1", "blocks.2"], mode
        ):
            apply_checkpointing(model, chosen)
            park_inputs(model, chosen, offloader)
        found = gradients(model, compiled=not layer_by_layer)
        assert offloader.bytes_in == 2 * INPUT_BYTES, (
            f"{mode}, compiled {'blocks' if layer_by_layer else 'model'}"
        )
        # As in test_checkpointing: the compiler adds up in another order.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-7, rtol=1e-5)


def test_the_pool_reuses_and_replaces() -> None:
    pool = HostPool(1000, pinned=False, lower="lower the batch size")
    small, large = pool.take(100), pool.take(300)
    assert pool.n_bytes == pool.bytes_in_use == 400
    pool.give(small)
    pool.give(large)
    assert pool.take(90) is small and pool.take(90) is large
    pool.give(small)
    larger = pool.take(400)  # the small one makes room
    assert pool.n_bytes == 700 and larger.bytes.numel() == 400 and pool.allocations == 3


def test_a_pinned_pool_counts_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    # Needs a driver.
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **given: empty(*size, **given)
    )
    pool = HostPool(1000, pinned=True, lower="lower the batch size")
    small = pool.take(100)
    pool.give(small)
    larger = pool.take(300)
    assert pool.n_bytes == 128 + 512 and larger.bytes.numel() == 512, (
        "powers of two; the small one stays pinned"
    )
    assert pool.take(90) is small
    with pytest.raises(HostMemoryError, match="lower the batch size"):
        pool.take(300)


def test_the_pools_limit_says_what_to_lower() -> None:
    model, _ = parked(4, 1, limit=INPUT_BYTES * 2)
    with pytest.raises(HostMemoryError, match="lower the batch size"):
        model(tokens(0, SAMPLES))


def refused(**knobs: Any) -> tuple[str, list[str]]:
    parallel = build(layers=2, shard_degree=2, **knobs)
    table = [
        parallel.config.activations.offload,
        parallel.config.activations.loading_horizon,
    ]
    return parallel.describe(), table


def test_settings_without_effect_are_said_or_refused() -> None:
    with pytest.raises(ValueError, match=r"\{'checkpoint': 'full', 'offload': true\}"):
        SmpConfig(activations={"offload": True})
    # Two blocks and a horizon of two: everything would stay.
    for described, table in run_ranks(
        refused, 2, activations={"checkpoint": "full", "offload": True}
    ):
        assert table == [False, 2] and "host memory" not in described
    for described, table in run_ranks(
        refused, 2, activations={**OFFLOADED, "loading_horizon": 1}
    ):
        assert (
            table == [True, 1] and "all but 1 of them wait in host memory" in described
        )
