"""`smp verify` of scripts under Lightning: planted defects are found with place and
cause, correct scripts agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lightning_smp
from smp_core.verify import Report, verify_command
from smp_core.verify.runs import Server, modules_for
from tests.harness import ROOT
from tests.lightning.scripts.verified import Model, Tokens

SCRIPT = str(ROOT / "tests" / "lightning" / "scripts" / "verified.py")
# Defect -> what differs first, at which module or parameter ("": anywhere), how the
# likeliest cause begins.
PLANTED = {
    "summed_loss": ("loss", "", "wrong divisor"),
    "loss_times_ranks": ("loss", "", "wrong divisor"),
    "lost_hook": ("gradients", "head.weight", "lost hook"),
    "doubled_metric": ("metrics", "samples", "a metric that sums"),
    "own_dropout": ("activations", "blocks.1.drop", "random numbers"),
    "noise_in_the_step": (
        "activations",
        "blocks.0",
        "random numbers: the training step draws them",
    ),
    "batch_norm": ("activations", "mix.1", "BatchNorm per rank"),
    "mixed_samples": ("activations", "blocks.0.drop", "samples are mixed"),
    "own_weights_by_ranks": ("start", "blocks.0.up.weight", "initial weights"),
    "unseeded_draw": ("start", "", "initial weights"),
    "frozen_part": ("gradients", "blocks.0.", "frozen part"),
    "detached_by_ranks": ("gradients", "blocks.1.up.", "frozen part or lost hook"),
    "missing_sync": ("gradients", "", "missing sync"),
    "imaginary_gradients": ("gradients", "mix.weight", "lost hook"),
    "imaginary_weights": ("weights", "mix.weight", "the optimizer's step"),
    "imaginary_replicas": ("loss", "", "missing sync"),
    "rate_by_ranks": ("weights", "", "learning rate"),
    "half_precision_masters": ("weights", "", "half-precision masters"),
    "stepped_by_hand": (
        "buffers",
        "seen",
        "a buffer that is computed from one rank's samples",
    ),
    "seed_by_rank": ("samples", "", "data order"),
    "same_samples": ("samples", "", "data order"),
    "dropped_samples": ("samples", "", "data order"),
}
# Defects that only replicas show: on two ranks that hold one copy there are none.
OF_REPLICAS = ("missing_sync", "imaginary_replicas")
# Kind of script -> layout. Those of two ranks and float64, unless the script says what
# it computes in.
CORRECT = {
    "plain": "shard_degree=2 ranks=4",
    "accumulated": "shard_degree=2 ranks=2",
    "manual": "shard_degree=2 ranks=2",
    "synced_norms": "shard_degree=2 ranks=2",
    "stream": "shard_degree=2 ranks=2",
    "mixed": "shard_degree=2 ranks=2",
    "measured": "shard_degree=2 ranks=2",
    "complex": "shard_degree=2 ranks=4",
    "augmented": "shard_degree=2 ranks=2",
}
GROUPED = "how samples are grouped"


_SERVERS: list[Server] = []


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    """One process imports torch and Lightning for all cases."""
    with Server(modules_for([SCRIPT])) as server:
        _SERVERS.append(server)
        yield
        _SERVERS.clear()


def verified(
    *arguments: str,
    layout: str = "shard_degree=2 ranks=2",
    float64: bool = False,
    steps: int = 2,
) -> Report:
    return verify_command(
        [SCRIPT, *arguments], [layout], steps=steps, float64=float64, server=_SERVERS[0]
    )


def require_found(report: Report, what: str, where: str, cause: str) -> None:
    (found,) = report.comparisons
    assert found.part is not None, str(report)
    causes = [each for each in found.causes if not each.startswith(GROUPED)]
    assert found.part.what == what and found.part.where.startswith(where), str(report)
    assert causes and causes[0].startswith(cause), str(report)


def test_a_lost_hook_is_found_at_its_parameter() -> None:
    require_found(verified("--plant", "lost_hook"), *PLANTED["lost_hook"])


def test_a_trainer_without_torch_smp_is_refused_with_what_to_write() -> None:
    (found,) = verified("--strategy", "ddp").comparisons
    assert found.part is not None and found.part.what == "run"
    assert "Trainer(strategy='ddp'), which trains without torch-smp" in found.part.words
    assert 'Trainer(strategy="smp_sharded", ...)' in found.part.words


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_defects_are_found(name: str) -> None:
    layout = (
        "shard_degree=2 ranks=4" if name in OF_REPLICAS else "shard_degree=2 ranks=2"
    )
    require_found(verified("--plant", name, layout=layout, steps=3), *PLANTED[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CORRECT)
def test_correct_scripts_agree(kind: str) -> None:
    report = verified(
        "--kind", kind, layout=CORRECT[kind], float64=kind != "mixed", steps=3
    )
    assert report.agrees, str(report)


@pytest.mark.slow
def test_the_scripts_own_layout_is_shrunk() -> None:
    """Eight GPUs and shard_degree=8 are asked for: two CPU ranks that hold one copy."""
    report = verify_command([SCRIPT, "--strategy", "instance"], steps=2, float64=True)
    assert report.agrees, str(report)
    assert report.comparisons[0].words == "2 ranks: shard_degree=2"


@pytest.mark.slow
def test_a_module_and_its_data_are_verified_from_python() -> None:
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
    report = lightning_smp.verify(
        Model(), loader, ["shard_degree=2 ranks=2"], steps=2, float64=True
    )
    assert report.agrees, str(report)
