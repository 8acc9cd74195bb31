"""The engine: everything about one model is decided once, then done once.

``decide`` (with the smallest degree that fits by auto_degree) settles every knob by the rules of each subject and
returns a Plan; ``parallelize_model`` (conversions) does what the plan says, in the one order that works;
``adopt_sharded_model`` does the rest for a model that is sharded already; a ParallelModel is the handle that a
training works with. ``parallelize`` and ``build_mesh``, which call all of these in turn, stand in smp_core/entry.py;
they may be imported from here too, as scripts do that train without a face.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.engine.adoption import adopt_sharded_model
    from smp_core.engine.auto_degree import decide_with_smallest_degree, missed, plans_of_all_degrees, smallest_layout
    from smp_core.engine.averaging import RankWeights, ShardedAverage, fill, take_written
    from smp_core.engine.conversions import mesh_of, parallelize_model
    from smp_core.engine.decide import decide_activations, decide_pipeline
    from smp_core.engine.layout_rules import settle_layout
    from smp_core.engine.parallel_model import ParallelModel
    from smp_core.engine.subjects import SUBJECTS, lines_of_subjects

_PLACES = {
    "adopt_sharded_model": "adoption",
    "decide_activations": "decide",
    "decide_pipeline": "decide",
    "decide_with_smallest_degree": "auto_degree",
    "fill": "averaging",
    "lines_of_subjects": "subjects",
    "mesh_of": "conversions",
    "missed": "auto_degree",
    "parallelize_model": "conversions",
    "ParallelModel": "parallel_model",
    "plans_of_all_degrees": "auto_degree",
    "RankWeights": "averaging",
    "settle_layout": "layout_rules",
    "ShardedAverage": "averaging",
    "smallest_layout": "auto_degree",
    "SUBJECTS": "subjects",
    "take_written": "averaging",
}

__all__ = [
    "adopt_sharded_model",
    "decide_activations",
    "decide_pipeline",
    "decide_with_smallest_degree",
    "fill",
    "lines_of_subjects",
    "mesh_of",
    "missed",
    "parallelize_model",
    "ParallelModel",
    "plans_of_all_degrees",
    "RankWeights",
    "settle_layout",
    "ShardedAverage",
    "smallest_layout",
    "SUBJECTS",
    "take_written",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name in ("build_mesh", "parallelize"):  # of the floor above, for who trains without a face
        return getattr(import_module("smp_core.entry"), name)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
