"""Experts of each pipeline stage on its ranks: the training, biases and checkpoints of
one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.checkpoint.optimizers import load_named_optimizer_state
from smp_core.checkpoint.reader import load_checkpoint
from smp_core.checkpoint.writer import save_checkpoint
from smp_core.engine.parallel_model import ParallelModel
from tests.core.expert_parallel.cases import RATE, Case as WithoutStages, with_biases
from tests.core.expert_parallel.models import FAMILIES
from tests.core.expert_parallel.staged import (
    assert_like_one_process,
    problems_of_losses,
)
from tests.core.pipeline.cases import (
    Case,
    everything,
    example_of,
    of_all_stages,
    together,
)
from tests.core.tensor_parallel.model_cases import (
    STEPS,
    Wide,
    batches,
    build,
    optimizer_of,
    trained as without_stages,
)
from tests.harness import run_ranks

EXPERTS, RATED = ("expert_parallel_degree", 2), ("router_bias_update_rate", RATE)


def biased(case: Case) -> list[str]:
    """The same of weights and biases that the routers' choices move."""
    seen, expected = together(case).weights, with_biases(case.windows, STEPS)
    return [
        name
        for name, value in seen.items()
        if not (value - expected[name]).abs().max() <= 1e-12
    ]


SEVERAL = Case("Qwen3Moe", shard=2, micro_batches=4, windows=2, knobs=(EXPERTS,))
DENSE_FIRST = Case("DeepseekV3", shard=2, knobs=(EXPERTS,))


@pytest.mark.parametrize(
    "case",
    [SEVERAL, pytest.param(DENSE_FIRST, marks=pytest.mark.slow)],
    ids=lambda case: case.kind,
)
def test_experts_on_stages_train_like_one_process(case: Case) -> None:
    """1e-12: sums in another order, in float64. Of DeepSeek-V3, which the next test
    trains, too, the first stage has no experts."""
    assert_like_one_process([case])


def test_biases_on_stages_move_by_the_choices_of_all_ranks() -> None:
    """1e-12, as above; the biases among them."""
    case = Case("DeepseekV3", shard=2, knobs=(EXPERTS, RATED))
    assert run_ranks(biased, 4, case, timeout=600) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [(), (("optimizer_shard", "world"), ("state_offload", "optimizer"))]
)
def test_families_on_stages_and_replicas_train_like_one_process(
    knobs: tuple[tuple[str, Any], ...],
) -> None:
    """1e-12, as above. On 8 ranks: 2 stages x 2 replicas x 2."""
    assert_like_one_process(
        [Case(kind, shard=2, knobs=(EXPERTS, *knobs)) for kind in FAMILIES], world=8
    )


def trained(
    layout: dict[str, int], steps: int
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    if "stages" not in layout:
        knobs = (("tensor_parallel_degree", layout.get("tensor", 1)),)
        return without_stages(
            WithoutStages("Mixtral", layout["shard"], layout["expert"], knobs=knobs),
            steps,
        )
    knobs = (("expert_parallel_degree", layout["expert"]),)
    case = Case("Mixtral", layout["stages"], layout["shard"], knobs=knobs)
    parallel = case.parallel()
    optimizer = optimizer_of(parallel.module)
    parallel.prepare_optimizer(optimizer)
    for micro in batches(1, steps):
        case.backward(
            parallel, micro[0].chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
        )
        parallel.window.close()
        optimizer.step()
        optimizer.zero_grad()
    return parallel, optimizer


def saved_and_loaded(
    folder: Path, layouts: list[dict[str, int]]
) -> list[tuple[Any, ...]]:
    """Save with the first layout, load in the others: layout, names on one side only,
    and names of other bits."""
    parallel, optimizer = trained(layouts[0], 2)
    state = {
        "state_dict": parallel.model_state(),
        "optimizer": parallel.optimizer_state(optimizer),
    }
    save_checkpoint(folder, state)
    expected, found = everything(parallel, optimizer), []
    assert any("experts" in name and name.endswith("exp_avg_sq") for name in expected)
    for layout in layouts[1:]:
        parallel, optimizer = trained(layout, 1)
        state = {"state_dict": parallel.model_state()}
        load_checkpoint(folder, state)
        parallel.take_model_state(state["state_dict"])
        load_named_optimizer_state(folder, ("optimizer",), parallel.module, optimizer)
        parallel.reshard()
        seen = everything(parallel, optimizer)
        other = [
            name
            for name in seen.keys() & expected.keys()
            if not torch.equal(seen[name], expected[name])
        ]
        if other or seen.keys() != expected.keys():
            found.append((layout, seen.keys() ^ expected.keys(), other))
    return found


STAGES = {"stages": 2, "shard": 2, "expert": 2}
TENSOR = {"tensor": 2, "shard": 2, "expert": 2}
LAYOUTS = [
    STAGES,
    {"shard": 4, "expert": 4},
    TENSOR,
    {"stages": 2, "shard": 2, "expert": 1},
    {"shard": 4, "expert": 2},
]


SOME = [STAGES, TENSOR]
EVERY = [[*LAYOUTS[first:], *LAYOUTS[:first]] for first in range(4)]


@pytest.mark.parametrize(
    "layouts", [SOME, *(pytest.param(each, marks=pytest.mark.slow) for each in EVERY)]
)
def test_any_stages_and_tensor_ranks_load_what_others_saved(
    layouts: list[dict[str, int]], tmp_path: Path
) -> None:
    assert (
        run_ranks(saved_and_loaded, 4, tmp_path, layouts, ranks_per_node=4, timeout=600)
        == [[]] * 4
    )


TWO_STAGES = [
    Case("balanced on 4 stages", shard=2, micro_batches=2, knobs=(EXPERTS,)),
    Case(
        "Qwen3Moe whose last layers are dense",
        shard=2,
        micro_batches=4,
        knobs=(EXPERTS,),
    ),
]
WORLD = (("reshard_after_forward", False), ("optimizer_shard", "world"))
TWO_STAGES_SLOW = [
    Case(
        "balanced Qwen3Moe",
        shard=2,
        schedule="interleaved:2",
        knobs=(("activations", "full"),),
    ),
    Case("balanced Olmoe", shard=2, schedule="gpipe"),
    Case("balanced GptOss", shard=1, knobs=(("compile", True),)),
    Case("balanced on 4 stages", shard=2, windows=2, knobs=WORLD),
]
FAMILIES_IN_STAGES = (
    "balanced on 4 stages",
    "balanced Qwen3Moe",
    "balanced Olmoe",
    "balanced GptOss",
)
ALONE_IN_DATA = [
    *(Case(kind, 4) for kind in FAMILIES_IN_STAGES),
    Case("balanced on 4 stages", knobs=(("tensor_parallel_degree", 2),)),
    Case("balanced on 4 stages", shard=2, knobs=(("context_parallel_degree", 2),)),
]


@pytest.mark.parametrize(
    "cases, data_size",
    [
        (TWO_STAGES, 2),
        pytest.param(TWO_STAGES_SLOW, 2, marks=pytest.mark.slow),
        pytest.param(ALONE_IN_DATA, 1, marks=pytest.mark.slow),
    ],
)
def test_auxiliary_losses_over_stages_are_those_of_one_process(
    cases: list[Case], data_size: int
) -> None:
    """1e-12: sums in another order, in float64. Loss, gradients of routers and all
    others, norms, weights."""
    for found in run_ranks(
        problems_of_losses, 4, cases, data_size, ranks_per_node=4, timeout=900
    ):
        assert [line for lines in found for line in lines] == []


def padded(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of tokens of which some are padding, unevenly many in each row."""
    ends = 3 + tokens[:, :1] % 7
    mask = (torch.arange(tokens.shape[1]) < ends).long()
    loss: torch.Tensor = model(
        input_ids=tokens, attention_mask=mask, labels=tokens
    ).loss
    return loss


def with_padding() -> list[str]:
    """Gradients of a batch with padding that are further off than 1e-12 from one
    process, and its loss."""
    case = Case("balanced on 4 stages", shard=2, micro_batches=1)
    parallel, tokens = case.parallel(), batches(1)[0, 0]
    own = tokens.chunk(2)[parallel.mesh.data_rank]
    assert parallel.pipeline is not None
    with Wide():
        (loss,) = parallel.pipeline.train(
            [lambda: padded(parallel.module, own)], lambda loss: loss, 1.0, own
        ) or [None]
        shared = parallel.pipeline.share(loss)
    parallel.window.close()
    dist.all_reduce(shared)
    expected: Any = example_of(build(case.kind))
    with Wide():
        whole = padded(expected, tokens)
        whole.backward()
    gradients = {
        name: p.grad
        for name, p in parallel.module.named_parameters()
        if p.grad is not None
    }
    seen = {"loss": shared / 4, **of_all_stages(parallel, gradients)}
    wanted = {
        "loss": whole.detach(),
        **{name: p.grad for name, p in expected.named_parameters()},
    }
    assert seen.keys() == wanted.keys()
    return [
        name for name in seen if not (seen[name] - wanted[name]).abs().max() <= 1e-12
    ]


def test_padding_counts_on_no_stage() -> None:
    """1e-12, as above."""
    assert run_ranks(with_padding, 4, ranks_per_node=4) == [[]] * 4


def asked_for_late() -> str:
    case = Case("Mixtral", micro_batches=1)
    parallel, tokens = case.parallel(), batches(1)[0, 0]

    def call() -> torch.Tensor:
        loss: torch.Tensor = parallel.module(
            input_ids=tokens, labels=tokens, output_router_logits=True
        ).loss
        return loss

    assert parallel.pipeline is not None
    with pytest.raises(ValueError) as error:
        parallel.pipeline.train([call], lambda loss: loss, 1.0, tokens)
    return str(error.value)


def test_a_loss_that_stages_do_not_expect_is_refused_on_all() -> None:
    for text in run_ranks(asked_for_late, 2):
        assert (
            "set model.config.output_router_logits = True before the model is prepared, and not in a call"
            in text
        )
