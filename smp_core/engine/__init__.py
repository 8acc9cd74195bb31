"""The engine: everything about one model is decided once, then done once.

``decide`` (with the smallest degree that fits by auto_degree) settles every knob by the
rules of each subject and returns a Plan; ``parallelize_model`` (conversions) does what
the plan says, in the one order that works; ``adopt_sharded_model`` does the rest for a
model that is sharded already; a ParallelModel is the handle that a training works with.
``parallelize`` and ``build_mesh``, which call all of these in turn, stand in
smp_core/entry.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.engine.adoption import adopt_sharded_model as adopt_sharded_model
    from smp_core.engine.auto_degree import (
        decide_with_smallest_degree as decide_with_smallest_degree,
        missed as missed,
        plans_of_all_degrees as plans_of_all_degrees,
        smallest_layout as smallest_layout,
    )
    from smp_core.engine.averaging import (
        RankWeights as RankWeights,
        ShardedAverage as ShardedAverage,
        fill as fill,
        take_written as take_written,
    )
    from smp_core.engine.conversions import (
        parallelize_model as parallelize_model,
    )
    from smp_core.engine.decide import (
        decide_activations as decide_activations,
        decide_pipeline as decide_pipeline,
        knobs_of_next_run as knobs_of_next_run,
        lines_of_subjects as lines_of_subjects,
        settle_layout as settle_layout,
    )
    from smp_core.engine.parallel_model import ParallelModel as ParallelModel
    from smp_core.engine.subjects import SUBJECTS as SUBJECTS
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
