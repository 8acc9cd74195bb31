"""Plans in FP8: what products, casts and gathers of native layers take, and on which
devices."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from smp_core import run_log
from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.observe.run_record import _of_plan
from smp_core.planner import Workload, plan
from smp_core.planner.calibrate import _plan_of
from smp_core.planner.fitted import BANDS, FP8_BAND
from smp_core.planner.fp8_figures import amax_bytes, block_figures
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.stage_time import step_model
from tests.core.planner.planner_models import WIDTH, traced_mixture
from tests.harness import ROOT

TOKENS, H100 = 64, Hardware.parse("1x4:h100-80g")
SAMPLES, INNER = 4, 96
ELEMENTS = 4 * WIDTH**2 + 4 * 3 * WIDTH * INNER
"""Of a block's weights that FP8 layers multiply by."""
TORCHAO = {"backend": "torchao", "scaling": "dynamic", "fp8_all_gather": False}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelTrace:
    return traced_mixture(tmp_path_factory)


def decided(mixture: ModelTrace, **knobs: Any) -> Any:
    asked = SmpConfig(param_dtype="bfloat16", **knobs)
    return decide(mixture.of_precision("none", "mixed"), asked, H100.cluster())


@pytest.mark.parametrize(
    ("recipe", "read_and_written", "of_weights"),
    [(True, 4, (0, 2)), ("dynamic", 6, (0, 2)), ({"fp8_all_gather": False}, 4, (4, 0))],
)
def test_products_take_half_the_time_and_casts_move_bytes(
    mixture: ModelTrace, recipe: Any, read_and_written: int, of_weights: tuple[int, int]
) -> None:
    """A token has four square matrices of attention, and of two of the four experts the
    two that are stacked and the one that leads back; weights of all four are transposed
    or cast. The router's is no FP8 layer's."""
    plain, fp8 = (decided(mixture, shard_degree=4, fp8=each) for each in (None, recipe))
    before, after = (
        block_figures(each, mixture, H100, "none", SAMPLES, TOKENS)
        for each in (plain, fp8)
    )
    assert after.forward_products == before.forward_products / 2
    assert after.backward_experts == before.backward_experts / 2
    assert after.forward_attention == before.forward_attention
    inputs, outputs = (
        4 * WIDTH + 2 * (WIDTH + INNER),
        4 * WIDTH + 2 * (2 * INNER + WIDTH),
    )
    of_number = read_and_written * SAMPLES * TOKENS
    forward, backward = (each * ELEMENTS for each in of_weights)
    assert after.forward_moved - before.forward_moved == pytest.approx(
        of_number * inputs + forward
    )
    assert after.backward_moved - before.backward_moved == pytest.approx(
        of_number * outputs + backward
    )
    # Products of attention read bytes of one, not two: an input in forward, and
    # backward it and twice a gradient; a matrix both times.
    spared = 4 * SAMPLES * TOKENS * WIDTH
    assert before.forward_operands - after.forward_operands == pytest.approx(spared)
    assert before.backward_operands - after.backward_operands == pytest.approx(
        3 * spared
    )
    for each in ("forward_matrices", "backward_matrices"):
        assert getattr(before, each) - getattr(after, each) == 4 * WIDTH**2


def test_compiled_blocks_move_less_and_compute_as_much(mixture: ModelTrace) -> None:
    plain, compiled = (
        decided(mixture, shard_degree=4, compile=each) for each in (None, True)
    )
    before, after = (
        block_figures(each, mixture, H100, "none", SAMPLES, TOKENS)
        for each in (plain, compiled)
    )
    assert (after.forward_moved, after.backward_moved) == (
        before.forward_fused,
        before.backward_fused,
    )
    assert (
        0 < after.forward_moved < before.forward_moved / 2
        and 0 < after.backward_moved < before.backward_moved / 2
    )
    assert (after.forward_products, after.backward_attention) == (
        before.forward_products,
        before.backward_attention,
    )


def test_weights_are_gathered_as_bytes_and_magnitudes_once_a_step(
    mixture: ModelTrace,
) -> None:
    """Embedding, head, norms and routers are gathered as before; a block has six linear
    layers and stacks."""
    plans = [
        decided(mixture, shard_degree=4, fp8=each)
        for each in (None, True, {"fp8_all_gather": False})
    ]
    models = [step_model(each, mixture, H100, TOKENS) for each in plans]
    latency = 3 * H100.fitted.latency_inside
    blocks = [model.gather[0] - latency for model in models]
    assert blocks[1] == pytest.approx(
        blocks[0] * (1 - ELEMENTS / mixture.block_elements() / 2)
    )
    assert blocks[2] == pytest.approx(blocks[0])
    assert models[1].gather[1] == models[0].gather[1]
    assert amax_bytes(plans[1]) == 4 * 6 * 3 * 4
    steps = [model.step(1, 1).optimizer for model in models]
    # Of bytes alone, 1 %.
    assert steps[1] - steps[0] == pytest.approx(
        6 * H100.fitted.latency_inside, rel=0.01
    )


@pytest.mark.parametrize(
    "recipe", [True, {"scaling": "dynamic", "amax_history_len": 16}, TORCHAO]
)
def test_a_run_in_fp8_is_planned_as_its_log_says(
    mixture: ModelTrace, tmp_path: Path, recipe: Any
) -> None:
    made, path = decided(mixture, shard_degree=4, fp8=recipe), tmp_path / "run.jsonl"
    run_log.append(path, "run", step=0, micro_batches=1, **_of_plan(made, [], 1))
    given = (run_log.Run.read(path), mixture, H100, Workload(TOKENS, 8), path)
    if recipe is TORCHAO:
        with pytest.raises(
            ValueError, match=r"fp8\.backend='torchao', which is not planned with"
        ):
            _plan_of(*given)
        return
    assert _plan_of(*given).knobs.fp8 == made.knobs.fp8


def test_a_plan_in_fp8_is_written_and_has_a_wider_band(mixture: ModelTrace) -> None:
    found = plan(
        mixture,
        H100,
        Workload(TOKENS, 8),
        fixed={"shard": 4, "fp8": True, "expert_parallel_degree": 1},
    )
    assert found.chosen.knobs["fp8"] is True
    assert found.chosen.band.share == pytest.approx(
        BANDS["sharding"].share + FP8_BAND.share
    )


def test_the_band_of_fp8_is_the_mean_error_of_the_published_speedups() -> None:
    spec = importlib.util.spec_from_file_location(
        "plan_requests", Path(ROOT, "benchmarks", "plan_requests.py")
    )
    assert spec is not None and spec.loader is not None
    bench: Any = importlib.util.module_from_spec(spec)
    sys.modules["plan_requests"] = bench
    spec.loader.exec_module(bench)
    found = json.loads(bench.RESULTS.read_text(encoding="utf-8"))["published"][
        "speedups"
    ]
    pairs = zip(bench.SPEEDUPS, found, strict=True)
    off = [abs(own["planned"] / each.published - 1) for each, own in pairs]
    assert sum(off) / len(off) == pytest.approx(FP8_BAND.share, abs=0.0005)


@pytest.mark.parametrize(
    ("cluster", "recipe", "said"),
    [
        ("1x4:a100-80g", True, "^fp8: A100 has no tensor cores for FP8"),
        ("1x4:rtx-a6000", True, "RTX A6000 has no tensor cores for FP8"),
        ("1x4:h100-80g", {"exclude": ["*.w1"]}, "fp8.exclude=.* is not planned with"),
        (
            "1x4:h100-80g",
            TORCHAO,
            "fp8.backend='torchao'",
        ),
    ],
)
def test_fp8_that_is_not_planned_is_refused(
    mixture: ModelTrace, cluster: str, recipe: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan(mixture, cluster, Workload(TOKENS, 8), fixed={"fp8": recipe})


def test_a_device_of_one_s_own_says_its_fp8_peak(tmp_path: Path) -> None:
    device = {
        "name": "New",
        "memory_gib": 64,
        "bf16_tflops": 500,
        "hbm_gb_per_s": 2000,
        "link_gb_per_s": 100,
    }
    file = tmp_path / "new.yaml"
    written = {"nodes": 1, "devices_per_node": 4, "gbit_per_s": 100}
    peaks = []
    for more in ({}, {"fp8_tflops": 900}):
        file.write_text(
            yaml.safe_dump({**written, "device": {**device, **more}}), encoding="utf-8"
        )
        peaks.append(Hardware.parse(file).device.fp8_flops)
    assert peaks == [None, 900e12]
