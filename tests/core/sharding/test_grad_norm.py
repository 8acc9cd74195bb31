"""Norm and clipping of gradients that are spread over ranks, mixed with plain ones, as
one process has them.

float64 to 1e-12, relative: sums of a few hundred terms in another order.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.engine.parallel_model import ParallelModel
from smp_core.sharding.optimizer.grad_norm import (
    NonfiniteGradNormError,
    clip_grad_value_,
    grad_norm,
)
from tests.core.scenarios import Gradients, gradients, parallel_model
from tests.core.sharding import prepared_runs
from tests.core.zoo import Mlp
from tests.harness import run_ranks
from tests.logged import warnings_said

NORMS = [1.0, 2.0, 3.0, math.inf]


class Mixed(nn.Module):
    """Sharded parameters (3 rows: fewer than four ranks), a 0-d one, one tied across
    units, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.narrow, self.unused = nn.Linear(6, 3), nn.Linear(6, 2)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.blocks[1].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) * self.gain).square().sum() + self.narrow(x).sum()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(
        4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )


def alone(world: int) -> Mixed:
    torch.manual_seed(0)
    model = Mixed().double()
    (sum(model(batch(rank)) for rank in range(world)) / world).backward()
    return model


def on_ranks(**knobs) -> ParallelModel:
    torch.manual_seed(0)
    parallel = parallel_model(Mixed().double(), **knobs)
    parallel.module(batch(parallel.mesh.data_rank)).backward()
    return parallel


def norms_on_ranks(**knobs) -> list[tuple[float, float]]:
    """Norms of all gradients, and of one block's only."""
    parallel = on_ranks(**knobs)
    found = []
    for norm_type in NORMS:
        whole = parallel.grad_norm(norm_type)
        part = parallel.grad_norm(
            norm_type, parameters=parallel.module.blocks[0].parameters()
        )
        for norm in (whole, part):
            assert type(norm) is torch.Tensor and not isinstance(norm, DTensor)
            assert norm.ndim == 0 and norm.dtype == torch.float64
        found.append((whole.item(), part.item()))
    # Numbers that are read from memory are the whole tensor's, too.
    weight = next(p for p in parallel.module.parameters() if isinstance(p, DTensor))
    assert weight.tolist() == weight.full_tensor().tolist()
    return found


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_norms_are_those_of_one_process_and_equal_on_all_ranks(degree: int) -> None:
    model = alone(4)
    found = run_ranks(norms_on_ranks, 4, shard_degree=degree, ranks_per_node=2)
    assert all(other == found[0] for other in found), "equal to the last bit"
    for norm_type, (whole, part) in zip(NORMS, found[0], strict=True):
        for seen, parameters in (
            (whole, model.parameters()),
            (part, model.blocks[0].parameters()),
        ):
            expected = torch.nn.utils.get_total_norm(
                [p.grad for p in parameters if p.grad is not None], norm_type
            )
            assert seen == pytest.approx(expected.item(), rel=1e-12), norm_type


def clipped_on_ranks(
    max_norm: float, norm_type: float, **knobs
) -> tuple[float, Gradients]:
    parallel = on_ranks(**knobs)
    norm = parallel.clip_grad_norm_(max_norm, norm_type)
    return norm.item(), gradients(parallel.module)


def assert_gradients(seen: Gradients, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        mine = seen[name]
        if parameter.grad is None:
            assert mine is None, name
        else:
            assert mine is not None, name
            assert torch.allclose(mine, parameter.grad, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize(
    "norm_type", [2.0, pytest.param(math.inf, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("max_norm", "clips"), [(0.5, True), (1e6, False)])
def test_clipping_by_norm_is_that_of_one_process(
    norm_type: float, max_norm: float, clips: bool
) -> None:
    model, untouched = alone(4), alone(4)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert (expected.item() > max_norm) == clips
    for norm, seen in run_ranks(
        clipped_on_ranks, 4, max_norm, norm_type, shard_degree=4, ranks_per_node=2
    ):
        assert norm == pytest.approx(expected.item(), rel=1e-12)
        assert_gradients(seen, model)
        if not clips:
            assert_gradients(seen, untouched)


def clipped_by_value_on_ranks(**knobs) -> Gradients:
    parallel = on_ranks(**knobs)
    clip_grad_value_(parallel.module.parameters(), 0.3)
    return gradients(parallel.module)


def test_clipping_by_value_is_that_of_one_process() -> None:
    model = alone(4)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
    for degree in (2, 4):
        for seen in run_ranks(
            clipped_by_value_on_ranks, 4, shard_degree=degree, ranks_per_node=2
        ):
            assert_gradients(seen, model)


def clip_closes(**knobs) -> Gradients:
    torch.manual_seed(0)
    parallel = parallel_model(Mixed().double(), **knobs)
    with parallel.window.accumulate():
        parallel.module(batch(parallel.mesh.data_rank)).backward()
    assert parallel.window.is_open
    parallel.clip_grad_norm_(0.5)
    assert not parallel.window.is_open
    return gradients(parallel.module)


def test_clipping_closes_an_open_window_first() -> None:
    model = alone(4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for seen in run_ranks(clip_closes, 4, shard_degree=2, ranks_per_node=2):
        assert_gradients(seen, model)


def no_gradients(**knobs) -> list[float]:
    parallel = parallel_model(Mixed(), **knobs)
    return [parallel.grad_norm(norm_type).item() for norm_type in NORMS]


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert run_ranks(no_gradients, 2, shard_degree=2) == [[0.0] * len(NORMS)] * 2


SKIPPED = "skipped (on_nonfinite_grad_norm='skip')"


def meet_nonfinite(
    policy: str, norm_type: float, bad: float, where: int, **knobs
) -> dict[str, Any]:
    """One bad element, in row ``where`` of one parameter: only one rank of each
    partition group holds it."""
    torch.manual_seed(0)
    parallel = parallel_model(Mixed().double(), on_nonfinite_grad_norm=policy, **knobs)
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
    parallel.module(batch(parallel.mesh.data_rank)).backward()
    weight = parallel.module.blocks[0].down.bias
    gradient = weight.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        rows = -(-6 // parallel.mesh.shard_degree)
        if where // rows == parallel.mesh.shard_rank:
            gradient.to_local()[where % rows] = bad
    else:
        gradient[where] = bad

    def weights() -> list[torch.Tensor]:
        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
            for p in parallel.module.parameters()
        ]

    before = weights()
    with warnings_said() as said:
        try:
            norm, raised = parallel.clip_grad_norm_(1.0, norm_type).item(), ""
        except NonfiniteGradNormError as error:
            norm, raised = math.nan, str(error)
    left = [
        name
        for name, parameter in parallel.module.named_parameters()
        if parameter.grad is not None
    ]
    optimizer.step()
    changed = any(
        not torch.equal(old, new) for old, new in zip(before, weights(), strict=True)
    )
    flags = torch.tensor(float(changed))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return {
        "norm": norm,
        "raised": raised,
        "left": left,
        "changed": bool(flags),
        "said": said,
    }


@pytest.mark.parametrize(
    "bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "norm_type", [2.0, pytest.param(math.inf, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
        4,
    ],
)
def test_all_ranks_skip_a_nonfinite_step_and_rank_0_says_so(
    degree: int, norm_type: float, bad: float
) -> None:
    for where in (0, 5):
        knobs = {"ranks_per_node": 2, "shard_degree": degree}
        for rank, seen in enumerate(
            run_ranks(meet_nonfinite, 4, "skip", norm_type, bad, where, **knobs)
        ):
            assert seen["said"] == (
                [] if rank else [f"the gradient norm is {bad}: the step is {SKIPPED}"]
            )
            assert seen["left"] == []
            assert not seen["changed"]
            assert (
                math.isnan(seen["norm"])
                if math.isnan(bad)
                else seen["norm"] == math.inf
            )


@pytest.mark.parametrize(
    "norm_type", [2.0, pytest.param(math.inf, marks=pytest.mark.slow)]
)
def test_all_ranks_raise_on_a_nonfinite_norm(norm_type: float) -> None:
    for seen in run_ranks(
        meet_nonfinite,
        4,
        "raise",
        norm_type,
        math.nan,
        3,
        ranks_per_node=2,
        shard_degree=4,
    ):
        assert "on_nonfinite_grad_norm='skip'" in seen["raised"]


def test_ignored_nonfinite_norms_go_through_as_in_torch() -> None:
    for seen in run_ranks(
        meet_nonfinite, 4, "ignore", 2.0, math.nan, 3, ranks_per_node=2, shard_degree=4
    ):
        assert math.isnan(seen["norm"])
        assert seen["changed"]


def norm_of_half(value: float) -> tuple[float, str]:
    parallel = parallel_model(nn.Linear(64, 64, bias=False).bfloat16(), shard_degree=2)
    parallel.module(torch.full((1, 64), value, dtype=torch.bfloat16)).sum().backward()
    norm = parallel.grad_norm()
    return norm.item(), str(norm.dtype)


def test_norms_of_bfloat16_gradients_are_float32() -> None:
    """64 x 64 gradients of 2: the sum of squares 16384 grows by 4, which bfloat16 could
    not add beyond 1024."""
    assert run_ranks(norm_of_half, 2, 2.0) == [(128.0, "torch.float32")] * 2


def test_an_impossible_norm_is_refused() -> None:
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            grad_norm([], masters_over=None, norm_type=norm_type)  # type: ignore[arg-type]


def clipped_by_torch(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    found = []
    for norm_type in (2.0, 1.0, math.inf):
        model.zero_grad()
        for x in batches:
            (model(x) / len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), 0.01, norm_type=norm_type, error_if_nonfinite=True
        )
        # The sum of gradients shows what became of them.
        sums = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        found += [float(norm), *sums]
    return found


def torchs_own_clipping() -> list[float]:
    parallel = prepared_runs.sharded({"shard_degree": 2})
    return clipped_by_torch(parallel.module, [prepared_runs.batch(0, dist.get_rank())])


def test_torchs_clipping_takes_matrices_that_are_replicated() -> None:
    """A matrix that is tied across units beside sharded ones."""
    expected = clipped_by_torch(
        prepared_runs.net(), [prepared_runs.batch(0, rank) for rank in range(2)]
    )
    for found in run_ranks(torchs_own_clipping, 2):
        assert found == pytest.approx(expected, abs=1e-12)


def largest(model: nn.Module) -> list[float]:
    """Of parameters, some of which have fewer rows than there are ranks."""
    found = []
    kinds = [torch.max, torch.amin]
    # Of sharded tensors torch 2.11 has no median, and on gloo no argmax.
    if torch.__version__ >= (2, 12):
        kinds += [torch.argmax, torch.median]
    for parameter in model.parameters():
        for of in kinds:
            found.append(float(of(parameter.detach())))
        found.append(float(parameter.detach().norm(math.inf)))
        found.append(float(torch.linalg.vector_norm(parameter.detach(), math.inf)))
        found.append(float(parameter.detach().abs().max()))
    return found


def of_few_rows() -> list[float]:
    return largest(prepared_runs.sharded({"shard_degree": 2}).module)


def test_the_largest_element_is_found_where_ranks_have_no_rows() -> None:
    expected = largest(prepared_runs.net())
    for found in run_ranks(of_few_rows, 2):
        assert found == pytest.approx(expected, abs=1e-12)
