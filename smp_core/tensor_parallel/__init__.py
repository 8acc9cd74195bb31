"""Tensor parallelism: layers over several ranks, with sequence parallelism (docs/tensor-parallelism.md).

``apply_tensor_parallel`` (apply) splits the layers of a model as its plan says (roles), or as an inspection proposes
(inspection, trial), before anything is sharded. What is sent between the ranks of a layer is in operators, overlap and
fused.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.tensor_parallel.apply import apply_tensor_parallel
    from smp_core.tensor_parallel.inspection import Inspected, inspect
    from smp_core.tensor_parallel.operators import TensorAxis
    from smp_core.tensor_parallel.rules import TENSOR_PARALLELISM, require_tensor_degree
    from smp_core.tensor_parallel.split_model import SplitModel
    from smp_core.tensor_parallel.whole_gradients import WholeGradients

_PLACES = {
    "apply_tensor_parallel": "apply",
    "inspect": "inspection",
    "Inspected": "inspection",
    "require_tensor_degree": "rules",
    "SplitModel": "split_model",
    "TENSOR_PARALLELISM": "rules",
    "TensorAxis": "operators",
    "WholeGradients": "whole_gradients",
}

__all__ = [
    "apply_tensor_parallel",
    "inspect",
    "Inspected",
    "require_tensor_degree",
    "SplitModel",
    "TENSOR_PARALLELISM",
    "TensorAxis",
    "WholeGradients",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
