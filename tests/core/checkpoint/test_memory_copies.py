"""Copies of shards on other nodes: the right bytes at any sizes, and the pace at which they are sent."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.checkpoint import memory_copies
from smp_core.checkpoint.memory_copies import PIECE_BYTES, Pace, exchange_copies, pieces
from smp_core.checkpoint.memory_tier import MemoryTier
from smp_core.compat import collective_timeout
from tests.core.checkpoint.states import sharded_state
from tests.harness import run_ranks

LIMIT = 1800.0  # seconds for which ranks wait for one another


class Clock:
    """A clock that moves when somebody rests."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Rests(threading.Event):
    """Stands for the event that ends rests: notes them, and moves the clock instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self.seconds.append(timeout)
            self.clock.time += timeout
        return self.is_set()


def paced(interval: float, bytes_per_second: int) -> tuple[Pace, Rests]:
    """Return a pace after two saves, and what it rests."""
    clock = Clock()
    pace, rests = Pace(LIMIT, clock), Rests(clock)
    pace._hurries = rests
    pace.begin_save()
    pace.learn(bytes_per_second, 1.0)
    clock.time += interval
    pace.begin_save()
    return pace, rests


def test_the_first_copy_has_no_rests_and_tells_the_speed_of_the_link() -> None:
    pace = Pace(LIMIT, Clock())
    pace.begin_save()
    assert (pace.duration(1 << 30), pace.piece_bytes) == (0.0, PIECE_BYTES)
    pace.learn(0, 1.0)
    assert pace.piece_bytes == PIECE_BYTES, "a rank that sends and takes nothing learns nothing"
    pace.learn(1 << 30, 1.0)
    pace.learn(1, 1.0)  # sent while training used the link
    assert pace.piece_bytes == int((1 << 30) * 0.004)


def test_pieces_are_neither_tiny_nor_larger_than_messages_of_a_free_link() -> None:
    sizes = [paced(1.0, bytes_per_second)[0].piece_bytes for bytes_per_second in (1000, 10**9, 10**13)]
    assert sizes == [256 << 10, 4 * 10**6, PIECE_BYTES]


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [
        (2.0, 1.0),  # half of the time until the next save
        (1000.0, 20.0),  # ten times what it takes without rests: a state is to be complete soon
        (0.0, 0.0),
    ],
)
def test_a_copy_ends_before_the_next_save(interval: float, seconds: float) -> None:
    pace, _ = paced(interval, bytes_per_second=10**6)
    assert pace.duration(2 * 10**6) == seconds


def test_ranks_without_a_copy_do_not_give_up_while_others_send_theirs() -> None:
    """They wait at the commit, for as long as the run's timeout: 15 s here, and half of the interval is 500."""
    pace, _ = paced(1000.0, bytes_per_second=10**6)
    pace._limit = 15.0
    assert pace.duration(2 * 10**6) == 3.75


def test_rests_are_counted_from_the_beginning_and_end_when_somebody_waits() -> None:
    """A piece that took long shortens the rest after it; one that came late is followed by none."""
    pace, rests = paced(interval=100.0, bytes_per_second=10**6)
    began = pace.clock()
    pace.rest(began + 0.5)
    rests.clock.time += 0.4  # a piece
    pace.rest(began + 1.0)
    rests.clock.time += 5.0
    pace.rest(began + 1.5)
    pace.rest(began + 1000.0)
    assert rests.seconds == pytest.approx([0.5, 0.1, 1.0]), "and never so long that the neighbour gives up"
    pace.hurry()
    pace.rest(began + 1000.0)
    assert len(rests.seconds) == 3
    pace.begin_save()
    pace.rest(began + 1000.0)
    assert len(rests.seconds) == 4, "the next save is not in a hurry"


SIZES = [3_000_001, 700_000, 0, 1]  # bytes of each rank's file, of four nodes of one rank


def content(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (SIZES[rank],), dtype=torch.uint8, generator=generator)


def exchanged(interval: float) -> tuple[bool, list[int], float]:
    """Send this rank's bytes to the next one, twice: without rests, and at a pace; whether they came, the sizes of
    the pieces, and the rests in all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % world, (rank - 1) % world
    pace, rests = paced(interval, bytes_per_second=10**6)
    fast = Pace(LIMIT)
    is_right = True
    for each, piece_bytes in ((fast, PIECE_BYTES), (pace, 256 << 10)):
        taken = torch.zeros(SIZES[source], dtype=torch.uint8)
        sent = pieces(content(rank), piece_bytes)
        exchange_copies(sent, to, pieces(taken, piece_bytes), source, dist.group.WORLD, each)
        is_right = is_right and torch.equal(taken, content(source))
    return is_right, [len(piece) for piece in sent], sum(rests.seconds)


def test_copies_of_unequal_sizes_arrive_at_any_pace() -> None:
    found = run_ranks(exchanged, 4, 60.0)
    assert [is_right for is_right, _, _ in found] == [True] * 4
    assert [sum(sizes) for _, sizes, _ in found] == SIZES
    assert max(size for _, sizes, _ in found for size in sizes) == 256 << 10
    # The clock stands still but for rests, of at most 1 s. Ranks 0 and 1 send or take 12 pieces in 30 s, rank 2 three
    # in 7 s, and rank 3 one.
    assert [seconds for _, _, seconds in found] == [11.0, 11.0, 2.0, 0.0]


def left_alone(limit: float) -> str:
    """Exchange with a rank that does not come; the error."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
    error = ""
    if dist.get_rank() == 0:
        try:
            exchange_copies(pieces(content(0), 1 << 20), 1, pieces(content(1), 1 << 20), 1, group, Pace(limit))
        except RuntimeError as raised:
            error = str(raised)
    dist.barrier()
    return error


def test_a_neighbour_that_is_gone_ends_the_exchange() -> None:
    errors = run_ranks(left_alone, 2, 2.0)
    assert errors[0] and not errors[1]


class UntilSomebodyWaits(threading.Event):
    """Stands for the event that ends rests, and has no limit."""

    rests = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.rests += 1
        assert super().wait(240), "nobody has waited for the save"
        return True


def waited_for(folder: str) -> tuple[int, int]:
    """Keep two states, the second one's copy at the slowest pace, and wait for it; its step, and the rests."""
    with mock.patch.object(memory_copies, "_LEAST_PIECE_BYTES", 64):
        kept = MemoryTier(1, folder, [[0], [1]], posed=True, layout="")
        kept.leave("")
        kept.begin(0)
        kept.save(sharded_state(dist.get_world_size(), seed=1), 1, {}, None)
        pace, rests = kept._saver._copies.pace, UntilSomebodyWaits()
        assert timedelta(seconds=pace._limit) == collective_timeout()
        pace._bytes_per_second, pace._save_began, pace._hurries = 1.0, -1e9, rests
        kept.save(sharded_state(dist.get_world_size(), seed=2), 2, {}, None)
        kept.before_update()
        kept._saver.wait()
    found = kept.find()
    assert found is not None
    return found.step, rests.rests


def test_whoever_waits_for_a_save_ends_the_rests_of_its_copy(tmp_path: Path) -> None:
    for step, rests in run_ranks(waited_for, 2, str(tmp_path / "disk"), env={"SMP_MEMORY_FOLDER": str(tmp_path)}):
        assert step == 2
        assert rests > 0, "there was nothing to end"
