"""`smp verify` of loops under Accelerate and of Trainers: planted defects are found,
correct scripts agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smp_core.verify import Report, verify_command
from smp_core.verify.runs import Server, modules_for
from tests.harness import ROOT

SCRIPT = str(ROOT / "tests" / "accelerate" / "scripts" / "verified.py")
CORRECT = [
    ("loop", "shard_degree=2 ranks=4"),
    ("loop", "context_parallel_degree=2 ranks=2"),
    ("loop", "tensor_parallel_degree=2 ranks=2"),
    ("trainer", "shard_degree=2 ranks=2"),
    ("masked", "context_parallel_degree=2 ranks=2"),
    ("trainer", "pipeline_parallel_degree=2 shard_degree=1 ranks=2"),
    ("padded", "shard_degree=2 ranks=2"),
]


_SERVERS: list[Server] = []


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    """One process imports torch, Accelerate and Transformers for all cases."""
    with Server(modules_for([SCRIPT])) as server:
        _SERVERS.append(server)
        yield
        _SERVERS.clear()


def verified(*arguments: str, layout: str, steps: int = 2) -> Report:
    return verify_command(
        [SCRIPT, *arguments], [layout], steps=steps, float64=True, server=_SERVERS[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CORRECT)
def test_correct_scripts_agree(kind: str, layout: str) -> None:
    report = verified("--kind", kind, layout=layout, steps=3)
    assert report.agrees, str(report)


@pytest.mark.slow
def test_first_labels_count_alike_with_context_ranks() -> None:
    """Trainer counts GPT-2's first labels as targets, which they are not: the loss was
    16/15 of one process's."""
    assert verified(
        "--kind", "trainer", layout="context_parallel_degree=2 ranks=2"
    ).agrees


@pytest.mark.slow  # in the normal run: tests/lightning/test_verify.py
def test_an_unmodified_loop_agrees() -> None:
    """A plain Accelerator, with accumulation, clipping, shuffling and a schedule in
    batches."""
    report = verified("--kind", "loop", layout="shard_degree=2 ranks=2")
    assert report.agrees, str(report)


@pytest.mark.slow
def test_a_metric_that_is_summed_twice_is_found() -> None:
    (found,) = verified(
        "--plant", "doubled_metric", layout="shard_degree=2 ranks=2", steps=3
    ).comparisons
    assert found.part is not None and (found.part.what, found.part.where) == (
        "metrics",
        "seen",
    )
    assert found.causes[0].startswith("a metric that sums")


@pytest.mark.slow
def test_a_loader_that_was_not_prepared_is_found() -> None:
    (found,) = verified(
        "--plant", "unprepared_loader", layout="shard_degree=2 ranks=2"
    ).comparisons
    assert (
        found.part is not None and "a loader that was not prepared" in found.part.words
    )


@pytest.mark.slow
def test_positions_of_the_local_length_are_found() -> None:
    (found,) = verified(
        "--plant", "local_positions", layout="context_parallel_degree=2 ranks=2"
    ).comparisons
    assert found.part is not None
    assert "position" in " ".join([found.part.words, *found.causes])


@pytest.mark.slow
def test_a_loop_that_counts_its_micro_batches_is_refused_where_batches_cannot_be_joined() -> (
    None
):
    """Taken one after another they would end its step in the middle of what the ranks'
    step was."""
    with pytest.raises(
        ValueError, match=r"steps behind every 2 batches .*with accelerator.accumulate"
    ):
        verified("--kind", "counted_by_hand", layout="shard_degree=2 ranks=2")
