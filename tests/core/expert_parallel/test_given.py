"""Models whose experts Transformers dealt when it loaded them train as one process
does, and are resumed anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.expert_parallel.cases import (
    Case,
    assert_like_one_process,
    saved_and_loaded,
)
from tests.core.tensor_parallel.model_cases import alone, build, differences, together
from tests.harness import run_ranks
from tests.older_transformers import needs_dealt_experts

pytestmark = needs_dealt_experts

TWO, FOUR = {"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 4, "ep_size": 4}
REPLICAS = {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}


@dataclass(frozen=True)
class Loaded(Case):
    """A training of a model that Transformers loads with a DistributedConfig of these
    ``sizes``."""

    folder: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: torch.dtype = torch.float64

    def parallel(
        self, device: torch.device | None = None, **more: Any
    ) -> ParallelModel:
        from transformers.distributed import DistributedConfig

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=self.dtype,
            experts_implementation="eager",
            attn_implementation="eager",
            distributed_config=DistributedConfig(**dict(self.sizes)),
        )
        model.train()
        own: Any = build(self.kind)
        # Which is not in its configuration.
        model.router_aux_loss_coef = own.router_aux_loss_coef
        for buffer in model.buffers():  # Transformers computes frequencies in float32
            buffer.data = buffer.to(self.dtype)
        return parallelize(
            model, SmpConfig(**{**dict(self.knobs), **more}), device="cpu"
        )


def loaded(
    kind: str,
    folder: Path,
    sizes: dict[str, int],
    dtype: torch.dtype = torch.float64,
    **knobs: Any,
) -> Loaded:
    model: Any = build(kind)
    model.save_pretrained(folder / kind)
    where = {"folder": str(folder / kind), "sizes": tuple(sizes.items())}
    return Loaded(
        kind, micro_batches=2, knobs=tuple(knobs.items()), dtype=dtype, **where
    )


def test_dealt_experts_train_like_one_process(tmp_path: Path) -> None:
    """1e-12: sums in another order, of losses of about 4 and gradients of up to 0.1 in
    float64. With "balanced" the auxiliary loss is that of all ranks' tokens."""
    cases = [
        loaded("Mixtral", tmp_path, FOUR, keep_between_micro_batches="gradients"),
        loaded("balanced", tmp_path, TWO, expert_parallel_degree="auto"),
    ]
    assert_like_one_process(cases)  # type: ignore[arg-type]


def in_float32(case: Loaded) -> list[str]:
    return differences(together(case), alone(case.kind, case.micro_batches), 1e-5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_dealt_experts_of_several_replicas_train_like_one_process(
    tmp_path: Path,
) -> None:
    """1e-5: float32, against one process in float64."""
    for found in run_ranks(
        in_float32,
        4,
        loaded("Mixtral", tmp_path, REPLICAS, torch.float32),
        ranks_per_node=2,
    ):
        assert found == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [[TWO], [TWO, FOUR]],
    ids=["some", "all"],
)
def test_any_layout_loads_what_dealt_experts_saved(
    sizes: list[dict[str, int]], tmp_path: Path
) -> None:
    cases = [
        *(loaded("Mixtral", tmp_path, each) for each in sizes),
        Case("Mixtral", 2, 1),
    ]
    for problems in run_ranks(
        saved_and_loaded, 4, tmp_path, cases, ranks_per_node=2, timeout=600
    ):
        assert problems == []


def refusals(cases: list[Loaded]) -> list[str]:
    said = []
    for case in cases:
        with pytest.raises(ValueError) as error:
            case.parallel()
        said.append(str(error.value))
    return said


def test_what_cannot_be_taken_over_is_refused_with_what_to_write(
    tmp_path: Path,
) -> None:
    cases = [
        loaded("Mixtral", tmp_path, TWO, expert_parallel_degree=4),
        loaded("Mixtral", tmp_path, REPLICAS),
        loaded("Mixtral", tmp_path, {"tp_size": 4, "ep_size": 4}),
        loaded("Mixtral", tmp_path, {"fsdp_size": 4}, expert_parallel_degree=2),
    ]
    for degree, halved, split, whole in run_ranks(refusals, 4, cases, ranks_per_node=2):
        assert (
            "leave it out, or load the model with DistributedConfig(ep_size=4)"
            in degree
        )
        assert (
            "adds their gradients up rightly in float32 and bfloat16 only, not in torch.float64"
            in halved
        )
        assert "came with its layers split over 4 ranks" in split
        assert "load it with ep_size in its DistributedConfig" in whole
