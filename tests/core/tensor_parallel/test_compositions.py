"""Tensor ranks together with everything else that is done to a model: the numbers of
one process."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters  # the compiler's only count of its graphs

from smp_core.config import SmpConfig
from smp_core.config.fp8_recipe import Fp8Recipe
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.fp8.scaling import INPUT
from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
from tests.core.context_parallel import model_cases as sequences
from tests.core.tensor_parallel.model_cases import (
    Case,
    Training,
    Wide,
    alone,
    assert_like_one_process,
    batches,
    build,
    differences,
    full,
    loss_of,
    together,
)
from tests.harness import run_ranks
from tests.older_transformers import needs_buffers_filled

WORLD, ON_HOST, ALL_ON_HOST = (
    ("optimizer_shard", "world"),
    ("state_offload", "optimizer"),
    ("state_offload", "all"),
)

CHUNKED = ("chunked_cross_entropy", 7)

# Optimizer states over the world or on the host, parameters or inputs of blocks on the
# host, losses in chunks. The first of each belongs to the normal run.
OVER_REPLICAS = [
    Case("llama", micro_batches=3, knobs=(WORLD, CHUNKED)),
    Case("gpt2", knobs=(WORLD, ON_HOST)),
]
INPUTS_ON_HOST = (
    "activations",
    {"checkpoint": "full", "offload": True, "loading_horizon": 1},
)
IN_ONE_GROUP = [
    Case("llama", knobs=(ALL_ON_HOST, INPUTS_ON_HOST)),
    Case("gpt2", micro_batches=3, knobs=(ON_HOST, CHUNKED)),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_states_elsewhere_and_losses_in_chunks_train_like_one_process(
    number: int,
) -> None:
    """float64, 1e-12: see test_equivalence."""
    assert_like_one_process([OVER_REPLICAS[number]], 4)
    assert_like_one_process([IN_ONE_GROUP[number]], 2)


COMPILED = ("compile", {"backend": "aot_eager"})


def compiled(cases: list[Case]) -> list[tuple[Training, int]]:
    """Each training, and how many graphs the compiler made."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        counters.clear()
        found.append((together(case), counters["stats"]["unique_graphs"]))
    return found


def assert_compiled_like_one_process(cases: list[Case]) -> None:
    for trained in run_ranks(compiled, 2, cases, timeout=900):
        for case, (seen, graphs) in zip(cases, trained, strict=True):
            assert differences(seen, alone(case.kind, case.micro_batches)) == [], case
            assert graphs > 0, case


# In the normal run: blocks with experts, in
# tests/core/expert_parallel/test_equivalence.py.
@pytest.mark.slow
def test_compiled_blocks_train_like_one_process() -> None:
    assert_compiled_like_one_process([Case("plain", knobs=(COMPILED,))])


@pytest.mark.slow
def test_compiled_blocks_of_more_models_train_like_one_process() -> None:
    kinds = ["llama", "gpt2", "gemma2", "bloom"]
    cases = [
        Case(kind, sequence=split, knobs=(COMPILED,))
        for kind in kinds
        for split in (True, False)
    ]
    assert_compiled_like_one_process(
        [*cases, Case("llama", micro_batches=3, knobs=(COMPILED,))]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3", "gpt2", "gemma2", "mixtral"])
def test_states_elsewhere_and_losses_in_chunks_on_every_layout(kind: str) -> None:
    elsewhere: list[Any] = [
        (WORLD,),
        (ON_HOST,),
        (ALL_ON_HOST,),
        (WORLD, ON_HOST),
        (CHUNKED,),
        (CHUNKED, WORLD),
    ]
    cases = [
        Case(kind, 2, shard, sequence, micro_batches, knobs)
        for knobs, shard, (sequence, micro_batches) in itertools.product(
            elsewhere, (1, 2), ((True, 1), (False, 3), (True, 3))
        )
    ]
    assert_like_one_process(cases, 4)


def errors(runs: list[sequences.Run]) -> list[tuple[Any, float, float, float]]:
    with Wide():
        return sequences.errors(runs)


def assert_like_whole_sequences(runs: list[sequences.Run]) -> None:
    """1e-12, for losses of about 4 and gradients of up to 0.1 in float64."""
    for found in run_ranks(errors, 4, runs, timeout=600):
        for run, loss, gradient, largest in found:
            assert loss < 1e-12 and gradient < 1e-12 and largest > 1e-3, run


LLAMA = [sequences.Run("llama", 2, 2, tensor=2)]
# Norms behind RoBERTa's sums make much of small differences.
OTHERS = [
    sequences.Run("gpt2", 2, 2, "left", tensor=2),
    sequences.Run("roberta", 2, 2, tensor=2),
]


@pytest.mark.parametrize(
    "runs",
    [pytest.param(LLAMA, marks=pytest.mark.slow), OTHERS],
    ids=["llama", "others"],
)
def test_sequences_and_layers_over_ranks_are_those_of_one_process(
    runs: list[sequences.Run],
) -> None:
    assert_like_whole_sequences(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_neox", "mistral", "qwen3", "gemma3", "olmo2", "phi3", "starcoder2"]
)
def test_sequences_and_layers_of_more_models(name: str) -> None:
    kinds = itertools.product(("plain", "right", "packed"), (False, True))
    assert_like_whole_sequences(
        [sequences.Run(name, 2, 2, rows, again, tensor=2) for rows, again in kinds]
    )


def losses_of_models(knobs: dict[str, Any]) -> tuple[float, float]:
    """The loss that the model computes of its part of the sequences, and of whole
    ones."""
    with Wide():
        batch = sequences.whole_batch(sequences.Run("llama", 2, 2))
        parallel = parallelize(sequences.build("llama"), SmpConfig(**knobs))
        assert parallel.context is not None
        split = parallel.context.split(batch)
        with enabled(split):
            loss = parallel.module(**split.batch, use_cache=False).loss
        dist.all_reduce(loss := loss.detach())
        whole = sequences.build("llama")(**batch, use_cache=False).loss
    return loss.item() / dist.get_world_size(), whole.item()


def test_the_models_own_loss_of_a_part_of_a_sequence_and_of_the_vocabulary() -> None:
    # 47 words cannot be split over two ranks.
    layout = {
        "shard_degree": 2,
        "context_parallel_degree": 2,
        "tensor_parallel_degree": 2,
    }
    for ours, whole in run_ranks(losses_of_models, 4, layout):
        assert abs(ours - whole) < 1e-12


RECIPE = Fp8Recipe(amax_history_len=4)
WORDS = 64


def llama(on_meta: bool = False) -> transformers.LlamaForCausalLM:
    """All sizes are multiples of 16, also those of halves of layers."""
    torch.manual_seed(dist.get_rank())
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        use_cache=False,
    )
    with torch.device("meta" if on_meta else "cpu"):
        return transformers.LlamaForCausalLM(config)


@dataclass
class Trained:
    first: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)
    histories: list[torch.Tensor] = field(default_factory=list)
    scales: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def steps_of(parallel: ParallelModel, steps: int) -> Trained:
    model, mesh = parallel.module, parallel.mesh
    trained = Trained(whole(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    data = torch.randint(
        WORDS, (steps, 4, 8), generator=torch.Generator().manual_seed(7)
    )
    for batch in data:
        own = batch.chunk(mesh.data_size)[mesh.data_rank]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        trained.losses.append(loss.item() / dist.get_world_size())
        if parallel.fp8 is not None:
            trained.histories.append(parallel.fp8.state.history[0].clone())
            trained.scales.append(parallel.fp8.state.scale.clone())
    trained.weights = whole(model)
    return trained


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def trainings(layout: dict[str, Any], variants: list[dict[str, Any]]) -> list[Trained]:
    found = []
    for variant in variants:
        knobs = {**layout, **variant}
        on_meta = bool(knobs.get("delayed_init"))
        found.append(steps_of(parallelize(llama(on_meta), SmpConfig(**knobs)), 4))
    return found


def check_fp8_and_delayed(
    world: int, layout: dict[str, Any], variants: list[dict[str, Any]]
) -> None:
    """First weights of a delayed initialisation bit for bit; losses within 1e-6, which
    is a few roundings of float32.

    In FP8 a rank sees some of a row layer's inputs and of a column layer's gradients:
    without the other ranks' amax its scales would be others. Inputs and weights have
    the amaxes of one process; gradients where one batch is not divided.
    """
    (alone,) = run_ranks(trainings, 1, {"shard_degree": 1}, variants)
    ranks = run_ranks(trainings, world, layout, variants)
    for number, (variant, expected) in enumerate(zip(variants, alone, strict=True)):
        for seen in (rank[number] for rank in ranks):
            if "delayed_init" in variant:
                assert all(
                    torch.equal(seen.first[name], value)
                    for name, value in expected.first.items()
                ), variant
                torch.testing.assert_close(
                    seen.losses, expected.losses, atol=1e-6, rtol=0
                )
            if "fp8" in variant:
                one_batch = world == layout["tensor_parallel_degree"]
                roles = slice(0, 3 if one_batch else 2)
                for ours, theirs in zip(
                    seen.histories, expected.histories, strict=True
                ):
                    torch.testing.assert_close(
                        ours[..., roles], theirs[..., roles], rtol=1e-5, atol=0
                    )
                assert all(map(torch.equal, seen.scales, ranks[0][number].scales)), (
                    variant
                )
            torch.testing.assert_close(seen.losses, expected.losses, atol=2e-6, rtol=0)


DELAYED, FP8 = {"delayed_init": True}, {"fp8": RECIPE}


@needs_buffers_filled
@pytest.mark.parametrize(
    ("world", "shard", "which"),
    [pytest.param(4, 2, DELAYED, marks=pytest.mark.slow), (2, 1, FP8)],
    ids=["delayed", "FP8"],
)
def test_delayed_initialisation_and_fp8_have_the_numbers_of_one_process(
    world: int, shard: int, which: Any
) -> None:
    check_fp8_and_delayed(
        world, {"shard_degree": shard, "tensor_parallel_degree": 2}, [which]
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2), (1, 2)], ids=str)
@needs_buffers_filled
def test_delayed_initialisation_and_fp8_on_more_layouts(
    layout: tuple[int, int],
) -> None:
    in_bytes = Fp8Recipe(amax_history_len=4, fp8_all_gather=False)
    variants = [
        DELAYED,
        FP8,
        {**DELAYED, **FP8},
        {"fp8": in_bytes},
        {**FP8, **dict([WORLD])},
    ]
    check_fp8_and_delayed(
        4, {"shard_degree": layout[0], "tensor_parallel_degree": layout[1]}, variants
    )


def poisoned() -> bool:
    """One tensor rank alone sees an infinity, in a product whose output does not show
    it to the others."""
    parallel = parallelize(
        llama(), SmpConfig(shard_degree=1, tensor_parallel_degree=2, fp8=RECIPE)
    )
    assert parallel.fp8 is not None
    before, state = steps_of(parallel, 1).weights, parallel.fp8.state

    def hook(*_: Any) -> None:
        if dist.get_rank() == 1:
            state.record(0, INPUT, torch.tensor(math.inf))

    handle = parallel.module.register_forward_pre_hook(hook)
    after = steps_of(parallel, 1).weights
    handle.remove()
    trained = steps_of(parallel, 1).weights
    assert not all(torch.equal(trained[name], value) for name, value in before.items())
    return all(torch.equal(after[name], value) for name, value in before.items())


def test_an_infinity_that_one_rank_sees_drops_the_step_on_all() -> None:
    assert run_ranks(poisoned, 2) == [True, True]


def scaled(
    spoilt: str,
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    parallel = Case("llama").parallel()
    model, mesh = parallel.module, parallel.mesh
    whole_first = sorted(model.parameters(), key=lambda p: p.device_mesh.ndim)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(whole_first, lr=0.1)
    parallel.prepare_optimizer(optimizer)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    before, words = whole(model), batches(1)[0, 0]
    with Wide():
        scaler.scale(loss_of(model, words)).backward()
    if spoilt and mesh.rank == 1:
        model.get_parameter(spoilt).grad.to_local()[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), before, whole(model)


def test_a_non_finite_gradient_of_one_tensor_rank_skips_the_step_on_all() -> None:
    for scale, before, after in run_ranks(
        scaled, 2, "model.layers.0.self_attn.q_proj.weight"
    ):
        assert scale == 512 and all(
            torch.equal(after[name], value) for name, value in before.items()
        )


def test_scaled_gradients_are_unscaled_once() -> None:
    """Split weights and whole ones lie on other meshes. float64, 1e-12."""
    model = build("llama")
    with Wide():
        loss_of(model, batches(1)[0, 0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for scale, _, after in run_ranks(scaled, 2, ""):
        assert scale == 1024
        assert all(
            (after[name] - value).abs().max() < 1e-12
            for name, value in model.state_dict().items()
        )


def half_precision(layout: dict[str, Any]) -> Trained:
    return steps_of(parallelize(llama(), SmpConfig(param_dtype="float16", **layout)), 3)


def test_float16_parameters_compute_like_those_of_one_process() -> None:
    """Losses of about 4 within 2e-3, a rounding of float16; one partition group of two
    ranks is the reference."""
    (expected, *_) = run_ranks(half_precision, 2, {"shard_degree": 2})
    for seen in run_ranks(
        half_precision, 2, {"shard_degree": 1, "tensor_parallel_degree": 2}
    ):
        torch.testing.assert_close(seen.losses, expected.losses, atol=2e-3, rtol=0)
