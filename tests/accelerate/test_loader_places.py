"""Loaders that keep their place (``use_stateful_dataloader=True``) go on where training
was: no sample is seen twice or never, with workers, at another number of ranks, while
one batch is read ahead; or loading is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader

from accelerate_smp.loader_places import pairs, restore, state_of
from smp_core.checkpoint import CheckpointError
from tests.accelerate.running import fresh_accelerator
from tests.harness import run_ranks

SAMPLES, READ = 26, 2


def keeping(batch_size: int, ranks: int, place: dict[str, Any]) -> Any:
    """A likeness of a prepared loader whose base is torchdata's."""
    batches = BatchSamplerShard(
        BatchSampler(range(SAMPLES), batch_size, drop_last=False), ranks, 0
    )
    loader = SimpleNamespace(
        use_stateful_dataloader=True,
        dataset=list(range(SAMPLES)),
        sampler=batches.batch_sampler.sampler,  # type: ignore[attr-defined]
        batch_sampler=batches,
        went_to=[],
        dl_state_dict=place,
    )
    loader.state_dict = lambda: loader.dl_state_dict
    loader.load_state_dict = loader.went_to.append
    return loader


def test_a_place_is_of_batches_of_one_size() -> None:
    """Two ranks' third batch of 2 samples is the third of 4 of one process. The place
    of an epoch's end, and of one that has not begun, is so in batches of any size."""
    saved = state_of(keeping(2, 2, {"_num_yielded": 3}))
    alike = keeping(4, 1, {})
    restore(alike, saved, "there")
    assert alike.went_to == [{"_num_yielded": 3}]
    # Saved again before a batch, it is the same.
    assert state_of(alike) == saved
    other = keeping(2, 1, {})
    with pytest.raises(CheckpointError, match="batches of 4 samples"):
        restore(other, saved, "there")
    for place in ({}, {"_num_yielded": 7, "_iterator_finished": True}):
        restore(other, state_of(keeping(2, 2, place)), "there")
        assert other.went_to.pop() == {}


def test_a_place_that_the_loader_does_not_keep_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(range(SAMPLES), batch_size=2)  # type: ignore[arg-type]
    saved = state_of(keeping(2, 2, {"_num_yielded": 3}))
    with caplog.at_level("WARNING", "smp"):
        restore(loader, saved, "there")
    assert "skip_first_batches" in caplog.text


def test_places_are_told_apart_by_what_is_read() -> None:
    """One that was prepared before, or is new, takes no other's place; of equal ones
    the first takes the first."""
    held_out = DataLoader(range(8))  # type: ignore[arg-type]
    first, second = keeping(2, 2, {"_num_yielded": 3}), keeping(2, 2, {})
    saved = [state_of(each) for each in (first, second, held_out)]
    new = DataLoader(range(3))  # type: ignore[arg-type]
    found = list(pairs([held_out, new, first, second], saved))
    assert found == [(held_out, saved[2]), (first, saved[0]), (second, saved[1])]
    # Folders of before say nothing of it.
    for state in saved:
        del state["of"]
    found = list(pairs([first, second, held_out], saved))
    assert [place for _, place in found] == saved


def order() -> list[int]:
    """The samples of this rank, whose random numbers are its own."""
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = fresh_accelerator(shard_degree=2, dataloader_config=settings)
    torch.manual_seed(5 + accelerator.process_index)
    loader = accelerator.prepare(
        DataLoader(list(range(SAMPLES)), batch_size=1, shuffle=True)
    )
    return [sample for batch in loader for sample in batch.tolist()]


def test_a_seeded_order_is_that_of_rank_0() -> None:
    """Accelerate takes the seed of each rank's own generator."""
    seen = run_ranks(order, 2)
    assert sorted(seen[0] + seen[1]) == list(range(SAMPLES))


def read(folder: str, workers: int, joins: bool, goes_on: bool) -> list[list[int]]:
    """The samples of each batch of a rank: the first ones, or what is left."""
    settings = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True
    )
    accelerator = fresh_accelerator(shard_degree=2, dataloader_config=settings)
    torch.manual_seed(5 + accelerator.process_index)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(
        list(range(SAMPLES)), batch_size=2, shuffle=True, num_workers=workers
    )
    model, loader = accelerator.prepare(model, loader)
    if goes_on:
        accelerator.load_state(folder)
    seen = []
    with accelerator.join_uneven_inputs([model], even_batches=not joins):
        for number, batch in enumerate(loader, start=1):
            if accelerator.batch_weight:
                seen.append(batch.tolist())
            accelerator.backward(model(batch[:, None].float()).sum())
            if number == READ and not goes_on:
                break
    if not goes_on:
        accelerator.save_state(folder)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "joins"), [(1, False), (0, True)])
def test_no_sample_is_lost_where_training_goes_on(
    tmp_path: Path, workers: int, joins: bool
) -> None:
    """With workers an epoch began while the loader was prepared, in another order than
    the seeded one; a joined loader is read ahead of training."""
    pytest.importorskip("torchdata")
    folder = str(tmp_path / "saved")
    seen: list[int] = []
    for goes_on in (False, True):
        for rank in run_ranks(read, 2, folder, workers, joins, goes_on):
            seen += [sample for batch in rank for sample in batch]
    # Even batches repeat two of the 26 samples.
    assert set(seen) == set(range(SAMPLES)), folder
    assert len(seen) == (SAMPLES if joins else SAMPLES + 2)
