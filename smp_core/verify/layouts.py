"""Layouts to verify: read from text, or the script's own, shrunk to ranks that one
machine has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp_core.cluster import DEGREES
from smp_core.config import SmpConfig
from smp_core.verify.recorder import end_process
from smp_core.verify.request import Request

MOST_RANKS = 8
_LOOK = "look.json"
_KNOBS = ("shard_degree", *DEGREES.values())


@dataclass(frozen=True)
class Trial:
    """A layout on this machine.

    Attributes:
        knobs: of :class:`smp_core.config.SmpConfig`, in place of the script's.
        ranks: processes.
        ranks_per_node: ranks that pose as one node; None: all are on one.
    """

    knobs: Mapping[str, Any]
    ranks: int
    ranks_per_node: int | None = None

    @property
    def words(self) -> str:
        posed = (
            "" if self.ranks_per_node is None else f", {self.ranks_per_node} on a node"
        )
        knobs = " ".join(
            f"{name}={value}" for name, value in self.knobs.items() if value != 1
        )
        return f"{self.ranks} ranks{posed}: {knobs or 'each holds the whole model'}"


def read_layout(layout: str | Mapping[str, Any], ranks: int | None = None) -> Trial:
    """Read one layout: knobs, and beside them ``ranks`` and ``ranks_per_node``.

    Args:
        layout: "shard_degree=2 tensor_parallel_degree=2", or a mapping.
        ranks: where the layout gives none; default: twice the product of its degrees,
            at most 8, so that there are replicas.

    Raises:
        ValueError: no ``knob=value``, an unknown knob, a value that is not allowed,
            degrees that do not fit the ranks.
    """
    # Extra words beside the knobs belong to the run, not to the configuration.
    given = dict(layout) if isinstance(layout, Mapping) else _pairs(layout)
    per_node = given.pop("ranks_per_node", None)
    asked = given.pop("ranks", ranks)
    config = SmpConfig.from_dict(given)
    # A shard degree that nothing gives is the smallest that the other axes allow.
    degrees = {name: getattr(config, name) for name in _KNOBS}
    shard = degrees["shard_degree"]
    if shard == "auto" and "shard_degree" not in given:
        shard = given["shard_degree"] = max(1, degrees["context_parallel_degree"])
    # Ranks that hold one copy of the model; a word for the shard degree is counted as
    # 2.
    one_copy = config.tensor_parallel_degree * config.pipeline_parallel_degree
    one_copy *= shard if isinstance(shard, int) else 2
    # Two replicas where eight ranks have room for them.
    if asked is None:
        size = min(max(2 * one_copy, 2), MOST_RANKS)
        size = one_copy * max(1, size // one_copy)
    else:
        size = _count("ranks", asked)
    if size % one_copy and isinstance(shard, int):
        raise ValueError(
            f"layout {layout!r}: degrees of together {one_copy} do not divide ranks={size}; write ranks={one_copy} or "
            f"{2 * one_copy} beside them"
        )
    if size > 4 * MOST_RANKS:
        raise ValueError(
            f"layout {layout!r}: {size} ranks on one machine; allowed: up to {4 * MOST_RANKS}"
        )
    # "node" shows something only where there are two of them.
    if shard == "node" and per_node is None:
        per_node = max(1, size // 2)
    # Axes that are not given are off, whatever the script has.
    knobs = {**dict.fromkeys(_KNOBS[1:], 1), **given}
    return Trial(
        knobs, size, None if per_node is None else _count("ranks_per_node", per_node)
    )


def _pairs(text: str) -> dict[str, Any]:
    found = {}
    for pair in text.replace(",", " ").split():
        # Commas or blanks between pairs.
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise ValueError(
                f"layout {text!r}: {pair!r} is no knob with its value; write it as shard_degree=2"
            )
        found[name] = value
    return found


def _count(name: str, value: Any) -> int:
    if not str(value).isdigit() or int(value) < 1:
        raise ValueError(f"{name}={value!r}: write a number from 1 up")
    return int(value)


def tell_degrees(request: Request, config: SmpConfig, world: int) -> None:
    """Write the degrees that a script asks for, and end this process.

    Args:
        world: ranks that it would have; 0: not known.
    """
    # Asked, not decided: deciding needs the model.
    degrees = {name: getattr(config, name) for name in _KNOBS}
    request.folder.mkdir(parents=True, exist_ok=True)
    (request.folder / _LOOK).write_text(
        json.dumps({**degrees, "world": world}), encoding="utf-8"
    )
    end_process()


def shrunk(request: Request) -> Trial:
    """Return the layout that a script asked for in a process with the role "look", on
    2, 4 or 8 ranks."""
    asked = json.loads((request.folder / _LOOK).read_text(encoding="utf-8"))
    return shrink({name: asked[name] for name in _KNOBS}, asked["world"])


def shrink(degrees: Mapping[str, Any], world: int) -> Trial:
    """Return a layout with each degree above 1 at 2, and replicas where there would be
    any and 8 ranks have room.

    Args:
        degrees: as a script asks for them; the shard degree may be a word.
        world: ranks that the script would have; 0 where it leaves that to its launcher.
    """
    # Every axis but the shards: 2 shows all that more ranks would.
    small = {name: 2 if degrees[name] > 1 else 1 for name in _KNOBS[1:]}
    # Shards: the context ranks are among them.
    shard, context = degrees["shard_degree"], small["context_parallel_degree"]
    if shard == "world":
        small_shard, replicas = max(2, context), 1
    elif isinstance(shard, int):
        # World divided by one copy of the model: its replicas.
        outside = world // math.prod(
            [
                shard,
                degrees["tensor_parallel_degree"],
                degrees["pipeline_parallel_degree"],
            ]
        )
        small_shard = context * (2 if shard > degrees["context_parallel_degree"] else 1)
        replicas = 1 if outside == 1 and shard > 1 else 2
    else:
        small_shard, replicas = max(2, context), 2
    # Shards give way before anything else does where eight ranks are too few; then the
    # replicas.
    one_copy = (
        small_shard
        * small["tensor_parallel_degree"]
        * small["pipeline_parallel_degree"]
    )
    while one_copy > MOST_RANKS and small_shard > context:
        one_copy, small_shard = one_copy // 2, small_shard // 2
    replicas = replicas if one_copy * replicas <= MOST_RANKS else 1
    return Trial({"shard_degree": small_shard, **small}, one_copy * replicas)
