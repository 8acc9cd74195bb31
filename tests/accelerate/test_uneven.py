"""Loaders that give some ranks more batches, and resumption that is given as nothing; in one process."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate_smp.trainer_memory import KeepsInMemory
from accelerate_smp.uneven import require_as_many_batches


def loader(samples: int, split: bool) -> SimpleNamespace:
    batches = BatchSampler(SequentialSampler(range(samples)), 8, drop_last=False)
    return SimpleNamespace(batch_sampler=BatchSamplerShard(batches, 4, 0, split_batches=split, even_batches=False))


def test_a_last_batch_that_does_not_reach_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"last batch of 2 samples into fewer parts than there are ranks \(4\)"):
        require_as_many_batches(loader(10, split=True))
    require_as_many_batches(loader(15, split=True))
    with pytest.raises(ValueError, match="deals 5 batches out to 4 ranks"):
        require_as_many_batches(loader(40, split=False))


def test_batches_of_unknown_number_are_left_to_the_watch() -> None:
    shard = loader(16, split=False)
    shard.batch_sampler.batch_sampler = iter([])
    require_as_many_batches(shard)


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_a_trainer_that_resumes_from_nothing_leaves_no_state(nothing: object) -> None:
    tier = mock.Mock()
    assert KeepsInMemory(mock.Mock(), tier).begin(nothing, lambda: None) == nothing
    tier.leave.assert_called_once_with("")
