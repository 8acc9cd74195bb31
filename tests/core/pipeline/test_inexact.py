"""Knobs that round: stages compute what the same knob computes without them,
micro-batch by micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.checkpoint import save_checkpoint
from smp_core.comm import remainder_state as remainder_state_module
from smp_core.comm.remainder_state import load_remainder_state, remainder_state
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.pipeline.batches import split_batch
from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler, scale_in_stages
from tests.core.pipeline.cases import of_all_stages
from tests.core.tensor_parallel.model_cases import batches, full, own_loss
from tests.core.tensor_parallel.models import VOCABULARY, PlainBlock
from tests.harness import run_ranks

STEPS, MICRO_BATCHES = 3, 4


class Words(nn.Embedding):
    pass


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


class Model(nn.Module):
    """Every parameter is in a unit that is the same with stages and without: codes
    depend on what travels together."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.arange(12).view(2, 6)
        self.words, self.head = Words(VOCABULARY, 32), Head()
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    stages: int, shard: int, dtype: torch.dtype, knobs: dict[str, Any]
) -> ParallelModel:
    torch.manual_seed(1)
    more: dict[str, Any] = {"pipeline_parallel_degree": stages}
    if stages > 1:
        more["pipeline"] = {"microbatches": MICRO_BATCHES}
    config = SmpConfig(
        shard_degree=shard, units=["Words", "PlainBlock", "Head"], **more, **knobs
    )
    return parallelize(Model().to(dtype), config)


def train(
    stages: int,
    shard: int,
    dtype: torch.dtype,
    knobs: dict[str, Any],
    scale: float = 0.0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """``scale``: of a gradient scaler at the beginning; 0: without one. It skips the
    second step, in which rank 0 is given an inf."""
    parallel = build(stages, shard, dtype, knobs)
    assert (
        parallel.config.compression.reduce == SmpConfig(**knobs).compression.reduce
    ), "it takes effect"
    module, mesh, pipeline = parallel.module, parallel.mesh, parallel.pipeline
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    parallel.prepare_optimizer(optimizer)
    scaler = ShardedGradScaler("cpu", init_scale=scale) if scale else None
    scaled = (lambda loss: loss) if scaler is None else scaler.scale
    seen: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    for tokens in batches(1, STEPS)[:, 0]:
        own = tokens.chunk(mesh.data_size)[mesh.data_rank]
        parts = split_batch(own, MICRO_BATCHES)
        # Of the first stage.
        if parallel.fp8 is not None and len(seen["norms"]) == 1 and mesh.rank == 0:
            # All drop the step's gradients.
            parallel.fp8.state.record(0, 0, torch.tensor(torch.inf))
        if pipeline is not None:
            if scaler is not None:
                scaled = scale_in_stages(scaler)
                # As the trainers do with the loss that they get.
                scaler.scale(torch.zeros(()))
            calls = [
                lambda part=part: parallel.run_as_forward(
                    lambda: own_loss(module(part), part)
                )
                for part in parts
            ]
            losses = pipeline.train(calls, scaled, 1 / MICRO_BATCHES, own)
            losses = pipeline.share(losses or None)
        else:
            losses = []
            for number, part in enumerate(parts):
                with parallel.window.accumulate(number < MICRO_BATCHES - 1):
                    losses.append(
                        parallel.run_as_forward(lambda: own_loss(module(part), part))  # noqa: B023
                    )
                    (scaled(losses[-1]) * (1 / MICRO_BATCHES)).backward()
        parallel.window.close()
        if scaler is not None:
            if len(seen["scales"]) == 1 and mesh.rank == 0:  # of the first stage
                module.words.weight.grad.to_local()[0] = torch.inf
            scaler.unscale_(optimizer)
        seen["norms"].append(float(parallel.clip_grad_norm_(0.5)))
        seen["losses"].append(sum(loss.item() for loss in losses))
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
            seen["scales"].append(scaler.get_scale())
        optimizer.zero_grad()
    named = dict(module.named_parameters())
    seen["weights"] = (
        {n: full(p) for n, p in named.items()}
        if pipeline is None
        else of_all_stages(parallel, named)
    )
    if folder is not None and "compression" in knobs:
        path = folder / str(knobs["compression"])
        assert remainders_go_through_a_checkpoint(
            parallel, build(stages, shard, dtype, knobs), path
        )
    seen["state"] = None if parallel.fp8 is None else parallel.fp8.state_dict()
    return seen


def several(
    stages: int, cases: list[tuple[Any, ...]], folder: Path | None = None
) -> list[dict[str, Any]]:
    return [train(stages, *case, folder=folder) for case in cases]


def remainders_go_through_a_checkpoint(
    parallel: ParallelModel, again: ParallelModel, path: Path
) -> bool:
    state = remainder_state(parallel.traffic)
    save_checkpoint(path, state)
    load_remainder_state(again.traffic, path)
    before, after = parallel.traffic.error_feedback(), again.traffic.error_feedback()
    assert before.keys() == after.keys() and any(
        torch.any(kept) for kept in before.values()
    )
    return all(torch.equal(kept, after[name]) for name, kept in before.items())


def test_remainders_come_back_in_their_dtypes() -> None:
    joined = torch.tensor([0.5, 0.25, 3.0, 0.0], dtype=torch.float64)
    first, second = remainder_state_module._split(
        joined, [("a", 2, "float32"), ("b", 1, "float64")]
    ).values()
    assert (first.dtype, first.tolist()) == (torch.float32, [0.5, 0.25])
    assert (second.dtype, second.tolist()) == (torch.float64, [3.0])


F64, F32 = torch.float64, torch.float32
CODES = {"compression": "int8"}
CASES: dict[str, tuple[Any, ...]] = {
    "codes in the partition group": (2, F64, {"compression": "int8"}),
    "codes across replicas": (1, F64, {"compression": "int4"}),
    "float16": (2, F32, {"param_dtype": "float16"}, 2.0**14),
    "fp8": (2, F64, {"fp8": {"fp8_all_gather": True}, "activations": "full"}),
}


@pytest.mark.slow
def test_stages_round_as_one_stage_does(tmp_path: Path) -> None:
    """The order in which the norm is summed up differs, by 1e-16 of it: no code is
    another one for that."""
    cases = list(CASES.values())
    expected = run_ranks(several, 2, 1, cases, ranks_per_node=1)
    for rank, results in enumerate(
        run_ranks(several, 4, 2, cases, tmp_path, ranks_per_node=1)
    ):
        for name, seen, alone in zip(CASES, results, expected[rank % 2], strict=True):
            tolerance = 1e-6 if name == "float16" else 1e-12
            assert (
                seen["scales"]
                == alone["scales"]
                == ([2.0**14, 2.0**13, 2.0**13] if name == "float16" else [])
            ), name
            for what in ("norms", "losses"):
                assert seen[what] == pytest.approx(
                    alone[what], abs=tolerance, rel=0, nan_ok=True
                ), f"{name}: {what}"
            assert seen["weights"].keys() == alone["weights"].keys()
            worst = max(
                (value - alone["weights"][key]).abs().max().item()
                for key, value in seen["weights"].items()
            )
            assert worst <= tolerance, f"{name}: {worst}"
            assert_same_scales(seen["state"], alone["state"])


def assert_same_scales(
    state: dict[str, Any] | None, expected: dict[str, Any] | None
) -> None:
    """What a checkpoint has of FP8 knows nothing of stages."""
    if state is None or expected is None:
        assert state is expected
        return
    assert (
        state["steps"] == expected["steps"]
        and state["sites"].keys() == expected["sites"].keys()
    )
    for name, site in expected["sites"].items():
        assert torch.equal(state["sites"][name]["scale"], site["scale"]), name
