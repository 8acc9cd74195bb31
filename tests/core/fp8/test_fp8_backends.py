"""Other libraries' FP8 layers: torchao itself where it is installed, and a stand-in for
Transformer Engine."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.fp8 import Fp8Recipe, convert_to_fp8
from smp_core.fp8.backends import convert_with
from tests.core.fp8 import transformer_engine_stand_in as stand_in
from tests.core.fp8.fp8_runs import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Run,
    batches,
    build,
    decibels,
    runs_of,
    train,
    whole,
)
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks

CPU = torch.device("cpu")
TORCHAO = Fp8Recipe(backend="torchao", scaling="dynamic", fp8_all_gather=False)
ENGINE = Fp8Recipe(
    backend="transformer_engine", fp8_all_gather=False, amax_history_len=16, margin=1
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 20)
    )


@pytest.mark.parametrize(
    ("backend", "command"),
    [(TORCHAO, "pip install torchao"), (ENGINE, "pip install --no-build-isolation")],
)
def test_a_library_that_is_not_there_is_named_with_what_to_type(
    backend: Fp8Recipe, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=rf"not installed: {command}.*backend='native'"
    ):
        convert_with(small_net(), backend, CPU)


def test_what_other_backends_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"backend='torchao' with scaling='delayed'.*write scaling='dynamic'",
    ):
        Fp8Recipe(backend="torchao")
    with pytest.raises(ValueError, match=r"fp8_all_gather=True.*state dicts"):
        Fp8Recipe(backend="torchao", scaling="dynamic")
    with pytest.raises(
        ValueError,
        match=r"'transformer_engine' with fp8_all_gather=True.*write fp8_all_gather=False",
    ):
        Fp8Recipe(backend="transformer_engine")
    with pytest.raises(
        ValueError, match=r"calibration_steps=3: its layers start with scales of 1"
    ):
        Fp8Recipe(
            backend="transformer_engine", fp8_all_gather=False, calibration_steps=3
        )
    with pytest.raises(
        ValueError, match=r"margin=1: its current scaling has no margin"
    ):
        Fp8Recipe(
            backend="transformer_engine",
            fp8_all_gather=False,
            scaling="dynamic",
            margin=1,
        )
    with pytest.raises(
        ValueError, match=r"write activations='none', or fp8={'backend': 'native'}"
    ):
        SmpConfig(fp8=ENGINE, activations="full")


# torchao


@needs_torchao
def test_torchao_multiplies_what_the_native_backend_would() -> None:
    """Emulated. With scales that are no powers of two it keeps up to one more binade:
    as good as native within 1 dB."""
    plain = small_net()
    net, native = copy.deepcopy(plain), copy.deepcopy(plain)
    parameters = dict(net.named_parameters())
    other = convert_with(net, TORCHAO, CPU)
    assert [type(layer).__name__ for layer in net] == [
        "Float8Linear",
        "GELU",
        "Float8Linear",
        "Linear",
    ]
    assert other.left_out == {"3": "its size 20 x 64 is not in multiples of 16"}
    assert all(
        parameter is parameters[name] for name, parameter in net.named_parameters()
    )
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert {type(value) for value in net.state_dict().values()} == {torch.Tensor}
    convert_to_fp8(native, Fp8Recipe(scaling="dynamic"))
    x = torch.randn(32, 64)
    outputs = [each(x) for each in (plain, net, native)]
    for output in outputs:
        output.square().sum().backward()
    noise = [decibels(outputs[0].detach(), output.detach()) for output in outputs[1:]]
    assert noise[0] >= 25 and noise[0] >= noise[1] - 1
    for (name, expected), ours, theirs in zip(
        plain.named_parameters(), net.parameters(), native.parameters(), strict=True
    ):
        noise = [decibels(expected.grad, each.grad) for each in (ours, theirs)]
        assert noise[0] >= 20 and noise[0] >= noise[1] - 1, name


@needs_torchao
def test_the_model_itself_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="cannot replace the model itself"):
        convert_with(nn.Linear(32, 32), TORCHAO, CPU)


def in_torchao() -> list[Run]:
    return runs_of(
        [{"shard_degree": 2, "fp8": TORCHAO}, {"shard_degree": 1, "fp8": TORCHAO}],
        steps=6,
    )


@needs_torchao
def test_torchao_trains_sharded_as_it_does_replicated_and_in_one_process() -> None:
    """Bitwise on two ranks. One process casts whole batches by one scale, which is no
    power of two as ours are, so that already the first loss differs by FP8 noise."""
    alone = run_ranks(
        runs_of,
        1,
        [{"shard_degree": 1, "fp8": TORCHAO}, {"shard_degree": 1, "fp8": None}],
        steps=6,
    )[0]
    for sharded, replicated in run_ranks(in_torchao, 2):
        assert (
            sharded.losses == replicated.losses
            and sharded.losses[-1] < sharded.losses[0]
        )
        assert all(
            torch.equal(sharded.weights[name], value)
            for name, value in replicated.weights.items()
        )
        assert sharded.kinds == {"DTensor"} and sharded.amax_calls == [0.0] * 6
        assert sharded.losses == pytest.approx(alone[0].losses, rel=5e-3)
        assert alone[0].losses != alone[1].losses


def units_in_torchao() -> list[tuple[str, str, bool]]:
    """Of each unit of more than its root: its name, the class of its module, and
    whether the model uses that module."""
    parallel = build(
        shard_degree=2, fp8=TORCHAO, units={"min_parameters": WIDTH * WIDTH}
    )
    used = set(parallel.module.modules())
    return [
        (unit.name, type(unit.module).__name__, unit.module in used)
        for unit in parallel.units
    ]


@needs_torchao
def test_layers_that_torchao_replaces_after_planning_are_the_units() -> None:
    for units in run_ranks(units_in_torchao, 2):
        assert all(used for _, _, used in units)
        assert any("Float8Linear" in kind for _, kind, _ in units)


# Transformer Engine


@pytest.mark.parametrize("before_2_9", [False, True])
def test_layers_of_transformer_engine_take_over_the_parameters(
    before_2_9: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = small_net()
    net = copy.deepcopy(plain).eval()
    parameters = dict(net.named_parameters())
    with (
        stand_in.installed(before_2_9=before_2_9) as regions,
        caplog.at_level(logging.WARNING, "smp"),
    ):
        other = convert_with(net, ENGINE, CPU)
        assert other.left_out == {"3": "its size 20 x 64 is not in multiples of 16"}
        assert [type(layer) is nn.Linear for layer in net] == [
            False,
            False,
            False,
            True,
        ] and not net[0].training
        assert all(
            parameter is parameters[name] for name, parameter in net.named_parameters()
        )
        assert net.state_dict().keys() == plain.state_dict().keys()
        net.load_state_dict(plain.state_dict())
        x = torch.randn(32, 64)
        with torch.no_grad():
            expected, seen = plain(x), net(x)
            assert (
                seen.equal(net(x))
                and not seen.equal(expected)
                and decibels(expected, seen) >= 25
            )
            with other.region(), other.region():
                assert net(x).equal(seen)
        assert regions.outside == 0 and regions.depth == 0
        with pytest.raises(RuntimeError):
            net(torch.randn(32, 7))
        assert regions.depth == 0
    assert "a resumed run starts with scales of 1" in caplog.text


def test_recipes_of_transformer_engine() -> None:
    from smp_core.fp8.transformer_engine import recipe_for

    with stand_in.installed():
        delayed = recipe_for(
            Fp8Recipe(
                backend="transformer_engine",
                fp8_all_gather=False,
                fp8_format="e4m3",
                amax_history_len=4,
                amax_compute_algo="most_recent",
                margin=2,
                reduce_amax=False,
            )
        )
        assert delayed == stand_in.DelayedScaling(
            2,
            stand_in.Format.E4M3,
            4,
            amax_compute_algo="most_recent",
            reduce_amax=False,
        )
        dynamic = recipe_for(
            Fp8Recipe(
                backend="transformer_engine", fp8_all_gather=False, scaling="dynamic"
            )
        )
        assert dynamic == stand_in.Float8CurrentScaling(stand_in.Format.HYBRID)


def test_transformer_engine_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.installed():
        monkeypatch.setattr("smp_core.fp8.transformer_engine._DEVICES", ("cuda",))
        with pytest.raises(
            ValueError,
            match=r"computes on CUDA only and the device is 'cpu'; write backend='native'",
        ):
            convert_with(small_net(), ENGINE, CPU)


def in_transformer_engine() -> dict[str, Any]:
    with stand_in.installed() as regions:
        sharded, replicated = runs_of(
            [{"shard_degree": n, "fp8": ENGINE} for n in (2, 1)], steps=3
        )
        passes = list(regions.passes)
        late = delayed(Fp8Recipe(backend="transformer_engine", fp8_all_gather=False))
    return {
        "runs": (sharded, replicated),
        "passes": passes,
        "late": (late, delayed(None)),
        "outside": regions.outside,
    }


def delayed(recipe: Fp8Recipe | None) -> dict[str, torch.Tensor]:
    """Weights of a model that was initialised shard by shard."""
    with torch.device("meta"):
        model = SmallGpt(
            vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, length=LENGTH - 1
        )
    config = SmpConfig(shard_degree=2, delayed_init=True, fp8=recipe)
    parallel = parallelize(model, config)
    weights = whole(parallel.module)
    train(parallel, batches(1))
    return weights


def test_transformer_engine_runs_in_one_region_per_pass_with_the_amaxes_of_all_ranks() -> (
    None
):
    for found in run_ranks(in_transformer_engine, 2):
        sharded, replicated = found["runs"]
        assert (
            sharded.losses == replicated.losses
            and sharded.losses[-1] < sharded.losses[0]
        )
        assert sharded.kinds == {"DTensor"} and not [
            name for name in sharded.weights if "extra" in name
        ]
        wanted = stand_in.DelayedScaling(1, stand_in.Format.HYBRID, 16)
        assert found["passes"] == [(wanted, 2)] * 6 and found["outside"] == 0
        late, plain = found["late"]
        assert late.keys() == plain.keys() and all(
            torch.equal(late[name], value) for name, value in plain.items()
        )
