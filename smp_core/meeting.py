"""Whether all ranks came to the same call, before a collective that scripts make on one rank by mistake.

`if rank == 0: model.save_pretrained(...)` is right with whole models and a hang with sharded ones. So calls like this
one meet first, in the store that keeps the signs of life (smp_core/liveness.py): the first rank writes where it is, the
last one says that all are there, and one that is somewhere else (at another such call, at the end of its process) says
so to all. A rank that waits also looks at the next one: whether that one lives, and whether it has begun a forward pass
that it cannot end alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

_END = "the end of its process"
# Signs of life of a rank's own without one of the next rank's: far more than a busy machine makes of it.
_SILENCE = 40


class Meetings:
    """The meetings of one rank with all others.

    Attributes:
        forwards: forward passes begun that need all of ``peers``; counted by whoever makes them collective.
        peers: the ranks that make forward passes together with this one.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, interval: float) -> None:
        self.rank, self.world_size, self.interval = rank, world_size, interval
        self.forwards = 0
        self.peers: Sequence[int] = ()
        self._store = store
        self._held = 0
        self._over = False

    def meet(self, place: str) -> None:
        """Wait until every rank is at ``place``. Collective.

        Args:
            place: the call as a user types it, ``"model.save_pretrained(...)"``; the same on all ranks.

        Raises:
            RuntimeError: a rank is at another place, has ended, was lost or goes on with the training; on all ranks
                that wait.
        """
        if self._over:
            return
        self._held += 1
        key = f"meeting/{self._held}"
        try:
            if not self._arrive(key, place):
                self._wait(key, place)
            said = self._store.get(f"{key}/verdict").decode()
        except (dist.DistError, ConnectionError):
            return  # the store went away with rank 0; the collective that comes next says so
        if said != "all":
            raise RuntimeError(said)

    def leave(self) -> None:
        """Say to those that wait, now or later, that this rank comes to no further meeting. Does not wait."""
        if self._over:
            return
        self._over = True
        try:
            self._arrive(f"meeting/{self._held + 1}", _END)
        except (dist.DistError, RuntimeError, ConnectionError):
            return  # nobody is left to tell

    def _arrive(self, key: str, place: str) -> bool:
        """Write where this rank is. Returns whether that settles the meeting."""
        first, rank = json.loads(self._store.compare_set(f"{key}/first", "", json.dumps([place, self.rank])))
        verdict = ""
        if first != place:
            verdict = _apart(self.rank, place, rank, first) if first == _END else _apart(rank, first, self.rank, place)
        elif self._store.add(f"{key}/arrived", 1) == self.world_size:
            verdict = "all"
        if verdict:
            self._store.set(f"{key}/verdict", verdict)
        return bool(verdict)

    def _wait(self, key: str, place: str) -> None:
        pause, before, since = 0.001, -1, 0
        while not self._store.check([f"{key}/verdict"]):
            time.sleep(pause)
            pause = min(2 * pause, self.interval / 4)
            rank = (self.rank + 1) % self.world_size
            ours, theirs = (json.loads(self._store.get(f"beat/{number}")) for number in (self.rank, rank))
            if rank in self.peers and theirs["forwards"] > self.forwards:
                self._store.set(f"{key}/verdict", _apart(self.rank, place, rank, "the model's next forward pass"))
            elif theirs["beats"] != before:
                before, since = theirs["beats"], ours["beats"]
            elif ours["beats"] - since > _SILENCE:
                lost = f"rank {rank} was lost: it gives no sign of life, and rank {self.rank} waits for it at {place}"
                self._store.set(f"{key}/verdict", lost)


def _apart(rank: int, call: str, other: int, place: str) -> str:
    return (
        f"rank {rank} is at {call} and rank {other} at {place}: every rank has to make this call, because each holds a "
        "part of the model; take it out of `if accelerator.is_main_process:` (files are written by rank 0 alone)"
    )
