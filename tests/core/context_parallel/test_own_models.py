"""Models of one's own over context ranks: what computes each token by itself has one
process's numbers, and what looks along the tokens outside of attention is refused
before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.context_parallel.replaced_attention import (
    enabled,
    part_of_mean,
    positions,
    weighted_mean,
)
from smp_core.context_parallel.trial_loss import _factors, _Logits
from smp_core.context_parallel.trial_run import _WithoutRandomness
from smp_core.entry import parallelize
from smp_core.torch_facts import TrialGenerator
from tests.core.context_parallel.own_models import (
    LENGTH,
    VOCABULARY,
    Case,
    OwnModel,
    draw,
    loss_of,
)
from tests.harness import run_ranks
from tests.logged import warnings_said

ROWS = 4
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"shard_degree": 4, "context_parallel_degree": 2},
    {
        "shard_degree": 4,
        "context_parallel_degree": 4,
        "collectives": {"context_head_groups": 2},
    },
    {
        "shard_degree": 2,
        "context_parallel_degree": 2,
        "collectives": {"context_head_groups": 2},
    },
)


def pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.2] = -100
    return tokens, targets


def alone(case: Case, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = OwnModel(case).double()
    tokens, targets = pairs(seed)
    loss = loss_of(model(tokens, targets), targets, case.step)
    loss.backward()
    gradients = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    return loss.item(), gradients


def together(case: Case, seed: int, knobs: dict[str, Any]) -> str:
    """ "exact", "wrong", or what refused the model."""
    parallel = parallelize(OwnModel(case).double(), SmpConfig(**knobs))
    assert parallel.context is not None
    mesh = parallel.mesh
    mine = tuple(tensor.chunk(mesh.data_size)[mesh.data_rank] for tensor in pairs(seed))
    split = parallel.context.split(mine)
    try:
        with enabled(split):
            tokens, targets = split.batch
            places = (positions(tokens),) if case.takes_positions else ()
            loss = part_of_mean(
                loss_of(parallel.module(tokens, targets, *places), targets, case.step)
            )
            loss.backward()
    except ValueError as error:
        return str(error)
    total = loss.detach().clone()
    dist.all_reduce(total)
    expected_loss, expected = alone(case, seed)
    errors = [abs(total.item() / dist.get_world_size() - expected_loss)]
    for name, parameter in parallel.module.named_parameters():
        if name in expected:
            gradient = parameter.grad
            whole = (
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            )
            errors.append(
                float("inf")
                if whole is None
                else (whole - expected[name]).abs().max().item()
            )
    return "exact" if max(errors) < 1e-10 else f"wrong by {max(errors):.3g}"


def outcomes(seeds: list[int]) -> list[str]:
    return [
        together(draw(seed), seed, LAYOUTS[seed // 2 % len(LAYOUTS)]) for seed in seeds
    ]


def check(seeds: list[int]) -> None:
    for results in run_ranks(outcomes, 4, seeds, ranks_per_node=2, timeout=1200):
        for seed, result in zip(seeds, results, strict=True):
            case = draw(seed)
            if case.is_right:
                assert result == "exact", f"{seed}: {case}: {result}"
            else:
                assert "context_parallel_degree=1" in result, (
                    f"{seed}: {case}: {result}"
                )


def test_random_models_are_exact_or_refused() -> None:
    """float64, losses and gradients to 1e-10, which is summation order."""
    check([0, 39, 71])


class Keeping(OwnModel):
    """Keeps two losses of its logits: one is a mean of terms for each token."""

    def forward(self, *args: Any) -> Any:
        logits = super().forward(*args)
        self.size = logits.square().mean()
        self.balance = logits.mean(1).square().mean()
        return logits


def keeping() -> list[str]:
    parallel = parallelize(
        Keeping(Case(("causal",), "logits")).double(), SmpConfig(**LAYOUTS[0])
    )
    assert parallel.context is not None
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with warnings_said() as said:
        split = parallel.context.split((tokens, tokens))
        with enabled(split):
            parallel.module(*split.batch)
    return said


def test_a_loss_that_a_module_keeps_of_means_over_tokens_is_warned_of() -> None:
    for said in run_ranks(keeping, 4, ranks_per_node=2):
        assert len(said) == 1 and "balance, which forward keeps, is" in said[0], said


class Gated(OwnModel):
    """Pools its tokens behind a gate of zeros, which training opens."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.gate = torch.nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, *args: Any) -> Any:
        logits = super().forward(*args)
        return logits + self.gate * logits.mean(1, keepdim=True)


def gated() -> tuple[str, bool]:
    parallel = parallelize(
        Gated(Case(("causal",), "logits")).double(), SmpConfig(**LAYOUTS[0])
    )
    assert parallel.context is not None
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    split = parallel.context.split((tokens, tokens))
    with pytest.raises(ValueError) as error, enabled(split):
        parallel.module(*split.batch)
    parallel.reshard()
    return str(error.value), bool(parallel.module.gate.full_tensor().any())


def test_what_stands_behind_a_gate_of_zeros_is_tried() -> None:
    for text, is_open in run_ranks(gated, 4, ranks_per_node=2):
        assert "computes something else over each rank's tokens" in text
        assert not is_open


class Skips(OwnModel):
    """Leaves out samples at random."""

    def forward(self, *args: Any) -> Any:
        logits = super().forward(*args)
        return logits * (torch.rand(len(logits), 1, 1) < 0.5)


def skipping(alike: bool) -> str:
    parallel = parallelize(
        Skips(Case(("causal",), "logits")).double(), SmpConfig(**LAYOUTS[0])
    )
    assert parallel.context is not None
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    torch.manual_seed(0 if alike else dist.get_rank())
    try:
        split = parallel.context.split((tokens, tokens))
        with enabled(split):
            parallel.module(*split.batch)
    except ValueError as error:
        return str(error)
    return "exact"


def test_draws_for_samples_need_ranks_that_are_seeded_alike() -> None:
    assert run_ranks(skipping, 4, True, ranks_per_node=2) == ["exact"] * 4
    for text in run_ranks(skipping, 4, False, ranks_per_node=2):
        assert "it draws random numbers of [2, 1, 1] for samples" in text


def by_mapping(weights: bool) -> str:
    """What becomes of a step that takes the cross entropy of a mapping's targets."""
    parallel = parallelize(
        OwnModel(Case(("causal",), "logits")).double(), SmpConfig(**LAYOUTS[0])
    )
    assert parallel.context is not None
    tokens, labels = pairs(1)
    split = parallel.context.split({"input_ids": tokens, "labels": labels})
    targets = split.batch["shift_labels"]
    try:
        with enabled(split):
            logits = parallel.module(split.batch["input_ids"], targets)
            loss = loss_of(logits, targets)
            part_of_mean(weighted_mean(loss) if weights else loss).backward()
    except ValueError as error:
        return str(error)
    return "done"


def on_other_tokens(steps: list[str]) -> list[tuple[str, list[str]]]:
    """What becomes of each step, whose loss takes other tokens than the targets or is
    another mean of them, and warnings."""
    found = []
    for step in steps:
        with warnings_said() as said:
            if step in OF_MAPPINGS:
                outcome = by_mapping(OF_MAPPINGS[step])
            else:
                case = Case(("causal",), "logits", step)
                outcome = together(case, 1, LAYOUTS[0])
            found.append((outcome, said))
    return found


OF_MAPPINGS = {"own mean of a mapping": False, "weighted mean of a mapping": True}


OTHER_STEPS = {
    "all tokens step": "tokens that have no target (padding, or a label of -100)",
    "class weights step": "divided by their sum over a rank's own tokens",
    "constant step": "targets that weigh",
    "half step": "exact",
    "masked step": "divided by their sum over a rank's own tokens",
    "masked sum step": "exact",
    "padded mean step": "tokens of a rank, while means are weighted",
    "row means step": "divided by their sum over a rank's own tokens",
    "smooth step": "exact",
    "smooth constant step": "targets that weigh",
    "squares step": "exact",
    "sum step": "the sum over a rank's targets, while losses are averaged",
    "weighted terms step": "exact",
    "own mean of a mapping": "nothing weights it: write loss = weighted_mean(loss)",
    "weighted mean of a mapping": "done",
}


def test_a_loss_that_is_no_mean_over_targets_is_right_or_refused() -> None:
    of_ranks = run_ranks(on_other_tokens, 4, list(OTHER_STEPS), ranks_per_node=2)
    for rank, told in enumerate(of_ranks):
        said = {}
        for (step, text), (found, warned) in zip(
            OTHER_STEPS.items(), told, strict=True
        ):
            assert text in found, f"{step}: {found}"
            said[step] = warned
        # What is right only sometimes is warned of.
        assert "the loss leaves out" in said["masked sum step"][0]
        assert "the loss is 0.5 of the mean" in said["half step"][0]
        assert not said["weighted terms step"] and not said["smooth step"]
        # This one is the first context rank's to say.
        unknown = [text for text in said["squares step"] if "no cross entropy" in text]
        assert len(unknown) == (rank % 2 == 0)


VALUE_LOSSES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "mean": (lambda out, y: F.mse_loss(out, y), ""),
    "absolute": (lambda out, y: F.l1_loss(out, y), ""),
    "sum of elements": (lambda out, y: (out - y).square().sum(-1).mean(), ""),
    "sum": (lambda out, y: F.mse_loss(out, y, reduction="sum"), "the sum over"),
    "absolute sum": (lambda out, y: (out - y).abs().mean(-1).sum(), "the sum over"),
    "constant": (lambda out, y: (out - y).square().sum() / 48, "warned: the loss is 0.5"),
    "huber": (lambda out, y: F.huber_loss(out, y), "warned: context_parallel_degree=2"),
}  # fmt: skip


def on_values() -> dict[str, str]:
    """What becomes of each loss of values: its difference from one process, or what is
    said."""
    x, y = torch.randn(2, 8, 4), torch.randn(2, 8, 3)
    found = {}
    for name, (loss_of_values, _) in VALUE_LOSSES.items():
        plain = torch.nn.Sequential(torch.nn.Linear(4, 3))
        model = copy.deepcopy(plain)
        parallel = parallelize(
            model, SmpConfig(shard_degree=2, context_parallel_degree=2)
        )
        loss_of_values(plain(x), y).backward()
        split = parallel.context.split((x, y))
        try:
            with enabled(split), warnings_said() as said:
                own_x, own_y = split.batch
                part_of_mean(loss_of_values(model(own_x), own_y)).backward()
        except ValueError as error:
            found[name] = str(error)
            continue
        parallel.window.close()
        off = model[0].weight.grad.full_tensor() - plain[0].weight.grad
        is_near = off.abs().max() < 1e-5 * plain[0].weight.grad.abs().max()
        found[name] = f"warned: {said[0]}" if said else "" if is_near else "differs"
    return found


def test_a_loss_of_values_that_is_no_mean_is_refused_or_warned_of() -> None:
    """Exact up to float32's rounding where nothing is said."""
    found = run_ranks(on_values, 2)[0]
    for name, (_, text) in VALUE_LOSSES.items():
        assert text in found[name] and bool(text) == bool(found[name]), found[name]


def test_targets_of_another_number_than_a_class_have_no_cross_entropy() -> None:
    """A step's own ignore_index, as nanoGPT's -1."""
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -1, 2])
    loss = F.cross_entropy(logits, targets, ignore_index=-1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert _Logits.among(logits.detach(), targets) is None
    kept = _Logits.among(logits.detach(), targets.where(targets >= 0, -100))
    assert kept is not None
    found = _factors(gradient, kept)
    torch.testing.assert_close(found, torch.full_like(logits[:3, 0], 1 / 3))


def test_numbers_of_a_trial_inside_of_another_stay_random() -> None:
    """Blocks over tensor ranks are tried inside; constants would show no difference."""
    drawn: list[tuple[int, ...]] = []
    with _WithoutRandomness(drawn):
        own = torch.randn(4, generator=TrialGenerator().manual_seed(0))
        of_model = torch.randn(4, generator=torch.Generator().manual_seed(0))
    assert len(own.unique()) == 4
    assert of_model.tolist() == [0.5] * 4 and drawn == [(4,)]


@pytest.mark.slow  # the first 200, so the drawn ones above, too
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_many_random_models_are_exact_or_refused(first: int) -> None:
    check(list(range(first, first + 20)))
