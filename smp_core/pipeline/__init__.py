"""Pipeline stages: a model's blocks dealt out to stretches of ranks (docs/pipeline-parallelism.md).

The rules place blocks on stages; ``leave_out_other_stages`` (stage) makes a model of one stage's layers; Pipeline
(step) runs the user's step in micro-batches, in the order of plan/schedules, with messages between stages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.pipeline.batches import SameBatches, split_batch
    from smp_core.pipeline.messages import Format, Messages
    from smp_core.pipeline.randomness import StepSeeds
    from smp_core.pipeline.rehearsal import rehearse
    from smp_core.pipeline.results import is_number, loss_of, mean_of
    from smp_core.pipeline.rules import PIPELINE_PARALLELISM
    from smp_core.pipeline.stage import leave_out_other_stages
    from smp_core.pipeline.stand_ins import Played, played_of
    from smp_core.pipeline.states import states_of_all_stages
    from smp_core.pipeline.step import Pipeline, Within
    from smp_core.pipeline.tied import TiedGradients
    from smp_core.pipeline.times import Computation, Direction, draw_timeline, idle_shares, unmeasured

_PLACES = {
    "Computation": "times",
    "Direction": "times",
    "draw_timeline": "times",
    "Format": "messages",
    "idle_shares": "times",
    "is_number": "results",
    "leave_out_other_stages": "stage",
    "loss_of": "results",
    "mean_of": "results",
    "Messages": "messages",
    "Pipeline": "step",
    "PIPELINE_PARALLELISM": "rules",
    "Played": "stand_ins",
    "played_of": "stand_ins",
    "rehearse": "rehearsal",
    "SameBatches": "batches",
    "split_batch": "batches",
    "states_of_all_stages": "states",
    "StepSeeds": "randomness",
    "TiedGradients": "tied",
    "unmeasured": "times",
    "Within": "step",
}

__all__ = [
    "Computation",
    "Direction",
    "draw_timeline",
    "Format",
    "idle_shares",
    "is_number",
    "leave_out_other_stages",
    "loss_of",
    "mean_of",
    "Messages",
    "Pipeline",
    "PIPELINE_PARALLELISM",
    "Played",
    "played_of",
    "rehearse",
    "SameBatches",
    "split_batch",
    "states_of_all_stages",
    "StepSeeds",
    "TiedGradients",
    "unmeasured",
    "Within",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
