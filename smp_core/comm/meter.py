"""Bytes and seconds per kind of collective and class of link.

Owns the accounting only; the communication objects in this package call it. Bytes are
those that *leave this rank*: exact for point-to-point stages, and for a library's own
collective the bytes of the ring algorithm over the group's rank order (NCCL's and
gloo's default for large messages), where every rank sends to its right neighbour:

    all-gather, reduce-scatter: (g - 1) / g * M      all-reduce: 2 (g - 1) / g * M      broadcast: M (all but the last)

with g ranks and M bytes of the full tensor. A link class is "intra" (both ends on one
node) or "inter". Seconds are wall time on the CPU and time between two recorded events
on an accelerator; the events are read only when figures are asked for, so that counting
never waits for the device. Of a collective that is started and waited for apart, they
are those of starting it and of waiting: what it took beyond the work done in between.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch

from smp_core.outside import changed
from smp_core.topology import Topology

LinkClass = Literal["intra", "inter"]
LINK_CLASSES: tuple[LinkClass, ...] = ("intra", "inter")

_RING_FACTOR = {
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "amax_all_reduce": 2.0,  # FP8 scales
    "router_all_reduce": 2.0,  # counts of experts' tokens
    "adafactor_all_reduce": 2.0,  # column factors, and norms
    # keys and values of context parallelism, and their gradients
    "context_gather": 1.0,
    "context_reduce": 1.0,
    # activations of tensor parallelism, and their gradients
    "tensor_all_gather": 1.0,
    "tensor_reduce_scatter": 1.0,
    "tensor_all_reduce": 2.0,
}


Events = tuple[torch.Event, torch.Event]


@dataclass
class _Tally:
    calls: int = 0
    seconds: float = 0.0
    bytes_: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(LINK_CLASSES, 0.0)
    )
    # (start, end) events of an accelerator, not read yet
    events: list[Events] = field(default_factory=list)


# Pairs of events of a tally after which those that are over are read, without waiting.
_MANY = 1024


class CommMeter:
    """Counts what this rank sends, per collective kind and link class, step by step.

    What belongs to no optimizer step (evaluation) is kept apart: :meth:`outside_steps`.

    Args:
        topology: which rank sits on which node.
        rank: this process's global rank.
        device_type: ``"cpu"`` or an accelerator's type; decides how seconds are taken.
        enabled: with ``False`` every call is a no-op and all figures stay empty.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        device_type: str = "cpu",
        *,
        enabled: bool = True,
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.enabled = enabled
        self._on_device = device_type != "cpu"
        # Of the present step, of what belongs to none, and of the last closed one.
        self._step: defaultdict[tuple[str, str], _Tally] = defaultdict(_Tally)
        self._outside: defaultdict[tuple[str, str], _Tally] = defaultdict(_Tally)
        self._current = self._step
        self._last: dict[tuple[str, str], _Tally] = {}
        # Bytes by kind and link of all closed steps.
        self._total: dict[str, float] = defaultdict(float)
        self._spare: list[Events] = []  # recorded again by later collectives
        self.steps = 0
        # The links of each list of ranks, found once.
        self._rings: dict[int, tuple[Sequence[int], LinkClass, LinkClass]] = {}

    @contextlib.contextmanager
    def ring(
        self, kind: str, ranks: Sequence[int], full_bytes: int, *, new_call: bool = True
    ) -> Iterator[None]:
        """Count one collective that the library runs as a ring over ``ranks`` (global,
        in group order).

        Args:
            kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``,
                ``"context_gather"`` or ``"context_reduce"``.
            full_bytes: bytes of the unsharded tensor (gathered, or to be reduced).
            new_call: ``False`` for the second stage of one collective, so that it
                counts as one call.
        """
        if not self.enabled or len(ranks) == 1:
            yield
            return
        # Bytes are known beforehand, seconds when it is over.
        sent = _RING_FACTOR[kind] * full_bytes * (len(ranks) - 1) / len(ranks)
        slowest, to_right = self._links_of(ranks)
        with self._timed(kind, slowest, new_call):
            yield
        self._current[kind, to_right].bytes_[to_right] += sent

    def _links_of(self, ranks: Sequence[int]) -> tuple[LinkClass, LinkClass]:
        """Return the class of a ring's slowest link, to which its time belongs on every
        rank, and of the link that this rank sends over. Asked in every collective, and
        found once for each group's list of ranks."""
        known = self._rings.get(id(ranks))
        if known is None or known[0] is not ranks:
            right = ranks[(ranks.index(self.rank) + 1) % len(ranks)]
            slowest: LinkClass = (
                "inter" if self.topology.spans_nodes(ranks) else "intra"
            )
            # The list is kept with its id, which another list could have later.
            known = ranks, slowest, self._link(right)
            if len(self._rings) < _MANY:
                self._rings[id(ranks)] = known
        return known[1], known[2]

    @contextlib.contextmanager
    def point_to_point(
        self,
        kind: str,
        sends: Sequence[tuple[int, int]],
        link: LinkClass,
        *,
        new_call: bool = True,
    ) -> Iterator[None]:
        """Count one stage made of messages.

        Args:
            sends: (destination's global rank, bytes) of every message this rank sends.
            link: the class the stage's time belongs to.
            new_call: ``False`` for the second stage of one collective, so that it
                counts as one call.
        """
        if not self.enabled:
            yield
            return
        with self._timed(kind, link, new_call):
            yield
        # Each message counts for the link that it takes.
        for destination, n_bytes in sends:
            self._current[kind, self._link(destination)].bytes_[
                self._link(destination)
            ] += n_bytes

    def close_step(self) -> None:
        """End the present step: what was counted since the last call becomes
        :meth:`per_step`'s answer."""
        for tally in self._last.values():  # nobody has asked for their seconds
            self._spare += tally.events
        self._last = dict(self._step)
        self._step.clear()
        # Figures of the step become totals; its tallies stay until the next one closes.
        self.steps += 1
        for (kind, link), tally in self._last.items():
            self._total[f"{kind}/{link}_bytes"] += sum(tally.bytes_.values())

    def per_step(self) -> dict[str, float]:
        """Return the figures of the last closed step: ``{"all_gather/inter_bytes": ...,
        "all_gather/inter_seconds": ..., "all_gather/calls": ..., "inter_bytes": ...,
        "intra_bytes": ...}``; bytes sent by this rank, seconds."""
        return self._figures(self._last)

    def unfinished(self) -> dict[str, float]:
        """Return the same figures of the step that is still open."""
        return self._figures(self._step)

    def outside_steps(self) -> AbstractContextManager[None]:
        """Count what is sent inside as no part of an optimizer step: for an evaluation,
        also in the middle of a step."""
        return changed(self, _current=self._outside)

    def outside(self) -> dict[str, float]:
        """Return the figures, as those of :meth:`per_step`, of all that was sent inside
        :meth:`outside_steps`."""
        return self._figures(self._outside)

    def totals(self) -> dict[str, float]:
        """Return the bytes of all closed steps: ``{"all_gather/inter_bytes": ...}``."""
        return dict(self._total)

    def totals_by_link(self) -> dict[LinkClass, float]:
        """Return the bytes of all closed steps: ``{"intra": ..., "inter": ...}``."""
        totals: dict[LinkClass, float] = {}
        for link in LINK_CLASSES:
            totals[link] = sum(
                sent
                for name, sent in self._total.items()
                if name.endswith(f"/{link}_bytes")
            )
        return totals

    def _figures(self, tallies: Mapping[tuple[str, str], _Tally]) -> dict[str, float]:
        figures: dict[str, float] = {"intra_bytes": 0.0, "inter_bytes": 0.0}
        for (kind, link), tally in tallies.items():
            # Asking for figures waits for the device, closing a step does not.
            self._read(tally, wait=True)
            figures[f"{kind}/calls"] = figures.get(f"{kind}/calls", 0.0) + tally.calls
            figures[f"{kind}/{link}_seconds"] = tally.seconds
            figures[f"{kind}/{link}_bytes"] = tally.bytes_[link]
            figures[f"{link}_bytes"] += tally.bytes_[link]
        return figures

    def _read(self, tally: _Tally, wait: bool) -> None:
        """Add up the seconds of a tally's events, oldest first, as far as they are
        over."""
        # Events are over in the order in which they were recorded.
        over = list(tally.events)
        if not wait:
            over = list(itertools.takewhile(lambda events: events[1].query(), over))
        for start, end in over:
            end.synchronize()
            tally.seconds += start.elapsed_time(end) / 1e3
        self._spare += over
        del tally.events[: len(over)]

    def _link(self, other: int) -> LinkClass:
        return "intra" if self.topology.same_node(self.rank, other) else "inter"

    @contextlib.contextmanager
    def _timed(self, kind: str, link: LinkClass, new_call: bool) -> Iterator[None]:
        tally = self._current[kind, link]
        tally.calls += new_call
        if self._on_device:
            start, end = self._spare.pop() if self._spare else _new_events()
            start.record()
            yield
            end.record()
            tally.events.append((start, end))
            # Long steps would hold ever more events otherwise.
            if len(tally.events) % _MANY == 0:
                self._read(tally, wait=False)
        else:
            began = time.perf_counter()
            yield
            tally.seconds += time.perf_counter() - began


def _new_events() -> Events:
    return torch.Event(enable_timing=True), torch.Event(enable_timing=True)
