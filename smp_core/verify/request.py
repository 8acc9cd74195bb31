"""Request: what `smp verify` asks of one process that runs the user's training, in an
environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

VARIABLE = "SMP_VERIFY"
"""The environment variable that holds a request as JSON. Set in the processes that `smp
verify` starts."""

Role = Literal["look", "ranks", "one process"]


@dataclass(frozen=True)
class Request:
    """A run of the user's training that is to be recorded.

    Attributes:
        role: "look" ends where the strategy or accelerator is made, and tells its
            degrees; "ranks" is one rank of a layout; "one process" trains on the
            batches that those ranks read, joined.
        out: the folder that each process writes its record into.
        steps: optimizer steps.
        ranks: processes of the layout; for "one process", of the layout that it is
            compared with.
        knobs: of the layout, in place of the script's.
        float64: whether parameters, batches and constants are float64.
        cpu: whether devices are left alone.
        keep_dropout: whether dropout stays as the script has it.
        batches: for "one process": the folder of the record whose batches it trains on.
        one_by_one: for "one process": whether it takes the ranks' batches one after
            another, as micro-batches, and not joined into one.
    """

    role: Role
    out: str
    steps: int = 3
    ranks: int = 1
    knobs: Mapping[str, Any] = field(default_factory=dict)
    float64: bool = False
    cpu: bool = True
    keep_dropout: bool = False
    batches: str = ""
    one_by_one: bool = False

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries this request."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def folder(self) -> Path:
        return Path(self.out)


def requested() -> Request | None:
    """Return the request that this process was started with; None outside of `smp
    verify`."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Request(**json.loads(text))
