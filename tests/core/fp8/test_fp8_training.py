"""FP8 under sharding: scales agree, meshes agree, recomputation and accumulation change
nothing, bytes are halved.

Equality is bitwise where the numbers are the same numbers: two ranks sharded or
replicated add up two gradients, in either order; recomputation and a resumed run do the
same operations again.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.fp8 import Fp8Recipe, convert_to_fp8
from tests.core.fp8.fp8_runs import (
    LENGTH,
    RECIPE,
    VOCABULARY,
    WIDTH,
    Run,
    batches,
    build,
    runs_of,
    train,
    whole,
)
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks
from tests.logged import warnings_said


def same(ours: Run, theirs: Run) -> list[str]:
    """What differs at all."""
    differing = [
        name
        for name, value in theirs.weights.items()
        if not torch.equal(ours.weights[name], value)
    ]
    if ours.losses != theirs.losses:
        differing.append(f"losses {ours.losses} {theirs.losses}")
    if not torch.equal(torch.stack(ours.histories), torch.stack(theirs.histories)):
        differing.append("histories")
    return differing


def test_two_ranks_sharded_replicated_and_recomputing_are_bitwise_equal() -> None:
    variants = [
        {"shard_degree": 2},
        {"shard_degree": 1},
        {"shard_degree": 2, "recompute": True},
    ]
    variants += [{"shard_degree": 2, "reshard_after_forward": False}]
    for sharded, *others in run_ranks(runs_of, 2, variants):
        assert (
            sharded.losses[-1] < sharded.losses[0]
            and sharded.histories[-1].count_nonzero() == 8 * 3
        )
        assert [same(other, sharded) for other in others] == [[], [], []]
        assert sharded.kinds == {"DTensor"}


def test_weights_that_stay_gathered_in_fp8_are_bitwise_those_gathered_anew() -> None:
    kept = {"keep_between_micro_batches": "parameters"}
    variants = [
        {"shard_degree": 2, "micro_batches": 2},
        {"shard_degree": 2, "micro_batches": 2, **kept},
    ]
    for anew, once in run_ranks(runs_of, 2, variants):
        assert same(once, anew) == []
        assert once.gathered[1] < anew.gathered[1] / 3


def test_secondary_shards_of_weights_in_fp8_are_bitwise_those_gathered_anew() -> None:
    variants = [{"shard_degree": 4}, {"shard_degree": 4, "reshard_after_forward": 2}]
    for anew, parts in run_ranks(runs_of, 4, variants, ranks_per_node=2):
        assert same(parts, anew) == []
        assert parts.kinds == {"DTensor"}


def test_bfloat16_parameters_gathered_in_fp8_are_bitwise_those_that_were_cast_after_gathering() -> (
    None
):
    variants = [
        {"shard_degree": 2, "dtype": torch.bfloat16},
        {
            "shard_degree": 2,
            "dtype": torch.bfloat16,
            "fp8": Fp8Recipe(amax_history_len=4, fp8_all_gather=False),
        },
    ]
    for in_fp8, in_bf16 in run_ranks(runs_of, 2, variants):
        assert same(in_fp8, in_bf16) == []
        assert in_fp8.gathered[1] < in_bf16.gathered[1]


MESHES = [{"shard_degree": 2}, {"shard_degree": 4}]
MORE_MESHES = [
    {"shard_degree": 1},
    {"shard_degree": 4, "collectives": {"hierarchical": False}},
]


def check_meshes(meshes: list[dict], steps: int) -> None:
    alone = run_ranks(runs_of, 1, [{"shard_degree": 1}], steps=steps)[0][0]
    ranks = run_ranks(runs_of, 4, meshes, steps=steps, ranks_per_node=2)
    for number, knobs in enumerate(meshes):
        runs = [rank[number] for rank in ranks]
        assert abs(runs[0].losses[0] - alone.losses[0]) <= 1e-6 * alone.losses[0], knobs
        mean, expected = (math.fsum(run.losses) / steps for run in (runs[0], alone))
        assert abs(mean - expected) <= 5e-3 * expected, knobs
        assert all(torch.equal(run.scales, runs[0].scales) for run in runs), knobs
        assert runs[0].amax_calls == [1.0] * steps, (
            "one all-reduce for amaxes in every step"
        )


def test_meshes_agree_and_scales_are_equal_on_all_ranks() -> None:
    """First loss within 1e-6 (scales are powers of two, so a rank's own amax casts
    almost every value to the same FP8 number), the mean of 10 within 0.5 %; one process
    is the reference."""
    check_meshes(MESHES, 10)


@pytest.mark.slow
def test_more_meshes_agree_and_scales_are_equal_on_all_ranks() -> None:
    check_meshes(MORE_MESHES, 20)


def accumulating() -> list[Run]:
    return runs_of(
        [
            {"shard_degree": 2, "dtype": torch.float64, "micro_batches": n}
            for n in (4, 1)
        ],
        3,
        samples=8,
    )


def test_micro_batches_roll_the_history_once() -> None:
    """4 x 1 and 1 x 4 micro-batches. In float64 sums of FP8 products are exact, so the
    first step's amaxes, of inputs and of gradients, are the same numbers; later ones
    follow weights that differ by float64 rounding."""
    four, one = run_ranks(accumulating, 2)[0]
    assert torch.equal(four.histories[0], one.histories[0])
    torch.testing.assert_close(
        torch.stack(four.histories), torch.stack(one.histories), rtol=1e-6, atol=0
    )
    assert torch.equal(four.scales, one.scales)
    assert four.amax_calls == one.amax_calls == [1.0] * 3


def gathered_bytes() -> list[float]:
    """Bytes this rank sends in a step with weights in FP8 and in bfloat16; and the
    number of converted elements."""
    found = []
    for recipe in (Fp8Recipe(), Fp8Recipe(fp8_all_gather=False)):
        parallel = build(shard_degree=4, fp8=recipe, param_dtype="bfloat16")
        found.append(train(parallel, batches(1)).gathered[0])
        converted = sum(
            getattr(module, name).numel() for module, name, _ in parallel.fp8.sites
        )
    return [*found, converted]


def test_converted_weights_travel_in_half_the_bytes_of_bfloat16() -> None:
    """Through the two-stage gather. The runs differ by one byte per converted element,
    each of which is sent to three other ranks, in forward and again in backward."""
    ranks = run_ranks(gathered_bytes, 4, ranks_per_node=2)
    saved, converted = (
        sum(in_bf16 - in_fp8 for in_fp8, in_bf16, _ in ranks),
        ranks[0][2],
    )
    assert saved == pytest.approx(2 * 3 * converted, rel=0.02)


def resuming() -> list[list[str]]:
    """Three steps, then three more: in one go, and from what was saved in between."""
    found = []
    tokens = batches(6)
    straight = train(build(shard_degree=2, fp8=RECIPE), tokens)
    first = build(shard_degree=2, fp8=RECIPE)
    train(first, tokens[:3])
    saved, scales = whole(first.module), copy.deepcopy(first.fp8.state_dict())
    assert all(
        type(t) is torch.Tensor
        for site in scales["sites"].values()
        for t in site.values()
    )
    for degree in (2, 1):
        second = build(shard_degree=degree, fp8=RECIPE)
        load_whole(second.module, saved)
        second.fp8.load_state_dict(scales)
        resumed = train(second, tokens[3:])
        resumed.losses, resumed.histories = (
            straight.losses[:3] + resumed.losses,
            straight.histories[:3] + resumed.histories,
        )
        found.append(same(resumed, straight))
    return found


def load_whole(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                local = value.to_local()
                mine = weights[name].chunk(value.device_mesh.size())
                rank = value.device_mesh.get_local_rank()
                if local.numel():
                    local.copy_(mine[rank])
            else:
                value.copy_(weights[name])


def test_a_resumed_run_is_bitwise_the_uninterrupted_one_also_on_another_mesh() -> None:
    assert run_ranks(resuming, 2) == [[[], []]] * 2


def recalibrating() -> list[str]:
    with warnings_said() as said:
        parallel = build(shard_degree=2, fp8=RECIPE)
        train(parallel, batches(2))
        state = parallel.fp8.state_dict()
        del state["sites"]["blocks.0.qkv"]
        parallel.fp8.load_state_dict(state)
        assert parallel.fp8.state.calibrated[0] == [False, True, False]
        parallel.fp8.load_state_dict(None)
        assert parallel.fp8.state.steps == 0
        run = train(parallel, batches(2))
        assert all(math.isfinite(loss) for loss in run.losses)
        assert all(all(flags) for flags in parallel.fp8.state.calibrated)
    return said


def test_missing_state_recalibrates_with_a_warning() -> None:
    for said in run_ranks(recalibrating, 2):
        assert said == [
            "the checkpoint has no FP8 scales of blocks.0.qkv: calibrated anew in the next step",
            "the checkpoint has no FP8 scales of any module: calibrated anew in the next step",
        ]


def poisoned(micro_batches: int = 1, **knobs) -> tuple[bool, bool, list[str], bool]:
    """One rank's activations hold an infinity in the second of three steps."""
    with warnings_said() as said:
        parallel = build(fp8=RECIPE, **knobs)
        train(parallel, batches(2), micro_batches)
        before, scales = whole(parallel.module), parallel.fp8.state.scale
        poison = dist.get_rank() == 1

        def hook(module: nn.Module, args: tuple) -> tuple:
            x = args[0].clone()
            x[0, 0, 0] = math.inf
            return (x,)

        handle = (
            parallel.module.blocks[1].up.register_forward_pre_hook(hook)
            if poison
            else None
        )
        train(parallel, batches(1), micro_batches)
        unchanged = all(
            torch.equal(value, before[name])
            for name, value in whole(parallel.module).items()
        )
        index = parallel.fp8.state.names.index("blocks.1.up")
        kept = torch.equal(parallel.fp8.state.scale[index], scales[index])
        if handle is not None:
            handle.remove()
        after = train(parallel, batches(2), micro_batches)
        return unchanged, kept, said, all(math.isfinite(loss) for loss in after.losses)


@pytest.mark.parametrize(
    "case",
    [
        {"shard_degree": 1},
        pytest.param({"shard_degree": 2}, marks=pytest.mark.slow),
        {
            "shard_degree": 2,
            "micro_batches": 2,
            "keep_between_micro_batches": "gradients",
            "reshard_after_forward": True,
        },
    ],
    ids=str,
)
def test_an_infinity_on_one_rank_drops_the_step_on_all_and_says_where(
    case: dict,
) -> None:
    for unchanged, kept, said, recovered in run_ranks(poisoned, 2, **case):
        assert unchanged and kept and recovered
        assert (
            len(said) == 1
            and said[0].startswith("fp8: inf or nan in ")
            and "blocks.1.up (input)" in said[0]
        )
        assert said[0].endswith(
            "; the step is skipped and these scales stay as they were"
        )


def steps_around_a_batch_left_out(hooked: bool) -> tuple[list[bool], list[str]]:
    """Whether each step changed the weights, where a script takes none behind a batch
    with nan; and warnings."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    parallel = parallelize(model, SmpConfig(shard_degree=2, fp8=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    if hooked:
        model[0].weight.register_hook(lambda gradient: gradient)
    changed = []
    with warnings_said() as said:
        for number in range(4):
            before = model[0].weight.full_tensor()
            x = torch.randn(4, 16) * (torch.nan if number == 1 else 1.0)
            with parallel.window.accumulate(hooked):
                model(x).square().mean().backward()
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
            changed.append(not torch.equal(model[0].weight.full_tensor(), before))
    return changed, [text for text in said if "inf or nan" in text]


def test_a_batch_that_is_left_out_for_its_nan_takes_no_other_step_with_it() -> None:
    for hooked in (False, True):
        for found in run_ranks(steps_around_a_batch_left_out, 2, hooked):
            assert found == ([True, False, True, True], [])


def test_a_weight_that_became_infinite_is_named_as_one_that_skipped_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    fp8 = convert_to_fp8(model, RECIPE)
    with torch.no_grad():
        model[0].weight[0, 0] = math.inf
    fp8.step()
    assert caplog.messages == [
        "fp8: inf or nan in 0 (weight); these scales stay as they were"
    ]


def used_by_one_rank(cases: list[dict]) -> list[dict[str, torch.Tensor]]:
    """Gradients of a window of two micro-batches; rank 1 has none of the second block's
    MLP."""
    found = []
    for knobs in cases:
        parallel = build(shard_degree=2, fp8=RECIPE, param_dtype="bfloat16", **knobs)
        if dist.get_rank() == 1:
            parallel.module.blocks[1].down.register_forward_hook(
                lambda module, args, output: output.detach()
            )
        for number, tokens in enumerate(batches(2)):
            with parallel.window.accumulate(number < 1):
                parallel.module(tokens.chunk(2)[dist.get_rank()]).backward()
        found.append(
            {
                name: p.grad.full_tensor()
                for name, p in parallel.module.named_parameters()
            }
        )
    return found


def test_whole_gradients_of_weights_that_travel_in_fp8_may_be_missing_on_a_rank() -> (
    None
):
    """The same terms added up in float32, the held ones in another order."""
    for reduced, held in run_ranks(
        used_by_one_rank,
        2,
        [
            {},
            {"keep_between_micro_batches": "gradients", "reshard_after_forward": True},
        ],
    ):
        for name, value in reduced.items():
            assert value.dtype == torch.float32 and value.any(), name
            torch.testing.assert_close(
                held[name], value, rtol=1e-5, atol=1e-7, msg=name
            )


def own_scales_and_meta() -> dict:
    """Scales of each rank's own; and a model that is initialised shard by shard."""
    own = build(shard_degree=2, fp8=Fp8Recipe(amax_history_len=4, reduce_amax=False))
    run = train(own, batches(3))
    saved = own.fp8.state_dict()
    with torch.device("meta"):
        model = SmallGpt(
            vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, length=LENGTH - 1
        )
    late = parallelize(model, SmpConfig(shard_degree=2, delayed_init=True, fp8=RECIPE))
    largest = [
        getattr(module, name).full_tensor().abs().max()
        for module, name, _ in late.fp8.sites
    ]
    fits = all(
        448 / 2 < amax * scale <= 448
        for amax, scale in zip(largest, late.fp8.state.scale[:, 1], strict=True)
    )
    return {
        "calls": run.amax_calls,
        "histories": run.histories[-1],
        "saved": torch.stack(
            [site["amax_history"] for site in saved["sites"].values()]
        ),
        "fits": fits,
        "losses": train(late, batches(3)).losses,
    }


def test_own_scales_are_saved_as_their_maximum_and_delayed_weights_are_scaled_when_they_are_there() -> (
    None
):
    first, second = run_ranks(own_scales_and_meta, 2)
    assert first["calls"] == second["calls"] == [1.0] * 3
    mine, theirs = first["histories"], second["histories"]
    assert not torch.equal(mine[:, 0], theirs[:, 0]) and torch.equal(
        mine[:, 1], theirs[:, 1]
    )
    assert torch.equal(first["saved"], second["saved"])
    assert torch.equal(first["saved"][:, 0], torch.maximum(mine, theirs))
    assert (
        first["fits"]
        and second["fits"]
        and all(math.isfinite(loss) for loss in first["losses"])
    )
