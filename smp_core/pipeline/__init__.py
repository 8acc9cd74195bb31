"""Pipeline stages: a model's blocks dealt out to stretches of ranks
(docs/pipeline-parallelism.md).

The rules place blocks on stages; ``leave_out_other_stages`` (stage) makes a model of
one stage's layers; Pipeline (step) runs the user's step in micro-batches, in the order
of plan/schedules, with messages between stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.pipeline.batches import (
        SameBatches as SameBatches,
        digest_of as digest_of,
        split_batch as split_batch,
    )
    from smp_core.pipeline.messages import Format as Format, Messages as Messages
    from smp_core.pipeline.randomness import StepSeeds as StepSeeds
    from smp_core.pipeline.rehearsal import rehearse as rehearse
    from smp_core.pipeline.results import (
        is_number as is_number,
        loss_of as loss_of,
        mean_of as mean_of,
    )
    from smp_core.pipeline.rules import PIPELINE_PARALLELISM as PIPELINE_PARALLELISM
    from smp_core.pipeline.stage import leave_out_other_stages as leave_out_other_stages
    from smp_core.pipeline.stand_ins import Played as Played, played_of as played_of
    from smp_core.pipeline.states import states_of_all_stages as states_of_all_stages
    from smp_core.pipeline.step import (
        Beside as Beside,
        Pipeline as Pipeline,
        Within as Within,
    )
    from smp_core.pipeline.tied import TiedGradients as TiedGradients
    from smp_core.pipeline.times import (
        Computation as Computation,
        Direction as Direction,
        draw_timeline as draw_timeline,
        idle_shares as idle_shares,
        unmeasured as unmeasured,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
